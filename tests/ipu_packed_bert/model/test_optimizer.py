"""LAMB against a few lines of its definition, AdamW against torch's, the paper's law of the betas, the schedule."""

import copy
import math
from dataclasses import replace
from fractions import Fraction

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ipu_packed_bert.model.optimizer import (
    MOMENTS,
    _AdamW,
    _Lamb,
    _LambInPieces,
    build_optimizer,
    clip,
    gradient_norm,
    learning_rate,
    load_neutral_state,
    neutral_state,
    warmup_linear,
)
from ipu_packed_bert.model.packed import PackedBertForPreTraining
from ipu_packed_bert.settings.config import Config
from ipu_packed_bert.settings.rules import cross_check
from ipu_packed_bert.settings.schema import (
    SCHEDULES,
    LossConfig,
    ModelConfig,
    OptimizerConfig,
    RunConfig,
)

SHAPES = [(5, 3), (7,), (1,), (2, 2, 4)]


def make_weights(scale=1.0):
    generator = torch.Generator().manual_seed(3)
    values = [scale * torch.randn(shape, dtype=torch.float64, generator=generator) for shape in SHAPES]
    return [torch.nn.Parameter(value) for value in values]


def gradients_of(step):
    generator = torch.Generator().manual_seed(100 + step)
    return [torch.randn(shape, dtype=torch.float64, generator=generator) * 10.0 ** (step % 3) for shape in SHAPES]


def lamb_by_definition(weight, gradients, *, lr, betas, eps, weight_decay, bias_correction, max_weight_norm):
    """LAMB on one tensor, from its published definition; independent of the one tested."""
    b1, b2 = betas
    w = weight.detach().clone()
    m = torch.zeros_like(weight)
    v = torch.zeros_like(weight)
    for step, g in enumerate(gradients, start=1):
        m = b1 * m + (1 - b1) * g
        v = b2 * v + (1 - b2) * g**2
        c1, c2 = (1 - b1**step, 1 - b2**step) if bias_correction else (1, 1)
        u = (m / c1) / ((v / c2) ** 0.5 + eps) + weight_decay * w
        w_norm = float((w**2).sum() ** 0.5)
        u_norm = float((u**2).sum() ** 0.5)
        ratio = min(w_norm, max_weight_norm) / u_norm if w_norm and u_norm and max_weight_norm else 1.0
        w = w - lr * ratio * u
    return w


OPTIONS = dict(
    lr=1e-3,
    betas=(0.9, 0.999),
    eps=1e-8,
    weight_decay=1e-2,
    bias_correction=True,
    max_weight_norm=65500.0,
)


@pytest.mark.parametrize("bias_correction", [True, False])
@pytest.mark.parametrize("weight_decay", [0.0, 0.01])
@pytest.mark.parametrize("max_weight_norm", [65500.0, 1.5, 0.0])
@pytest.mark.parametrize("lamb", [_Lamb, _LambInPieces])
def test_lamb_is_its_definition(lamb, bias_correction, weight_decay, max_weight_norm, monkeypatch):
    monkeypatch.setattr(_LambInPieces, "PIECE", 6)  # two tensors have several pieces
    options = dict(lr=0.02, betas=(0.9, 0.99), eps=1e-6, weight_decay=weight_decay)
    options.update(bias_correction=bias_correction, max_weight_norm=max_weight_norm)
    weights = make_weights()
    with torch.no_grad():
        weights[1].zero_()  # a weight of norm 0 moves with ratio 1, as biases do at the start
    by_weight = zip(*map(gradients_of, range(5)))
    expected = [lamb_by_definition(weight, gradients, **options) for weight, gradients in zip(weights, by_weight)]
    optimizer = lamb(weights, **options)
    for step in range(5):
        for weight, gradient in zip(weights, gradients_of(step)):
            weight.grad = gradient
        optimizer.step()
    for actual, wanted in zip(weights, expected):
        assert torch.allclose(actual, wanted, rtol=1e-13, atol=1e-15)


@pytest.mark.parametrize("lamb", [_Lamb, _LambInPieces])
def test_lamb_without_a_gradient_and_with_a_zero_one(lamb):
    weights = make_weights()
    before = [weight.detach().clone() for weight in weights]
    optimizer = lamb(weights, **{**OPTIONS, "weight_decay": 0.0})
    weights[0].grad = torch.zeros_like(weights[0])  # update of norm 0: nothing moves, nothing becomes NaN
    optimizer.step()
    assert all(torch.equal(weight, old) for weight, old in zip(weights, before))


@pytest.mark.parametrize("bias_correction", [True, False])
@pytest.mark.parametrize("name", ["lamb", "adamw"])
def test_every_coefficient_of_a_configured_update(model, name, bias_correction):
    """Rate, betas, eps, decay and bound of three updates of a whole network, parameter by parameter."""
    settings = OptimizerConfig(name=name, weight_decay=0.05, bias_correction=bias_correction)
    before = {key: parameter.detach().clone() for key, parameter in model.double().named_parameters()}
    optimizer = build_optimizer(model, settings, betas=(0.8, 0.95))
    gradients = {key: [torch.randn_like(weight) for _ in range(3)] for key, weight in before.items()}
    for step in range(3):
        for group in optimizer.param_groups:
            group["lr"] = 0.02
        for key, parameter in model.named_parameters():
            parameter.grad = gradients[key][step]
        optimizer.step()
    for key, parameter in model.named_parameters():
        bound = 0.0 if name == "adamw" or key.endswith("bias") else 65500.0
        options = dict(
            lr=0.02,
            betas=(0.8, 0.95),
            eps=1e-6,
            bias_correction=bias_correction,
            max_weight_norm=bound,
        )
        decay = 0.05 if parameter.dim() > 1 else 0.0
        expected = lamb_by_definition(before[key], gradients[key], weight_decay=decay, **options)
        assert torch.allclose(parameter, expected, rtol=1e-12, atol=1e-14), key


def with_gradients(weights, step):
    """Give weights the gradients of a step."""
    for weight, gradient in zip(weights, gradients_of(step)):
        weight.grad = gradient
    return weights


@pytest.mark.parametrize("bound", [0.5, 1.0, 2.0])
def test_gradients_are_clipped_as_torch_does_it(bound):
    ours = gradients_of(0)
    theirs = with_gradients(make_weights(), 0)
    norm = float(gradient_norm(ours))
    clip(ours, norm, bound * norm)
    assert norm == pytest.approx(float(torch.nn.utils.clip_grad_norm_(theirs, bound * norm)), rel=1e-14)
    for gradient, weight in zip(ours, theirs):
        assert torch.allclose(gradient, weight.grad, rtol=1e-15, atol=0.0)
    assert torch.equal(ours[0], gradients_of(0)[0]) == (bound > 1.0)


def test_adamw_is_the_one_of_torch():
    options = dict(lr=0.01, betas=(0.8, 0.97), eps=1e-7, weight_decay=0.1)
    ours = make_weights()
    theirs = make_weights()
    optimizer = _AdamW(ours, **{**OPTIONS, **options, "max_weight_norm": 0.0})
    reference = torch.optim.AdamW(theirs, **options)
    for step in range(6):
        with_gradients(ours, step)
        optimizer.step()
        with_gradients(theirs, step)
        reference.step()
    for actual, wanted in zip(ours, theirs):
        assert torch.allclose(actual, wanted, rtol=1e-12, atol=1e-14)


@given(
    beta1=st.floats(0.0, 0.99),
    beta2=st.floats(0.0, 0.9999),
    p=st.integers(1, 8),
    seed=st.integers(0, 1000),
)
def test_as_many_updates_with_one_gradient_are_one_with_the_betas_to_that_power(beta1, beta2, p, seed):
    """Paper section 3.3: with a packing factor p, betas to the power p; exact for the moments, for every whole p."""
    unpacked = Config(optimizer=OptimizerConfig(beta1=beta1, beta2=beta2, packing_adjustment="betas"))
    ends = []
    for betas, updates in (((beta1, beta2), p), (unpacked.betas(float(p)), 1)):
        weights = make_weights()
        optimizer = _Lamb(weights, **{**OPTIONS, "betas": betas})
        for weight, gradient in zip(weights, gradients_of(seed + 1)):  # moments of some earlier update
            optimizer.state[weight]["exp_avg"].copy_(gradient)
            optimizer.state[weight]["exp_avg_sq"].copy_(gradient**2)
        for _ in range(updates):
            with_gradients(weights, seed)
            optimizer.step()
        ends.append([optimizer.state[weight][moment] for weight in weights for moment in MOMENTS])
    for many, once in zip(*ends):
        assert torch.allclose(many, once, rtol=1e-9, atol=1e-12)


@pytest.fixture
def model():
    counts = {"vocabulary_size": 20, "num_layers": 1, "num_heads": 2, "max_position_embeddings": 8}
    sizes = ModelConfig(hidden_size=8, intermediate_size=8, **counts)
    return PackedBertForPreTraining(sizes, LossConfig())


def reference_share(schedule, step, steps, warmup_steps, power):
    """The formulas as they are written: a share `done` of the updates after the warm-up has been made."""
    if step < warmup_steps:
        return (step + 1) / warmup_steps
    done = Fraction(1) if step >= steps else Fraction(step - warmup_steps, steps - warmup_steps)
    if schedule == "cosine":
        return (1.0 + math.cos(math.pi * done)) / 2.0
    return {"linear": float(1 - done), "polynomial": float(1 - done) ** power, "constant": 1.0}[schedule]


@pytest.mark.parametrize("schedule", SCHEDULES)
@given(steps=st.integers(1, 500), fraction=st.floats(0, 1), power=st.sampled_from([0.5, 1.0, 2.0, 3.7]))
def test_schedules_are_their_formulas_and_keep_their_laws(schedule, steps, fraction, power):
    kind = dict(schedule=schedule, learning_rate=1.0)
    optimizer = OptimizerConfig(**kind, warmup_fraction=fraction, schedule_power=power)
    warmup = round(fraction * steps)
    config = Config(optimizer=optimizer, run=RunConfig(steps=steps))
    shares = [learning_rate(step, config) for step in range(steps + 2)]
    expected = [reference_share(schedule, step, steps, warmup, power) for step in range(steps + 2)]
    assert shares == pytest.approx(expected, abs=1e-15, rel=0)
    # Continuous: the last update of the warm-up and the first one after it have the peak.
    assert shares[max(0, warmup - 1)] == 1.0
    assert warmup >= steps or shares[warmup] == 1.0
    assert shares[:warmup] == sorted(shares[:warmup])
    assert shares[warmup:] == sorted(shares[warmup:], reverse=True)
    assert shares[steps:] == ([1.0, 1.0] if schedule == "constant" else [0.0, 0.0])


@given(steps=st.integers(1, 200), more=st.integers(0, 50), fraction=st.floats(0, 1))
def test_fewer_steps_leave_the_schedule_as_it_is(steps, more, fraction):
    optimizer = OptimizerConfig(warmup_fraction=fraction)
    whole = Config(optimizer=optimizer, run=RunConfig(steps=steps + more)).with_schedule()
    part = replace(whole, run=RunConfig(steps=steps))
    assert [learning_rate(step, part) for step in range(steps)] == [learning_rate(step, whole) for step in range(steps)]
    assert part.with_schedule() == part
    assert not cross_check(part)


def give_gradients(model, seed):
    generator = torch.Generator().manual_seed(seed)
    for parameter in model.parameters():
        parameter.grad = torch.randn(parameter.shape, generator=generator)


def test_neutral_state_continues_bit_by_bit(model):
    optimizer = build_optimizer(model, OptimizerConfig(), betas=(0.9, 0.999))
    for step in range(2):
        give_gradients(model, step)
        optimizer.step()
    state = neutral_state(optimizer, model)
    weights = copy.deepcopy(model.state_dict())
    assert state["step"] == 2
    assert set(state["exp_avg"]) == set(state["exp_avg_sq"]) == set(weights)
    give_gradients(model, 2)
    optimizer.step()
    expected = copy.deepcopy(model.state_dict())

    model.load_state_dict(weights)
    fresh = build_optimizer(model, OptimizerConfig(), betas=(0.9, 0.999))
    load_neutral_state(fresh, model, state)
    give_gradients(model, 2)
    fresh.step()
    assert all(torch.equal(parameter, expected[name]) for name, parameter in model.named_parameters())


def test_schedule_by_hand():
    # 10 updates, 4 of warm-up: up in quarters, then 6/6, 5/6, .. 1/6, and 0 afterwards.
    shares = [warmup_linear(step, steps=10, warmup_steps=4) for step in range(11)]
    assert shares == pytest.approx([0.25, 0.5, 0.75, 1, 1, 5 / 6, 4 / 6, 3 / 6, 2 / 6, 1 / 6, 0])
