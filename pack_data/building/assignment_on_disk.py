"""The pack, and the place in it, of each sequence, if the sequences are too many for memory.

As in `assignment.assign`: at random among the sequences of a length, and the packs in random order. Here a task handles
about two million numbers at a time and leaves them in files:

    scatter   a run of a list, each number in a bucket drawn at random        -> scattered-00000-00007.bin and .npy
    shuffle   a bucket of a list, in random order                             -> shuffled-00000-00003.bin
    deal      the sequences of some parts, each the next place for its length -> pack-00002.npy, slot-00002.npy

List 0 has the numbers of the packs; the packs of each strategy take a range of it. Each further list has the places for
one frequent length, or for several rare ones. A place is pack * depth + slot, with the depth of the deepest pack. A
list of one bucket is shuffled without being scattered. Random numbers depend on the list and on the run or the bucket,
so tasks may run anywhere and in any order.
"""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path
from typing import Any, Iterator, List, NamedTuple, Sequence, Tuple

import numpy as np

from pack_data.building.assignment import IN_MEMORY, Places
from pack_data.building.runner import TaskRunner
from pack_data.building.tasks import (
    RunningTotals,
    lengths_of_part,
    places_names,
    remove_and_build_again,
)
from pack_data.cli.terminal import progress_bar
from pack_data.packing.packing import Packing
from pack_data.reading.durable import raw_bytes, write_array, write_atomically
from pack_data.reading.fields import Fields, parse_json
from pack_data.reading.files import read_regular
from pack_data.reading.npy import read_array
from pack_data.store.packs import PackSchema
from pack_data.store.sequences import smallest_type

# Numbers that a task handles; it needs about 30 bytes for each.
NUMBERS = 1 << 21
_RECIPE = "recipe.json"
# Streams of random numbers.
_SCATTER = 0
_SHUFFLE = 1


def _lists(places: Places, numbers: int) -> List[Tuple[int, int]]:
    """Return (start, end) of every list: the packs, then the places of a length or of several, by length."""
    lists = [(0, places.packs)]
    first = 0  # the first place that is in no list yet
    for start, end in zip(places.starts[:-1].tolist(), places.starts[1:].tolist()):
        if end - first > numbers:
            if start > first:
                lists.append((first, start))
            first = start
            if end - start > numbers:
                lists.append((start, end))
                first = end
    last = int(places.starts[-1])
    if last > first:
        lists.append((first, last))
    return lists


def _places(work: Path) -> Places:
    """Return the places that the recipe of a build gives, computed once for all tasks."""
    way_out = remove_and_build_again(work)
    return _places_of(read_regular(work / _RECIPE, way_out=way_out))


@lru_cache(maxsize=2)
def _places_of(recipe: bytes) -> Places:
    way_out = "remove the work directory and build again"
    fields = Fields.of(parse_json(recipe, _RECIPE, way_out), _RECIPE, way_out)
    return Places.of(Packing.from_recipe(fields))


class _Numbers:
    """Numbers in several files, concatenated, of which any range can be read."""

    def __init__(self, paths: Sequence[Path], dtype: np.dtype, count: int) -> None:
        self._paths = paths
        self._dtype = dtype
        sizes = [path.stat().st_size // dtype.itemsize for path in paths]
        self._ends = np.cumsum(sizes, dtype=np.int64)
        if sum(sizes) != count:
            work = paths[0].parent if paths else Path("OUT.building")
            raise ValueError(f"{work}: numbers are missing; {remove_and_build_again(work)}")

    def read(self, start: int, out: np.ndarray) -> None:
        """Fill `out` with the numbers from `start` on."""
        number = int(np.searchsorted(self._ends, start, side="right"))
        done = 0
        while done < len(out):
            path = self._paths[number]
            first = int(self._ends[number - 1]) if number else 0
            count = min(len(out) - done, int(self._ends[number]) - start - done)
            offset = (start + done - first) * self._dtype.itemsize
            out[done : done + count] = np.fromfile(path, self._dtype, count, offset=offset)
            done += count
            number += 1


class _ListTask(NamedTuple):
    """A run of a list to be scattered, or a bucket of it to be shuffled.

    number: of the list; part: the number of the run or of the bucket; numbers: the size of a run. There are as many
    buckets as runs.
    """

    work: Path
    seed: Tuple[int, ...]
    number: int
    start: int
    end: int
    part: int
    numbers: int

    @property
    def parts(self) -> int:
        return -(-(self.end - self.start) // self.numbers)

    def random(self, stream: int) -> np.random.Generator:
        return np.random.default_rng([*self.seed, stream, self.number, self.part])

    def path(self, kind: str, part: int, suffix: str = ".bin") -> Path:
        return self.work / f"{kind}-{self.number:05d}-{part:05d}{suffix}"

    @property
    def is_scattered(self) -> bool:
        return self.path("scattered", self.part, ".npy").exists()

    @property
    def is_shuffled(self) -> bool:
        return self.path("shuffled", self.part).exists()


def _values(task: _ListTask, places: Places, start: int, end: int) -> np.ndarray:
    """Return the numbers of a list from `start` to `end`, in the order before it is shuffled."""
    if not task.number:
        return np.arange(start, end, dtype=places.dtype)
    values = np.empty(end - start, places.dtype)
    packs = _Numbers(sorted(task.work.glob("shuffled-00000-*.bin")), places.dtype, places.packs)
    at = start
    for entry in range(int(np.searchsorted(places.ends, start, side="right")), len(places.ends)):
        if at == end:
            break
        first = int(places.ends[entry - 1]) if entry else 0
        next_at = min(end, int(places.ends[entry]))
        of_entry = values[at - start : next_at - start]
        packs.read(int(places.base[entry]) + at - first, of_entry)
        of_entry *= places.dtype.type(places.deepest)
        of_entry += places.dtype.type(places.slot[entry])
        at = next_at
    return values


def _scatter(task: _ListTask) -> int:
    """Write a run of a list by buckets; then, as the note, the count of each bucket. Return how many numbers."""
    if task.is_scattered:  # a cluster may run a finished task again
        return 0
    start = task.start + task.part * task.numbers
    values = _values(task, _places(task.work), start, min(start + task.numbers, task.end))
    buckets = task.random(_SCATTER).integers(0, task.parts, len(values), dtype=np.uint16)
    by_bucket = values[np.argsort(buckets, kind="stable")]
    write_atomically(task.path("scattered", task.part), raw_bytes(by_bucket))
    write_array(
        task.path("scattered", task.part, ".npy"), np.bincount(buckets, minlength=task.parts)
    )
    return len(values)


def _shuffle(task: _ListTask) -> int:
    """Write a bucket of a list in random order, each length of a list separately. Return how many numbers."""
    if task.is_shuffled:
        return 0
    places = _places(task.work)
    rng = task.random(_SHUFFLE)
    if task.parts > 1:
        values = _bucket(task, places)
        pieces = [values]
    else:
        values = _values(task, places, task.start, task.end)
        ends_of_lengths = places.starts[(places.starts > task.start) & (places.starts < task.end)]
        pieces = np.split(values, ends_of_lengths - task.start) if task.number else [values]
    for piece in pieces:
        rng.shuffle(piece)
    write_atomically(task.path("shuffled", task.part), raw_bytes(values))
    return len(values)


def _bucket(task: _ListTask, places: Places) -> np.ndarray:
    """Return the numbers of a bucket from all runs."""
    way_out = remove_and_build_again(task.work)
    pieces = []
    for run in range(task.parts):
        counts = read_array(
            task.path("scattered", run, ".npy"), dtype=np.int64, dimensions=1, way_out=way_out
        )
        piece = np.empty(int(counts[task.part]), places.dtype)
        scattered = _Numbers([task.path("scattered", run)], places.dtype, int(counts.sum()))
        scattered.read(int(counts[: task.part].sum()), piece)
        pieces.append(piece)
    return np.concatenate(pieces)


class _PartsGroup(NamedTuple):
    """Consecutive parts whose sequences get their places together."""

    number: int
    parts: range


class _DealTask(NamedTuple):
    """Parts whose sequences get their places.

    totals: of each part of the group; dealt: the number of sequences of each length in earlier parts.
    """

    work: Path
    group: _PartsGroup
    totals: Tuple[RunningTotals, ...]
    dealt: np.ndarray
    schema: PackSchema


def _deal(task: _DealTask) -> int:
    """Give each sequence the next place for its length. Return how many sequences."""
    work = task.work
    places = _places(work)
    pack_file, slot_file = places_names(task.group.number)
    if (work / slot_file).exists():
        return 0
    lengths_of_parts = []
    for part, totals in zip(task.group.parts, task.totals):
        lengths_of_parts.append(lengths_of_part(work, part, totals, task.schema)[0])
    lengths = np.concatenate(lengths_of_parts)
    counts = np.bincount(lengths, minlength=len(task.dealt))
    starts = places.starts[:-1] + task.dealt
    if len(counts) > len(task.dealt) or (starts + counts > places.starts[1:]).any():
        raise ValueError(
            f"{work}: there are more sequences of a length than places; {remove_and_build_again(work)}"
        )

    # The places of the sequences in order of their lengths, then in order of the sequences.
    files = [
        path
        for path in sorted(work.glob("shuffled-*.bin"))
        if not path.name.startswith("shuffled-00000-")
    ]
    shuffled = _Numbers(files, places.dtype, int(places.starts[-1]))
    by_length = np.empty(len(lengths), places.dtype)
    end = 0
    for length in np.flatnonzero(counts).tolist():
        start, end = end, end + int(counts[length])
        shuffled.read(int(starts[length]), by_length[start:end])
    place = np.empty_like(by_length)
    place[np.argsort(lengths, kind="stable")] = by_length
    pack = place // places.dtype.type(places.deepest)
    slot = place - pack * places.dtype.type(places.deepest)
    write_array(work / pack_file, pack)
    write_array(work / slot_file, slot.astype(smallest_type(places.deepest - 1)))
    return len(place)


def parts_groups(parts: Sequence[RunningTotals]) -> List[_PartsGroup]:
    """Return one group of all parts if their sequences are assigned in memory, else groups of NUMBERS sequences."""
    most = IN_MEMORY if sum(part.sequences for part in parts) <= IN_MEMORY else NUMBERS
    groups: List[_PartsGroup] = []
    first = 0
    sequences = 0
    for number, part in enumerate(parts):
        if sequences and sequences + part.sequences > most:
            groups.append(_PartsGroup(len(groups), range(first, number)))
            first = number
            sequences = 0
        sequences += part.sequences
    return [*groups, _PartsGroup(len(groups), range(first, len(parts)))]


def places_of_parts(parts: Sequence[RunningTotals]) -> List[Tuple[int, int]]:
    """Return, for each part, its group and the number of its first sequence in that group."""
    places = []
    for group in parts_groups(parts):
        first = 0
        for part in group.parts:
            places.append((group.number, first))
            first += parts[part].sequences
    return places


def assign_on_disk(
    work: Path,
    schema: PackSchema,
    parts: Sequence[RunningTotals],
    seed: Tuple[int, ...],
    runner: TaskRunner,
) -> None:
    """Write the packs and the slots of all sequences, a pair of files for each group of parts.

    parts: the totals of each part of the examples. What a killed call has finished is kept. The packing in recipe.json
    must place the sequences exactly (Packing.check).
    """
    lists = _lists(_places(work), NUMBERS)
    list_tasks = []
    for number, (start, end) in enumerate(lists):
        for part in range(-(-(end - start) // NUMBERS)):
            list_tasks.append(_ListTask(work, seed, number, start, end, part, NUMBERS))

    # Every list is shuffled, a long one is scattered before; then the places are dealt.
    steps = sum(part.sequences for part in parts)
    for start, end in lists:
        passes = 2 if end - start > NUMBERS else 1
        steps += passes * (end - start)
    with progress_bar(steps, "assignment", unit=" numbers") as bar:
        # The other lists take their packs from list 0.
        _shuffle_lists([task for task in list_tasks if task.number == 0], runner, bar)
        _shuffle_lists([task for task in list_tasks if task.number > 0], runner, bar)
        for count in runner.map(_deal, _deal_tasks(work, schema, parts)):
            bar.update(count)
    for pattern in ("scattered-*", "shuffled-*"):
        for path in work.glob(pattern):
            path.unlink()


def _shuffle_lists(tasks: Sequence[_ListTask], runner: TaskRunner, bar: Any) -> None:
    """Scatter the long lists, then shuffle all; finished tasks are left out."""
    unshuffled = [task for task in tasks if not task.is_shuffled]
    long = [task for task in unshuffled if task.parts > 1 and not task.is_scattered]
    for count in runner.map(_scatter, long):
        bar.update(count)
    for count in runner.map(_shuffle, unshuffled):
        bar.update(count)


def _deal_tasks(
    work: Path, schema: PackSchema, parts: Sequence[RunningTotals]
) -> Iterator[_DealTask]:
    """Yield the groups of parts whose places are not dealt yet."""
    dealt = np.zeros_like(_places(work).starts[:-1])
    for group in parts_groups(parts):
        if not (work / places_names(group.number)[1]).exists():
            totals = tuple(parts[part] for part in group.parts)
            yield _DealTask(work, group, totals, dealt.copy(), schema)
        for part in group.parts:
            lengths, _ = lengths_of_part(work, part, parts[part], schema)
            dealt += np.bincount(lengths, minlength=len(dealt))
