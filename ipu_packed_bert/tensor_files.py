"""Files of tensors: in the safetensors format, and those that `torch.save` wrote.

safetensors is a header in JSON, then the tensors' bytes.  Written by a few lines of our own, so that a checkpoint is
hashed while it is written, needs no second copy in memory, and a full disk is an OSError at the byte where it happens;
read by the package safetensors.
"""

from __future__ import annotations

import json
import zipfile
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
# Below 2.6 torch.load runs what is in a TorchScript archive, also with `weights_only` (CVE-2025-32434).
READS_TORCH_FILES = tuple(map(int, torch.__version__.split(".")[:2])) >= (2, 6)
_SHARING = 4  # bytes of all tensors over those of the file: some share memory, but not without end


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


def read_torch(path: Path) -> Dict[str, torch.Tensor]:
    """The tensors by name that `torch.save` wrote, on the CPU; ValueError in one line for every other file."""
    if not READS_TORCH_FILES:
        raise ValueError(
            f"{path}: torch {torch.__version__} does not read it safely, 2.6 or newer does; save it as safetensors on "
            "another machine"
        )
    check_regular(path, way_out="get the file again")
    try:
        _check_records(path)
        found = torch.load(path, map_location="cpu", weights_only=True)
    except MemoryError:  # not a damaged file: said as it is
        raise
    except Exception as error:  # zipfile, pickle and torch raise many types for a damaged file
        raise ValueError(f"{path}: cannot be read ({one_line(error, 120)}); save the weights as safetensors") from None
    if not isinstance(found, dict) or not all(isinstance(tensor, torch.Tensor) for tensor in found.values()):
        raise ValueError(f"{path}: holds something else than tensors by name; save the weights as safetensors")
    if tensor_bytes(found) > _SHARING * path.stat().st_size:
        raise ValueError(f"{path}: its tensors have more bytes than the file; save the weights as safetensors")
    return found


def _check_records(path: Path) -> None:
    """ValueError where a record's checksum differs, which torch does not notice, or one is compressed without end."""
    with zipfile.ZipFile(path) as archive:
        if sum(entry.file_size for entry in archive.infolist()) > path.stat().st_size:
            raise ValueError("its records are compressed")
        damaged = archive.testzip()
    if damaged is not None:
        raise ValueError(f"the checksum of {damaged} differs")
