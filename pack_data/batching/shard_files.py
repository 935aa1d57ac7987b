"""Files of examples as a source that is shared out by files and continues from its state: `ShardFiles`."""

from __future__ import annotations

import os
from typing import Any, Dict, Iterable, Iterator, List, Mapping, Union

from pack_data.formats.data_files import data_files
from pack_data.formats.detect import content_format, suffix_format
from pack_data.formats.rows import identity, read_rows
from pack_data.reading.bad_records import BadRecords, Origin
from pack_data.reading.fields import Fields, one_line

_FORMATS = ("jsonl", "parquet", "arrow")
_WAY_OUT = "pass files of JSONL (.jsonl, .jsonl.gz, .jsonl.zst, ...), Parquet or Arrow with a column for each list"


class ShardFiles:
    """The examples of files, one file after another; each is a mapping of columns.

    It continues in the row group of a Parquet file. Of other files, what stands before the next example is read or
    unpacked again, but not as JSON.

    Args:
        paths: files of JSONL, JSON arrays, Parquet or Arrow, plain or compressed; or the directory of such files.

    Raises:
        ValueError: a file has another format.
    """

    identifies_content = True  # a state has the identity of each file

    def __init__(self, paths: Union[str, os.PathLike, Iterable[Union[str, os.PathLike]]]) -> None:
        if isinstance(paths, (str, os.PathLike)):
            paths = data_files(str(paths))
        self._paths = [str(path) for path in paths]
        for path in self._paths:
            format = suffix_format(path)
            if not format and os.path.isfile(path):
                format = content_format(path)
            if format not in _FORMATS:
                raise ValueError(f"{path}: is neither JSONL nor Parquet nor Arrow; {_WAY_OUT}")
        self._file = 0  # of the next example
        self._place = 0  # of the next example in its file
        self._identities: Dict[str, str] = {}  # of files that were read, or that are in a state

    @property
    def num_shards(self) -> int:
        """Number of files."""
        return len(self._paths)

    def shard(self, num_shards: int, index: int) -> ShardFiles:
        """Return every num_shards-th file, from its beginning.

        Args:
            num_shards: number of parts.
            index: number of the part, from 0.

        Returns:
            The files of the part as a source.
        """
        return ShardFiles(self._paths[index::num_shards])

    def __iter__(self) -> Iterator[Mapping[str, Any]]:
        first = self._file % max(1, len(self._paths))  # after the last file a new pass begins
        place = self._place
        self._file = self._place = 0
        for number in range(first, len(self._paths)):
            path = self._paths[number]
            self._identity_of(path)
            for row in read_rows(path, _NoBadRecords(), start=place):
                self._file = number
                self._place = row.after
                yield row.fields
            place = 0
        self._file = len(self._paths)
        self._place = 0

    def _identity_of(self, path: str) -> str:
        if path not in self._identities:
            self._identities[path] = identity(path)
        return self._identities[path]

    def state_dict(self) -> Dict[str, Any]:
        """Return the place of the next example, and the identities of all files.

        Returns:
            Plain values: files, identities, file (number of the current one) and place (in it).
        """
        identities = [self._identity_of(path) for path in self._paths]
        return {
            "files": self._paths,
            "identities": identities,
            "file": self._file,
            "place": self._place,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Begin the next iteration at the place of a state.

        Args:
            state: from `state_dict`.

        Raises:
            ValueError: the state is of other files, or a file was written again since.
        """
        fields = Fields.of(
            dict(state),
            "state of the files",
            "pass the same files in the same order, or begin anew",
        )
        if fields.texts("files") != self._paths:
            raise fields.error("files", "must be the files of this source")
        file = fields.integer("file", least=0, most=len(self._paths))
        place = fields.integer("place", least=0)
        if "identities" in fields:
            self._check_identities(fields.texts("identities"))
        self._file = file
        self._place = place

    def _check_identities(self, identities: List[str]) -> None:
        for path, identity_of_state in zip(self._paths, identities):
            if self._identity_of(path) != identity_of_state:
                raise ValueError(
                    f"state of the files: {path} is another file than when the state was taken, or was written again; "
                    "put the same file back, or begin anew"
                )


class _NoBadRecords(BadRecords):
    """Every record that cannot be read is an error."""

    def add(self, origin: Origin, reason: str, records: int = 1) -> None:
        raise ValueError(f"{origin}: {one_line(reason, 150)}; repair the file, or leave it out")

    def too_long(self) -> str:
        return f"it is longer than {self.longest:,} bytes: split it into several examples"
