"""Pre-train a packed BERT: `python run_pretraining.py --config configs/packed_phase2_pod16.yml`."""

import sys

try:
    from ipu_packed_bert.commands.pretrain import main
    from pack_data.cli.command import run_main
except ModuleNotFoundError as error:
    print(
        f"error: {sys.executable} has no package {error.name}; `make pretrain` installs all packages in .venv, then "
        "start this script with .venv/bin/python",
        file=sys.stderr,
    )
    raise SystemExit(2) from None

if __name__ == "__main__":
    raise SystemExit(run_main(main))
