"""Checkpoints: one directory per step, written atomically; reading one never unpickles or runs anything.

step_00000042/
    model.safetensors      weights, float32, Hugging Face names
    optimizer.safetensors  moments, exp_avg/NAME and exp_avg_sq/NAME
    engine.safetensors     other tensors of an engine, such as random states
    state.json             everything else: step, position in the data, configuration, identity of the vocabulary
    manifest.json          sizes and sha256 of the other files

Directories whose names begin with a dot are being written or removed; the next save deletes those of a killed run.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import re
import stat
from pathlib import Path
from typing import Any, Callable, Dict, Iterable, List, Mapping, NamedTuple, Optional, Tuple, Union

import torch

from ipu_packed_bert.run_files.folder import CONFIG, checkpoints
from ipu_packed_bert.run_files.safetensors_files import file_pieces, read_tensors, tensor_bytes
from ipu_packed_bert.run_files.vocabulary_identity import Identity
from pack_data.reading.durable import (
    discard,
    free_bytes,
    remove_unfinished,
    replacing_folder,
    sync_folder,
)
from pack_data.reading.fields import Fields, parse_json

_FORMAT = "ipu_packed_bert checkpoint 2"
MANIFEST = "manifest.json"
UNFINISHED = "step_*"  # what killed processes leave of unfinished checkpoints; one process at a time writes a run
STATE = "state.json"
# Plain names only, so that no file outside the directory is read.
_FILE = re.compile(r"([a-z][a-z0-9_]{0,60})\.safetensors|state\.json")
_TOP_LEVEL = "engine"  # file of the tensors at the top level of an engine's state
# Bytes. Larger files are damaged or malicious, and are not read into memory.
_MAX_BYTES = {MANIFEST: 1 << 20, STATE: 1 << 26}
_BLOCK = 1 << 20  # bytes hashed at a time
_WAY_OUT = "this is not a checkpoint of this program"


class Checkpoint(NamedTuple):
    """A run after ``step`` updates."""

    step: int
    engine: Dict[str, Any]  # Engine.state()
    batches: Dict[str, Any]  # GlobalBatches.state()
    config: str  # YAML of the resolved configuration
    vocabulary: str = ""  # sha256 of the vocabulary; empty if unknown
    # True if texts are lower-cased before the vocabulary is applied; None if not known.
    lower_case: Optional[bool] = None

    @property
    def identity(self) -> Identity:
        """Identity of the vocabulary that the weights were trained with."""
        return Identity(self.vocabulary, self.lower_case)


class Damaged(ValueError):
    """Error of a checkpoint that is incomplete, or was changed after it was written."""

    def __init__(self, path: Path, reason: str) -> None:
        super().__init__(f"{path} is damaged ({reason}); use another checkpoint")
        self.path = path
        self.reason = reason


def checkpoint_path(folder: Union[str, Path], step: int) -> Path:
    """Return the directory of the checkpoint of a step."""
    return Path(folder) / f"step_{step:08d}"


def _step(path: Path) -> int:
    return int(path.name[len("step_") :])


# -- writing -----------------------------------------------------------------------------------------------------------


def save_checkpoint(
    folder: Union[str, Path],
    checkpoint: Checkpoint,
    *,
    keep: Optional[int],
    protect: Optional[int] = None,
) -> Path:
    """Write a checkpoint, then `evict` older ones; a kill at any moment leaves the earlier checkpoints intact.

    Args:
        folder: directory of all checkpoints.
        checkpoint: the state to write.
        keep: complete checkpoints to keep; None keeps all.
        protect: step of a checkpoint that is kept in any case.

    Returns:
        The directory of the checkpoint.

    Raises:
        OSError: the disk is full or the directory cannot be written; partial files are removed.
    """
    folder = Path(folder)
    path = checkpoint_path(folder, checkpoint.step)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        sync_folder(folder.parent)
        remove_unfinished(folder, UNFINISHED)
        _write(path, checkpoint)
    except OSError as error:
        raise OSError(f"{path}: not saved ({error.strerror or error})") from None
    if keep is not None:
        evict(folder, newest=checkpoint.step, keep=keep, protect=protect)
    remove_unfinished(folder, UNFINISHED)
    return path


def evict(
    folder: Union[str, Path], *, newest: int, keep: int, protect: Optional[int] = None
) -> None:
    """Delete the checkpoints older than the last ``keep`` complete ones up to step ``newest``, except ``protect``.

    Checkpoints of later steps remain from before the run was resumed from an earlier one; they and damaged ones do not
    count.
    """
    folder = Path(folder)
    candidates = [path for path in checkpoints(folder) if _step(path) <= newest]
    kept = [_step(path) for path in candidates if _looks_complete(path)][-keep:]
    for path in candidates:
        if kept and _step(path) < kept[0] and _step(path) != protect:
            discard(path)


def _write(path: Path, checkpoint: Checkpoint) -> None:
    plain, tensors = _split(checkpoint.engine)
    state = _json({**checkpoint._asdict(), "engine": plain})
    needed = len(state) + sum(map(tensor_bytes, tensors.values()))
    free = free_bytes(path.parent)
    if free is not None and needed > free:
        raise OSError(errno.ENOSPC, f"needs {needed:,} bytes, {free:,} are free")
    # It replaces a damaged checkpoint, or one of the same step.
    with replacing_folder(path) as partial:
        entries = {}
        for stem, by_name in tensors.items():
            name = f"{stem}.safetensors"
            entries[name] = _write_file(partial / name, file_pieces(by_name))
        entries[STATE] = _write_file(partial / STATE, [state])
        manifest = _json({"format": _FORMAT, "files": entries})
        _write_file(partial / MANIFEST, [manifest])


def _write_file(path: Path, pieces: Iterable[Union[bytes, memoryview]]) -> Dict[str, Any]:
    """Write a file piece by piece and return its entry in the manifest."""
    size = 0
    digest = hashlib.sha256()
    with open(path, "wb") as file:
        for piece in pieces:
            file.write(piece)
            digest.update(piece)
            size += len(piece)
    return {"bytes": size, "sha256": digest.hexdigest()}


def _json(values: Mapping[str, Any]) -> bytes:
    return (json.dumps(values, indent=1, ensure_ascii=False, allow_nan=False) + "\n").encode()


# -- reading -----------------------------------------------------------------------------------------------------------


def load_checkpoint(path: Union[str, Path]) -> Checkpoint:
    """Read a checkpoint, after comparing the sizes and sha256 of all files.

    Args:
        path: directory of the checkpoint.

    Returns:
        The checkpoint.

    Raises:
        Damaged: a file is missing, or differs from what was written.
        OSError: the checkpoint does not exist or cannot be read.
    """
    path = Path(path)
    if not path.is_dir():
        raise FileNotFoundError(errno.ENOENT, "no such checkpoint", str(path))
    try:
        files = _read_manifest(path)
        for name, sha256 in files.items():
            if _sha256(path / name) != sha256:
                raise ValueError(f"sha256 of {name} differs")
        state = _read_json(path / STATE)
        del files[STATE]
        return _checked(state, {name.split(".")[0]: read_tensors(path / name) for name in files})
    except (FileNotFoundError, NotADirectoryError) as error:
        raise Damaged(path, f"{Path(error.filename or STATE).name} is missing") from None
    except OSError as error:
        if error.errno != errno.EIO:
            raise  # not damage
        raise Damaged(path, str(error.strerror)) from None
    except ValueError as error:
        raise Damaged(path, " ".join(str(error).split())[:200]) from None


def load_newest(folder: Union[str, Path], *, note: Callable[[str], None] = print) -> Checkpoint:
    """Load the newest complete checkpoint; pass one line to ``note`` if damaged ones are skipped.

    Damaged ones remain until a checkpoint of the same step, or enough newer ones, are saved.

    Args:
        folder: directory of all checkpoints.
        note: receives the line.

    Returns:
        The checkpoint.

    Raises:
        ValueError: there is no complete checkpoint.
    """
    newest_checkpoint(folder)
    damaged: List[Damaged] = []
    for path in reversed(checkpoints(folder)):
        try:
            checkpoint = load_checkpoint(path)
        except Damaged as error:
            damaged.append(error)
            continue
        if damaged:
            others = f" (and {len(damaged) - 1} more)" if damaged[1:] else ""
            note(
                f"note      {damaged[0].path} is damaged ({damaged[0].reason}){others}: using {path.name}; the damaged"
                " one remains until its step is saved again or run.keep_checkpoints newer ones exist"
            )
        return checkpoint
    newest = damaged[0]
    raise ValueError(
        f"{folder}: no complete checkpoint; the newest, {newest.path.name}, is damaged ({newest.reason}); begin again,"
        " or restore a copy of one"
    )


def newest_checkpoint(folder: Union[str, Path]) -> Path:
    """Return the path of the newest checkpoint of a run.

    Args:
        folder: the directory of the checkpoints.

    Returns:
        The path. The checkpoint is not read, so it may be damaged.

    Raises:
        ValueError: there is no checkpoint.
    """
    paths = checkpoints(folder)
    if not paths:
        run = Path(folder).parent
        reason = "a run can be resumed once it has saved one"
        if run.is_dir() and not (run / CONFIG).exists():
            reason = f"{run} is not the directory of a run, which has a config.yml"
        raise ValueError(f"{folder}: no checkpoint; {reason}")
    return paths[-1]


def _looks_complete(path: Path) -> bool:
    """Return True if the manifest exists and the files have its sizes; contents are not read."""
    try:
        return bool(_read_manifest(path))
    except (OSError, ValueError):
        return False


def _read_manifest(path: Path) -> Dict[str, str]:
    """Return the sha256 of each file by name; raise ValueError if a file has another size."""
    manifest = _read_json(path / MANIFEST)
    manifest.one_of("format", (_FORMAT,))
    files = manifest.object("files")
    files.object(STATE)
    digests = {}
    for name in files.names():
        if not _FILE.fullmatch(name):
            raise files.error(name, "a checkpoint has no file of that name")
        entry = files.object(name)
        written = entry.integer("bytes", least=0)
        size = _size(path / name)
        if size != written:
            raise ValueError(f"{name} has {size:,} bytes, {written:,} were written")
        digests[name] = entry.hex_digest("sha256", 64)
    return digests


def _size(path: Path) -> int:
    status = os.stat(str(path))
    if not stat.S_ISREG(status.st_mode):  # opening a pipe would block
        raise ValueError(f"{path.name} is not a regular file")
    return status.st_size


def _sha256(path: Path) -> str:
    digest = hashlib.sha256()
    with open(path, "rb", buffering=0) as file:
        for block in iter(lambda: file.read(_BLOCK), b""):
            digest.update(block)
    return digest.hexdigest()


def _read_json(path: Path) -> Fields:
    most = _MAX_BYTES[path.name]
    if _size(path) > most:
        raise ValueError(f"{path.name} has more than {most:,} bytes")
    return Fields.of(parse_json(path.read_bytes(), path.name, _WAY_OUT), path.name, _WAY_OUT)


def _checked(state: Fields, tensors: Mapping[str, Mapping[str, torch.Tensor]]) -> Checkpoint:
    """Build a checkpoint from the results of `_split`; raise ValueError if they are invalid."""
    config = state.any("config")
    if not isinstance(config, str):
        raise state.error("config", "must be a text")
    state.object("engine")
    engine = Fields(state.source, _join(state.any("engine"), tensors), state.way_out, "engine")
    _check_tensors(engine, "model")
    if "optimizer" in engine:
        optimizer = engine.object("optimizer")
        optimizer.integer("step", least=0)
        for moment in ("exp_avg", "exp_avg_sq"):
            _check_tensors(optimizer, moment)
    state.object("batches")
    return Checkpoint(
        step=state.integer("step", least=0),
        engine=dict(engine.values),
        batches=state.any("batches"),
        config=config,
        vocabulary=state.text("vocabulary"),
        lower_case=state.optional("lower_case", Fields.boolean),
    )


def _check_tensors(state: Fields, name: str) -> None:
    tensors = state.object(name)
    for key in tensors.names():
        if not isinstance(tensors.any(key), torch.Tensor):
            raise tensors.error(key, "must be a tensor")


# -- an engine's state, in JSON and tensors ----------------------------------------------------------------------------


def _split(state: Mapping[str, Any]) -> Tuple[Dict[str, Any], Dict[str, Dict[str, torch.Tensor]]]:
    """Split nested dictionaries into plain values and the tensors by file and name; `_join` is the inverse.

    The first key of a tensor names its file, the other keys, joined by /, the tensor. Tensors at the top level share a
    file.
    """
    tensors: Dict[str, Dict[str, torch.Tensor]] = {}

    def plain(values: Mapping[str, Any], path: Tuple[str, ...]) -> Dict[str, Any]:
        plain_values: Dict[str, Any] = {}
        for key, value in values.items():
            if isinstance(value, torch.Tensor):
                stem, *names = (*(path or (_TOP_LEVEL,)), key)
                tensors.setdefault(stem, {})["/".join(names)] = value
            elif isinstance(value, dict):
                plain_values[key] = plain(value, (*path, key))
            else:
                plain_values[key] = value
        return plain_values

    return plain(state, ()), tensors


def _join(
    plain: Dict[str, Any], tensors: Mapping[str, Mapping[str, torch.Tensor]]
) -> Dict[str, Any]:
    """Insert the tensors into the plain values, as before `_split`; raise ValueError if a key is missing or in use."""
    for stem, by_name in tensors.items():
        for name, tensor in by_name.items():
            *keys, last = name.split("/")
            if stem != _TOP_LEVEL:
                keys.insert(0, stem)
            parent: Any = plain
            for key in keys:
                parent = parent.get(key) if isinstance(parent, dict) else None
            if not isinstance(parent, dict) or last in parent:
                raise ValueError(f"{stem}.safetensors: {name[:60]!r} has no place in {STATE}")
            parent[last] = tensor
    return plain
