"""`python -m pack_data`: the list of the packers."""

from __future__ import annotations

from pack_data.cli.command import list_commands, run_main

COMMANDS = {
    "optimal": "packer: as few packs as provably possible",
    "nnlshp": "packer: non-negative least squares histogram-packing",
    "spfhp": "packer: shortest-pack-first histogram-packing",
    "lpfhp": "packer: longest-pack-first histogram-packing",
    "best_fit": "packer: best-fit decreasing",
    "first_fit": "packer: first-fit decreasing",
    "greedy": "packer: concatenates sequences as they arrive",
    "none": "packer: the baseline, one sequence in each pack",
    "sort": "sorted batching: batches of sequences of similar length",
}


if __name__ == "__main__":
    raise SystemExit(run_main(lambda argv: list_commands("pack_data", COMMANDS, argv)))
