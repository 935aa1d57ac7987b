"""Updates of packs beside the same updates of the same sequences, each alone in its row: how fast, and how equal.

Both sides go through one network with one set of weights, in turn, so that they see the same machine. The unpacked side
is BERT as it is without packs: a mask of the padding instead of one of blocks, unless the engine's attention leaves
padding out. The weight update itself is left out: it is the same on both sides, and comes once an update.
"""

from __future__ import annotations

from functools import partial
from typing import Any, Dict, Iterable, List, NamedTuple, Optional

import numpy as np

from ipu_packed_bert.data.global_batches import Batch, GlobalBatches, SameSequences
from ipu_packed_bert.engine.base import Engine, Gradients
from pack_data.cli.command import progress_bar
from pack_data.cli.timing import quartiles, rounds_in_turn

# Gradients of one update from two orders of summation: up to this relative difference they are equal, by precision.
# Measured 1e-6 and 1e-2; a pack without its block mask differs by 0.1 and more.
EXPECTED = {"float32": 1e-4, "tf32": 1e-2, "bfloat16": 5e-2}


class SideBySide(NamedTuple):
    """What came of both sides; the arrays have one value a round."""

    packed: np.ndarray  # sequences per second
    unpacked: np.ndarray
    packing_factor: float  # sequences in a pack, of the batches compared
    loss_difference: Optional[float]  # the largest one, relative; None with dropout, which differs
    gradient_difference: Optional[
        float
    ]  # the largest one, relative, L2 over all gradients of an update

    @property
    def speed_ups(self) -> np.ndarray:
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
    """Compare updates of `batches` from the engine's state, which stays as it is, bit for bit; dropout is off.

    None where the engine has no program for unpacked rows.
    """
    pairs = list(batches.same_sequences(updates))
    rounds = [pairs[number % len(pairs)] for number in range(updates)]
    with progress_bar(2 * (updates + 1), "unpacked beside packed") as bar:
        return side_by_side(engine, rounds, bar=bar)


def side_by_side(
    engine: Engine,
    rounds: Iterable[SameSequences],
    *,
    bar: Any,
    dropout: bool = False,
    unpacked_by: Optional[Engine] = None,
) -> Optional[SideBySide]:
    """Each round's batches in both layouts, in alternating order; the first round is made twice, and warms up.

    unpacked_by: the engine of the unpacked side, of equal weights, where it is another.
    """
    engines = {"packed": engine, "unpacked": unpacked_by or engine}
    rounds = list(rounds)
    pairs = rounds[:1] + rounds

    def one_side(name: str, number: int) -> Optional[Gradients]:
        return engines[name].gradients(
            getattr(pairs[number], name), alone=name == "unpacked", dropout=dropout
        )

    rates: Dict[str, List[float]] = {name: [] for name in engines}
    sequences = packs = 0
    losses, gradients = [0.0], [0.0]
    for number, made in rounds_in_turn(
        {name: partial(one_side, name) for name in engines}, len(rounds), bar
    ):
        found = {name: each for name, each in made.items() if each is not None}
        if len(found) < len(made):
            return None
        if not number:
            continue
        own = found["packed"].result.counts or engine.task.count(pairs[number].packed)
        sequences, packs = sequences + own["sequences"], packs + own["packs"]
        for side, each in found.items():
            rates[side].append(own["sequences"] / seconds_of(each, getattr(pairs[number], side)))
        expected = found["unpacked"].result.loss
        losses.append(abs(found["packed"].result.loss - expected) / max(abs(expected), 1e-30))
        gradients.append(gradient_difference(found["packed"], found["unpacked"]))
    return SideBySide(
        np.array(rates["packed"]),
        np.array(rates["unpacked"]),
        sequences / packs,
        None if dropout else max(losses),
        None if dropout else max(gradients),
    )


def seconds_of(made: Gradients, batch: Batch) -> float:
    """Of the rows that hold something; the time of the others, which fill the batch up, is not counted."""
    return made.result.seconds * float((batch["input_mask"] > 0).any(axis=1).mean())


def gradient_difference(one: Gradients, other: Gradients) -> float:
    """|one - other| / |other|, L2 over all parameters that have a gradient."""
    assert one.by_name.keys() == other.by_name.keys()
    difference = sum(
        float((tensor.double() - other.by_name[name].double()).square().sum())
        for name, tensor in one.by_name.items()
    )
    size = sum(float(tensor.double().square().sum()) for tensor in other.by_name.values())
    return (difference / max(size, 1e-300)) ** 0.5
