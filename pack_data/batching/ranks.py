"""`python -m pack_data.batching.ranks`: how evenly the ranks of each step are loaded, beside the least possible."""

from __future__ import annotations

import json
import time
from typing import Any, Dict, List, NamedTuple, Optional, Sequence

import numpy as np

from pack_data.batching.balanced import StepCost, karmarkar_karp, step_bound
from pack_data.batching.plans import BatchOptions, EpochPlan, get_way
from pack_data.cli.command import ArgumentParser, count_from_zero, positive_int, progress_bar, run_main
from pack_data.display.table import text_table
from pack_data.lengths.options import add_histogram_arguments, histogram_from

WAY = "OptimalPacking+PosID"
_NEAR = 1e-3  # of the lower bound
_LEGEND = """
A step takes as long as its longest rank; excess: how far that is above the lower bound, which is what balancing lost.
forced: how far the lower bound is above the mean of the ranks, because a rank has a long sequence. idle: share of the
ranks' time spent waiting, of the whole epoch. over: rows with more tokens than they may have. by rows: plans that level
the squared lengths of whole rows; levelled: plans with this cost; differencing: Karmarkar and Karp's method on the
sequences of the first ten levelled steps, there `over` is of ranks; within slots: the same, and sequences go from ranks
with too many tokens to others, the shortest first."""


class _Evenness(NamedTuple):
    """The steps of an epoch, without its last one."""

    steps: int
    forced: float  # lower bound / mean of the ranks - 1, mean over the steps
    excess: float  # largest rank / lower bound - 1, mean over the steps
    largest: float  # of the steps
    near: float  # share of the steps within NEAR of their lower bound
    idle: float  # share of the ranks' time in which they wait, over the whole epoch
    over: float  # share of the rows, or of the ranks where there are no rows, with more tokens than they may have


def evenness(plan: EpochPlan, lengths: np.ndarray, options: BatchOptions, cost: StepCost) -> _Evenness:
    """Of a plan's steps; the last one, which has what is left, counts only where it is the only one."""
    costs = cost.of(lengths)
    loads = plan.loads(costs)
    bounds: List[float] = []
    for step in range(plan.steps):
        first, last = (plan.rows[plan.batches[at * plan.ranks]] for at in (step, step + 1))
        bounds.append(step_bound(lengths[plan.example[first:last]], cost, plan.ranks, options.capacity))
    counted = slice(max(1, plan.steps - 1))
    row_tokens = np.add.reduceat(lengths[plan.example], plan.rows[:-1])
    over = float((row_tokens > options.max_sequence_length).mean())
    idle = 1 - float(loads.mean(axis=1).sum() / loads.max(axis=1).sum())
    return _evenness((loads.max(axis=1) / bounds)[counted], (bounds / loads.mean(axis=1))[counted], idle, over)


def _evenness(longest: np.ndarray, bounds: np.ndarray, idle: float, over: float) -> _Evenness:
    """longest: of each step the longest rank / lower bound; bounds: lower bound / mean of the ranks."""
    excess, forced = np.maximum(longest - 1, 0.0), np.maximum(bounds - 1, 0.0)  # a sum of costs rounds
    near = float((excess <= _NEAR).mean())
    return _Evenness(len(excess), float(forced.mean()), float(excess.mean()), float(excess.max()), near, idle, over)


def differencing(
    plan: EpochPlan,
    lengths: np.ndarray,
    options: BatchOptions,
    cost: StepCost,
    most_steps: int,
    *,
    within: bool = False,
) -> _Evenness:
    """The first steps' sequences dealt to the ranks by their costs alone; within: then within the ranks' slots."""
    over: List[bool] = []
    steps = min(most_steps, plan.steps)
    mean, bound, longest = np.zeros(steps), np.zeros(steps), np.zeros(steps)
    for step in range(steps):
        first, last = (plan.rows[plan.batches[at * plan.ranks]] for at in (step, step + 1))
        tokens = lengths[plan.example[first:last]]
        costs = cost.of(tokens)
        parts = karmarkar_karp(costs.tolist(), plan.ranks)
        if within:
            parts = within_slots(parts, tokens, costs, options.capacity)
        bound[step] = step_bound(tokens, cost, plan.ranks, options.capacity)
        mean[step], longest[step] = costs.sum() / plan.ranks, max(float(costs[part].sum()) for part in parts)
        over += [int(tokens[part].sum()) > options.capacity for part in parts]
    return _evenness(longest / bound, bound / mean, 1 - float(mean.sum() / longest.sum()), float(np.mean(over)))


def within_slots(parts: List[List[int]], tokens: np.ndarray, costs: np.ndarray, slots: int) -> List[List[int]]:
    """Parts where sequences of those with too many tokens have gone to the cheapest with room, the shortest first."""
    parts = [sorted(part, key=lambda number: -int(tokens[number])) for part in parts]
    held, loads = [int(tokens[part].sum()) for part in parts], [float(costs[part].sum()) for part in parts]
    for number, part in enumerate(parts):
        while held[number] > slots:
            length, cost = int(tokens[part[-1]]), float(costs[part[-1]])
            free = [other for other in range(len(parts)) if held[other] + length <= slots]
            if not free:
                break  # the longer ones have no room either
            other = min(free, key=loads.__getitem__)
            parts[other].append(part.pop())
            parts[other].sort(key=lambda number: -int(tokens[number]))
            for rank, sign in ((number, -1), (other, 1)):
                held[rank] += sign * length
                loads[rank] += sign * cost
    return parts


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
        default=(24576.0, 1.0),
        metavar=("A", "B"),
        help="of a token, and of a token squared; default 24576 and 1, of a causal model: twelve times a hidden size "
        "of 2,048 for one, as its attention sees half of the pairs (bidirectional: six times)",
    )
    parser.add_argument("--seed", type=count_from_zero, default=0)
    parser.add_argument("--json", action="store_true", help="one JSON object a line instead of the table")
    args = parser.parse_args(argv)

    histogram, cost = histogram_from(args), StepCost(*args.cost)
    weights = histogram.counts / histogram.sequences
    lengths = np.random.default_rng(args.seed).choice(len(weights), args.examples, p=weights)
    found: List[Dict[str, Any]] = []
    with progress_bar(4 * len(args.ranks), "plans") as bar:
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
            for name, within in (("differencing", False), ("within slots", True)):
                even = differencing(plan, lengths, options, cost, most_steps=10, within=within)
                found.append({"ranks": ranks, "plan": name, **even._asdict(), "milliseconds": None})
                bar.update(1)
    if args.json:
        print("\n".join(map(json.dumps, found)))
        return 0
    print(
        f"{args.examples:,} examples from {histogram.name}, rows of {histogram.max_sequence_length:,}, "
        f"{args.batch_size} a rank; cost {cost.linear:g} a token, {cost.quadratic:g} a token squared\n"
    )
    rows = [["ranks", "plan", "steps", "forced", "excess", "largest", "within 0.1 %", "idle", "over", "ms a step"]]
    for each in found:
        shares = [f"{each[name]:.3%}" for name in ("forced", "excess", "largest")]
        shares += [f"{each[name]:.1%}" for name in ("near", "idle", "over")]
        spent = "-" if each["milliseconds"] is None else f"{each['milliseconds']:.1f}"
        rows.append([f"{each['ranks']:,}", each["plan"], f"{each['steps']:,}", *shares, spent])
    print("\n".join(text_table(rows, left=(1,))))
    print(_LEGEND)
    return 0


if __name__ == "__main__":
    raise SystemExit(run_main(main))
