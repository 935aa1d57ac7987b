"""Directories that `save_to_disk` of Hugging Face's datasets writes: Arrow files, state.json and dataset_info.json.

Versions before 2.0 keep the rows of a shuffled or filtered data set where they are, and add Arrow streams of one column
of row numbers, which select them. The counts in dataset_info.json are not compared: select, filter and map keep those
of the data set that they began with.
"""

from __future__ import annotations

import os
from functools import lru_cache
from pathlib import Path
from typing import List, NamedTuple, Optional, Tuple

from pack_data.reading.fields import Fields, read_object

WAY_OUT = "save the data set again with save_to_disk"
_INDICES = ("_indices_files", "_indices_data_files")  # by version


class SavedDataSet(NamedTuple):
    """The paths that a state.json lists, the split that it names, and the columns in dataset_info.json."""

    rows: List[str]
    indices: List[str]  # files of row numbers; empty if all rows count, in their order
    split: Optional[str]
    columns: List[str]  # empty if they are not stated

    @property
    def files(self) -> List[str]:
        """The files to read."""
        return self.indices or self.rows

    def check_complete(self, directory: str) -> None:
        """Raise ValueError if a file is missing."""
        missing = [
            os.path.basename(file)
            for file in (*self.rows, *self.indices)
            if not os.path.isfile(file)
        ]
        if missing or not self.rows:
            listed = ", ".join(missing)[:150] or "no file"
            path = Path(directory, "state.json")
            raise ValueError(f"{path}: lists {listed}, which is not there; copy it again")


def saved_data_set(directory: str) -> Optional[SavedDataSet]:
    """Return what the metadata of a directory states, if there is any."""
    state = _version(Path(directory, "state.json"))
    if state is None:
        return None
    return _read(directory, state, _version(Path(directory, "dataset_info.json")))


def _version(path: Path) -> Optional[Tuple[int, ...]]:
    """Return numbers that change when a file is written again; None if there is no file."""
    if not path.is_file():
        return None
    status = path.stat()
    return status.st_mtime_ns, status.st_size, status.st_ino


# Every shard asks for the metadata, which lists all shards.
@lru_cache(maxsize=16)
def _read(
    directory: str, state_version: Tuple[int, ...], info_version: Optional[Tuple[int, ...]]
) -> Optional[SavedDataSet]:
    path = Path(directory, "state.json")
    state = read_object(path, way_out=WAY_OUT)
    if "_data_files" not in state:
        return None
    rows = _files(directory, state, "_data_files")
    indices = [file for name in _INDICES for file in _files(directory, state, name)]
    columns: List[str] = []
    if info_version is not None:
        info = read_object(path.with_name("dataset_info.json"), way_out=WAY_OUT)
        features = info.optional("features", Fields.object)
        columns = features.names() if features else []
    return SavedDataSet(rows, indices, state.optional("_split", Fields.text), columns)


def _files(directory: str, state: Fields, name: str) -> List[str]:
    entries = state.optional(name, Fields.list_of, Fields.object) or []
    return [os.path.join(directory, entry.plain_name("filename")) for entry in entries]


def selected_files(path: str) -> List[str]:
    """Return the files whose rows a file of row numbers selects; none if the file has rows of its own."""
    saved = saved_data_set(os.path.dirname(path))
    return saved.rows if saved and path in saved.indices else []


def check_columns(path: str, columns: List[str]) -> None:
    """Raise ValueError if the dataset_info.json beside a saved file states other columns than the file has."""
    saved = saved_data_set(os.path.dirname(path))
    stated = saved.columns if saved and path in saved.rows else []
    if stated and set(stated) != set(columns):
        raise ValueError(
            f"{path}: its columns are {', '.join(columns)[:100]}, but dataset_info.json states "
            f"{', '.join(stated)[:100]}; {WAY_OUT}"
        )
