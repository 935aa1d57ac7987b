"""Sequences per second of the same work in two layouts, packed and unpacked, or with two attentions."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any, Callable, Dict, Mapping, Optional, Sequence, Tuple

import numpy as np
import torch

from ipu_packed_bert.benchmarks.layouts import HuggingFaceSide, sorted_by_budget
from ipu_packed_bert.benchmarks.work import BenchmarkWork
from ipu_packed_bert.data.global_batches import SameSequences
from ipu_packed_bert.engine.host import HostEngine
from ipu_packed_bert.engine.host.attention import dense_attention
from ipu_packed_bert.engine.host.devices import clock_of, find_device, product_rate
from ipu_packed_bert.processes.ranks import ONE, Processes
from ipu_packed_bert.settings.pretraining import Config
from ipu_packed_bert.settings.schema import EngineConfig
from ipu_packed_bert.tasks.pretraining import Pretraining
from ipu_packed_bert.training.compare_unpacked import SideBySide, side_by_side
from pack_data.cli.timing import quartiles, rounds_in_turn, timed
from pack_data.display.table import Column, Table, spread, with_interval


def _engine(
    config: Config, work: BenchmarkWork, attention: Optional[str] = None, processes: Processes = ONE
) -> HostEngine:
    """attention: `engine.attention`, where it is not that of `config`."""
    if attention is not None:
        config = replace(config, engine=replace(config.engine, attention=attention))
    return HostEngine(config, Pretraining(config), packing_factor=work.packing_factor, processes=processes)


def compare_layouts(
    config: Config, work: BenchmarkWork, *, rounds: int, bar: Any, processes: Processes = ONE
) -> Dict[str, Any]:
    """Packed rows, and unpacked ones of the same length as BERT has them, with a mask of their padding, in turn.

    processes: each has its own share of the work, and their gradients are added up, as in training.
    """
    engine = other = _engine(config, work, processes=processes)
    if engine.attention.kind == "varlen":
        other = _engine(config, work, dense_attention(config.engine.precision, find_device(config.engine)), processes)
    pair = SameSequences(work.packed, work.unpacked)
    dropout = config.model.hidden_dropout > 0.0
    sides = side_by_side(engine, [pair] * rounds, bar=bar, dropout=dropout, unpacked_by=other)
    assert sides is not None  # the host engine takes any shape
    found = {
        "ranks": processes.size,
        "slots": work.slots,
        "precision": config.engine.precision,
        "attention": {"packed": engine.attention.kind, "unpacked": other.attention.kind},
        "engine": engine.description,
    }
    return {**found, **figures(sides)}


def figures(sides: SideBySide) -> Dict[str, Any]:
    low, speed_up, high = quartiles(sides.speed_ups)
    return {
        "rounds": len(sides.packed),
        "packed_sequences_per_second": float(np.median(sides.packed)),
        "unpacked_sequences_per_second": float(np.median(sides.unpacked)),
        "speed_up": speed_up,
        "speed_up_quartiles": [low, high],
        "packing_factor": sides.packing_factor,
        "share_of_packing_factor": speed_up / sides.packing_factor,
    }


def compare_sorted(config: Config, work: BenchmarkWork, *, rounds: int, bar: Any) -> Dict[str, Any]:
    """Hugging Face's BERT without packs at its best, beside our packs, in turn: how much time it takes over ours.

    Its sequences are sorted by length, its batches hold as many slots as our micro-batches at most, and its heads see
    masked tokens and [CLS] alone. Both have the same weights.
    """
    engine = _engine(config, work)
    device = find_device(config.engine)
    forwards = sorted_by_budget(work.unpacked, config.batch.micro_batch * work.slots)
    rival = HuggingFaceSide(config, engine.weights(), forwards, device, "sdpa")
    clock = clock_of(device, of_process=torch.get_num_threads() == 1)

    def packed() -> float:
        loss = engine.accumulate(work.packed).loss
        engine.optimizer.zero_grad(set_to_none=True)
        return loss

    def turn(side: Callable[[], float], number: int) -> Tuple[float, float]:
        return timed(side, clock)

    seconds = []
    sides = {"packed": partial(turn, packed), "sorted": partial(turn, rival.run)}
    for number, found in rounds_in_turn(sides, rounds, bar):
        (ours, loss), (theirs, other) = found["packed"], found["sorted"]
        # Dropout differs; the sequences and their number do not.
        assert abs(loss - other) <= 0.02 * abs(loss), f"other work: losses {loss}, {other}"
        if number:
            seconds.append((ours, theirs))
    times = np.array(seconds)
    low, ratio, high = quartiles(times[:, 1] / times[:, 0])
    return {
        "sorted_time": ratio,
        "sorted_time_quartiles": [low, high],
        "sorted_slots": sum(each.inputs["input_ids"].numel() for each in forwards) / work.packed["input_ids"].size,
    }


def bfloat16_slowdown() -> float:
    """Seconds of a bfloat16 matrix product over those of a float32 one, on the CPU."""
    bfloat16, float32 = (
        product_rate(torch.device("cpu"), EngineConfig(kind="host", precision=each), size=384)
        for each in ("bfloat16", "float32")
    )
    return float32 / bfloat16


_LAYOUTS = (
    Column("ranks", "ranks"),
    Column("slots", "slots"),
    Column("precision", "precision"),
    Column("attention", "attention"),
    Column("packed_sequences_per_second", "packed/s", form=".2f"),
    Column("unpacked_sequences_per_second", "unpacked/s", form=".2f"),
    with_interval("speed_up", "speed-up", "", ".3f"),
    Column("packing_factor", "factor", form=".3f"),
    Column("share_of_packing_factor", "of it", form=".3f"),
    with_interval("sorted_time", "sorted HF, time", "", ".3f"),
)


def table(found: Sequence[Mapping[str, Any]], title: str, notes: Sequence[str] = ()) -> Table:
    """found: of `compare_layouts`, and of `compare_sorted` where it was measured."""
    rows = []
    for each in found:
        low, high = each["speed_up_quartiles"]
        row = {**each, **spread("speed_up", (low, each["speed_up"], high))}
        row["attention"] = " beside ".join(each["attention"].values())
        if each.get("sorted_time") is not None:
            low, high = each["sorted_time_quartiles"]
            row.update(spread("sorted_time", (low, each["sorted_time"], high)))
        rows.append(row)
    return Table("benchmark", title, _LAYOUTS, rows, tuple(notes))
