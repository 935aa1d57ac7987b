"""python -m ipu_packed_bert.gpu: the door of ipu_packed_bert.commands.gpu."""

from __future__ import annotations

from typing import Optional, Sequence

from pack_data.command import run_main


def main(argv: Optional[Sequence[str]] = None) -> int:
    # Loaded inside run_main: the interpreter is the user's own, and a package that it lacks is one line.
    from ipu_packed_bert.commands.gpu import main as command

    return command(argv)


if __name__ == "__main__":
    raise SystemExit(run_main(main))
