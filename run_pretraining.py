"""Pre-train a packed BERT: `python run_pretraining.py --config configs/packed_phase2_pod16.yml`."""

import sys

from pack_data.cli.scripts import explained_imports

with explained_imports():
    import numpy  # noqa: F401, a Python without the packages is explained before the command begins

    from ipu_packed_bert.__main__ import main
    from pack_data.cli.command import run_main

if __name__ == "__main__":
    raise SystemExit(run_main(main, ["pretrain", *sys.argv[1:]]))
