"""Fit the cycle model's parameters to the published points and store them: `python profiling/calibrate.py`.

With `--check` the new fit is compared with the stored fit bit for bit, and nothing is written.
"""

from __future__ import annotations

import sys
from typing import Optional, Sequence

from ipu_profiling.cycles import calibration, matmul
from pack_data.cli.command import ArgumentParser
from pack_data.reading.durable import write_atomically


def main(argv: Optional[Sequence[str]] = None) -> int:
    """Run the command; the exit status is 1 if `--check` finds a difference."""
    parser = ArgumentParser(prog="python profiling/calibrate.py", description=__doc__)
    parser.add_argument(
        "--check",
        action="store_true",
        help="compare with the stored fit; exit status 1 if it differs",
    )
    args = parser.parse_args(argv)

    machine_of = calibration.machines(matmul.cache_folder())
    fitted = calibration.calibrate(calibration.observe(machine_of))
    for machine in machine_of.values():
        machine.save()

    text = calibration.to_json(fitted)
    print(text, end="")
    if args.check:
        if calibration.STORED.read_text(encoding="utf-8") == text:
            print("stored fit reproduced bit for bit", file=sys.stderr)
            return 0
        print(f"the new fit differs from {calibration.STORED}", file=sys.stderr)
        return 1
    write_atomically(calibration.STORED, text.encode())
    print(f"wrote {calibration.STORED}", file=sys.stderr)
    return 0
