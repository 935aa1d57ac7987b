"""Files of examples, JSONL or Parquet, as a source that is shared out by files and goes on from its state."""

from __future__ import annotations

import os
from typing import Any, Dict, Iterable, Iterator, Mapping, Tuple, Union

from pack_data.reading.fields import Fields, parse_json
from pack_data.reading.files import open_unpacked
from pack_data.reading.packages import load_package

_ROWS = 1024  # of Parquet, in memory at a time
_CHUNK = 1 << 20  # bytes of a compressed file that are passed over at a time
_WAY_OUT = "give files of JSONL (.jsonl, .jsonl.gz, .jsonl.xz) or Parquet (.parquet) with a column for each list"


class ShardFiles:
    """The examples of files, one file after another; each is a mapping of columns.

    It goes on at the byte of a line, or in the row group of a Parquet file; of compressed lines those before are
    unpacked again, but not read as JSON.
    """

    def __init__(self, paths: Iterable[Union[str, os.PathLike]]) -> None:
        self._paths = [str(path) for path in paths]
        for path in self._paths:
            if not _is_parquet(path) and ".json" not in os.path.basename(path).lower():
                raise ValueError(f"{path}: neither .jsonl nor .parquet by its name; {_WAY_OUT}")
        self._next = 0, 0  # the file and the place in it of the next example

    @property
    def num_shards(self) -> int:
        """Files."""
        return len(self._paths)

    def shard(self, num_shards: int, index: int) -> ShardFiles:
        """Every num_shards-th file, from its beginning."""
        return ShardFiles(self._paths[index::num_shards])

    def __iter__(self) -> Iterator[Mapping[str, Any]]:
        (first, start), self._next = self._next, (0, 0)
        for number in range(first, len(self._paths)):
            path, place = self._paths[number], start if number == first else 0
            for after, example in _rows(path, place) if _is_parquet(path) else _lines(path, place):
                self._next = number, after
                yield example
        self._next = len(self._paths), 0

    def state_dict(self) -> Dict[str, Any]:
        """Where the next example stands."""
        return {"files": self._paths, "file": self._next[0], "place": self._next[1]}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """The next iteration begins where `state_dict` was taken. ValueError for a state of other files."""
        fields = Fields.of(dict(state), "state of the files", "give the same files in the same order, or begin anew")
        if fields.texts("files") != self._paths:
            raise fields.error("files", "must be the files of this source")
        self._next = fields.integer("file", least=0, most=len(self._paths)), fields.integer("place", least=0)


def _is_parquet(path: str) -> bool:
    return path.lower().endswith(".parquet")


def _lines(path: str, place: int) -> Iterator[Tuple[int, Mapping[str, Any]]]:
    """Examples from a byte of the unpacked file on, each with the byte behind its line."""
    with open_unpacked(path, way_out=_WAY_OUT) as file:
        if file.seekable():
            file.seek(place)
        else:
            left = place
            while left and (passed := len(file.read(min(left, _CHUNK)))):
                left -= passed
        for line in file:
            place += len(line)
            if line.strip():
                example = parse_json(line, f"{path}, before byte {place}", _WAY_OUT)
                if not isinstance(example, dict):
                    raise ValueError(f"{path}, before byte {place}: the line is no object; {_WAY_OUT}")
                yield place, example


def _rows(path: str, place: int) -> Iterator[Tuple[int, Mapping[str, Any]]]:
    """Examples from a row on, each with the number of the row behind it. The row group of the first is read again."""
    parquet, at = load_package("pyarrow.parquet", path), 0
    with parquet.ParquetFile(path) as file:
        for group in range(file.num_row_groups):
            if at + file.metadata.row_group(group).num_rows <= place:
                at += file.metadata.row_group(group).num_rows
                continue
            for batch in file.iter_batches(batch_size=_ROWS, row_groups=[group], use_threads=False):
                first = max(0, place - at)
                yield from enumerate(batch.slice(first).to_pylist(), at + first + 1)
                at += batch.num_rows
