"""A `datasets.Dataset` of Hugging Face: the lengths of its sequences, and the data set as a file.

Nothing is imported from `datasets`: who hands over such an object has imported it.
"""

from __future__ import annotations

import sys
import tempfile
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Iterator

import numpy as np

from pack_data.reading.packages import load_package

_LENGTHS = ("length", "lengths")
_TOKENS = "input_ids"
# Rows in memory at a time.
_ROWS = 10_000


def is_data_set(value: Any) -> bool:
    """Return True for a datasets.Dataset."""
    datasets = sys.modules.get("datasets")
    return datasets is not None and isinstance(value, datasets.Dataset)


def lengths_of(dataset: Any) -> np.ndarray:
    """Return the number of tokens of each input_ids, else the column length or lengths, int64 [examples].

    Raises ValueError if there is no such column.
    """
    names = dataset.column_names
    column = next((name for name in (_TOKENS, *_LENGTHS) if name in names), None)
    if column is None:
        raise ValueError(
            f"datasets.Dataset: columns {', '.join(names) or 'none'}; lengths come from a column "
            f"{', '.join(_LENGTHS)} or {_TOKENS}: tokenize it first"
        )
    compute = load_package("pyarrow.compute", "a datasets.Dataset")
    blocks = [np.zeros(0, np.int64)]
    for table in dataset.select_columns(column).with_format("arrow").iter(_ROWS):
        values = table.column(column)
        if column == _TOKENS:
            values = compute.list_value_length(values)
        if values.null_count:
            raise ValueError(
                f"datasets.Dataset: column {column} has an empty cell; filter those examples out first"
            )
        block = values.to_numpy()
        if block.dtype.kind not in "iu":
            raise ValueError(
                f"datasets.Dataset: column {column} holds {block.dtype}; lengths are whole numbers"
            )
        blocks.append(block.astype(np.int64))
    return np.concatenate(blocks)


@contextmanager
def as_file(source: Any, folder: Path) -> Iterator[Any]:
    """Yield a data set as a Parquet file in `folder` while the block runs; anything else unchanged.

    The same examples give the same bytes, so that a build which was killed continues.
    """
    if not is_data_set(source):
        yield source
        return
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".data-set-", dir=str(folder)) as temporary:
        path = Path(temporary) / "dataset.parquet"
        source.with_format(None).to_parquet(str(path))
        yield path
