"""Run every GPU path without a GPU: forward, backward and update on fake CUDA tensors (`tests.fakes.gpu`).

    python -m tests.gpu_dry                        # all paths, a line each
    python -m tests.gpu_dry --only configuration   # those whose name contains a word
    python -m tests.gpu_dry --json

A path is dispatched if no operator of forward, backward and update refuses its shapes, types and devices. Its memory,
the largest sum of live tensors in an update of two micro-batches, must fit the card. `waits` counts the moments of this
update at which the host waits for the device. The table is that of docs/gpu_paths.md.

Exit status 1: a path is not dispatched or does not fit; 2: bad usage.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from functools import partial
from pathlib import Path
from typing import Any, Callable, List, NamedTuple

import numpy as np
import torch
import transformers

from ipu_packed_bert.data.global_batches import GlobalBatches
from ipu_packed_bert.engine.host import HostEngine
from ipu_packed_bert.settings.config import Config
from ipu_packed_bert.settings.loading import load_config
from ipu_packed_bert.settings.schema import BatchConfig, DataConfig, EngineConfig, ModelConfig
from ipu_packed_bert.settings.shipped import config_file, shipped_names
from ipu_packed_bert.tasks import task_class
from ipu_packed_bert.tasks.inputs import Tokenizer
from ipu_packed_bert.tasks.pretraining import Pretraining
from pack_data.reading.fields import one_line
from padding_free.collators import PaddingFreeCollator, to_device
from padding_free.update import take_step
from tests.fakes.gpu import CannotPretend, FakeGpu
from tests.fine_tuning_files import MODEL, VOCABULARY, training_file
from tests.fine_tuning_files import tiny_config as tiny_task
from tests.packed_examples import fill_up, lay_out, random_packs, random_sequences, with_scales
from tests.update_batches import change

CARD = 80e9  # bytes of an H100
ROWS = 4
TINY = Config(
    data=DataConfig(max_sequence_length=128, max_sequences_per_pack=3, max_predictions_per_sequence=20),
    model=ModelConfig(
        vocabulary_size=211,
        hidden_size=128,
        num_layers=3,
        num_heads=2,
        intermediate_size=256,
        max_position_embeddings=128,
    ),
    batch=BatchConfig(micro_batch=ROWS, gradient_accumulation=4),
    engine=EngineConfig(kind="host", device="cuda"),
)


class Figures(NamedTuple):
    """The figures of one update of a path."""

    peak: int  # bytes
    waits: List[str]  # operators for which the host waits
    operators: int  # different ones


FINE_TUNING = ("squad", "single_label", "multi_label", "regression", "tokens")

# Runs an update on a fake GPU and resets its figures before.
Path_ = Callable[[FakeGpu], Any]

# All other paths are tests of `make gpu`, which has run on H100s (docs/gpu.md).
NOT_ON_GPU = (
    "layout: lamb, clipped, bias correction False",
    "layout: adamw, clipped, bias correction False",
    "layout: float32, gradients of rows alone",
)


def _seen(name):
    """Return where the values of a path have been compared with exact ones."""
    return "interpreted: on a CPU only" if name in NOT_ON_GPU else "run on an H100"


def random_update(config, rows):
    """Return an update of packs of random sequences in the sizes of a configuration."""
    slots = config.data.max_sequence_length
    depth = config.data.max_sequences_per_pack or 8
    rng = np.random.default_rng(0)
    lengths = rng.integers(5, slots // 2, rows * 2).tolist()
    packs = random_packs(rng, lengths, slots=slots, depth=depth)[:rows]
    sequences = random_sequences(rng, lengths=lengths, vocabulary=config.model.vocabulary_size)
    predictions = config.data.max_predictions_per_sequence + depth
    batch = lay_out(fill_up(packs, rows), sequences, slots=slots, depth=depth, predictions=predictions)
    return with_scales(batch, micro_batches=2, normalisation=config.loss.normalisation)


def _pretrain(config, gpu, *, alone=False):
    engine = HostEngine(config, Pretraining(config), packing_factor=2.0, device=gpu.DEVICE)
    batch = random_update(config, 2 * config.batch.micro_batch)
    if alone:
        engine.gradients(batch, alone=True)
    if config.model.num_layers < 12:
        engine.evaluate(batch)
    gpu.reset()
    assert engine.step(batch, 1e-3).finite


def fine_tuning(kind, precision, device):
    """Return the engine of a tiny fine-tuning task on a device, and its first batch."""
    with tempfile.TemporaryDirectory() as folder:
        training = training_file(Path(folder), kind)
        config = tiny_task(None, training, task=kind, engine={"precision": precision, "attention": "auto"})
        task = task_class(kind)(config, Tokenizer(VOCABULARY), MODEL)
    engine = HostEngine(config, task, packing_factor=2.0, device=device)
    return engine, GlobalBatches(task.packs, task.layout(config, 2.0)).first()


def _fine_tune(kind, precision, gpu):
    engine, batch = fine_tuning(kind, precision, gpu.DEVICE)
    gpu.reset()
    engine.step(batch, 1e-3)


# Family of Transformers -> settings; with what each adds to plain causal attention.
SIZES = dict(vocab_size=211, hidden_size=128, num_hidden_layers=2, num_attention_heads=4, intermediate_size=256)
CAUSAL = dict(SIZES, num_key_value_heads=2, max_position_embeddings=512, pad_token_id=0)
FAMILIES = {
    "Llama, grouped queries": lambda: transformers.LlamaConfig(**CAUSAL),
    "Mistral, window": lambda: transformers.MistralConfig(**CAUSAL, sliding_window=16),
    "Gemma2, soft cap": lambda: transformers.Gemma2Config(**CAUSAL, head_dim=32, sliding_window=16),
    "GPT-NeoX": lambda: transformers.GPTNeoXConfig(**SIZES),
}


def padding_free_model(family, dtype, device):
    """Return a tiny causal model of a family of Transformers on a device."""
    config = FAMILIES[family]()
    auto = transformers.AutoModelForCausalLM
    return auto.from_config(config, attn_implementation="padding_free", dtype=dtype).to(device)


def _padding_free(family, dtype, gpu):
    model = padding_free_model(family, dtype, gpu.DEVICE).train()
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    rng = np.random.default_rng(0)
    examples = [{"input_ids": rng.integers(1, 211, length)} for length in (70, 9, 33, 9)]
    collate = PaddingFreeCollator(model)
    # The first update probes the output layer.
    for _ in range(2):
        rows = [to_device(collate(examples), torch.device(gpu.DEVICE)) for _ in range(2)]
        gpu.reset()
        take_step(model, optimizer, rows, 1e-3)


def layout_configs():
    """Return the attention, precision and other settings of the host engine, with a tiny model."""
    variants = {}
    for precision in ("float32", "tf32", "bfloat16"):
        for attention in ("auto", "sdpa", "eager", "varlen"):
            engine = {"precision": precision, "attention": attention}
            variants[f"{precision}, attention {attention}"] = change(TINY, engine=engine)
    half = {"precision": "bfloat16"}
    variants["bfloat16, layers recomputed"] = TINY.changed("engine", **half, recompute_layers=True)
    variants["bfloat16, deterministic"] = TINY.changed("engine", **half, deterministic=True)
    variants["bfloat16, attention dropout"] = change(TINY, engine=half, model={"attention_dropout": 0.1})
    variants["bfloat16, mean over sequences"] = change(TINY, engine=half, loss={"normalisation": "sequence"})
    variants["bfloat16, no next sentence"] = change(TINY, engine=half, loss={"next_sentence": False})
    variants["bfloat16, unpacked rows"] = change(TINY, engine=half, data={"max_sequences_per_pack": 1})
    for name in ("lamb", "adamw"):
        for corrected in (True, False):
            optimizer = {"name": name, "bias_correction": corrected, "max_gradient_norm": 0.5}
            variants[f"{name}, clipped, bias correction {corrected}"] = change(TINY, optimizer=optimizer)
    return variants


def gpu_configurations():
    """Return the shipped configurations for GPUs."""
    configs = {name: load_config(config_file(name)) for name in shipped_names()}
    return {name: config for name, config in configs.items() if config.engine.device == "cuda"}


def all_paths():
    """Return every path by its name."""
    paths = {}
    for name, config in layout_configs().items():
        paths[f"layout: {name}"] = partial(_pretrain, config)
    paths["layout: float32, gradients of rows alone"] = partial(_pretrain, TINY, alone=True)
    for name, config in gpu_configurations().items():
        paths[f"configuration: {name}"] = partial(_pretrain, config)
    for kind in FINE_TUNING:
        for precision in ("float32", "bfloat16"):
            paths[f"fine-tuning: {kind}, {precision}"] = partial(_fine_tune, kind, precision)
    for family in FAMILIES:
        for dtype in (torch.float32, torch.bfloat16):
            name = str(dtype).replace("torch.", "")
            paths[f"padding-free: {family}, {name}"] = partial(_padding_free, family, dtype)
    return paths


def dispatch(path):
    """Run a path on a fake GPU."""
    with FakeGpu() as gpu:
        path(gpu)
        return Figures(gpu.peak, gpu.waits, len(gpu.operators))


def main(arguments=None):
    """Run the command and return its exit status."""
    parser = argparse.ArgumentParser(prog="python -m tests.gpu_dry", description=__doc__.split("\n")[0])
    parser.add_argument("--only", metavar="WORD", default="", help="run the paths whose name contains this")
    parser.add_argument("--json", action="store_true", help="print one JSON object for each path")
    parser.add_argument("--memory", metavar="BYTES", type=float, default=CARD, help="of the card; default: 80e9")
    options = parser.parse_args(arguments)
    paths = {name: path for name, path in all_paths().items() if options.only in name}
    if not paths:
        parser.error(f"--only {options.only}: no path has this in its name")

    failed = 0
    if not options.json:
        print("| path | in a dry run | values | GiB | waits |\n| --- | --- | --- | ---: | ---: |")
    for name, path in paths.items():
        problem = ""
        figures = Figures(0, [], 0)
        try:
            figures = dispatch(path)
        except CannotPretend as error:
            parser.error(one_line(error))
        except Exception as error:  # whatever torch raises is the finding
            problem = f"not dispatched: {type(error).__name__}: {one_line(error, 300)}"
        if figures.peak > options.memory:
            problem = f"does not fit: {figures.peak / 2**30:.1f} GiB"
        failed += bool(problem)
        if options.json:
            print(json.dumps({"path": name, "problem": problem, **figures._asdict()}))
        else:
            text = problem or f"dispatched | {_seen(name)} | {figures.peak / 2**30:.3f} | {len(figures.waits)}"
            print(f"| {name} | {text} |", flush=True)
    if not options.json:
        print(f"\n{len(paths) - failed} of {len(paths)} paths are dispatched and fit {options.memory / 2**30:.1f} GiB")
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
