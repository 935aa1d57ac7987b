"""Files that `torch.save` wrote, read without running what a sender put in them: the only `torch.load` of the
product."""

from __future__ import annotations

import mmap
import os
import tarfile
import warnings
from pathlib import Path
from typing import Any, BinaryIO, Union

import torch

# An archive with a record of this name is TorchScript for torch.load, which compiles and runs the code in it.
_TORCHSCRIPT = b"constants.pkl"


class UnsafeFile(ValueError):
    """A file that could run code while it is read."""


def load_tensors(path: Union[str, Path]) -> Any:
    """Tensors on the CPU and plain values of a file; UnsafeFile where reading could run code.

    torch before 2.6 hands a TorchScript archive to `torch.jit.load` in spite of ``weights_only``, and unpacks tar
    archives, a form from before torch 0.2, to a folder first.  Other errors are torch's own, of many types.
    """
    with open(path, "rb") as file:
        _refuse_code(file, path)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch 2.0's own reader uses what it calls deprecated
            # The file that was looked into, not what has its name by now.
            return torch.load(file, map_location="cpu", weights_only=True)


def _refuse_code(file: BinaryIO, path: Union[str, Path]) -> None:
    reason = ""
    # The names of an archive's records stand in it uncompressed, so that all its bytes are searched: two readers can
    # find two different tables of contents in one archive, and torch's is not Python's.
    if os.fstat(file.fileno()).st_size:
        with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
            if content.find(_TORCHSCRIPT) >= 0:
                reason = "a TorchScript archive, whose code runs while it is read"
    if not reason and _is_tar(file):
        reason = "a tar archive, a form that torch gave up"
    file.seek(0)
    if reason:
        raise UnsafeFile(
            f"{path}: {reason}; only plain weights are read: save the state_dict with torch.save, or as safetensors"
        )


def _is_tar(file: BinaryIO) -> bool:
    try:
        with tarfile.open(fileobj=file, mode="r:") as archive:
            return archive.next() is not None
    except tarfile.TarError:
        return False
