"""python -m ipu_packed_bert.predict: the door of ipu_packed_bert.commands.predict."""

from ipu_packed_bert.commands.predict import main
from pack_data.command import run_main

if __name__ == "__main__":
    raise SystemExit(run_main(main))
