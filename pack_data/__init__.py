"""Offline sequence packing: text to examples to a length histogram to a packing to a packed data set.

    from pack_data import pack
    bins = pack(lengths, max_sequence_length=512).bins      # for each row, the indices of the sequences that share it

`python -m pack_data` lists the commands. A public name is loaded when it is first used, so that a command starts
without loading what it does not need.
"""
from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any, List

if TYPE_CHECKING:
    from pack_data.bins import PackedLengths, pack
    from pack_data.certificate import Certificate, Proof
    from pack_data.formats.detect import open_source
    from pack_data.histogram import LengthHistogram
    from pack_data.packers import PACKERS, get_packer
    from pack_data.packing import Packing
    from pack_data.packs import PackSchema
    from pack_data.proof import prove
    from pack_data.sequences import Example, Sequences
    from pack_data.store import Manifest, PackStore

_PLACES = {
    "Certificate": "certificate",
    "Example": "sequences",
    "LengthHistogram": "histogram",
    "Manifest": "store",
    "PACKERS": "packers",
    "PackSchema": "packs",
    "PackStore": "store",
    "PackedLengths": "bins",
    "Packing": "packing",
    "Proof": "certificate",
    "Sequences": "sequences",
    "get_packer": "packers",
    "open_source": "formats.detect",
    "pack": "bins",
    "prove": "proof",
}

__all__ = [
    "Certificate",
    "Example",
    "LengthHistogram",
    "Manifest",
    "PACKERS",
    "PackSchema",
    "PackStore",
    "PackedLengths",
    "Packing",
    "Proof",
    "Sequences",
    "get_packer",
    "open_source",
    "pack",
    "prove",
]


def __getattr__(name: str) -> Any:
    if name not in _PLACES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_PLACES[name]}"), name)


def __dir__() -> List[str]:
    return sorted([*globals(), *__all__])
