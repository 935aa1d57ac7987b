"""Checkpoints of format 1, files that `torch.save` wrote: read for `convert-checkpoint`, and for nothing else."""

from __future__ import annotations

from pathlib import Path

import torch

from ipu_packed_bert.checkpoint import (
    Checkpoint,
    Damaged,
    checked,
    checkpoint_path,
    load_checkpoint,
    save_checkpoint,
    split,
)
from ipu_packed_bert.torch_files import load_tensors
from pack_data.decoding import Fields

_FORMAT = "ipu_packed_bert checkpoint 1"
_WAY_OUT = "give a checkpoint of this program"


class Unreadable(ValueError):
    """A file that is damaged, of something else, or names anything that could run."""


def load_former(path: Path) -> Checkpoint:
    """Raises Unreadable in one line."""
    try:
        return _load(path)
    except ValueError as error:
        raise Unreadable(str(error)) from None


def _load(path: Path) -> Checkpoint:
    found = Fields.of(load_tensors(path, way_out=_WAY_OUT), path, _WAY_OUT)
    found.one_of("format", (_FORMAT,))
    found.object("engine")
    found.object("batches")
    with found.refusing():
        plain, tensors = split(found.any("engine"))
        batches, none = split(found.any("batches"))
    if none:
        raise found.error("batches", "must be made of plain values")
    # Checkpoints of before they were recorded lack the fields that have a default.
    given = {**Checkpoint._field_defaults, **{name: found.any(name) for name in found.names()}}
    fields = {**given, "engine": plain, "batches": batches}
    return checked(Fields.of(fields, path, _WAY_OUT), tensors)


def convert(file: Path) -> Path:
    """The folder beside a file of format 1 that has the same, bit for bit; written where it is not there whole.

    Raises ValueError where the file cannot be read, or the folder has something else.
    """
    former = load_former(file)
    path = checkpoint_path(file.parent, former.step)
    try:
        there = load_checkpoint(path)
    except (FileNotFoundError, Damaged):
        there = load_checkpoint(save_checkpoint(file.parent, former, keep=None))
    if not _same(former, there):
        raise ValueError(f"{path}: is there and not what {file.name} holds; move one of them away")
    return path


def _same(former: Checkpoint, there: Checkpoint) -> bool:
    (plain, tensors), (plain_there, tensors_there) = split(former.engine), split(there.engine)
    return (
        former._replace(engine=plain) == there._replace(engine=plain_there)
        and tensors.keys() == tensors_there.keys()
        and all(
            named.keys() == tensors_there[stem].keys()
            and all(_equal(tensor, tensors_there[stem][name]) for name, tensor in named.items())
            for stem, named in tensors.items()
        )
    )


def _equal(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Equal in type, shape and every bit, those of values that are no numbers included."""
    bits = [tensor.contiguous().reshape(-1).view(torch.uint8) for tensor in (a, b)]
    return a.dtype == b.dtype and a.shape == b.shape and torch.equal(*bits)
