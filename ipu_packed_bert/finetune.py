"""python -m ipu_packed_bert.finetune: the door of ipu_packed_bert.commands.finetune."""

from ipu_packed_bert.commands.finetune import main
from pack_data.command import run_main

if __name__ == "__main__":
    raise SystemExit(run_main(main))
