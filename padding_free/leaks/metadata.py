"""Batches whose boundaries are broken on purpose between the collator and the model.

One token stream is collated with several cuts.  The inputs that differ among these batches carry the boundaries, under
any name and in any form.  Replacing, removing or renaming them must change the result, or raise an error.
"""

from __future__ import annotations

from typing import Any, Callable, Dict, Iterator, List, Tuple

import torch

from padding_free.collators import Inputs

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


def collate_cuts(
    collate: Callable[[List[int]], Inputs], longest: int
) -> Tuple[Inputs, Dict[str, Inputs], List[str]]:
    """Collate one stream with all cuts.

    Return the correct batch, the others with the same tokens, and the names of the inputs that carry the boundaries.
    """
    batches = {}
    for kind, lengths in _cuts_of(longest).items():
        try:
            batches[kind] = collate(lengths)
        except (IndexError, RuntimeError, TypeError, ValueError):
            continue  # the collator refuses these lengths
    correct = batches.pop("", {})
    others = {}
    for kind, inputs in batches.items():
        if _is_equal(inputs.get("input_ids"), correct.get("input_ids")):
            others[kind] = inputs
    return correct, others, _carriers(correct, others) if others else []


def _carriers(correct: Inputs, others: Dict[str, Inputs]) -> List[str]:
    """List the inputs that carry the boundaries: those that differ between cuts of the same tokens."""
    names = []
    for name, value in correct.items():
        is_same = all(_is_equal(value, inputs.get(name)) for inputs in others.values())
        is_number = isinstance(value, int)  # such as the length of the longest example
        if name != "labels" and not is_same and not is_number:
            names.append(name)
    return names


def broken_inputs(
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
