"""What packing brings on this machine: `python -m ipu_packed_bert.benchmark`.

The same sequences go through forward and backward pass twice, packed and each alone in its row, in one process and in
turn, so that both see the same machine. Lengths come from a histogram through a real packer, tokens are random.
The unpacked side is canonical BERT: a padding mask for each row, no block mask. The weight update is left out: it
comes once after hundreds of micro-batches, and is the same for both.

`--lengths 512,2048,8192` asks another question: from which row length on does attention within each sequence beat a
dense mask over the row? The same packs, their sequences stretched to each length, go through both in turn.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from dataclasses import replace
from typing import Any, Dict, List, NamedTuple, Optional, Sequence, Tuple

import numpy as np
import torch

from ipu_packed_bert.config import BatchConfig, Config, DataConfig, EngineConfig, ModelConfig
from ipu_packed_bert.engine.base import Batch
from ipu_packed_bert.engine.host import HostEngine
from pack_data.command import (
    ArgumentParser,
    add_histogram_arguments,
    histogram_from,
    parse_depth,
    positive_int,
    progress_bar,
    run_main,
)
from pack_data.examples import masked_count
from pack_data.packers import PACKERS, get_packer
from pack_data.packing import Packing
from pack_data.packs import PackSchema, assemble, decode, default_predictions
from pack_data.sequences import Example, Sequences

# hidden size, layers, heads, intermediate size. `base3` is BERT-base cut to 3 layers: as telling, in a quarter of the time.
SIZES = {
    "tiny": (128, 2, 2, 512),
    "small": (256, 4, 4, 1024),
    "base3": (768, 3, 12, 3072),
    "base": (768, 12, 12, 3072),
    "large": (1024, 24, 16, 4096),
}

BOTH = ("float32", "bfloat16")


class PaddingMask(torch.nn.Module):
    """The mask of BERT without packs, in place of `model.packed.AttentionMask`: [B, 1, 1, S], padding is hidden."""

    def __init__(self, hidden: float):
        super().__init__()
        self.hidden = hidden

    def forward(self, input_mask_BS, dtype: torch.dtype) -> torch.Tensor:
        padding_B11S = (input_mask_BS == 0)[:, None, None, :]
        seen_B11S = torch.zeros(padding_B11S.shape, dtype=dtype, device=input_mask_BS.device)
        return seen_B11S.masked_fill(padding_B11S, self.hidden)


class Work(NamedTuple):
    """The same sequences in both layouts; rows are multiples of the micro-batch."""

    packed: Batch
    unpacked: Batch
    sequences: int
    tokens: int

    @property
    def packing_factor(self) -> float:
        return len(self.unpacked["input_ids"]) / len(self.packed["input_ids"])


class Measurement(NamedTuple):
    """Sequences per second, one value a round."""

    precision: str
    engine: str
    packed: np.ndarray
    unpacked: np.ndarray
    packing_factor: float

    @property
    def speed_ups(self) -> np.ndarray:
        return self.packed / self.unpacked

    def to_json(self) -> Dict[str, Any]:
        low, middle, high = quartiles(self.speed_ups)
        return {
            "precision": self.precision,
            "engine": self.engine,
            "rounds": len(self.packed),
            "packed_sequences_per_second": float(np.median(self.packed)),
            "unpacked_sequences_per_second": float(np.median(self.unpacked)),
            "speed_up": middle,
            "speed_up_quartiles": [low, high],
            "packing_factor": self.packing_factor,
            "share_of_packing_factor": middle / self.packing_factor,
        }


def quartiles(values: np.ndarray) -> Tuple[float, float, float]:
    return tuple(float(value) for value in np.percentile(values, [25, 50, 75]))


def draw_work(
    packing: Packing, *, packs: int, micro_batch: int, vocabulary: int, max_predictions: int, seed: int
) -> Work:
    """`packs` packs drawn from the packing's strategies by how often it uses them, filled with random tokens.

    Of many draws the one whose packing factor is nearest to the whole packing's, among those whose sequences divide
    into micro-batches, so that neither layout has an empty row.
    """
    rng = np.random.default_rng(seed)
    share = np.array(packing.repeats, dtype=np.float64) / packing.packs
    draws = [[packing.strategies[index] for index in rng.choice(len(share), packs, p=share)] for _ in range(1000)]
    even = [draw for draw in draws if sum(map(len, draw)) % micro_batch == 0]
    drawn = min(even, key=lambda draw: abs(sum(map(len, draw)) / packs - packing.packing_factor))
    lengths = [length for strategy in drawn for length in strategy]
    masked = masked_count(np.array(lengths), max_predictions, 0.15)
    sequences = Sequences.from_examples(
        Example(
            input_ids=rng.integers(1, vocabulary, length).tolist(),
            first_segment_length=int(rng.integers(1, length + 1)),
            masked_lm_positions=np.sort(rng.choice(length, count, replace=False)).tolist(),
            masked_lm_ids=rng.integers(1, vocabulary, count).tolist(),
            next_sentence_label=int(rng.integers(2)),
        )
        for length, count in zip(lengths, masked)
    )
    packed_at = [(pack, slot) for pack, strategy in enumerate(drawn) for slot in range(len(strategy))]
    alone_at = [(row, 0) for row in range(len(lengths))]

    def lay_out(places: List[Tuple[int, int]], depth: int) -> Batch:
        schema = PackSchema.bert(
            packing.max_sequence_length, depth, max_predictions + depth, vocabulary_size=vocabulary
        )
        where = np.array(places, dtype=np.int64)
        rows = int(where[:, 0].max()) + 1
        batch = decode(schema, assemble(schema, sequences, where[:, 0], where[:, 1], rows))
        micro_batches = rows // micro_batch
        scales = {"mlm_scale": micro_batches / int(masked.sum()), "nsp_scale": micro_batches / len(lengths)}
        return {**batch, **{name: np.full(rows, scale, dtype=np.float32) for name, scale in scales.items()}}

    depth = max(len(strategy) for strategy in drawn)
    return Work(
        packed=lay_out(packed_at, packing.max_sequences_per_pack or depth),
        unpacked=lay_out(alone_at, 1),
        sequences=len(lengths),
        tokens=int(sum(lengths)),
    )


def measure(config: Config, work: Work, *, rounds: int, bar) -> Measurement:
    """Both layouts in turn, in alternating order; the first round, which warms up, is not counted."""
    packed = HostEngine(config, packing_factor=work.packing_factor)
    unpacked = HostEngine(config, packing_factor=1.0)
    unpacked.model.attention_mask = PaddingMask(unpacked.model.attention_mask.hidden)
    sides = {"packed": (packed, work.packed), "unpacked": (unpacked, work.unpacked)}
    rates: Dict[str, List[float]] = {"packed": [], "unpacked": []}
    losses = {}
    for number in range(rounds + 1):
        for side in sorted(sides, reverse=bool(number % 2)):
            engine, batch = sides[side]
            result = engine.accumulate(batch)
            engine.optimizer.zero_grad(set_to_none=True)
            losses[side] = result.loss
            if number:
                rates[side].append(work.sequences / result.seconds)
            bar.update()
    same = abs(losses["packed"] - losses["unpacked"]) <= 0.02 * abs(losses["unpacked"])
    assert same, f"the two sides do different work: losses {losses}"
    return Measurement(
        config.engine.precision,
        packed.description,
        np.array(rates["packed"]),
        np.array(rates["unpacked"]),
        work.packing_factor,
    )


class Comparison(NamedTuple):
    """Dense mask and attention within sequences on the same packs: seconds, one value a round."""

    slots: int
    dense: np.ndarray
    varlen: np.ndarray
    share: float  # of the dense attention's slots x slots that lies within sequences

    @property
    def speed_ups(self) -> np.ndarray:
        return self.dense / self.varlen

    def to_json(self) -> Dict[str, Any]:
        low, middle, high = quartiles(self.speed_ups)
        return {
            "slots": self.slots,
            "share_within_sequences": self.share,
            "dense_seconds": float(np.median(self.dense)),
            "varlen_seconds": float(np.median(self.varlen)),
            "speed_up": middle,
            "speed_up_quartiles": [low, high],
        }


def stretched(packing: Packing, slots: int) -> Packing:
    """The same packs with all lengths multiplied, so that rows of `slots`, a multiple of the packing's, are as full."""
    factor, rest = divmod(slots, packing.max_sequence_length)
    if rest:
        raise ValueError(f"--lengths: {slots} is not a multiple of {packing.max_sequence_length}, the histogram's; only whole multiples are stretched to")
    strategies = tuple(tuple(factor * length for length in strategy) for strategy in packing.strategies)
    return Packing(packing.algorithm, slots, packing.max_sequences_per_pack, strategies, packing.repeats)


def compare_attention(config: Config, work: Work, depth: int, *, rounds: int, bar) -> Comparison:
    """Forward and backward pass of the packs with each attention in turn, in alternating order; the first round warms up."""
    config = replace(config, data=replace(config.data, max_sequences_per_pack=depth))
    engines = {
        attention: HostEngine(replace(config, engine=replace(config.engine, attention=attention)), packing_factor=1.0)
        for attention in ("sdpa", "varlen")
    }
    seconds: Dict[str, List[float]] = {attention: [] for attention in engines}
    for number in range(rounds + 1):
        losses = []
        for attention in sorted(engines, reverse=bool(number % 2)):
            result = engines[attention].accumulate(work.packed)
            engines[attention].optimizer.zero_grad(set_to_none=True)
            losses.append(result.loss)
            if number:
                seconds[attention].append(result.seconds)
            bar.update()
        # Dropout differs; the sequences and their number do not.
        assert abs(losses[0] - losses[1]) <= 0.02 * abs(losses[0]), f"the two do different work: losses {losses}"
    numbers = work.packed["input_mask"]
    squares = sum(int((numbers == number).sum(axis=1).astype(np.int64) @ (numbers == number).sum(axis=1)) for number in range(1, depth + 1))
    slots = numbers.shape[1]
    return Comparison(slots, np.array(seconds["sdpa"]), np.array(seconds["varlen"]), squares / (len(numbers) * slots * slots))


def comparison_table(comparisons: Sequence[Comparison]) -> str:
    lines = [
        "          within     dense mask   within sequences   varlen over dense",
        " slots    sequences   seconds         seconds         (quartiles)",
    ]
    for each in comparisons:
        low, middle, high = quartiles(each.speed_ups)
        lines.append(
            f"{each.slots:6} {100 * each.share:9.1f} % {np.median(each.dense):10.3f} {np.median(each.varlen):15.3f}"
            f"         {middle:.3f} ({low:.3f}..{high:.3f})"
        )
    return "\n".join(lines)


def parse_lengths(text: str) -> List[int]:
    return [positive_int(part) for part in text.split(",")]


def bfloat16_slowdown() -> float:
    """Seconds of a bfloat16 matrix product over those of a float32 one, on the CPU."""

    def seconds(dtype: torch.dtype) -> float:
        factor = torch.ones(384, 384, dtype=dtype)
        times = []
        for _ in range(5):  # the first one warms up, and others may be held up by other work: the best counts
            start = time.perf_counter()
            torch.mm(factor, factor)
            times.append(time.perf_counter() - start)
        return min(times)

    return seconds(torch.bfloat16) / seconds(torch.float32)


def table(measurements: Sequence[Measurement]) -> str:
    lines = [
        "            sequences/s   sequences/s   speed-up              packing   share of",
        "precision        packed      unpacked   (quartiles)           factor    the factor",
    ]
    for each in measurements:
        low, middle, high = quartiles(each.speed_ups)
        lines.append(
            f"{each.precision:<9} {np.median(each.packed):13.2f} {np.median(each.unpacked):13.2f}"
            f"   {middle:.3f} ({low:.3f}..{high:.3f})  {each.packing_factor:7.3f}"
            f"   {middle / each.packing_factor:10.3f}"
        )
    return "\n".join(lines)


def model_of(size: str, *, vocabulary: int, slots: int, dropout: float) -> ModelConfig:
    hidden, layers, heads, intermediate = SIZES[size]
    return ModelConfig(
        vocabulary_size=vocabulary,
        hidden_size=hidden,
        num_layers=layers,
        num_heads=heads,
        intermediate_size=intermediate,
        max_position_embeddings=slots,
        hidden_dropout=dropout,
    )


def compare_lengths(args, packing: Packing, size: str, rounds: int) -> int:
    """What `--lengths` prints; one row a micro-batch, the same number of packs at each length."""
    plans = [stretched(packing, slots) for slots in args.lengths]
    comparisons = []
    with progress_bar(2 * (rounds + 1) * len(plans), "rounds") as bar:
        for plan in plans:
            slots = plan.max_sequence_length
            work = draw_work(
                plan,
                packs=args.packs,
                micro_batch=1,
                vocabulary=args.vocabulary_size,
                max_predictions=default_predictions(slots),
                seed=args.seed,
            )
            config = Config(
                data=DataConfig(max_sequence_length=slots),
                model=model_of(size, vocabulary=args.vocabulary_size, slots=slots, dropout=args.dropout),
                engine=EngineConfig(kind="host", threads=args.threads),
                batch=BatchConfig(micro_batch=1),
            )
            depth = work.packed["next_sentence_positions"].shape[1]
            comparisons.append(compare_attention(config, work, depth, rounds=rounds, bar=bar))
    if args.json:
        print(json.dumps({"size": size, "packs": args.packs, "comparisons": [each.to_json() for each in comparisons]}))
        return 0
    print(
        f"model {size}, float32; forward and backward pass of {args.packs} packs of {packing.max_sequence_length} by"
        f" {packing.algorithm}, stretched to each length; median of {rounds} rounds\n"
    )
    print(comparison_table(comparisons))
    return 0


def main(argv: Optional[Sequence[str]] = None) -> int:
    parser = ArgumentParser(
        prog="python -m ipu_packed_bert.benchmark",
        description="Sequences per second, packed over unpacked, on this machine's CPU or CUDA device.",
    )
    add_histogram_arguments(parser)
    parser.add_argument("--packer", choices=PACKERS, default="optimal")
    parser.add_argument("--max-sequences-per-pack", type=parse_depth, default=3, metavar="D")
    parser.add_argument("--size", choices=sorted(SIZES), default="base3", help="of the model; default base3")
    parser.add_argument("--vocabulary-size", type=positive_int, default=30522, metavar="V")
    parser.add_argument(
        "--precision",
        choices=("float32", "bfloat16", "both", "auto"),
        default="auto",
        help="auto, the default: both, but no bfloat16 on a CPU that only emulates it",
    )
    parser.add_argument("--attention", choices=("auto", "eager", "sdpa"), default="auto")
    parser.add_argument(
        "--lengths",
        type=parse_lengths,
        metavar="S,S,...",
        help="compare a dense mask with attention within sequences at these row lengths, multiples of the histogram's",
    )
    parser.add_argument("--micro-batch", type=positive_int, default=2, metavar="ROWS")
    parser.add_argument("--packs", type=positive_int, default=4, help="a round; a multiple of --micro-batch, default 4")
    parser.add_argument("--rounds", type=positive_int, default=9, help="counted; the first of all is not, default 9")
    parser.add_argument("--dropout", type=float, default=0.1)
    parser.add_argument("--compile", action="store_true", help="with torch.compile")
    parser.add_argument("--threads", type=positive_int, help="default: as many as torch chooses")
    parser.add_argument("--seed", type=int, default=5)
    parser.add_argument("--quick", action="store_true", help="a tiny model and 7 rounds: seconds, but a rough figure")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of the table")
    args = parser.parse_args(argv)
    if args.packs % args.micro_batch:
        raise ValueError(f"--packs {args.packs} is not a multiple of --micro-batch {args.micro_batch}")
    if not 0.0 <= args.dropout < 1.0:
        raise ValueError(f"--dropout {args.dropout}: must be at least 0 and below 1")
    size, rounds = ("tiny", 7) if args.quick else (args.size, args.rounds)

    histogram = histogram_from(args)
    slots = histogram.max_sequence_length
    packing = get_packer(args.packer)(histogram, max_sequences_per_pack=args.max_sequences_per_pack)
    hidden, layers, heads, intermediate = SIZES[size]
    if args.lengths:
        return compare_lengths(args, packing, size, rounds)
    work = draw_work(
        packing,
        packs=args.packs,
        micro_batch=args.micro_batch,
        vocabulary=args.vocabulary_size,
        max_predictions=default_predictions(slots),
        seed=args.seed,
    )
    model = model_of(size, vocabulary=args.vocabulary_size, slots=slots, dropout=args.dropout)
    precisions = {"both": BOTH, "auto": BOTH}.get(args.precision, (args.precision,))
    if args.precision == "auto" and not torch.cuda.is_available():
        slowdown = bfloat16_slowdown()
        if slowdown > 1.5:  # where bfloat16 is native it is faster
            precisions = ("float32",)
            print(
                f"bfloat16 is left out: this CPU takes {slowdown:.1f} times as long for it as for float32"
                " (--precision both measures it all the same)",
                file=sys.stderr,
            )
    measurements = []
    with progress_bar(2 * (rounds + 1) * len(precisions), "rounds") as bar:
        for precision in precisions:
            engine = EngineConfig(
                kind="host",
                precision=precision,
                attention=args.attention,
                compile=args.compile,
                threads=args.threads,
            )
            config = Config(model=model, engine=engine, batch=BatchConfig(micro_batch=args.micro_batch))
            measurements.append(measure(config, work, rounds=rounds, bar=bar))

    if args.json:
        print(
            json.dumps(
                {
                    "size": size,
                    "algorithm": packing.algorithm,
                    "packs": args.packs,
                    "sequences": work.sequences,
                    "tokens": work.tokens,
                    "micro_batch": args.micro_batch,
                    "measurements": [each.to_json() for each in measurements],
                }
            )
        )
        return 0
    for each in measurements:
        print(each.engine)
    print(
        f"model {size}: hidden {hidden}, {layers} layers, vocabulary {args.vocabulary_size}; forward and backward pass\n"
        f"{work.sequences} sequences of {histogram.name or args.histogram}, {work.tokens} tokens, in {args.packs} packs"
        f" of {slots} by {packing.algorithm}, micro-batches of {args.micro_batch} rows, median of {rounds} rounds\n"
    )
    print(table(measurements))
    return 0


if __name__ == "__main__":
    sys.exit(run_main(main))
