"""Pack the examples of a file or a sequence, as a data set for torch's DataLoader: `pack_dataset`.

rows = pack_dataset("train.jsonl", max_sequence_length=4096, as_tensor=torch.from_numpy)
loader = DataLoader(rows, batch_size=2, collate_fn=rows.collate, num_workers=4)
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Callable, Optional

import numpy as np

from pack_data.batching.pack_dataset import TOKENS, PackDataset, is_built
from pack_data.formats.source import open_source
from pack_data.pack_lengths import PackedLengths, pack
from pack_data.reading import hugging_face
from pack_data.reading.fields import shown
from pack_data.store.sequences import Sequences


def pack_dataset(
    source: Any,
    *,
    max_sequence_length: Optional[int] = None,
    packed: Optional[PackedLengths] = None,
    as_tensor: Callable[[np.ndarray], Any] = np.asarray,
    **options: Any,
) -> PackDataset:
    """Pack examples and return their rows; a built data set is opened with `PackDataset`.

    Args:
        source: a file or directory that `pack_data.formats` reads, such as JSONL, Parquet or a saved
            `datasets.Dataset`, which is read into memory; or examples, a sequence of mappings with input_ids such as a
            `datasets.Dataset`, which are read when a row is read.
        max_sequence_length: slots of a row.
        packed: the packing that `pack` returned for the lengths of the examples, instead of packing them here.
        as_tensor: function applied to each array of a batch, such as torch.from_numpy.
        options: further options of `pack_data.pack`. With longer="truncate" or "drop", one warning counts the tokens
            that are lost, and names the examples that have no label left.

    Returns:
        The rows of the packing.

    Raises:
        ValueError: the source is packed already or cannot be read, or the options do not fit it.
    """
    if is_built(source):
        raise ValueError(f"{shown(source)}: is packed already; open it with PackDataset(source)")
    examples = _read(str(source)) if isinstance(source, (str, Path)) else source
    if packed is None:
        if max_sequence_length is None:
            raise ValueError(
                f"{shown(source)}: is not packed yet; pass max_sequence_length, the slots of a row"
            )
        packed = pack(_lengths(examples), max_sequence_length=max_sequence_length, **options)
    elif max_sequence_length is not None or options:
        raise ValueError("packed: is a packing already; leave out max_sequence_length and options")
    return PackDataset(examples, packed=packed, as_tensor=as_tensor)


def _read(path: str) -> Sequences:
    source = open_source(path)
    if source.unpacked_kind != "tokens":
        raise ValueError(
            f"{path}: contains {source.kind} of BERT; pack them with packed-bert build --from {path}"
        )
    blocks = list(source.blocks())
    if not blocks or TOKENS not in blocks[0].tokens:
        raise ValueError(f"{path}: has no column {TOKENS}; give the column of token ids this name")
    return Sequences.concatenate(blocks)


def _lengths(examples: Any) -> np.ndarray:
    # From the tokens: a column length may count something else.
    if hugging_face.is_data_set(examples):
        columns = [TOKENS] if TOKENS in examples.column_names else []
        return hugging_face.lengths_of(examples.select_columns(columns))
    if isinstance(examples, Sequences):
        return examples.lengths
    if not hasattr(examples, "__len__"):
        kind = type(examples).__name__
        raise ValueError(f"the examples are a {kind}; pass a sequence, such as list(examples)")
    lengths = np.zeros(len(examples), np.int64)
    for number in range(len(examples)):
        example = examples[number]
        try:
            lengths[number] = len(example[TOKENS])
        except (KeyError, IndexError, TypeError):
            raise ValueError(
                f"example {number} has no list {TOKENS}; pass examples such as {{'{TOKENS}': [5, 7]}}"
            ) from None
    return lengths
