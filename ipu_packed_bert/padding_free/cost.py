"""What a row costs a model: fitted to a short measurement, for plans whose ranks take equally long.

    python -m ipu_packed_bert.padding_free.cost            # a small Llama; then two processes with both plans

The time of a forward and backward pass is a constant, a part for each token, and a part for each pair of tokens of one
example: constant + linear * tokens + quadratic * sum of squared lengths.
"""

from __future__ import annotations

import os
import tempfile
from dataclasses import replace
from functools import partial
from typing import Any, Dict, NamedTuple, Optional, Sequence

import numpy as np
import torch
from torch import distributed

from ipu_packed_bert.padding_free.collators import Inputs, PaddingFreeCollator
from ipu_packed_bert.padding_free.models import new_llama
from ipu_packed_bert.padding_free.update import loss_sum, to_device
from ipu_packed_bert.processes.ranks import end_group
from pack_data.batching.balanced import StepCost
from pack_data.batching.plans import BatchOptions, get_way
from pack_data.cli.command import ArgumentParser, positive_int, process_count, run_main
from pack_data.cli.timing import rounds_in_turn, seconds_in_turn, timed

_WAY = "OptimalPacking+PosID"


class MeasuredCost(NamedTuple):
    """Seconds of a forward and backward pass: constant + those of each sequence (`cost`)."""

    cost: StepCost
    constant: float
    error: float  # largest deviation of a measured row from the fit, as a share of the measurement


def _row(model: Any, lengths: Sequence[int], seed: int = 0) -> Inputs:
    """Examples of these lengths, of random tokens."""
    draw = np.random.default_rng(seed)
    size = int(model.get_input_embeddings().weight.shape[0])
    examples = [{"input_ids": draw.integers(0, size, length).tolist()} for length in lengths]
    return to_device(PaddingFreeCollator(model)(examples), next(model.parameters()).device)


def _pass(model: Any, inputs: Inputs) -> None:
    """Forward and backward; returns when a GPU is done."""
    loss = loss_sum(model, inputs)
    loss.backward()
    if loss.is_cuda:
        torch.cuda.synchronize()


def fit(rows: Sequence[Sequence[int]], seconds: Sequence[float]) -> MeasuredCost:
    """The coefficients, none below 0, with the least squares of the relative deviations. rows: lengths of each row.

    ValueError where the times do not grow with the tokens.
    """
    from scipy.optimize import nnls

    measured = np.array(seconds, float)
    terms = np.array([[1.0, sum(row), sum(length**2 for length in row)] for row in rows])
    weighted = terms / measured[:, None]
    scale = weighted.max(axis=0)
    found = nnls(weighted / scale, np.ones(len(measured)))[0] / scale
    if float((terms[:, 1:] @ found[1:] / measured).max()) < 1e-9:  # some versions of scipy round to a little above 0
        raise ValueError(
            "the times measured do not grow with the tokens of a row; measure longer rows, or more often, on a machine "
            "that does nothing else"
        )
    error = float(np.abs(terms @ found / measured - 1).max())
    return MeasuredCost(StepCost(float(found[1]), float(found[2])), float(found[0]), error)


def measure_cost(model: Any, *, max_sequence_length: int, repeats: int = 3) -> MeasuredCost:
    """Times rows of some lengths through a model that `use_padding_free` has switched. Gradients are cleared.

    max_sequence_length: tokens of a full row, at least 64. The least time of `repeats` interleaved passes counts.
    In a process group every rank calls it: the slowest rank's times count, and all get the same coefficients, to the
    bit, since they plan the same epoch.
    """
    if max_sequence_length < 64:
        raise ValueError(f"max_sequence_length is {max_sequence_length}; rows of fewer than 64 tokens say nothing")
    rows = [
        [tokens // count] * count
        for tokens in (max_sequence_length // 4, max_sequence_length // 2, max_sequence_length)
        for count in (1, 4, 16)
    ]
    device = next(model.parameters()).device
    passes = {tuple(row): partial(_pass, model, _row(model, row)) for row in rows}
    passes[tuple(rows[0])]()  # the first pass sets up
    times = seconds_in_turn(passes, repeats, warm_up=False)
    least = [float(each.min()) for each in times.values()]
    model.zero_grad(set_to_none=True)
    if not (distributed.is_available() and distributed.is_initialized()):
        return fit(rows, least)
    slowest = torch.tensor(least, dtype=torch.float64, device=device)
    distributed.all_reduce(slowest, op=distributed.ReduceOp.MAX)
    found = fit(rows, slowest.tolist())
    values = [found.cost.linear, found.cost.quadratic, found.constant, found.error]
    shared = torch.tensor(values, dtype=torch.float64, device=device)
    distributed.broadcast(shared, 0)  # processors may round the fit differently
    linear, quadratic, constant, error = shared.tolist()
    return MeasuredCost(StepCost(linear, quadratic), constant, error)


# ---- two processes, with the plans by rows and levelled


def _small_llama(max_sequence_length: int) -> Any:
    """A Llama of hidden size 128 with 2 layers and random weights, ready for padding-free rows."""
    from ipu_packed_bert.padding_free.choice import use_padding_free

    torch.manual_seed(0)
    model = new_llama(hidden_size=128, layers=2, vocabulary_size=1024, positions=max_sequence_length)
    use_padding_free(model)
    return model


def _steps(rank: int, ranks: int, meeting: str, given: Dict[str, Any], results: str) -> None:
    """One process: the first steps of both plans in turn; rank 0 writes the seconds of each."""
    torch.set_num_threads(1)
    distributed.init_process_group("gloo", init_method=f"file://{meeting}", rank=rank, world_size=ranks)
    slots, lengths = given["slots"], np.array(given["lengths"])
    model = _small_llama(slots)
    options = BatchOptions(1, slots, ranks)
    costs = {"by rows": None, "levelled": StepCost(*given["cost"])}
    plans = {name: get_way(_WAY).plan(lengths, replace(options, cost=cost)) for name, cost in costs.items()}
    most = min(plan.steps for plan in plans.values()) - 1
    chosen = np.random.default_rng(0).permutation(most)[: given["steps"]].tolist()

    def update(inputs: Inputs) -> None:
        _pass(model, inputs)
        for parameter in model.parameters():
            distributed.all_reduce(parameter.grad)

    def seconds_of(plan: Any, number: int) -> float:
        step = chosen[max(0, number - 1)]
        inputs = _row(model, [piece.stop - piece.start for pieces in plan.batch(step, rank) for piece in pieces])
        distributed.barrier()
        seconds, _ = timed(partial(update, inputs))
        model.zero_grad(set_to_none=True)
        return seconds

    sides = {name: partial(seconds_of, plan) for name, plan in plans.items()}
    seconds = [[found[name] for name in sides] for number, found in rounds_in_turn(sides, len(chosen)) if number]
    if not rank:
        np.save(results, seconds)
    end_group()


def main(argv: Optional[Sequence[str]] = None) -> int:
    parser = ArgumentParser(prog="python -m ipu_packed_bert.padding_free.cost", description=__doc__.split("\n\n")[0])
    number = partial(parser.add_argument, type=positive_int)
    number("--max-sequence-length", default=2048, metavar="S", help="tokens of a row (default 2,048)")
    number("--examples", default=4000, metavar="N", help="log-normal lengths, median S / 20 (default 4,000)")
    number("--ranks", type=process_count, default=2, metavar="R", help="processes (default 2)")
    number("--steps", default=40, metavar="N", help="steps of each plan (default 40)")
    args = parser.parse_args(argv)
    torch.set_num_threads(1)
    slots = args.max_sequence_length
    found = measure_cost(_small_llama(slots), max_sequence_length=slots)
    print(
        f"a row costs {found.constant * 1e3:.2f} ms, {found.cost.linear * 1e6:.2f} us a token and "
        f"{found.cost.quadratic * 1e9:.3f} ns a token squared; every row measured is within {found.error:.0%} of it"
    )
    lengths = np.clip(np.rint(np.random.default_rng(0).lognormal(np.log(slots / 20), 1.2, args.examples)), 1, slots)
    cost = found.cost
    given = {"slots": slots, "lengths": lengths.astype(int).tolist(), "steps": args.steps}
    given["cost"] = (cost.linear, cost.quadratic)
    # The same numbers of steps of both plans, drawn at random; they hold different examples of one data set.
    with tempfile.TemporaryDirectory() as folder:
        results = os.path.join(folder, "seconds.npy")
        arguments = (args.ranks, os.path.join(folder, "meeting"), given, results)
        torch.multiprocessing.spawn(_steps, arguments, nprocs=args.ranks)
        by_rows, levelled = np.load(results).mean(axis=0).tolist()
    print(
        f"{args.ranks} processes, {args.steps} steps of each plan in turn: {by_rows * 1e3:.1f} ms a step by rows, "
        f"{levelled * 1e3:.1f} ms levelled, {by_rows / levelled:.3f} times as fast"
    )
    return 0


if __name__ == "__main__":
    raise SystemExit(run_main(main))
