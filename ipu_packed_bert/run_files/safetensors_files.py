"""Files of tensors, in the safetensors format."""

from __future__ import annotations

from pathlib import Path
from typing import Dict, Mapping, Set

import torch

from pack_data.reading.fields import one_line
from pack_data.reading.files import check_regular
from pack_data.reading.packages import load_package


def tensor_bytes(tensors: Mapping[str, torch.Tensor]) -> int:
    """Bytes that the tensors need in a file, the header left out."""
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())


def file_bytes(tensors: Mapping[str, torch.Tensor]) -> bytes:
    """Serialise tensors of any layout and device as a safetensors file; tensors that share memory are written apart.

    Raises ValueError for a type that the format does not have.
    """
    save = load_package("safetensors.torch", "writing a checkpoint").save
    plain: Dict[str, torch.Tensor] = {}
    memory: Set[int] = set()
    for name, tensor in tensors.items():
        if tensor.layout != torch.strided:
            raise ValueError(f"{name}: {tensor.layout}; a safetensors file has no such tensor")
        found = tensor.detach().cpu().contiguous()
        plain[name] = found.clone() if found.untyped_storage().data_ptr() in memory else found
        memory.add(plain[name].untyped_storage().data_ptr())
    try:
        return save(plain)
    except MemoryError:
        raise
    except (
        Exception
    ) as error:  # the package raises several types for a number type that it does not have
        raise ValueError(
            f"a safetensors file has no such tensor ({one_line(error, 120)})"
        ) from None


def read_tensors(path: Path) -> Dict[str, torch.Tensor]:
    """Read the tensors of a file to the CPU; raise ValueError in one line if it is damaged or something else."""
    package = load_package("safetensors", f"{path}: reading it")
    check_regular(path, way_out="get the file again")
    try:
        with package.safe_open(str(path), framework="pt") as file:
            # Copied out of the mapped file, which can then be removed, also where a network holds it open by its name.
            return {name: file.get_tensor(name).clone() for name in file.keys()}  # noqa: SIM118 (no dictionary)
    except MemoryError:  # not a damaged file: said as it is
        raise
    except Exception as error:  # the package and torch raise many types for a damaged file
        raise ValueError(
            f"{path}: cannot be read ({one_line(error, 120)}); get the file again"
        ) from None
