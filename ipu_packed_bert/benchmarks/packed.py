"""Sequences per second of packed and unpacked rows, and of the best layouts without packs, on the same sequences."""

from __future__ import annotations

import sys
from functools import partial
from typing import Any, Callable, Dict, List, Mapping, Optional, Sequence, Tuple

import numpy as np
import torch

from ipu_packed_bert.benchmarks.layouts import LAYOUTS, HuggingFaceSide
from ipu_packed_bert.benchmarks.work import BenchmarkWork
from ipu_packed_bert.data.global_batches import SameSequences
from ipu_packed_bert.engine.host import HostEngine
from ipu_packed_bert.engine.host.attention import dense_attention
from ipu_packed_bert.engine.host.devices import clock_of, find_device, product_rate
from ipu_packed_bert.engine.timing import quartiles, rounds_in_turn, seconds_in_turn
from ipu_packed_bert.processes.ranks import ONE, Processes
from ipu_packed_bert.settings.config import Config
from ipu_packed_bert.settings.schema import EngineConfig, ModelConfig
from ipu_packed_bert.tasks.pretraining import Pretraining
from ipu_packed_bert.training.compare_unpacked import SideBySide, side_by_side
from pack_data.cli.timing import Clock, timed
from pack_data.display.facts import Fact, Facts, quantity
from pack_data.reading.fields import one_line


def host_engine(
    config: Config,
    work: BenchmarkWork,
    attention: Optional[str] = None,
    processes: Processes = ONE,
) -> HostEngine:
    """Build an engine; ``attention`` replaces `engine.attention` of the configuration."""
    if attention is not None:
        config = config.changed("engine", attention=attention)
    task = Pretraining(config)
    return HostEngine(config, task, packing_factor=work.packing_factor, processes=processes)


def compare_layouts(
    config: Config,
    work: BenchmarkWork,
    *,
    rounds: int,
    bar: Any,
    processes: Processes = ONE,
    rivals: bool = False,
) -> Dict[str, Any]:
    """Time packed rows, and unpacked ones of the same length with BERT's padding mask, in turn.

    Args:
        config: model, engine and micro-batch.
        work: this process's share of the sequences.
        rounds: timed rounds.
        bar: progress bar, updated after each side of a round.
        processes: the processes that add up their gradients, as in training.
        rivals: also time `RIVALS`.

    Returns:
        Figures of both sides as JSON values.
    """
    engine = other = host_engine(config, work, processes=processes)
    peak = _peak_memory(engine, work, find_device(config.engine, processes))
    if engine.attention.kind == "varlen":
        dense = dense_attention(config.engine.precision, find_device(config.engine))
        other = host_engine(config, work, dense, processes)
    pair = SameSequences(work.packed, work.unpacked)
    dropout = config.model.hidden_dropout > 0.0
    sides = side_by_side(engine, [pair] * rounds, bar=bar, dropout=dropout, unpacked_by=other)
    assert sides is not None  # the host engine takes any shape

    figures: Dict[str, Any] = {
        "ranks": processes.size,
        "slots": work.slots,
        "precision": config.engine.precision,
        "attention": {"packed": engine.attention.kind, "unpacked": other.attention.kind},
        "engine": engine.description,
        "micro_batch": config.batch.micro_batch,
        "peak_memory_bytes": peak,
        **_figures(sides),
    }
    if processes.size == 1:
        updates_per_second = figures["packed_sequences_per_second"] / work.sequences
        figures["useful_tflops"] = 1e-12 * updates_per_second * useful_flop(work, config.model)
    if rivals:
        figures.update(_compare_rivals(config, work, rounds=rounds, bar=bar))
    return figures


def _figures(sides: SideBySide) -> Dict[str, Any]:
    low, speed_up, high = quartiles(sides.speed_ups)
    return {
        "rounds": len(sides.packed),
        "packed_sequences_per_second": float(np.median(sides.packed)),
        "unpacked_sequences_per_second": float(np.median(sides.unpacked)),
        "speed_up": speed_up,
        "speed_up_quartiles": [low, high],
        "packing_factor": sides.packing_factor,
    }


# The ways that our packs are compared with, by the kind of device.
RIVALS = {"cpu": ("sorted",), "cuda": ("sorted", "dense", "flash")}
# Relative; dropout differs between sides, the sequences and their number do not.
_LOSS_TOLERANCE = 0.02


def _check_loss(loss: float, other_loss: float, name: str) -> None:
    """Raise AssertionError if another side has computed other sequences than the packs."""
    if abs(loss - other_loss) > _LOSS_TOLERANCE * abs(loss):
        raise AssertionError(f"different sequences: loss {loss} packed, {other_loss} {name}")


def _compare_rivals(
    config: Config, work: BenchmarkWork, *, rounds: int, bar: Any
) -> Dict[str, Any]:
    """Time our packs and alternatives in turn; return the times of the alternatives divided by ours.

    - sorted: Hugging Face's BERT without packs at its best: all sequences sorted by length, the fastest batch size and
      attention.
    - dense: our packs with a mask over whole rows.
    - flash: Hugging Face's BERT with FlashAttention and without padding.

    All have the same weights, and heads that compute masked tokens and [CLS] only.
    """
    engine = host_engine(config, work)
    device = find_device(config.engine)
    clock = clock_of(device, of_process=torch.get_num_threads() == 1)
    figures: Dict[str, Any] = {}

    def build(name: str) -> Callable[[], float]:
        if name == "packed":
            return partial(accumulated, engine, work)
        if name == "dense":
            return partial(accumulated, host_engine(config, work, "sdpa"), work)
        side, about_batches = _rival(name, config, engine.weights(), work, clock)
        figures.update(about_batches)
        return side

    sides = {}
    for name in ("packed", *RIVALS[device.type]):
        try:
            sides[name] = partial(_timed_turn, build(name), clock)
        except (ImportError, TypeError, ValueError) as error:
            print(f"{name} is left out: {one_line(error)}", file=sys.stderr)

    seconds: Dict[str, List[float]] = {name: [] for name in sides}
    for number, results in rounds_in_turn(sides, rounds, bar):
        loss = results["packed"][1]
        for name, (elapsed, other_loss) in results.items():
            _check_loss(loss, other_loss, name)
            if number > 0:
                seconds[name].append(elapsed)

    packed_seconds = np.array(seconds.pop("packed"))
    for name, rival_seconds in seconds.items():
        time = quartiles(np.array(rival_seconds) / packed_seconds)
        figures[f"{name}_time"] = time.median
        figures[f"{name}_time_quartiles"] = [time.low, time.high]
    return figures


def _rival(
    name: str, config: Config, weights: Any, work: BenchmarkWork, clock: Clock
) -> Tuple[HuggingFaceSide, Dict[str, Any]]:
    """Build a side without packs; return how that of sorted sequences is computed fastest."""
    device = find_device(config.engine)
    layout = LAYOUTS[name]
    rows = config.batch.micro_batch
    side = HuggingFaceSide(config, weights, [], device, layout.attention)
    if name != "sorted":
        side.forwards = layout.lay_out(work.unpacked, rows * work.slots)
        return side, {}

    sides = {layout.attention: side}
    largest = rows
    # A GPU may have too little memory for all scores, and for more rows than ours.
    if device.type != "cuda":
        sides["eager"] = HuggingFaceSide(config, weights, [], device, "eager")
        largest = max(8, rows)
    sizes = {max(1, largest // 4), max(1, largest // 2), largest}
    forwards = {size: layout.lay_out(work.unpacked, size * work.slots) for size in sizes}

    def compute(attention: str, size: int) -> float:
        sides[attention].forwards = forwards[size]
        return sides[attention]()

    rows = _fastest({size: partial(compute, layout.attention, size) for size in sizes}, clock)
    attention = _fastest({each: partial(compute, each, rows) for each in sides}, clock)
    sides[attention].forwards = forwards[rows]
    return sides[attention], {"sorted_rows": rows, "sorted_attention": attention}


def _fastest(sides: Mapping[Any, Callable[[], Any]], clock: Clock) -> Any:
    """Return the name of the side that takes the least time of two rounds."""
    seconds = seconds_in_turn(sides, 2, clock)
    return min(sides, key=lambda name: float(seconds[name].min()))


def _timed_turn(side: Callable[[], float], clock: Clock, number: int) -> Tuple[float, float]:
    return timed(side, clock)


def accumulated(engine: HostEngine, work: BenchmarkWork) -> float:
    """Compute forward and backward passes of the packs, clear the gradients, and return the mean loss."""
    loss = engine.accumulate(work.packed).loss
    engine.optimizer.zero_grad(set_to_none=True)
    return loss


def _peak_memory(engine: HostEngine, work: BenchmarkWork, device: torch.device) -> Optional[int]:
    """Return the peak memory in bytes of a GPU with this engine only; None on a CPU."""
    if device.type != "cuda":
        return None
    torch.cuda.reset_peak_memory_stats(device)
    accumulated(engine, work)
    return torch.cuda.max_memory_allocated(device)


def useful_flop(work: BenchmarkWork, model: ModelConfig) -> float:
    """Count the operations of forward and backward passes that are not wasted.

    Padding and scores between sequences count as wasted; only masked tokens have logits.
    """
    hidden = model.hidden_size
    squares = 0.0
    for row in work.packed["input_mask"]:
        lengths = np.bincount(row)[1:].astype(np.float64)
        squares += float((lengths**2).sum())
    masked = int((work.packed["masked_lm_weights"] > 0).sum())
    weights = 4 * hidden**2 + 2 * hidden * model.intermediate_size
    layer = work.tokens * weights + 2 * squares * hidden
    heads = masked * hidden * (hidden + work.vocabulary)
    return 6.0 * (model.num_layers * layer + heads)


def bfloat16_slowdown() -> float:
    """Measure the time of a bfloat16 matrix product on the CPU, divided by that of a float32 one."""
    rates = {}
    for precision in ("bfloat16", "float32"):
        engine = EngineConfig(kind="host", precision=precision)
        rates[precision] = product_rate(torch.device("cpu"), engine, size=384)
    return rates["float32"] / rates["bfloat16"]


def facts(
    measurements: Sequence[Mapping[str, Any]], title: str, notes: Sequence[str] = ()
) -> Facts:
    """Return a table of results of `compare_layouts`."""
    return Facts(title, list(map(_row, measurements)), notes, "benchmark")


def _row(figures: Mapping[str, Any]) -> Dict[str, Fact]:
    """Return the row of a result; figures that were not measured are left out."""
    rows = str(figures["micro_batch"])
    if "sorted_rows" in figures:
        rows += ", HF {sorted_rows} {sorted_attention}".format(**figures)
    row = {name: Fact(name, str(figures[name])) for name in ("ranks", "slots", "precision")}
    row["attention"] = Fact("attention", ", ".join(figures["attention"].values()))
    row["rows"] = Fact("micro-batch", rows)
    for side in ("packed", "unpacked"):
        key = f"{side}_sequences_per_second"
        row[key] = Fact(f"{side}/s", figures[key], "per second")
    for key, name in _RATIOS.items():
        if figures.get(key) is not None:
            low, high = figures[f"{key}_quartiles"]
            row[key] = Fact(name, figures[key], "ratio", interval=(low, high))
    row["packing_factor"] = quantity("packing_factor", figures["packing_factor"])
    if figures.get("peak_memory_bytes") is not None:
        row["peak_memory_bytes"] = Fact("peak", figures["peak_memory_bytes"], "bytes")
        row["useful_tflops"] = Fact("useful TFLOP/s", figures.get("useful_tflops"))
    return row


# Ratios with quartiles -> their headings.
_RATIOS = {
    "speed_up": "speed-up",
    "sorted_time": "sorted HF, time",
    "dense_time": "dense mask, time",
    "flash_time": "HF Flash, time",
}
