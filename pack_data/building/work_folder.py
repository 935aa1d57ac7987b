"""OUT.building, where a build works: held by one build at a time, and kept for the next one if it is killed.

Several data sets are replaced together, even if the program is stopped. A build writes finished files into the folder
`ready` of each work folder. Then it writes commit.json, which says what goes where; the rename of that file is the
moment of the change. `complete` moves the files. If it is stopped, the next build of the same data set begins with it
again. So before that moment every data set is the former one, and after it every one becomes the new one.
"""

from __future__ import annotations

import errno
import json
import os
import re
import shutil
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, Dict, Iterator, List, Optional, Sequence, Tuple

from pack_data.reading.fields import Fields, read_json, read_object
from pack_data.reading.files import LockRemovedError, locked, sync_folder, write_atomically
from pack_data.store.data_set import MANIFEST, named_files, remove_leftovers

PLAN, COMMIT, READY, _LOCK = "plan.json", "commit.json", "ready", "lock"
HELD_OUT_WORK = "held-out"
# The names of files that a build makes in its work folder; it removes no others.
_OWN = re.compile(
    r"lock|vocab\.txt|(tokenizer|plan|commit|text|examples|recipe|schema|skipped|former|manifest)\.json|(pack|slot)(-\d{5,})?\.npy|"
    r"(scattered|shuffled|read)-\d{5,}-\d{5,}\.(bin|npy|json)|"
    r"(text|examples|sorted|shard|group)-\d{5,}\.(jsonl|json|bin|npy)|packs-\d{5,}-[0-9a-f]{8}\.npy|lengths-[0-9a-f]{8}\.npy|"
    r"[\w.-]+\.\d+\.tmp"
)


# What may lie in the folder of a data set that has no manifest yet: what a stopped build leaves, and a system's files.
_LEFT = re.compile(
    r"(vocab\.txt|tokenizer\.json|recipe\.json|packs-\d{5,}-[0-9a-f]{8}\.npy|lengths-[0-9a-f]{8}\.npy)(\.building)?|"
    r"manifest\.json\.building|[\w.-]+\.\d+\.tmp|\..*|lost\+found"
)


def check_out(out: Path, own_files: Sequence[Path] = ()) -> None:
    """ValueError where no data set can be written to `out`, or where it is a folder of other things.

    own_files: files of the user's that go into the data set and may lie there.
    """
    if out.exists() and not out.is_dir():
        raise ValueError(f"--out {out}: is a file; a data set is a folder, choose another name")
    if out.is_dir() and not os.access(out, os.W_OK):
        raise ValueError(f"--out {out}: the folder cannot be written; choose another one")
    if out.is_dir() and not (out / MANIFEST).exists():
        own = {path.resolve() for path in own_files}
        for item in sorted(out.iterdir()):
            if not _LEFT.fullmatch(item.name) and item.resolve() not in own:
                raise ValueError(
                    f"{out}: holds {item.name} and no data set; a data set needs a folder of its own, "
                    "choose one that is empty or not there yet"
                )


@contextmanager
def work_folder(out: Path) -> Iterator[Path]:
    """The work folder of a build of `out`; removed when the build is done.

    A change that a former build had begun is completed first. ValueError if another build holds the folder, or if the
    folder has files that no build made.
    """
    with _held(out, f"--out {out}", "choose another --out") as work:
        if complete(work):
            clear(work)
        try:
            yield work
        except ValueError:
            # A user's mistake, found before there is anything to continue, leaves nothing behind.
            if not any(work.rglob("examples-*.json")):
                remove(work)
            raise
        remove(work)


@contextmanager
def only_writer_of_packs(out: Path) -> Iterator[None]:
    """For who writes a data set to `out` himself: no build writes `out` while this is entered.

    What a killed writer has left is removed; what a stopped build left to go on with stays. ValueError as
    `work_folder`.
    """
    with _held(out, str(out), "make room for it") as work:
        try:
            if not (work / COMMIT).exists():  # else those are files of a build
                remove_leftovers(out)
            yield
        finally:
            if [item.name for item in work.iterdir()] == [_LOCK]:
                remove(work)


@contextmanager
def work_of_tasks(out: Path, *, alone: bool = False, patience: Optional[float] = None) -> Iterator[Path]:
    """The work folder of a build of `out` that many tasks do, each a process; it stays until the last has completed it.

    alone: for what one task does while no other is at work. ValueError as `work_folder`.
    """
    while True:
        with ExitStack() as held:
            called, way_out = f"--out {out}", "choose another --out"
            try:
                work = held.enter_context(_held(out, called, way_out, shared=not alone, patience=patience))
            except LockRemovedError:  # with the folder, by the task that has completed the data set
                continue
            yield work
            return


@contextmanager
def _held(
    out: Path, called: str, way_out: str, *, shared: bool = False, patience: Optional[float] = None
) -> Iterator[Path]:
    """The work folder of `out`, locked. called, way_out: for the message where it cannot be."""
    work = out.with_name(f"{out.name}.building")
    busy = f"{out}: another build is writing this data set; wait for it or choose another --out"
    with ExitStack() as held:
        made = False
        try:
            work.mkdir(parents=True, exist_ok=True)
            made = True
            _check_made_by_a_build(work, out)
            held.enter_context(locked(work / _LOCK, busy, shared=shared, patience=patience))
        except OSError as error:
            # At any moment the task that has completed the data set may remove the folder, also within mkdir.
            removed = isinstance(error, FileExistsError) and not os.path.lexists(work)
            if removed or (made and isinstance(error, FileNotFoundError)):
                raise LockRemovedError(busy) from None
            raise ValueError(
                f"{called}: the folder {work} cannot be made or read ({error.strerror}); {way_out}"
            ) from None
        yield work


def _check_made_by_a_build(work: Path, out: Path) -> None:
    """ValueError for a folder of this name that holds something else."""
    alone = re.compile(rf"{_LOCK}|{re.escape(COMMIT)}|{re.escape(PLAN)}[.\d]+\.tmp")
    names = [item.name for item in work.iterdir()]
    if all(map(alone.fullmatch, names)):
        return
    try:
        made_by_a_build = "options" in read_object(work / PLAN, way_out="")
    except ValueError:
        made_by_a_build = PLAN in names and not (work / PLAN).exists()  # removed since, by the build that made it
    if not made_by_a_build:
        raise ValueError(
            f"{work}: was not made by a build, but a build of {out} needs this folder; "
            "move it away or choose another --out"
        )


_LAST = (PLAN, COMMIT, _LOCK)


def clear(folder: Path, keep: Sequence[str] = (_LOCK,)) -> None:
    """Removes what builds make; other files stay.

    The notes go last: what a kill leaves behind is still known as a build's, and while commit.json is there as that of
    a build that is done.
    """
    for item in sorted(folder.iterdir(), key=lambda item: _LAST.index(item.name) if item.name in _LAST else -1):
        if item.is_dir() and not item.is_symlink() and item.name in (READY, HELD_OUT_WORK):
            clear(item)
            if not any(item.iterdir()):
                item.rmdir()
        elif _OWN.fullmatch(item.name) and item.name not in keep and item.is_file():
            item.unlink()


def remove(work: Path) -> None:
    """Removes what builds make, and the folder if nothing else is in it."""
    clear(work, keep=())
    if not any(work.iterdir()):
        work.rmdir()


# ---- the change from the former data sets to the new ones ------------------------------------------------------------


def announce(work: Path, targets: Sequence[Tuple[Path, Path]]) -> None:
    """Notes in `work` what goes where.

    targets: of each data set its work folder, whose `ready` holds the files, and the folder that they go into. `work`
    is the work folder of the first and holds those of the others.
    """
    entries: List[Dict[str, Any]] = []
    for own, out in targets:
        new = named_files(own / READY / MANIFEST)
        gone = sorted(named_files(out / MANIFEST) - new)
        entries.append(
            {"work": own.relative_to(work).as_posix(), "out": out.name, "files": sorted(new), "remove": gone}
        )
        sync_folder(own / READY)
    write_atomically(work / COMMIT, (json.dumps(entries) + "\n").encode())


def complete(work: Path) -> bool:
    """Does what commit.json in `work` says and is not done yet. False if there is no commit.json."""
    note = work / COMMIT
    if not note.exists():
        return False
    entries = _read_commit(note)
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


def _read_commit(note: Path) -> List[Dict[str, Any]]:
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
