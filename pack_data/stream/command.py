"""`packed-bert stream`: pack streams, compare with windows and open rows, and print gap, waiting times and speed."""

from __future__ import annotations

import json
import time
from functools import partial
from itertools import groupby, product
from typing import Any, Callable, Dict, Iterator, List, NamedTuple, Optional, Sequence, Tuple

import numpy as np

from pack_data import optimal
from pack_data.cli.command import (
    ArgumentParser,
    check_picture,
    count_from_zero,
    depth_text,
    parse_depth,
    positive_int,
    positive_ints,
    typed,
)
from pack_data.cli.terminal import progress_bar
from pack_data.cli.timing import timed
from pack_data.display.facts import Fact, Facts, as_json, depth_fact, printed, quantity
from pack_data.display.picture import Axis, Line, Lines, write
from pack_data.lengths.options import add_histogram_arguments, histogram_from
from pack_data.lengths.synthetic import synthetic_histogram
from pack_data.packing.histogram import LengthHistogram
from pack_data.packing.packing import prove
from pack_data.stream.baselines import WINDOW, open_rows, windows
from pack_data.stream.pack_stream import PackStream

_Row = Dict[str, Fact]
_GRID_DEPTHS = (3, 4, 8, 16, None)


class _Case(NamedTuple):
    """A stream to pack."""

    name: str
    lengths: np.ndarray  # int64, in order of arrival
    max_sequence_length: int


def _in_random_order(histogram: LengthHistogram, seed: int) -> np.ndarray:
    lengths = np.repeat(histogram.lengths, histogram.counts[histogram.lengths])
    np.random.default_rng(seed).shuffle(lengths)
    return lengths


def _grid_cases(sequences: int, seed: int) -> Iterator[_Case]:
    """Yield Wikipedia at 512, lengths as in instruction data at 4,096 and 8,192, and a stream that changes half-way."""

    def drawn(specification: str, number: int) -> Tuple[np.ndarray, int]:
        histogram = synthetic_histogram(f"{specification},n={number},seed={seed}")
        return _in_random_order(histogram, seed), histogram.max_sequence_length

    for name, specification in (
        ("Wikipedia 512", "sample:wikipedia_512"),
        ("instructions 4,096", "lognormal:mean=480,sigma=1.02,max=4096"),
        ("instructions 8,192", "lognormal:median=424.6,sigma=1.2,max=8192"),
    ):
        yield _Case(name, *drawn(specification, sequences))
    wikipedia, S = drawn("sample:wikipedia_512", max(1, sequences // 2))
    squad = LengthHistogram.published("squad_1_1_384")
    shares = squad.counts / squad.sequences
    rest = np.random.default_rng(seed).choice(len(shares), sequences - len(wikipedia), p=shares)
    yield _Case("Wikipedia, then SQuAD", np.concatenate([wikipedia, rest]), S)


def _lower_bound(case: _Case, depth: Optional[int]) -> int:
    """Return a proven lower bound for a packer that sees all lengths at once."""
    histogram = LengthHistogram.from_lengths(case.lengths, case.max_sequence_length)
    return prove(optimal.pack(histogram, max_sequences_per_pack=depth)).lower_bound


def _measured(
    case: _Case, depth: Optional[int], bound: int, way: str, buffer: int, pack: Callable[[], int]
) -> _Row:
    """Pack a stream in one way. pack: returns the number of packs; bound: their proven least number."""
    seconds, packs = timed(pack, time.process_time)
    return {
        "stream": Fact("stream", case.name),
        "depth": depth_fact(depth),
        "way": Fact("way", way),
        "buffer": Fact("buffer", buffer),
        "packs": quantity("packs", packs),
        "bound": Fact("bound", bound, "packs"),
        "gap": Fact("gap", packs / bound - 1, "of the bound"),
        "cpu_seconds": Fact("processor", seconds, "s"),
        "longest_wait": Fact("longest wait", None, "packs"),
        "mean_wait": Fact("mean wait", None, "packs"),
        "forced": Fact("forced", None),
        "sequences": quantity("sequences", len(case.lengths)),
    }


def _rows(
    case: _Case, depth: Optional[int], buffers: Sequence[int], longest_wait: Optional[int]
) -> Iterator[_Row]:
    """Yield the facts of every way to pack the stream at this depth, one after another."""
    bound = _lower_bound(case, depth)
    lengths = case.lengths.tolist()
    S = case.max_sequence_length
    for buffer in buffers:
        stream = PackStream(
            S,
            max_sequences_per_pack=depth,
            buffer_sequences=buffer,
            longest_wait=longest_wait,
        )
        # What waits at the end of the stream is packed, too.
        packs = stream.packs(enumerate(lengths))
        count = partial(sum, (1 for _ in packs))
        row = _measured(case, depth, bound, "stream", buffer, count)
        waits = stream.waits
        yield {
            **row,
            "longest_wait": Fact("longest wait", waits.longest, "packs"),
            "mean_wait": Fact("mean wait", waits.mean, "packs"),
            "forced": Fact("forced", waits.forced),
        }
    pack = partial(windows, lengths, S, depth, WINDOW)
    yield _measured(case, depth, bound, "windows", WINDOW, pack)
    for buffer in buffers:
        pack = partial(open_rows, lengths, S, depth, buffer)
        yield _measured(case, depth, bound, "open rows", buffer, pack)


def _facts(rows: Sequence[_Row]) -> Facts:
    """Return the rows with their speed in place of the time."""
    with_speed = []
    for row in rows:
        shown_row = dict(row)
        seconds = shown_row.pop("cpu_seconds").value or 1e-9
        sequences = shown_row.pop("sequences").value
        shown_row["speed"] = Fact("speed", sequences / seconds, "sequences/s")
        with_speed.append(shown_row)
    return Facts("Packs of a stream", with_speed, _NOTES)


_NOTES = (
    "gap: packs above the proven bound for all lengths at once, the packs at the end of the stream counted.",
    "speed: of processor time, of one core.",
    "longest wait, mean wait: packs that were closed while a sequence waited.",
    "forced: packs begun with the oldest sequence because it had waited so long.",
)


def _pictures(rows: Sequence[_Row]) -> List[Lines]:
    """Draw the gap against the buffer, a picture for each stream and a line for each depth."""
    pictures = []
    for stream, of_stream in groupby(rows, lambda row: row["stream"].value):
        lines = []
        for depth, of_depth in groupby(of_stream, lambda row: row["depth"]):
            ours = [row for row in of_depth if row["way"].value == "stream"]
            gaps = {row["buffer"].value: 100 * row["gap"].value for row in ours}
            buffers = sorted(gaps)
            y = tuple(gaps[buffer] for buffer in buffers)
            lines.append(Line(f"depth {depth_text(depth.value)}", tuple(map(float, buffers)), y))
        axes = Axis("sequences in the buffer", log=2), Axis("packs above the bound, %")
        pictures.append(Lines(stream, *axes, tuple(lines)))
    return pictures


def _parser() -> ArgumentParser:
    parser = ArgumentParser(
        prog=typed("stream"),
        description="Pack a stream of lengths in random order; compare with best fit in windows and first fit in open "
        "rows.",
    )
    add_histogram_arguments(parser)
    parser.add_argument(
        "--grid",
        action="store_true",
        help="instead of one histogram: Wikipedia at 512, lengths as in instruction data at 4,096 and 8,192, and "
        "Wikipedia followed by SQuAD, each at depths 3, 4, 8, 16 and unlimited",
    )
    parser.add_argument(
        "--sequences",
        type=positive_int,
        metavar="N",
        help="length of the stream (default: sequences of the histogram; with --grid 1M)",
    )
    parser.add_argument(
        "--max-sequences-per-pack",
        type=parse_depth,
        metavar="D",
        help="packing depth (default: unlimited)",
    )
    parser.add_argument(
        "--buffer",
        type=positive_ints,
        default=[1024],
        metavar="B[,B...]",
        help="sequences that may wait (default 1024)",
    )
    parser.add_argument(
        "--longest-wait",
        type=positive_int,
        metavar="W",
        help="packs a sequence may wait (default 4 B; at least B)",
    )
    parser.add_argument(
        "--seed", type=count_from_zero, default=0, help="seed of the order (default 0)"
    )
    parser.add_argument("--plot", metavar="FILE", help="draw the gap against the buffer")
    parser.add_argument(
        "--json", action="store_true", help="print one JSON object a line instead of the table"
    )
    parser.rare("--synthetic", "--grid", "--longest-wait", "--seed")
    return parser


def main(argv: Optional[Sequence[str]] = None) -> int:
    parser = _parser()
    args = parser.parse_args(argv)
    if args.plot:
        check_picture("--plot", args.plot, reads=[args.histogram])
    if args.grid and (args.synthetic or args.histogram != parser.get_default("histogram")):
        raise ValueError(
            "--grid has streams of its own; leave out --histogram and --synthetic, or leave out --grid"
        )
    cases, depths = _cases(args)

    rows: List[_Row] = []
    with progress_bar(len(cases) * len(depths), "streams") as bar:
        for case, depth in product(cases, depths):
            for row in _rows(case, depth, args.buffer, args.longest_wait):
                rows.append(row)
                if args.json:
                    print(json.dumps(as_json(Facts("", row))), flush=True)
            bar.update(1)
    if args.plot:
        write(_pictures(rows), args.plot)
    if not args.json:
        print(printed(_facts(rows)))
    return 0


def _cases(args: Any) -> Tuple[List[_Case], Sequence[Optional[int]]]:
    """Return the streams and the depths."""
    depth = args.max_sequences_per_pack
    if args.grid:
        cases = list(_grid_cases(args.sequences or 1_000_000, args.seed))
        return cases, _GRID_DEPTHS if depth is None else (depth,)
    histogram = histogram_from(args)
    lengths = _in_random_order(histogram, args.seed)[: args.sequences]
    return [_Case(histogram.name, lengths, histogram.max_sequence_length)], (depth,)
