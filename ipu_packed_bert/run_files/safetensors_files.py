"""Reading and writing of safetensors files."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any, Dict, Iterator, Mapping, Union

import torch

from pack_data.reading.fields import one_line
from pack_data.reading.files import check_regular
from pack_data.reading.packages import load_package

_TYPES = {
    "torch.float64": "F64",
    "torch.float32": "F32",
    "torch.float16": "F16",
    "torch.bfloat16": "BF16",
    "torch.float8_e4m3fn": "F8_E4M3",
    "torch.float8_e5m2": "F8_E5M2",
    "torch.int64": "I64",
    "torch.int32": "I32",
    "torch.int16": "I16",
    "torch.int8": "I8",
    "torch.uint8": "U8",
    "torch.bool": "BOOL",
}


def tensor_bytes(tensors: Mapping[str, torch.Tensor]) -> int:
    """Return the bytes that tensors need in a file, without the header."""
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())


def file_pieces(tensors: Mapping[str, torch.Tensor]) -> Iterator[Union[bytes, memoryview]]:
    """Yield the parts of a safetensors file: its header, then the memory of each tensor, which is not copied.

    Tensors of other devices and tensors with gaps are copied one at a time; those that share memory are written
    separately. Large elements come first, so that all of them are aligned.

    Args:
        tensors: tensors of any device, by name.

    Raises:
        ValueError: the format does not support a tensor.
    """
    header: Dict[str, Any] = {}
    position = 0
    ordered = sorted(tensors.items(), key=lambda item: (-item[1].element_size(), item[0]))
    for name, tensor in ordered:
        dtype = _TYPES.get(str(tensor.dtype))
        if dtype is None or tensor.layout != torch.strided:
            raise ValueError(
                f"{name}: safetensors files do not support {tensor.dtype} in {tensor.layout}"
            )
        end = position + tensor.numel() * tensor.element_size()
        header[name] = {
            "dtype": dtype,
            "shape": list(tensor.shape),
            "data_offsets": [position, end],
        }
        position = end
    text = json.dumps(header, ensure_ascii=False, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    yield struct.pack("<Q", len(text)) + text
    for _, tensor in ordered:
        memory = tensor.detach().cpu().contiguous().view(-1).view(torch.uint8)
        yield memory.numpy().data


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
