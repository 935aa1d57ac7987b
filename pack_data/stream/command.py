"""`packed-bert stream`: pack streams, compare with windows and open rows, and print gap, waiting times and speed."""

from __future__ import annotations

import json
import time
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
from pack_data.display.picture import Axis, Line, Lines, write
from pack_data.display.table import Column, text_table
from pack_data.lengths.options import add_histogram_arguments, histogram_from
from pack_data.lengths.synthetic import synthetic_histogram
from pack_data.packing.histogram import LengthHistogram
from pack_data.packing.packing import prove
from pack_data.stream.baselines import WINDOW, open_rows, windows
from pack_data.stream.pack_stream import PackStream

_GRID_DEPTHS = (3, 4, 8, 16, None)


class _Case(NamedTuple):
    """A stream to pack."""

    name: str
    lengths: np.ndarray  # int64, in order of arrival
    max_sequence_length: int


class _Measured(NamedTuple):
    """Results of one way to pack a stream at one depth."""

    stream: str
    depth: Optional[int]
    way: str
    buffer: int
    packs: int
    bound: int  # proven, for a packer that sees all lengths at once
    cpu_seconds: float
    longest_wait: Optional[int] = None  # packs
    mean_wait: Optional[float] = None
    forced: Optional[int] = None

    def as_json(self, sequences: int) -> Dict[str, Any]:
        """Return the values for one line of JSON."""
        return {**self._asdict(), "sequences": sequences, "gap": self.gap}

    @property
    def gap(self) -> float:
        """Packs above the bound, as a share of it."""
        return self.packs / self.bound - 1


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


def _measure(
    case: _Case, depth: Optional[int], bound: int, buffer: int, longest_wait: Optional[int]
) -> _Measured:
    """Pack the stream by `PackStream`, including what waits at its end."""
    lengths = case.lengths.tolist()
    stream = PackStream(
        case.max_sequence_length,
        max_sequences_per_pack=depth,
        buffer_sequences=buffer,
        longest_wait=longest_wait,
    )
    seconds, _ = timed(lambda: list(stream.packs(enumerate(lengths))), time.process_time)
    waits = stream.waits
    return _Measured(
        case.name,
        depth,
        "stream",
        buffer,
        waits.packs,
        bound,
        seconds,
        waits.longest,
        waits.mean,
        waits.forced,
    )


def _measure_other(
    case: _Case, depth: Optional[int], bound: int, way: str, buffer: int, packs: Callable[..., int]
) -> _Measured:
    """Count the packs of another way."""
    lengths = case.lengths.tolist()
    seconds, number = timed(
        lambda: packs(lengths, case.max_sequence_length, depth, buffer), time.process_time
    )
    return _Measured(case.name, depth, way, buffer, number, bound, seconds)


_COLUMNS = (
    (Column("stream", "stream"), 21),
    (Column("depth", "depth"), 9),
    (Column("way", "way"), 9),
    (Column("buffer", "buffer", form=","), 6),
    (Column("packs", "packs", form=","), 9),
    (Column("above", "above bound", form=","), 11),
    (Column("gap", "gap", form=".3%"), 8),
    (Column("rate", "sequences/s", form=",.0f"), 11),
    (Column("longest_wait", "longest wait", form=",.0f"), 12),
    (Column("mean_wait", "mean wait", form=",.0f"), 9),
    (Column("forced", "forced", form=",.0f"), 6),
)


def _print_row(measured: _Measured, sequences: int) -> None:
    """Print a row of the table as soon as it is known."""
    row = measured.as_json(sequences)
    row["depth"] = depth_text(measured.depth)
    row["above"] = measured.packs - measured.bound
    row["rate"] = sequences / max(measured.cpu_seconds, 1e-9)
    _print_cells([column.shown(row) for column, _ in _COLUMNS])


def _print_cells(cells: List[str]) -> None:
    print(
        "\n".join(text_table([cells], left=(0, 2), widths=[width for _, width in _COLUMNS])),
        flush=True,
    )


_LEGEND = """
gap: packs above the proven bound for all lengths at once, the packs at the end of the stream counted. sequences/s: of
processor time, of one core. longest wait, mean wait: packs that were closed while a sequence waited. forced: packs
begun with the oldest sequence because it had waited so long."""


def _pictures(measured: Sequence[_Measured]) -> List[Lines]:
    """Draw the gap against the buffer, a picture for each stream and a line for each depth."""
    pictures = []
    for stream, of_stream in groupby(measured, lambda result: result.stream):
        lines = []
        for depth, results in groupby(of_stream, lambda result: result.depth):
            gaps = {result.buffer: result.gap for result in results if result.way == "stream"}
            buffers = sorted(gaps)
            y = [100 * gaps[buffer] for buffer in buffers]
            lines.append(Line(f"depth {depth_text(depth)}", tuple(map(float, buffers)), tuple(y)))
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

    results: List[_Measured] = []
    if not args.json:
        _print_cells([column.title for column, _ in _COLUMNS])
    with progress_bar(len(cases) * len(depths), "streams") as bar:
        for case, depth in product(cases, depths):
            for result in _results(case, depth, args.buffer, args.longest_wait):
                results.append(result)
                if args.json:
                    print(json.dumps(result.as_json(len(case.lengths))), flush=True)
                else:
                    _print_row(result, len(case.lengths))
            bar.update(1)
    if args.plot:
        write(_pictures(results), args.plot)
    if not args.json:
        print(_LEGEND)
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


def _results(
    case: _Case, depth: Optional[int], buffers: Sequence[int], longest_wait: Optional[int]
) -> Iterator[_Measured]:
    """Yield the results of every way to pack the stream at this depth, one after another."""
    bound = _lower_bound(case, depth)
    for buffer in buffers:
        yield _measure(case, depth, bound, buffer, longest_wait)
    yield _measure_other(case, depth, bound, "windows", WINDOW, windows)
    for buffer in buffers:
        yield _measure_other(case, depth, bound, "open rows", buffer, open_rows)
