"""The heart of the project: a packed update equals the update on the same sequences, each alone in its row.

Loss, per-sequence losses, accuracies and every parameter's gradient, in float64, for random lengths, packing depths,
micro-batch sizes and accumulations; three tests of the test show that it notices what packing could break.
"""

from __future__ import annotations

from typing import Dict, NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ipu_packed_bert.model.loss import _sequence_means, correct, cross_entropy
from ipu_packed_bert.model.packed import BATCH_FIELDS, PackedBertForPreTraining
from ipu_packed_bert.settings.schema import LossConfig
from tests.packed_examples import fill_up, lay_out, random_packs, random_sequences, with_scales
from tests.tiny_runs import TINY
from tests.tolerances import assert_same, relative_error, relative_tolerance

SLOTS = 24
MODEL = TINY
LOSSES = [
    pytest.param(LossConfig(normalisation=normalisation, next_sentence=next_sentence), id=f"{normalisation}-{name}")
    for normalisation in ("token", "sequence")
    for next_sentence, name in ((True, "nsp"), (False, "no-nsp"))
]


class Update(NamedTuple):
    """Return the means over an update of micro-batches, and the gradients by parameter."""

    loss: float
    mlm_loss: float
    nsp_loss: float
    mlm_correct: float
    nsp_correct: float
    gradients: Dict[str, torch.Tensor]


def build(loss, *, attention="eager", dtype=torch.float64, model=MODEL, spread=0.3):
    """A model with weights so large that attention looks closely at single tokens, unlike a fresh one."""
    torch.manual_seed(1)
    network = PackedBertForPreTraining(model, loss, attention=attention).to(dtype)
    with torch.no_grad():
        for parameter in network.parameters():
            parameter.add_(torch.randn(parameter.shape, dtype=dtype) * spread)
    return network


def tensors(batch, rows=slice(None)):
    return [torch.from_numpy(batch[name][rows]) for name in BATCH_FIELDS]


def update(network, batch, *, micro_batch):
    """Forward and backward as an engine does it: the mean over the micro-batches."""
    number = len(batch["input_ids"]) // micro_batch
    network.zero_grad(set_to_none=True)
    totals = torch.zeros(5, dtype=torch.float64)
    for index in range(number):
        output = network(*tensors(batch, slice(index * micro_batch, (index + 1) * micro_batch)))
        (output.loss / number).backward()
        totals += torch.stack(output).detach()
    gradients = {name: parameter.grad.clone() for name, parameter in network.named_parameters()}
    loss, mlm_loss, nsp_loss = (totals[:3] / number).tolist()
    return Update(loss, mlm_loss, nsp_loss, float(totals[3]), float(totals[4]), gradients)


def assert_equal_updates(found, expected, dtype=torch.float64):
    losses = [torch.tensor([each.loss, each.mlm_loss, each.nsp_loss]) for each in (found, expected)]
    assert_same(found=[losses[0].double()], expected=[losses[1].double()], dtype=dtype)
    assert (found.mlm_correct, found.nsp_correct) == (expected.mlm_correct, expected.nsp_correct)
    # The key's bias shifts all scores of a row alike: its gradient is zero but for rounding, so compared absolutely.
    biases = [name for name in expected.gradients if name.endswith("key.bias")]
    assert len(biases) == MODEL.num_layers
    rest = [name for name in expected.gradients if name not in biases]
    size = torch.stack([expected.gradients[name].norm() for name in rest]).norm()
    for gradients in (found.gradients, expected.gradients):
        assert all(gradients[name].norm() <= relative_tolerance(dtype=dtype) * size for name in biases)
    found_rest, expected_rest = ([each.gradients[name] for name in rest] for each in (found, expected))
    assert_same(found=found_rest, expected=expected_rest, dtype=dtype)


class Case(NamedTuple):
    """The same sequences packed and alone; what differs is only where they lie."""

    packed: Dict[str, np.ndarray]
    unpacked: Dict[str, np.ndarray]
    packs: list
    micro_batch: int
    unpacked_micro_batch: int


def make_case(seed, *, sequences, depth, micro_batch, unpacked_micro_batch, normalisation):
    rng = np.random.default_rng(seed)
    lengths = [int(length) for length in rng.integers(1, SLOTS + 1, sequences)]
    lengths[: sequences // 2] = [int(length) for length in rng.integers(1, SLOTS // 3 + 1, sequences // 2)]
    examples = random_sequences(rng, lengths=lengths, vocabulary=MODEL.vocabulary_size)
    packs = fill_up(random_packs(rng, lengths, slots=SLOTS, depth=depth), micro_batch)
    alone = fill_up([[index] for index in range(sequences)], unpacked_micro_batch)
    return Case(
        with_scales(
            lay_out(packs, examples, slots=SLOTS, depth=depth, predictions=4 + depth),
            micro_batches=len(packs) // micro_batch,
            normalisation=normalisation,
            dtype=np.float64,
        ),
        with_scales(
            lay_out(alone, examples, slots=SLOTS, depth=1, predictions=5),
            micro_batches=len(alone) // unpacked_micro_batch,
            normalisation=normalisation,
            dtype=np.float64,
        ),
        packs,
        micro_batch,
        unpacked_micro_batch,
    )


@pytest.mark.parametrize("loss", LOSSES)
@settings(max_examples=30)
@given(
    seed=st.integers(0, 2**32 - 1),
    sequences=st.integers(2, 12),
    depth=st.integers(2, 6),
    micro_batch=st.integers(1, 4),
    unpacked_micro_batch=st.integers(1, 4),
)
def test_packed_update_is_the_unpacked_update(loss, seed, sequences, depth, micro_batch, unpacked_micro_batch):
    case = make_case(
        seed,
        sequences=sequences,
        depth=depth,
        micro_batch=micro_batch,
        unpacked_micro_batch=unpacked_micro_batch,
        normalisation=loss.normalisation,
    )
    network = build(loss)
    packed = update(network, case.packed, micro_batch=case.micro_batch)
    unpacked = update(network, case.unpacked, micro_batch=case.unpacked_micro_batch)
    assert_equal_updates(packed, unpacked)
    assert (packed.nsp_loss != 0.0) is loss.next_sentence


class SequenceScores(NamedTuple):
    """Return the score of each sequence of each pack [B, D]; 0 for unused numbers."""

    mlm_loss: torch.Tensor  # means over its masked tokens
    mlm_accuracy: torch.Tensor
    nsp_loss: torch.Tensor
    nsp_accuracy: torch.Tensor


def scores_of(network, batch):
    fields = dict(zip(BATCH_FIELDS, tensors(batch)))
    with torch.no_grad():
        mlm_logits, nsp_logits = network.logits(
            *(fields[name] for name in ("input_ids", "input_mask", "segment_ids", "positions")),
            fields["masked_lm_positions"],
            fields["next_sentence_positions"],
        )
    ids = fields["masked_lm_ids"]
    numbers = fields["masked_lm_weights"]
    labels = fields["next_sentence_labels"]
    present = fields["next_sentence_weights"]
    mlm = [
        _sequence_means(values, numbers, present.shape[1])
        for values in (cross_entropy(mlm_logits, ids), correct(mlm_logits, ids).double())
    ]
    if nsp_logits is None:
        return SequenceScores(*mlm, torch.zeros_like(mlm[0]), torch.zeros_like(mlm[0]))
    return SequenceScores(*mlm, cross_entropy(nsp_logits, labels) * present, correct(nsp_logits, labels) * present)


@pytest.mark.parametrize("loss", LOSSES)
def test_each_sequence_scores_as_if_it_were_alone(loss):
    case = make_case(7, sequences=14, depth=4, micro_batch=1, unpacked_micro_batch=1, normalisation=loss.normalisation)
    assert max(len(pack) for pack in case.packs) >= 3
    network = build(loss)
    packed, unpacked = scores_of(network, case.packed), scores_of(network, case.unpacked)
    for name, found, expected in zip(SequenceScores._fields, packed, unpacked):
        where = [(row, slot) for row, pack in enumerate(case.packs) for slot in range(len(pack))]
        order = [index for pack in case.packs for index in pack]
        found_values = torch.stack([found[row, slot] for row, slot in where])
        assert torch.allclose(found_values, expected[order, 0], rtol=1e-12, atol=1e-13), name
        assert float(found.sum() - found_values.sum()) == pytest.approx(0.0, abs=1e-12)  # nothing in empty slots
    # The update's loss is made of them.
    total = update(network, case.packed, micro_batch=1)
    if loss.normalisation == "sequence":
        assert float(packed.mlm_loss.sum()) / 14 == pytest.approx(total.mlm_loss, rel=1e-12)
    assert float(packed.nsp_loss.sum()) / 14 == pytest.approx(total.nsp_loss, rel=1e-12)
    assert float(packed.nsp_accuracy.sum()) == total.nsp_correct


@pytest.mark.parametrize("normalisation", ["token", "sequence"])
def test_equality_in_float32_with_the_fast_attention(normalisation):
    loss = LossConfig(normalisation=normalisation)
    case = make_case(3, sequences=12, depth=3, micro_batch=2, unpacked_micro_batch=3, normalisation=normalisation)
    networks = {
        attention: build(loss, attention=attention, dtype=torch.float32, spread=0.1) for attention in ("eager", "sdpa")
    }
    results = {
        (attention, packing): update(network, batch, micro_batch=size)
        for attention, network in networks.items()
        for packing, batch, size in (("packed", case.packed, 2), ("unpacked", case.unpacked, 3))
    }
    for each in results.values():
        assert_equal_updates(each, results["eager", "unpacked"], dtype=torch.float32)


def test_fast_attention_is_exact_for_any_scores():
    """Scores hundreds apart, more than an additive -1000 keeps apart in float64: the mask of sdpa is -inf."""
    case = make_case(5, sequences=8, depth=3, micro_batch=2, unpacked_micro_batch=2, normalisation="token")
    errors = {}
    for attention in ("eager", "sdpa"):
        network = build(LossConfig(), attention=attention)
        with torch.no_grad():
            for layer in network.bert.encoder.layer:
                layer.attention.self.query.weight.mul_(30.0)
                layer.attention.self.key.weight.mul_(30.0)
        errors[attention] = gradient_error(case, network, case.packed)
    assert errors["sdpa"] < 1e-11
    assert errors["eager"] > 1e-6


# Three tests of the test: what packing could break makes it fail by a wide margin.


class PaddingMaskOnly(torch.nn.Module):
    def forward(self, input_mask_BS, dtype):
        return (1.0 - (input_mask_BS > 0).to(dtype))[:, None, None, :] * -1000.0


def gradient_error(case, network, packed_batch):
    unpacked = update(network, case.unpacked, micro_batch=case.unpacked_micro_batch).gradients
    packed = update(network, packed_batch, micro_batch=case.micro_batch).gradients
    return relative_error(packed.values(), unpacked.values())


@pytest.fixture
def negative_case():
    return make_case(11, sequences=12, depth=4, micro_batch=2, unpacked_micro_batch=2, normalisation="token")


def test_of_the_test_mask_removed(negative_case):
    network = build(LossConfig())
    assert gradient_error(negative_case, network, negative_case.packed) < 1e-12
    reference = update(network, negative_case.unpacked, micro_batch=2).gradients
    network.attention_mask = PaddingMaskOnly()
    # Unpacked, the padding mask is enough: the test fails for the packs only.
    alone = update(network, negative_case.unpacked, micro_batch=2).gradients
    assert_same(found=alone.values(), expected=reference.values(), dtype=torch.float64)
    assert gradient_error(negative_case, network, negative_case.packed) > 0.05


def test_of_the_test_positions_not_reset(negative_case):
    rows = len(negative_case.packs)
    running = {**negative_case.packed, "positions": np.tile(np.arange(SLOTS, dtype=np.int32), (rows, 1))}
    assert gradient_error(negative_case, build(LossConfig()), running) > 0.05


@pytest.mark.parametrize("normalisation", ["token", "sequence"])
def test_of_the_test_mean_per_micro_batch(normalisation):
    case = make_case(11, sequences=12, depth=4, micro_batch=1, unpacked_micro_batch=1, normalisation=normalisation)
    wrong = {name: values.copy() for name, values in case.packed.items()}
    for row in range(len(case.packs)):  # each micro-batch, here of one pack, by its own counts
        alone = with_scales(
            {name: values[row : row + 1] for name, values in case.packed.items()},
            micro_batches=1,
            normalisation=normalisation,
            dtype=np.float64,
        )
        wrong["mlm_scale"][row] = alone["mlm_scale"][0]
        wrong["nsp_scale"][row] = alone["nsp_scale"][0]
    network = build(LossConfig(normalisation=normalisation))
    assert gradient_error(case, network, case.packed) < 1e-12
    assert gradient_error(case, network, wrong) > 0.05
