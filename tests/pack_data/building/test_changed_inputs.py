"""Inputs that are replaced while they are read, and files whose reading fails: refused with the file, nothing wrong."""

import gzip
import json
import os
import sys

import pytest

from pack_data.building import inputs, stages
from pack_data.building.command import BuildOptions, build
from pack_data.cli.command import run_main
from pack_data.text import vocabulary
from tests.pack_data.text_corpus import Stopped, build_small, content
from tests.refusals import refused

TEXTS = ["One two three. Four five six.\nSeven eight nine.\n", "Aaa bbb ccc. Dddd eeee fff.\nGgggg hhhhh iiii.\n"]


def _rows(number):
    return [{"input_ids": [10 * number + 1, 2, 3]}] * 40


def _jsonl(rows):
    return "".join(json.dumps(row) + "\n" for row in rows).encode()


def _parquet(rows):
    pa = pytest.importorskip("pyarrow", reason="needs pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet", reason="needs pyarrow")
    sink = pa.BufferOutputStream()
    parquet.write_table(pa.table({name: [row[name] for row in rows] for name in rows[0]}), sink)
    return sink.getvalue().to_pybytes()


# Name of the input -> its content by number.
CORPORA = {
    "a.txt": lambda number: TEXTS[number].encode() * 9,
    "a.txt.gz": lambda number: gzip.compress(TEXTS[number].encode() * 9, mtime=0),
    "a.jsonl": lambda number: _jsonl([{"text": TEXTS[number]}] * 9),
    "a.parquet": lambda number: _parquet([{"text": TEXTS[number]}] * 9),
}
SOURCES = {"b.jsonl": lambda number: _jsonl(_rows(number)), "b.parquet": lambda number: _parquet(_rows(number))}
BUILT_FROM = {**CORPORA, **SOURCES}


def _replace(path, data):
    """Put another content in place of a file; its time stays, as with rsync -t."""
    before = path.stat() if path.exists() else None
    path.write_bytes(data)
    if before:
        os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))


def _build(path, out, **options):
    if path.name in CORPORA:
        build_small(path, out, **options).close()
        return
    options = {"max_sequence_length": 16, "workers": 1, **options}
    build(BuildOptions(out, source=path, **options)).close()


@pytest.mark.parametrize("name, copies", [*((name, False) for name in BUILT_FROM), ("a.jsonl", True)])
def test_an_input_that_changes_between_its_checksum_and_its_reading_is_refused(tmp_path, monkeypatch, name, copies):
    """The manifest named the checksum of a content that no pack held."""
    options = {"drop_copies": True} if copies else {}
    path = tmp_path / name
    _replace(path, BUILT_FROM[name](1))
    _build(path, tmp_path / "expected", **options)
    _replace(path, BUILT_FROM[name](0))
    make_plan = stages.Stages._make_plan

    def replaced_afterwards(*given):
        plan = make_plan(*given)
        _replace(path, BUILT_FROM[name](1))
        return plan

    with monkeypatch.context() as patch:
        patch.setattr(stages.Stages, "_make_plan", replaced_afterwards)
        with refused(name, "run the command again"):
            _build(path, tmp_path / "out", **options)
    _build(path, tmp_path / "out", **options)
    assert content(tmp_path / "out") == content(tmp_path / "expected")


@pytest.mark.parametrize("name", BUILT_FROM)
def test_a_stopped_build_begins_anew_over_a_replaced_file_of_the_same_size_and_time(tmp_path, monkeypatch, name):
    path = tmp_path / name
    _replace(path, BUILT_FROM[name](1))
    _build(path, tmp_path / "expected")
    _replace(path, BUILT_FROM[name](0))

    def stopped(*_, **__):
        raise Stopped

    with monkeypatch.context() as patch, pytest.raises(Stopped):
        patch.setattr(stages, "lengths_of_part", stopped)  # when all parts are made
        _build(path, tmp_path / "out")
    _replace(path, BUILT_FROM[name](1))
    _build(path, tmp_path / "out")
    assert content(tmp_path / "out") == content(tmp_path / "expected")


def test_a_vocabulary_that_changes_before_it_is_copied_is_refused(tmp_path, monkeypatch):
    corpus = tmp_path / "a.txt"
    corpus.write_bytes(CORPORA["a.txt"](0))
    given = tmp_path / "given.txt"
    given.write_text("\n".join((*vocabulary.SPECIAL_TOKENS, "one", "two", "")))
    copy = inputs._TextInput._copy_vocabulary

    def changed_before(*arguments):
        given.write_text("\n".join((*vocabulary.SPECIAL_TOKENS, "two", "one", "")))
        copy(*arguments)

    monkeypatch.setattr(inputs._TextInput, "_copy_vocabulary", changed_before)
    with refused("given.txt", "run the command again"):
        build_small(corpus, tmp_path / "out", vocabulary=given)


@pytest.mark.skipif(sys.platform != "linux", reason="/proc/self/mem is an ordinary file that cannot be read")
@pytest.mark.parametrize("name", ["a.txt", "b.jsonl"])
def test_an_error_of_reading_names_the_file_and_the_way_out(tmp_path, name, capsys):
    """EIO named nothing."""
    path = tmp_path / name
    path.symlink_to("/proc/self/mem")
    assert run_main(lambda _: _build(path, tmp_path / "out"), None) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert str(path) in line
    assert "; " in line
