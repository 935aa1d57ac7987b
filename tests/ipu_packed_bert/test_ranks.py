"""Several processes make the updates of one: the same weights, the same records, whatever their number."""

import pytest
import torch

from tests.fine_tuning_files import KINDS, tiny_checkpoint, tiny_config, training_file
from tests.ranks_at_work import Job, at_work, fine_tuned, pretrained
from tests.tiny_runs import tiny_data

SIZES = (1, 2, 3, 4)
# Global batches of 4 packs in micro-batches of 2, of 6 in 1, of 5 in 1; 37 packs: each epoch ends with an incomplete one.
SHAPES = {
    "two micro-batches": [],
    "six micro-batches": ["batch.micro_batch=1", "batch.gradient_accumulation=9"],
    "two replicas": ["batch.micro_batch=1", "batch.gradient_accumulation=4", "placement.replicas=2"],
}
STEPS = {"two micro-batches": 11, "six micro-batches": 8, "two replicas": 7}


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    """All runs of this file, made by four processes that start once."""
    folder = tmp_path_factory.mktemp("ranks")
    data = tiny_data(folder / "data")
    jobs = []
    for shape, overrides in SHAPES.items():
        for size in SIZES:
            options = dict(data=data, overrides=overrides, steps=STEPS[shape])
            jobs.append(Job(f"{shape}, {size}", size, pretrained, options))
    former = None
    for leg, size in enumerate((1, 2, 4, 3, 1)):
        options = dict(data=data, overrides=SHAPES["two micro-batches"], steps=2 if leg else 3, after=former)
        former = f"leg {leg}"
        jobs.append(Job(former, size, pretrained, options))
    for name in ("dropout", "dropout again"):
        options = dict(data=data, overrides=["model.hidden_dropout=0.3"], steps=4, double=False)
        jobs.append(Job(name, 2, pretrained, options))
    options = dict(data=data, overrides=["model.hidden_dropout=0.3"], steps=2, double=False)
    jobs.append(Job("dropout, first half", 2, pretrained, options))
    jobs.append(Job("dropout, second half", 2, pretrained, {**options, "after": "dropout, first half"}))
    checkpoint = tiny_checkpoint(folder / "bert")
    for kind in KINDS:
        own = folder / kind
        own.mkdir()
        config = tiny_config(checkpoint, training_file(own, kind), task=kind, batch={"micro_batch": 1})
        for size in (1, 3):
            jobs.append(Job(f"{kind}, {size}", size, fine_tuned, dict(config=config, steps=6)))
    return at_work(folder, jobs)


def relative_difference(one, other):
    """Largest over the weights and both moments, of each tensor relative to its largest entry."""
    worst = 0.0
    for part in (lambda state: state["model"], lambda state: state["optimizer"]["exp_avg_sq"]):
        expected = part(one["engine"])
        assert expected and expected.keys() == part(other["engine"]).keys()
        for name, tensor in expected.items():
            assert tensor.dtype == torch.float64
            scale = float(tensor.abs().max()) or 1.0
            worst = max(worst, float((tensor - part(other["engine"])[name]).abs().max()) / scale)
    return worst


def same_records(one, other):
    assert len(one["log"]) == len(other["log"]) > 1
    for ours, theirs in zip([*one["log"], one["held_out"]], [*other["log"], other["held_out"]]):
        assert theirs == pytest.approx(ours, rel=1e-11)


@pytest.mark.parametrize("size", SIZES[1:])
@pytest.mark.parametrize("shape", SHAPES)
def test_ranks_make_the_updates_of_one_process(found, shape, size):
    one, several = found[f"{shape}, 1"], found[f"{shape}, {size}"]
    assert relative_difference(one, several) <= 1e-12
    same_records(one, several)
    assert several["batches"] == one["batches"]


def test_the_shapes_meet_incomplete_updates_and_empty_micro_batches(found):
    packs = {shape: [record["packs"] for record in found[f"{shape}, 1"]["log"]] for shape in SHAPES}
    assert {shape: (max(each), min(each)) for shape, each in packs.items()} == {
        "two micro-batches": (4, 1),
        "six micro-batches": (6, 1),
        "two replicas": (6, 1),
    }


def test_a_run_goes_on_with_any_number_of_ranks(found):
    """1, 2, 4, 3, 1 within one epoch and the next: the same sequences in each update, the same weights."""
    straight = found["two micro-batches, 1"]
    legs = [found[f"leg {leg}"] for leg in range(5)]
    assert relative_difference(straight, legs[-1]) <= 1e-12
    assert legs[-1]["batches"] == straight["batches"] and legs[-1]["batches"]["epoch"] == 1
    log = [record for leg in legs for record in leg["log"]]
    for ours, theirs in zip(straight["log"], log):
        assert theirs == pytest.approx(ours, rel=1e-11)


def test_dropout_is_the_same_again_for_the_same_number_of_ranks(found):
    first, again, half = found["dropout"], found["dropout again"], found["dropout, second half"]
    assert first["log"] == again["log"] and len(first["log"]) == 4
    assert half["log"] == first["log"][2:]
    streams = first["engine"]["random"]["cpu"]
    assert streams.shape[0] == 2 and not torch.equal(streams[0], streams[1])


@pytest.mark.parametrize("kind", KINDS)
def test_fine_tuning_in_ranks_is_that_of_one_process(found, kind):
    one, several = found[f"{kind}, 1"], found[f"{kind}, 3"]
    assert relative_difference(one, several) <= 1e-12
    same_records(one, several)
    assert len(one["outputs"]) == len(several["outputs"]) > 1
    for ours, theirs in zip(one["outputs"], several["outputs"]):
        torch.testing.assert_close(theirs, ours, rtol=1e-9, atol=1e-9)
