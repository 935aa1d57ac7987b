"""Checkpoints of former versions (step_*.pt) into folders, which are read without unpickling anything.

    packed-bert convert-checkpoint RUN                 # every such file in the run's checkpoints
    packed-bert convert-checkpoint RUN --delete-old    # and delete each, once its folder was compared with it
    packed-bert convert-checkpoint FILE

Files that hold anything but tensors, numbers, texts, lists and dictionaries are refused. One that cannot be read is set
aside, so that the run goes on from the newest whole one.
"""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import ContextManager, List, Optional, Sequence, Tuple

from ipu_packed_bert.run_folder import CHECKPOINTS, CONFIG, LOCK
from pack_data.command import ArgumentParser
from pack_data.files import locked


def convert_all(files: Sequence[Path], *, delete_old: bool) -> None:
    """Prints a line for each file, and for what becomes of one that cannot be read.

    Raises ValueError if none of them can be read.
    """
    # torch loads from here on.
    from ipu_packed_bert.checkpoint import set_aside
    from ipu_packed_bert.former_checkpoint import Unreadable, convert

    refused: List[Tuple[Path, ValueError]] = []
    for file in files:
        try:
            path = convert(file)
        except Unreadable as error:
            refused.append((file, error))
            continue
        if delete_old:
            file.unlink()
        print(f"{file} -> {path}, equal bit for bit{'; the file is deleted' if delete_old else ''}")
    if refused and len(refused) == len(files):
        raise refused[0][1]
    for file, reason in refused:
        print(f"note      {reason}; it is set aside as {set_aside(file).name}")


def former_files(given: Path) -> List[Path]:
    """The files of format 1 that a path means, oldest first; ValueError if there is none."""
    from ipu_packed_bert.checkpoint import former_checkpoints

    if given.is_file():
        return [given]
    found = former_checkpoints(given / CHECKPOINTS) or former_checkpoints(given)
    if not found:
        raise ValueError(f"{given}: no checkpoint of a former version there (checkpoints/step_*.pt)")
    return found


def main(argv: Optional[Sequence[str]] = None) -> int:
    parser = ArgumentParser(prog="packed-bert convert-checkpoint", description=__doc__)
    parser.add_argument("path", type=Path, metavar="RUN|FILE", help="a run, its folder of checkpoints, or one file")
    parser.add_argument("--delete-old", action="store_true", help="delete each file once its folder is whole")
    args = parser.parse_args(argv)
    files = former_files(args.path)
    run = files[0].parent.parent
    lock: ContextManager[None] = contextlib.nullcontext()
    if (run / CONFIG).exists():
        lock = locked(run / LOCK, f"{run}: another process writes this run; wait for it")
    with lock:
        convert_all(files, delete_old=args.delete_old)
    return 0
