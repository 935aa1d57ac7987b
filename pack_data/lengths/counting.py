"""Counts lengths in files of many kinds into one histogram: `packed-bert look WHAT ...`.

Files are counted in parallel, and their histograms are added.
"""

from __future__ import annotations

import contextlib
import io
import multiprocessing
import operator
import os
from concurrent.futures import ProcessPoolExecutor
from functools import partial, reduce
from itertools import islice
from pathlib import Path
from typing import IO, Callable, Iterable, Iterator, List, Optional, Sequence

import numpy as np

from pack_data.cli.bad_records import MOST_RECORD_BYTES
from pack_data.cli.command import progress_bar
from pack_data.display.picture import Axis, Bars, Series
from pack_data.display.table import Table, account, facts_table
from pack_data.packing.histogram import PUBLISHED, LengthHistogram
from pack_data.reading.files import COMPRESSED, LONGEST_LINE, open_regular, open_unpacked, short_lines
from pack_data.reading.npy import map_array
from pack_data.store.data_set import MANIFEST, read_manifest
from pack_data.store.sequences import LONGEST

_TEXT = (".txt", ".lengths", ".csv")
_HEADINGS = ("length", "lengths")  # of a table with one column
_BLOCK = 1 << 20  # lengths held in memory at a time
_WORTH_PROCESSES = 1 << 25  # bytes


def count(
    sources: Sequence[str],
    max_sequence_length: Optional[int] = None,
    workers: Optional[int] = None,
    max_record_bytes: int = MOST_RECORD_BYTES,
) -> LengthHistogram:
    """One histogram of all sources together.

    A source is a shipped name; a packed data set (its manifest knows); a CSV histogram; a text file (.txt, .lengths,
    plain or .gz, .xz, .bz2) with a length in each line; a .npy array of lengths; or any file or folder that
    pack_data.formats reads.  Without max_sequence_length, S is the largest S that a source states, or the longest
    sequence met.
    """
    parts = [path for source in sources for path in _files(source)]
    if workers is None:  # small files are counted before the first process has started
        size = sum(os.path.getsize(part) for part in parts if os.path.isfile(part))
        workers = min(len(parts), os.cpu_count() or 1) if size > _WORTH_PROCESSES else 1
    counted: List[LengthHistogram] = []
    with progress_bar(len(parts), "counting", unit=" files") as bar:
        of_part = partial(_count_part, S=max_sequence_length, max_record_bytes=max_record_bytes)
        for histogram in _map(of_part, parts, workers):
            counted.append(histogram)
            bar.update()
    S = max_sequence_length or max(histogram.max_sequence_length for histogram in counted)
    total = reduce(operator.add, (histogram.with_max_sequence_length(S) for histogram in counted))
    name = " + ".join(map(_name, sources))
    return total if total.name == name else LengthHistogram(total.counts, name)


def _map(of_part: Callable[[str], LengthHistogram], parts: List[str], workers: int) -> Iterator[LengthHistogram]:
    if workers <= 1:
        yield from map(of_part, parts)
        return
    methods = multiprocessing.get_all_start_methods()
    with ProcessPoolExecutor(
        workers, multiprocessing.get_context("forkserver" if "forkserver" in methods else "spawn")
    ) as pool:
        yield from pool.map(of_part, parts)


def _name(source: str) -> str:
    return source if source in PUBLISHED else Path(source).name.split(".")[0] or source


def _is_text(path: str) -> bool:
    name = path.lower()
    for suffix in COMPRESSED:
        if name.endswith(suffix):
            name = name[: -len(suffix)]
    return name.endswith(_TEXT)


def _begins_as_histogram(path: str) -> bool:
    """Whether the first line of a file is that of a CSV histogram."""
    with open_regular(path, way_out="give a file of lengths") as file:
        return _is_heading(file.readline(64).decode("utf-8", "replace"))


def _is_heading(line: str) -> bool:
    return line.lstrip("\ufeff").strip().replace(" ", "") == "length,count"


def _files(source: str) -> List[str]:
    if source in PUBLISHED or (Path(source) / MANIFEST).is_file():
        return [source]
    if not os.path.exists(source):
        raise ValueError(f"{source}: neither a file, nor a folder, nor a shipped histogram ({', '.join(PUBLISHED)})")
    if not os.path.isdir(source):
        return [source]
    own = sorted(path for path in os.listdir(source) if _is_text(path) or path.endswith(".npy"))
    if own:
        return [os.path.join(source, path) for path in own]
    from pack_data.formats.detect import files_of

    return files_of(source)


def _count_part(path: str, S: Optional[int], max_record_bytes: int) -> LengthHistogram:
    """S: None is the one that the source states, or its longest sequence."""
    if path in PUBLISHED:
        histogram = LengthHistogram.published(path)
        return histogram if S is None else histogram.with_max_sequence_length(S)
    if os.path.isdir(path):
        histogram = LengthHistogram(np.array(read_manifest(Path(path)).histogram, np.int64), Path(path).name)
        return histogram if S is None else histogram.with_max_sequence_length(S)
    if _begins_as_histogram(path):  # its name may end in anything
        histogram = LengthHistogram.from_csv(path, S or LONGEST)
        return histogram.with_max_sequence_length(S or max(histogram.longest, 1))
    if _is_text(path):
        with _opened(path) as file:
            if _is_heading(file.readline(LONGEST_LINE)):
                raise ValueError(f"{path}: a CSV histogram is read plain; decompress it first")
        return _count_blocks(path, _lines(path), S)
    if path.endswith(".npy"):
        lengths = map_array(path, way_out="give a .npy array of lengths")
        if lengths.shape[:1] != (lengths.size,):
            raise ValueError(
                f"{path}: an array of shape {lengths.shape}; give one column, one length for each sequence"
            )
        lengths = lengths.reshape(-1)
        return _count_blocks(path, (lengths[at : at + _BLOCK] for at in range(0, len(lengths), _BLOCK)), S)
    from pack_data.formats.detect import open_source

    blocks = open_source(path, max_record_bytes=max_record_bytes).blocks()
    return _count_blocks(path, (block.lengths for block in blocks), S)


@contextlib.contextmanager
def _opened(path: str) -> Iterator[IO[str]]:
    """A text file, decompressed by its suffix.  ValueError, which names the file, where it cannot be read as text."""
    with open_unpacked(path, way_out="give a text file with a length in each line") as raw:
        try:
            with io.TextIOWrapper(raw, encoding="utf-8") as file:
                yield file
        except UnicodeDecodeError as error:
            raise ValueError(f"{path}: cannot be read as text ({error})") from None


def _lines(path: str) -> Iterator[np.ndarray]:
    """The lengths of a text file, one in each line; a heading and empty lines do not count."""
    at = 0
    with _opened(path) as file:
        read = short_lines(file, path, way_out="give one whole number in each line")
        for lines in iter(lambda: list(islice(read, _BLOCK)), []):
            if not at and lines[0].lstrip("\ufeff").strip().lower() in _HEADINGS:
                lines[0] = ""
            try:
                yield np.array([int(line) for line in lines if line.strip()], np.int64)
            except (ValueError, OverflowError):
                number, line = next(
                    (number, line) for number, line in enumerate(lines, start=at + 1) if not _is_length(line)
                )
                raise ValueError(
                    f"{path} line {number}: {ascii(line.strip()[:60])} is not a length; give one whole number in each "
                    "line (cut -d, -f2 takes it from a table), or a histogram that starts with the line 'length,count'"
                ) from None
            at += len(lines)


def _is_length(line: str) -> bool:
    try:
        return not line.strip() or abs(int(line)) <= LONGEST
    except ValueError:
        return False


def _count_blocks(path: str, blocks: Iterable[np.ndarray], S: Optional[int]) -> LengthHistogram:
    """Adds up blocks of lengths.  ValueError, which names the sequence, for a length out of range."""
    counts = np.zeros(1, np.int64)
    limit = S or LONGEST
    at = 0
    for lengths in blocks:
        if not np.issubdtype(lengths.dtype, np.integer):
            raise ValueError(f"{path}: lengths are whole numbers of tokens; got {lengths.dtype}")
        wrong = np.flatnonzero((lengths < 1) | (lengths > limit))
        if len(wrong):
            raise ValueError(
                f"{path}: sequence {at + int(wrong[0])} has length {int(lengths[wrong[0]])}; "
                f"lengths go from 1 to {'max_sequence_length = ' if S else ''}{limit}: drop or cut it first"
            )
        block = np.bincount(lengths.astype(np.int64, copy=False))  # NumPy before 2 refuses to count uint64
        if len(block) > len(counts):
            counts = np.pad(counts, (0, len(block) - len(counts)))
        counts[: len(block)] += block
        at += len(lengths)
    return LengthHistogram(np.pad(counts, (0, max(S or 1, len(counts) - 1) + 1 - len(counts))), Path(path).name)


def lengths_table(histogram: LengthHistogram) -> Table:
    """Return the statistics of the paper's Figure 1."""
    S = histogram.max_sequence_length
    full = int(histogram.counts[S])
    reach = f"{full / histogram.sequences:.1%} fill all {S} slots" if full else f"of {S} slots"
    rows = [
        ("sequences", "sequences", ",", ""),
        ("tokens", "tokens", ",", ""),
        ("max_sequence_length", "slots of a row", ",", "the longest sequence that is allowed"),
        ("shortest", "shortest", ",", ""),
        ("median_length", "median", ",", ""),
        ("mean_length", "mean", ",.1f", ""),
        ("longest", "longest", ",", reach),
        ("padding_share", "padding", ".1%", "of all slots, if each sequence is padded to the end"),
        ("theoretical_speedup", "speed-up", ".3f", "possible by packing without any padding"),
    ]
    facts = {key: getattr(histogram, key) for key, *_ in rows}
    return facts_table("lengths", f"Lengths of {histogram.name or 'these sequences'}", facts, rows)


def summary(histogram: LengthHistogram) -> str:
    """Return the statistics as text, with a small picture."""
    title = f"{histogram.name or 'histogram'}  sequences of at most {histogram.max_sequence_length} tokens"
    rows = []
    for row in lengths_table(histogram).rows:
        if row["what"].value != "max_sequence_length":
            rows.append((row["what"].text, row["value"].text, row["about"]))
    text = account(title, rows)
    return "\n".join([text, "", *_picture(histogram)]) if histogram.sequences else text


def _picture(histogram: LengthHistogram, rows: int = 16, width: int = 50) -> List[str]:
    """A bar for each of at most 16 ranges of lengths."""
    S = histogram.max_sequence_length
    edges = np.unique(np.linspace(0, S, min(rows, S) + 1).astype(int))
    totals = np.add.reduceat(histogram.counts, edges[:-1] + 1)
    digits = len(f"{S:,}")
    lines = []
    for low, high, total in zip(edges[:-1] + 1, edges[1:], totals.tolist()):
        bar = "#" * round(width * total / totals.max())
        lines.append(
            f"  {low:>{digits},} to {high:>{digits},}  {total / histogram.sequences:6.1%}  "
            f"{bar or ('.' if total else '')}".rstrip()
        )
    return lines


def picture(histogram: LengthHistogram) -> Bars:
    """Figure 1 of the paper for this data: how many sequences there are of each length."""
    S = histogram.max_sequence_length
    step = -(-S // 128)
    edges = list(range(0, S, step)) + [-(-S // step) * step]
    ranges = list(zip(edges, edges[1:]))
    totals = [int(histogram.counts[low + 1 : high + 1].sum()) for low, high in ranges]
    names = tuple(f"{high} tokens" if step == 1 else f"{low + 1} to {min(high, S)} tokens" for low, high in ranges)
    others = max(totals[:-1], default=0)
    # Where many sequences were cut to S, the bar of that length would make all others invisible.
    cut = others and totals[-1] > 3 * others
    last = f"{totals[-1]:,} sequences, {totals[-1] / max(1, histogram.sequences):.2%}"
    return Bars(
        "Sequences by length",
        names,
        Axis("sequences", most=1.5 * others if cut else None),
        (Series("sequences", tuple(map(float, totals))),),
        along=f"tokens of a sequence, in steps of {step}" if step > 1 else "tokens of a sequence",
        edges=tuple(map(float, edges)),
        notes=(f"The last bar ends beyond the picture: {names[-1]}: {last}.",) if cut else (),
        levels=(
            (f"mean {histogram.mean_length:.1f}", histogram.mean_length),
            (f"median {histogram.median_length}", float(histogram.median_length)),
        ),
    )
