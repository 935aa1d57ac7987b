"""The packing: which lengths share a pack, how many such packs to make, and how efficient that is."""

from __future__ import annotations

import json
import os
from collections import Counter
from dataclasses import dataclass, field
from fractions import Fraction
from itertools import chain
from pathlib import Path
from typing import Any, Dict, Iterable, Optional, Sequence, Tuple, Union

import numpy as np

from pack_data.display.table import account
from pack_data.packing.certificate import Certificate, Proof, proven_bound
from pack_data.packing.histogram import LengthHistogram, whole_slots
from pack_data.reading.fields import Fields, packing_depth, read_object, shown
from pack_data.reading.files import write_atomically
from pack_data.store.sequences import LONGEST

_FORMAT = "pack_data recipe 1"


@dataclass(frozen=True)
class Packing:
    """A plan: which lengths share a pack, and how many such packs to make.

    It is normalised: the sum of repeats x strategies is exactly the histogram it was made for. Two packings are equal
    if they pack the same; solve_seconds does not count.
    """

    algorithm: str
    max_sequence_length: int  # S: slots in one pack
    max_sequences_per_pack: Optional[int]  # D: the depth asked for, None = unlimited
    strategies: Tuple[Tuple[int, ...], ...]  # lengths in tokens, longest first; each strategy once, in descending order
    repeats: Tuple[int, ...]  # packs made with each strategy, > 0
    solve_seconds: float = field(
        default=0.0, compare=False
    )  # from histogram and strategies to the plan, as in the paper
    lower_bound: Optional[int] = None  # no packing of this depth has fewer packs
    lp_bound: Optional[float] = None  # the value of the linear programme; lower_bound is this, rounded up and certified
    certificate: Optional[Certificate] = None  # the exact prices that prove lower_bound

    @classmethod
    def of(
        cls,
        algorithm: str,
        histogram: LengthHistogram,
        max_sequences_per_pack: Optional[int],
        packs: Iterable[Tuple[Sequence[int], int]],
        **others: Any,
    ) -> Packing:
        """A packing from (lengths, count) pairs, which are sorted and merged; empty ones are left out.  For packers."""
        repeats: Counter = Counter()
        for lengths, count in packs:
            if count and len(lengths):
                repeats[tuple(sorted(lengths, reverse=True))] += int(count)
        strategies = sorted(repeats, reverse=True)
        return cls(
            algorithm,
            histogram.max_sequence_length,
            max_sequences_per_pack,
            tuple(strategies),
            tuple(repeats[strategy] for strategy in strategies),
            **others,
        )

    # ---- accounting: each quantity has its one definition here -------------------------------------------------------

    @property
    def depths(self) -> np.ndarray:
        """int64 [strategies]: sequences in a pack of each strategy."""
        return np.fromiter(map(len, self.strategies), np.int64, len(self.strategies))

    def placed(self) -> np.ndarray:
        """int64 [S + 1]: how many sequences of each length the plan places."""
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
        return sum(repeat * sum(strategy) for strategy, repeat in zip(self.strategies, self.repeats))

    @property
    def slots(self) -> int:
        """Token positions in all packs."""
        return self.packs * self.max_sequence_length

    @property
    def padding_tokens(self) -> int:
        """Slots without a token."""
        return self.slots - self.tokens

    @property
    def efficiency(self) -> float:
        """Tokens / slots, in (0, 1]; 1 for no packs."""
        return self.tokens / self.slots if self.packs else 1.0

    @property
    def packing_factor(self) -> float:
        """Sequences per pack; 1 for no packs."""
        return self.sequences / self.packs if self.packs else 1.0

    @property
    def theoretical_speedup(self) -> float:
        """S x sequences / tokens: the packing factor if no slot were empty; 1 for no packs."""
        return self.max_sequence_length * self.sequences / self.tokens if self.packs else 1.0

    @property
    def largest_depth(self) -> int:
        """Sequences in the deepest pack made."""
        return max(map(len, self.strategies), default=0)

    @property
    def gap(self) -> Optional[int]:
        """Packs above the proven bound; None where there is no bound."""
        return None if self.lower_bound is None else self.packs - self.lower_bound

    # ---- rules -------------------------------------------------------------------------------------------------------

    def check(self, histogram: LengthHistogram) -> None:
        """Raises ValueError unless the plan places exactly the histogram, with nothing over S or D."""
        if self.max_sequence_length != histogram.max_sequence_length:
            raise ValueError(
                f"{self.algorithm}: the packing has packs of {self.max_sequence_length} slots, the histogram is for "
                f"{histogram.max_sequence_length}; use the histogram it was made for"
            )
        self.check_form()
        missing = histogram.counts - self.placed()
        if missing.any():
            length = int(np.flatnonzero(missing)[0])
            raise ValueError(
                f"{self.algorithm}: the packing places {int(histogram.counts[length] - missing[length])} sequences of "
                f"length {length}, the histogram has {int(histogram.counts[length])}; use the histogram it was made for"
            )

    def __post_init__(self) -> None:
        object.__setattr__(self, "max_sequence_length", whole_slots(self.max_sequence_length))
        object.__setattr__(self, "max_sequences_per_pack", packing_depth(self.max_sequences_per_pack))

    def check_form(self) -> None:
        """Raises ValueError unless each strategy obeys S and D, and stands once, in order, with its repeats."""
        S, D = self.max_sequence_length, self.max_sequences_per_pack
        for number in chain(self.repeats, chain.from_iterable(self.strategies)):
            if type(number) is not int:
                raise ValueError(f"{self.algorithm}: {shown(number)} is no whole number; lengths and repeats are")
        if len(self.strategies) != len(self.repeats):
            raise ValueError(
                f"{self.algorithm}: {len(self.strategies)} strategies, {len(self.repeats)} repeats; one each"
            )
        previous: Optional[Tuple[int, ...]] = None
        for strategy, repeat in zip(self.strategies, self.repeats):
            if not strategy or min(strategy) < 1 or list(strategy) != sorted(strategy, reverse=True):
                raise ValueError(f"{self.algorithm}: strategy {strategy}; lengths are at least 1, longest first")
            if sum(strategy) > S:
                raise ValueError(f"{self.algorithm}: strategy {strategy} needs {sum(strategy)} slots, a pack has {S}")
            if D is not None and len(strategy) > D:
                raise ValueError(
                    f"{self.algorithm}: strategy {strategy} has {len(strategy)} sequences, the limit is {D}"
                )
            if repeat < 1:
                raise ValueError(f"{self.algorithm}: strategy {strategy} is repeated {repeat} times; at least once")
            if previous is not None and strategy >= previous:
                raise ValueError(f"{self.algorithm}: strategy {strategy} follows {previous}; each once, descending")
            previous = strategy
        if self.slots >= 2**62:
            raise ValueError(f"{self.algorithm}: the packs have 2^62 slots or more, too many to account for")

    # ---- in and out --------------------------------------------------------------------------------------------------

    def to_json(self) -> Dict[str, Any]:
        """The accounting as plain values, the object that every packer prints with --json."""
        return {
            "algorithm": self.algorithm,
            "max_sequence_length": self.max_sequence_length,
            "max_sequences_per_pack": self.max_sequences_per_pack,
            "sequences": self.sequences,
            "tokens": self.tokens,
            "packs": self.packs,
            "slots": self.slots,
            "padding_tokens": self.padding_tokens,
            "efficiency": self.efficiency,
            "packing_factor": self.packing_factor,
            "theoretical_speedup": self.theoretical_speedup,
            "strategies": len(self.strategies),
            "largest_depth": self.largest_depth,
            "lower_bound": self.lower_bound,
            "lp_bound": self.lp_bound,
            "gap": self.gap,
            "solve_seconds": self.solve_seconds,
        }

    def table(self, name: str = "") -> str:
        """The accounting as text."""
        D = self.max_sequences_per_pack
        depth = "any number of sequences" if D is None else "one sequence" if D == 1 else f"at most {D} sequences"
        title = f"{self.algorithm.upper()}  {depth} in a pack of {self.max_sequence_length} slots"
        rows = [
            ("sequences", f"{self.sequences:,}", ""),
            ("tokens", f"{self.tokens:,}", ""),
            (
                "packs",
                f"{self.packs:,}",
                f"{len(self.strategies):,} strategies, the deepest holds {self.largest_depth}",
            ),
            ("slots", f"{self.slots:,}", ""),
            ("padding", f"{self.padding_tokens:,}", f"{1 - self.efficiency:.3%} of all slots"),
            ("efficiency", f"{self.efficiency:.3%}", _bar(self.efficiency)),
            ("packing factor", f"{self.packing_factor:.3f}", f"of at most {self.theoretical_speedup:.3f}"),
        ]
        if self.lower_bound is not None:
            gap = self.packs - self.lower_bound
            share = f" ({gap / self.lower_bound:.2%})" if self.lower_bound else ""
            verdict = "proven optimal" if gap == 0 else f"{gap:,} packs above it{share}"
            rows.append(("lower bound", f"{self.lower_bound:,}", verdict))
        rows.append(("solved in", _seconds(self.solve_seconds), ""))
        return account(f"{title}  ({name})" if name else title, rows)

    def save(self, path: Union[str, os.PathLike]) -> None:
        """Writes the recipe as JSON: what `load` needs, and the accounting.  Atomic."""
        recipe = {
            "format": _FORMAT,
            "accounting": self.to_json(),
            "certificate": None if self.certificate is None else self.certificate.to_json(),
            "strategies": self.strategies,
            "repeats": self.repeats,
        }
        write_atomically(Path(path), (json.dumps(recipe, separators=(",", ":")) + "\n").encode())

    @classmethod
    def load(cls, path: Union[str, os.PathLike]) -> Packing:
        """Reads what `save` wrote, and checks its form."""
        fields = read_object(path, way_out="write the recipe again with a packer's --out")
        fields.one_of("format", (_FORMAT,))
        accounting, certificate = fields.object("accounting"), fields.optional("certificate", Fields.object)
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
            packing.check_form()
        if packing.to_json() != accounting.tree:
            raise fields.error("accounting", "it is not that of the strategies and repeats")
        return packing


def _bar(share: float, width: int = 30) -> str:
    filled = int(share * width)
    return "[" + "#" * filled + "." * (width - filled) + "]"


def _seconds(seconds: float) -> str:
    return f"{seconds * 1e3:.1f} ms" if seconds < 1 else f"{seconds:.2f} s"


_ROUNDING = Fraction(1, 10**12)  # relative; lp_bound is a float


def prove(packing: Packing) -> Proof:
    """Proves that no packing of the same sequences at this depth has fewer packs than packing.lower_bound.

    Raises ValueError where the packing has no certificate, or one that does not prove its bounds, or where a pack
    breaks a limit.
    """
    certificate = packing.certificate
    if certificate is None:
        raise ValueError(f"the {packing.algorithm} recipe has no certificate; the optimal packer writes one")
    packing.check_form()
    for limit in ("max_sequence_length", "max_sequences_per_pack"):
        ours, theirs = getattr(packing, limit), getattr(certificate, limit)
        if ours != theirs:
            raise ValueError(f"certificate: it is for {limit} {theirs}, the recipe for {ours}; make the recipe again")
    proof = proven_bound(certificate, packing.placed())
    if packing.lower_bound != proof.lower_bound:
        raise ValueError(
            f"certificate: it proves a lower bound of {proof.lower_bound}, the recipe claims {packing.lower_bound}; "
            "make the recipe again"
        )
    claimed = packing.lp_bound
    if claimed is not None and abs(Fraction(claimed) - proof.worth) > _ROUNDING * max(Fraction(1), proof.worth):
        raise ValueError(
            f"certificate: all sequences are worth {float(proof.worth)!r} packs, the recipe claims an lp_bound of "
            f"{claimed!r}; make the recipe again"
        )
    return proof


def statement(packing: Packing, proof: Proof) -> str:
    """The proof as one sentence."""
    assert packing.certificate is not None, "what was proved has one"
    depth = packing.max_sequences_per_pack
    most = "" if depth is None else f" at most {depth} sequences and"
    verdict = (
        "no packing has fewer"
        if packing.packs == proof.lower_bound
        else (f"the best possible has at most {packing.packs - proof.lower_bound:,} fewer")
    )
    return (
        f"proved in exact arithmetic: with the {len(packing.certificate.lengths):,} prices stored, no "
        f"pack of{most} {packing.max_sequence_length} slots is worth more than 1, all {packing.sequences:,} "
        f"sequences are worth {float(proof.worth):,.3f}, so at least {proof.lower_bound:,} packs are needed; "
        f"this recipe makes {packing.packs:,}: {verdict}"
    )
