"""Which pack, and which place in it, each sequence gets, where the sequences are too many for memory.

As `assignment.assign`: at random among the sequences of a length, and the packs in random order. Here a task handles
some two million numbers at a time and leaves them in files:

    scatter   a run of a list, each number in a bucket drawn at random        -> scattered-00000-00007.bin and .npy
    shuffle   a bucket of a list, in random order                             -> shuffled-00000-00003.bin
    deal      the sequences of some parts, each the next place for its length -> pack-00002.npy, slot-00002.npy

List 0 has the numbers of the packs; the packs of each strategy take a range of it. Each further list has the places for
one frequent length, or for several rare ones. A place is pack * depth + slot, with the depth of the deepest pack. A
list of one bucket is shuffled without being scattered. Random numbers depend on the list and on the run or the bucket,
so that tasks may run anywhere and in any order.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Iterator, List, Sequence, Tuple

import numpy as np

from pack_data.building.assignment import IN_MEMORY, Places
from pack_data.building.runner import TaskRunner
from pack_data.building.tasks import (
    PartsGroup,
    RunningTotals,
    lengths_of_part,
    places_names,
    remove_and_build_again,
    save_array,
)
from pack_data.cli.command import progress_bar
from pack_data.packing.packing import Packing
from pack_data.reading.files import replacing
from pack_data.reading.npy import read_array
from pack_data.store.packs import PackSchema, smallest_type

# Numbers that a task handles; it needs some 30 bytes for each.
NUMBERS = 1 << 21
_SCATTER, _SHUFFLE = 0, 1  # streams of random numbers
# What is not needed once all sequences have their places.
_PASSING = ("scattered-*", "shuffled-*")


def _lists(places: Places, numbers: int) -> List[Tuple[int, int]]:
    """(start, end) of every list: the packs, then the places of a length or of several, by length."""
    found, first = [(0, places.packs)], 0
    for start, end in zip(places.starts[:-1].tolist(), places.starts[1:].tolist()):
        if end - first > numbers:
            if start > first:
                found.append((first, start))
            first = start
            if end - start > numbers:
                found.append((start, end))
                first = end
    if places.starts[-1] > first:
        found.append((first, int(places.starts[-1])))
    return found


def _places(recipe: Path) -> Places:
    return _places_once(recipe, recipe.stat().st_mtime_ns)


@lru_cache(maxsize=2)
def _places_once(recipe: Path, _: int) -> Places:
    return Places.of(Packing.load(recipe))


class _Files:
    """Numbers in several files, one after another, of which any range can be read."""

    def __init__(self, paths: Sequence[Path], dtype: np.dtype, count: int) -> None:
        self._paths, self._dtype = paths, dtype
        self._ends = np.cumsum([path.stat().st_size // dtype.itemsize for path in paths], dtype=np.int64)
        if (int(self._ends[-1]) if paths else 0) != count:
            where = paths[0].parent if paths else "the work folder"
            raise ValueError(f"{where}: numbers are missing; {remove_and_build_again(Path(where))}")

    def read(self, start: int, count: int, out: np.ndarray) -> None:
        """The numbers from `start` on, into out[:count]."""
        number, done = int(np.searchsorted(self._ends, start, side="right")), 0
        while done < count:
            begin, path = int(self._ends[number - 1]) if number else 0, self._paths[number]
            some = min(count - done, int(self._ends[number]) - start - done)
            values = np.fromfile(path, self._dtype, some, offset=(start + done - begin) * self._dtype.itemsize)
            if len(values) != some:
                raise ValueError(f"{path}: cut short; {remove_and_build_again(path.parent)}")
            out[done : done + some] = values
            done, number = done + some, number + 1


@dataclass(frozen=True)
class _ListTask:
    """A run of a list to be scattered, or a bucket of it to be shuffled."""

    work: str
    recipe: str
    seed: Tuple[int, ...]
    number: int  # of the list
    start: int
    end: int
    part: int  # number of the run or of the bucket
    numbers: int  # of a run; there are as many buckets as runs

    @property
    def parts(self) -> int:
        return -(-(self.end - self.start) // self.numbers)

    def random(self, stream: int) -> np.random.Generator:
        return np.random.default_rng([*self.seed, stream, self.number, self.part])

    def path(self, kind: str, part: int, suffix: str = ".bin") -> Path:
        return Path(self.work) / f"{kind}-{self.number:05d}-{part:05d}{suffix}"

    @property
    def is_scattered(self) -> bool:
        return self.path("scattered", self.part, ".npy").exists()

    @property
    def is_shuffled(self) -> bool:
        return self.path("shuffled", self.part).exists()


def _values(task: _ListTask, places: Places, start: int, end: int) -> np.ndarray:
    """The numbers of a list from `start` to `end`, in the order before it is shuffled."""
    if not task.number:
        return np.arange(start, end, dtype=places.dtype)
    values, ends = np.empty(end - start, places.dtype), places.ends
    work, at = Path(task.work), start
    order = _Files(sorted(work.glob("shuffled-00000-*.bin")), places.dtype, places.packs)
    for entry in range(int(np.searchsorted(ends, start, side="right")), len(ends)):
        if at == end:
            break
        begin = int(ends[entry - 1]) if entry else 0
        some, own = min(end, int(ends[entry])) - at, values[at - start :]
        order.read(int(places.base[entry]) + at - begin, some, own)
        own[:some] *= places.dtype.type(places.deepest)
        own[:some] += places.dtype.type(places.slot[entry])
        at += some
    return values


def _scatter(task: _ListTask) -> int:
    """A run of a list, by buckets; then, as the note, how many numbers each bucket has of it. Returns how many."""
    if task.is_scattered:  # a cluster may run a finished task again
        return 0
    places, start = _places(Path(task.recipe)), task.start + task.part * task.numbers
    values = _values(task, places, start, min(start + task.numbers, task.end))
    buckets = task.random(_SCATTER).integers(0, task.parts, len(values), dtype=np.uint16)
    with replacing(task.path("scattered", task.part)) as temporary:
        values[np.argsort(buckets, kind="stable")].tofile(temporary)
    save_array(task.path("scattered", task.part, ".npy"), np.bincount(buckets, minlength=task.parts))
    return len(values)


def _shuffle(task: _ListTask) -> int:
    """A bucket of a list, in random order; of a list with several lengths each by itself. Returns how many numbers."""
    if task.is_shuffled:
        return 0
    places, rng = _places(Path(task.recipe)), task.random(_SHUFFLE)
    if task.parts == 1:
        values = _values(task, places, task.start, task.end)
    else:
        pieces = []
        for run in range(task.parts):
            counts = read_array(
                task.path("scattered", run, ".npy"),
                dtype=np.int64,
                dimensions=1,
                way_out=remove_and_build_again(Path(task.work)),
            )
            pieces.append(np.empty(int(counts[task.part]), places.dtype))
            scattered = _Files([task.path("scattered", run)], places.dtype, int(counts.sum()))
            scattered.read(int(counts[: task.part].sum()), len(pieces[-1]), pieces[-1])
        values = np.concatenate(pieces)
    lengths = places.starts[(places.starts > task.start) & (places.starts < task.end)] - task.start
    within = task.number and task.parts == 1
    for each in np.split(values, lengths) if within else [values]:
        rng.shuffle(each)
    with replacing(task.path("shuffled", task.part)) as temporary:
        values.tofile(temporary)
    return len(values)


@dataclass(frozen=True)
class _DealTask:
    """Parts whose sequences get their places. dealt: how many sequences of each length stand in earlier parts."""

    work: str
    recipe: str
    group: PartsGroup
    totals: Tuple[RunningTotals, ...]  # of each part of the group
    dealt: np.ndarray
    schema: PackSchema


def _deal(task: _DealTask) -> int:
    """Each sequence takes the next place for its length. Returns how many sequences."""
    work, places = Path(task.work), _places(Path(task.recipe))
    pack_file, slot_file = (work / name for name in places_names(task.group.number))
    if slot_file.exists():
        return 0
    lengths = np.concatenate(
        [lengths_of_part(work, part, totals, task.schema)[0] for part, totals in zip(task.group.parts, task.totals)]
    )
    found = np.bincount(lengths, minlength=len(task.dealt))
    starts = places.starts[:-1] + task.dealt
    if len(found) > len(task.dealt) or (starts + found > places.starts[1:]).any():
        raise ValueError(f"{work}: there are more sequences of a length than places; {remove_and_build_again(work)}")
    ordered, end = np.empty(len(lengths), places.dtype), 0
    of_places = [path for path in sorted(work.glob("shuffled-*.bin")) if not path.name.startswith("shuffled-00000-")]
    shuffled = _Files(of_places, places.dtype, int(places.starts[-1]))
    for length in np.flatnonzero(found).tolist():
        count = int(found[length])
        shuffled.read(int(starts[length]), count, ordered[end:])
        end += count
    place = np.empty_like(ordered)
    place[np.argsort(lengths, kind="stable")] = ordered
    pack = place // places.dtype.type(places.deepest)
    place -= pack * places.dtype.type(places.deepest)
    save_array(pack_file, pack)
    save_array(slot_file, place.astype(smallest_type(places.deepest - 1)))
    return len(place)


def parts_groups(parts: Sequence[RunningTotals]) -> List[PartsGroup]:
    """All parts together where their sequences are assigned in memory; else groups of some million sequences."""
    most = IN_MEMORY if sum(part.sequences for part in parts) <= IN_MEMORY else NUMBERS
    groups: List[PartsGroup] = []
    first = sequences = 0
    for number, part in enumerate(parts):
        if sequences and sequences + part.sequences > most:
            groups.append(PartsGroup(len(groups), range(first, number)))
            first, sequences = number, 0
        sequences += part.sequences
    return [*groups, PartsGroup(len(groups), range(first, len(parts)))]


def places_of_parts(parts: Sequence[RunningTotals]) -> List[Tuple[int, int]]:
    """For each part its group and the number of its first sequence in that group."""
    found = []
    for group in parts_groups(parts):
        first = 0
        for part in group.parts:
            found.append((group.number, first))
            first += parts[part].sequences
    return found


def assign_on_disk(
    work: Path,
    recipe: Path,
    schema: PackSchema,
    parts: Sequence[RunningTotals],
    seed: Tuple[int, ...],
    runner: TaskRunner,
) -> None:
    """Writes the packs and the slots of all sequences, a pair of files for each group of parts.

    parts: of each part of the examples its totals. What a killed call has finished is kept. The packing must place the
    sequences exactly (Packing.check).
    """
    numbers = NUMBERS
    lists = _lists(_places(recipe), numbers)

    def tasks(which: Sequence[int]) -> Iterator[_ListTask]:
        for number in which:
            start, end = lists[number]
            for part in range(-(-(end - start) // numbers)):
                yield _ListTask(str(work.resolve()), str(recipe.resolve()), seed, number, start, end, part, numbers)

    def missing() -> Iterator[_DealTask]:
        dealt = np.zeros_like(_places(recipe).starts[:-1])
        for group in parts_groups(parts):
            if not (work / places_names(group.number)[1]).exists():
                totals = tuple(parts[part] for part in group.parts)
                yield _DealTask(str(work.resolve()), str(recipe.resolve()), group, totals, dealt.copy(), schema)
            for part in group.parts:
                taken, _ = lengths_of_part(work, part, parts[part], schema)
                dealt += np.bincount(taken, minlength=len(dealt))

    # A list is shuffled, a long one is scattered before; then its places are dealt.
    steps = sum((1 + (end - start > numbers)) * (end - start) for start, end in lists)
    steps += sum(part.sequences for part in parts)
    with progress_bar(steps, "assignment", unit=" numbers") as bar:
        for which in ([0], range(1, len(lists))):
            long = (task for task in tasks(which) if task.parts > 1 and not (task.is_scattered or task.is_shuffled))
            for done in runner.map(_scatter, long):
                bar.update(done)
            for done in runner.map(_shuffle, (task for task in tasks(which) if not task.is_shuffled)):
                bar.update(done)
        for done in runner.map(_deal, missing()):
            bar.update(done)
    for pattern in _PASSING:
        for path in work.glob(pattern):
            path.unlink()
