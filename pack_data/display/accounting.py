"""The accounting of a packing as text, and its padding as a picture."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Union

from pack_data.display.picture import plot_padding
from pack_data.display.table import account, facts_table
from pack_data.packing.packing import Packing, of_at_most
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
    D = packing.max_sequences_per_pack
    depth = f"at most {D} sequences"
    if D is None:
        depth = "any number of sequences"
    elif D == 1:
        depth = "one sequence"
    title = (
        f"{packing.algorithm.upper()}  {depth} in a pack of {packing.max_sequence_length:,} slots"
    )
    if name:
        title += f"  ({name})"

    filled = int(packing.efficiency * _BAR_CELLS)
    bar = "[" + "#" * filled + "." * (_BAR_CELLS - filled) + "]"
    kinds = (
        "1 strategy" if len(packing.strategies) == 1 else f"{len(packing.strategies):,} strategies"
    )
    notes = {
        "sequences": "",
        "tokens": "",
        "packs": f"{kinds}, the deepest holds {packing.largest_depth}",
        "slots": "",
        "padding_tokens": f"{packing.padding_share:.3%} of all slots",
        "efficiency": bar,
        "packing_factor": of_at_most(packing.theoretical_speedup),
    }
    if packing.lower_bound is not None:
        verdict = "proven optimal"
        if packing.gap:
            share = f" ({packing.gap / packing.lower_bound:.2%})" if packing.lower_bound else ""
            verdict = f"{packing.gap:,} packs above it{share}"
        notes["lower_bound"] = verdict
    facts = facts_table("accounting", title, packing, notes)
    seconds = packing.solve_seconds
    time = f"{seconds * 1e3:.1f} ms" if seconds < 1 else f"{seconds:.2f} s"
    rows = [*facts.rows, {"what": "solved in", "value": time, "about": ""}]
    return account(facts._replace(rows=rows))


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
    plot_padding(path, counts.tokens, counts.sequences, counts.packs, slots)
