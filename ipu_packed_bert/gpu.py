"""python -m ipu_packed_bert.gpu: the door of ipu_packed_bert.commands.gpu."""

from ipu_packed_bert.commands.gpu import main
from pack_data.command import run_main

if __name__ == "__main__":
    raise SystemExit(run_main(main))
