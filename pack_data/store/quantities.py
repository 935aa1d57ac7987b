"""The quantities of packings, data sets and runs: one definition for each, with its name, unit and formula.

Tables, JSON objects, pages, logs and model cards take their names and values from here; `docs/glossary.md` lists them.
"""

from __future__ import annotations

from typing import Any, Callable, NamedTuple, Optional

import numpy as np


def padding_tokens(slots: int, tokens: int) -> int:
    """Return the number of slots without a token."""
    return slots - tokens


def efficiency(tokens: int, slots: int) -> float:
    """Return the fraction of the slots that hold a token; 1 for no slots."""
    return tokens / slots if slots else 1.0


def padding_share(tokens: int, slots: int) -> float:
    """Return the fraction of the slots that hold no token; 0 for no slots."""
    return 1.0 - efficiency(tokens, slots)


def packing_factor(sequences: int, packs: int) -> float:
    """Return the mean number of sequences per pack; 1 for no packs."""
    return sequences / packs if packs else 1.0


def speedup(max_sequence_length: int, sequences: int, slots: int) -> float:
    """Return the slots of one sequence per row, divided by the slots used; 1 for no slots."""
    return max_sequence_length * sequences / slots if slots else 1.0


def theoretical_speedup(max_sequence_length: int, sequences: int, tokens: int) -> float:
    """Return the packing factor of a packing without padding; 1 for no tokens."""
    return speedup(max_sequence_length, sequences, tokens)


def padding_avoided(packs: int, sequences: int, tokens: int, max_sequence_length: int) -> float:
    """Return the fraction of the padding of one sequence per row that packs avoid; 0 if there is none."""
    unpacked = sequences * max_sequence_length - tokens
    packed = packs * max_sequence_length - tokens
    return 1.0 - packed / unpacked if unpacked else 0.0


def sequences_per_second(sequences: int, seconds: float) -> float:
    """Return the speed in sequences; 0 for no time."""
    return sequences / seconds if seconds else 0.0


def tokens_per_second(tokens: int, seconds: float) -> float:
    """Return the speed in tokens; 0 for no time."""
    return tokens / seconds if seconds else 0.0


class Filling:
    """The quantities of whatever has packs, sequences, tokens, slots and max_sequence_length."""

    @property
    def padding_tokens(self: Any) -> int:
        """Slots without a token."""
        return padding_tokens(self.slots, self.tokens)

    @property
    def padding_share(self: Any) -> float:
        """The fraction of the slots without a token; 0 for no slots."""
        return padding_share(self.tokens, self.slots)

    @property
    def efficiency(self: Any) -> float:
        """Tokens / slots, in (0, 1]; 1 for no slots."""
        return efficiency(self.tokens, self.slots)

    @property
    def packing_factor(self: Any) -> float:
        """Sequences per pack; 1 for no packs."""
        return packing_factor(self.sequences, self.packs)

    @property
    def speedup(self: Any) -> float:
        """Slots of one sequence per row / slots; 1 for no slots."""
        return speedup(self.max_sequence_length, self.sequences, self.slots)


class _Quantity(NamedTuple):
    """A quantity as it is printed.

    function: computes it; None if it is counted. formula: the same in Python, in the arguments of the function.
    """

    name: str
    unit: str
    formula: str = "counted"
    function: Optional[Callable[..., Any]] = None


# Attribute, also the key in JSON -> the quantity. What is counted under its own name, such as packs, needs no entry.
QUANTITIES = {
    "max_sequence_length": _Quantity("slots of a row", "slots"),
    "median_length": _Quantity("median", "tokens"),
    "mean_length": _Quantity("mean", "tokens", "tokens / sequences"),
    "largest_depth": _Quantity("deepest pack", "sequences"),
    "padding_tokens": _Quantity("padding", "slots", "slots - tokens", padding_tokens),
    "padding_share": _Quantity(
        "padding share", "of the slots", "1 - tokens / slots", padding_share
    ),
    "efficiency": _Quantity("efficiency", "of the slots", "tokens / slots", efficiency),
    "packing_factor": _Quantity(
        "packing factor", "sequences per pack", "sequences / packs", packing_factor
    ),
    "speedup": _Quantity("speed-up", "times", "max_sequence_length * sequences / slots", speedup),
    "theoretical_speedup": _Quantity(
        "largest speed-up",
        "times",
        "max_sequence_length * sequences / tokens",
        theoretical_speedup,
    ),
    "padding_avoided": _Quantity(
        "padding avoided",
        "of the padding of unpacked rows",
        "(sequences - packs) * max_sequence_length / (sequences * max_sequence_length - tokens)",
        padding_avoided,
    ),
    "lower_bound": _Quantity("lower bound", "packs"),
    "solve_seconds": _Quantity("solved in", "s", "measured"),
    "peak_memory": _Quantity("memory", "bytes", "measured"),
    "gap": _Quantity("gap", "packs", "packs - lower_bound"),
    "sequences_per_second": _Quantity(
        "speed in sequences", "sequences/s", "sequences / seconds", sequences_per_second
    ),
    "tokens_per_second": _Quantity(
        "speed in tokens", "tokens/s", "tokens / seconds", tokens_per_second
    ),
    "sequences_per_update": _Quantity(
        "sequences per update", "sequences", "packs_per_update * packing_factor"
    ),
}


def quantity_of(key: str) -> _Quantity:
    """Return the quantity of an attribute; one without an entry is counted under its own name."""
    return QUANTITIES.get(key, _Quantity(key, key))


def rounded_up(lengths: np.ndarray, multiple_of: int) -> np.ndarray:
    """Return the slots that sequences of these lengths take: the lengths, rounded up to a multiple as int64."""
    if multiple_of == 1:
        return lengths
    return -(-np.asarray(lengths, np.int64) // multiple_of) * multiple_of
