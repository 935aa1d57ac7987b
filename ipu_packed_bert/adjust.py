"""python -m ipu_packed_bert.adjust: the door of ipu_packed_bert.commands.adjust."""

from ipu_packed_bert.commands.adjust import main
from pack_data.command import run_main

if __name__ == "__main__":
    raise SystemExit(run_main(main))
