"""Files in the safetensors format: a header in JSON, then the tensors' bytes.

Written by a few lines of our own, so that a checkpoint is hashed while it is written, needs no second copy in memory,
and a full disk is an OSError at the byte where it happens; read by the package safetensors.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Dict, Iterator, Mapping

import torch

from pack_data.decoding import one_line
from pack_data.files import check_regular
from pack_data.packages import load_package

# The format's names, without complex64, which the package for Python 3.8 does not read; torch 2.0 lacks more of them.
_NAMES = {
    "float64": "F64",
    "float32": "F32",
    "float16": "F16",
    "bfloat16": "BF16",
    "int64": "I64",
    "int32": "I32",
    "int16": "I16",
    "int8": "I8",
    "uint64": "U64",
    "uint32": "U32",
    "uint16": "U16",
    "uint8": "U8",
    "bool": "BOOL",
    "float8_e4m3fn": "F8_E4M3",
    "float8_e4m3fnuz": "F8_E4M3FNUZ",
    "float8_e5m2": "F8_E5M2",
    "float8_e5m2fnuz": "F8_E5M2FNUZ",
}
_TYPES = {getattr(torch, name): theirs for name, theirs in _NAMES.items() if hasattr(torch, name)}
_ALIGNED = 8  # bytes; the widest type


def tensor_bytes(tensors: Mapping[str, torch.Tensor]) -> int:
    """Bytes that the tensors need in a file, the header left out."""
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())


def chunks(tensors: Mapping[str, torch.Tensor]) -> Iterator[memoryview]:
    """The bytes of a file that holds these tensors, of any layout and device, piece by piece.

    Tensors that share memory are written apart.  Raises ValueError for a type that the format does not have.
    """
    # Wide types first, as the package does, so that every tensor lies at a multiple of its element's size.
    names = sorted(tensors, key=lambda name: (-tensors[name].element_size(), name))
    header: Dict[str, Dict[str, object]] = {}
    end = 0
    for name in names:
        tensor = tensors[name]
        if tensor.dtype not in _TYPES or tensor.layout != torch.strided:
            raise ValueError(f"{name}: {tensor.dtype}, {tensor.layout}; a safetensors file has no such tensor")
        begin, end = end, end + tensor.numel() * tensor.element_size()
        header[name] = {"dtype": _TYPES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [begin, end]}
    text = json.dumps(header, ensure_ascii=False, separators=(",", ":")).encode()
    text += b" " * (-len(text) % _ALIGNED)
    yield memoryview(len(text).to_bytes(8, "little") + text)
    for name in names:
        yield _bytes(tensors[name])


def _bytes(tensor: torch.Tensor) -> memoryview:
    plain = tensor.detach().cpu().contiguous().reshape(-1)
    return plain.view(torch.uint8).numpy().data if plain.numel() else memoryview(b"")


def read_tensors(path: Path) -> Dict[str, torch.Tensor]:
    """The tensors of a file, on the CPU; ValueError in one line where it is damaged or of something else."""
    package = load_package("safetensors", f"{path}: reading it")
    check_regular(path, way_out="get the file again")
    try:
        with package.safe_open(str(path), framework="pt") as file:
            # Copied out of the mapped file, which can then be removed, also where a network holds it open by its name.
            return {name: file.get_tensor(name).clone() for name in file.keys()}  # noqa: SIM118 (no dictionary)
    except MemoryError:  # not a damaged file: said as it is
        raise
    except Exception as error:  # the package and torch raise many types for a damaged file
        raise ValueError(f"{path}: cannot be read ({one_line(error, 120)}); get the file again") from None
