"""All packers side by side, with the paper's metrics and ours: `packed-bert compare`.

The metrics of the paper's section 4.1: packs, all tokens (slots), padding tokens, solve time, strategies used,
efficiency, speed-up over not packing, packing factor.  Ours: how far above the proven lower bound of that depth, and
the peak of memory during the solve.
"""

from __future__ import annotations

import csv
import json
import multiprocessing
import sys
from dataclasses import asdict, fields, replace
from typing import Callable, Dict, List, NamedTuple, Optional, Sequence, Tuple

from pack_data.cli.command import (
    ArgumentParser,
    check_output,
    check_picture,
    depth_text,
    parse_depth,
    positive_int,
    progress_bar,
    typed,
)
from pack_data.display.picture import HeatMap, write
from pack_data.display.table import text_table
from pack_data.inspection.one_packer import Job, Row, measure, measure_apart
from pack_data.lengths.options import add_histogram_arguments, histogram_from
from pack_data.packers import PACKERS, packs_at_depth
from pack_data.packing.histogram import LengthHistogram

ALGORITHMS = ("none", "sort") + tuple(name for name in PACKERS if name != "none")

# Table 1 of the paper, Wikipedia at 512 on an IPU-M2000: efficiency in percent, packing factor, realised speed-up.
_TABLE_1 = {
    ("none", 1): "50.0  1.00  1.000",
    ("sort", 1): "99.9  2.00  << 1",
    ("greedy", None): "~78   ~1.6  ~1.5",
    ("spfhp", 2): "80.5  1.61  1.544",
    ("spfhp", 3): "89.4  1.79  1.716",
    ("nnlshp", 3): "99.7  2.00  1.913",
    ("spfhp", 4): "93.9  1.88  1.803",
    ("spfhp", 8): "98.9  1.98  1.895",
    ("spfhp", None): "99.6  1.99  1.905",
}


class Case(NamedTuple):
    """A histogram, and the packing depths to compare packers at."""

    histogram: LengthHistogram
    depths: Tuple[Optional[int], ...]


def plan(algorithms: Sequence[str], depths: Sequence[Optional[int]]) -> List[Job]:
    """What to measure, by depth: NONE and SORT have no depth, and GREEDY is the paper's only without a limit."""
    jobs: List[Job] = [(name, 1) for name in ("none", "sort") if name in algorithms]
    for depth in depths:
        for name in ("optimal",) + tuple(
            name for name in algorithms if name not in ("none", "sort", "greedy", "optimal")
        ):
            if packs_at_depth(name, depth):
                jobs.append((name, depth))
    if "greedy" in algorithms:
        jobs.append(("greedy", None))
    return jobs


def compare(
    case: Case, algorithms: Sequence[str] = ALGORITHMS, *, batch_size: int = 256, isolated: bool = False
) -> List[Row]:
    """One row for each packer and depth, by depth.  `optimal` always runs: every row is compared with its bound.

    isolated: each packer runs in a process of its own, so that its memory is measured alone.
    """
    jobs = plan(algorithms, case.depths)
    rows: List[Row] = []
    with progress_bar(len(jobs), case.histogram.name or "compare", unit=" packings") as bar:
        apart = isolated and "forkserver" in multiprocessing.get_all_start_methods()
        here = (measure(name, case.histogram, depth, batch_size) for name, depth in jobs)
        for row in measure_apart(jobs, case.histogram, batch_size) if apart else here:
            rows.append(row)
            bar.set_postfix_str(f"{row.algorithm} depth {depth_text(row.max_sequences_per_pack)}")
            bar.update()
    bounds = {row.max_sequences_per_pack: row.lower_bound for row in rows if row.algorithm == "optimal"}
    order = {name: position for position, name in enumerate(ALGORITHMS)}
    for place, row in enumerate(rows):
        bound = bounds.get(row.max_sequences_per_pack)
        if row.lower_bound is None and bound is not None and row.algorithm != "sort":
            rows[place] = replace(row, lower_bound=bound, gap=row.packs - bound)
    rows = [row for row in rows if row.algorithm in algorithms]
    return sorted(rows, key=lambda row: (row.max_sequences_per_pack or sys.maxsize, order[row.algorithm]))


# ---- what is printed and drawn ---------------------------------------------------------------------------------------


def table(case: Case, rows: Sequence[Row]) -> str:
    """The rows as text: a block for each depth, with a mark at the fewest packs of each block."""
    histogram = case.histogram
    title = (
        f"{histogram.name}  {histogram.sequences:,} sequences, {histogram.tokens:,} tokens, packs of "
        f"{histogram.max_sequence_length} slots; speed-up at most {histogram.theoretical_speedup:.3f}"
    )
    quoted = histogram.name == "wikipedia_512"
    head = "packer,packs,all tokens,padding,strategies,efficiency,factor,speed-up,above bound,,solved in,memory"
    heads = head.split(",") + (["paper: EFF %, p, realised"] if quoted else [])
    blocks: Dict[Optional[int], List[List[str]]] = {}
    for row in rows:
        share = f"{row.gap / row.lower_bound:.2%}" if row.gap is not None and row.lower_bound else ""
        cells = [
            row.algorithm.upper(),
            f"{row.packs:,}",
            _millions(row.slots),
            _millions(row.padding_tokens),
            "-" if row.strategies is None else f"{row.strategies:,}",
            f"{row.efficiency:.3%}",
            f"{row.packing_factor:.3f}",
            f"{row.speedup:.3f}",
            "-" if row.gap is None else f"{row.gap:,}",
            share,
            _time(row.solve_seconds),
            "-" if row.peak_memory is None else f"{row.peak_memory / 2**20:,.1f} MiB",
        ]
        if quoted:
            cells.append(_TABLE_1.get((row.algorithm, row.max_sequences_per_pack), ""))
        blocks.setdefault(row.max_sequences_per_pack, []).append(cells)
    heading, *written = text_table(
        [heads] + [cells for block in blocks.values() for cells in block], left={0, len(heads) - 1} if quoted else {0}
    )
    texts = iter(written)
    lines = [title, "", "   " + heading, "-" * (3 + len(heading))]
    for depth in blocks:
        members = [row for row in rows if row.max_sequences_per_pack == depth]
        bound = next((row.lower_bound for row in members if row.lower_bound is not None), None)
        lines.append(
            f"depth {depth_text(depth)}" + (f": no packing has fewer than {bound:,} packs" if bound is not None else "")
        )
        best = min((row.packs for row in members if row.algorithm not in ("none", "sort")), default=None)
        lines += [f" {'*' if row.packs == best else ' '} {next(texts)}" for row in members]
    lines += [
        "",
        "* fewest packs of this depth.  Above bound: packs over the proven bound.  Memory: highest during the solve.",
    ]
    if any(row.algorithm == "sort" for row in rows):
        lines.append(
            "SORT pads each batch to its longest sequence: no packing, and a static engine compiles each length apart."
        )
    return "\n".join(lines)


def _millions(tokens: int) -> str:
    return f"{tokens / 1e6:,.1f}M" if tokens >= 10_000_000 else f"{tokens:,}"


def _time(seconds: float) -> str:
    return f"{seconds * 1e3:,.1f} ms" if seconds < 1 else f"{seconds:,.2f} s"


def _write_csv(path: str, case: Case, rows: Sequence[Row]) -> None:
    """A line for each row, with the name of its histogram in front; unlimited depth and unknown values are empty."""
    with open(path, "w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        writer.writerow(["histogram"] + [column.name for column in fields(Row)])
        writer.writerows([case.histogram.name, *asdict(row).values()] for row in rows)


def _heat_map(rows: Sequence[Row], title: str, value: Callable[[Row], Optional[float]], *notes: str) -> HeatMap:
    """A value of every packer at every depth. rows: `compare`'s."""
    own = [row for row in rows if row.algorithm not in ("none", "sort")]
    depths = list(dict.fromkeys(row.max_sequences_per_pack for row in own))
    cells = {(row.algorithm, row.max_sequences_per_pack): value(row) for row in own}
    names = list(dict.fromkeys(name for (name, _), cell in cells.items() if cell is not None))
    return HeatMap(
        title,
        tuple(name.upper() for name in names),
        tuple(map(depth_text, depths)),
        tuple(tuple(cells.get((name, depth)) for depth in depths) for name in names),
        ".3f",
        "packing depth: sequences in a pack, at most",
        "packer",
        notes,
    )


def padding_map(rows: Sequence[Row]) -> HeatMap:
    title = "Padding by packer and depth, in % of the slots"
    return _heat_map(rows, title, lambda row: 100.0 * (1.0 - row.efficiency))


def gap_map(rows: Sequence[Row]) -> HeatMap:
    return _heat_map(
        rows,
        "Packs above the proven least of the depth, in %",
        lambda row: 100.0 * row.gap / row.lower_bound if row.gap is not None and row.lower_bound else None,
        "0 is proven optimal: no packing of that depth has fewer packs.",
    )


# ---- the command -----------------------------------------------------------------------------------------------------


def main(argv: Optional[Sequence[str]] = None) -> int:
    parser = ArgumentParser(prog=typed("compare"), description="Every packer on one histogram, side by side.")
    add_histogram_arguments(parser)
    parser.add_argument(
        "--depths",
        type=lambda text: tuple(parse_depth(part) for part in text.split(",")),
        default=(2, 3, 4, 8, None),
        metavar="D,D,...",
        help="packing depths; default 2,3,4,8,unlimited",
    )
    parser.add_argument(
        "--packers",
        metavar="NAME,...",
        default=",".join(ALGORITHMS),
        help=f"some of {','.join(ALGORITHMS)}; default all",
    )
    parser.add_argument(
        "--batch-size", type=positive_int, default=256, metavar="N", help="rows in a batch of SORT; default 256"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of the table")
    parser.add_argument("--csv", metavar="FILE", help="write the rows as CSV")
    parser.add_argument(
        "--plot", metavar="FILE", help="draw padding by packer and depth, and the gap, as .png, .pdf or .svg"
    )
    parser.rare("--synthetic", "--batch-size")
    args = parser.parse_args(argv)
    algorithms = args.packers.split(",")
    unknown = [name for name in algorithms if name not in ALGORITHMS]
    if unknown:
        raise ValueError(f"--packers: no packer is called {unknown[0]!r}; there are {', '.join(ALGORITHMS)}")
    if args.csv:
        check_output("--csv", args.csv, reads=[args.histogram])
    if args.plot:
        check_picture("--plot", args.plot, reads=[args.histogram])

    case = Case(histogram_from(args), args.depths or (2, 3, 4, 8, None))
    rows = compare(case, algorithms, batch_size=args.batch_size, isolated=True)
    if args.json:
        histogram = case.histogram
        found = {
            "histogram": histogram.name,
            "max_sequence_length": histogram.max_sequence_length,
            "sequences": histogram.sequences,
            "tokens": histogram.tokens,
            "rows": [asdict(row) for row in rows],
        }
        print(json.dumps([found]))
    else:
        print(table(case, rows))
    if args.csv:
        _write_csv(args.csv, case, rows)
    if args.plot:
        pictures = [picture for picture in (padding_map(rows), gap_map(rows)) if picture.rows]
        write(pictures or [padding_map(rows)], args.plot)
    return 0
