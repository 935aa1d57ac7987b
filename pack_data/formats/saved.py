"""Directories that `save_to_disk` of Hugging Face's datasets writes: Arrow files, state.json and dataset_info.json.

Versions before 2.0 keep the rows of a shuffled or filtered data set where they are, and add Arrow streams of one column
of row numbers, which select them. The counts in dataset_info.json are not compared: select, filter and map keep those
of the data set that they began with.
"""

from __future__ import annotations

import os
from functools import lru_cache
from pathlib import Path
from typing import Dict, List, NamedTuple, Optional

from pack_data.reading.fields import Fields, parse_json
from pack_data.reading.files import read_regular

WAY_OUT = "save the data set again with save_to_disk"
_STATE = "state.json"
_INFO = "dataset_info.json"
_INDICES = ("_indices_files", "_indices_data_files")  # by version


class _SavedDataSet(NamedTuple):
    """The files that a state.json lists, the split that it names, and the columns in dataset_info.json."""

    rows: List[str]
    indices: List[str]  # files of row numbers; empty if all rows count, in their order
    split: Optional[str]
    columns: List[str]  # empty if they are not stated

    @property
    def files(self) -> List[str]:
        """The files to read."""
        return self.indices or self.rows


def saved_data_set(directory: str) -> Optional[_SavedDataSet]:
    """Return what the metadata of a directory states, if there is any."""
    state = _content(directory, _STATE)
    return None if state is None else _parsed(directory, state, _content(directory, _INFO))


def check_complete(directory: str, saved: _SavedDataSet) -> None:
    """Raise ValueError if a file of a saved data set is missing."""
    missing = [path for path in (*saved.rows, *saved.indices) if not os.path.isfile(path)]
    if missing or not saved.rows:
        listed = ", ".join(map(os.path.basename, missing))[:150] or "no file"
        path = Path(directory, _STATE)
        raise ValueError(f"{path}: lists {listed}, which is not there; copy it again")


def _content(directory: str, name: str) -> Optional[bytes]:
    """Return the content of a file, None if there is no file."""
    path = Path(directory, name)
    return read_regular(path, way_out=WAY_OUT) if path.is_file() else None


# Every shard asks for the metadata, which lists all shards.
@lru_cache(maxsize=16)
def _parsed(
    directory: str, state_json: bytes, info_json: Optional[bytes]
) -> Optional[_SavedDataSet]:
    state = _fields(directory, _STATE, state_json)
    if "_data_files" not in state:
        return None
    files: Dict[str, List[str]] = {}
    for name in ("_data_files", *_INDICES):
        entries = state.optional(name, Fields.list_of, Fields.object) or []
        names = [entry.plain_name("filename") for entry in entries]
        files[name] = [os.path.join(directory, file) for file in names]
    indices = [file for name in _INDICES for file in files[name]]
    columns: List[str] = []
    if info_json is not None:
        features = _fields(directory, _INFO, info_json).optional("features", Fields.object)
        columns = features.names() if features else []
    split = state.optional("_split", Fields.text)
    return _SavedDataSet(files["_data_files"], indices, split, columns)


def _fields(directory: str, name: str, content: bytes) -> Fields:
    path = Path(directory, name)
    return Fields.of(parse_json(content, path, WAY_OUT), path, WAY_OUT)


def selected_files(path: str) -> List[str]:
    """Return the files whose rows a file of row numbers selects; none if the file has rows of its own."""
    directory, name = os.path.split(path)
    saved = saved_data_set(directory)
    return saved.rows if saved and os.path.join(directory, name) in saved.indices else []


def check_columns(path: str, columns: List[str]) -> None:
    """Raise ValueError if the dataset_info.json beside a saved file states other columns than the file has."""
    directory, name = os.path.split(path)
    saved = saved_data_set(directory)
    stated = saved.columns if saved and os.path.join(directory, name) in saved.rows else []
    if stated and set(stated) != set(columns):
        raise ValueError(
            f"{path}: its columns are {', '.join(columns)[:100]}, but dataset_info.json states "
            f"{', '.join(stated)[:100]}; {WAY_OUT}"
        )
