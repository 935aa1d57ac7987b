"""Every reader on damaged files, a fixed seed: one printable line that names the file, or the same values as before.

A night's worth of other cases: python -m tests.fuzz --n 100000
"""

import collections

import pytest

pytest.importorskip("torch", reason="readers of runs need torch")

from pack_data.reading.words import Problems
from tests.fuzz.cases import (
    FAILURES,
    REFUSED,
    UNCHANGED,
    Found,
    Reader,
    Sample,
    Target,
    digest,
    load_readers,
    numbers_of,
    samples,
    typed,
)
from tests.fuzz.mutators import BYTES, Mutator, free

SEED = 0
CASES = 1000
BY_COMMAND = 30
FOUND, SKIPPED = load_readers()


@pytest.fixture(scope="module")
def made():
    with samples(FOUND) as of_all:
        yield {sample.reader.name: sample for sample in of_all}


@pytest.mark.parametrize("reader", FOUND, ids=lambda reader: reader.name)
def test_damage_is_said_in_one_line_or_changes_nothing(made, reader):
    numbers = [number for place, number in numbers_of(FOUND, CASES) if FOUND[place] is reader]
    sample = made[reader.name]
    results = [(number, sample.run(SEED, number)) for number in numbers]
    failures = [f"case {number}: {' | '.join(result)}" for number, result in results if result.outcome in FAILURES]
    assert not failures, "\n".join(failures)
    outcomes = collections.Counter(result.outcome for _, result in results)
    assert outcomes[REFUSED] and len(numbers) >= 5


@pytest.mark.parametrize("reader", [reader for reader in FOUND if reader.command], ids=lambda reader: reader.name)
def test_a_command_says_it_in_one_line_with_status_2(made, reader):
    cases = BY_COMMAND // sum(other.command is not None for other in FOUND) + 1
    sample = made[reader.name]
    results = [(number, sample.run(SEED + 1, number, by_command=True)) for number in range(cases)]
    failures = [f"case {number}: {' | '.join(result)}" for number, result in results if result.outcome in FAILURES]
    assert not failures, "\n".join(failures)


def test_readers_that_need_packages_are_counted():
    if SKIPPED:
        pytest.skip(
            f"{len(SKIPPED)} of {len(FOUND) + len(SKIPPED)} readers need a package: "
            + ", ".join(reader.name for reader in SKIPPED)
        )


def _named(name):
    return [mutator for mutator in BYTES if mutator.name == name]


def _sample(tmp_path, read, mutators=BYTES):
    def make(folder):
        (folder / "a").write_bytes(bytes(range(100)))

    return Sample(Reader("a", make, read, (Target("a", tuple(mutators)),)), tmp_path)


def _raising(error):
    def read(folder):
        data = (folder / "a").read_bytes()
        if data != bytes(range(100)):
            raise error(folder / "a")
        return data

    return read


@pytest.mark.parametrize(
    "error, outcome",
    [
        (lambda path: ValueError(f"{path}: wrong"), REFUSED),
        (lambda path: ValueError("wrong"), "message"),
        (lambda path: ValueError(f"{path}: wrong\nand more"), "message"),
        (lambda path: Problems(f"{path}: 2 problems\n  one\n  two"), REFUSED),
        (lambda path: ValueError(f"{path}: {'x' * 1000}"), "message"),
        (lambda path: ValueError(f"{path}: \x1b[31m"), "message"),
        (lambda path: OSError(2, "no such file", str(path)), REFUSED),
        (lambda path: KeyError(str(path)), "traceback"),
        (lambda path: MemoryError(), "traceback"),
        (lambda path: RecursionError(), "traceback"),
        (lambda path: SystemExit(2), "traceback"),
    ],
)
def test_what_a_reader_raises_is_judged(tmp_path, error, outcome):
    sample = _sample(tmp_path, _raising(error), _named("flip_bits"))
    assert [sample.run(0, number).outcome for number in range(5)] == [outcome] * 5


def test_what_a_reader_accepts_is_judged(tmp_path):
    first = _named("cut")
    read = lambda folder: (folder / "a").read_bytes()  # noqa: E731
    for number, (reader, mutators, outcome) in enumerate(
        (
            (read, first, "silent change"),
            (read, free(first), "harmless change"),
            (lambda folder: Found("same", read(folder)), first, "harmless change"),
            (lambda folder: "same", first, UNCHANGED),
        )
    ):
        sample = _sample(tmp_path / str(number), reader, mutators)
        assert sample.run(0, 1).outcome == outcome


def test_a_hang_and_a_large_allocation_end(tmp_path, monkeypatch):
    from tests.fuzz import cases

    monkeypatch.setattr(cases, "SECONDS", 0.1)

    def endless(folder):
        while (folder / "a").read_bytes() != bytes(range(100)):
            pass

    assert _sample(tmp_path / "1", endless, _named("cut")).run(0, 1).outcome == "hang"
    monkeypatch.setattr(cases, "SECONDS", 5.0)
    large = _sample(tmp_path / "2", lambda folder: len(bytes((len((folder / "a").read_bytes()) != 100) << 33)))
    assert "MemoryError" in large.run(0, 1).detail


def test_a_case_is_made_again_from_reader_seed_and_number(tmp_path):
    seen = []
    read = lambda folder: seen.append((folder / "a").read_bytes() if (folder / "a").is_file() else None)  # noqa: E731
    sample = _sample(tmp_path, read)
    for number in (3, 4, 3):
        sample.run(7, number)
    assert seen[1] == seen[3] != seen[2]
    other = Mutator("other", lambda rng, path: path.write_bytes(b"x"))
    assert digest([1, 2.0, "a", None]) == digest([1, 2.0, "a", None]) != digest([1, 2.0, "a", False])
    assert other.remade is False


def test_a_field_of_another_type_is_noticed():
    from pack_data.store.data_set import StoredFile
    from tests.fuzz.cases import Mistyped

    typed(StoredFile("a", 1, "b"))
    for wrong in (StoredFile("a", "1", "b"), StoredFile("a", True, "b"), StoredFile(None, 1, "b")):
        with pytest.raises(Mistyped):
            typed(wrong)
