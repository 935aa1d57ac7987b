"""Replaces several data sets together, even if the program is stopped.

A build writes finished files into the folder `ready` of each work folder. Then it writes commit.json, which says what
goes where; the rename of that file is the moment of the change. `complete` moves the files. If it is stopped, the next
build of the same data set begins with it again. So before that moment every data set is the former one, and after it
every one becomes the new one.
"""

from __future__ import annotations

import errno
import json
import os
import shutil
from pathlib import Path
from typing import Any, Dict, List, NamedTuple, Sequence

from pack_data.reading.fields import Fields, read_json
from pack_data.reading.files import sync_folder, write_atomically
from pack_data.store.data_set import MANIFEST, named_files

COMMIT, READY = "commit.json", "ready"


class Replacement(NamedTuple):
    """A finished data set: its files are in `work`/ready and go into the folder `out`."""

    work: Path
    out: Path


def announce(work: Path, targets: Sequence[Replacement]) -> None:
    """Notes in `work` what goes where. `work` is the work folder of the first target and holds those of the others."""
    entries: List[Dict[str, Any]] = []
    for target in targets:
        new = named_files(target.work / READY / MANIFEST)
        entries.append(
            {
                "work": target.work.relative_to(work).as_posix(),
                "out": target.out.name,
                "files": sorted(new),
                "remove": sorted(named_files(target.out / MANIFEST) - new),
            }
        )
        sync_folder(target.work / READY)
    write_atomically(work / COMMIT, (json.dumps(entries) + "\n").encode())


def complete(work: Path) -> bool:
    """Does what commit.json in `work` says and is not done yet. False if there is no commit.json."""
    note = work / COMMIT
    if not note.exists():
        return False
    entries = _read(note)
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


def _read(note: Path) -> List[Dict[str, Any]]:
    """What `announce` wrote. ValueError where it names anything but files of this build and of its data sets."""
    way_out = f"remove the folder {note.parent} and build again"
    whole = Fields.of({"data_sets": read_json(note, way_out=way_out)}, note, way_out)
    entries: List[Dict[str, Any]] = []
    for entry in whole.list_of("data_sets", Fields.object):
        out, work = entry.text("out", printable=False), entry.text("work", printable=False)
        for name, value, beside in (("out", out, True), ("work", work, False)):
            if (value != Path(value).name or value in ("", "..")) and (beside or value != "."):
                raise entry.error(name, "must be the name of a folder, without a path")
        names = {name: entry.list_of(name, Fields.plain_name) for name in ("files", "remove")}
        entries.append({"out": out, "work": work, **names})
    return entries


def _move(source: Path, target: Path) -> None:
    """Renames, or copies to another file system. Does nothing if the file was moved before."""
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
