"""Checkpoints: a folder a step, written whole or not at all; nothing in it is unpickled or could be run.

step_00000042/
    model.safetensors      weights, float32, Hugging Face names
    optimizer.safetensors  moments, exp_avg/NAME and exp_avg_sq/NAME
    engine.safetensors     what else an engine keeps in tensors, such as random states
    state.json             all that is no tensor: step, position in the data, configuration, identity of the vocabulary
    manifest.json          sizes and sha256 of the others

A name that begins with a dot is being written or removed; the next save clears what a killed run left of these.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import os
import re
import shutil
import stat
from pathlib import Path
from typing import Any, Callable, Dict, List, Mapping, NamedTuple, Optional, Tuple, Union

import torch

from ipu_packed_bert.run_files.safetensors_files import file_bytes, read_tensors, tensor_bytes
from ipu_packed_bert.run_files.vocabulary_identity import Identity
from pack_data.reading.fields import Fields, parse_json
from pack_data.reading.files import free_bytes, sync_folder

_FORMAT = "ipu_packed_bert checkpoint 2"
MANIFEST, STATE = "manifest.json", "state.json"
_NAME = re.compile(r"step_(\d{8,})")
_FILE = re.compile(
    r"([a-z][a-z0-9_]{0,60})\.safetensors|state\.json"
)  # a plain name: nothing outside the folder
_OWN = "engine"  # the file of tensors that lie directly in an engine's state
# More is damage, or somebody's mischief, and is not read into memory.
_MOST = {MANIFEST: 1 << 20, STATE: 1 << 26}
_BLOCK = 1 << 20
_WAY_OUT = "no checkpoint has that"


class Checkpoint(NamedTuple):
    """A run after ``step`` updates."""

    step: int
    engine: Dict[str, Any]  # Engine.state()
    batches: Dict[str, Any]  # GlobalBatches.state()
    config: str  # YAML, as resolved
    vocabulary: str = ""  # sha256 of vocab.txt; empty where it is not known
    # True if texts are lower-cased before the vocabulary is applied; None if not known.
    lower_case: Optional[bool] = None

    @property
    def identity(self) -> Identity:
        """The vocabulary that the weights are of, as far as it is known."""
        return Identity(self.vocabulary, self.lower_case)


class Damaged(ValueError):
    """A checkpoint that is not whole, or was changed since it was written."""

    def __init__(self, path: Path, reason: str) -> None:
        super().__init__(f"{path} is damaged ({reason}); use another checkpoint")
        self.path, self.reason = path, reason


def checkpoint_path(folder: Union[str, Path], step: int) -> Path:
    return Path(folder) / f"step_{step:08d}"


def checkpoints(folder: Union[str, Path]) -> List[Path]:
    """Checkpoints, oldest first, damaged ones included."""
    found = [
        path for path in Path(folder).glob("step_*") if _NAME.fullmatch(path.name) and path.is_dir()
    ]
    return sorted(found, key=_step)


def _step(path: Path) -> int:
    return int(path.name[len("step_") :].split(".")[0])


# -- writing -----------------------------------------------------------------------------------------------------------


def save_checkpoint(
    folder: Union[str, Path],
    checkpoint: Checkpoint,
    *,
    keep: Optional[int],
    protect: Optional[int] = None,
) -> Path:
    """Write a checkpoint, then `evict` others (``keep`` None: none); killed at any moment, those before are there.

    Raise OSError if the disk is full or the system refuses to write; what was begun is removed.
    """
    folder = Path(folder)
    path = checkpoint_path(folder, checkpoint.step)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        _clear(folder)
        _write(path, checkpoint)
    except OSError as error:
        raise OSError(f"{path}: not saved ({error.strerror or error})") from None
    if keep is not None:
        evict(folder, newest=checkpoint.step, keep=keep, protect=protect)
    _clear(folder)
    return path


def evict(
    folder: Union[str, Path], *, newest: int, keep: int, protect: Optional[int] = None
) -> None:
    """Delete the checkpoints older than the ``keep`` whole ones up to step ``newest``, but not that of ``protect``.

    Those of later steps are of a run that went on from an earlier one: they do not count, nor do damaged ones.
    """
    folder = Path(folder)
    ours = [path for path in checkpoints(folder) if _step(path) <= newest]
    kept = [_step(path) for path in ours if _looks_whole(path)][-keep:]
    for old in ours:
        if kept and _step(old) < kept[0] and _step(old) != protect:
            # Under its name it is whole until it is gone.  One that cannot be removed is met again at the next save.
            _remove(old)


def _remove(path: Path) -> None:
    with contextlib.suppress(OSError):
        removed = _hidden(path, "removed")
        os.rename(path, removed)
        _delete(removed)


def _write(path: Path, checkpoint: Checkpoint) -> None:
    plain, tensors = split(checkpoint.engine)
    state = _json({**checkpoint._asdict(), "engine": plain})
    needed = len(state) + sum(map(tensor_bytes, tensors.values()))
    free = free_bytes(path.parent)
    if free is not None and needed > free:
        raise OSError(errno.ENOSPC, f"needs {needed:,} bytes, {free:,} are free")
    partial, replaced = _hidden(path, "partial"), _hidden(path, "replaced")
    try:
        partial.mkdir()
        written = {
            f"{stem}.safetensors": _write_file(partial / f"{stem}.safetensors", file_bytes(found))
            for stem, found in tensors.items()
        }
        written[STATE] = _write_file(partial / STATE, state)
        _write_file(partial / MANIFEST, _json({"format": _FORMAT, "files": written}))
        sync_folder(partial)
        if os.path.lexists(
            str(path)
        ):  # passed over as damaged, or of the same step: this one takes its place
            os.rename(path, replaced)
        os.rename(partial, path)
    except BaseException:
        if os.path.lexists(str(replaced)) and not os.path.lexists(str(path)):
            os.rename(replaced, path)
        shutil.rmtree(str(partial), ignore_errors=True)
        raise
    sync_folder(path.parent)


def _write_file(path: Path, data: bytes) -> Dict[str, Any]:
    """Write a file and return its entry in the manifest."""
    with open(path, "wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    return {"bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}


def _json(values: Mapping[str, Any]) -> bytes:
    return (json.dumps(values, indent=1, ensure_ascii=False, allow_nan=False) + "\n").encode()


def _hidden(path: Path, what: str) -> Path:
    return path.with_name(f".{path.name}.{what}")


def _clear(folder: Path) -> None:
    """Remove what is being written or removed; only one process at a time writes a run."""
    for path in folder.glob(".step_*.*"):
        _delete(path)


def _delete(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(str(path), ignore_errors=True)
    else:
        with contextlib.suppress(OSError):
            path.unlink()


# -- reading -----------------------------------------------------------------------------------------------------------


def load_checkpoint(path: Union[str, Path]) -> Checkpoint:
    """Read a checkpoint; Damaged, a ValueError in one line, where anything differs from what was written.

    Sizes and sha256 of all files are compared before one of them is parsed.
    """
    path = Path(path)
    if not path.is_dir():
        raise FileNotFoundError(errno.ENOENT, "no such checkpoint", str(path))
    try:
        listed = _read_manifest(path)
        for name, sha256 in listed.items():
            if _sha256(path / name) != sha256:
                raise ValueError(f"sha256 of {name} differs")
        state = _read_json(path / STATE)
        tensors = {
            name.split(".")[0]: read_tensors(path / name) for name in listed if name != STATE
        }
        return _checked(state, tensors)
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

    Those stay where they are, until a checkpoint of the same step, or enough newer ones, are saved.
    ValueError if there is none.
    """
    newest_checkpoint(folder)
    damaged: List[Damaged] = []
    for path in reversed(checkpoints(folder)):
        try:
            found = load_checkpoint(path)
        except Damaged as error:
            damaged.append(error)
            continue
        if damaged:
            others = f" (and {len(damaged) - 1} more)" if damaged[1:] else ""
            note(
                f"note      {damaged[0].path} is damaged ({damaged[0].reason}){others}: {path.name} is used; the"
                " damaged one stays until its step is saved again or it is older than run.keep_checkpoints others"
            )
        return found
    raise ValueError(
        f"{folder}: none of the checkpoints is whole; the newest, {damaged[0].path.name}, is damaged"
        f" ({damaged[0].reason}); begin again, or put a copy of one there"
    )


def newest_checkpoint(folder: Union[str, Path]) -> Path:
    """Path of the newest checkpoint, whole or not; ValueError if there is none."""
    found = checkpoints(folder)
    if not found:
        raise ValueError(f"{folder}: no checkpoint; a run can be resumed once it has saved one")
    return found[-1]


def _looks_whole(path: Path) -> bool:
    """Whether the manifest is there and the files have its sizes; what is in them is not read."""
    try:
        return bool(_read_manifest(path))
    except (OSError, ValueError):
        return False


def _read_manifest(path: Path) -> Dict[str, str]:
    """Name -> sha256 of each file; ValueError where a file has another size."""
    found = _read_json(path / MANIFEST)
    found.one_of("format", (_FORMAT,))
    files = found.object("files")
    files.object(STATE)
    listed = {}
    for name in files.names():
        if not _FILE.fullmatch(name):
            raise files.error(name, "a checkpoint has no file of that name")
        entry = files.object(name)
        size, there = entry.integer("bytes", least=0), _size(path / name)
        if there != size:
            raise ValueError(f"{name} has {there:,} bytes, {size:,} were written")
        listed[name] = entry.hex_digest("sha256", 64)
    return listed


def _size(path: Path) -> int:
    found = os.stat(str(path))
    if not stat.S_ISREG(found.st_mode):  # a pipe would be waited for
        raise ValueError(f"{path.name} is not a plain file")
    return found.st_size


def _sha256(path: Path) -> str:
    digest = hashlib.sha256()
    with open(path, "rb", buffering=0) as file:
        for block in iter(lambda: file.read(_BLOCK), b""):
            digest.update(block)
    return digest.hexdigest()


def _read_json(path: Path) -> Fields:
    if _size(path) > _MOST[path.name]:
        raise ValueError(f"{path.name} has more than {_MOST[path.name]:,} bytes")
    return Fields.of(parse_json(path.read_bytes(), path.name, _WAY_OUT), path.name, _WAY_OUT)


def _checked(state: Fields, tensors: Mapping[str, Mapping[str, torch.Tensor]]) -> Checkpoint:
    """Build a checkpoint from its fields, those of the engine as `split` makes them; raise ValueError if invalid."""
    config = state.any("config")
    if not isinstance(config, str):
        raise state.error("config", "must be a text")
    state.object("engine")
    engine = Fields(state.source, join(state.any("engine"), tensors), state.way_out, "engine")
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
    found = state.object(name)
    if not all(isinstance(found.any(key), torch.Tensor) for key in found.names()):
        raise state.error(name, "must be made of tensors")


# -- an engine's state, in JSON and tensors ----------------------------------------------------------------------------


def split(state: Mapping[str, Any]) -> Tuple[Dict[str, Any], Dict[str, Dict[str, torch.Tensor]]]:
    """Nested dictionaries -> what JSON can hold, and the tensors by file and name; `join` is the inverse.

    A tensor's file is that of the first key, its name the keys that follow, with / between them; those that lie
    directly in the state share one.
    """
    tensors: Dict[str, Dict[str, torch.Tensor]] = {}

    def plain(values: Mapping[str, Any], path: Tuple[str, ...]) -> Dict[str, Any]:
        found: Dict[str, Any] = {}
        for key, value in values.items():
            if isinstance(value, torch.Tensor):
                stem, *names = (*path, key) if path else (_OWN, key)
                tensors.setdefault(stem, {})["/".join(names)] = value
            else:
                found[key] = plain(value, (*path, key)) if isinstance(value, dict) else value
        return found

    return plain(state, ()), tensors


def join(
    plain: Dict[str, Any], tensors: Mapping[str, Mapping[str, torch.Tensor]]
) -> Dict[str, Any]:
    """Put back in place what `split` took apart; raise ValueError if a tensor's place is missing or taken."""
    for stem, named in tensors.items():
        for name, tensor in named.items():
            *keys, last = ([] if stem == _OWN else [stem]) + name.split("/")
            place: Any = plain
            for key in keys:
                place = place.get(key) if isinstance(place, dict) else None
            if not isinstance(place, dict) or last in place:
                raise ValueError(f"{stem}.safetensors: {name[:60]!r} has no place in {STATE}")
            place[last] = tensor
    return plain
