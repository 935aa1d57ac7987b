"""`packed-bert stream`: packs streams, beside windows and open rows, and prints gap, waiting and speed."""

from __future__ import annotations

import json
import time
from functools import partial
from typing import Any, Callable, Dict, Iterator, List, NamedTuple, Optional, Sequence

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
    progress_bar,
    typed,
)
from pack_data.cli.timing import timed
from pack_data.display.picture import Axis, Line, Lines, write
from pack_data.display.table import Column, text_table
from pack_data.lengths.options import add_histogram_arguments, histogram_from
from pack_data.lengths.synthetic import synthetic_histogram
from pack_data.packing.histogram import LengthHistogram
from pack_data.packing.packing import prove
from pack_data.stream.baselines import WINDOW, open_rows, windows
from pack_data.stream.pack_stream import PackStream

GRID_DEPTHS = (3, 4, 8, 16, None)


class _Case(NamedTuple):
    """A stream to be packed."""

    name: str
    lengths: np.ndarray  # int64, in order of arrival
    max_sequence_length: int


class _Measured(NamedTuple):
    """One way to pack a stream at one depth.  Displacement: sequences; place in the packs - place in the stream."""

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
    short_displacement: Optional[float] = None  # mean, of the shortest quarter
    long_displacement: Optional[float] = None  # mean, of the longest quarter

    @property
    def gap(self) -> float:
        return self.packs / self.bound - 1


def _in_random_order(histogram: LengthHistogram, seed: int) -> np.ndarray:
    lengths = np.repeat(histogram.lengths, histogram.counts[histogram.lengths])
    np.random.default_rng(seed).shuffle(lengths)
    return lengths


def _grid_cases(sequences: int, seed: int) -> Iterator[_Case]:
    """Wikipedia at 512, lengths as in instruction data at 4,096 and 8,192, and a stream that changes half-way."""
    whole, first = f"n={sequences},seed={seed}", sequences // 2
    for name, specification in (
        ("Wikipedia 512", f"sample:wikipedia_512,{whole}"),
        ("instructions 4,096", f"lognormal:mean=480,sigma=1.02,max=4096,{whole}"),
        ("instructions 8,192", f"lognormal:median=424.6,sigma=1.2,max=8192,{whole}"),
    ):
        histogram = synthetic_histogram(specification)
        yield _Case(name, _in_random_order(histogram, seed), histogram.max_sequence_length)
    wikipedia = _in_random_order(synthetic_histogram(f"sample:wikipedia_512,n={max(1, first)},seed={seed}"), seed)
    squad = LengthHistogram.published("squad_1_1_384")
    rest = np.random.default_rng(seed).choice(
        len(squad.counts), sequences - len(wikipedia), p=squad.counts / squad.sequences
    )
    yield _Case("Wikipedia, then SQuAD", np.concatenate([wikipedia, rest]), 512)


def _lower_bound(case: _Case, depth: Optional[int]) -> int:
    """Packs that no packer of all these lengths can go below, proved."""
    histogram = LengthHistogram.from_lengths(case.lengths, case.max_sequence_length)
    return prove(optimal.pack(histogram, max_sequences_per_pack=depth)).lower_bound


def _measure(case: _Case, depth: Optional[int], bound: int, buffer: int, longest_wait: Optional[int]) -> _Measured:
    """Packs the stream; the packs at its end count as well."""
    lengths = case.lengths.tolist()
    stream = PackStream(
        case.max_sequence_length, max_sequences_per_pack=depth, buffer_sequences=buffer, longest_wait=longest_wait
    )
    seconds, order = timed(
        lambda: [example for pack in stream.packs(enumerate(lengths)) for example in pack.examples], time.process_time
    )
    moved = np.empty(len(order), np.int64)
    moved[order] = np.arange(len(order))
    moved -= np.arange(len(order))
    short, long = np.quantile(case.lengths, [0.25, 0.75])
    waits = stream.waits
    return _Measured(
        case.name,
        depth,
        "by price",
        buffer,
        waits.packs,
        bound,
        seconds,
        waits.longest,
        waits.mean,
        waits.forced,
        float(moved[case.lengths <= short].mean()),
        float(moved[case.lengths >= long].mean()),
    )


def _measure_other(
    case: _Case, depth: Optional[int], bound: int, way: str, buffer: int, packs: Callable[..., int]
) -> _Measured:
    lengths, S = case.lengths.tolist(), case.max_sequence_length
    seconds, made = timed(lambda: packs(lengths, S, depth, buffer), time.process_time)
    return _Measured(case.name, depth, way, buffer, made, bound, seconds)


COLUMNS = (
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
    (Column("short_displacement", "short moved", form=",.0f"), 11),
    (Column("long_displacement", "long moved", form=",.0f"), 10),
)


def _print_row(made: Optional[_Measured], sequences: int = 0) -> None:
    """A row of the table as soon as it is known; None: the heading."""
    cells = [column.title for column, _ in COLUMNS]
    if made is not None:
        rate = sequences / max(made.cpu_seconds, 1e-9)
        row = {
            **_as_json(made, sequences),
            "depth": depth_text(made.depth),
            "above": made.packs - made.bound,
            "rate": rate,
        }
        cells = [column.shown(row) for column, _ in COLUMNS]
    print("\n".join(text_table([cells], left=(0, 2), widths=[width for _, width in COLUMNS])), flush=True)


LEGEND = """
gap: packs above the proven bound for all lengths at once, the packs at the end of the stream counted. sequences/s: of
processor time, of one core. longest wait, mean wait: packs that were closed while a sequence waited. forced: packs
begun with the oldest sequence because it had waited so long. short moved, long moved: mean place in the packs minus
place in the stream, in sequences, of the shortest and of the longest quarter."""


def _pictures(measured: Sequence[_Measured]) -> List[Lines]:
    """The gap against the buffer, for each stream, a line for each depth."""
    by_price = [made for made in measured if made.way == "by price"]
    found = []
    for stream in dict.fromkeys(made.stream for made in by_price):
        lines = []
        for depth in dict.fromkeys(made.depth for made in by_price if made.stream == stream):
            own = [made for made in by_price if (made.stream, made.depth) == (stream, depth)]
            x, y = zip(*sorted((float(made.buffer), 100 * made.gap) for made in own))
            lines.append(Line(f"depth {depth_text(depth)}", x, y))
        axes = Axis("sequences in the buffer", log=2), Axis("packs above the bound, %")
        found.append(Lines(stream, *axes, tuple(lines)))
    return found


def main(argv: Optional[Sequence[str]] = None) -> int:
    parser = ArgumentParser(
        prog=typed("stream"),
        description="Packs a stream of lengths in random order, beside best fit in windows and first fit in open rows.",
    )
    add_histogram_arguments(parser)
    parser.add_argument(
        "--grid",
        action="store_true",
        help="instead of one histogram: Wikipedia at 512, lengths as in instruction data at 4,096 and 8,192, and "
        "Wikipedia followed by SQuAD, each at depths 3, 4, 8, 16 and unlimited",
    )
    parser.add_argument(
        "--sequences", type=positive_int, metavar="N", help="of the stream (default: those of the histogram; grid: 1M)"
    )
    parser.add_argument(
        "--max-sequences-per-pack", type=parse_depth, metavar="D", help="packing depth; default 'unlimited'"
    )
    parser.add_argument(
        "--buffer",
        type=positive_ints,
        default=[1024],
        metavar="B[,B...]",
        help="sequences that may wait (default 1024)",
    )
    parser.add_argument(
        "--longest-wait", type=positive_int, metavar="W", help="packs a sequence may wait (default 4 B; at least B)"
    )
    parser.add_argument("--seed", type=count_from_zero, default=0, help="of the order (default 0)")
    parser.add_argument("--plot", metavar="FILE", help="a picture of gap against buffer")
    parser.add_argument("--json", action="store_true", help="one JSON object a line instead of the table")
    parser.rare("--synthetic", "--grid", "--longest-wait", "--seed")
    args = parser.parse_args(argv)
    if args.plot:
        check_picture("--plot", args.plot, reads=[args.histogram])
    if args.grid and (args.synthetic or args.histogram != parser.get_default("histogram")):
        raise ValueError("--grid has its own streams; leave out --histogram and --synthetic, or --grid")

    if args.grid:
        cases = list(_grid_cases(args.sequences or 1_000_000, args.seed))
        chosen = args.max_sequences_per_pack
        depths: Sequence[Optional[int]] = GRID_DEPTHS if chosen is None else (chosen,)
    else:
        histogram = histogram_from(args)
        lengths = _in_random_order(histogram, args.seed)[: args.sequences]
        cases = [_Case(histogram.name, lengths, histogram.max_sequence_length)]
        depths = (args.max_sequences_per_pack,)
    measured: List[_Measured] = []
    if not args.json:
        _print_row(None)
    with progress_bar(len(cases) * len(depths), "streams") as bar:
        for case in cases:
            for depth in depths:
                bound = _lower_bound(case, depth)
                for way in _ways(case, depth, bound, args):
                    made = way()
                    measured.append(made)
                    if args.json:
                        print(json.dumps(_as_json(made, len(case.lengths))), flush=True)
                    else:
                        _print_row(made, len(case.lengths))
                bar.update(1)
    if args.plot:
        write(_pictures(measured), args.plot)
    if not args.json:
        print(LEGEND)
    return 0


def _ways(case: _Case, depth: Optional[int], bound: int, args: Any) -> Iterator[Callable[[], _Measured]]:
    for buffer in args.buffer:
        yield partial(_measure, case, depth, bound, buffer, args.longest_wait)
    yield partial(_measure_other, case, depth, bound, "windows", WINDOW, windows)
    for buffer in args.buffer:
        yield partial(_measure_other, case, depth, bound, "open rows", buffer, open_rows)


def _as_json(made: _Measured, sequences: int) -> Dict[str, Any]:
    return {**made._asdict(), "sequences": sequences, "gap": made.gap}
