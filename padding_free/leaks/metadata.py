"""Batches whose boundaries are broken on purpose between the collator and the model.

One token stream is collated with several cuts.  The inputs that differ among these batches carry the boundaries, under
any name and in any form.  Replacing, removing or renaming them must change the result, or raise an error.
"""

from __future__ import annotations

import contextlib
from typing import Any, Dict, Iterator, List, Tuple

import numpy as np
import torch

from padding_free.collators import Inputs
from padding_free.leaks.placing import PlacedRow
from padding_free.leaks.subject import Subject

MOST_TOKENS = 12  # of two examples that are merged


def _cuts_of(longest: int) -> Dict[str, List[int]]:
    """Return lengths of examples that cut one stream, by the fault that they imitate; the first cut is correct."""
    most = min(MOST_TOKENS, longest)
    short = max(1, most * 2 // 5)
    rest = most - short
    correct = [short, rest, short, rest]
    cuts = {
        "merged": [most, short, rest],
        "shifted": [short + 1, rest, short, rest - 1],
        "reordered": correct[::-1],
        "reused": [1, most - 1, 1, most - 1],
    }
    possible = {"": correct}
    for kind, lengths in cuts.items():
        if min(lengths) > 0 and max(lengths) <= longest and lengths != correct:
            possible[kind] = lengths
    return possible


class BrokenBatches:
    """One stream of tokens, collated with the correct boundaries and with others.

    Args:
        subject: The model and its calls.
        longest: Tokens of the longest example.
    """

    def __init__(self, subject: Subject, longest: int) -> None:
        self._subject = subject
        draw = np.random.default_rng(0)
        stream = draw.integers(2, max(subject.vocabulary, 3), 2 * MOST_TOKENS)
        batches: Dict[str, Inputs] = {}
        for kind, lengths in _cuts_of(longest).items():
            ends = np.cumsum(lengths)
            parts = np.split(stream[: ends[-1]], ends[:-1])
            examples = [{"input_ids": ids, "labels": ids} for ids in parts]
            # The collator may refuse these lengths.
            with contextlib.suppress(IndexError, RuntimeError, TypeError, ValueError):
                batches[kind] = subject.row(examples).inputs
        self._correct = batches.pop("", {})
        self._others = {}  # with the same tokens
        for kind, inputs in batches.items():
            if _is_equal(inputs.get("input_ids"), self._correct.get("input_ids")):
                self._others[kind] = inputs
        # The names of the inputs that carry the boundaries.
        self.names = _carriers(self._correct, self._others) if self._others else []

    def _logits(self, inputs: Inputs) -> torch.Tensor:
        with torch.no_grad():
            return self._subject.logits_of(PlacedRow(inputs, [], []))

    def without_effect(self) -> str:
        """Break the boundaries in each way; return the first one with the same result, bit by bit, or ""."""
        self._subject.model.eval()
        expected = self._logits(self._correct)
        for kind, inputs in _broken_inputs(self._correct, self._others, self.names):
            try:
                # A model may remember the boundaries of the batch before.
                self._logits(self._correct)
                actual = self._logits(inputs)
            except ValueError:
                continue
            if torch.equal(actual, expected):
                return kind
        return ""

    def ignored_inputs(self) -> str:
        """Name the inputs with boundaries that change no logit if they are broken, or else all of them."""
        if not self._others:
            return ""
        if not self.names:
            return ", and the batch carries no boundaries"
        ignored = []
        expected = self._logits(self._correct)
        for name in self.names:
            with contextlib.suppress(ValueError):
                changed = {**self._correct, name: next(iter(self._others.values())).get(name)}
                if torch.equal(self._logits(changed), expected):
                    ignored.append(name)
        if not ignored:
            return f", despite {', '.join(self.names)}"
        return f", which ignores {', '.join(ignored)}"


def _carriers(correct: Inputs, others: Dict[str, Inputs]) -> List[str]:
    """List the inputs that carry the boundaries: those that differ between cuts of the same tokens."""
    names = []
    for name, value in correct.items():
        is_same = all(_is_equal(value, inputs.get(name)) for inputs in others.values())
        is_number = isinstance(value, int)  # such as the length of the longest example
        if name != "labels" and not is_same and not is_number:
            names.append(name)
    return names


def _broken_inputs(
    correct: Inputs, others: Dict[str, Inputs], names: List[str]
) -> Iterator[Tuple[str, Inputs]]:
    """Iterate over the changes of the inputs `names`, one at a time, and the inputs with that change."""
    for kind, inputs in others.items():
        replaced = {name: inputs[name] for name in names if name in inputs}
        yield kind, {**correct, **replaced}
    kept = {name: value for name, value in correct.items() if name not in names}
    carried = {name: correct[name] for name in names}
    yield "dropped", kept
    yield "renamed", {**kept, **{f"renamed_{name}": value for name, value in carried.items()}}
    yield "nested", {**kept, "metadata": carried}


def _is_equal(value: Any, other: Any) -> bool:
    if torch.is_tensor(value) and torch.is_tensor(other):
        return value.shape == other.shape and bool((value == other).all())
    if torch.is_tensor(value) or torch.is_tensor(other):
        return False
    return bool(value is other or repr(value) == repr(other))
