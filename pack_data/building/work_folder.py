"""OUT.building, the work directory of a build: held by one build at a time, and kept for the next one after a kill.

Several data sets are replaced together, even if the program is stopped. A build writes finished files into the
directory `ready` of each work directory. Then it writes commit.json, which states which file goes where; the rename of
that file is the moment of the change. `complete` moves the files. If it is stopped, the next build of the same data set
begins by completing the moves. So before that moment every data set is the previous one, and after it every one becomes
the new one.
"""

from __future__ import annotations

import json
import os
import re
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, Dict, Iterator, List, NamedTuple, Optional, Sequence, Tuple

from pack_data.reading.durable import link, sync_folder, write_atomically
from pack_data.reading.fields import Fields, read_json, read_object
from pack_data.reading.files import LockRemovedError, locked
from pack_data.store.data_set import MANIFEST, named_files

PLAN = "plan.json"
COMMIT = "commit.json"
READY = "ready"
HELD_OUT_WORK = "held-out"
_LOCK = "lock"
# Files that `clear` removes last, in this order.
_LAST = (PLAN, COMMIT, _LOCK)
_VOCABULARIES = r"vocab\.txt|(tokenizer|tokenizer_config|special_tokens_map)\.json"
_TABLES = r"(packs-\d{5,}|lengths)-[0-9a-f]{8}\.npy"
_TEMPORARY = r"[\w.-]+\.\d+\.tmp"
# The names of files that builds make, those of version 1 included, in their work directory; no others are removed.
_WORK_FILES = re.compile(
    rf"lock|{_VOCABULARIES}|(plan|commit|text|vocabulary|examples|recipe|schema|skipped|former|manifest)\.json|{_TABLES}|"
    r"(pack|slot)(-\d{5,})?\.npy|(scattered|shuffled|read)-\d{5,}-\d{5,}\.(bin|npy|json)|"
    rf"(text|examples|sorted|shard|group)-\d{{5,}}\.(jsonl|json|bin|npy)|{_TEMPORARY}"
)
# Files of a data set's directory without a manifest: what a stopped build leaves, and files of the system.
_LEFTOVERS = re.compile(
    rf"({_VOCABULARIES}|recipe\.json|manifest\.json|{_TABLES})(\.building)?|{_TEMPORARY}|\..*|lost\+found"
)


def check_out(out: Path, given_files: Sequence[Path] = ()) -> None:
    """Raise ValueError if no data set can be written to `out`, or if it is a directory of other things.

    given_files: the user's files that go into the data set and may lie there.
    """
    if out.exists() and not out.is_dir():
        raise ValueError(f"--out {out}: is a file; a data set is a directory, choose another name")
    if not out.is_dir():
        return
    if not os.access(out, os.W_OK):
        raise ValueError(f"--out {out}: the directory cannot be written; choose another one")
    if (out / MANIFEST).exists():
        return
    allowed = {path.resolve() for path in given_files}
    for item in sorted(out.iterdir()):
        if not _LEFTOVERS.fullmatch(item.name) and item.resolve() not in allowed:
            raise ValueError(
                f"{out}: holds {item.name} and no data set; a data set needs a directory of its own, "
                "choose one that is empty or does not exist yet"
            )


@contextmanager
def work_folder(out: Path) -> Iterator[Path]:
    """Yield the work directory of a build of `out`; it is removed when the build is done.

    A change that an earlier build had begun is completed first. ValueError if another build holds the directory, or if
    it has files that no build made.
    """
    with _held(out, f"--out {out}", "choose another --out") as work:
        if complete(work):
            clear(work)
        try:
            yield work
        except ValueError:
            # After a user's mistake, nothing stays if there is nothing to continue.
            if not any(work.rglob("examples-*.json")):
                remove(work)
            raise
        remove(work)


@contextmanager
def work_of_tasks(
    out: Path, *, alone: bool = False, patience: Optional[float] = None
) -> Iterator[Path]:
    """Yield the work directory of a build of `out` by many tasks, each a process; it stays until it is complete.

    alone: for the work of one task while no other is at work. ValueError as `work_folder`.
    """
    while True:
        with ExitStack() as held:
            try:
                work = held.enter_context(
                    _held(
                        out,
                        f"--out {out}",
                        "choose another --out",
                        shared=not alone,
                        patience=patience,
                    )
                )
            # With the directory, by the task that has completed the data set.
            except LockRemovedError:
                continue
            yield work
            return


@contextmanager
def _held(
    out: Path, called: str, way_out: str, *, shared: bool = False, patience: Optional[float] = None
) -> Iterator[Path]:
    """Yield the work directory of `out`, locked. called, way_out: for the message if it cannot be."""
    work = out.with_name(f"{out.name}.building")
    busy = f"{out}: another build is writing this data set; wait for it or choose another --out"
    with ExitStack() as held:
        is_made = False
        try:
            work.mkdir(parents=True, exist_ok=True)
            is_made = True
            _check_made_by_a_build(work, out)
            held.enter_context(locked(work / _LOCK, busy, shared=shared, patience=patience))
        except OSError as error:
            # At any moment the task that has completed the data set may remove the directory, also within mkdir.
            is_removed = isinstance(error, FileExistsError) and not os.path.lexists(work)
            if is_removed or (is_made and isinstance(error, FileNotFoundError)):
                raise LockRemovedError(busy) from None
            raise ValueError(
                f"{called}: the directory {work} cannot be made or read ({error.strerror}); {way_out}"
            ) from None
        yield work


def _check_made_by_a_build(work: Path, out: Path) -> None:
    """Raise ValueError for a directory of this name that holds something else."""
    items = list(work.iterdir())
    if all(map(_is_left_over, items)):
        return
    names = [item.name for item in items]
    try:
        is_of_a_build = "options" in read_object(work / PLAN, way_out="")
    except ValueError:
        # Removed since, by the build that made it.
        is_of_a_build = PLAN in names and not (work / PLAN).exists()
    if not is_of_a_build:
        raise ValueError(
            f"{work}: was not made by a build, but a build of {out} needs this directory; "
            "move it away or choose another --out"
        )


def _is_left_over(item: Path) -> bool:
    """Return True for what may be left of a work directory: NFS keeps open files that were removed as .nfs files."""
    if item.name in (READY, HELD_OUT_WORK) and item.is_dir():
        return all(map(_is_left_over, item.iterdir()))
    left = rf"{_LOCK}|{re.escape(COMMIT)}|{re.escape(PLAN)}[.\d]+\.tmp|\.nfs[0-9a-f]+"
    return re.fullmatch(left, item.name) is not None


def clear(folder: Path, keep: Sequence[str] = (_LOCK,)) -> None:
    """Remove what builds make; other files stay.

    The notes go last: what a kill or a power cut leaves is still recognised as a build's, and while commit.json is
    there, as that of a completed build.
    """
    items = list(folder.iterdir())
    notes = [folder / name for name in _LAST if folder / name in items]
    for item in [item for item in items if item not in notes] + notes:
        if item.name == PLAN:
            sync_folder(folder)
        if item.is_dir() and not item.is_symlink() and item.name in (READY, HELD_OUT_WORK):
            clear(item)
            if not any(item.iterdir()):
                item.rmdir()
        elif _WORK_FILES.fullmatch(item.name) and item.name not in keep and item.is_file():
            item.unlink()


def remove(work: Path) -> None:
    """Remove what builds make, and the directory if nothing else is in it."""
    clear(work, keep=())
    if not any(work.iterdir()):
        work.rmdir()


# ---- the change from the previous data sets to the new ones ----------------------------------------------------------


def announce(work: Path, targets: Sequence[Tuple[Path, Path]]) -> None:
    """Write commit.json, which states which file goes where.

    targets: for each data set its work directory, whose `ready` holds the files, and the directory that they go into.
    `work` is the work directory of the first and holds those of the others.
    """
    entries: List[Dict[str, Any]] = []
    for side_work, out in targets:
        new = named_files(side_work / READY / MANIFEST)
        gone = named_files(out / MANIFEST) - new
        side = side_work.relative_to(work).as_posix()
        entries.append(
            {"work": side, "out": out.name, "files": sorted(new), "remove": sorted(gone)}
        )
        sync_folder(side_work / READY)
    write_atomically(work / COMMIT, (json.dumps(entries) + "\n").encode())


def complete(work: Path) -> bool:
    """Do what commit.json in `work` states and is not done yet. Return False if there is no commit.json.

    The files keep their names in `ready` until `clear`.
    """
    note = work / COMMIT
    if not note.exists():
        return False
    moves = _read_commit(note)
    for move in moves:
        move.out.mkdir(parents=True, exist_ok=True)
        sync_folder(move.out.parent)
        for name in move.files:
            link(move.ready / name, move.out / name)
        sync_folder(move.out)
    # The manifest of the first data set is moved last: once it is new, the others are.
    for move in reversed(moves):
        link(move.ready / MANIFEST, move.out / MANIFEST)
        sync_folder(move.out)
    for move in moves:
        for name in move.remove:
            if (move.out / name).exists():
                (move.out / name).unlink()
    return True


def check_not_half_replaced(folder: Path) -> None:
    """Raise ValueError if a build was stopped while it replaced the data set in `folder`, or still replaces it."""
    folder = folder.resolve()
    for note in folder.parent.glob(f"*.building/{COMMIT}"):
        if any(move.out.name == folder.name for move in _read_commit(note)):
            raise ValueError(
                f"{folder}: a build was stopped while it replaced this data set; run the same build command again, "
                f"which completes what {note} states"
            )


class _Moves(NamedTuple):
    """The files of a data set that move from `ready` to `out`, and those of the previous one that are removed."""

    ready: Path
    out: Path
    files: List[str]
    remove: List[str]


def _read_commit(note: Path) -> List[_Moves]:
    """Read what `announce` wrote. ValueError if it names anything but files of this build and of its data sets."""
    work = note.parent
    way_out = f"remove the directory {work} and build again"
    whole = Fields.of({"data_sets": read_json(note, way_out=way_out)}, note, way_out)
    moves = []
    for entry in whole.list_of("data_sets", Fields.object):
        out = entry.text("out", printable=False)
        if out != Path(out).name or out in ("", ".."):
            raise entry.error("out", "must be the name of a directory, without a path")
        side = "." if entry.any("work") == "." else entry.plain_name("work")
        files = entry.list_of("files", Fields.plain_name)
        remove = entry.list_of("remove", Fields.plain_name)
        moves.append(_Moves(work / side / READY, work.parent / out, files, remove))
    return moves
