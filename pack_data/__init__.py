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
    from pack_data.batching.micro_batches import MicroBatches as MicroBatches
    from pack_data.batching.micro_batches import micro_batches as micro_batches
    from pack_data.batching.mixture import PackMixture as PackMixture
    from pack_data.batching.pack_dataset import PackDataset as PackDataset
    from pack_data.batching.pack_examples import pack_dataset as pack_dataset
    from pack_data.building.command import build as build
    from pack_data.building.options import BuildOptions as BuildOptions
    from pack_data.building.verify import Verified as Verified
    from pack_data.building.verify import verify as verify
    from pack_data.display.accounting import plot as plot
    from pack_data.display.accounting import table as table
    from pack_data.formats.source import open_source as open_source
    from pack_data.pack_lengths import PackedLengths as PackedLengths
    from pack_data.pack_lengths import pack as pack
    from pack_data.pack_lengths import pack_groups as pack_groups
    from pack_data.pack_lengths import pack_in_order as pack_in_order
    from pack_data.pack_lengths import pack_with_capacity as pack_with_capacity
    from pack_data.packers import PACKERS as PACKERS
    from pack_data.packers import get_packer as get_packer
    from pack_data.packing.certificate import Certificate as Certificate
    from pack_data.packing.certificate import Proof as Proof
    from pack_data.packing.histogram import LengthHistogram as LengthHistogram
    from pack_data.packing.packing import Packing as Packing
    from pack_data.packing.packing import prove as prove
    from pack_data.store.data_set import Manifest as Manifest
    from pack_data.store.data_set import PackStore as PackStore
    from pack_data.store.packs import PackSchema as PackSchema
    from pack_data.store.packs import StoredColumn as StoredColumn
    from pack_data.store.sequences import Example as Example
    from pack_data.store.sequences import Sequences as Sequences
    from pack_data.stream.pack_stream import PackStream as PackStream

__version__ = "1.0.0"

# Public name -> its module in this package.
_PLACES = {
    "BuildOptions": "building.options",
    "Certificate": "packing.certificate",
    "Example": "store.sequences",
    "LengthHistogram": "packing.histogram",
    "Manifest": "store.data_set",
    "MicroBatches": "batching.micro_batches",
    "PACKERS": "packers",
    "PackDataset": "batching.pack_dataset",
    "PackMixture": "batching.mixture",
    "PackSchema": "store.packs",
    "PackStore": "store.data_set",
    "PackStream": "stream.pack_stream",
    "PackedLengths": "pack_lengths",
    "Packing": "packing.packing",
    "Proof": "packing.certificate",
    "Sequences": "store.sequences",
    "StoredColumn": "store.packs",
    "Verified": "building.verify",
    "build": "building.command",
    "get_packer": "packers",
    "micro_batches": "batching.micro_batches",
    "open_source": "formats.source",
    "pack": "pack_lengths",
    "pack_dataset": "batching.pack_examples",
    "pack_groups": "pack_lengths",
    "pack_in_order": "pack_lengths",
    "pack_with_capacity": "pack_lengths",
    "plot": "display.accounting",
    "prove": "packing.packing",
    "table": "display.accounting",
    "verify": "building.verify",
}

__all__ = sorted(_PLACES)


def __getattr__(name: str) -> Any:
    if name not in _PLACES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_PLACES[name]}"), name)


def __dir__() -> List[str]:
    return sorted([*globals(), *__all__])
