"""The nine ways to make batches, on a causal model: steps, seconds, memory and losses, as Tables 2 to 6 of "Enhancing Training
Efficiency Using Packing with Flash Attention".

Every way trains the same model for one epoch from the same weights, twice where it fills rows: with the batch size of the
others, which makes fewer and larger updates, and with as many tokens an update as padding has, which makes as many updates.
The loss of an update is the mean over all of its supervised tokens, on all ranks.

    torchrun --nproc-per-node 8 -m ipu_packed_bert.experiments position_ids --data-dir DIR --full --model FOLDER
"""
from __future__ import annotations

import argparse
import ctypes
import gc
import json
import lzma
import os
import time
from pathlib import Path
from typing import Any, Dict, Iterator, List, NamedTuple, Optional, Sequence, Tuple

import numpy as np

from ipu_packed_bert.experiments import tables
from ipu_packed_bert.experiments.runner import Cell, Row, Runner
from pack_data.batching.plans import WAYS, BatchOptions
from pack_data.batching.properties import report
from pack_data.text.corpus import Document, documents
from pack_data.text.wordpiece import train_vocabulary

PADDED = "RandomSampling+Padding"  # what the others are compared with
# Ways whose batches are filled: they make fewer updates of bs x msl tokens.
FILLED = ("FixedLengthPacking", "FixedLengthPacking+PosID", "Multipack+PosID", "SortedPacking+PosID", "RandomPacking+PosID", "OptimalPacking+PosID")
SAME_UPDATES = ", as many updates"
HEADINGS = ("kernel", "positions", "isolated", "unbroken", "unsorted")


class Size(NamedTuple):
    training_examples: int  # of each data set, at most
    held_out_examples: int
    max_sequence_length: int  # tokens, msl; longer examples are cut
    batch_size: int  # bs
    hidden_size: int
    num_layers: int
    vocabulary_size: int  # trained on the training texts
    learning_rate: float


SIZES = {
    "quick": Size(48, 8, 128, 4, 32, 1, 1024, 3.0e-3),
    "default": Size(600, 100, 512, 4, 64, 2, 4096, 3.0e-3),
    "full": Size(20000, 500, 2048, 4, 1024, 16, 16384, 3.0e-4),
}


def describe(size: Size) -> str:
    return (f"{size.training_examples:,} examples of each data set, one epoch, bs {size.batch_size}, msl {size.max_sequence_length}; "
            f"Llama of hidden {size.hidden_size}, {size.num_layers} layer{'' if size.num_layers == 1 else 's'}, vocabulary {size.vocabulary_size}")


SUMMARY = (
    "Nine ways to make batches for a causal model on GSM8K and GPTeacher (gsm8k/ and gpteacher/ of --data-dir, else the embedded\n"
    "corpus): updates, seconds, tokens/s, peak memory, training and held-out loss, and the five properties, computed.\n\n"
    + "\n".join(f"{name}: {describe(size)}" for name, size in SIZES.items())
    + "\nUnder torchrun each process trains a share of every update; --model FOLDER takes a Hugging Face model and its tokenizer.")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", metavar="FOLDER", help="a causal Hugging Face model with its tokenizer, in place of the small new one")


def settings(options: Any) -> Dict[str, Any]:
    return {"size": list(SIZES[options.size]), "data_dir": str(options.data_dir), "model": options.model, "ranks": _ranks()}


# ---- data ------------------------------------------------------------------------------------------------------------------------

Texts = List[Tuple[str, str]]  # prompt and answer


class DataSet(NamedTuple):
    name: str
    training: Texts
    held_out: Texts


def data_sets(data_dir: Optional[Path], size: Size) -> List[DataSet]:
    """Raises ValueError where a file is missing."""
    if data_dir is None:
        lines = [("", line) for document in documents("embedded") for line in document.lines if len(line) > 40]
        return [_split("embedded", _shuffled(lines), size)]
    gsm8k = [[(record["question"], record["answer"]) for record in map(json.loads, _read(data_dir, f"gsm8k/{part}.jsonl.xz").splitlines())]
             for part in ("train", "test")]
    records = [record for part in ("roleplay", "codegen") for record in json.loads(_read(data_dir, f"gpteacher/{part}.json.xz"))]
    gpteacher = _shuffled([("\n".join(filter(None, (record["instruction"], record["input"]))), record["response"]) for record in records])
    return [DataSet("GSM8K", _shuffled(gsm8k[0])[:size.training_examples], _shuffled(gsm8k[1])[:size.held_out_examples]), _split("GPTeacher", gpteacher, size)]


def _read(data_dir: Path, name: str) -> str:
    path = data_dir / name
    if not path.exists():
        raise ValueError(f"{path}: no such file; --data-dir names the folder that has gsm8k/ and gpteacher/, without it the embedded corpus is used")
    with lzma.open(path, "rt", encoding="utf-8") as file:
        return file.read()


def _shuffled(texts: Texts) -> Texts:
    return [texts[index] for index in np.random.default_rng(5).permutation(len(texts))]


def _split(name: str, texts: Texts, size: Size) -> DataSet:
    return DataSet(name, texts[size.held_out_examples:][:size.training_examples], texts[:size.held_out_examples])


class Encoded(NamedTuple):
    """Examples as collators take them; every token but an example's first is predicted."""

    name: str
    training: List[Dict[str, np.ndarray]]
    held_out: List[Dict[str, np.ndarray]]
    vocabulary_size: int

    @property
    def lengths(self) -> np.ndarray:
        return np.array([len(example["input_ids"]) for example in self.training])


def encode(data: DataSet, size: Size, model: Optional[str]) -> Encoded:
    """[CLS] prompt [SEP] answer [SEP] in a vocabulary trained on the training texts, or as the model's tokenizer has it."""
    from ipu_packed_bert.padding_free.collators import examples_of

    if model:
        from transformers import AutoTokenizer

        tokenizer = AutoTokenizer.from_pretrained(model)
        parts = [[tokenizer(f"{prompt}\n{answer}")["input_ids"] + [tokenizer.eos_token_id] for prompt, answer in texts]
                 for texts in (data.training, data.held_out)]
        number = len(tokenizer)
    else:
        vocabulary = train_vocabulary([Document(data.name, [text for pair in data.training for text in pair])], size.vocabulary_size)
        first, end = vocabulary.ids["[CLS]"], vocabulary.ids["[SEP]"]
        parts = []
        for texts in (data.training, data.held_out):
            ids, lengths = vocabulary.encode([text for pair in texts for text in pair])
            pieces = iter(np.split(ids, np.cumsum(lengths)[:-1]))
            parts.append([[first, *prompt, end, *answer, end] if len(prompt) else [first, *answer, end] for prompt, answer in zip(pieces, pieces)])
        number = len(vocabulary)
    training, held_out = (examples_of([ids[:size.max_sequence_length] for ids in part]) for part in parts)
    return Encoded(data.name, training, held_out, number)


# ---- runs ------------------------------------------------------------------------------------------------------------------------


def options_of(variant: str, encoded: Encoded, size: Size, ranks: int, seed: int) -> BatchOptions:
    """bs x msl, or for as many updates one row of as many tokens as bs examples have on the mean."""
    if not variant.endswith(SAME_UPDATES):
        return BatchOptions(size.batch_size, size.max_sequence_length, ranks, seed)
    mean = int(round(size.batch_size * encoded.lengths.mean()))
    return BatchOptions(1, max(mean, int(encoded.lengths.max())), ranks, seed)


class Place(NamedTuple):
    device: Any
    rank: int
    ranks: int


def _ranks() -> int:
    return int(os.environ.get("WORLD_SIZE", "1"))


def place() -> Place:
    """This process's device; joins the others that torchrun started."""
    import torch

    rank, ranks = int(os.environ.get("RANK", "0")), _ranks()
    cuda = torch.cuda.is_available()
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0"))) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(device)
    if ranks > 1 and not torch.distributed.is_initialized():
        torch.distributed.init_process_group("nccl" if cuda else "gloo")
    return Place(device, rank, ranks)


def new_model(encoded: Encoded, size: Size, folder: Optional[str], where: Place, seed: int) -> Any:
    import torch
    from transformers import AutoModelForCausalLM, LlamaConfig

    torch.manual_seed(seed)
    if folder:
        half = torch.bfloat16 if where.device.type == "cuda" else torch.float32
        return AutoModelForCausalLM.from_pretrained(folder, torch_dtype=half, attn_implementation="sdpa").to(where.device)
    config = LlamaConfig(
        vocab_size=encoded.vocabulary_size, hidden_size=size.hidden_size, num_hidden_layers=size.num_layers,
        num_attention_heads=max(1, size.hidden_size // 64), intermediate_size=4 * size.hidden_size,
        max_position_embeddings=size.max_sequence_length * size.batch_size)
    return AutoModelForCausalLM.from_config(config, attn_implementation="sdpa").to(where.device)


def train(way: str, encoded: Encoded, size: Size, batch_options: BatchOptions, folder: Optional[str], where: Place, seed: int) -> Row:
    """One epoch, and what it cost; the same row on every rank but for seconds and memory."""
    import torch

    from ipu_packed_bert.padding_free.collators import Batches, PaddingCollator
    from ipu_packed_bert.padding_free.probe import check_no_leak
    from ipu_packed_bert.padding_free.update import accumulate, mean_loss, to_device

    model = new_model(encoded, size, folder, where, seed)
    batches = Batches(way, encoded.training, batch_options, model, rank=where.rank)
    if WAYS[way].padding_free:
        check_no_leak(model, longest=int(encoded.lengths.max()))
    network = model
    if where.ranks > 1:
        network = torch.nn.parallel.DistributedDataParallel(model, device_ids=[where.device] if where.device.type == "cuda" else None)
    optimizer = torch.optim.AdamW(model.parameters(), lr=size.learning_rate, betas=(0.9, 0.98), weight_decay=0.01)
    steps = len(batches)
    warmup = max(1, steps // 10)
    model.train()
    memory = PeakMemory(where.device)
    seconds = loss = 0.0
    tokens = 0
    for step, inputs in enumerate(batches):
        start = time.perf_counter()
        for group in optimizer.param_groups:
            group["lr"] = size.learning_rate * min((step + 1) / warmup, (steps - step) / max(1, steps - warmup))
        result = accumulate(network, [to_device(inputs, where.device)])
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        if where.device.type == "cuda":
            torch.cuda.synchronize()
        seconds += time.perf_counter() - start
        loss += result.loss * result.supervised_tokens
        tokens += result.supervised_tokens
    peak = memory.peak()
    held_out = sorted(encoded.held_out, key=lambda example: len(example["input_ids"]))
    held_out_loss = mean_loss(model, [PaddingCollator()(held_out[at:at + 8]) for at in range(0, len(held_out), 8)], where.device)
    real = int(encoded.lengths.sum())
    return {"updates": steps, "seconds": round(seconds, 4), "tokens": real, "tokens_per_second": real / seconds, "peak_memory_mib": peak,
            "training_loss": loss / tokens, "held_out_loss": held_out_loss}


class PeakMemory:
    """What a run adds to this process's memory at most, or has allocated on its CUDA device, MiB; None where neither is known."""

    def __init__(self, device: Any) -> None:
        import torch

        self._cuda = torch.cuda if device.type == "cuda" else None
        if self._cuda:
            self._cuda.reset_peak_memory_stats(device)
            return
        gc.collect()
        try:
            ctypes.CDLL(None).malloc_trim(0)  # what an earlier run freed goes back, else this one takes it and seems to need none
            Path("/proc/self/clear_refs").write_text("5")  # the peak starts anew (Linux, proc(5))
        except (AttributeError, OSError):  # another C library, another system
            pass
        self._start = self._read("VmRSS")

    @staticmethod
    def _read(name: str) -> Optional[float]:
        try:
            lines = Path("/proc/self/status").read_text(encoding="ascii", errors="replace").splitlines()
        except OSError:
            return None
        found = [line.split()[1] for line in lines if line.startswith(name + ":")]
        return int(found[0]) / 1024 if found else None

    def peak(self) -> Optional[float]:
        if self._cuda:
            return self._cuda.max_memory_allocated() / 2**20
        most = self._read("VmHWM")
        return most - self._start if most is not None and self._start is not None else None


# ---- the experiment --------------------------------------------------------------------------------------------------------------


def cells_of(data: Sequence[DataSet], seeds: int) -> List[Cell]:
    names = list(WAYS) + [way + SAME_UPDATES for way in FILLED]
    return [Cell(f"{each.name}: {name}", seed) for seed in range(1, seeds + 1) for each in data for name in names]


class Measure:
    """Cell -> its row, on every rank."""

    def __init__(self, options: Any) -> None:
        self.size, self._model = SIZES[options.size], options.model
        self.data = data_sets(options.data_dir, self.size)
        self.where = place()
        self._encoded: Dict[str, Encoded] = {}

    def encoded(self, name: str) -> Encoded:
        if name not in self._encoded:
            self._encoded[name] = encode(next(each for each in self.data if each.name == name), self.size, self._model)
        return self._encoded[name]

    def __call__(self, cell: Cell) -> List[Row]:
        name, variant = cell.variant.split(": ", 1)
        encoded = self.encoded(name)
        chosen = options_of(variant, encoded, self.size, self.where.ranks, cell.seed)
        way = variant.replace(SAME_UPDATES, "")
        return [{"data": name, "way": variant, **train(way, encoded, self.size, chosen, self._model, self.where, cell.seed)}]


def follow(options: Any) -> None:
    """What ranks other than 0 do: the cells that rank 0 says, until it says none."""
    measure = Measure(options)
    while True:
        cell = _said(None)
        if cell is None:
            return
        measure(cell)


def _said(cell: Optional[Cell]) -> Optional[Cell]:
    """Rank 0's cell, on all ranks."""
    import torch

    box: List[Any] = [None if cell is None else tuple(cell)]
    torch.distributed.broadcast_object_list(box, src=0)
    return None if box[0] is None else Cell(*box[0])


def run(options: Any, runner: Runner) -> None:
    measure = Measure(options)

    def on_all_ranks(cell: Cell) -> List[Row]:
        if measure.where.ranks > 1:
            _said(cell)
        return measure(cell)

    try:
        rows = runner.run(cells_of(measure.data, options.seeds), on_all_ranks)
    finally:
        if measure.where.ranks > 1:
            _said(None)
    runner.write_csv("runs.csv", rows)
    text = "\n".join(section(each.name, rows, measure) for each in measure.data)
    text += (f"\n{describe(measure.size)}; {options.seeds} seed{'' if options.seeds == 1 else 's'}, {measure.where.ranks} "
             f"process{'' if measure.where.ranks == 1 else 'es'}; {options.data_dir or 'embedded corpus'}; {tables.machine()}\n")
    runner.write("table.md", text)
    print("\n" + text)
    if options.plot:
        plot(rows, measure, runner.folder / "position_ids.png")
    print(f"{runner.folder}: runs.csv, table.md" + (", position_ids.png" if options.plot else ""))


def section(name: str, rows: Sequence[Row], measure: Measure) -> str:
    encoded = measure.encoded(name)
    mine = [row for row in rows if row["data"] == name]
    lines = []
    for variant in dict.fromkeys(row["way"] for row in mine):
        runs = [row for row in mine if row["way"] == variant]
        way = variant.replace(SAME_UPDATES, "")
        found = report(WAYS[way], encoded.lengths, options_of(variant, encoded, measure.size, measure.where.ranks, 1)).properties
        memory = [row["peak_memory_mib"] for row in runs if row["peak_memory_mib"] is not None]
        lines.append([
            variant, *("yes" if value else "no" for value in found), f"{runs[0]['updates']:,}",
            tables.spread([row["seconds"] for row in runs], 1), f"{np.mean([row['tokens_per_second'] for row in runs]):,.0f}",
            f"{np.mean(memory):,.0f}" if memory else "", tables.spread([row["training_loss"] for row in runs]),
            tables.spread([row["held_out_loss"] for row in runs])])
    head = ["way", *HEADINGS, "updates", "seconds", "tokens/s", "memory, MiB", "training loss", "held-out loss"]
    return (f"**{name}**: {len(encoded.training):,} examples of {encoded.lengths.mean():.0f} tokens on the mean, {encoded.lengths.max()} at most\n\n"
            + tables.markdown(head, lines))


def plot(rows: Sequence[Row], measure: Measure, path: Path) -> None:
    """Held-out loss over seconds, a point a way: the corner below on the left is the best."""
    from pack_data.plotting import new_figure, save

    figure, axes = new_figure(7.0 * len(measure.data), 5.0, columns=len(measure.data))
    for each, axis in zip(measure.data, axes):
        for number, (variant, x, y) in enumerate(_points(each.name, rows)):
            way = variant.replace(SAME_UPDATES, "")
            axis.plot([x], [y], "^" if variant.endswith(SAME_UPDATES) else "o", color=f"C{list(WAYS).index(way) % 10}", label=variant)
        axis.set_title(each.name)
        axis.set_xlabel("seconds of training")
        axis.set_ylabel("held-out loss a token")
        axis.grid(alpha=0.25)
    axes[-1].legend(fontsize=7)
    save(figure, path)


def _points(name: str, rows: Sequence[Row]) -> Iterator[Tuple[str, float, float]]:
    mine = [row for row in rows if row["data"] == name]
    for variant in dict.fromkeys(row["way"] for row in mine):
        runs = [row for row in mine if row["way"] == variant]
        yield variant, float(np.mean([row["seconds"] for row in runs])), float(np.mean([row["held_out_loss"] for row in runs]))
