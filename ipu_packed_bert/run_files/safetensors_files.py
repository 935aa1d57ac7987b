"""Reading and writing of safetensors files."""

from __future__ import annotations

from pathlib import Path
from typing import Dict, Mapping, Set

import torch

from pack_data.reading.fields import one_line
from pack_data.reading.files import check_regular
from pack_data.reading.packages import load_package


def tensor_bytes(tensors: Mapping[str, torch.Tensor]) -> int:
    """Return the bytes that tensors need in a file, without the header."""
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())


def file_bytes(tensors: Mapping[str, torch.Tensor]) -> bytes:
    """Serialise tensors of any device as a safetensors file; tensors that share memory are written separately.

    Raises ValueError if the format does not support a tensor.
    """
    save = load_package("safetensors.torch", "writing a checkpoint").save
    plain: Dict[str, torch.Tensor] = {}
    memory: Set[int] = set()
    for name, tensor in tensors.items():
        if tensor.layout != torch.strided:
            raise ValueError(f"{name}: safetensors files do not support {tensor.layout}")
        copy = tensor.detach().cpu().contiguous()
        if copy.untyped_storage().data_ptr() in memory:
            copy = copy.clone()
        memory.add(copy.untyped_storage().data_ptr())
        plain[name] = copy
    try:
        return save(plain)
    except MemoryError:
        raise
    except Exception as error:
        # The package raises several classes for data types that it does not support.
        raise ValueError(
            f"safetensors files do not support a tensor ({one_line(error, 120)})"
        ) from None


def read_tensors(path: Path) -> Dict[str, torch.Tensor]:
    """Read the tensors of a file to the CPU; raise ValueError if it is damaged or not a safetensors file."""
    package = load_package("safetensors", f"{path}: reading it")
    check_regular(path, way_out="get the file again")
    try:
        with package.safe_open(str(path), framework="pt") as file:
            # Copies do not keep the mapped file open, so that it can be removed, also on network file systems.
            return {name: file.get_tensor(name).clone() for name in file.keys()}  # noqa: SIM118 (no dictionary)
    except MemoryError:  # not a sign of damage
        raise
    except Exception as error:  # the package and torch raise many classes for a damaged file
        raise ValueError(
            f"{path}: cannot be read ({one_line(error, 120)}); get the file again"
        ) from None
