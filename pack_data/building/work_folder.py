"""OUT.building, where a build works: held by one build at a time, and kept for the next one if it is killed."""

from __future__ import annotations

import os
import re
from contextlib import contextmanager
from pathlib import Path
from typing import Iterator, Sequence

from pack_data.building.atomic_replace import COMMIT, READY, complete
from pack_data.reading.fields import read_object
from pack_data.reading.files import locked
from pack_data.store.data_set import MANIFEST, remove_leftovers

PLAN, LOCK = "plan.json", "lock"
HELD_OUT_WORK = "held-out"
# The names of files that a build makes in its work folder; it removes no others.
_OWN = re.compile(
    r"lock|vocab\.txt|(tokenizer|plan|commit|text|examples|recipe|schema|skipped|former|manifest)\.json|(pack|slot)(-\d{5,})?\.npy|"
    r"(scattered|shuffled)-\d{5,}-\d{5,}\.(bin|npy)|"
    r"(text|examples|sorted|shard)-\d{5,}\.(jsonl|json|bin|npy)|packs-\d{5,}-[0-9a-f]{8}\.npy|lengths-[0-9a-f]{8}\.npy|"
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
                _remove(work)
            raise
        _remove(work)


@contextmanager
def _without_builds(out: Path) -> Iterator[None]:
    """No build writes `out` while this is entered; what a stopped build left to go on with stays.

    ValueError as `work_folder`.
    """
    with _held(out, str(out), "make room for it") as work:
        try:
            yield
        finally:
            if [item.name for item in work.iterdir()] == [LOCK]:
                _remove(work)


@contextmanager
def only_writer_of_packs(out: Path) -> Iterator[None]:
    """As `_without_builds`, for who writes a data set to `out` himself: what a killed one has left is removed."""
    with _without_builds(out):
        if not (out.with_name(f"{out.name}.building") / COMMIT).exists():  # else those are files of a build
            remove_leftovers(out)
        yield


@contextmanager
def _held(out: Path, called: str, way_out: str) -> Iterator[Path]:
    """The work folder of `out`, locked. called, way_out: for the message where it cannot be."""
    work = out.with_name(f"{out.name}.building")
    try:
        work.mkdir(parents=True, exist_ok=True)
        _check_made_by_a_build(work, out)
    except OSError as error:
        raise ValueError(f"{called}: the folder {work} cannot be made or read ({error.strerror}); {way_out}") from None
    busy = f"{out}: another build is writing this data set; wait for it or choose another --out"
    with locked(work / LOCK, busy):
        yield work


def _check_made_by_a_build(work: Path, out: Path) -> None:
    """ValueError for a folder of this name that holds something else."""
    if all(item.name == LOCK or re.fullmatch(re.escape(PLAN) + r"[.\d]+\.tmp", item.name) for item in work.iterdir()):
        return
    try:
        made_by_a_build = "options" in read_object(work / PLAN, way_out="")
    except ValueError:
        made_by_a_build = False
    if not made_by_a_build:
        raise ValueError(
            f"{work}: was not made by a build, but a build of {out} needs this folder; "
            "move it away or choose another --out"
        )


def clear(folder: Path, keep: Sequence[str] = (LOCK,)) -> None:
    """Removes what builds make; other files stay.

    The notes go last, the plan after all: what a kill leaves behind is still known as a build's, and is cleared again.
    """
    for item in sorted(folder.iterdir(), key=lambda item: (item.name == PLAN, item.name == COMMIT, item.name)):
        if item.is_dir() and not item.is_symlink() and item.name in (READY, HELD_OUT_WORK):
            clear(item)
            if not any(item.iterdir()):
                item.rmdir()
        elif _OWN.fullmatch(item.name) and item.name not in keep and item.is_file():
            item.unlink()


def _remove(work: Path) -> None:
    """Removes the work folder; its notes go last, so that what a kill leaves behind is still known as a build's."""
    notes = (COMMIT, PLAN, LOCK)
    clear(work, keep=notes)
    for name in notes:
        if (work / name).exists():
            (work / name).unlink()
    if not any(work.iterdir()):
        work.rmdir()
