"""Checkpoints, logs and tensors that cannot be used: one line that names the file and what is wrong."""

import hashlib
import json
import os

import torch

from ipu_packed_bert.run_files import checkpoints, safetensors_files
from ipu_packed_bert.run_files.checkpoints import Damaged, load_checkpoint, save_checkpoint
from tests.ipu_packed_bert.run_files.test_checkpoints import a_checkpoint
from tests.refusals import faults_of_refusals, rows_of

NO_SUCH_FILE = ["step_00000006", "a checkpoint has no file of that name"]
REFUSED = [
    *rows_of(
        r"""
# ---- somebody wrote the manifest anew: (call, names in the message, type of the error)
hostile(state={'step': -1}) => state.json | step | -1 => Damaged
hostile(state={'step': True}) => state.json | step | True => Damaged
hostile(state={'config': ['a']}) => state.json | config => Damaged
hostile(state={'engine': []}) => state.json | engine => Damaged
hostile(state={'engine': {}}) => .safetensors | no place | state.json => Damaged
hostile(state={'engine': {'optimizer': {'step': 'x', 'exp_avg': {}, 'exp_avg_sq': {}}}}) => step_00000006 => Damaged
hostile(weight=3) => state.json | further.weight | 3 | a tensor => Damaged
hostile(state={'batches': 7}) => state.json | batches | 7 => Damaged
hostile(state={'lower_case': 'yes'}) => state.json | lower_case | yes => Damaged
hostile(manifest={'files': {}}) => manifest.json | state.json => Damaged
hostile(manifest={'files': []}) => manifest.json | files => Damaged
hostile(manifest={'files': {'state.json': 3}}) => manifest.json | state.json => Damaged
hostile(manifest={'format': 'ipu_packed_bert checkpoint 3'}) => manifest.json | format => Damaged
hostile(text='[' * 100000) => state.json | deep => Damaged
hostile(text='{"step": ' + '9' * 100000 + '}') => state.json | digits => Damaged
hostile(tensors=b'\xff' * 100) => model.safetensors | cannot be read => Damaged
hostile(pickled={'a': torch.ones(1)}) => model.safetensors | cannot be read => Damaged
# ---- what is missing
load_newest(without_manifests(3, 6)) => no complete checkpoint | step_00000006
newest_checkpoint(folder / 'no' / 'checkpoints') => checkpoints | no checkpoint
newest_checkpoint(folder / 'checkpoints') => checkpoints | not the directory of a run | config.yml
load_checkpoint(folder / 'step_00000001') => step_00000001 => FileNotFoundError
# ---- tensors
list(file_pieces({'a': torch.zeros(2, dtype=torch.complex128)})) => a | complex128
list(file_pieces({'a': torch.zeros(2, 2).to_sparse()})) => a | sparse
"""
    ),
    ("hostile(file='../outside.safetensors')", NO_SUCH_FILE, Damaged),
    ("hostile(file='/dev/zero')", NO_SUCH_FILE, Damaged),
    ("hostile(file='..\\\\a.safetensors')", NO_SUCH_FILE, Damaged),
    ("hostile(file='a.pt')", NO_SUCH_FILE, Damaged),
    *[
        (f"_join({{'own': {{'step': 3, 'list': [None, 1]}}}}, {{'own': {{'{name}': None}}}})", ["no place", name])
        for name in ("step", "step/deeper", "list/1", "nowhere/a")
    ],
    *[
        (f"read_bytes({content!r})", ["a.safetensors", "cannot be read"])
        for content in (b"", b"12345678", b"\xff" * 64, b"\x02" + b"\0" * 7 + b"{}more")
    ],
]


def test_what_cannot_be_used_is_one_line(tmp_path):
    def hostile(state=None, file=None, manifest=None, text=None, tensors=None, pickled=None, weight=None):
        """Load a checkpoint that somebody has changed, with a manifest to match."""
        path = save_checkpoint(tmp_path / "run", a_checkpoint(6), keep=2)
        if weight is not None:
            state = json.loads((path / "state.json").read_text())
            state["engine"]["model"]["further.weight"] = weight
        if state is not None:
            text = json.dumps({**json.loads((path / "state.json").read_text()), **state})
        if text is not None:
            (path / "state.json").write_text(text)
        if tensors is not None:
            (path / "model.safetensors").write_bytes(tensors)
        if pickled is not None:
            torch.save(pickled, str(path / "model.safetensors"))
        listed = json.loads((path / "manifest.json").read_text())
        for name, entry in listed["files"].items():
            content = (path / name).read_bytes()
            entry.update(bytes=len(content), sha256=hashlib.sha256(content).hexdigest())
        if file is not None:
            listed["files"][file] = listed["files"]["random.safetensors"]
        (path / "manifest.json").write_text(json.dumps({**listed, **(manifest or {})}))
        load_checkpoint(path)

    def without_manifests(*steps):
        for step in steps:
            os.remove(save_checkpoint(tmp_path / "damaged", a_checkpoint(step), keep=2) / "manifest.json")
        return tmp_path / "damaged"

    def read_bytes(content):
        (tmp_path / "a.safetensors").write_bytes(content)
        safetensors_files.read_tensors(tmp_path / "a.safetensors")

    (tmp_path / "outside.safetensors").write_bytes(b"")
    local = {"hostile": hostile, "without_manifests": without_manifests, "read_bytes": read_bytes}
    scope = {**vars(checkpoints), **vars(safetensors_files), **local, "torch": torch, "folder": tmp_path}
    faults = faults_of_refusals(REFUSED, scope)
    assert not faults, "\n".join(faults)
