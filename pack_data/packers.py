"""The packers by name. Each is a module of this package with `pack(histogram, *, max_sequences_per_pack, ...)`."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Callable, Optional, Tuple

if TYPE_CHECKING:
    from pack_data.packing.packing import Packing

PACKERS: Tuple[str, ...] = (
    "none",
    "greedy",
    "first_fit",
    "best_fit",
    "spfhp",
    "lpfhp",
    "nnlshp",
    "optimal",
)

# NNLSHP lists every strategy that fills a pack exactly, about S^(depth - 1) of them, too many beyond depth 3.
DEEPEST = {"nnlshp": 3}


def get_packer(name: str) -> Callable[..., Packing]:
    """Return the `pack` function of a packer; its module is imported on this call.

    Args:
        name: one of `PACKERS`.

    Returns:
        A function of a histogram and a packing depth that returns a :class:`Packing`.

    Raises:
        ValueError: no packer has this name.
    """
    if name not in PACKERS:
        raise ValueError(f"no packer is called {name!r}; use one of {', '.join(PACKERS)}")
    return importlib.import_module(f"pack_data.{name}").pack


def packs_at_depth(name: str, max_sequences_per_pack: Optional[int]) -> bool:
    """Return True if the packer accepts this depth; None is unlimited."""
    deepest = DEEPEST.get(name)
    return deepest is None or (
        max_sequences_per_pack is not None and max_sequences_per_pack <= deepest
    )
