"""Complete files: whole or not at all, and no other module of the product declares anything complete."""

import ast
import errno
import os
import subprocess
import sys

import pytest

from pack_data.reading import durable
from pack_data.reading.durable import discard, link, remove_unfinished, replacing_folder, write_atomically
from tests.imports import ROOT

PRODUCT = [path for name in ("pack_data", "ipu_packed_bert") for path in sorted((ROOT / name).rglob("*.py"))]
# `str.replace` and `dataclasses.replace` are something else, so the owner of that name counts.
RESERVED = {
    ("os", "replace"),
    ("os", "rename"),
    ("os", "fsync"),
    ("os", "link"),
    ("np", "save"),
    ("np", "savez"),
    (None, "tofile"),
    (None, "rename"),
}
ALLOWED = {
    "pack_data/reading/durable.py": {"replace", "rename", "fsync", "link"},
    "pack_data/pack_lengths.py": {"savez"},  # into memory
}


def reserved_calls(path):
    names = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Attribute):
            owner = getattr(node.value, "id", None)
            if (owner, node.attr) in RESERVED or (None, node.attr) in RESERVED:
                names.add(node.attr)
    return names


def test_nothing_else_declares_a_file_complete():
    calls = {path.relative_to(ROOT).as_posix(): reserved_calls(path) for path in PRODUCT}
    assert {name: names for name, names in calls.items() if names} == ALLOWED


@pytest.mark.parametrize("error", [None, errno.EPERM, errno.EXDEV])
def test_a_linked_file_replaces_the_target_and_keeps_its_first_name(tmp_path, monkeypatch, error):
    source, target = tmp_path / "ready" / "a", tmp_path / "out" / "a"
    for path, text in ((source, "new"), (target, "old")):
        path.parent.mkdir()
        path.write_text(text)

    def refuse(*_):
        raise OSError(error, os.strerror(error))

    if error:
        monkeypatch.setattr(os, "link", refuse)
    for _ in range(2):
        link(source, target)
        assert [path.read_text() for path in (source, target)] == ["new", "new"]
        assert [path.name for path in tmp_path.rglob("*")].count("a") == len(list(tmp_path.rglob("*"))) - 2 == 2
    source.unlink()
    link(source, target)
    assert target.read_text() == "new"


LIMITED = """
import resource, sys, numpy as np
from pathlib import Path
from pack_data.reading.durable import raw_bytes, write_array, write_atomically
path = Path(sys.argv[1])
values = np.arange(1000, dtype=np.int8)
resource.setrlimit(resource.RLIMIT_FSIZE, (300, resource.RLIM_INFINITY))
for write in (lambda: write_array(path, values), lambda: write_atomically(path, raw_bytes(values))):
    try:
        write()
    except OSError as error:
        print(error)
"""


def test_an_array_that_does_not_fit_is_an_error(tmp_path):
    """`numpy.save` and `tofile` leave a short file of less than a buffer without one."""
    (tmp_path / "a.npy").write_bytes(b"before")
    command = [sys.executable, "-c", LIMITED, str(tmp_path / "a.npy")]
    lines = subprocess.run(command, stdout=subprocess.PIPE, check=True, encoding="utf-8", cwd=ROOT).stdout.splitlines()
    assert len(lines) == 2
    assert all("File too large" in line and "a.npy" in line for line in lines)
    assert [(item.name, item.read_bytes()) for item in tmp_path.iterdir()] == [("a.npy", b"before")]


@pytest.mark.parametrize("before", ["nothing", "a directory", "a file"])
@pytest.mark.parametrize("fails", [False, True])
def test_a_directory_is_replaced_as_a_whole(tmp_path, before, fails):
    path = tmp_path / "model"
    if before == "a directory":
        path.mkdir()
        (path / "old").write_text("")
    elif before == "a file":
        path.write_text("")
    contents = sorted(tmp_path.rglob("*"))
    try:
        with replacing_folder(path) as partial:
            write_atomically(partial / "new", b"1")
            if fails:
                raise KeyboardInterrupt
    except KeyboardInterrupt:
        assert sorted(tmp_path.rglob("*")) == contents
    else:
        assert not fails
        assert sorted(tmp_path.rglob("*")) == [path, path / "new"]


@pytest.mark.parametrize("killed", [False, True])
def test_a_discarded_directory_is_gone_and_what_a_kill_left_of_it_is_removed(tmp_path, monkeypatch, killed):
    for name in ("step_1", "step_2"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "state").write_text("")
    with monkeypatch.context() as patch:
        if killed:
            patch.setattr(durable, "_delete", lambda path: None)
        discard(tmp_path / "step_1")
        discard(tmp_path / "step_3")  # not there
    left = sorted(path.name for path in tmp_path.iterdir())
    assert left[-1] == "step_2" and len(left) == 1 + killed
    remove_unfinished(tmp_path, "run_*")
    assert len(list(tmp_path.iterdir())) == 1 + killed
    remove_unfinished(tmp_path, "step_*")
    assert [path.name for path in tmp_path.iterdir()] == ["step_2"]
    assert (tmp_path / "step_2" / "state").exists()
