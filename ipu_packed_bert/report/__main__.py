"""`python -m ipu_packed_bert.report`: the overhead report, as profiling/overhead_report.py in a checkout."""

from ipu_packed_bert.report.command import main
from pack_data.cli.command import run_main

if __name__ == "__main__":
    raise SystemExit(run_main(main))
