"""The accounting of a packing as text, and its padding as a picture."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Union

from pack_data.display.facts import Facts, number, printed, quantities
from pack_data.display.picture import packing_bars, write
from pack_data.packing.packing import Packing, of_at_most
from pack_data.reading.words import counted
from pack_data.store.data_set import PackStore

_BAR_CELLS = 30  # characters of the bar that shows the efficiency


def table(packing: Packing, name: str = "") -> str:
    """Return the accounting of a packing as text.

    Args:
        packing: what to describe.
        name: name of the histogram, for the title.

    Returns:
        An underlined title, and one line for each quantity.
    """
    return printed(_facts(packing, name))


def _facts(packing: Packing, name: str) -> Facts:
    D = packing.max_sequences_per_pack
    depth = f"at most {D} sequences"
    if D is None:
        depth = "any number of sequences"
    elif D == 1:
        depth = "one sequence"
    slots = number(packing.max_sequence_length)
    title = f"{packing.algorithm.upper()}  {depth} in a pack of {slots} slots"
    if name:
        title += f"  ({name})"

    filled = int(packing.efficiency * _BAR_CELLS)
    verdict = "proven optimal"
    if packing.gap:
        share = number(packing.gap / packing.lower_bound, "%") if packing.lower_bound else ""
        verdict = f"{counted(packing.gap, 'pack')} above it ({share})"
    notes = {
        "sequences": "",
        "tokens": "",
        "packs": "",
        "strategies": f"the deepest holds {packing.largest_depth}",
        "slots": "",
        "padding_tokens": f"{number(packing.padding_share, 'of the slots')} of all slots",
        "efficiency": f"[{'#' * filled:.<{_BAR_CELLS}}]",
        "packing_factor": of_at_most(packing.theoretical_speedup),
        "lower_bound": verdict,
        "solve_seconds": "",
    }
    rows = quantities(packing, notes)
    rows["strategies"] = rows["strategies"]._replace(value=len(packing.strategies))
    if packing.lower_bound is None:
        del rows["lower_bound"]
    return Facts(title, rows)


def plot(value: Any, path: Union[str, Path]) -> None:
    """Draw the padding before and after packing into a .png, .pdf or .svg file.

    Args:
        value: a `Packing`, a result of `pack` and its siblings (`PackedLengths`), or a `PackStore`.
        path: the file; it is replaced if it exists.
    """
    if isinstance(value, PackStore):
        counts: Any = value.manifest
        slots = value.schema.max_sequence_length
    else:
        counts = getattr(value, "packing", value)
        slots = counts.max_sequence_length
    title = f"{counted(counts.sequences, 'sequence')} in rows of {slots} slots"
    write([packing_bars(title, counts.tokens, counts.sequences, counts.packs, slots)], path)
