"""`python -m pack_data`: the list of the packers."""

from __future__ import annotations

import sys
from typing import Optional, Sequence

from pack_data.cli.command import run_main

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


def _main(argv: Optional[Sequence[str]] = None) -> int:
    """Print the packers, one per line."""
    arguments = sys.argv[1:] if argv is None else argv
    names = [argument for argument in arguments if argument not in ("-h", "--help")]
    if names:
        way_out = f"the commands are {', '.join(COMMANDS)}"
        if names[0] in COMMANDS:
            way_out = f"type python -m pack_data.{' '.join(names)}"
        raise ValueError(f"{names[0]}: python -m pack_data only lists its commands; {way_out}")

    width = max(map(len, COMMANDS))
    print("python -m pack_data.NAME --help says more about each:\n")
    for command, summary in COMMANDS.items():
        print(f"  {command:<{width}}  {summary}")
    return 0


if __name__ == "__main__":
    raise SystemExit(run_main(_main))
