"""Fit the cycle model, in a checkout: `python profiling/calibrate.py --help`."""

import sys
from pathlib import Path

# Run as a script, only this folder is on the path. The root is appended, never put first: the name `profiling` is also
# a standard library module from Python 3.15 on.
sys.path.append(str(Path(__file__).resolve().parents[1]))

from ipu_packed_bert.report.calibrate import main  # noqa: E402
from pack_data.cli.command import run_main  # noqa: E402

if __name__ == "__main__":
    raise SystemExit(run_main(main))
