"""Fine-tuning in packs is fine-tuning: probabilities, updates, answers and scores are those of each sequence alone."""
from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ipu_packed_bert.finetuning.heads import span_log_probabilities
from ipu_packed_bert.finetuning.packing import Inputs, PackedInputs, Schedule, update_cuts
from ipu_packed_bert.finetuning.run import prepare
from tests.fine_tuning_files import SLOTS, tiny_checkpoint, tiny_config, tiny_squad, tiny_table
from tests.tolerances import assert_same, relative_error

pytest.importorskip("safetensors", reason="Hugging Face's files: pip install safetensors")
KINDS = ("squad", "single_label", "multi_label", "regression")


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return tiny_checkpoint(tmp_path_factory.mktemp("weights") / "bert")


def training_file(folder, kind):
    return tiny_squad(folder / "train.json", without_answer=4) if kind == "squad" else tiny_table(folder / "train.csv", kind)


def prepared(checkpoint, folder, kind, *, unpacked=False, dtype=torch.float64, **sections):
    sections.setdefault("squad", {"null_answers": True})
    config = tiny_config(checkpoint, training_file(folder, kind), task=kind, **sections)
    made = prepare(config, unpacked=unpacked)
    made.tuner.network.to(dtype)
    tuner = type(made.tuner)(made.tuner.network, config, steps=made.schedule.steps)
    return made._replace(tuner=tuner)


# ---- the softmax of a sequence ------------------------------------------------------------------------------------------------


MASK = torch.tensor([[1, 1, 2, 2, 2, 3, 0, 0]], dtype=torch.int32)
PRESENT = torch.tensor([[True, True, True, False]])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_sequence_has_the_probabilities_it_has_alone(dtype):
    logits = torch.randn(1, 8, dtype=dtype)
    found = span_log_probabilities(logits, MASK, PRESENT)
    for number, slots in enumerate((slice(0, 2), slice(2, 5), slice(5, 6))):
        assert torch.allclose(found[0, number, slots], torch.log_softmax(logits[0, slots], dim=0), rtol=0, atol=1e-6)
        assert torch.exp(found[0, number, slots]).sum().item() == pytest.approx(1.0)
        assert torch.exp(found[0, number]).sum() == torch.exp(found[0, number, slots]).sum()  # others: exactly 0


@pytest.mark.parametrize("value", [3.0, 1e4, 1e30])
def test_neighbours_logits_cannot_be_felt(value):
    logits = torch.randn(1, 8)
    before = span_log_probabilities(logits, MASK, PRESENT)[0, 1, 2:5]
    logits[0, [0, 1, 5, 6, 7]] = value
    assert torch.equal(span_log_probabilities(logits, MASK, PRESENT)[0, 1, 2:5], before)


def test_a_sequence_that_is_not_there_is_finite():
    logits = torch.randn(1, 8, requires_grad=True)
    found = span_log_probabilities(logits, MASK, PRESENT)
    assert torch.isfinite(found[0, 3]).all()
    (found[0, 3].sum() * 0.0 + found[0, 0, 0]).backward()
    assert torch.isfinite(logits.grad).all() and float(logits.grad[0, 2:].abs().max()) == 0.0


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
def test_neighbours_tokens_cannot_be_felt(checkpoint, tmp_path, attention):
    """The whole network: other tokens in the other sequences of a row leave a sequence's probabilities as they were."""
    made = prepared(checkpoint, tmp_path, "squad", engine={"attention": attention, "threads": 1})
    rows = made.training.rows(1)
    row = int(np.argmax(rows.sequences > 1))
    batch = made.training.batch(rows, row, row + 1)
    first = batch["input_mask"][0] == 1
    changed = {**batch, "input_ids": np.where(first, batch["input_ids"], (batch["input_ids"] * 7 + 3) % 40).astype(np.int32)}
    assert (changed["input_ids"] != batch["input_ids"]).any()

    def probabilities(batch):
        fields = {name: torch.from_numpy(values) for name, values in batch.items()}
        with torch.no_grad():
            logits = made.tuner.network.logits(fields)[:, :, 0]
        return span_log_probabilities(logits, fields["input_mask"], fields["sequence_numbers"] > 0)[0]

    before, after = probabilities(batch), probabilities(changed)
    slots = torch.from_numpy(first)
    assert float((before[0, slots] - after[0, slots]).abs().max()) <= 1e-12
    assert float((before[1] - after[1])[torch.from_numpy(batch["input_mask"][0] == 2)].abs().max()) > 1e-6


# ---- packs and updates ----------------------------------------------------------------------------------------------------------


def random_inputs(number, seed=0):
    rng = np.random.default_rng(seed)
    lengths = rng.integers(4, SLOTS + 1, number)
    total = int(lengths.sum())
    return Inputs(lengths, rng.integers(1, 50, total).astype(np.int32), rng.integers(0, 2, total).astype(np.int32),
                  {"start_positions": rng.integers(0, 4, number)}, {"labels": rng.normal(size=(number, 2))})


@given(sequences=st.lists(st.integers(1, 6), min_size=1, max_size=40), data=st.data())
def test_cuts_give_every_update_some_packs(sequences, data):
    updates = data.draw(st.integers(1, len(sequences)))
    cuts = update_cuts(np.array(sequences), updates)
    assert cuts[0] == 0 and cuts[-1] == len(sequences) and (np.diff(cuts) >= 1).all() and len(cuts) == updates + 1


def test_cuts_are_nearly_even():
    rng = np.random.default_rng(1)
    sequences = rng.integers(1, 4, 1000)
    of_update = np.add.reduceat(sequences, update_cuts(sequences, 60)[:-1])
    # A cut is at most half of the largest pack from where it should be, and an update has two.
    assert np.abs(of_update - sequences.sum() / 60).max() <= 3


@pytest.mark.parametrize("packer", ["none", "greedy", "first_fit", "best_fit", "spfhp", "lpfhp", "nnlshp", "optimal"])
def test_every_sequence_once_an_epoch_and_the_same_ones_unpacked(packer):
    inputs = random_inputs(50)
    packed = PackedInputs(inputs, max_sequence_length=SLOTS, packer=packer, max_sequences_per_pack=3)
    schedules = [Schedule(packed, sequences_per_update=8, epochs=2, seed=4, unpacked=unpacked) for unpacked in (False, True)]
    assert schedules[0].steps == schedules[1].steps == 12
    starts = np.cumsum(inputs.lengths) - inputs.lengths
    epochs = []
    for step in range(12):
        of_update = []
        for schedule in schedules:
            numbers = []
            for batch in schedule.update(step, 3):
                assert float(batch["scale"]) > 0 and len(batch["input_ids"]) <= 3
                for row, place in zip(*np.nonzero(batch["sequence_numbers"])):
                    number = int(batch["sequence_numbers"][row, place]) - 1
                    own = batch["input_mask"][row] == place + 1
                    tokens = slice(starts[number], starts[number] + inputs.lengths[number])
                    assert (batch["input_ids"][row, own] == inputs.input_ids[tokens]).all()
                    assert (batch["segment_ids"][row, own] == inputs.segment_ids[tokens]).all()
                    assert (batch["positions"][row, own] == np.arange(inputs.lengths[number])).all()
                    slot = int(np.flatnonzero(own)[0])
                    assert batch["cls_positions"][row, place] == slot
                    assert batch["start_positions"][row, place] == slot + inputs.slot_targets["start_positions"][number]
                    assert (batch["labels"][row, place] == inputs.targets["labels"][number]).all()
                    numbers.append(number)
            assert float(batch["scale"]) == 1.0 / len(numbers)
            of_update.append(sorted(numbers))
        assert of_update[0] == of_update[1] and 5 <= len(of_update[0]) <= 11
        epochs.append(of_update[0])
    for epoch in (epochs[:6], epochs[6:]):
        assert sorted(sum(epoch, [])) == list(range(50))
    assert epochs[:6] != epochs[6:], "each epoch deals the sequences out anew"


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("packer", ["optimal", "greedy"])
def test_packed_updates_are_the_unpacked_ones(checkpoint, tmp_path, kind, packer):
    """Gradients, losses and, after an epoch of updates, weights, in float64."""
    packed, unpacked = (prepared(checkpoint, tmp_path, kind, unpacked=unpacked, data={"packer": packer}) for unpacked in (False, True))
    assert packed.training.packing.packing_factor > 1.1
    for step in range(packed.schedule.updates_per_epoch):
        losses, gradients = [], []
        for made in (packed, unpacked):
            loss, right, rows, sequences, tokens = made.tuner.accumulate(made.schedule.update(step, 3))
            losses.append((loss, right, sequences, tokens))
            # The key's bias has a gradient of zero in exact arithmetic: compared as if it were.
            gradients.append([torch.zeros(1) if name.endswith("key.bias") else parameter.grad.clone()
                              for name, parameter in made.tuner.network.named_parameters() if parameter.grad is not None])
            for group in made.tuner.optimizer.param_groups:
                group["lr"] = 1e-3
            made.tuner.optimizer.step()
            made.tuner.optimizer.zero_grad(set_to_none=True)
        assert losses[0][0] == pytest.approx(losses[1][0], rel=1e-12) and losses[0][1:] == losses[1][1:]
        # From the second update on, the differences of the weights add to those of rounding.
        if step == 0:
            assert_same(found=gradients[0], expected=gradients[1], dtype=torch.float64)
    weights = [[parameter.detach() for name, parameter in made.tuner.network.named_parameters() if not name.endswith("key.bias")] for made in (packed, unpacked)]
    assert relative_error(weights[0], weights[1]) < 1e-10


def test_a_mean_over_each_micro_batch_would_be_another_update(checkpoint, tmp_path):
    """Negative control: the usual normalisation gives another gradient."""
    made = prepared(checkpoint, tmp_path, "squad")

    def gradient(batches):
        made.tuner.accumulate(batches)
        found = [parameter.grad.clone() for parameter in made.tuner.network.parameters() if parameter.grad is not None]
        made.tuner.optimizer.zero_grad(set_to_none=True)
        return found

    whole = gradient(made.schedule.update(0, 1))
    batches = list(made.schedule.update(0, 1))
    each = gradient([{**batch, "scale": np.array(1.0 / len(batches) / (batch["sequence_numbers"] > 0).sum())} for batch in batches])
    assert relative_error(each, whole) > 0.01


@pytest.mark.parametrize("kind", KINDS)
def test_packed_inference_gives_what_unpacked_inference_gives(checkpoint, tmp_path, kind):
    packed, unpacked = (prepared(checkpoint, tmp_path, kind, unpacked=unpacked) for unpacked in (False, True))
    assert packed.evaluation.packing.packing_factor > 1.2 and unpacked.evaluation.packing.packing_factor == 1.0
    outputs = [made.tuner.predict(made.evaluation) for made in (packed, unpacked)]
    assert len(outputs[0]) == len(packed.evaluation.inputs)
    for first, second in zip(*outputs):
        assert first.shape == second.shape and float(np.abs(first - second).max()) <= 1e-12
    found, expected = (made.task.evaluate(each) for made, each in zip((packed, unpacked), outputs))
    assert found.metrics == pytest.approx(expected.metrics, rel=1e-9)
    if kind == "squad":
        assert found.files["predictions.json"] == expected.files["predictions.json"]
        assert list(found.files["predictions.json"]) == [f"q{number}" for number in range(20)]
        assert len(set(found.files["predictions.json"].values())) > 3


def test_dropout_is_applied_in_training_only(checkpoint, tmp_path):
    made = prepared(checkpoint, tmp_path, "single_label", model={"hidden_dropout": 0.5})
    losses = [made.tuner.accumulate(made.schedule.update(0, 3))[0] for _ in range(2)]
    assert losses[0] != losses[1]
    first, second = (made.tuner.predict(made.evaluation) for _ in range(2))
    assert all((a == b).all() for a, b in zip(first, second))


@pytest.mark.parametrize("kind", ["squad", "regression"])
def test_half_precision_is_near(checkpoint, tmp_path, kind):
    outputs = {}
    for precision in ("float32", "bfloat16"):
        made = prepared(checkpoint, tmp_path, kind, dtype=torch.float32, engine={"precision": precision})
        loss = made.tuner.step(made.schedule.update(0, 3), 1e-3).loss
        outputs[precision] = (loss, np.concatenate([each.ravel() for each in made.tuner.predict(made.evaluation)]))
    assert outputs["bfloat16"][0] == pytest.approx(outputs["float32"][0], rel=0.1)
    error = np.abs(outputs["bfloat16"][1] - outputs["float32"][1]).max()
    assert 0 < error < 0.05
