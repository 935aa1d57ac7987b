"""Several data sets put in the place of their former ones together, whenever the program is stopped.

A build leaves finished files in the folder `ready` of each work folder and touches nothing else. Then one small file,
commit.json, says what goes where; its rename is the moment of the change. `complete` makes the change, and makes it
again from the start if it was stopped: so before that moment every data set is the former one, and after it every one
is the new one as soon as any build looks at the folder.
"""
from __future__ import annotations

import errno
import json
import os
import shutil
from pathlib import Path
from typing import Any, Dict, List, NamedTuple, Sequence

from pack_data.files import sync_folder, write_atomically
from pack_data.store import MANIFEST, named_files

COMMIT, READY = "commit.json", "ready"


class Replacement(NamedTuple):
    """A data set that waits: its finished files are in `work`/ready, they belong into the folder `out`."""

    work: Path
    out: Path


def announce(work: Path, targets: Sequence[Replacement]) -> None:
    """Notes in `work` what goes where. `work` is the work folder of the first target and holds those of the others."""
    entries: List[Dict[str, Any]] = []
    for target in targets:
        new = named_files(target.work / READY / MANIFEST)
        entries.append({"work": target.work.relative_to(work).as_posix(), "out": target.out.name, "files": sorted(new),
                        "remove": sorted(named_files(target.out / MANIFEST) - new)})
        sync_folder(target.work / READY)
    write_atomically(work / COMMIT, (json.dumps(entries) + "\n").encode())


def complete(work: Path) -> bool:
    """Does what commit.json in `work` says, as far as it is not done yet; False where there is none."""
    note = work / COMMIT
    if not note.exists():
        return False
    entries = json.loads(note.read_text())
    for entry in entries:
        ready, out = work / entry["work"] / READY, work.parent / entry["out"]
        out.mkdir(parents=True, exist_ok=True)
        for name in entry["files"]:
            _move(ready / name, out / name)
        sync_folder(out)
    # The first target's manifest comes last: where it is new, the others are.
    for entry in reversed(entries):
        out = work.parent / entry["out"]
        _move(work / entry["work"] / READY / MANIFEST, out / MANIFEST)
        sync_folder(out)
    for entry in entries:
        for name in entry["remove"]:
            path = work.parent / entry["out"] / name
            if path.exists():
                path.unlink()
    return True


def _move(source: Path, target: Path) -> None:
    """Renames, or copies where `target` is on another file system; a file that was moved before is not there any more."""
    if not source.exists():
        return
    try:
        os.replace(source, target)
    except OSError as error:
        if error.errno != errno.EXDEV:
            raise
        temporary = target.with_name(f"{target.name}.building")
        with open(source, "rb") as data, open(temporary, "wb") as out:
            shutil.copyfileobj(data, out)
            out.flush()
            os.fsync(out.fileno())
        os.replace(temporary, target)
        source.unlink()
