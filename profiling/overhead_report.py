"""Print the overhead report, in a checkout: `python profiling/overhead_report.py --help`."""

import sys
from pathlib import Path

# Run as a script, only this folder is on the path. The root is appended, never put first: the name `profiling` is also
# a standard library module from Python 3.15 on.
sys.path.append(str(Path(__file__).resolve().parents[1]))

from pack_data.cli.scripts import explained_imports  # noqa: E402

with explained_imports():
    from ipu_profiling.report.command import main
    from pack_data.cli.command import run_main

if __name__ == "__main__":
    raise SystemExit(run_main(main))
