"""Sequences per second of the same work in two layouts, packed and unpacked, or with two attentions; what `benchmark`
measures with."""

from __future__ import annotations

import time
from dataclasses import replace
from typing import Any, Dict, List, Mapping, NamedTuple, Optional, Sequence, Tuple

import numpy as np
import torch

from ipu_packed_bert.compare_unpacked import SideBySide, quartiles, side_by_side
from ipu_packed_bert.config import Config
from ipu_packed_bert.engine.host import HostEngine
from ipu_packed_bert.engine.host.attention import dense_attention
from ipu_packed_bert.engine.host.devices import find_device
from ipu_packed_bert.loader import Batch, SameSequences
from ipu_packed_bert.processes import ONE, Processes
from ipu_packed_bert.tasks.pretraining import Pretraining
from pack_data.display.table import text_table
from pack_data.packing import Packing
from pack_data.sequences import Example, Sequences
from pack_data.store.packs import PackSchema, assemble, decode
from pack_data.text.examples import masked_count


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
    """What came of packed and unpacked rows of one length in one precision."""

    ranks: int  # processes that shared each batch
    slots: int
    precision: str
    attention: Tuple[str, str]  # of packed and of unpacked rows
    engine: str
    sides: SideBySide

    def to_json(self) -> Dict[str, Any]:
        sides = self.sides
        low, middle, high = quartiles(sides.speed_ups)
        return {
            "ranks": self.ranks,
            "slots": self.slots,
            "precision": self.precision,
            "attention": dict(zip(("packed", "unpacked"), self.attention)),
            "engine": self.engine,
            "rounds": len(sides.packed),
            "packed_sequences_per_second": float(np.median(sides.packed)),
            "unpacked_sequences_per_second": float(np.median(sides.unpacked)),
            "speed_up": middle,
            "speed_up_quartiles": [low, high],
            "packing_factor": sides.packing_factor,
            "share_of_packing_factor": middle / sides.packing_factor,
        }


def draw_work(
    packing: Packing,
    *,
    packs: int,
    micro_batch: int,
    vocabulary: int,
    max_predictions: int,
    seed: int,
    share: Tuple[int, int] = (0, 1),
) -> Work:
    """`packs` packs drawn from the packing's strategies by how often it uses them, filled with random tokens.

    Of many draws the one whose packing factor is nearest to the whole packing's, among those whose sequences divide
    into micro-batches, so that neither layout has an empty row. `share`: (index, parts), the rows of one of several
    processes; all of them have as many.
    """
    index, parts = share
    rng = np.random.default_rng(seed)
    often = np.array(packing.repeats, dtype=np.float64) / packing.packs
    draws = [[packing.strategies[number] for number in rng.choice(len(often), packs, p=often)] for _ in range(1000)]
    even = [draw for draw in draws if sum(map(len, draw)) % (parts * micro_batch) == 0]
    if not even:
        raise ValueError(
            f"none of {len(draws):,} draws of {packs} packs has a multiple of {parts * micro_batch} sequences, so that "
            "micro-batches are full; choose a smaller --micro-batch, or another --seed"
        )
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
        batch.update({name: np.full(rows, scale, dtype=np.float32) for name, scale in scales.items()})
        own = slice(index * rows // parts, (index + 1) * rows // parts)
        return {name: values[own] for name, values in batch.items()}

    depth = max(len(strategy) for strategy in drawn)
    return Work(
        packed=lay_out(packed_at, packing.max_sequences_per_pack or depth),
        unpacked=lay_out(alone_at, 1),
        sequences=len(lengths),
        tokens=int(sum(lengths)),
    )


def measure(
    config: Config,
    work: Work,
    *,
    rounds: int,
    bar,
    unpacked_attention: Optional[str] = None,
    processes: Processes = ONE,
) -> Measurement:
    """Both layouts in turn, in alternating order; a first round, which warms up, is not counted.

    unpacked_attention: `engine.attention` of the unpacked side, where it is not that of `config`. processes: each has
    its own share of the work, and their gradients are added up, as in training.
    """

    def built(config: Config) -> HostEngine:
        return HostEngine(config, Pretraining(config), packing_factor=work.packing_factor, processes=processes)

    engine = other = built(config)
    if unpacked_attention is not None:
        other = built(replace(config, engine=replace(config.engine, attention=unpacked_attention)))
    pair = SameSequences(work.packed, work.unpacked)
    dropout = config.model.hidden_dropout > 0.0
    sides = side_by_side(engine, [pair] * rounds, bar=bar, dropout=dropout, unpacked_by=other)
    assert sides is not None  # the host engine takes any shape
    slots, kinds = work.packed["input_ids"].shape[1], (engine.attention.kind, other.attention.kind)
    return Measurement(processes.size, slots, config.engine.precision, kinds, engine.description, sides)


class Comparison(NamedTuple):
    """Dense mask and attention within sequences on the same packs: seconds, one value a round."""

    slots: int
    precision: str
    kind: str  # of the dense attention: "sdpa" or "eager"
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
            "precision": self.precision,
            "dense_attention": self.kind,
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
        raise ValueError(
            f"rows of {slots} slots: not a multiple of {packing.max_sequence_length}, the histogram's; only whole "
            "multiples are stretched to"
        )
    strategies = tuple(tuple(factor * length for length in strategy) for strategy in packing.strategies)
    return Packing(packing.algorithm, slots, packing.max_sequences_per_pack, strategies, packing.repeats)


def compare_attention(config: Config, work: Work, depth: int, *, rounds: int, bar) -> Comparison:
    """Forward and backward pass of the packs in turn with attention within each sequence and with the dense attention
    that is faster in this precision, in alternating order; the first round warms up."""
    kind = dense_attention(config.engine.precision, find_device(config.engine), dropout=config.model.attention_dropout)
    config = replace(config, data=replace(config.data, max_sequences_per_pack=depth))
    engines = {
        attention: HostEngine(
            replace(config, engine=replace(config.engine, attention=attention)), Pretraining(config), packing_factor=1.0
        )
        for attention in (kind, "varlen")
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
    squares = sum(
        int((numbers == number).sum(axis=1).astype(np.int64) @ (numbers == number).sum(axis=1))
        for number in range(1, depth + 1)
    )
    slots = numbers.shape[1]
    return Comparison(
        slots,
        config.engine.precision,
        kind,
        np.array(seconds[kind]),
        np.array(seconds["varlen"]),
        squares / (len(numbers) * slots * slots),
    )


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


def spread(values: np.ndarray) -> str:
    """`1.920 (1.911..1.934)`: the median and the quartiles."""
    low, middle, high = quartiles(values)
    return f"{middle:.3f} ({low:.3f}..{high:.3f})"


def comparison_table(comparisons: Sequence[Comparison]) -> str:
    rows = [
        ("", "", "within", "dense", "dense mask", "within sequences", "varlen over dense"),
        ("slots", "precision", "sequences", "attention", "seconds", "seconds", "(quartiles)"),
    ]
    for each in comparisons:
        dense, varlen = (f"{np.median(seconds):.3f}" for seconds in (each.dense, each.varlen))
        share, times = f"{each.share:.1%}", spread(each.speed_ups)
        rows.append((f"{each.slots}", each.precision, share, each.kind, dense, varlen, times))
    return "\n".join(text_table(rows, left=(1, 3, 6)))


def table(measurements: Sequence[Mapping[str, Any]]) -> str:
    """measurements: `Measurement.to_json` of each."""
    rows: List[Tuple[str, ...]] = [
        ("", "", "", "attention", "sequences/s", "sequences/s", "speed-up", "packing", "of the"),
        ("ranks", "slots", "precision", "packed, unpacked", "packed", "unpacked", "(quartiles)", "factor", "factor"),
    ]
    for each in measurements:
        low, high = each["speed_up_quartiles"]
        rows.append(
            (
                f"{each['ranks']}",
                f"{each['slots']}",
                each["precision"],
                ", ".join(each["attention"].values()),
                *(f"{each[side + '_sequences_per_second']:.2f}" for side in ("packed", "unpacked")),
                f"{each['speed_up']:.3f} ({low:.3f}..{high:.3f})",
                f"{each['packing_factor']:.3f}",
                f"{each['share_of_packing_factor']:.3f}",
            )
        )
    return "\n".join(text_table(rows, left=(2, 3, 6)))
