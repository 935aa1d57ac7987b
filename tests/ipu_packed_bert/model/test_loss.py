"""The loss on logits that can be worked out by hand, and that unused slots weigh nothing."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ipu_packed_bert.model.loss import (
    PretrainingLoss,
    _first_largest,
    correct,
    cross_entropy,
)
from ipu_packed_bert.settings.schema import LossConfig

LOG2 = math.log(2.0)
LOG4 = math.log(4.0)


def int32(*rows):
    return torch.tensor(rows, dtype=torch.int32)


# Two packs, vocabulary of 4. The first holds sequence 1 with masked tokens a, b and sequence 2 with c, the second one
# sequence with d. Uniform logits cost log 4; logits with two equal leaders and two at -100 cost log 2, if a leader is
# asked for; one leader costs 0.
UNIFORM = [0.0, 0.0, 0.0, 0.0]
PAIR = [0.0, 0.0, -100.0, -100.0]
SURE = [0.0, -100.0, -100.0, -100.0]
MLM_LOGITS = torch.tensor([[UNIFORM, PAIR, SURE, SURE], [PAIR, UNIFORM, SURE, UNIFORM]])
#          a: log 4   b: log 2  c: 0      unused        d: log 2  unused ..
IDS = int32([3, 0, 0, 0], [1, 0, 0, 0])
WEIGHTS = int32([1, 1, 2, 0], [1, 0, 0, 0])
NSP_LOGITS = torch.tensor(
    [
        # sequence 1: log 2, 2: 0, slot unused
        [[0.0, 0.0], [0.0, -100.0], [5.0, 1.0]],
        # sequence 1: log 2, slots unused
        [[0.0, 0.0], [3.0, 1.0], [2.0, 9.0]],
    ]
)
NSP_LABELS = int32([1, 0, 0], [0, 0, 0])
NSP_WEIGHTS = int32([1, 1, 0], [1, 0, 0])


def loss_of(
    normalisation,
    *,
    next_sentence=True,
    mlm_scale=1.0,
    nsp_scale=1.0,
    mlm_logits=MLM_LOGITS,
):
    loss = PretrainingLoss(LossConfig(normalisation=normalisation, next_sentence=next_sentence))
    nsp = NSP_LOGITS if next_sentence else None
    mlm_scale_B = torch.full((2,), mlm_scale)
    nsp_scale_B = torch.full((2,), nsp_scale)
    return loss(mlm_logits, nsp, IDS, WEIGHTS, NSP_LABELS, NSP_WEIGHTS, mlm_scale_B, nsp_scale_B)


def test_token_normalisation_by_hand():
    # Four masked tokens, three sequences, one micro-batch: scales 1/4 and 1/3.
    output = loss_of("token", mlm_scale=1 / 4, nsp_scale=1 / 3)
    mlm_loss = (LOG4 + LOG2 + 0 + LOG2) / 4
    nsp_loss = (LOG2 + 0 + LOG2) / 3
    # argmax takes the first of equals: a (3) and d (1) are missed, b and c are right; sequence 1 of pack 1 is missed.
    expected = [mlm_loss + nsp_loss, mlm_loss, nsp_loss, 2.0, 2.0]
    assert [value.item() for value in output] == pytest.approx(expected)


def test_sequence_normalisation_by_hand():
    # Sequence 1: mean of log 4 and log 2; 2: 0; 3: log 2. Paper section 3.2.3: each weighs the same.
    output = loss_of("sequence", mlm_scale=1 / 3, nsp_scale=1 / 3)
    first = (LOG4 + LOG2) / 2
    assert output.mlm_loss.item() == pytest.approx((first + 0 + LOG2) / 3)


@pytest.mark.parametrize("normalisation", ["token", "sequence"])
def test_unused_slots_have_no_gradient(normalisation):
    logits = MLM_LOGITS.clone().requires_grad_()
    loss_of(normalisation, mlm_logits=logits).loss.backward()
    used = (WEIGHTS > 0).unsqueeze(2).expand_as(logits)
    assert not logits.grad[~used].any()
    assert logits.grad[used].any()
    assert torch.isfinite(logits.grad).all()


@pytest.mark.parametrize("normalisation", ["token", "sequence"])
def test_empty_packs_are_finite(normalisation):
    loss = PretrainingLoss(LossConfig(normalisation=normalisation))
    mlm = torch.randn(1, 4, 9, requires_grad=True)
    nsp = torch.randn(1, 3, 2, requires_grad=True)
    none_P = int32([0] * 4)
    none_D = int32([0] * 3)
    scale_B = torch.ones(1)
    output = loss(mlm, nsp, none_P, none_P, none_D, none_D, scale_B, scale_B)
    output.loss.backward()
    assert [value.item() for value in output] == [0.0] * 5
    assert not mlm.grad.any()
    assert not nsp.grad.any()


@pytest.mark.parametrize("half", [torch.float16, torch.bfloat16])
def test_half_logits_are_summed_in_float32(half):
    """In float16 a loss of 76 tokens would be off in the third digit."""
    logits = torch.randn(1, 76, 50).to(half)
    ids = torch.arange(76, dtype=torch.int32).remainder(50)[None]
    weights = torch.ones_like(ids)
    loss = PretrainingLoss(LossConfig(next_sentence=False))
    scale = torch.ones(1)
    arguments = (ids, weights, int32([0]), int32([1]), scale, scale)
    output = loss(logits, None, *arguments)
    expected = loss(logits.double(), None, *arguments)
    assert output.loss.dtype == torch.float32
    assert output.loss.item() == pytest.approx(expected.loss.item(), rel=1e-6)


def test_a_loss_that_is_not_widened_is_the_same_function():
    logits = torch.randn(2, 3, 7, dtype=torch.float64)
    labels = torch.tensor([[0, 1, 2], [3, 4, 6]])
    assert torch.equal(cross_entropy(logits, labels, widen=False), cross_entropy(logits, labels))


@settings(max_examples=60)
@given(
    seed=st.integers(0, 2**32 - 1),
    classes=st.sampled_from([1, 2, 7, 8, 9, 24, 30]),
    values=st.sampled_from([2, 5, 1000]),
)
def test_the_first_largest_is_argmax(seed, classes, values):
    """Few values have many ties; blocks of 8, none, some or none but whole ones."""
    draw = torch.Generator().manual_seed(seed)
    logits = torch.randint(-values, values, (2, 5, classes), generator=draw).float()
    assert torch.equal(_first_largest(logits, 8), torch.argmax(logits, 2))
    logits[0, 0, classes // 2] = float("nan")
    assert torch.equal(_first_largest(logits, 8), torch.argmax(logits, 2))
    labels = torch.randint(0, classes, (2, 5), generator=draw)
    assert torch.equal(correct(logits, labels, in_blocks=True), correct(logits, labels))
