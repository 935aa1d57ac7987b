"""Several processes make the updates of one: the same weights, the same records, whatever their number."""

from typing import List, NamedTuple, Tuple

import pytest
import torch

from tests.fine_tuning_files import tiny_checkpoint, tiny_config, training_file
from tests.ranks_at_work import Job, at_work, fine_tuned, pretrained
from tests.tiny_runs import tiny_data
from tests.tolerances import same_records, same_state


class Shape(NamedTuple):
    """Updates of some packs: their settings, the numbers of ranks, updates of a run, packs of a full update."""

    settings: List[str]
    sizes: Tuple[int, ...]
    steps: int
    packs: int


# Micro-batches of one or two packs; 37 packs make an epoch, so that its last update has one.
SHAPES = {
    "six packs": Shape(["batch.micro_batch=1", "batch.gradient_accumulation=9"], (1, 4), 8, 6),
    "four packs, two at a time": Shape([], (1, 3), 11, 4),
}
IN_RANKS = [(shape, size) for shape in SHAPES for size in SHAPES[shape].sizes[1:]]
ONE_AT_A_TIME = SHAPES["six packs"].settings
LEGS = (1, 2, 4, 1)  # ranks of a run that is resumed three times
FINE_TUNED = ("squad", "tokens")


# Kind of run with dropout -> whether it computes in float64, and its settings. `auto` makes micro-batches of 6, 3 and 2
# packs in 1, 2 and 4 ranks; in float64 their scale, which is float32, would be visible.
DROPOUT = {
    "float64": (True, []),
    "float32, other micro-batches": (
        False,
        ["engine.kind=host", "batch.micro_batch=auto"],
    ),
}


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    """All runs of this file, made by four processes that start once."""
    folder = tmp_path_factory.mktemp("ranks")
    data = tiny_data(folder / "data")
    jobs = []

    def pretraining(name, size, **options):
        jobs.append(Job(name, size, pretrained, dict(data=data, **options)))

    for name, shape in SHAPES.items():
        for size in shape.sizes:
            pretraining(f"{name}, {size}", size, overrides=shape.settings, steps=shape.steps)
    previous = None
    for leg, size in enumerate(LEGS):
        pretraining(f"leg {leg}", size, overrides=ONE_AT_A_TIME, steps=2, after=previous)
        previous = f"leg {leg}"
    for kind, (double, further) in DROPOUT.items():
        drops = [
            "model.hidden_dropout=0.3",
            "model.attention_dropout=0.1",
            *ONE_AT_A_TIME,
            *further,
        ]
        options = dict(overrides=drops, double=double)
        for size in (1, 2, 4):
            pretraining(f"dropout, {kind}, {size}", size, steps=6, **options)
        previous = None
        for leg, size in enumerate((2, 1, 4)):
            name = f"dropout, {kind}, leg {leg}"
            pretraining(name, size, steps=2, after=previous, **options)
            previous = name
        pretraining(
            f"dropout, {kind}, rest",
            2,
            steps=4,
            after=f"dropout, {kind}, leg 0",
            **options,
        )
    checkpoint = tiny_checkpoint(folder / "bert")
    for kind in FINE_TUNED:
        place = folder / kind
        place.mkdir()
        config = tiny_config(checkpoint, training_file(place, kind), task=kind, batch={"micro_batch": 1})
        for size in (1, 3):
            jobs.append(Job(f"{kind}, {size}", size, fine_tuned, dict(config=config, steps=3)))
    return at_work(folder, jobs)


def same_logs(one, other):
    same_records([*one["log"], one["held_out"]], [*other["log"], other["held_out"]])


@pytest.mark.parametrize("shape, size", IN_RANKS)
def test_ranks_make_the_updates_of_one_process(found, shape, size):
    alone = found[f"{shape}, 1"]
    several = found[f"{shape}, {size}"]
    same_state(alone, several)
    same_logs(alone, several)
    assert several["batches"] == alone["batches"]
    packs = [record["packs"] for record in several["log"]]
    assert (max(packs), min(packs)) == (SHAPES[shape].packs, 1)


def test_a_run_goes_on_with_any_number_of_ranks(found):
    """1, 2, 4, 1 in one epoch and the first update of the next: the same sequences in each, the same weights."""
    straight = found["six packs, 1"]
    legs = [found[f"leg {leg}"] for leg in range(len(LEGS))]
    same_state(straight, legs[-1])
    assert [leg["batches"]["epoch"] for leg in legs] == [0, 0, 0, 1]
    assert legs[-1]["batches"] == straight["batches"]
    same_records(straight["log"], [record for leg in legs for record in leg["log"]])


# With other micro-batches all sums have another order: 1.0e-6 apart with torch 2.0.1.
@pytest.mark.parametrize("kind, limit", list(zip(DROPOUT, (1e-12, 2e-6))), ids=DROPOUT)
def test_dropout_draws_the_same_in_any_number_of_ranks(found, kind, limit):
    """1, 2 and 4 ranks, and 2, 1, 4 after each other, up to the order of sums."""
    alone = found[f"dropout, {kind}, 1"]
    assert [found[f"dropout, {kind}, leg {leg}"]["batches"]["epoch"] for leg in range(3)] == [0, 0, 0]
    for name in ("2", "4", "leg 2"):
        several = found[f"dropout, {kind}, {name}"]
        for weight, expected in alone["engine"]["model"].items():
            torch.testing.assert_close(several["engine"]["model"][weight], expected, rtol=0, atol=limit)
    assert alone["log"][0]["loss"] != pytest.approx(found["six packs, 1"]["log"][0]["loss"], rel=1e-4)  # it drops


def tensors_of(run):
    """Return the weights and moments of a run."""
    state = run["engine"]
    kinds = (
        state["model"],
        state["optimizer"]["exp_avg"],
        state["optimizer"]["exp_avg_sq"],
    )
    return [kind[name] for kind in kinds for name in sorted(state["model"])]


@pytest.mark.parametrize("kind", DROPOUT)
def test_dropout_goes_on_exactly_with_the_same_number_of_ranks(found, kind):
    """Two ranks, resumed after two of six updates: the log and the state of a straight run, bit for bit."""
    straight, first, rest = (found[f"dropout, {kind}, {name}"] for name in ("2", "leg 0", "rest"))
    assert first["log"] + rest["log"] == straight["log"]
    assert len(straight["log"]) == 6
    assert (rest["held_out"], rest["batches"]) == (
        straight["held_out"],
        straight["batches"],
    )
    for ours, theirs in zip(tensors_of(straight), tensors_of(rest)):
        assert torch.equal(ours, theirs)


@pytest.mark.parametrize("kind", FINE_TUNED)
def test_fine_tuning_in_ranks_is_that_of_one_process(found, kind):
    alone = found[f"{kind}, 1"]
    several = found[f"{kind}, 3"]
    same_state(alone, several)
    same_logs(alone, several)
    assert len(alone["outputs"]) == len(several["outputs"]) > 1
    for ours, theirs in zip(alone["outputs"], several["outputs"]):
        torch.testing.assert_close(theirs, ours, rtol=1e-9, atol=1e-9)
