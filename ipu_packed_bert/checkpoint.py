"""Checkpoints: one file a step, written whole or not at all, holding plain values and tensors only."""

from __future__ import annotations

import json
import os
import re
import zipfile
from pathlib import Path
from typing import Any, Dict, List, NamedTuple, Optional, Union

import torch

from ipu_packed_bert.identity import UNKNOWN, Identity
from ipu_packed_bert.run_folder import ENVIRONMENT
from ipu_packed_bert.torch_files import UnsafeFile, load_tensors
from pack_data.files import sync_folder

_FORMAT = "ipu_packed_bert checkpoint 1"
_NAME = re.compile(r"step_(\d{8})\.pt")


class Checkpoint(NamedTuple):
    """A run after ``step`` updates."""

    step: int
    engine: Dict[str, Any]  # Engine.state()
    batches: Dict[str, Any]  # GlobalBatches.state()
    config: str  # YAML, as resolved
    vocabulary: str = ""  # sha256 of vocab.txt; empty where it is not known
    lower_case: Optional[bool] = None  # what the vocabulary is applied to; None where it is not known


def checkpoint_path(folder: Union[str, Path], step: int) -> Path:
    return Path(folder) / f"step_{step:08d}.pt"


def checkpoints(folder: Union[str, Path]) -> List[Path]:
    """Complete checkpoints, oldest first."""
    folder = Path(folder)
    return sorted(path for path in folder.glob("step_*.pt") if _NAME.fullmatch(path.name)) if folder.is_dir() else []


def save_checkpoint(
    folder: Union[str, Path], checkpoint: Checkpoint, *, keep: int, protect: Optional[int] = None
) -> Path:
    """Write a checkpoint, then `evict` others; killed at any moment, those before are still there."""
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    path = checkpoint_path(folder, checkpoint.step)
    temporary = path.with_suffix(".partial")
    with open(temporary, "wb") as file:
        torch.save({"format": _FORMAT, **checkpoint._asdict()}, file)
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, path)
    sync_folder(folder)
    for partial in folder.glob("step_*.partial"):  # of a run that was killed while it saved
        partial.unlink()
    evict(folder, keep=keep, protect=protect)
    return path


def evict(folder: Union[str, Path], *, keep: int, protect: Optional[int] = None) -> None:
    """Delete all checkpoints but the newest ``keep`` and that of step ``protect``."""
    for old in checkpoints(folder)[:-keep]:
        if protect is None or old != checkpoint_path(folder, protect):
            old.unlink()


def set_aside(path: Path) -> Path:
    """Give a checkpoint a name under which nothing looks for it, and return that."""
    aside = path.with_name(path.name + ".aside")
    os.replace(path, aside)
    return aside


def load_checkpoint(path: Union[str, Path]) -> Checkpoint:
    """Read a checkpoint; ValueError in one line if it is damaged, of something else, or could run code."""
    try:
        with zipfile.ZipFile(path) as archive:  # torch.load does not look at the checksums that torch.save wrote
            broken = archive.testzip()
        if broken:
            raise RuntimeError(f"checksum of {broken} differs")
        content = load_tensors(path)
    except (FileNotFoundError, PermissionError, IsADirectoryError, MemoryError):
        raise  # not damage: do not suggest to delete the file
    except UnsafeFile:
        raise
    except (
        Exception
    ) as error:  # torch raises many types for a damaged file, RuntimeError and UnpicklingError among them
        reason = " ".join(str(error).split())[:120]
        raise ValueError(f"{path} is damaged ({reason}); delete it to continue from the checkpoint before it") from None
    if not isinstance(content, dict) or content.get("format") != _FORMAT:
        raise ValueError(f"{path} is not a checkpoint of this program (expected format {_FORMAT!r})")
    # Checkpoints of before they were recorded lack the fields that have a default.
    return Checkpoint(
        **{
            name: content[name]
            for name in Checkpoint._fields
            if name in content or name not in Checkpoint._field_defaults
        }
    )


def newest_checkpoint(folder: Union[str, Path]) -> Path:
    """Path of the newest checkpoint; ValueError if there is none."""
    found = checkpoints(folder)
    if not found:
        raise ValueError(f"{folder}: no checkpoint; a run can be resumed once it has saved one")
    return found[-1]


def vocabulary_of_run(run: Path, checkpoint: Checkpoint) -> Identity:
    """The vocabulary that a run's weights are of, as far as anything says it.

    Checkpoints did not record it at first; the environment.json of their run did.
    """
    if checkpoint.vocabulary:
        return Identity(checkpoint.vocabulary, checkpoint.lower_case)
    try:
        data = json.loads(Path(run, ENVIRONMENT).read_text(encoding="utf-8"))["data"]
        sha256, lower_case = data["vocabulary_sha256"], data.get("lower_case")
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return UNKNOWN
    return Identity(sha256 if isinstance(sha256, str) else "", lower_case if isinstance(lower_case, bool) else None)
