"""Weights from somebody else: what could run code is refused before torch sees it, plain forms read as they are."""

import io
import os
import tarfile
import zipfile
from pathlib import Path
from typing import Tuple

import pytest
import torch

from ipu_packed_bert.commands import export, pretrain
from ipu_packed_bert.torch_files import UnsafeFile, load_tensors
from pack_data.command import run_main
from tests.tiny_runs import tiny_config, tiny_data

pytestmark = pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")


class Trap(torch.nn.Module):
    """A module whose loading writes a file."""

    def __init__(self, path: str):
        super().__init__()
        self.path = path

    @torch.jit.export
    def __getstate__(self) -> Tuple[str, bool]:
        return self.path, self.training

    @torch.jit.export
    def __setstate__(self, state: Tuple[str, bool]):
        self.path = state[0]
        self.training = state[1]
        torch.ops.aten.save(torch.zeros(1), self.path)

    def forward(self, x):
        return x


@pytest.fixture
def written(tmp_path):
    return tmp_path / "written"


@pytest.fixture
def archive(tmp_path, written):
    """The bytes of a TorchScript archive; loading it writes a file."""
    torch.jit.save(torch.jit.script(Trap(str(written))), str(tmp_path / "trap.pt"))
    torch.jit.load(str(tmp_path / "trap.pt"))
    assert written.exists()  # the trap works
    written.unlink()
    return (tmp_path / "trap.pt").read_bytes()


def rebuilt(data, name=lambda name: name, more=()):
    """The archive with other names, and with more records behind its own."""
    out = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(data)) as before, zipfile.ZipFile(out, "w") as after:
        for entry in before.namelist():
            after.writestr(name(entry), before.read(entry))
        for entry, content in more:
            after.writestr(entry, content)
    return out.getvalue()


def two_faced(data):
    """An archive with two tables of contents: Python's zipfile reads the second one, which names a text, torch the
    first."""
    plain = rebuilt(data)
    end = plain.rindex(b"PK\x05\x06")
    size = int.from_bytes(plain[end + 12 : end + 16], "little")
    other = io.BytesIO()
    with zipfile.ZipFile(other, "w") as zipped:
        entry = zipfile.ZipInfo("trap/readme")
        entry.comment = b"x" * (size - 46 - len("trap/readme"))
        zipped.writestr(entry, b"nothing")
    other = other.getvalue()
    tail = other.rindex(b"PK\x05\x06")
    return plain[:end] + other[tail - size : tail] + plain[end:]


FORMS = {
    "as saved": lambda data: data,
    "another top folder": lambda data: rebuilt(data, lambda name: "a folder/" + name.split("/", 1)[1]),
    "among many records": lambda data: rebuilt(
        data, more=[(f"trap/data/{number}", b"0" * 64) for number in range(200)]
    ),
    "two tables of contents": two_faced,
}


@pytest.mark.parametrize("form", FORMS)
def test_torchscript_is_refused_unread(tmp_path, archive, written, form):
    path = tmp_path / "weights.bin"
    path.write_bytes(FORMS[form](archive))
    with pytest.raises(UnsafeFile) as refused:
        load_tensors(path)
    assert not written.exists()
    assert str(refused.value).startswith(f"{path}: ") and "\n" not in str(refused.value)


def test_the_two_faced_archive_hides_its_code_from_python(archive):
    assert zipfile.ZipFile(io.BytesIO(two_faced(archive))).namelist() == ["trap/readme"]


def test_tar_archives_are_refused(tmp_path):
    with tarfile.open(tmp_path / "weights.bin", "w") as tar:
        for name in ("storages", "tensors", "pickle"):
            tar.addfile(tarfile.TarInfo(name))
    with pytest.raises(UnsafeFile):
        load_tensors(tmp_path / "weights.bin")


@pytest.mark.parametrize("zipped", [True, False])
def test_plain_weights_are_read(tmp_path, zipped):
    weights = {"a": torch.arange(6.0).view(2, 3), "b": torch.zeros(2, dtype=torch.float16)}
    torch.save(weights, tmp_path / "weights.bin", _use_new_zipfile_serialization=zipped)
    found = load_tensors(tmp_path / "weights.bin")
    assert set(found) == set(weights) and all(torch.equal(found[name], weights[name]) for name in weights)


def test_a_run_to_resume_or_to_begin_from_runs_no_code(tmp_path, archive, written, capsys):
    path = tmp_path / "run" / "checkpoints" / "step_00000003.pt"
    path.parent.mkdir(parents=True)
    path.write_bytes(archive)
    config = tiny_config(tmp_path / "run" / "config.yml", tiny_data(tmp_path / "data"))
    for arguments in (
        ["--resume", str(tmp_path / "run")],
        ["--config", str(config), "--start-from", str(tmp_path / "run")],
    ):
        assert run_main(pretrain.main, arguments) == 2
        message = capsys.readouterr().err
        assert "convert-checkpoint" in message and message.count("\n") == 1
    assert run_main(export.main, [str(tmp_path / "run"), str(tmp_path / "out")]) == 2
    assert "convert-checkpoint" in capsys.readouterr().err
    assert not written.exists()


def test_a_hugging_face_folder_runs_no_code(tmp_path, archive, written, capsys):
    folder = tmp_path / "hf"
    folder.mkdir()
    (folder / "config.json").write_text('{"model_type": "bert"}')
    (folder / "pytorch_model.bin").write_bytes(archive)
    assert run_main(export.main, ["--import", str(folder), str(tmp_path / "run")]) == 2
    message = capsys.readouterr().err
    assert "TorchScript" in message and message.count("\n") == 1
    assert not written.exists() and not (tmp_path / "run").exists()


def test_nothing_else_calls_torch_load():
    root = str(Path(__file__).resolve().parents[2])
    for package in ("ipu_packed_bert", "pack_data", "profiling"):
        for folder, _, names in os.walk(os.path.join(root, package)):
            for name in names:
                if name.endswith(".py") and name != "torch_files.py":
                    with open(os.path.join(folder, name), encoding="utf-8") as source:
                        text = source.read()
                    assert "torch.load(" not in text and "jit.load" not in text, name
