"""Every task in packs is the task: probabilities, updates, answers and scores are those of each sequence alone."""

import dataclasses
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
from tests.tolerances import assert_same, relative_error, relative_tolerance


def prepared(checkpoint, folder, kind, *, dtype=torch.float64, **sections):
    """A task on a tiny file, with an engine of this type."""
    if kind == "squad":
        sections.setdefault("of_task", {"null_answers": True})
    options = {"without_answer": 4} if kind == "squad" else {}
    made = prepare(tiny_config(checkpoint, training_file(folder, kind, **options), task=kind, **sections))
    made.engine.model.to(dtype)
    made.engine.optimizer = build_optimizer(made.engine.model, made.config.optimizer, betas=(0.9, 0.999))
    return made


def both(made, epoch=0):
    """The batches of an epoch, and those of the same sequences each alone in its row; scales in float64."""
    packs, layout = made.task.training_packs, made.batches.layout
    order = packs.order(epoch)
    for first in range(0, len(order), layout.packs_per_update):
        numbers = order[first : first + layout.packs_per_update]
        for batch in (packs.batch(numbers, epoch), packs.alone(numbers, epoch)):
            shape = layout.of_packs(len(batch["input_ids"]))
            filled = shape.filled(batch)
            for name, counted in layout.scales.items():
                scale = shape.micro_batches_per_update / np.count_nonzero(filled[counted])
                filled[name] = np.full(len(filled["input_ids"]), scale)
            yield filled


def pairs(made, epoch=0):
    found = list(both(made, epoch))
    return list(zip(found[::2], found[1::2]))


def gradients_of(engine):
    """The key's bias has a gradient of zero in exact arithmetic: compared as if it were."""
    found = [
        torch.zeros(1) if name.endswith("key.bias") else parameter.grad.clone()
        for name, parameter in engine.model.named_parameters()
        if parameter.grad is not None
    ]
    return found


MASK = torch.tensor([[1, 1, 2, 2, 2, 3, 0, 0]], dtype=torch.int32)
PRESENT = torch.tensor([[True, True, True, False]])


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_sequence_has_the_probabilities_it_has_alone(dtype, attention):
    logits = torch.randn(1, 8, dtype=dtype)
    found = _span_log_probabilities(logits, MASK, PRESENT, hidden_score(attention))
    for number, slots in enumerate((slice(0, 2), slice(2, 5), slice(5, 6))):
        assert torch.allclose(found[0, number, slots], torch.log_softmax(logits[0, slots], dim=0), rtol=0, atol=1e-6)
        assert torch.exp(found[0, number, slots]).sum().item() == pytest.approx(1.0)
        assert torch.exp(found[0, number]).sum() == torch.exp(found[0, number, slots]).sum()  # others: exactly 0


@pytest.mark.parametrize(
    "attention, value", [("eager", 3.0), ("eager", 300.0), ("sdpa", 3.0), ("sdpa", 1e4), ("sdpa", 1e30)]
)
def test_other_sequences_logits_have_no_effect(attention, value):
    logits = torch.randn(1, 8)
    before = _span_log_probabilities(logits, MASK, PRESENT, hidden_score(attention))[0, 1, 2:5]
    logits[0, [0, 1, 5, 6, 7]] = value
    assert torch.equal(_span_log_probabilities(logits, MASK, PRESENT, hidden_score(attention))[0, 1, 2:5], before)


def test_a_sequence_that_is_not_there_is_finite():
    logits = torch.randn(1, 8, requires_grad=True)
    found = _span_log_probabilities(logits, MASK, PRESENT, float("-inf"))
    assert torch.isfinite(found[0, 3]).all()
    (found[0, 3].sum() * 0.0 + found[0, 0, 0]).backward()
    assert torch.isfinite(logits.grad).all() and float(logits.grad[0, 2:].abs().max()) == 0.0


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("attention", ["eager", "sdpa", "varlen"])
def test_other_sequences_tokens_have_no_effect(checkpoint, tmp_path, attention, kind):
    """The whole network: other tokens in the other sequences of a row leave a sequence's predictions as they were."""
    made = prepared(checkpoint, tmp_path, kind, engine={"attention": attention, "threads": 1})
    batch = made.batches.first()
    row = int(np.argmax((batch["input_mask"] == 2).any(axis=1)))
    first = batch["input_mask"] == 1
    ids = np.where(first, batch["input_ids"], (batch["input_ids"] * 7 + 3) % 40).astype(np.int32)
    changed = {**batch, "input_ids": ids}
    before, after = (dict(made.task.outputs_of(made.engine.predict(each), each)) for each in (batch, changed))
    one, other = (int(batch["sequence_numbers"][row, place]) - 1 for place in (0, 1))
    assert float(np.abs(before[one] - after[one]).max()) <= 1e-12
    assert float(np.abs(before[other] - after[other]).max()) > 1e-6


def random_inputs(number, seed=0):
    rng = np.random.default_rng(seed)
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


@pytest.mark.parametrize("packer", ["none", "greedy", "first_fit", "best_fit", "spfhp", "lpfhp", "nnlshp", "optimal"])
def test_every_sequence_once_an_epoch_and_the_same_ones_alone(packer):
    inputs = random_inputs(50)
    packing = pack_inputs(inputs, max_sequence_length=SLOTS, packer=packer, max_sequences_per_pack=3)
    packs = ExamplePacks(inputs, packing, seed=4)
    starts = np.cumsum(inputs.lengths) - inputs.lengths
    epochs = []
    for epoch in range(2):
        of_update = []
        for numbers in np.array_split(packs.order(epoch), 5):
            found = []
            for batch in (packs.batch(numbers, epoch), packs.alone(numbers, epoch)):
                of_batch = []
                for row, place in zip(*np.nonzero(batch["sequence_numbers"])):
                    number = int(batch["sequence_numbers"][row, place]) - 1
                    own = batch["input_mask"][row] == place + 1
                    tokens = slice(starts[number], starts[number] + inputs.lengths[number])
                    assert (batch["input_ids"][row, own] == inputs.input_ids[tokens]).all()
                    assert (batch["segment_ids"][row, own] == inputs.segment_ids[tokens]).all()
                    assert (batch["words"][row, own] == inputs.slots["words"][tokens]).all()
                    assert (batch["positions"][row, own] == np.arange(inputs.lengths[number])).all()
                    slot = int(np.flatnonzero(own)[0])
                    assert batch["cls_positions"][row, place] == slot
                    assert batch["start_positions"][row, place] == slot + inputs.slot_targets["start_positions"][number]
                    assert (batch["labels"][row, place] == inputs.targets["labels"][number]).all()
                    of_batch.append(number)
                found.append(sorted(of_batch))
            assert found[0] == found[1] and len(packs.alone(numbers, epoch)["input_ids"]) == len(found[0])
            of_update += found[0]
        assert sorted(of_update) == list(range(50))
        epochs.append(of_update)
    assert epochs[0] != epochs[1], "each epoch deals the sequences out anew"


@pytest.mark.parametrize("kind", KINDS)
def test_every_update_has_the_same_shapes(checkpoint, tmp_path, kind):
    """An incomplete update and a shorter evaluation are filled with empty packs, which weigh nothing: one static
    program each.
    """
    update = {"sequences_per_update": {"squad": 7, "tokens": 20}.get(kind, 11), "micro_batch": 2}
    made = prepared(checkpoint, tmp_path, kind, dtype=torch.float32, batch=update)
    per_epoch = made.batches.updates_per_epoch
    assert len(made.task.training_packs) % made.batches.packs_per_update, "no update is incomplete"
    programs, sequences = count_programs(made.engine.model), 0
    for _ in range(per_epoch):
        batch = next(made.batches)
        sequences += made.task.count(batch)["sequences"]
        made.engine.step(batch, 1.0e-3)
    assert len(programs) == 1 and sequences == len(made.task.training)
    held_out = [tuple(batch[name].shape for name in made.task.fields) for batch in made.batches.held_out()]
    assert len(held_out) > 0 and len(set(held_out)) == 1
    # The last update, with and without its empty packs.
    packs = [batch for batch, _ in pairs(prepared(checkpoint, tmp_path, kind, batch=update))][-1]
    engine = prepared(checkpoint, tmp_path, kind, batch=update).engine
    results = []
    for extra in (0, 4):
        filled = {}
        for name, values in packs.items():
            filled[name] = np.concatenate([values, np.zeros((extra, *values.shape[1:]), values.dtype)])
        filled["scale"] = np.full(len(filled["scale"]), packs["scale"][0] * len(filled["scale"]) / len(packs["scale"]))
        results.append((engine.accumulate(filled).metrics, gradients_of(engine)))
        engine.optimizer.zero_grad(set_to_none=True)
    assert results[0][0] == pytest.approx(results[1][0], rel=1e-12)
    assert_same(found=results[1][1], expected=results[0][1], dtype=torch.float64)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("packer", ["optimal", "greedy"])
def test_packed_updates_are_the_unpacked_ones(checkpoint, tmp_path, kind, packer):
    """Gradients, metrics and, after an epoch of updates, weights, in float64."""
    packed, unpacked = (prepared(checkpoint, tmp_path, kind, data={"packer": packer}).engine for _ in range(2))
    made = prepared(checkpoint, tmp_path, kind, data={"packer": packer})
    assert made.task.training_packs.packing.packing_factor > 1.1
    for step, batches in enumerate(pairs(made)):
        found = []
        for engine, batch in zip((packed, unpacked), batches):
            metrics, counts = engine.accumulate(batch).metrics, made.task.count(batch)
            found.append((metrics, counts, gradients_of(engine)))
            engine.optimizer.zero_grad(set_to_none=True)
            engine.step(batch, 1e-3)
        assert found[0][0] == pytest.approx(found[1][0], rel=1e-12)
        assert {**found[0][1], "packs": 0} == {**found[1][1], "packs": 0}
        assert found[0][1]["packs"] <= found[1][1]["packs"]
        # From the second update on, the differences of the weights add to those of rounding.
        if step == 0:
            assert_same(found=found[0][2], expected=found[1][2], dtype=torch.float64)
    weights = [
        [parameter.detach() for name, parameter in engine.model.named_parameters() if not name.endswith("key.bias")]
        for engine in (packed, unpacked)
    ]
    assert relative_error(weights[0], weights[1]) < 1e-10


def test_a_mean_over_each_micro_batch_would_be_another_update(checkpoint, tmp_path):
    """Negative control: the usual normalisation gives another gradient."""
    made = prepared(checkpoint, tmp_path, "squad", batch={"micro_batch": 1})
    batch, _ = pairs(made)[0]
    found = []
    for scale in (batch["scale"], 1.0 / np.maximum(1, (batch["sequence_numbers"] > 0).sum(axis=1))):
        made.engine.accumulate({**batch, "scale": scale})
        found.append(gradients_of(made.engine))
        made.engine.optimizer.zero_grad(set_to_none=True)
    assert relative_error(found[1], found[0]) > 0.01


@pytest.mark.parametrize("kind", KINDS)
def test_packed_inference_gives_what_unpacked_inference_gives(checkpoint, tmp_path, kind):
    made = prepared(checkpoint, tmp_path, kind)
    task = made.task
    alone = ExamplePacks(
        task.evaluation,
        pack_inputs(task.evaluation, max_sequence_length=SLOTS, packer="none", max_sequences_per_pack=1),
    )
    assert task.evaluation_packs.packing.packing_factor > 1.2 and alone.packing.packing_factor == 1.0
    outputs = [
        task.predict(made.engine, in_order(packs, made.batches.layout)).outputs
        for packs in (task.evaluation_packs, alone)
    ]
    assert len(outputs[0]) == len(task.evaluation)
    # A part of the rows has counts, but no outputs that could be scored.
    part = task.predict(made.engine, islice(in_order(task.evaluation_packs, made.batches.layout), 1))
    assert part.outputs is None and part.counts["tokens"] > 0
    for first, second in zip(*outputs):
        assert first.shape == second.shape and float(np.abs(first - second).max()) <= 1e-12
    found, expected = (task.score(each) for each in outputs)
    assert found.metrics == pytest.approx(expected.metrics, rel=1e-9)
    if kind == "squad":
        assert found.files["predictions.json"] == expected.files["predictions.json"]
        assert list(found.files["predictions.json"]) == [f"q{number}" for number in range(20)]
        assert len(set(found.files["predictions.json"].values())) > 3


def test_dropout_is_applied_in_training_only(checkpoint, tmp_path):
    made = prepared(checkpoint, tmp_path, "single_label", model={"hidden_dropout": 0.5}, dtype=torch.float32)
    batch = made.batches.first()
    assert made.engine.accumulate(batch).loss != made.engine.accumulate(batch, dropout=False).loss
    assert (made.engine.predict(batch) == made.engine.predict(batch)).all()


@pytest.mark.parametrize("kind", ["squad", "regression", "tokens"])
def test_half_precision_is_near(checkpoint, tmp_path, kind):
    outputs = {}
    for precision in ("float32", "bfloat16"):
        made = prepared(checkpoint, tmp_path, kind, dtype=torch.float32, engine={"precision": precision})
        batch = made.batches.first()
        loss = made.engine.step(batch, 1e-3).loss
        outputs[precision] = loss, made.engine.predict(batch)[batch["input_mask"].any(axis=1)]
    assert outputs["bfloat16"][0] == pytest.approx(outputs["float32"][0], rel=0.1)
    error = np.abs(outputs["bfloat16"][1] - outputs["float32"][1]).max()
    assert 0 < error < 0.1


@pytest.mark.parametrize("kind", KINDS)
def test_compiled_its_graphs_are_static(checkpoint, tmp_path, kind, monkeypatch):
    """engine.compile, as in pre-training: one training program for the whole data set, the same losses."""
    graphs = count_graphs(monkeypatch)
    made = [
        prepared(checkpoint, tmp_path, kind, dtype=torch.float32, engine={"compile": compiled})
        for compiled in (False, True)
    ]
    losses = []
    for run in made:
        losses.append([run.engine.step(next(run.batches), 1e-3).loss for _ in range(run.batches.updates_per_epoch)])
    assert losses[0] == pytest.approx(losses[1], rel=1e-5) and len(graphs) == graphs_of(made[1].engine.model)


def test_an_update_is_clipped_as_a_whole(checkpoint, tmp_path):
    made = [
        prepared(checkpoint, tmp_path, "squad", optimizer={"max_gradient_norm": bound, "name": "lamb"})
        for bound in (None, 1e-3)
    ]
    moments = []
    for each in made:
        each.engine.step(pairs(each)[0][0], 1e-3)
        moments.append(torch.cat([tensor.flatten() for tensor in each.engine.state()["optimizer"]["exp_avg"].values()]))
    # The first moment is a tenth of the gradient.
    assert float(moments[0].norm()) > 2e-4 and float(moments[1].norm()) == pytest.approx(1e-4, rel=1e-3)
    assert torch.nn.functional.cosine_similarity(moments[0], moments[1], dim=0).item() == pytest.approx(1.0)


@pytest.mark.parametrize("kind", KINDS)
def test_a_task_keeps_its_contract(checkpoint, tmp_path, kind):
    made = prepared(checkpoint, tmp_path, kind, dtype=torch.float32)
    task, network = made.task, made.engine.model
    assert isinstance(task, task_class(kind)) and task.name == kind
    assert set(task.scales) <= set(task.fields) and "sequences" in task.counts
    assert set(task.counts.values()) <= set(task.layout(task.config, 1.0).fields)
    arguments = network.forward.__code__.co_varnames[1 : len(task.fields) + 1]
    names = [name.rsplit("_", 1)[0] if name.rsplit("_", 1)[-1].isupper() else name for name in arguments]
    assert tuple(names) == task.fields
    assert [block for head in task.heads for block in [network.get_submodule(head.module)]]
    batch = next(made.batches)
    with torch.no_grad():
        output = network(*(torch.from_numpy(batch[name]) for name in task.fields))
    assert output._fields == task.outputs and output._fields[0] == "loss" and all(value.shape == () for value in output)
    assert {metric.sum for metric in task.metrics} <= set(task.outputs)
    assert set(task.losses) <= {metric.name for metric in task.metrics}
    # Its packs travel to another process, as a static engine's feed wants.
    layout = made.batches.layout
    again = GlobalBatches(task.training_packs.again()(), layout)
    for name, values in again.first().items():
        assert np.array_equal(values, GlobalBatches(task.training_packs, layout).first()[name])
    assert dataclasses.is_dataclass(task.model)


@pytest.mark.parametrize("kind", KINDS)
def test_a_run_can_compare_itself_with_its_sequences_unpacked(checkpoint, tmp_path, kind):
    """Run the comparison of --compare-unpacked for every task, in the precision of the engine."""
    made = prepared(checkpoint, tmp_path, kind, dtype=torch.float32)
    found = compare_unpacked(made.engine, made.batches, updates=2)
    assert found is not None and found.packing_factor > 1.2
    assert found.loss_difference <= 1e-5 and found.gradient_difference <= relative_tolerance(dtype=torch.float32)
