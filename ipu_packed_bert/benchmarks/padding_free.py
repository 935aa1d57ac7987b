"""How fast padding-free rows are: the same examples padded at random, padded sorted, with a dense mask, and with ours.

    python -m ipu_packed_bert.benchmarks.padding_free
    python -m ipu_packed_bert.benchmarks.padding_free --data-dir DIR --rows 1024,2048 --rounds 7

Three tables.  The first: one row of each number of tokens and its examples in padded batches, forward and backward.
The second: the loss over a large vocabulary, with whole logits and in blocks of tokens.  The third: an epoch by the
ways of `pack_data.batching` relative to RandomSampling+Padding.  All sides of a line take turns in one process, and
each ratio is the median over the rounds of ratios within a round, so that another load on the machine moves all sides
alike.  On a CPU times are of this process (not of the clock), on CUDA of the clock; freed buffers are kept on all
sides, unless --return-buffers is given.
"""

from __future__ import annotations

import sys
from functools import partial
from pathlib import Path
from typing import Any, Dict, List, NamedTuple, Optional, Sequence, Tuple

import numpy as np
import torch

from ipu_packed_bert.benchmarks.texts import encode, text_sets
from ipu_packed_bert.benchmarks.work import machine
from ipu_packed_bert.engine.host.devices import clock_of
from ipu_packed_bert.padding_free.attention import NAME
from ipu_packed_bert.padding_free.choice import switch
from ipu_packed_bert.padding_free.collators import Batches, Inputs, PaddingCollator, PaddingFreeCollator
from ipu_packed_bert.padding_free.models import new_llama
from ipu_packed_bert.padding_free.output_layer import IGNORED
from ipu_packed_bert.padding_free.update import cross_entropy_sum, logits_of, loss_sum, to_device
from pack_data.batching.plans import BatchOptions, get_way
from pack_data.cli.command import ArgumentParser, count_from_zero, positive_int, positive_ints, run_main
from pack_data.cli.memory import PeakMemory, keep_buffers
from pack_data.cli.timing import Clock, seconds_in_turn
from pack_data.display.table import Column, Table, markdown

Example = Dict[str, np.ndarray]

# Tokens of the examples of two data sets, at 0, 5, ... 100 % of them: 6,000 examples of each, drawn at random, with
# WordPiece vocabularies of 4,096 that were trained on them (--data-dir measures them again).
QUANTILES = {
    "GSM8K": [56, 89, 99, 107, 114, 120, 127, 134, 140, 148, 155, 163, 171, 179, 189, 200, 212, 228, 248, 281, 471],
    "GPTeacher": [29, 57, 68, 78, 86, 93, 100, 107, 113, 120, 127, 136, 146, 155, 166, 176, 189, 203, 222, 254, 487],
}
LONG_TAILED = "long-tailed"  # log-normal: half of the examples below 100 tokens, one in a hundred above 1,600
PADDED, SORTED, DENSE, OURS = "padded at random", "padded sorted", "dense mask", "ours"
WAYS: Tuple[str, ...] = (
    "RandomSampling+Padding",
    "GroupByLength+Padding",
    "MiniBatchPacking+PosID",
    "Multipack+PosID",
    "OptimalPacking+PosID",
)


class Setup(NamedTuple):
    """The model and how long to measure."""

    rounds: int = 5
    device: str = "cpu"
    hidden_size: int = 128
    layers: int = 2
    vocabulary: int = 4096
    batch_size: int = 4  # examples of a padded batch
    dense_up_to: int = 4096  # rows of more tokens are not measured with the dense mask
    longest: int = 512  # tokens of an example in the epoch

    @property
    def _clock(self) -> Clock:
        return clock_of(torch.device(self.device), of_process=True)

    @property
    def _epoch_batches(self) -> BatchOptions:
        return BatchOptions(4 * self.batch_size, self.longest)


class _RowLine(NamedTuple):
    """One row length of one data set."""

    data: str
    slots: int
    examples: int
    tokens: int
    padded_slots: int  # of the batches that are padded at random
    seconds: Dict[str, float]  # side -> median over the rounds
    relative: Dict[str, float]  # side -> median of seconds over those padded at random, in the same round
    memory: Dict[str, Optional[int]]  # side -> bytes above what was there before

    @property
    def goal(self) -> float:
        """What ours may take relative to padding at random."""
        return min(1.0, self.tokens / self.padded_slots / 0.95) if self.slots <= 2048 else 1.0


def lengths_of(name: str, count: int, draw: np.random.Generator) -> np.ndarray:
    """Lengths drawn from a distribution, at least 2 tokens."""
    if name == LONG_TAILED:
        return np.maximum(2, draw.lognormal(np.log(100), 1.2, count)).astype(int)
    quantiles = QUANTILES[name]
    return np.interp(draw.random(count), np.linspace(0, 1, len(quantiles)), quantiles).round().astype(int)


def _model_of(setup: Setup, positions: int) -> Any:
    """A small new Llama."""
    torch.manual_seed(0)
    model = new_llama(
        hidden_size=setup.hidden_size, layers=setup.layers, vocabulary_size=setup.vocabulary, positions=positions
    )
    return model.to(setup.device)


def _train_on(model: Any, batches: Sequence[Inputs], device: str) -> float:
    """Forward and backward of each batch.  Returns the sum of the losses of all tokens."""
    total = 0.0
    for inputs in batches:
        loss = loss_sum(model, to_device(inputs, torch.device(device)))
        (loss / 1000).backward()
        total += float(loss.detach())
    model.zero_grad(set_to_none=True)
    return total


def _examples_of(lengths: Sequence[int], vocabulary: int, draw: np.random.Generator) -> List[Example]:
    return [{"input_ids": draw.integers(1, vocabulary, length)} for length in lengths]


def _fill(lengths: np.ndarray, slots: int) -> List[int]:
    """The first examples that fit into a row; longer ones are cut, as their row would be."""
    row: List[int] = []
    free = slots
    for length in np.minimum(lengths, slots).tolist():
        if length <= free:
            row.append(length)
            free -= length
        if not free:
            break
    return row


def measure_rows(data: str, lengths: np.ndarray, slots: int, setup: Setup) -> _RowLine:
    """Padded and padding-free, the same examples, in turns."""
    draw = np.random.default_rng(slots)
    examples = _examples_of(_fill(lengths, slots), setup.vocabulary, draw)
    model = _model_of(setup, slots)
    by_length = sorted(examples, key=lambda example: len(example["input_ids"]))
    size = setup.batch_size

    def padded(order: Sequence[Example]) -> List[Inputs]:
        return [PaddingCollator()(order[at : at + size]) for at in range(0, len(order), size)]

    sides: Dict[str, List[Inputs]] = {PADDED: padded(examples), SORTED: padded(by_length)}
    if slots <= setup.dense_up_to:
        sides[DENSE] = [PaddingFreeCollator(model)(examples)]
    switch(model, NAME)
    sides[OURS] = [PaddingFreeCollator(model)(examples)]

    def turn(side: str) -> float:
        switch(model, NAME if side == OURS else "sdpa")
        return _train_on(model, sides[side], setup.device)

    memory, losses = {}, {}
    for side in sides:  # the first time is for warming up, and for the memory
        peak = PeakMemory()
        if setup.device != "cpu":
            torch.cuda.reset_peak_memory_stats()
        losses[side] = turn(side)
        memory[side] = peak.added() if setup.device == "cpu" else torch.cuda.max_memory_allocated()
    worst = max(abs(loss / losses[PADDED] - 1) for loss in losses.values())
    if not worst < 1e-4:
        raise RuntimeError(f"{data}, rows of {slots}: the losses differ by {worst:.1e}; times mean nothing then")
    times = seconds_in_turn({side: partial(turn, side) for side in sides}, setup.rounds, setup._clock, warm_up=False)
    return _RowLine(
        data,
        slots,
        len(examples),
        sum(len(example["input_ids"]) for example in examples),
        sum(inputs["input_ids"].numel() for inputs in sides[PADDED]),
        {side: float(np.median(each)) for side, each in times.items()},
        {side: float(np.median(np.divide(each, times[PADDED]))) for side, each in times.items()},
        memory,
    )


class LossLine(NamedTuple):
    """The output layer and its loss, forward and backward of a whole model, by one way."""

    way: str
    memory: Optional[int]  # bytes above what was there before; None where the system does not tell
    relative: float  # seconds over those of whole logits, median over the rounds
    loss: float


def _measure_loss(slots: int, setup: Setup) -> List[LossLine]:
    """Transformers' own loss, ours of whole logits, and ours in blocks of tokens, in turns."""
    draw = np.random.default_rng(0)
    lengths = _fill(lengths_of("GSM8K", slots, draw), slots)
    model = _model_of(setup, slots)
    switch(model, NAME)
    made = PaddingFreeCollator(model)(_examples_of(lengths, setup.vocabulary, draw))
    inputs = to_device(made, torch.device(setup.device))
    predicted = int((inputs["labels"][:, 1:] != IGNORED).sum())
    ways = {
        "Transformers": lambda: model(**inputs, use_cache=False).loss,
        "whole logits": lambda: cross_entropy_sum(logits_of(model, inputs), inputs["labels"]) / predicted,
        "in blocks": lambda: loss_sum(model, inputs) / predicted,
    }

    def turn(way: str) -> float:
        loss = ways[way]()
        loss.backward()
        return float(loss.detach())

    memory, losses = {}, {}
    turn("in blocks")  # gradients and buffers that stay are there before all sides
    for way in ways:
        peak = PeakMemory()
        if setup.device != "cpu":
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated()
        losses[way] = turn(way)
        memory[way] = peak.added() if setup.device == "cpu" else torch.cuda.max_memory_allocated() - before
    times = seconds_in_turn({way: partial(turn, way) for way in ways}, setup.rounds, setup._clock, warm_up=False)
    whole = times["whole logits"]
    return [LossLine(way, memory[way], float(np.median(np.divide(times[way], whole))), losses[way]) for way in ways]


def slots_a_token(lengths: np.ndarray, options: BatchOptions) -> float:
    """Slots of an epoch padded at random over its tokens: what leaving out the padding is worth, without attention."""
    plan = get_way(WAYS[0]).plan(lengths, options)
    longest = np.maximum.reduceat(plan.stop, plan.rows[plan.batches[:-1]])  # a row is one example
    return float((longest * np.diff(plan.batches)).sum() / lengths.sum())


def _measure_ways(data: str, lengths: np.ndarray, setup: Setup, examples: int) -> Dict[str, float]:
    """Speed of an epoch by each way, relative to RandomSampling+Padding."""
    chosen = np.minimum(lengths[:examples], setup.longest)
    dataset = _examples_of(chosen, setup.vocabulary, np.random.default_rng(1))
    model = _model_of(setup, 4 * setup.batch_size * setup.longest)

    def epoch(way: str, side: str) -> None:
        switch(model, NAME if side == ", ours" else "sdpa")
        _train_on(model, list(Batches(way, dataset, setup._epoch_batches, model)), setup.device)

    epochs = {way + side: partial(epoch, way, side) for way in WAYS for side in _sides(way)}
    times = seconds_in_turn(epochs, setup.rounds, setup._clock)
    return {name: float(np.median(times[WAYS[0]] / each)) for name, each in times.items()}


def _sides(way: str) -> List[str]:
    return [", dense mask", ", ours"] if "PosID" in way else [""]


_ROWS = (
    Column("data", "data"),
    Column("slots", "row, tokens", form=","),
    Column("examples", "examples", form=","),
    Column("real", "real / padded", form=".2f"),
    *(Column(side, title, form=".2f") for side, title in ((SORTED, "sorted"), (DENSE, "dense"), (OURS, "ours"))),
    Column("goal", "goal", form=".2f"),
    Column("padded_rate", "tokens/s padded", form=",.0f"),
    Column("rate", "tokens/s ours", form=",.0f"),
    *(
        Column(f"{side}, memory", f"MiB {title}", form=",.0f", scale=2**20)
        for side, title in ((PADDED, "padded"), (DENSE, "dense"), (OURS, "ours"))
    ),
)


_LOSSES = (
    Column("way", "loss"),
    Column("memory", "MiB above the model", form=",.0f", scale=2**20),
    Column("relative", "time / whole logits", form=".2f"),
    Column("loss", "loss", form=".6f"),
)


def _rows_table(lines: Sequence[_RowLine]) -> str:
    rows = [
        {
            **line._asdict(),
            **line.relative,
            "real": line.tokens / line.padded_slots,
            "goal": line.goal,
            "padded_rate": line.tokens / line.seconds[PADDED],
            "rate": line.tokens / line.seconds[OURS],
            **{f"{side}, memory": added for side, added in line.memory.items()},
        }
        for line in lines
    ]
    return Table("rows", "", _ROWS, rows).markdown()


def _refuse(rows: Sequence[int], device: str) -> None:
    """Raises ValueError for rows that predict nothing, and for a device that is not here."""
    if min(rows) < 2:
        raise ValueError(f"--rows {min(rows)}: a row of one token predicts nothing; give at least 2")
    if device == "cuda" and not torch.cuda.is_available():
        raise ValueError("--device cuda: torch finds no CUDA device here; leave --device out")


def main(arguments: Optional[Sequence[str]] = None) -> int:
    parser = ArgumentParser(prog="python -m ipu_packed_bert.benchmarks.padding_free", description=__doc__)
    parser.add_argument("--rows", type=positive_ints, default=[1024, 2048, 4096, 8192, 16384], metavar="N,N,...")
    parser.add_argument("--data-dir", type=Path, metavar="DIR", help="gsm8k/ and gpteacher/, in place of quantiles")
    parser.add_argument("--rounds", type=positive_int, default=5, metavar="N", help="(default: 5)")
    parser.add_argument(
        "--examples", type=count_from_zero, default=160, metavar="N", help="of the epoch (default: 160; 0: none)"
    )
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument(
        "--return-buffers", action="store_true", help="give freed memory back to the system, as glibc does by itself"
    )
    options = parser.parse_args(arguments)
    _refuse(options.rows, options.device)
    setup = Setup(options.rounds, options.device)
    kept = options.device == "cpu" and not options.return_buffers and keep_buffers()
    lengths = _all_lengths(options.data_dir)
    print(
        f"Llama of hidden {setup.hidden_size}, {setup.layers} layers, vocabulary {setup.vocabulary:,}; padded batches "
        f"of {setup.batch_size}; {setup.rounds} rounds; {setup.device}{'; freed buffers kept' * kept}; {machine()}\n\n"
        f"Time of forward and backward relative to the same examples {PADDED} (below 1: faster); goal: at most this.\n"
    )
    lines = []
    for name, slots in ((name, slots) for slots in options.rows for name in lengths):
        lines.append(measure_rows(name, lengths[name], slots, setup))
        print(f"{name} {slots:,}: {lines[-1].relative[OURS]:.2f}", file=sys.stderr, flush=True)
    lines.sort(key=lambda line: list(lengths).index(line.data))
    print(_rows_table(lines))
    missed = [f"{line.data} {line.slots:,}" for line in lines if line.relative[OURS] > line.goal]
    print(
        f"goal reached in {len(lines) - len(missed)} of {len(lines)} lines{'; not: ' * bool(missed)}{', '.join(missed)}"
    )
    slots, setup_of_loss = min(4096, max(options.rows)), setup._replace(vocabulary=32_000)
    print(f"\nThe loss of {slots:,} tokens over a vocabulary of {setup_of_loss.vocabulary:,}, forward and backward.\n")
    print(Table("loss", "", _LOSSES, [line._asdict() for line in _measure_loss(slots, setup_of_loss)]).markdown())
    if options.examples:
        sets = [name for name in lengths if name != LONG_TAILED]
        speeds = {name: _measure_ways(name, lengths[name], setup, options.examples) for name in sets}
        batches = setup._epoch_batches
        slots = [slots_a_token(np.minimum(lengths[name][: options.examples], setup.longest), batches) for name in sets]
        print(
            f"\nSpeed of an epoch of {options.examples} examples, batch {batches.batch_size}, at most "
            f"{setup.longest} tokens an example, relative to {WAYS[0]} (above 1: faster).  Padded slots over tokens: "
            f"{', '.join(f'{name} {each:.2f}' for name, each in zip(sets, slots))}.\n"
        )
        ways = list(next(iter(speeds.values())))
        print(markdown(["way", *sets], [[way, *(f"{speeds[name][way]:.2f}" for name in sets)] for way in ways]))
    return 0


def _all_lengths(data_dir: Optional[Path]) -> Dict[str, np.ndarray]:
    """Enough of each data set for the longest rows."""
    draw = np.random.default_rng(0)
    lengths = {name: lengths_of(name, 20000, draw) for name in [*QUANTILES, LONG_TAILED]}
    if data_dir is not None:
        for data in text_sets(data_dir, 2000, 0):
            measured = encode(data, max_sequence_length=10**6, vocabulary_size=4096).lengths
            lengths[data.name] = np.tile(measured, 10)
    return lengths


if __name__ == "__main__":
    sys.exit(run_main(main))
