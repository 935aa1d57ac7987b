"""`python -m pack_data`: the list of this package's commands."""

from __future__ import annotations

from pack_data.cli.command import list_commands, run_main

COMMANDS = {
    "build": "text, or sequences made elsewhere, to a packed data set",
    "verify": "reads a data set again and proves that each sequence is in it exactly once",
    "convert": "one file format to another, and packs back to sequences",
    "histogram": "counts lengths, and says what packing them can bring",
    "compare": "every packer on one histogram, side by side",
    "optimal": "packer: as few packs as provably possible",
    "nnlshp": "packer: non-negative least squares histogram-packing",
    "spfhp": "packer: shortest-pack-first histogram-packing",
    "lpfhp": "packer: longest-pack-first histogram-packing",
    "best_fit": "packer: best-fit decreasing",
    "first_fit": "packer: first-fit decreasing",
    "greedy": "packer: concatenates sequences as they arrive",
    "none": "packer: the baseline, one sequence in each pack",
    "certificate": "proves again the lower bound in the optimal packer's recipe",
    "sort": "sorted batching: batches of sequences of similar length",
    "stream": "packs a stream with a bounded buffer: gap, waiting times and speed",
    "batching": "nine ways to make batches of examples, with their properties and costs",
    "benchmark": "builds a large data set and measures time and memory",
}


if __name__ == "__main__":
    raise SystemExit(run_main(lambda argv: list_commands("pack_data", COMMANDS, argv)))
