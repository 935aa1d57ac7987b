"""Every task in packs is the task: probabilities, updates, answers and scores are those of each sequence alone."""

import dataclasses
import re
from itertools import islice

import numpy as np
import pytest
import torch

from ipu_packed_bert.data.global_batches import GlobalBatches, in_order
from ipu_packed_bert.model.optimizer import build_optimizer
from ipu_packed_bert.model.packed import hidden_score
from ipu_packed_bert.tasks import task_class
from ipu_packed_bert.tasks.inputs import ExamplePacks, Inputs, pack_inputs
from ipu_packed_bert.tasks.questions import _span_log_probabilities
from ipu_packed_bert.training.compare_unpacked import compare_unpacked
from ipu_packed_bert.training.examples import prepare
from tests.fine_tuning_files import KINDS, SLOTS, tiny_config, training_file
from tests.graphs import count_graphs, count_programs, graphs_of
from tests.tiers import sample
from tests.tolerances import assert_same, relative_error, relative_tolerance


def prepared(checkpoint, folder, kind, *, dtype=torch.float64, **sections):
    """A task on a tiny file, with an engine of this type."""
    options = {}
    if kind == "squad":
        sections.setdefault("of_task", {"null_answers": True})
        options["without_answer"] = 4
    training = training_file(folder, kind, **options)
    run = prepare(tiny_config(checkpoint, training, task=kind, **sections))
    run.engine.model.to(dtype)
    run.engine.optimizer = build_optimizer(run.engine.model, run.config.optimizer, betas=(0.9, 0.999))
    return run


@pytest.fixture(scope="module", params=KINDS)
def run(request, checkpoint, tmp_path_factory):
    """A task of each kind in float64, whose weights no test changes."""
    return prepared(checkpoint, tmp_path_factory.mktemp(request.param), request.param)


def with_exact_scales(batch, layout):
    """Fill a batch up to whole micro-batches, with its scales in float64."""
    shape = layout.of_packs(len(batch["input_ids"]))
    filled = shape.filled(batch)
    for name, counted in layout.scales.items():
        scale = shape.micro_batches_per_update / np.count_nonzero(filled[counted])
        filled[name] = np.full(len(filled["input_ids"]), scale)
    return filled


def pairs(run):
    """The batches of an epoch, each with that of the same sequences each alone in its row."""
    packs = run.task.training_packs
    layout = run.batches.layout
    order = packs.order(0)
    updates = []
    for first in range(0, len(order), layout.packs_per_update):
        numbers = order[first : first + layout.packs_per_update]
        both = (packs.batch(numbers, 0), packs.alone(numbers, 0))
        updates.append([with_exact_scales(batch, layout) for batch in both])
    return updates


def without_key_bias(network):
    """The parameters but for the bias of the keys, whose gradient is zero in exact arithmetic."""
    return [parameter for name, parameter in network.named_parameters() if not name.endswith("key.bias")]


def gradients_of(engine, batch):
    """The outcome of a batch and its gradients."""
    outcome = engine.accumulate(batch)
    gradients = [each.grad.clone() for each in without_key_bias(engine.model) if each.grad is not None]
    engine.optimizer.zero_grad(set_to_none=True)
    return outcome, gradients


MASK = torch.tensor([[1, 1, 2, 2, 2, 3, 0, 0]], dtype=torch.int32)
PRESENT = torch.tensor([[True, True, True, False]])
PARTS = (slice(0, 2), slice(2, 5), slice(5, 6))


@pytest.mark.parametrize(
    "attention, value",
    [
        ("eager", 3.0),
        ("eager", 300.0),
        ("sdpa", 3.0),
        ("sdpa", 1e4),
        ("sdpa", 1e30),
    ],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_sequence_has_the_probabilities_it_has_alone(dtype, attention, value):
    """The logits of other sequences have no effect, however large they are."""
    logits = torch.randn(1, 8, dtype=dtype)
    hidden = hidden_score(attention)
    log_probabilities = _span_log_probabilities(logits, MASK, PRESENT, hidden)
    for number, slots in enumerate(PARTS):
        of_sequence = log_probabilities[0, number]
        alone = torch.log_softmax(logits[0, slots], dim=0)
        assert torch.allclose(of_sequence[slots], alone, rtol=0, atol=1e-6)
        assert torch.exp(of_sequence).sum() == torch.exp(of_sequence[slots]).sum()  # others: exactly 0
    logits[0, [0, 1, 5, 6, 7]] = value
    changed = _span_log_probabilities(logits, MASK, PRESENT, hidden)
    assert torch.equal(changed[0, 1, PARTS[1]], log_probabilities[0, 1, PARTS[1]])


def test_a_sequence_that_is_not_there_is_finite():
    logits = torch.randn(1, 8, requires_grad=True)
    log_probabilities = _span_log_probabilities(logits, MASK, PRESENT, float("-inf"))
    assert torch.isfinite(log_probabilities[0, 3]).all()
    of_absent = log_probabilities[0, 3].sum()
    (of_absent * 0.0 + log_probabilities[0, 0, 0]).backward()
    assert torch.isfinite(logits.grad).all()
    assert float(logits.grad[0, 2:].abs().max()) == 0.0


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("attention", ["eager", "sdpa", "varlen"])
def test_other_sequences_tokens_have_no_effect(checkpoint, tmp_path, attention, kind):
    """The whole network: other tokens in the other sequences of a row leave a sequence's predictions as they were."""
    run = prepared(
        checkpoint,
        tmp_path,
        kind,
        engine={"attention": attention, "threads": 1},
    )
    batch = run.batches.first()
    row = int(np.argmax((batch["input_mask"] == 2).any(axis=1)))
    others = (batch["input_ids"] * 7 + 3) % 40
    ids = np.where(batch["input_mask"] == 1, batch["input_ids"], others).astype(np.int32)
    before = dict(run.task.outputs_of(run.engine.predict(batch), batch))
    changed = {**batch, "input_ids": ids}
    after = dict(run.task.outputs_of(run.engine.predict(changed), changed))
    first, second = batch["sequence_numbers"][row, :2] - 1
    assert float(np.abs(before[first] - after[first]).max()) <= 1e-12
    assert float(np.abs(before[second] - after[second]).max()) > 1e-6


def random_inputs(number):
    rng = np.random.default_rng(0)
    lengths = rng.integers(4, SLOTS + 1, number)
    total = int(lengths.sum())
    return Inputs(
        lengths,
        rng.integers(1, 50, total).astype(np.int32),
        rng.integers(0, 2, total).astype(np.int32),
        {"start_positions": rng.integers(0, 4, number)},
        {"labels": rng.normal(size=(number, 2))},
        {"words": rng.integers(0, 9, total)},
    )


def sequences_in(batch, inputs):
    """Return the numbers of the sequences of a batch, sorted; check that each has its tokens and targets there."""
    starts = np.cumsum(inputs.lengths) - inputs.lengths
    rows, places = np.nonzero(batch["sequence_numbers"])
    numbers = batch["sequence_numbers"][rows, places] - 1
    first = batch["cls_positions"][rows, places]
    start = batch["start_positions"][rows, places]
    assert np.array_equal(start, first + inputs.slot_targets["start_positions"][numbers])
    assert np.array_equal(batch["labels"][rows, places], inputs.targets["labels"][numbers])
    for number, row, place, slot in zip(numbers, rows, places, first):
        length = inputs.lengths[number]
        slots = slice(slot, slot + length)
        assert np.flatnonzero(batch["input_mask"][row] == place + 1).tolist() == list(range(slot, slot + length))
        assert np.array_equal(batch["positions"][row, slots], np.arange(length))
        for name, values in inputs.tokens.items():
            assert np.array_equal(batch[name][row, slots], values[starts[number] :][:length])
    return sorted(numbers.tolist())


@pytest.mark.parametrize(
    "packer",
    [
        "none",
        "greedy",
        "first_fit",
        "best_fit",
        "spfhp",
        "lpfhp",
        "nnlshp",
        "optimal",
    ],
)
def test_every_sequence_once_an_epoch_and_the_same_ones_alone(packer):
    inputs = random_inputs(50)
    packing = pack_inputs(
        inputs,
        max_sequence_length=SLOTS,
        packer=packer,
        max_sequences_per_pack=3,
    )
    packs = ExamplePacks(inputs, packing, seed=4)
    epochs = []
    for epoch in range(2):
        of_epoch = []
        for numbers in np.array_split(packs.order(epoch), 5):
            alone = packs.alone(numbers, epoch)
            of_update = sequences_in(packs.batch(numbers, epoch), inputs)
            assert of_update == sequences_in(alone, inputs)
            assert len(alone["input_ids"]) == len(of_update)
            of_epoch += of_update
        assert sorted(of_epoch) == list(range(50))
        epochs.append(of_epoch)
    assert epochs[0] != epochs[1], "each epoch deals the sequences out anew"


@pytest.mark.parametrize("kind", KINDS)
def test_every_update_has_the_same_shapes(checkpoint, tmp_path, kind):
    """Empty packs, which weigh nothing, fill an incomplete update and a shorter evaluation: one static program each."""
    update = {
        "sequences_per_update": {"squad": 7, "tokens": 20}.get(kind, 11),
        "micro_batch": 2,
    }
    run = prepared(checkpoint, tmp_path, kind, batch=update)
    assert len(run.task.training_packs) % run.batches.packs_per_update, "no update is incomplete"
    # The last update, with and without its empty packs.
    packs, _ = pairs(run)[-1]
    rows = len(packs["scale"])
    filled = {}
    for name, values in packs.items():
        empty = np.zeros((4, *values.shape[1:]), values.dtype)
        filled[name] = np.concatenate([values, empty])
    filled["scale"] = np.full(rows + 4, packs["scale"][0] * (rows + 4) / rows)
    expected, expected_gradients = gradients_of(run.engine, packs)
    outcome, gradients = gradients_of(run.engine, filled)
    assert outcome.metrics == pytest.approx(expected.metrics, rel=1e-12)
    assert_same(found=gradients, expected=expected_gradients, dtype=torch.float64)

    programs = count_programs(run.engine.model)
    run.engine.model.float()
    sequences = 0
    for _ in range(run.batches.updates_per_epoch):
        batch = next(run.batches)
        sequences += run.task.count(batch)["sequences"]
        run.engine.accumulate(batch)
    assert len(programs) == 1
    assert sequences == len(run.task.training)
    held_out = [tuple(batch[name].shape for name in run.task.fields) for batch in run.batches.held_out()]
    assert len(held_out) > 0
    assert len(set(held_out)) == 1


@pytest.mark.parametrize(
    "kind, packer",
    [*((kind, "optimal") for kind in KINDS), ("squad", "greedy")],
)
def test_packed_updates_are_the_unpacked_ones(checkpoint, tmp_path, kind, packer):
    """Gradients, metrics and, after an epoch of updates, weights, in float64."""
    run = prepared(checkpoint, tmp_path, kind, data={"packer": packer})
    assert run.task.training_packs.packing.packing_factor > 1.1
    engines = (
        run.engine,
        prepared(checkpoint, tmp_path, kind, data={"packer": packer}).engine,
    )
    for step, batches in enumerate(pairs(run)):
        packed, unpacked = (gradients_of(engine, batch) for engine, batch in zip(engines, batches))
        assert packed[0].metrics == pytest.approx(unpacked[0].metrics, rel=1e-12)
        # From the second update on, the differences of the weights add to those of rounding.
        if step == 0:
            assert_same(found=packed[1], expected=unpacked[1], dtype=torch.float64)
        counts, counts_alone = map(run.task.count, batches)
        assert counts.pop("packs") <= counts_alone.pop("packs")
        assert counts == counts_alone
        for engine, batch in zip(engines, batches):
            engine.step(batch, 1e-3)
    weights = [[weight.detach() for weight in without_key_bias(engine.model)] for engine in engines]
    assert relative_error(*weights) < 1e-10


def test_a_mean_over_each_micro_batch_would_be_another_update(checkpoint, tmp_path):
    """Negative control: the usual normalisation gives another gradient."""
    run = prepared(checkpoint, tmp_path, "squad", batch={"micro_batch": 1})
    batch, _ = pairs(run)[0]
    _, expected = gradients_of(run.engine, batch)
    of_each_row = 1.0 / np.maximum(1, (batch["sequence_numbers"] > 0).sum(axis=1))
    _, gradients = gradients_of(run.engine, {**batch, "scale": of_each_row})
    assert relative_error(gradients, expected) > 0.01


def test_packed_inference_gives_what_unpacked_inference_gives(run):
    task = run.task
    packing = pack_inputs(
        task.evaluation,
        max_sequence_length=SLOTS,
        packer="none",
        max_sequences_per_pack=1,
    )
    assert task.evaluation_packs.packing.packing_factor > 1.2
    assert packing.packing_factor == 1.0
    layout = run.batches.layout
    packed = task.predict(run.engine, in_order(task.evaluation_packs, layout)).outputs
    alone = task.predict(run.engine, in_order(ExamplePacks(task.evaluation, packing), layout)).outputs
    assert len(packed) == len(alone) == len(task.evaluation)
    for first, second in zip(packed, alone):
        assert first.shape == second.shape
        assert float(np.abs(first - second).max()) <= 1e-12
    scored, expected = map(task.score, (packed, alone))
    assert scored.metrics == pytest.approx(expected.metrics, rel=1e-9)
    # A part of the rows has counts, but no outputs that could be scored.
    part = task.predict(run.engine, islice(in_order(task.evaluation_packs, layout), 1))
    assert part.outputs is None
    assert part.counts["tokens"] > 0
    if task.name == "squad":
        answers = scored.files["predictions.json"]
        assert answers == expected.files["predictions.json"]
        assert list(answers) == [f"q{number}" for number in range(20)]
        assert len(set(answers.values())) > 3


def test_outputs_that_are_not_finite_are_no_scores(run, monkeypatch):
    monkeypatch.setattr(
        run.engine,
        "predict",
        lambda batch: np.full((*batch["input_ids"].shape, 2), np.nan),
    )
    evaluation = run.task.evaluate(run.engine, run.batches.held_out())
    assert np.isnan(evaluation.loss)
    assert list(evaluation.metrics) == ["loss"]
    assert evaluation.counts["sequences"] == len(run.task.evaluation)
    assert not evaluation.files
    assert run.task.evaluate(run.engine, []) is None


def test_a_run_can_compare_itself_with_its_sequences_unpacked(run):
    """Run the comparison of --compare-unpacked for every task; the scales are in float32."""
    compared = compare_unpacked(run.engine, run.batches, updates=2)
    assert compared is not None
    assert compared.packing_factor > 1.2
    assert compared.loss_difference <= 1e-6
    assert compared.gradient_difference <= relative_tolerance(dtype=torch.float32)


def test_a_task_keeps_its_contract(run):
    task = run.task
    network = run.engine.model
    assert isinstance(task, task_class(task.name))
    assert dataclasses.is_dataclass(task.model)
    assert set(task.scales) <= set(task.fields)
    assert "sequences" in task.counts
    assert set(task.counts.values()) <= set(task.layout(task.config, 1.0).fields)
    assert all(network.get_submodule(head.module) for head in task.heads)
    # The arguments of the network are the fields, with a suffix of capitals.
    arguments = network.forward.__code__.co_varnames[1 : len(task.fields) + 1]
    assert tuple(re.sub("_[A-Z]+$", "", argument) for argument in arguments) == task.fields
    batch = run.batches.first()
    with torch.no_grad():
        output = network(*(torch.from_numpy(batch[name]) for name in task.fields))
    assert output._fields == task.outputs
    assert output._fields[0] == "loss"
    assert all(value.shape == () for value in output)
    assert {metric.sum for metric in task.metrics} <= set(task.outputs)
    assert set(task.losses) <= {metric.name for metric in task.metrics}
    # Its packs travel to another process, as a static engine's feed wants.
    layout = run.batches.layout
    expected = GlobalBatches(task.training_packs, layout).first()
    for name, values in GlobalBatches(task.training_packs.again()(), layout).first().items():
        assert np.array_equal(values, expected[name])


@pytest.mark.parametrize("kind", sample(KINDS, 2))
def test_compiled_its_graphs_are_static(checkpoint, tmp_path, kind, monkeypatch):
    """engine.compile, as in pre-training: one training program for the whole data set, the same losses."""
    graphs = count_graphs(monkeypatch)
    losses = []
    for compiled in (False, True):
        run = prepared(
            checkpoint,
            tmp_path,
            kind,
            dtype=torch.float32,
            engine={"compile": compiled},
        )
        steps = range(run.batches.updates_per_epoch)
        losses.append([run.engine.step(next(run.batches), 1e-3).loss for _ in steps])
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)
    assert len(graphs) == graphs_of(run.engine.model)


def test_an_update_is_clipped_as_a_whole(checkpoint, tmp_path):
    moments = []
    for bound in (None, 1e-3):
        run = prepared(
            checkpoint,
            tmp_path,
            "squad",
            optimizer={"max_gradient_norm": bound, "name": "lamb"},
        )
        run.engine.step(pairs(run)[0][0], 1e-3)
        first_moments = run.engine.state()["optimizer"]["exp_avg"].values()
        moments.append(torch.cat([moment.flatten() for moment in first_moments]))
    # The first moment is a tenth of the gradient.
    assert float(moments[0].norm()) > 2e-4
    assert float(moments[1].norm()) == pytest.approx(1e-4, rel=1e-3)
    similarity = torch.nn.functional.cosine_similarity(*moments, dim=0)
    assert similarity.item() == pytest.approx(1.0)
