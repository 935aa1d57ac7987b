"""Files of examples, JSONL or Parquet, as a source that is shared out by files and continues from its state."""

from __future__ import annotations

import os
from typing import Any, Dict, Iterable, Iterator, Mapping, Tuple, Union

from pack_data.reading.fields import Fields, parse_json
from pack_data.reading.files import open_unpacked
from pack_data.reading.packages import load_package

_ROWS = 1024  # of Parquet, in memory at a time
_BLOCK = 1 << 20  # bytes of a compressed file that are skipped at a time
_WAY_OUT = "pass files of JSONL (.jsonl, .jsonl.gz, .jsonl.xz) or Parquet (.parquet) with a column for each list"


class ShardFiles:
    """The examples of files, one file after another; each is a mapping of columns.

    It continues at the byte of a line, or in the row group of a Parquet file; of compressed lines those before are
    unpacked again, but not read as JSON.
    """

    def __init__(self, paths: Iterable[Union[str, os.PathLike]]) -> None:
        self._paths = [str(path) for path in paths]
        for path in self._paths:
            if not _is_parquet(path) and ".json" not in os.path.basename(path).lower():
                raise ValueError(
                    f"{path}: its name ends neither in .jsonl nor in .parquet; {_WAY_OUT}"
                )
        self._file = 0  # of the next example
        self._place = 0  # of the next example in its file

    @property
    def num_shards(self) -> int:
        """Number of files."""
        return len(self._paths)

    def shard(self, num_shards: int, index: int) -> ShardFiles:
        """Return every num_shards-th file, from its beginning."""
        return ShardFiles(self._paths[index::num_shards])

    def __iter__(self) -> Iterator[Mapping[str, Any]]:
        first = self._file
        place = self._place
        self._file = self._place = 0
        for number in range(first, len(self._paths)):
            path = self._paths[number]
            examples = _rows(path, place) if _is_parquet(path) else _lines(path, place)
            for after, example in examples:
                self._file = number
                self._place = after
                yield example
            place = 0
        self._file = len(self._paths)
        self._place = 0

    def state_dict(self) -> Dict[str, Any]:
        """Return the place of the next example."""
        return {"files": self._paths, "file": self._file, "place": self._place}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Begin the next iteration at the place of `state`; a state of other files raises ValueError."""
        fields = Fields.of(
            dict(state),
            "state of the files",
            "pass the same files in the same order, or begin anew",
        )
        if fields.texts("files") != self._paths:
            raise fields.error("files", "must be the files of this source")
        file = fields.integer("file", least=0, most=len(self._paths))
        self._place = fields.integer("place", least=0)
        self._file = file


def _is_parquet(path: str) -> bool:
    return path.lower().endswith(".parquet")


def _lines(path: str, place: int) -> Iterator[Tuple[int, Mapping[str, Any]]]:
    """Yield the examples from a byte of the unpacked file on, each with the byte behind its line."""
    with open_unpacked(path, way_out=_WAY_OUT) as file:
        if file.seekable():
            file.seek(place)
        else:
            left = place
            while left and (skipped := len(file.read(min(left, _BLOCK)))):
                left -= skipped
        for line in file:
            place += len(line)
            if not line.strip():
                continue
            where = f"{path}, before byte {place}"
            example = parse_json(line, where, _WAY_OUT)
            if not isinstance(example, dict):
                raise ValueError(f"{where}: the line is not a JSON object; {_WAY_OUT}")
            yield place, example


def _rows(path: str, place: int) -> Iterator[Tuple[int, Mapping[str, Any]]]:
    """Yield the examples from a row on, each with the number of the next row; the first row group is read again."""
    parquet = load_package("pyarrow.parquet", path)
    first = 0  # row of the group or batch
    with parquet.ParquetFile(path) as file:
        for group in range(file.num_row_groups):
            rows = file.metadata.row_group(group).num_rows
            if first + rows <= place:
                first += rows
                continue
            for batch in file.iter_batches(batch_size=_ROWS, row_groups=[group], use_threads=False):
                skipped = max(0, place - first)
                yield from enumerate(batch.slice(skipped).to_pylist(), first + skipped + 1)
                first += batch.num_rows
