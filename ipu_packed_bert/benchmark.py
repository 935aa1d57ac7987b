"""python -m ipu_packed_bert.benchmark: the door of ipu_packed_bert.commands.benchmark."""

from ipu_packed_bert.commands.benchmark import main
from pack_data.command import run_main

if __name__ == "__main__":
    raise SystemExit(run_main(main))
