"""Lengths in files of many kinds, counted into one histogram: `packed-bert look WHAT ...`.

Files are counted in parallel, and their histograms are added.
"""

from __future__ import annotations

import multiprocessing
import operator
import os
from concurrent.futures import ProcessPoolExecutor
from functools import partial, reduce
from itertools import chain
from pathlib import Path
from typing import Callable, Iterable, Iterator, List, Optional, Sequence, Tuple

import numpy as np

from pack_data.cli.outputs import starting_workers
from pack_data.cli.terminal import progress_bar
from pack_data.display.picture import Axis, Bars, Series
from pack_data.packing.histogram import BUNDLED, LengthHistogram, is_heading, unfit, whole_of
from pack_data.reading.bad_records import MOST_RECORD_BYTES
from pack_data.reading.compressed import open_unpacked, without_compression
from pack_data.reading.encodings import lines_of_numbers
from pack_data.reading.npy import map_array
from pack_data.reading.words import counted, in_blocks
from pack_data.store.data_set import MANIFEST, read_manifest
from pack_data.store.sequences import LONGEST

_TEXT = (".txt", ".lengths", ".csv", ".tsv")
_WAY_OUT = "write one whole number in each line"
_HEADINGS = ("length", "lengths")  # of a table with one column
_BLOCK = 1 << 20  # lengths held in memory at a time
_WORTH_PROCESSES = 1 << 25  # bytes; less is counted before the first process has started
_HEADING_BYTES = 64  # of the first line of a histogram, with room for blanks
_MOST_BARS = 128  # of the drawn picture
_SHOWN_LETTERS = 60  # of a wrong line, so that the message stays one line


def count(
    sources: Sequence[str],
    max_sequence_length: Optional[int] = None,
    workers: Optional[int] = None,
    max_record_bytes: int = MOST_RECORD_BYTES,
    columns: Sequence[str] = (),
    split: str = "",
) -> LengthHistogram:
    """Count the lengths of all sources into one histogram.

    Args:
        sources: bundled names, packed data sets, CSV histograms, text files (.txt, .lengths, plain or .gz, .xz, .bz2)
            with a length in each line, .npy arrays of lengths, and files or directories that pack_data.formats reads.
        max_sequence_length: slots of a pack; None for the largest that a source states, or the longest sequence.
        workers: processes; None for one per file and core if there is much to read.
        max_record_bytes: longest record of a file of sequences that is read.
        columns: of files of sequences, as for `open_source`.
        split: of directories, as for `open_source`.

    Raises:
        ValueError: a source cannot be read, or a length is out of range; the message names file and place.
    """
    parts = [path for source in sources for path in _files(source, split)]
    if columns and not all(map(_has_columns, parts)):
        raise ValueError(
            f"{', '.join(sources)}: lengths, which have no columns; leave --columns out"
        )
    if workers is None:
        size = sum(os.path.getsize(part) for part in parts if os.path.isfile(part))
        workers = min(len(parts), os.cpu_count() or 1) if size > _WORTH_PROCESSES else 1
    histograms: List[LengthHistogram] = []
    with progress_bar(len(parts), "counting", unit=" files") as bar:
        count_part = partial(
            _count_part,
            S=max_sequence_length,
            max_record_bytes=max_record_bytes,
            columns=columns,
        )
        for histogram in _map(count_part, parts, workers):
            histograms.append(histogram)
            bar.update()
    S = max_sequence_length or max(histogram.max_sequence_length for histogram in histograms)
    total = reduce(
        operator.add, (histogram.with_max_sequence_length(S) for histogram in histograms)
    )
    return LengthHistogram(total.counts, " + ".join(map(_name, sources)))


def lengths_in(sources: Sequence[str]) -> np.ndarray:
    """Return the lengths of all sequences in their order, integers [sequences].

    Args:
        sources: files and directories as for `count`, but no histograms.

    Raises:
        ValueError: a source cannot be read, or is a histogram.
    """
    blocks: List[np.ndarray] = [np.zeros(0, np.int64)]
    for path in chain.from_iterable(_files(source, "") for source in sources):
        if path in BUNDLED or (os.path.isfile(path) and _begins_as_histogram(path)):
            raise ValueError(
                f"{path}: a histogram does not tell the order of its sequences; pass a file with one length for each"
            )
        blocks += _blocks(path, MOST_RECORD_BYTES, ())
    return np.concatenate(blocks)


def _map(
    count_part: Callable[[str], LengthHistogram], parts: Sequence[str], workers: int
) -> Iterator[LengthHistogram]:
    if workers <= 1:
        yield from map(count_part, parts)
        return
    has_forkserver = "forkserver" in multiprocessing.get_all_start_methods()
    context = multiprocessing.get_context("forkserver" if has_forkserver else "spawn")
    with starting_workers(workers):
        pool = ProcessPoolExecutor(workers, context)
    with pool:
        with starting_workers(workers):
            histograms = pool.map(count_part, parts)
        yield from histograms


def _name(source: str) -> str:
    return source if source in BUNDLED else Path(source).name.split(".")[0] or source


def what_was_read(
    sources: Sequence[str], columns: Sequence[str] = (), split: str = ""
) -> Iterator[str]:
    """Yield a line about the columns of each source of sequences (`Source.summary`)."""
    from pack_data.formats.source import open_source

    for source in sources:
        if _has_columns(_files(source, split)[0]):
            yield open_source(source, columns=columns, split=split).summary()


def _has_columns(path: str) -> bool:
    """Return True for a file of sequences, False for one of lengths, a bundled name and a data set."""
    is_lengths = path.endswith(".npy") or _is_text(path)
    return os.path.isfile(path) and not is_lengths and not _begins_as_histogram(path)


def _files(source: str, split: str) -> List[str]:
    """Return what is counted on its own: the files of a directory, or the source itself."""
    is_whole = source in BUNDLED or (Path(source) / MANIFEST).is_file()
    if split and (is_whole or os.path.isfile(source)):
        raise ValueError(f"{source}: has no splits, as directories have; leave --split {split} out")
    if is_whole:
        return [source]
    if not os.path.exists(source):
        raise ValueError(
            f"{source}: no such file, directory or bundled histogram; bundled are {', '.join(BUNDLED)}"
        )
    if not os.path.isdir(source):
        return [source]
    lengths = sorted(path for path in os.listdir(source) if _is_text(path) or path.endswith(".npy"))
    if lengths:
        return [os.path.join(source, path) for path in lengths]
    from pack_data.formats.data_files import data_files

    return data_files(source, split)


def _is_text(path: str) -> bool:
    return without_compression(path).endswith(_TEXT)


def _count_part(
    path: str, S: Optional[int], max_record_bytes: int, columns: Sequence[str]
) -> LengthHistogram:
    """Count one source. S: slots of a pack; None for what the source states, or its longest sequence."""
    if path in BUNDLED:
        histogram = LengthHistogram.published(path)
    elif os.path.isdir(path):
        counts = np.array(read_manifest(Path(path)).histogram, np.int64)
        histogram = LengthHistogram(counts, Path(path).name)
    elif _begins_as_histogram(path):  # its name may end in anything
        histogram = LengthHistogram.from_csv(path, S or LONGEST)
        S = S or max(histogram.longest, 1)
    else:
        return _count_blocks(path, _blocks(path, max_record_bytes, columns), S)
    return histogram if S is None else histogram.with_max_sequence_length(S)


def _begins_as_histogram(path: str) -> bool:
    """Return True if the first line of a file is that of a CSV histogram."""
    with open_unpacked(path, way_out="pass a file of lengths") as file:
        return is_heading(file.readline(_HEADING_BYTES).decode("utf-8-sig", "replace"))


def _blocks(path: str, max_record_bytes: int, columns: Sequence[str]) -> Iterator[np.ndarray]:
    """Yield the lengths of a file in blocks, integers [n]."""
    if _is_text(path):
        yield from _lines(path)
    elif path.endswith(".npy"):
        lengths = map_array(path, way_out="pass a .npy array of lengths")
        if lengths.shape[:1] != (lengths.size,):
            raise ValueError(
                f"{path}: shape {lengths.shape}; pass one column, with one length for each sequence"
            )
        lengths = lengths.reshape(-1)
        for begin in range(0, len(lengths), _BLOCK):
            yield lengths[begin : begin + _BLOCK]
    else:
        from pack_data.formats.source import open_source

        source = open_source(path, columns=columns, max_record_bytes=max_record_bytes)
        yield from source.lengths()


def _lines(path: str) -> Iterator[np.ndarray]:
    """Yield the lengths of a text file, one in each line; a heading and empty lines do not count."""
    first = 1  # line of the block
    for block in in_blocks(lines_of_numbers(path, way_out=_WAY_OUT), _BLOCK):
        lengths = []
        for number, line in enumerate(block, first):
            text = line.strip()
            if not text or (number == 1 and text.lower() in _HEADINGS):
                continue
            try:
                length = whole_of(text)
            except ValueError:
                length = LONGEST + 1
            if abs(length) > LONGEST:
                raise ValueError(
                    f"{path} line {number}: {ascii(text[:_SHOWN_LETTERS])} is not a length; {_WAY_OUT} (cut -d, -f2 "
                    "takes it from a table), or a histogram that starts with the line 'length,count'"
                )
            lengths.append(length)
        yield np.array(lengths, np.int64)
        first += len(block)


def _count_blocks(path: str, blocks: Iterable[np.ndarray], S: Optional[int]) -> LengthHistogram:
    """Add up blocks of lengths; ValueError, which names the sequence, for a length out of range."""
    limit = S or LONGEST
    counts = np.zeros(1 if S is None else S + 1, np.int64)
    first = 0  # sequence of the block
    for lengths in blocks:
        if not np.issubdtype(lengths.dtype, np.integer):
            raise ValueError(
                f"{path}: lengths must be whole numbers of tokens, not {lengths.dtype}"
            )
        problem = unfit(lengths, limit, "" if S else "the longest length", before=first)
        if problem:
            raise ValueError(f"{path}: {problem}; drop or cut them first")
        # NumPy before 2 refuses to count uint64.
        block = np.bincount(lengths.astype(np.int64, copy=False))
        if len(block) > len(counts):
            counts = np.pad(counts, (0, len(block) - len(counts)))
        counts[: len(block)] += block
        first += len(lengths)
    if len(counts) < 2:  # a histogram has at least length 1
        counts = np.zeros(2, np.int64)
    return LengthHistogram(counts, Path(path).name)


def picture(histogram: LengthHistogram) -> Bars:
    """Draw Figure 1 of the paper for a histogram: the number of sequences of each length."""
    S = histogram.max_sequence_length
    step = -(-S // _MOST_BARS)
    edges = [*range(0, S, step), -(-S // step) * step]
    names = []
    totals = []
    for low, high in zip(edges, edges[1:]):
        names.append(f"{high} tokens" if step == 1 else f"{low + 1} to {min(high, S)} tokens")
        totals.append(int(histogram.counts[low + 1 : high + 1].sum()))

    # If many sequences were cut to S, the bar of that length would make all others invisible.
    most_of_others = max(totals[:-1], default=0)
    is_cut = most_of_others and totals[-1] > 3 * most_of_others
    notes: Tuple[str, ...] = ()
    if is_cut:
        share = totals[-1] / histogram.sequences
        notes = (
            f"The last bar ends beyond the picture: {names[-1]}: {counted(totals[-1], 'sequence')}, {share:.2%}.",
        )
    return Bars(
        "Sequences by length",
        tuple(names),
        Axis("sequences", most=1.5 * most_of_others if is_cut else None),
        (Series("sequences", tuple(map(float, totals))),),
        along=f"tokens of a sequence, in steps of {step}" if step > 1 else "tokens of a sequence",
        edges=tuple(map(float, edges)),
        notes=notes,
        levels=(
            (f"mean {histogram.mean_length:.1f}", histogram.mean_length),
            (f"median {histogram.median_length}", float(histogram.median_length)),
        ),
    )
