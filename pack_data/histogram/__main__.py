"""`python -m pack_data.histogram`: see pack_data.lengths.counting."""

from __future__ import annotations

from pack_data.cli.command import run_main
from pack_data.lengths.counting import main

if __name__ == "__main__":
    raise SystemExit(run_main(main))
