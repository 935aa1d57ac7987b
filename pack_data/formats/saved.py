"""Directories that `save_to_disk` of Hugging Face's datasets writes: Arrow files, state.json and dataset_info.json.

Versions before 2.0 keep the rows of a shuffled or filtered data set where they are, and add Arrow streams of one column
of row numbers, which select them. The counts in dataset_info.json are not compared: select, filter and map keep those
of the data set that they began with.
"""

from __future__ import annotations

import os
from functools import lru_cache
from pathlib import Path
from typing import List, NamedTuple, Optional

from pack_data.reading.fields import Fields, parse_json
from pack_data.reading.files import read_regular

WAY_OUT = "save the data set again with save_to_disk"
_STATE = "state.json"
_INFO = "dataset_info.json"
_MOST_BYTES = 1 << 28
_INDICES = ("_indices_files", "_indices_data_files")  # by version


class SavedDataSet(NamedTuple):
    """The names of the files that a state.json lists, the split that it names, and the columns in dataset_info.json."""

    rows: List[str]
    indices: List[str]  # files of row numbers; empty if all rows count, in their order
    split: Optional[str]
    columns: List[str]  # empty if they are not stated
    directory: str = ""

    def paths(self, names: List[str]) -> List[str]:
        """Return the paths of files of the directory."""
        return [os.path.join(self.directory, name) for name in names]

    @property
    def files(self) -> List[str]:
        """The files to read."""
        return self.paths(self.indices or self.rows)

    def check_complete(self) -> None:
        """Raise ValueError if a file is missing."""
        names = [*self.rows, *self.indices]
        missing = [name for name, path in zip(names, self.paths(names)) if not os.path.isfile(path)]
        if missing or not self.rows:
            listed = ", ".join(missing)[:150] or "no file"
            path = Path(self.directory, _STATE)
            raise ValueError(f"{path}: lists {listed}, which is not there; copy it again")


def saved_data_set(directory: str) -> Optional[SavedDataSet]:
    """Return what the metadata of a directory states, if there is any."""
    state = _content(Path(directory, _STATE))
    if state is None:
        return None
    try:
        saved = _parsed(state, _content(Path(directory, _INFO)))
    except ValueError as error:  # begins with the name of the file
        raise ValueError(os.path.join(directory, str(error))) from None
    return saved and saved._replace(directory=directory)


def _content(path: Path) -> Optional[bytes]:
    """Return the content of a file, None if there is no file."""
    if not path.is_file():
        return None
    return read_regular(path, way_out=WAY_OUT, most_bytes=_MOST_BYTES)


# Every shard asks for the metadata, which lists all shards.
@lru_cache(maxsize=16)
def _parsed(state_json: bytes, info_json: Optional[bytes]) -> Optional[SavedDataSet]:
    state = Fields.of(parse_json(state_json, _STATE, WAY_OUT), _STATE, WAY_OUT)
    if "_data_files" not in state:
        return None
    rows = _names(state, "_data_files")
    indices = [file for name in _INDICES for file in _names(state, name)]
    columns: List[str] = []
    if info_json is not None:
        info = Fields.of(parse_json(info_json, _INFO, WAY_OUT), _INFO, WAY_OUT)
        features = info.optional("features", Fields.object)
        columns = features.names() if features else []
    return SavedDataSet(rows, indices, state.optional("_split", Fields.text), columns)


def _names(state: Fields, name: str) -> List[str]:
    entries = state.optional(name, Fields.list_of, Fields.object) or []
    return [entry.plain_name("filename") for entry in entries]


def selected_files(path: str) -> List[str]:
    """Return the files whose rows a file of row numbers selects; none if the file has rows of its own."""
    saved = saved_data_set(os.path.dirname(path))
    is_selection = saved is not None and os.path.basename(path) in saved.indices
    return saved.paths(saved.rows) if saved and is_selection else []


def check_columns(path: str, columns: List[str]) -> None:
    """Raise ValueError if the dataset_info.json beside a saved file states other columns than the file has."""
    saved = saved_data_set(os.path.dirname(path))
    stated = saved.columns if saved and os.path.basename(path) in saved.rows else []
    if stated and set(stated) != set(columns):
        raise ValueError(
            f"{path}: its columns are {', '.join(columns)[:100]}, but dataset_info.json states "
            f"{', '.join(stated)[:100]}; {WAY_OUT}"
        )
