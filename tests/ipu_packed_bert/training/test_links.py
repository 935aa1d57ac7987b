"""Locks and outputs never follow links, and never empty what is not theirs."""

import os

import numpy as np
import pytest

from ipu_packed_bert.run_files.folder import EVALUATIONS, LOCK, LOG
from ipu_packed_bert.training.log_files import JsonlWriter
from ipu_packed_bert.training.run_folder import locked_run
from pack_data.building import work_folder
from pack_data.building.convert import main as convert
from pack_data.building.inputs import _TextWriter
from pack_data.reading.durable import temporary_name, write_array, write_atomically
from pack_data.store.data_set import write_shard

PRECIOUS = "precious\n"


def enter(context):
    with context:
        pass


def converted(folder):
    (folder / "a.jsonl").write_text('{"input_ids": [1, 2]}\n')
    convert([str(folder / "a.jsonl"), str(folder / "x.jsonl")])


def shard(folder):
    write_shard(folder, 0, np.zeros(2, [("a", "i4")]))


# The name that is opened, and what opens it in a directory.
LOCKS = {
    "run": (LOCK, lambda folder: enter(locked_run(folder))),
    "build": ("out.building/lock", lambda folder: enter(work_folder.work_folder(folder / "out"))),
    "convert": (".x.jsonl.lock", converted),
}
LOGS = {name: (name, lambda folder, name=name: JsonlWriter(folder / name).append({})) for name in (LOG, EVALUATIONS)}
WRITTEN = {
    "array": (temporary_name, "a.npy", lambda folder: write_array(folder / "a.npy", np.zeros(2))),
    "atomically": (temporary_name, "a.json", lambda folder: write_atomically(folder / "a.json", b"{}")),
    "convert": (temporary_name, "x.jsonl", converted),
    "output": (lambda path: path, "x.jsonl", converted),
    "text": (lambda path: path, "part.txt", lambda folder: _TextWriter([folder / "part.txt"])),
    "shard": (temporary_name, "packs-00000", shard),
}


def prepared(folder, name):
    """Return a file outside the directory of the outputs, and the name that leads to it."""
    (folder / "precious.txt").write_text(PRECIOUS)
    path = folder / "within" / name
    path.parent.mkdir(parents=True)
    return folder / "precious.txt", path


@pytest.mark.parametrize("way", ["link", "dangling", "hard link", "foreign"])
@pytest.mark.parametrize("name, opens", [*LOCKS.values(), *LOGS.values()], ids=[*LOCKS, *LOGS])
def test_what_is_no_lock_or_log_of_ours_is_refused_and_kept(tmp_path, name, opens, way):
    precious, path = prepared(tmp_path, name)
    if way == "foreign":
        path.write_text(PRECIOUS)
    elif way == "hard link":
        os.link(precious, path)
    else:
        path.symlink_to(precious if way == "link" else tmp_path / "missing")
    if way == "foreign" and name in LOGS:
        opens(tmp_path / "within")
        assert path.read_text().startswith(PRECIOUS)
        return
    with pytest.raises((ValueError, SystemExit)) as refusal:
        opens(tmp_path / "within")
    assert path.name in str(refusal.value)
    assert precious.read_text() == PRECIOUS
    assert not (tmp_path / "missing").exists()
    assert path.is_symlink() or path.read_text() == PRECIOUS


@pytest.mark.parametrize("of, name, writes", WRITTEN.values(), ids=WRITTEN)
@pytest.mark.parametrize("target", ["precious.txt", "missing"])
def test_an_output_replaces_a_link_of_its_name(tmp_path, of, name, writes, target):
    precious, path = prepared(tmp_path, name)
    of(path).symlink_to(tmp_path / target)
    writes(tmp_path / "within")
    assert precious.read_text() == PRECIOUS
    assert not (tmp_path / "missing").exists()
    assert not path.is_symlink()
    assert not list(path.parent.glob("*.tmp"))
