"""All packers side by side, with the paper's metrics and ours: `packed-bert compare`.

The metrics of the paper's section 4.1: packs, all tokens (slots), padding tokens, solve time, strategies used,
efficiency, speed-up over not packing, packing factor. Ours: how far above the proven lower bound of that depth, and the
peak of memory during the solve.
"""

from __future__ import annotations

import csv
import json
import sys
from dataclasses import asdict, fields, replace
from pathlib import Path
from typing import Callable, Dict, List, Optional, Sequence, Tuple

from pack_data.cli.command import (
    ArgumentParser,
    check_output,
    check_picture,
    depth_text,
    parse_depth,
    positive_int,
    typed,
)
from pack_data.cli.terminal import progress_bar
from pack_data.display.facts import Fact, Facts, depth_fact, number, printed, quantities, quantity
from pack_data.display.picture import HeatMap, write
from pack_data.inspection.one_packer import Job, Row, measure_each
from pack_data.lengths.options import add_histogram_arguments, histogram_from
from pack_data.packers import PACKERS, packs_at_depth
from pack_data.packing.histogram import LengthHistogram
from pack_data.reading.durable import replacing
from pack_data.reading.words import counted
from pack_data.store.quantities import padding_share

ALGORITHMS = ("none", "sort") + tuple(name for name in PACKERS if name != "none")
_DEPTHS = (2, 3, 4, 8, None)
_NOTES = (
    "gap: packs above the lower bound.",
    "SORT makes batches of similar length, each padded to its longest: no packing, and many engines.",
)
_QUANTITIES = (
    "packs padding_tokens efficiency packing_factor speedup strategies lower_bound gap solve_seconds"
).split()
_PAPER = "paper: efficiency %, factor, realised"
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


def compare(
    histogram: LengthHistogram,
    depths: Sequence[Optional[int]],
    algorithms: Sequence[str] = ALGORITHMS,
    *,
    batch_size: int = 256,
    isolated: bool = False,
) -> List[Row]:
    """Pack a histogram with every packer at every depth.

    The optimal packer always runs, because every packing is compared with its bound.

    Args:
        histogram: what is packed.
        depths: packing depths, None for unlimited.
        algorithms: some of `ALGORITHMS`.
        batch_size: rows in a batch of SORT.
        isolated: run each packer in a process of its own, so that its memory is measured alone.

    Returns:
        One row for each packer and depth, by depth.
    """
    jobs = _jobs(algorithms, depths)
    rows: List[Row] = []
    with progress_bar(len(jobs), histogram.name or "compare", unit=" packings") as bar:
        for row in measure_each(jobs, histogram, batch_size, isolated=isolated):
            rows.append(row)
            bar.set_postfix_str(f"{row.algorithm} depth {depth_text(row.max_sequences_per_pack)}")
            bar.update()

    bounds = {
        row.max_sequences_per_pack: row.lower_bound for row in rows if row.algorithm == "optimal"
    }
    for place, row in enumerate(rows):
        bound = bounds.get(row.max_sequences_per_pack)
        if row.lower_bound is None and bound is not None and row.algorithm != "sort":
            rows[place] = replace(row, lower_bound=bound, gap=row.packs - bound)
    rows = [row for row in rows if row.algorithm in algorithms]
    return sorted(
        rows,
        key=lambda row: (
            row.max_sequences_per_pack or sys.maxsize,
            ALGORITHMS.index(row.algorithm),
        ),
    )


def _jobs(algorithms: Sequence[str], depths: Sequence[Optional[int]]) -> List[Job]:
    """Return what to measure: NONE and SORT have no depth, and GREEDY is the paper's only without a limit."""
    jobs: List[Job] = [(name, 1) for name in ("none", "sort") if name in algorithms]
    packers = [name for name in algorithms if name not in ("none", "sort", "greedy", "optimal")]
    for depth in depths:
        jobs += [(name, depth) for name in ("optimal", *packers) if packs_at_depth(name, depth)]
    if "greedy" in algorithms:
        jobs.append(("greedy", None))
    return jobs


# ---- tables and pictures ---------------------------------------------------------------------------------------------


def packers_facts(title: str, rows: Sequence[Row]) -> Facts:
    """Return the rows of `compare` as a table."""
    return Facts(title, list(map(_facts_of, rows)), _NOTES, "packers")


def _facts_of(row: Row) -> Dict[str, Fact]:
    facts = {
        "algorithm": Fact("packer", row.algorithm),
        "max_sequences_per_pack": depth_fact(row.max_sequences_per_pack),
    }
    return {**facts, **quantities(row, dict.fromkeys(_QUANTITIES, ""))}


def _printed(histogram: LengthHistogram, rows: Sequence[Row]) -> str:
    """Return the table with memory and, if the paper has this histogram, the paper's Table 1."""
    title = (
        f"{histogram.name}  {counted(histogram.sequences, 'sequence')}, {counted(histogram.tokens, 'token')}, "
        f"packs of {histogram.max_sequence_length} slots"
    )
    table = []
    for row in rows:
        facts = {**_facts_of(row), "peak_memory": quantity("peak_memory", row.peak_memory)}
        if histogram.name == "wikipedia_512":
            quoted = _TABLE_1.get((row.algorithm, row.max_sequences_per_pack), "")
            facts["paper"] = Fact(_PAPER, quoted)
        table.append(facts)
    most = number(histogram.theoretical_speedup, "times")
    speed_up = f"speed-up: slots of one sequence a row over slots; at most {most}."
    return printed(Facts(title, table, (speed_up, *_NOTES)))


def heat_maps(rows: Sequence[Row]) -> Tuple[HeatMap, HeatMap]:
    """Draw padding, and packs above the proven bound, of every packer at every depth. rows: `compare`'s."""
    padding = _heat_map(
        rows,
        "Padding by packer and depth, in % of the slots",
        lambda row: 100.0 * padding_share(row.slots - row.padding_tokens, row.slots),
    )
    gap = _heat_map(
        rows,
        "Packs above the proven least of the depth, in %",
        lambda row: (
            100.0 * row.gap / row.lower_bound if row.gap is not None and row.lower_bound else None
        ),
    )
    note = "0 is proven optimal: no packing of that depth has fewer packs."
    return padding, gap._replace(notes=(note,))


def _heat_map(rows: Sequence[Row], title: str, value: Callable[[Row], Optional[float]]) -> HeatMap:
    packers = [row for row in rows if row.algorithm not in ("none", "sort")]
    depths = list(dict.fromkeys(row.max_sequences_per_pack for row in packers))
    values: Dict[str, Dict[Optional[int], float]] = {}
    for row in packers:
        number = value(row)
        if number is not None:
            values.setdefault(row.algorithm, {})[row.max_sequences_per_pack] = number
    return HeatMap(
        title,
        tuple(name.upper() for name in values),
        tuple(map(depth_text, depths)),
        tuple(tuple(map(by_depth.get, depths)) for by_depth in values.values()),
        form=".3f",
        along="packing depth: sequences in a pack, at most",
        down="packer",
    )


# ---- the command -----------------------------------------------------------------------------------------------------


def main(argv: Optional[Sequence[str]] = None) -> int:
    """Compare packers and print, write and draw what was measured."""
    args = _parser().parse_args(argv)
    algorithms = args.packers.split(",")
    for name in algorithms:
        if name not in ALGORITHMS:
            raise ValueError(
                f"--packers: no packer is called {name!r}; use some of {', '.join(ALGORITHMS)}"
            )
    if args.csv:
        check_output("--csv", args.csv, reads=[args.histogram])
    if args.plot:
        check_picture("--plot", args.plot, reads=[args.histogram])

    histogram = histogram_from(args)
    rows = compare(histogram, args.depths, algorithms, batch_size=args.batch_size, isolated=True)
    if args.json:
        report = {
            "histogram": histogram.name,
            "max_sequence_length": histogram.max_sequence_length,
            "sequences": histogram.sequences,
            "tokens": histogram.tokens,
            "rows": [asdict(row) for row in rows],
        }
        print(json.dumps([report]))
    else:
        print(_printed(histogram, rows))
    if args.csv:
        _write_csv(args.csv, histogram.name, rows)
    if args.plot:
        padding, gap = heat_maps(rows)
        write([padding, gap] if gap.rows else [padding], args.plot)
    return 0


def _parser() -> ArgumentParser:
    parser = ArgumentParser(
        prog=typed("compare"), description="Every packer on one histogram, side by side."
    )
    add_histogram_arguments(parser)
    parser.add_argument(
        "--depths",
        type=lambda text: tuple(parse_depth(part) for part in text.split(",")),
        default=_DEPTHS,
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
        "--batch-size",
        type=positive_int,
        default=256,
        metavar="N",
        help="rows in a batch of SORT; default 256",
    )
    parser.add_argument(
        "--json", action="store_true", help="print one JSON object instead of the table"
    )
    parser.add_argument("--csv", metavar="FILE", help="write the rows as CSV")
    parser.add_argument(
        "--plot",
        metavar="FILE",
        help="draw padding by packer and depth, and the gap, as .png, .pdf or .svg",
    )
    parser.rare("--synthetic", "--batch-size")
    return parser


def _write_csv(path: str, name: str, rows: Sequence[Row]) -> None:
    """Write a line for each row, with the histogram's name first; unlimited depth and unknown values are empty."""
    with replacing(Path(path)) as temporary, open(
        temporary, "w", newline="", encoding="utf-8"
    ) as file:
        writer = csv.writer(file)
        writer.writerow(["histogram"] + [column.name for column in fields(Row)])
        writer.writerows([name, *asdict(row).values()] for row in rows)
