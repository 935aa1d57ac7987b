"""Sequences that are too many for memory: the same laws as `assign`, whatever the runs, and after any kill."""

import hashlib
import os

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pack_data.building import assignment_on_disk as on_disk
from pack_data.building import stages
from pack_data.building.command import BuildOptions, build
from pack_data.building.runner import TaskRunner
from pack_data.building.tasks import RunningTotals, SpillFormat, file_of, places_names
from pack_data.building.verify import verify
from pack_data.packers import get_packer
from pack_data.packing.histogram import LengthHistogram
from pack_data.store.packs import SLOT, PackSchema, StoredColumn
from tests.pack_data.building.test_assignment import (
    assert_each_has_a_place_of_the_recipe,
    pairing_of,
)
from tests.refusals import refused


class Job:
    """Parts of lengths in a work folder, as a build leaves them, and their assignment on disk."""

    def __init__(self, folder, lengths, S, *, depth=3, part=64, seed=(0, 0)):
        self.folder = folder
        self.seed = seed
        folder.mkdir(parents=True)
        self.lengths = np.array(lengths, int)
        histogram = LengthHistogram.from_lengths(self.lengths, S)
        self.packing = get_packer("spfhp")(histogram, max_sequences_per_pack=depth)
        self.packing.save(folder / "recipe.json")
        self.schema = PackSchema.of_tokens(S, 1, [StoredColumn("input_ids", SLOT, "|u1")])
        parts = np.split(self.lengths, range(part, len(self.lengths), part))
        for number, each in enumerate(parts):
            columns = np.stack([each, np.zeros_like(each)]).astype(SpillFormat.of(self.schema).lengths_type)
            columns.tofile(folder / file_of("examples", number, "bin"))
        self.totals = [RunningTotals(len(part), int(part.sum()), 0) for part in parts]

    def run(self, runner=None):
        on_disk.assign_on_disk(self.folder, self.schema, self.totals, self.seed, runner or TaskRunner())
        return self.places()

    def places(self):
        groups = on_disk.parts_groups(self.totals)
        columns = zip(*(places_names(group.number) for group in groups))
        return [np.concatenate([np.load(self.folder / name) for name in names]) for names in columns]


@pytest.fixture(autouse=True)
def _small(monkeypatch):
    monkeypatch.setattr(on_disk, "IN_MEMORY", 0)
    monkeypatch.setattr(on_disk, "NUMBERS", 16)
    monkeypatch.setattr(os, "fsync", lambda file: None)  # thousands of small files; no test here takes the power away


@given(
    st.lists(st.integers(1, 30), min_size=1, max_size=200),
    st.sampled_from([1, 2, 3, None]),
    st.sampled_from([1, 7, 64]),
    st.sampled_from([3, 16, 500]),
)
def test_every_sequence_gets_its_own_place_in_a_pack_of_the_recipe(tmp_path_factory, lengths, depth, part, numbers):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(on_disk, "NUMBERS", numbers)
        job = Job(tmp_path_factory.mktemp("job") / "work", lengths, 30, depth=depth, part=part)
        pack, slot = job.run()
    assert_each_has_a_place_of_the_recipe(lengths, pack, slot, job.packing)
    left = {path.name for path in job.folder.iterdir()}
    assert not any(name.startswith(("scattered", "shuffled")) for name in left)


def test_within_a_length_every_order_is_equally_likely(tmp_path, monkeypatch):
    """Also where each list is scattered over several buckets."""
    monkeypatch.setattr(on_disk, "NUMBERS", 2)
    lengths = [2, 2, 2, 1, 1, 1]
    seen = {}
    job = Job(tmp_path / "work", lengths, 3, depth=2, part=4)
    for seed in range(60):
        for path in job.folder.glob("slot-*"):
            path.unlink()
        job.seed = (seed, 0)
        pack = job.run()[0]
        seen[pairing_of(pack)] = seen.get(pairing_of(pack), 0) + 1
    assert len(seen) == 6
    assert min(seen.values()) > 1  # 10 expected, standard deviation 2.9


class Killed(Exception):
    pass


class Stops(TaskRunner):
    """Runs some tasks, and some of those a second time, then is killed."""

    def __init__(self, tasks):
        self.left = tasks

    def map(self, function, tasks):
        for task in tasks:
            if not self.left:
                raise Killed
            self.left -= 1
            yield function(task)
            function(task)


def test_after_any_kill_it_goes_on_to_the_same_places(tmp_path):
    lengths = np.random.default_rng(1).choice([3, 9, 20, 29, 30], 300, p=[0.5, 0.2, 0.1, 0.1, 0.1])
    calm = Job(tmp_path / "calm", lengths, 30).run()
    tasks = 0
    while True:  # every seventh task: scattered, shuffled and dealt
        job = Job(tmp_path / f"killed-{tasks}", lengths, 30)
        try:
            job.run(Stops(tasks))
            break
        except Killed:
            places = job.run()
            assert all(np.array_equal(array, other) for array, other in zip(places, calm)), tasks
        tasks += 7
    assert tasks > 40


def test_numbers_that_are_missing_are_one_line(tmp_path):
    job = Job(tmp_path / "work", np.random.default_rng(0).integers(1, 20, 300), 32)
    with pytest.raises(Killed):
        job.run(Stops(60))
    victim = sorted(job.folder.glob("shuffled-00001-*.bin"))[0]
    victim.write_bytes(victim.read_bytes()[:-4])
    with refused(job.folder, "build again"):
        job.run()


def test_a_recipe_of_other_lengths_is_one_line(tmp_path):
    job = Job(tmp_path / "work", [3] * 40, 32)
    get_packer("none")(LengthHistogram.from_lengths([4] * 40, 32)).save(job.folder / "recipe.json")
    with refused(job.folder, "more sequences of a length"):
        job.run()


def test_a_build_on_disk_is_whole_and_the_same_in_processes(tmp_path, monkeypatch):
    # A task carries the size of its runs: worker processes do not see what a test patches.
    monkeypatch.setattr(on_disk, "NUMBERS", 1500)
    monkeypatch.setattr(stages, "_INDEX_ROWS", 2)
    built = []
    for workers in (1, 2):
        out = tmp_path / str(workers)
        build(
            BuildOptions(
                out,
                synthetic="squad_1_1_384",
                sequences=12_000,
                max_sequence_length=384,
                workers=workers,
            )
        )
        assert verify(out).manifest.sequences == 12_000
        built.append({path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in sorted(out.iterdir())})
    assert built[0] == built[1]


def test_few_sequences_are_assigned_in_memory(monkeypatch):
    monkeypatch.setattr(on_disk, "IN_MEMORY", 100)
    parts = [RunningTotals(50, 50, 0), RunningTotals(50, 50, 0)]
    assert [list(group.parts) for group in on_disk.parts_groups(parts)] == [[0, 1]]
    assert on_disk.places_of_parts(parts) == [(0, 0), (0, 50)]
    parts.append(RunningTotals(1, 1, 0))
    assert [list(group.parts) for group in on_disk.parts_groups(parts)] == [[0], [1], [2]]
    assert on_disk.places_of_parts(parts) == [(0, 0), (1, 0), (2, 0)]


@given(st.lists(st.integers(0, 9), min_size=1, max_size=30), st.integers(1, 12))
def test_lists_of_places_cover_each_length_and_are_as_few_as_fit(counts, numbers):
    starts = np.cumsum([0, *counts])
    places = on_disk.Places(1, 7, np.dtype("<u4"), starts, *[np.zeros(0, np.int64)] * 4)
    (_, packs), *lists = on_disk._lists(places, numbers)
    assert packs == 7
    assert [end for _, end in lists][:-1] == [start for start, _ in lists][1:]
    assert (lists[0][0], lists[-1][1]) == (0, starts[-1]) if starts[-1] else not lists
    for start, end in lists:
        assert {start, end} <= {*starts}
        # A list above the limit holds one length; two lists that would fit together are one.
        assert end - start <= numbers or not {*range(start + 1, end)} & {*starts}
    within = [end - start <= numbers for start, end in lists]
    for number, (one, two) in enumerate(zip(lists, lists[1:])):
        assert not (within[number] and within[number + 1] and two[1] - one[0] <= numbers)
