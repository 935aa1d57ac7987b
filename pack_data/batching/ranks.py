"""`python -m pack_data.batching.ranks`: how evenly the ranks of each step are loaded, beside the least possible."""

from __future__ import annotations

import json
import time
from typing import Any, Dict, List, NamedTuple, Optional, Sequence

import numpy as np

from pack_data.batching.balanced import StepCost, karmarkar_karp, lower_bound
from pack_data.batching.plans import BatchOptions, EpochPlan, get_way
from pack_data.cli.command import ArgumentParser, count_from_zero, positive_int, progress_bar, run_main
from pack_data.display.table import text_table
from pack_data.lengths.options import add_histogram_arguments, histogram_from

WAY = "OptimalPacking+PosID"
_NEAR = 1e-3  # of the lower bound
_LEGEND = """
A step takes as long as its longest rank; excess: how far that is above the lower bound, which is the mean of the ranks
or the most expensive sequence. idle: share of the ranks' time spent waiting, of the whole epoch. over: rows with more
tokens than they may have. by rows: plans that level the squared lengths of whole rows; levelled: plans with this cost;
differencing: Karmarkar and Karp's method on the sequences of the first ten levelled steps; there `over` is of ranks."""


class _Evenness(NamedTuple):
    """The steps of an epoch, without its last one."""

    steps: int
    excess: float  # largest rank / lower bound - 1, mean over the steps
    largest: float  # of the steps
    near: float  # share of the steps within NEAR of their lower bound
    idle: float  # share of the ranks' time in which they wait, over the whole epoch
    over: float  # share of the rows, or of the ranks where there are no rows, with more tokens than they may have


def evenness(plan: EpochPlan, lengths: np.ndarray, options: BatchOptions, cost: StepCost) -> _Evenness:
    """Of a plan's steps; the last one, which has what is left, counts only where it is the only one."""
    costs = cost.of(lengths)
    loads = plan.loads(costs)
    bounds = []
    for step in range(plan.steps):
        first, last = (plan.rows[plan.batches[at * plan.ranks]] for at in (step, step + 1))
        bounds.append(lower_bound(costs[plan.example[first:last]], plan.ranks))
    counted = slice(max(1, plan.steps - 1))
    row_tokens = np.add.reduceat(lengths[plan.example], plan.rows[:-1])
    over = float((row_tokens > options.max_sequence_length).mean())
    idle = 1 - float(loads.mean(axis=1).sum() / loads.max(axis=1).sum())
    return _evenness((loads.max(axis=1) / bounds)[counted], idle, over)


def _evenness(ratios: np.ndarray, idle: float, over: float) -> _Evenness:
    excess = np.maximum(ratios - 1, 0.0)  # a sum of costs rounds
    return _Evenness(
        len(excess), float(excess.mean()), float(excess.max()), float((excess <= _NEAR).mean()), idle, over
    )


def differencing(
    plan: EpochPlan, lengths: np.ndarray, options: BatchOptions, cost: StepCost, most_steps: int
) -> _Evenness:
    """The first steps' sequences dealt to the ranks by their costs alone."""
    ratios, over, mean, longest = [], [], 0.0, 0.0
    for step in range(min(most_steps, plan.steps)):
        first, last = (plan.rows[plan.batches[at * plan.ranks]] for at in (step, step + 1))
        numbers = plan.example[first:last]
        costs, tokens = cost.of(lengths[numbers]), lengths[numbers]
        parts = karmarkar_karp(costs.tolist(), plan.ranks)
        most = max(float(costs[part].sum()) for part in parts)
        ratios.append(most / lower_bound(costs, plan.ranks))
        mean, longest = mean + float(costs.sum()) / plan.ranks, longest + most
        over += [int(tokens[part].sum()) > options.capacity for part in parts]
    return _evenness(np.array(ratios), 1 - mean / longest, float(np.mean(over)))


def main(argv: Optional[Sequence[str]] = None) -> int:
    parser = ArgumentParser(prog="python -m pack_data.batching.ranks", description=__doc__.split(": ")[1])
    add_histogram_arguments(parser)
    parser.add_argument("--examples", type=positive_int, default=100_000, metavar="N", help="default 100,000")
    parser.add_argument("--batch-size", type=positive_int, default=1, metavar="BS", help="rows of a rank (default 1)")
    parser.add_argument("--ranks", type=positive_int, nargs="+", default=[8, 64], metavar="R", help="default 8 and 64")
    parser.add_argument(
        "--cost",
        type=float,
        nargs=2,
        default=(12288.0, 1.0),
        metavar=("A", "B"),
        help="of a token, and of a token squared; default 12288 and 1, six times a hidden size of 2,048 for one",
    )
    parser.add_argument("--seed", type=count_from_zero, default=0)
    parser.add_argument("--json", action="store_true", help="one JSON object a line instead of the table")
    args = parser.parse_args(argv)

    histogram, cost = histogram_from(args), StepCost(*args.cost)
    weights = histogram.counts / histogram.sequences
    lengths = np.random.default_rng(args.seed).choice(len(weights), args.examples, p=weights)
    found: List[Dict[str, Any]] = []
    with progress_bar(3 * len(args.ranks), "plans") as bar:
        for ranks in args.ranks:
            sizes = args.batch_size, histogram.max_sequence_length, ranks, args.seed
            for name, options in (("by rows", BatchOptions(*sizes)), ("levelled", BatchOptions(*sizes, cost=cost))):
                get_way(WAY).plan(lengths, options)  # the packing is solved once in a run
                start = time.process_time()
                plan = get_way(WAY).plan(lengths, options, 1)
                seconds = (time.process_time() - start) / plan.steps
                even = evenness(plan, lengths, options, cost)
                found.append({"ranks": ranks, "plan": name, **even._asdict(), "milliseconds": 1e3 * seconds})
                bar.update(1)
            even = differencing(plan, lengths, options, cost, most_steps=10)
            found.append({"ranks": ranks, "plan": "differencing", **even._asdict(), "milliseconds": None})
            bar.update(1)
    if args.json:
        print("\n".join(map(json.dumps, found)))
        return 0
    print(
        f"{args.examples:,} examples from {histogram.name}, rows of {histogram.max_sequence_length:,}, "
        f"{args.batch_size} a rank; cost {cost.linear:g} a token, {cost.quadratic:g} a token squared\n"
    )
    rows = [["ranks", "plan", "steps", "excess", "largest", "within 0.1 %", "idle", "over", "ms a step"]]
    for each in found:
        shares = [f"{each[name]:.3%}" for name in ("excess", "largest")]
        shares += [f"{each[name]:.1%}" for name in ("near", "idle", "over")]
        spent = "-" if each["milliseconds"] is None else f"{each['milliseconds']:.1f}"
        rows.append([f"{each['ranks']:,}", each["plan"], f"{each['steps']:,}", *shares, spent])
    print("\n".join(text_table(rows, left=(1,))))
    print(_LEGEND)
    return 0


if __name__ == "__main__":
    raise SystemExit(run_main(main))
