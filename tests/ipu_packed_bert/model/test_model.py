"""The network itself: the mask by hand, the gathered slots, nothing leaks, half types, pieces that can be replaced."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import nn

from ipu_packed_bert.model.packed import (
    BATCH_FIELDS,
    AttentionMask,
    GatherSlots,
    PackedBertForPreTraining,
    PaddingMask,
    hidden_score,
)
from ipu_packed_bert.settings.schema import LossConfig
from tests.packed_examples import lay_out, random_sequences, with_scales
from tests.tiny_runs import TINY

MODEL = replace(TINY, initializer_range=0.3)


def make_fields(packs=((0, 1), (2,)), lengths=(7, 12, 9)):
    examples = random_sequences(np.random.default_rng(0), lengths=lengths, vocabulary=61)
    batch = lay_out(packs, examples, slots=24, depth=3, predictions=7)
    batch = with_scales(batch, micro_batches=1, normalisation="token")
    return {name: torch.from_numpy(batch[name]) for name in BATCH_FIELDS}


def logits_of(network, fields):
    names = (
        "input_ids",
        "input_mask",
        "segment_ids",
        "positions",
        "masked_lm_positions",
        "next_sentence_positions",
    )
    with torch.no_grad():
        return network.logits(*(fields[name] for name in names))


def test_mask_by_hand():
    """A sequence of two, one of three, one slot of padding: the figure in the paper's section 3.2.2."""
    sequence_numbers = torch.tensor([[1, 1, 2, 2, 2, 0]], dtype=torch.int32)
    seen = ["110000", "110000", "001110", "001110", "001110", "000001"]
    expected = torch.tensor([[value == "1" for value in row] for row in seen])
    for attention, hidden in (("eager", -1000.0), ("sdpa", float("-inf"))):
        for dtype in (torch.float16, torch.bfloat16, torch.float32, torch.float64):
            mask = AttentionMask(attention)(sequence_numbers, dtype)
            assert mask.dtype == dtype
            assert torch.equal(mask[0, 0] == 0, expected)
            assert torch.equal(mask[0, 0] == hidden, ~expected)


def test_slots_are_gathered():
    hidden = torch.arange(2 * 4 * 3).view(2, 4, 3).float()
    slots = torch.tensor([[3, 0], [1, 1]], dtype=torch.int32)
    first, second = GatherSlots()(hidden, slots)
    assert torch.equal(first, hidden[0, [3, 0]])
    assert torch.equal(second, hidden[1, [1, 1]])


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
def test_a_sequence_does_not_depend_on_its_neighbours(attention):
    """Bit for bit: another text in the neighbouring sequence, or in padding, changes nothing."""
    network = PackedBertForPreTraining(MODEL, LossConfig(), attention=attention).eval()
    fields = make_fields(packs=[(0, 1)])
    before = logits_of(network, fields)
    changed = fields["input_ids"].clone()
    changed[0, 7:] = 60 - changed[0, 7:]  # the second sequence and the padding
    after = logits_of(network, {**fields, "input_ids": changed})
    same_tokens = (before.mlm_BPV == after.mlm_BPV).all(2)
    assert same_tokens[fields["masked_lm_weights"] == 1].all()
    assert not same_tokens[fields["masked_lm_weights"] == 2].any()
    assert torch.equal(before.nsp_BD2[:, 0], after.nsp_BD2[:, 0])


def test_the_tied_table_is_registered_once():
    network = PackedBertForPreTraining(MODEL, LossConfig())
    shapes = [tuple(parameter.shape) for parameter in network.parameters()]
    assert shapes.count((61, 16)) == 1
    assert "decoder" not in " ".join(network.state_dict())
    assert list(network.buffers()) == []
    # Both uses reach its gradient: rows of tokens that are only predicted, and never read, have one too.
    fields = make_fields()
    network(*fields.values()).loss.backward()
    gradient = network.bert.embeddings.word_embeddings.weight.grad
    unread = [token for token in range(61) if token not in fields["input_ids"]]
    assert unread
    assert gradient[unread].abs().sum(1).all()


def test_initial_values():
    torch.manual_seed(0)
    network = PackedBertForPreTraining(MODEL, LossConfig())
    for name, parameter in network.named_parameters():
        if name.endswith("bias"):
            assert not parameter.any(), name
        elif "LayerNorm" in name:
            assert (parameter == 1.0).all(), name
        else:
            assert 0.2 < parameter.std() < 0.4, name


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
def test_each_dropout_draws_in_training_and_not_in_evaluation(attention):
    """Embeddings, attention weights, and the end of both halves of each layer; one at a time."""
    model = replace(MODEL, hidden_dropout=0.2, attention_dropout=0.1)
    network = PackedBertForPreTraining(model, LossConfig(), attention=attention)
    dropouts = {name: module for name, module in network.named_modules() if isinstance(module, nn.Dropout)}
    assert len(dropouts) == 1 + 2 * 3
    for name, module in dropouts.items():
        assert module.p == (0.1 if "self" in name else 0.2)
        module.p = 0.0
    fields = make_fields()
    without = network.eval()(*fields.values()).loss
    for name, module in dropouts.items():
        module.p = 0.5
        assert network.train()(*fields.values()).loss != without, name
        assert network.eval()(*fields.values()).loss == without, name
        module.p = 0.0


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
def test_alone_in_its_row_the_padding_mask_is_enough(attention):
    """Each output for each sequence; an empty row is finite."""
    network = PackedBertForPreTraining(MODEL, LossConfig(), attention=attention).eval()
    fields = make_fields(packs=[(0,), (1,), ()])
    expected = network(*fields.values())
    network.attention_mask = PaddingMask(hidden_score(attention))
    mask = network.attention_mask(fields["input_mask"], torch.float32)
    assert (mask == 0).sum((1, 2, 3)).tolist() == [7, 12, 24]
    for actual, wanted in zip(network(*fields.values()), expected):
        assert torch.isfinite(actual)
        assert torch.allclose(actual, wanted, rtol=1e-6)


def test_batch_fields_are_the_arguments_in_order():
    names = PackedBertForPreTraining.forward.__code__.co_varnames[1 : len(BATCH_FIELDS) + 1]
    assert tuple(name.rsplit("_", 1)[0] for name in names) == BATCH_FIELDS
