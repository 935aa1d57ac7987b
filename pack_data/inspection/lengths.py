"""Lengths of sequences in numbers and as a picture of text."""

from __future__ import annotations

import numpy as np

from pack_data.display.facts import Fact, Facts, number, printed, quantities
from pack_data.packing.histogram import LengthHistogram

_TEXT_BARS = 16  # of the picture below a summary
_TEXT_BAR_CELLS = 50  # characters of its longest bar


def lengths_facts(histogram: LengthHistogram) -> Facts:
    """Return the statistics of the paper's Figure 1."""
    slots = number(histogram.max_sequence_length)
    full = int(histogram.counts[histogram.max_sequence_length])
    reach = f"of {slots} slots"
    if full:
        reach = f"{number(full / histogram.sequences, '%')} fill all {slots} slots"
    notes = {
        "sequences": "",
        "tokens": "",
        "max_sequence_length": "the longest sequence that is allowed",
        "shortest": "",
        "median_length": "",
        "mean_length": "",
        "longest": reach,
        "padding_share": "if each sequence is padded to the end",
        "theoretical_speedup": "possible by packing without any padding",
    }
    rows = quantities(histogram, notes)
    return Facts("Lengths in numbers", rows, name="lengths")


def summary(histogram: LengthHistogram) -> str:
    """Return the statistics as text, with a small picture."""
    slots = number(histogram.max_sequence_length)
    title = f"{histogram.name or 'histogram'}  sequences of at most {slots} tokens"
    text = printed(lengths_facts(histogram)._replace(title=title))
    return f"{text}\n\n{printed(_picture(histogram))}" if histogram.sequences else text


def _picture(histogram: LengthHistogram) -> Facts:
    """Return a bar for each of at most 16 ranges of lengths."""
    S = histogram.max_sequence_length
    edges = np.unique(np.linspace(0, S, min(_TEXT_BARS, S) + 1).astype(int))
    totals = np.add.reduceat(histogram.counts, edges[:-1] + 1)
    rows = []
    for low, high, total in zip(edges[:-1] + 1, edges[1:], totals.tolist()):
        bar = "#" * round(_TEXT_BAR_CELLS * total / totals.max())
        rows.append(
            {
                "low": Fact("from", low),
                "high": Fact("to", high),
                "share": Fact("sequences", total / histogram.sequences, "%"),
                "bar": Fact("", bar or "." * (total > 0)),
            }
        )
    return Facts("", rows)
