"""Time padding-free rows: the same examples padded at random, padded sorted, with a dense mask, and with our attention.

    python -m evidence.benches.padding_free
    python -m evidence.benches.padding_free --data-dir DIR --rows 1024,2048 --rounds 7

It prints two tables, of forward and backward passes.  The first: one row of each number of tokens, and its examples in
padded batches.  The second: the loss over a large vocabulary, from whole logits and in blocks of tokens.  All sides of
a line take turns in one process, and each ratio is the median over the rounds of ratios within a round, so that another
load on the machine affects all sides alike.  On a CPU, times are processor time of this process; on CUDA, wall-clock
time.  Freed buffers are kept on all sides.
"""

from __future__ import annotations

import sys
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any, Callable, Dict, List, NamedTuple, Optional, Sequence

import numpy as np
import torch

from evidence.benches.llama import new_llama
from evidence.benches.texts import encode, text_sets
from ipu_packed_bert.benchmarks.work import machine
from ipu_packed_bert.engine.host.devices import clock_of
from ipu_packed_bert.padding_free.attention import NAME
from ipu_packed_bert.padding_free.collators import Inputs, PaddingCollator, PaddingFreeCollator
from ipu_packed_bert.padding_free.losses import IGNORED, cross_entropy_sum, logits_of, loss_sum
from ipu_packed_bert.padding_free.update import to_device
from pack_data.cli.command import ArgumentParser, positive_int, positive_ints, run_main
from pack_data.cli.memory import PeakMemory, keep_buffers
from pack_data.cli.timing import seconds_in_turn
from pack_data.display.table import Column, Table

# Tokens of the examples of two data sets, at 0, 5, ... 100 % of them: 6,000 examples of each, drawn at random, with
# WordPiece vocabularies of 4,096 that were trained on them (--data-dir measures them again).
QUANTILES = {
    "GSM8K": list(
        map(
            int,
            "56 89 99 107 114 120 127 134 140 148 155 163 171 179 189 200 212 228 248 281 471".split(),
        )
    ),
    "GPTeacher": list(
        map(
            int,
            "29 57 68 78 86 93 100 107 113 120 127 136 146 155 166 176 189 203 222 254 487".split(),
        )
    ),
}
# Log-normal: half of the examples below 100 tokens, one in a hundred above 1,600.
LONG_TAILED = "long-tailed"
PADDED = "padded"
SORTED = "sorted"
DENSE = "dense"
OURS = "ours"


class Setup(NamedTuple):
    """The model, and how long to measure."""

    rounds: int = 5
    device: str = "cpu"
    hidden_size: int = 128
    layers: int = 2
    vocabulary: int = 4096
    batch_size: int = 4  # examples of a padded batch
    dense_up_to: int = 4096  # rows of more tokens are not measured with the dense mask


class _Timed(NamedTuple):
    """One side of a line."""

    seconds: np.ndarray  # one value a round
    # Bytes above those in use before; None if the system does not report them.
    memory: Optional[int]
    loss: float


def _in_turn(sides: Dict[str, Callable[[], float]], setup: Setup) -> Dict[str, _Timed]:
    """Run each side, which returns its loss, once for its memory, then round by round.

    Raise RuntimeError if the losses differ.
    """
    cuda = torch.cuda if setup.device != "cpu" else None
    memory = {}
    losses = {}
    for name, work in sides.items():
        peak = PeakMemory()
        before = cuda.memory_allocated() if cuda else 0
        if cuda:
            cuda.reset_peak_memory_stats()
        losses[name] = work()
        memory[name] = cuda.max_memory_allocated() - before if cuda else peak.added()

    first, *others = losses.values()
    worst = max(abs(loss / first - 1) for loss in others)
    if not worst < 1e-4:
        raise RuntimeError(
            f"the losses of {', '.join(sides)} differ by {worst:.1e}; times mean nothing then"
        )

    clock = clock_of(torch.device(setup.device), of_process=True)
    times = seconds_in_turn(sides, setup.rounds, clock, warm_up=False)
    return {name: _Timed(times[name], memory[name], losses[name]) for name in sides}


def _lengths_of(name: str, count: int, draw: np.random.Generator) -> np.ndarray:
    """Draw lengths from a distribution, at least 2 tokens."""
    if name == LONG_TAILED:
        return np.maximum(2, draw.lognormal(np.log(100), 1.2, count)).astype(int)
    quantiles = QUANTILES[name]
    shares = np.linspace(0, 1, len(quantiles))
    return np.interp(draw.random(count), shares, quantiles).round().astype(int)


def _model_of(setup: Setup, positions: int) -> Any:
    """Build a small new Llama with our attention."""
    torch.manual_seed(0)
    model = new_llama(
        hidden_size=setup.hidden_size,
        layers=setup.layers,
        vocabulary_size=setup.vocabulary,
        positions=positions,
    )
    model.set_attn_implementation(NAME)
    return model.to(setup.device)


def _examples_of(lengths: np.ndarray, slots: int, setup: Setup) -> List[Dict[str, np.ndarray]]:
    """Draw the first examples that fit into a row, of random tokens; longer ones are cut, as their row would be."""
    draw = np.random.default_rng(slots)
    free = slots
    examples = []
    for length in np.minimum(lengths, slots).tolist():
        if length <= free:
            examples.append({"input_ids": draw.integers(1, setup.vocabulary, length)})
            free -= length
        if not free:
            break
    return examples


def _measure_row(data: str, lengths: np.ndarray, slots: int, setup: Setup) -> Dict[str, Any]:
    """Time the same examples padded and padding-free, in turns; return a row of `_ROWS`."""
    examples = _examples_of(lengths, slots, setup)
    model = _model_of(setup, slots)
    size = setup.batch_size

    def padded(order: Sequence[Any]) -> List[Inputs]:
        return [PaddingCollator()(order[at : at + size]) for at in range(0, len(order), size)]

    by_length = sorted(examples, key=lambda example: len(example["input_ids"]))
    batches: Dict[str, List[Inputs]] = {PADDED: padded(examples), SORTED: padded(by_length)}
    ours = PaddingFreeCollator(model)(examples)
    if slots <= setup.dense_up_to:  # Transformers' own mask, made of the positions
        batches[DENSE] = [{name: ours[name] for name in ("input_ids", "labels", "position_ids")}]
    batches[OURS] = [ours]

    def turn(side: str) -> float:
        model.set_attn_implementation(NAME if side == OURS else "sdpa")
        total = 0.0
        for inputs in batches[side]:
            loss = loss_sum(model, to_device(inputs, torch.device(setup.device)))
            (loss / 1000).backward()
            total += float(loss.detach())
        model.zero_grad(set_to_none=True)
        return total

    sides = _in_turn({side: partial(turn, side) for side in batches}, setup)
    padded_slots = sum(inputs["input_ids"].numel() for inputs in batches[PADDED])
    tokens = ours["input_ids"].numel()
    base = sides[PADDED].seconds
    return {
        "data": data,
        "slots": slots,
        "examples": len(examples),
        "real": tokens / padded_slots,
        **{side: _median(timed.seconds / base) for side, timed in sides.items()},
        "padded_rate": tokens / _median(base),
        "rate": tokens / _median(sides[OURS].seconds),
        **{f"{side}, memory": timed.memory for side, timed in sides.items()},
    }


def _median(values: np.ndarray) -> float:
    return float(np.median(values))


def _measure_loss(slots: int, setup: Setup) -> List[Dict[str, Any]]:
    """Time Transformers' own loss, ours from whole logits, and ours in blocks, in turns; return rows of `_LOSSES`."""
    model = _model_of(setup, slots)
    lengths = _lengths_of("GSM8K", slots, np.random.default_rng(0))
    examples = _examples_of(lengths, slots, setup)
    inputs = to_device(PaddingFreeCollator(model)(examples), torch.device(setup.device))
    labels = inputs["labels"]
    predicted = int((labels[:, 1:] != IGNORED).sum())
    ways = {
        "Transformers": lambda: model(**inputs, use_cache=False).loss,
        "whole logits": lambda: cross_entropy_sum(logits_of(model, inputs), labels) / predicted,
        "in blocks": lambda: loss_sum(model, inputs) / predicted,
    }

    def turn(way: str) -> float:
        loss = ways[way]()
        loss.backward()
        return float(loss.detach())

    turn("in blocks")  # gradients and buffers that stay exist before all sides
    sides = _in_turn({way: partial(turn, way) for way in ways}, setup)
    whole = sides["whole logits"].seconds

    rows = []
    for way, timed in sides.items():
        relative = _median(timed.seconds / whole)
        rows.append({"way": way, "memory": timed.memory, "relative": relative, "loss": timed.loss})
    return rows


_ROWS = (
    Column("data", "data"),
    Column("slots", "row, tokens", form=","),
    Column("examples", "examples", form=","),
    Column("real", "real / padded", form=".2f"),
    Column(SORTED, "sorted", form=".2f"),
    Column(DENSE, "dense mask", form=".2f"),
    Column(OURS, "ours", form=".2f"),
    Column("padded_rate", "tokens/s padded", form=",.0f"),
    Column("rate", "tokens/s ours", form=",.0f"),
    *(
        Column(f"{side}, memory", f"MiB {side}", form=",.0f", scale=2**20)
        for side in (PADDED, DENSE, OURS)
    ),
)
_LOSSES = (
    Column("way", "loss"),
    Column("memory", "MiB above the model", form=",.0f", scale=2**20),
    Column("relative", "time / whole logits", form=".2f"),
    Column("loss", "loss", form=".6f"),
)


def main(arguments: Optional[Sequence[str]] = None) -> int:
    parser = ArgumentParser(prog="python -m evidence.benches.padding_free", description=__doc__)
    parser.add_argument(
        "--rows", type=positive_ints, default=[1024, 2048, 4096, 8192, 16384], metavar="N,N,..."
    )
    parser.add_argument(
        "--data-dir", type=Path, metavar="DIR", help="gsm8k/ and gpteacher/, in place of quantiles"
    )
    parser.add_argument("--rounds", type=positive_int, default=5, metavar="N", help="(default: 5)")
    options = parser.parse_args(arguments)
    if min(options.rows) < 2:
        raise ValueError(
            f"--rows {min(options.rows)}: a row of one token predicts nothing; pass at least 2"
        )
    setup = Setup(options.rounds, "cuda" if torch.cuda.is_available() else "cpu")
    kept = setup.device == "cpu" and keep_buffers()
    lengths = _all_lengths(options.data_dir)
    print(
        f"Llama of hidden {setup.hidden_size}, {setup.layers} layers, vocabulary {setup.vocabulary:,}; padded batches "
        f"of {setup.batch_size}; {setup.rounds} rounds; {setup.device}{'; freed buffers kept' * kept}; {machine()}\n\n"
        "Time of forward and backward relative to the same examples padded at random (below 1: faster).\n"
    )
    rows = []
    for name, slots in product(lengths, options.rows):
        rows.append(_measure_row(name, lengths[name], slots, setup))
        print(f"{name} {slots:,}: {rows[-1][OURS]:.2f}", file=sys.stderr, flush=True)
    print(Table("rows", "", _ROWS, rows).markdown())
    slots = min(4096, max(options.rows))
    setup = setup._replace(vocabulary=32_000)
    print(
        f"\nThe loss of {slots:,} tokens over a vocabulary of {setup.vocabulary:,}, forward and backward.\n"
    )
    print(Table("loss", "", _LOSSES, _measure_loss(slots, setup)).markdown())
    return 0


def _all_lengths(data_dir: Optional[Path]) -> Dict[str, np.ndarray]:
    """Draw enough lengths of each data set for the longest rows."""
    draw = np.random.default_rng(0)
    lengths = {name: _lengths_of(name, 20000, draw) for name in [*QUANTILES, LONG_TAILED]}
    if data_dir is not None:
        for data in text_sets(data_dir, 2000, 0):
            measured = encode(data, max_sequence_length=10**6, vocabulary_size=4096).lengths
            lengths[data.name] = np.tile(measured, 10)
    return lengths


if __name__ == "__main__":
    sys.exit(run_main(main))
