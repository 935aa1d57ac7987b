"""The data files of a directory: what its metadata lists, or the files whose names reveal a format.

Names are believed: `train-00000-of-00003` demands two more files, and train and test are not mixed.
"""

from __future__ import annotations

import os
import re
from collections import defaultdict
from itertools import count, filterfalse, islice
from pathlib import Path
from typing import Dict, List, Set, Tuple

from pack_data.formats.detect import SUFFIXES, suffix_format
from pack_data.formats.saved import WAY_OUT, check_complete, saved_data_set
from pack_data.reading.compressed import without_compression
from pack_data.reading.fields import Fields, read_object

_PART = re.compile(r"part-\d+(-of-\d+)?")  # as MLPerf's scripts write them
_SHARD = re.compile(r"(?P<before>.*?)(?P<number>\d+)-of-(?P<total>\d+)(?P<after>.*)")
_SPLIT = re.compile(
    r"(?<![a-z])(train|training|validation|valid|val|dev|test|testing|eval)(_[a-z]+)*(?![a-z])",
    re.IGNORECASE,
)
# Results of map and filter, which datasets keep beside the data.
_CACHE = re.compile(r"cache-[0-9a-f]+(_\d+_of_\d+)?\.arrow")
# Files that describe data or models, as datasets, its Hub and this package write them.
METADATA = (
    *("dataset_dict.json", "dataset_info.json", "dataset_infos.json", "state.json", "index.json"),
    *(
        "config.json",
        "tokenizer.json",
        "tokenizer_config.json",
        "special_tokens_map.json",
        "vocab.json",
    ),
    *("manifest.json", "recipe.json"),  # of data sets of this package
)
# Missing shards that a message names.
_MISSING_LISTED = 3


def data_files(path: str, split: str = "") -> List[str]:
    """Return the data files of a path in the order of their numbers.

    Args:
        path: a file, or a directory. state.json and dataset_dict.json, which save_to_disk writes, list the files of a
            directory. Without them, its files are those with a suffix of a format, and `part-00000`.
        split: which split to take, such as "train", if there are several.

    Raises:
        ValueError: there is no data file, a shard is missing, or several splits or copies are there.
    """
    if not os.path.exists(path):
        raise ValueError(f"{path}: no such file or directory")
    if os.path.isdir(path):
        return _files_of_directory(path, split)
    if split:
        raise ValueError(f"{path}: a file; --split {split} chooses among the files of a directory")
    index = path[:-4] + ".idx"
    # The tokens of Megatron do not show their type; the index does.
    return [index if path.lower().endswith(".bin") and os.path.isfile(index) else path]


def _files_of_directory(path: str, split: str) -> List[str]:
    if os.path.isfile(os.path.join(path, "dataset_dict.json")):
        listing = read_object(Path(path, "dataset_dict.json"), way_out=WAY_OUT)
        splits = listing.list_of("splits", Fields.plain_name)
        return data_files(os.path.join(path, _chosen(path, splits, split)))
    saved = saved_data_set(path)
    if saved:
        check_complete(path, saved)
        if split not in ("", saved.split):
            raise ValueError(
                f"{path}: state.json: _split is {saved.split}, --split asks for {split}"
            )
        return saved.files

    names = _named_files(path)
    if not names:
        return _files_below(path, split)
    by_split: Dict[str, List[str]] = defaultdict(list)
    for name in names:
        by_split[_split_of(name)].append(name)
    if split or sum(bool(_SPLIT.search(name)) for name in by_split) > 1:
        names = by_split[_chosen(path, list(by_split), split)]
    check_copies(path, names)
    _check_shards(path, names)
    formats = sorted({suffix_format(name) or Path(name).suffix[1:] for name in names} - {""})
    if len(formats) > 1:
        raise ValueError(
            f"{path}: holds files of {' and '.join(formats)}; pass one of them, or move the others"
        )
    return [os.path.join(path, name) for name in names]


def _named_files(path: str) -> List[str]:
    """Return the files whose names reveal a format; .json only if there are no others, as it may hold settings."""
    every_name = {name for name in os.listdir(path) if os.path.isfile(os.path.join(path, name))}
    names = []
    for name in sorted(every_name, key=_natural):
        is_index = name.endswith(".idx") and name[:-4] + ".bin" in every_name
        is_part = _PART.fullmatch(without_compression(name))
        is_hidden = name.startswith((".", "_")) or name in METADATA or _CACHE.fullmatch(name)
        if (suffix_format(name) or is_index or is_part) and not is_hidden:
            names.append(name)
    if any(name.endswith(".mds") for name in every_name) and "index.json" in every_name:
        raise ValueError(
            f"{path}: MosaicML's MDS is not read; write its samples as JSONL, one for each sample of "
            "streaming.StreamingDataset(local=...)"
        )
    return [name for name in names if not name.lower().endswith(".json")] or names


def _files_below(path: str, split: str) -> List[str]:
    """Return the files of `data`, as on the Hugging Face Hub, or of the directory of a split."""
    below = sorted(name for name in os.listdir(path) if os.path.isdir(os.path.join(path, name)))
    if "data" in below:
        return data_files(os.path.join(path, "data"), split)
    splits = [name for name in below if _SPLIT.fullmatch(name)]
    if splits:
        return data_files(os.path.join(path, _chosen(path, splits, split)))
    nested = [os.path.join(path, name) for name in below if not name.startswith(".")]
    files = [file for folder in nested if _holds_data(folder) for file in data_files(folder, split)]
    if files:
        return files
    raise ValueError(
        f"{path}: no data file in this directory; expected {', '.join('.' + suffix for suffix in SUFFIXES)}, "
        ".idx with .bin, or part-NNNNN (for plain text use packed-bert build --corpus)"
    )


def _holds_data(folder: str) -> bool:
    """Return True if a file below a directory has the suffix of a format."""
    return any(suffix_format(name) for _, _, names in os.walk(folder) for name in names)


def _natural(name: str) -> List[object]:
    """Return a sort key that puts part-2 before part-10."""
    return [int(part) if part.isdigit() else part for part in re.split(r"(\d+)", name)]


def _split_of(name: str) -> str:
    """Return the split in a file name, else what stands before the number of a shard."""
    shard = _SHARD.fullmatch(name)
    stem = shard["before"] if shard else without_compression(name).rpartition(".")[0]
    split = _SPLIT.search(stem)
    if split:
        return split[0]
    return stem.rstrip("-_.") if shard else ""


def _chosen(path: str, splits: List[str], split: str) -> str:
    """Return the split to read: the chosen or the only one.  Raises ValueError with the list of splits."""
    if split in splits:
        return split
    if not split and len(splits) == 1:
        return splits[0]
    listed = ", ".join(sorted(filter(None, splits)))[:150] or "none"
    problem = f"has no split {split}" if split else "holds several splits"
    raise ValueError(f"{path}: {problem}; choose with --split: {listed}")


def check_copies(path: str, names: List[str]) -> None:
    """Raise ValueError if a file is there plain and compressed, or compressed twice."""
    seen: Dict[str, str] = {}
    for name in names:
        other = seen.setdefault(without_compression(name), name)
        if other != name:
            raise ValueError(
                f"{path}: {other} and {name} are copies by their names; move one of them"
            )


def _check_shards(path: str, names: List[str]) -> None:
    """Raise ValueError if a shard is missing: the number in `-of-00003` counts them."""
    series: Dict[Tuple[str, int, str, str], Set[int]] = defaultdict(set)
    for name in names:
        shard = _SHARD.fullmatch(name)
        if shard:
            before, number, total, after = shard.groups()
            series[before, len(number), total, after].add(int(number))
    for (before, digits, of, after), present in series.items():
        total = int(of)
        missing = total - len(present)
        if missing <= 0:
            continue
        first = 1 if total in present else 0  # some count from 1
        absent = filterfalse(present.__contains__, count(first))
        some = islice(absent, min(missing, _MISSING_LISTED))
        listed = [f"{before}{number:0{digits}}-of-{of}{after}" for number in some]
        raise ValueError(
            f"{path}: shards missing: {missing} of {total}, such as {', '.join(listed)}; copy them there, or rename "
            "the others if there are no more"
        )
