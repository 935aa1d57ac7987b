"""The packing: which lengths share a pack, how many such packs to make, and how efficient that is."""

from __future__ import annotations

import html
import json
import os
import time
from collections import Counter
from dataclasses import dataclass, field
from fractions import Fraction
from itertools import chain
from pathlib import Path
from typing import Any, Callable, Dict, Iterable, Optional, Sequence, Tuple, Union

import numpy as np

from pack_data.packing.certificate import Certificate, Proof, proven_bound
from pack_data.packing.histogram import LengthHistogram, whole_slots
from pack_data.reading.durable import write_atomically
from pack_data.reading.fields import Fields, packing_depth, read_object, shown
from pack_data.store import quantities
from pack_data.store.quantities import Filling
from pack_data.store.sequences import LONGEST

_FORMAT = "pack_data recipe 1"
_ACCOUNTING = (
    "algorithm",
    "max_sequence_length",
    "max_sequences_per_pack",
    "sequences",
    "tokens",
    "packs",
    "slots",
    "padding_tokens",
    "efficiency",
    "packing_factor",
    "theoretical_speedup",
    "strategies",
    "largest_depth",
    "lower_bound",
    "lp_bound",
    "gap",
    "solve_seconds",
)
_MOST_SLOTS = 1 << 62  # of all packs; they are counted in int64
# Below this largest possible packing factor, packing shortens an epoch by less than a tenth.
_LITTLE_GAIN = 1.1


@dataclass(frozen=True)
class Packing(Filling):
    """A plan: which lengths share a pack, and how many such packs to make.

    It is normalised: the sum of repeats x strategies is exactly the packed histogram. Two packings are equal if their
    fields are; solve_seconds is not compared.
    """

    algorithm: str
    max_sequence_length: int  # S: slots in one pack
    max_sequences_per_pack: Optional[int]  # D: the depth asked for, None = unlimited
    # Lengths in tokens, longest first; each strategy once, in descending order.
    strategies: Tuple[Tuple[int, ...], ...]
    repeats: Tuple[int, ...]  # packs made with each strategy, > 0
    # Seconds from histogram and strategies to the plan, as the paper measures them.
    solve_seconds: float = field(default=0.0, compare=False)
    lower_bound: Optional[int] = None  # no packing of this depth has fewer packs
    # Value of the linear programme; lower_bound is this value, rounded up and certified.
    lp_bound: Optional[float] = None
    certificate: Optional[Certificate] = None  # the exact prices that prove lower_bound

    def __post_init__(self) -> None:
        object.__setattr__(self, "max_sequence_length", whole_slots(self.max_sequence_length))
        object.__setattr__(
            self, "max_sequences_per_pack", packing_depth(self.max_sequences_per_pack)
        )

    @classmethod
    def of(
        cls,
        algorithm: str,
        histogram: LengthHistogram,
        max_sequences_per_pack: Optional[int],
        packs: Iterable[Tuple[Sequence[int], int]],
        **others: Any,
    ) -> Packing:
        """Return the packing that consists of these packs.

        Args:
            algorithm: name of the packer.
            histogram: the lengths that are packed.
            max_sequences_per_pack: packing depth; None for unlimited.
            packs: (lengths, count) pairs in any order, which are sorted and merged; empty ones are left out.
            **others: further fields of the packing.

        Raises:
            ValueError: a pack has more tokens than slots, or more sequences than the depth.
        """
        repeats: Counter = Counter()
        for lengths, count in packs:
            if count and len(lengths):
                repeats[tuple(sorted(lengths, reverse=True))] += int(count)
        strategies = tuple(sorted(repeats, reverse=True))
        counts = tuple(repeats[strategy] for strategy in strategies)
        packing = cls(
            algorithm,
            histogram.max_sequence_length,
            max_sequences_per_pack,
            strategies,
            counts,
            **others,
        )
        packing._check_strategies()
        return packing

    @classmethod
    def by(
        cls,
        algorithm: str,
        histogram: LengthHistogram,
        max_sequences_per_pack: Optional[int],
        rule: Callable[[LengthHistogram, Optional[int]], Iterable[Tuple[Sequence[int], int]]],
    ) -> Packing:
        """Pack by a rule and measure its time.

        Args:
            algorithm: name of the packer.
            histogram: the lengths to pack.
            max_sequences_per_pack: packing depth; None for unlimited.
            rule: returns the packs of a histogram at a depth.
        """
        depth = packing_depth(max_sequences_per_pack)
        start = time.perf_counter()
        packs = list(rule(histogram, depth))
        seconds = time.perf_counter() - start
        return cls.of(algorithm, histogram, depth, packs, solve_seconds=seconds)

    # ---- accounting; the formulas stand in store/quantities.py -------------------------------------------------------

    @property
    def depths(self) -> np.ndarray:
        """int64 [strategies]: sequences in a pack of each strategy."""
        return np.fromiter(map(len, self.strategies), np.int64, len(self.strategies))

    def placed(self) -> np.ndarray:
        """Return int64 [S + 1]: the sequences of each length in all packs."""
        depths = self.depths
        lengths = np.fromiter(chain.from_iterable(self.strategies), np.int64, int(depths.sum()))
        counts = np.zeros(self.max_sequence_length + 1, np.int64)
        np.add.at(counts, lengths, np.repeat(np.array(self.repeats, np.int64), depths))
        return counts

    @property
    def packs(self) -> int:
        """Packs of all strategies."""
        return sum(self.repeats)

    @property
    def sequences(self) -> int:
        """Sequences in all packs."""
        return int(self.depths @ np.array(self.repeats, np.int64))

    @property
    def tokens(self) -> int:
        """Real tokens."""
        return sum(
            repeat * sum(strategy) for strategy, repeat in zip(self.strategies, self.repeats)
        )

    @property
    def slots(self) -> int:
        """Token positions in all packs."""
        return self.packs * self.max_sequence_length

    @property
    def theoretical_speedup(self) -> float:
        """S x sequences / tokens: the packing factor if no slot were empty; 1 for no packs."""
        return quantities.theoretical_speedup(self.max_sequence_length, self.sequences, self.tokens)

    @property
    def largest_depth(self) -> int:
        """Sequences in the deepest pack made."""
        return max(map(len, self.strategies), default=0)

    @property
    def gap(self) -> Optional[int]:
        """Packs above the proven bound; None if there is no bound."""
        return None if self.lower_bound is None else self.packs - self.lower_bound

    # ---- rules -------------------------------------------------------------------------------------------------------

    def check(self, histogram: LengthHistogram) -> None:
        """Check that the plan places exactly the histogram and obeys S and D.

        Args:
            histogram: the lengths that were packed.

        Raises:
            ValueError: a strategy breaks a limit, or the packs do not hold the histogram.
        """
        if self.max_sequence_length != histogram.max_sequence_length:
            raise self._error(
                f"the packing has packs of {self.max_sequence_length} slots, the histogram is for "
                f"{histogram.max_sequence_length}; use the histogram it was made for"
            )
        self._check_form()
        placed = self.placed()
        differing = np.flatnonzero(placed != histogram.counts)
        if len(differing):
            length = int(differing[0])
            raise self._error(
                f"the packing places {placed[length]} sequences of length {length}, the histogram has "
                f"{histogram.counts[length]}; use the histogram it was made for"
            )

    def _check_form(self) -> None:
        """Raise ValueError unless each strategy obeys S and D and stands once, in order, with its repeats."""
        for number in chain(self.repeats, chain.from_iterable(self.strategies)):
            if type(number) is not int:
                raise self._error(
                    f"{shown(number)} is not a whole number; pass int for lengths and repeats"
                )
        if len(self.strategies) != len(self.repeats):
            raise self._error(
                f"{len(self.strategies)} strategies, but {len(self.repeats)} repeats; pass one for each"
            )
        if self.slots >= _MOST_SLOTS:
            raise self._error(
                "the packs have 2^62 slots or more, too many for int64; use smaller repeats"
            )
        self._check_strategies()
        for previous, strategy in zip(self.strategies, self.strategies[1:]):
            if strategy >= previous:
                raise self._error(
                    f"strategy {strategy} follows {previous}; list each once, in descending order"
                )

    def _check_strategies(self) -> None:
        for strategy, repeat in zip(self.strategies, self.repeats):
            problem = self._problem(strategy, repeat)
            if problem:
                raise self._error(f"strategy {strategy} {problem}")

    def _problem(self, strategy: Tuple[int, ...], repeat: int) -> str:
        """Describe what is wrong with a strategy; empty if it obeys S and D."""
        tokens = sum(strategy)
        depth = self.max_sequences_per_pack
        if min(strategy, default=0) < 1 or list(strategy) != sorted(strategy, reverse=True):
            return "must hold lengths of at least 1, longest first"
        if tokens > self.max_sequence_length:
            return f"needs {tokens} slots, a pack has {self.max_sequence_length}"
        if depth is not None and len(strategy) > depth:
            return f"has {len(strategy)} sequences, the limit is {depth}"
        return "" if repeat >= 1 else f"is repeated {repeat} times; it must be at least once"

    def _error(self, problem: str) -> ValueError:
        return ValueError(f"{self.algorithm}: {problem}")

    # ---- in and out --------------------------------------------------------------------------------------------------

    def to_json(self) -> Dict[str, Any]:
        """Return the accounting as plain values, the object that every packer prints with --json."""
        accounting = {name: getattr(self, name) for name in _ACCOUNTING}
        return {**accounting, "strategies": len(self.strategies)}

    def _repr_html_(self) -> str:
        """Return the accounting for a notebook."""
        return f"<pre>{html.escape(json.dumps(self.to_json(), indent=1))}</pre>"

    def save(self, path: Union[str, os.PathLike]) -> None:
        """Write the recipe as JSON, atomically: the strategies, their repeats, the certificate and the accounting.

        Args:
            path: the file; it is replaced if it exists.
        """
        recipe = json.dumps(self.recipe(), separators=(",", ":"))
        write_atomically(Path(path), f"{recipe}\n".encode())

    def recipe(self) -> Dict[str, Any]:
        """Return the object that `save` writes."""
        return {
            "format": _FORMAT,
            "accounting": self.to_json(),
            "certificate": None if self.certificate is None else self.certificate.to_json(),
            "strategies": self.strategies,
            "repeats": self.repeats,
        }

    @classmethod
    def load(cls, path: Union[str, os.PathLike]) -> Packing:
        """Read a recipe that `save` wrote.

        Args:
            path: the file.

        Raises:
            ValueError: the file is not a recipe, or a strategy breaks a limit.
        """
        fields = read_object(path, way_out="write the recipe again with a packer's --out")
        return cls.from_recipe(fields)

    @classmethod
    def from_recipe(cls, fields: Fields) -> Packing:
        """Return the packing of the fields of a recipe.

        Args:
            fields: the object that `recipe` returned.

        Raises:
            ValueError: it is not a recipe, or a strategy breaks a limit.
        """
        fields.one_of("format", (_FORMAT,))
        accounting = fields.object("accounting")
        certificate = fields.optional("certificate", Fields.object)
        packing = cls(
            accounting.text("algorithm", most=200, empty=False),
            accounting.integer("max_sequence_length", least=1, most=LONGEST),
            accounting.optional("max_sequences_per_pack", Fields.integer, least=1),
            tuple(map(tuple, fields.list_of("strategies", Fields.integers))),
            tuple(fields.integers("repeats")),
            accounting.number("solve_seconds", least=0),
            accounting.optional("lower_bound", Fields.integer, least=0),
            accounting.optional("lp_bound", Fields.number, least=0),
            None if certificate is None else Certificate.from_json(certificate),
        )
        with fields.refusing():
            packing._check_form()
        if packing.to_json() != accounting.tree:
            raise fields.error("accounting", "must match the strategies and repeats")
        return packing


# ---- the proof -------------------------------------------------------------------------------------------------------

_ROUNDING = Fraction(1, 10**12)  # relative; lp_bound is a float


def prove(packing: Packing) -> Proof:
    """Prove that no packing of the same sequences at this depth has fewer packs than packing.lower_bound.

    Args:
        packing: has a certificate; the packings of the optimal packer do.

    Returns:
        The lower bound, derived anew from the certificate.

    Raises:
        ValueError: the packing has no certificate, or one that does not prove its bounds, or a pack breaks a limit.
    """
    certificate = packing.certificate
    if certificate is None:
        raise ValueError(
            f"the {packing.algorithm} recipe has no certificate; the optimal packer writes one"
        )
    packing._check_form()
    for limit in ("max_sequence_length", "max_sequences_per_pack"):
        certified = getattr(certificate, limit)
        packed = getattr(packing, limit)
        if certified != packed:
            raise ValueError(
                f"certificate: {limit} is {certified}, in the recipe {packed}; make the recipe again"
            )
    proof = proven_bound(certificate, packing.placed())
    if packing.lower_bound != proof.lower_bound:
        raise ValueError(
            f"certificate: it proves a lower bound of {proof.lower_bound}, the recipe claims {packing.lower_bound}; "
            "make the recipe again"
        )
    claimed = packing.lp_bound
    if claimed is not None:
        error = abs(Fraction(claimed) - proof.worth)
        if error > _ROUNDING * max(Fraction(1), proof.worth):
            raise ValueError(
                f"certificate: all sequences are worth {float(proof.worth)!r} packs, the recipe claims an lp_bound of "
                f"{claimed!r}; make the recipe again"
            )
    return proof


def statement(packing: Packing) -> str:
    """Prove the lower bound of a packing and return the proof as one sentence; it raises what `prove` raises."""
    proof = prove(packing)
    assert packing.certificate is not None, "a packing without a certificate is not proved"
    depth = packing.max_sequences_per_pack
    limit = "" if depth is None else f" at most {depth} sequences and"
    verdict = "no packing has fewer"
    if packing.packs > proof.lower_bound:
        verdict = f"the best possible has at most {packing.packs - proof.lower_bound:,} fewer"
    return (
        f"proved in exact arithmetic: with the {len(packing.certificate.lengths):,} prices stored, no "
        f"pack of{limit} {packing.max_sequence_length} slots is worth more than 1, all {packing.sequences:,} "
        f"sequences are worth {float(proof.worth):,.3f}, so at least {proof.lower_bound:,} packs are needed; "
        f"this recipe makes {packing.packs:,}: {verdict}"
    )


def of_at_most(largest_factor: float) -> str:
    """Return the largest possible packing factor in words, with a remark if packing gains little."""
    remark = ": rows are nearly full without packing" if largest_factor < _LITTLE_GAIN else ""
    return f"of at most {largest_factor:.3f}{remark}"
