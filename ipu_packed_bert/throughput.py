"""Sequences per second of the same work in two layouts, packed and unpacked, or with two attentions; what `benchmark`
measures with."""

from __future__ import annotations

import time
from dataclasses import replace
from typing import Any, Dict, List, NamedTuple, Sequence, Tuple

import numpy as np
import torch

from ipu_packed_bert.config import Config
from ipu_packed_bert.engine.host import HostEngine
from ipu_packed_bert.loader import Batch
from ipu_packed_bert.tasks.pretraining import Pretraining
from pack_data.packing import Packing
from pack_data.packs import PackSchema, assemble, decode
from pack_data.sequences import Example, Sequences
from pack_data.text.examples import masked_count


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
    low, middle, high = np.percentile(values, [25, 50, 75]).tolist()
    return low, middle, high


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
    packed = HostEngine(config, Pretraining(config), packing_factor=work.packing_factor)
    unpacked = HostEngine(config, Pretraining(config), packing_factor=1.0)
    network: Any = unpacked.model
    network.attention_mask = PaddingMask(network.attention_mask.hidden)
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
        raise ValueError(
            f"--lengths: {slots} is not a multiple of {packing.max_sequence_length}, the histogram's; only whole "
            f"multiples are stretched to"
        )
    strategies = tuple(tuple(factor * length for length in strategy) for strategy in packing.strategies)
    return Packing(packing.algorithm, slots, packing.max_sequences_per_pack, strategies, packing.repeats)


def compare_attention(config: Config, work: Work, depth: int, *, rounds: int, bar) -> Comparison:
    """Forward and backward pass of the packs with each attention in turn, in alternating order; the first round warms
    up."""
    config = replace(config, data=replace(config.data, max_sequences_per_pack=depth))
    engines = {
        attention: HostEngine(
            replace(config, engine=replace(config.engine, attention=attention)), Pretraining(config), packing_factor=1.0
        )
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
    squares = sum(
        int((numbers == number).sum(axis=1).astype(np.int64) @ (numbers == number).sum(axis=1))
        for number in range(1, depth + 1)
    )
    slots = numbers.shape[1]
    return Comparison(
        slots, np.array(seconds["sdpa"]), np.array(seconds["varlen"]), squares / (len(numbers) * slots * slots)
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
