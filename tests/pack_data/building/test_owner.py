"""A build touches only files of the former data set and its own; it replaces no other data set unasked."""

import json
import os
import subprocess
import sys

import pytest

from ipu_packed_bert.commands.build import main as build_main
from pack_data.building import inputs
from pack_data.cli.command import run_main
from pack_data.store.data_set import read_manifest
from tests.pack_data.text_corpus import build_small, stop_at, write_corpus
from tests.refusals import refused


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    return write_corpus(tmp_path_factory.mktemp("corpus"), documents=6)


def content(folder):
    return {path.relative_to(folder): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


FOREIGN = ("notes.tmp", "packs-00000-deadbeef.npy", "packs-mine.npy", "lengths-old.npy", "readme.md", "sub/a.tmp")


def test_files_of_others_stay(corpus, tmp_path):
    out = tmp_path / "data"
    build_small(corpus, out).close()
    (out / "sub").mkdir(parents=True)
    for name in FOREIGN:
        (out / name).write_text(name)
    shards = {entry.file for entry in read_manifest(out).shards}
    build_small(corpus, out, seed=9, overwrite=True).close()
    assert all((out / name).read_text() == name for name in FOREIGN)
    assert shards
    assert not any((out / name).exists() for name in shards)  # its own former files went


@pytest.mark.parametrize("overwrite", [False, True])
@pytest.mark.parametrize("side", ["data", "data-held-out"])
def test_a_folder_of_other_things_gets_no_data_set(corpus, tmp_path, overwrite, side):
    (tmp_path / side).mkdir()
    for name in ("vocab.txt", "thesis.tex"):  # one that a build may leave does not make the other one its own
        (tmp_path / side / name).write_text("years of work")
    with refused(tmp_path / side, "thesis.tex", "no data set", unchanged=tmp_path):
        build_small(corpus, tmp_path / "data", held_out=0.4, overwrite=overwrite)
    with refused(corpus, "no data set", unchanged=corpus):
        build_small(corpus, corpus, overwrite=overwrite)
    assert not corpus.with_name("corpus.building").exists()


def test_a_folder_may_hold_what_a_build_leaves_or_is_given(corpus, tmp_path):
    """A folder that is there for a data set: hidden files, a stopped build's, and the user's own vocabulary."""
    build_small(corpus, tmp_path / "calm").close()
    out = tmp_path / "data"
    (out / "lost+found").mkdir(parents=True)
    (out / ".gitkeep").write_text("")
    for path in (tmp_path / "calm").glob("*.npy"):
        (out / path.name).write_bytes(path.read_bytes())
    (out / "words.txt").write_bytes((tmp_path / "calm" / "vocab.txt").read_bytes())
    build_small(corpus, out, vocabulary=out / "words.txt").close()


def test_a_folder_of_the_work_folders_name_stays(corpus, tmp_path):
    work = tmp_path / "data.building"
    (work / "deep").mkdir(parents=True)
    (work / "thesis.tex").write_text("years of work")
    for plan in ("", '{"chapters": 3}'):
        (work / "plan.json").write_text(plan)
        with refused(work, "not made by a build", unchanged=tmp_path):
            build_small(corpus, tmp_path / "data")


def test_a_file_laid_into_the_work_folder_stays(corpus, tmp_path, monkeypatch):
    stop_at(monkeypatch, "make_shard", corpus, tmp_path / "data")
    (tmp_path / "data.building" / "mine.txt").write_text("mine")
    build_small(corpus, tmp_path / "data").close()
    assert [path.as_posix() for path in content(tmp_path / "data.building")] == ["mine.txt"]


def test_a_manifest_that_names_files_elsewhere_removes_none(corpus, tmp_path):
    out = tmp_path / "data"
    build_small(corpus, out).close()
    (tmp_path / "precious").write_text("x")
    manifest = json.loads((out / "manifest.json").read_text())
    manifest["files"].append({"file": "../precious", "bytes": 1, "sha256": "", "packs": 0})
    (out / "manifest.json").write_text(json.dumps(manifest))
    build_small(corpus, out, overwrite=True).close()
    assert (tmp_path / "precious").exists()


def test_the_same_again_builds_nothing(corpus, tmp_path, monkeypatch):
    out = tmp_path / "data"
    how = "--max-sequence-length 64 --vocabulary-size 200 --workers 1 --held-out 0.4".split()
    arguments = ["--corpus", str(corpus), "--out", str(out), *how]
    assert run_main(build_main, arguments) == 0
    before = content(tmp_path)
    monkeypatch.setattr(inputs, "make_part", lambda task: pytest.fail("built again"))
    assert run_main(build_main, arguments) == 0
    assert content(tmp_path) == before
    # One of the two data sets went, or a file of one: then it is built again.
    (tmp_path / "data-held-out" / "manifest.json").unlink()
    monkeypatch.undo()
    assert run_main(build_main, arguments) == 2  # its recipe.json is nobody's now
    assert run_main(build_main, arguments + ["--overwrite"]) == 0
    assert content(tmp_path) == before
    next((tmp_path / "data").glob("packs-*")).unlink()
    assert run_main(build_main, arguments) == 0
    assert content(tmp_path) == before


@pytest.mark.parametrize(
    "change",
    [dict(held_out=0.4), dict(max_sequences_per_pack=2), "corpus", "vocabulary"],
)
def test_something_else_is_replaced_on_request_only(corpus, tmp_path, change):
    out = tmp_path / "data"
    build_small(corpus, out).close()
    before = content(tmp_path / "data")
    options = {} if isinstance(change, str) else change
    source = corpus
    if change == "corpus":
        source = write_corpus(tmp_path / "other", 4, seed=7)
    elif change == "vocabulary":
        options = {"vocabulary": tmp_path / "vocab.txt"}
        (tmp_path / "vocab.txt").write_bytes((out / "vocab.txt").read_bytes() + b"zzz\n")
    with refused(out, "--overwrite", unchanged=tmp_path):
        build_small(source, out, **options)
    build_small(source, out, overwrite=True, **options).close()
    assert content(out) != before


@pytest.mark.parametrize("name", ["manifest.json", "vocab.txt", "recipe.json"])
def test_somebody_elses_file_of_a_data_sets_name_is_replaced_on_request_only(corpus, tmp_path, name):
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / name).write_text('{"name": "a web application"}')
    with refused(tmp_path / "data", name, "--overwrite", unchanged=tmp_path):
        build_small(corpus, tmp_path / "data")
    build_small(corpus, tmp_path / "data", overwrite=True).close()


def test_another_file_system_gets_copies(corpus, tmp_path, monkeypatch):
    """OUT may be where another disk is mounted; the work folder beside it is not."""
    build_small(corpus, tmp_path / "calm").close()
    replace = os.replace
    refused = []

    def across(source, target):
        if os.path.dirname(os.path.dirname(source)) == str(tmp_path / "data.building") and os.path.dirname(
            target
        ) == str(tmp_path / "data"):
            refused.append(target)
            raise OSError(18, "Invalid cross-device link")
        replace(source, target)

    monkeypatch.setattr(os, "replace", across)
    build_small(corpus, tmp_path / "data").close()
    assert len(refused) > 3
    assert content(tmp_path / "data") == content(tmp_path / "calm")


def test_without_the_calls_of_posix_everything_imports_and_a_build_says_so(corpus, tmp_path, monkeypatch):
    """Like Windows, where the modules fcntl and resource are missing."""
    script = (
        "import sys, pkgutil\n"
        "for name in ('fcntl', 'resource', 'termios', 'pwd', 'grp'):\n"
        "    sys.modules[name] = None\n"
        "import pack_data\n"
        "for module in pkgutil.walk_packages(pack_data.__path__, 'pack_data.'):\n"
        "    if not module.name.endswith('__main__'):\n"
        "        __import__(module.name)\n"
        "from pack_data.cli.command import run_main\n"
        "from ipu_packed_bert.commands.build import main\n"
        "raise SystemExit(run_main(main, sys.argv[1:]))\n"
    )
    finished = subprocess.run(
        [sys.executable, "-c", script, "--corpus", str(corpus), "--out", str(tmp_path / "data")],
        capture_output=True,
        text=True,
    )
    assert finished.returncode == 2
    assert finished.stderr.count("\n") == 1
    assert "POSIX" in finished.stderr
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("name", [".nfs000000000a1b2c3d00000001", "ready/.nfs0a1b", "held-out/ready/.nfs0a1b"])
def test_what_nfs_keeps_of_a_removed_work_directory_is_recognised(corpus, tmp_path, name):
    left = tmp_path / "data.building" / name
    left.parent.mkdir(parents=True)
    left.write_bytes(b"")
    build_small(corpus, tmp_path / "data").close()
    assert (tmp_path / "data" / "manifest.json").exists()
