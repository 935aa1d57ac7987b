"""Speed and equality of packed updates and of updates of the same sequences with one sequence per row.

Both sides run in turn on one network with the same weights, so that the state of the machine affects them equally. The
unpacked side is plain BERT: a padding mask instead of a block mask, unless the engine's attention skips padding. The
weight update is left out, because it is the same on both sides.
"""

from __future__ import annotations

from typing import Any, Dict, Iterable, NamedTuple, Optional

import numpy as np

from ipu_packed_bert.data.global_batches import Batch, GlobalBatches, SameSequences
from ipu_packed_bert.engine.base import Engine, Gradients
from ipu_packed_bert.engine.timing import quartiles, rounds_in_turn
from pack_data.cli.terminal import progress_bar
from pack_data.store.quantities import packing_factor

# Largest relative difference of equal gradients that were summed in different orders, by precision. Measured: 1e-6 in
# float32 and 1e-2 in bfloat16; without its block mask a pack differs by 0.1 or more.
EXPECTED = {"float32": 1e-4, "tf32": 1e-2, "bfloat16": 5e-2}


class SideBySide(NamedTuple):
    """Result of a comparison; the arrays have one value per round."""

    packed: np.ndarray  # sequences per second
    unpacked: np.ndarray  # sequences per second
    packing_factor: float  # sequences per pack, in the batches compared
    loss_difference: Optional[float]  # largest relative difference; None with dropout
    # Largest relative difference, L2 over all gradients of an update; None with dropout, which differs between sides.
    gradient_difference: Optional[float]

    @property
    def speed_ups(self) -> np.ndarray:
        """Speed of the packed side divided by that of the unpacked side, per round."""
        return self.packed / self.unpacked

    def to_json(self) -> Dict[str, Any]:
        low, speed_up, high = quartiles(self.speed_ups)
        return {
            "updates": len(self.packed),
            "packed_sequences_per_second": float(np.median(self.packed)),
            "unpacked_sequences_per_second": float(np.median(self.unpacked)),
            "speedup": speed_up,
            "speedup_quartiles": [low, high],
            "packing_factor": self.packing_factor,
            "loss_difference": self.loss_difference,
            "gradient_difference": self.gradient_difference,
        }


def compare_unpacked(
    engine: Engine, batches: GlobalBatches, *, updates: int
) -> Optional[SideBySide]:
    """Compare packed and unpacked updates without dropout; the state of the engine does not change.

    Return None if the engine has no program for unpacked rows.
    """
    pairs = list(batches.same_sequences(updates))
    rounds = [pairs[number % len(pairs)] for number in range(updates)]
    with progress_bar(2 * (updates + 1), "packed and unpacked") as bar:
        return side_by_side(engine, rounds, bar=bar)


def side_by_side(
    engine: Engine,
    rounds: Iterable[SameSequences],
    *,
    bar: Any,
    dropout: bool = False,
    unpacked_by: Optional[Engine] = None,
) -> Optional[SideBySide]:
    """Run the batches of each round in both layouts, in alternating order; the first round runs twice, to warm up.

    ``unpacked_by`` is the engine of the unpacked side, if it differs; its weights must be equal.
    """
    rounds = list(rounds)
    pairs = rounds[:1] + rounds

    def run_packed(number: int) -> Optional[Gradients]:
        return engine.gradients(pairs[number].packed, dropout=dropout)

    def run_unpacked(number: int) -> Optional[Gradients]:
        batch = pairs[number].unpacked
        return (unpacked_by or engine).gradients(batch, alone=True, dropout=dropout)

    sides = {"packed": run_packed, "unpacked": run_unpacked}
    packed_rates = []
    unpacked_rates = []
    sequences = packs = 0
    loss_difference = gradient = 0.0
    for number, results in rounds_in_turn(sides, len(rounds), bar):
        packed = results["packed"]
        unpacked = results["unpacked"]
        if packed is None or unpacked is None:
            return None
        if not number:
            continue
        batch, unpacked_batch = pairs[number]
        counts = packed.result.counts or engine.task.count(batch)
        sequences += counts["sequences"]
        packs += counts["packs"]
        packed_rates.append(counts["sequences"] / _seconds_of(packed, batch))
        unpacked_rates.append(counts["sequences"] / _seconds_of(unpacked, unpacked_batch))

        loss = unpacked.result.loss
        difference = abs(packed.result.loss - loss) / max(abs(loss), 1e-30)
        loss_difference = max(loss_difference, difference)
        gradient = max(gradient, _gradient_difference(packed, unpacked))
    return SideBySide(
        np.array(packed_rates),
        np.array(unpacked_rates),
        packing_factor(sequences, packs),
        None if dropout else loss_difference,
        None if dropout else gradient,
    )


def _seconds_of(gradients: Gradients, batch: Batch) -> float:
    """Return the seconds of a batch, scaled to the fraction of rows that are not empty."""
    return gradients.result.seconds * float((batch["input_mask"] > 0).any(axis=1).mean())


def _gradient_difference(gradients: Gradients, expected: Gradients) -> float:
    """Return |gradients - expected| / |expected|, L2 over all parameters that have a gradient."""
    assert gradients.by_name.keys() == expected.by_name.keys()
    difference = size = 0.0
    for name, tensor in gradients.by_name.items():
        reference = expected.by_name[name].double()
        difference += float((tensor.double() - reference).square().sum())
        size += float(reference.square().sum())
    return (difference / max(size, 1e-300)) ** 0.5
