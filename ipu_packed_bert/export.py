"""python -m ipu_packed_bert.export: the door of ipu_packed_bert.commands.export."""

from ipu_packed_bert.commands.export import main
from pack_data.command import run_main

if __name__ == "__main__":
    raise SystemExit(run_main(main))
