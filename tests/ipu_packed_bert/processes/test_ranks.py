"""Several processes make the updates of one: the same weights, the same records, whatever their number."""

import pytest
import torch

from tests.fine_tuning_files import tiny_checkpoint, tiny_config, training_file
from tests.ranks_at_work import Job, at_work, fine_tuned, pretrained
from tests.tiny_runs import tiny_data
from tests.tolerances import same_state

# Packs of an update, in micro-batches of one or two; 37 packs make an epoch, so that its last update is incomplete.
SHAPES = {"six packs": ["batch.micro_batch=1", "batch.gradient_accumulation=9"], "four packs, two at a time": []}
SIZES = {"six packs": (1, 3, 4), "four packs, two at a time": (1, 3)}
STEPS = {"six packs": 8, "four packs, two at a time": 11}
PACKS = {"six packs": (6, 1), "four packs, two at a time": (4, 1)}  # of the fullest update, of the emptiest
LEGS = (1, 2, 4, 1)  # ranks of a run that is resumed three times
FINE_TUNED = ("squad", "tokens")


# Kind of run with dropout -> whether it computes in float64, and its settings. `auto` makes micro-batches of 6, 3 and 2
# packs in 1, 2 and 4 ranks; in float64 their scale, which is float32, would be visible.
DROPOUT = {
    "float64": (True, []),
    "float32, other micro-batches": (False, ["engine.kind=host", "batch.micro_batch=auto"]),
}


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    """All runs of this file, made by four processes that start once."""
    folder = tmp_path_factory.mktemp("ranks")
    data = tiny_data(folder / "data")
    jobs = []
    for shape, overrides in SHAPES.items():
        for size in SIZES[shape]:
            options = dict(data=data, overrides=overrides, steps=STEPS[shape])
            jobs.append(Job(f"{shape}, {size}", size, pretrained, options))
    former = None
    for leg, size in enumerate(LEGS):
        options = dict(data=data, overrides=SHAPES["six packs"], steps=2, after=former)
        former = f"leg {leg}"
        jobs.append(Job(former, size, pretrained, options))
    for kind, (double, further) in DROPOUT.items():
        drops = ["model.hidden_dropout=0.3", "model.attention_dropout=0.1", *SHAPES["six packs"], *further]
        options = dict(data=data, overrides=drops, double=double)
        for size in (1, 2, 4):
            jobs.append(Job(f"dropout, {kind}, {size}", size, pretrained, {**options, "steps": 6}))
        former = None
        for leg, size in enumerate((2, 1, 4)):
            name = f"dropout, {kind}, leg {leg}"
            jobs.append(Job(name, size, pretrained, {**options, "steps": 2, "after": former}))
            former = name
        rest = {**options, "steps": 4, "after": f"dropout, {kind}, leg 0"}
        jobs.append(Job(f"dropout, {kind}, rest", 2, pretrained, rest))
    checkpoint = tiny_checkpoint(folder / "bert")
    for kind in FINE_TUNED:
        own = folder / kind
        own.mkdir()
        config = tiny_config(checkpoint, training_file(own, kind), task=kind, batch={"micro_batch": 1})
        for size in (1, 3):
            jobs.append(Job(f"{kind}, {size}", size, fine_tuned, dict(config=config, steps=3)))
    return at_work(folder, jobs)


def same_records(one, other):
    assert len(one["log"]) == len(other["log"]) > 1
    for ours, theirs in zip([*one["log"], one["held_out"]], [*other["log"], other["held_out"]]):
        assert theirs == pytest.approx(ours, rel=1e-11)


@pytest.mark.parametrize("shape, size", [(shape, size) for shape, sizes in SIZES.items() for size in sizes[1:]])
def test_ranks_make_the_updates_of_one_process(found, shape, size):
    one, several = found[f"{shape}, 1"], found[f"{shape}, {size}"]
    same_state(one, several)
    same_records(one, several)
    assert several["batches"] == one["batches"]
    packs = [record["packs"] for record in several["log"]]
    assert (max(packs), min(packs)) == PACKS[shape]


def test_a_run_goes_on_with_any_number_of_ranks(found):
    """1, 2, 4, 1 in one epoch and the first update of the next: the same sequences in each, the same weights."""
    straight = found["six packs, 1"]
    legs = [found[f"leg {leg}"] for leg in range(len(LEGS))]
    same_state(straight, legs[-1])
    assert [leg["batches"]["epoch"] for leg in legs] == [0, 0, 0, 1]
    assert legs[-1]["batches"] == straight["batches"]
    log = [record for leg in legs for record in leg["log"]]
    assert len(log) == len(straight["log"])
    for ours, theirs in zip(straight["log"], log):
        assert theirs == pytest.approx(ours, rel=1e-11)


# With other micro-batches all sums have another order: 1.0e-6 apart with torch 2.0.1.
@pytest.mark.parametrize("kind, limit", list(zip(DROPOUT, (1e-12, 2e-6))), ids=DROPOUT)
def test_dropout_draws_the_same_in_any_number_of_ranks(found, kind, limit):
    """1, 2 and 4 ranks, and 2, 1, 4 after each other, up to the order of sums."""
    one = found[f"dropout, {kind}, 1"]
    assert [found[f"dropout, {kind}, leg {leg}"]["batches"]["epoch"] for leg in range(3)] == [0, 0, 0]
    for name in ("2", "4", "leg 2"):
        several = found[f"dropout, {kind}, {name}"]
        for weight, expected in one["engine"]["model"].items():
            torch.testing.assert_close(several["engine"]["model"][weight], expected, rtol=0, atol=limit)
    assert one["log"][0]["loss"] != pytest.approx(found["six packs, 1"]["log"][0]["loss"], rel=1e-4)  # it drops


@pytest.mark.parametrize("kind", DROPOUT)
def test_dropout_goes_on_exactly_with_the_same_number_of_ranks(found, kind):
    """Two ranks, resumed after two of six updates: the log and the state of a straight run, bit for bit."""
    straight, first, rest = (found[f"dropout, {kind}, {name}"] for name in ("2", "leg 0", "rest"))
    assert first["log"] + rest["log"] == straight["log"] and len(straight["log"]) == 6
    assert (rest["held_out"], rest["batches"]) == (straight["held_out"], straight["batches"])
    for part in ("model", "exp_avg", "exp_avg_sq"):
        ours, theirs = ({**each["engine"], **each["engine"]["optimizer"]}[part] for each in (straight, rest))
        assert ours.keys() == theirs.keys() and all(torch.equal(ours[name], theirs[name]) for name in ours)


@pytest.mark.parametrize("kind", FINE_TUNED)
def test_fine_tuning_in_ranks_is_that_of_one_process(found, kind):
    one, several = found[f"{kind}, 1"], found[f"{kind}, 3"]
    same_state(one, several)
    same_records(one, several)
    assert len(one["outputs"]) == len(several["outputs"]) > 1
    for ours, theirs in zip(one["outputs"], several["outputs"]):
        torch.testing.assert_close(theirs, ours, rtol=1e-9, atol=1e-9)
