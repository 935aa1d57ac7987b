"""Every way of writing the packed parts computes the same numbers: in float64 to 1e-12, gradients included."""

import pytest
import torch

from ipu_packed_bert.model.packed import PackedBertForPreTraining
from ipu_packed_bert.settings.config import Config
from ipu_packed_bert.settings.schema import LossConfig, ModelConfig, PlacementConfig
from ipu_profiling.cycles import variants
from ipu_profiling.cycles.tracing import ADDITIVE, PACKED, POPART, UNPACKED
from ipu_profiling.cycles.workload import _placement_of

MODEL = ModelConfig(
    vocabulary_size=97,
    hidden_size=32,
    num_layers=2,
    num_heads=4,
    intermediate_size=64,
    max_position_embeddings=24,
    hidden_dropout=0.0,
)
SIZES = {"slots": 24, "depth": 3, "columns": 8}


def batch(*, cls_first=False):
    """Two packs of 24 slots: sequences of 9, 8 and 4 tokens and padding; sequences of 24."""
    lengths = [[9, 8, 4], [24]]
    B = 2
    S = 24
    D = 3
    P = 6
    generator = torch.Generator().manual_seed(3)
    fields = {name: torch.zeros(B, S, dtype=torch.int32) for name in ("input_mask", "segment_ids", "positions")}
    ids = torch.randint(5, 97, (B, S), generator=generator, dtype=torch.int32)
    cls = torch.zeros(B, D, dtype=torch.int32)
    present = torch.zeros(B, D, dtype=torch.int32)
    for row, parts in enumerate(lengths):
        at = 0
        for number, length in enumerate(parts):
            fields["input_mask"][row, at : at + length] = number + 1
            fields["positions"][row, at : at + length] = torch.arange(length, dtype=torch.int32)
            cls[row, number] = at
            present[row, number] = 1
            at += length
        ids[row, at:] = 0
    masked = torch.tensor([[2, 4, 11, 18, 0, 0], [1, 5, 9, 20, 22, 3]], dtype=torch.int32)
    weights = torch.tensor([[1, 1, 2, 3, 0, 0], [1, 1, 1, 1, 1, 1]], dtype=torch.int32)
    labels = torch.randint(5, 97, (B, P), generator=generator, dtype=torch.int32)
    scale = torch.full((B,), 0.25, dtype=torch.float64)
    return (
        ids,
        fields["input_mask"],
        fields["segment_ids"],
        fields["positions"],
        masked,
        labels,
        weights,
        cls,
        torch.ones_like(cls),
        present,
        scale,
        scale,
    )


def outputs(model, fields):
    parameters = dict(model.named_parameters())
    result = model(*fields)
    gradients = torch.autograd.grad(result.loss, list(parameters.values()), allow_unused=True)
    return result, dict(zip(parameters, gradients))


@pytest.fixture(scope="module")
def reference():
    torch.manual_seed(0)
    model = PackedBertForPreTraining(MODEL, LossConfig()).double()
    for parameter in model.parameters():  # far from the initial values: scores differ by tens
        parameter.data.mul_(8.0 if parameter.dim() > 1 else 1.0)
    return model


@pytest.mark.parametrize("arrangement", [PACKED, ADDITIVE, POPART])
def test_arrangements_are_equal(reference, arrangement):
    fields = batch()
    expected, expected_gradients = outputs(reference, fields)
    variant = variants.build(MODEL, LossConfig(), arrangement, **SIZES).double()
    variant.load_state_dict(reference.state_dict())
    actual, gradients = outputs(variant, fields)
    for ours, theirs in zip(actual, expected):
        assert torch.allclose(ours, theirs, rtol=1e-12, atol=0)
    norm = sum(float(g.pow(2).sum()) for g in expected_gradients.values()) ** 0.5
    difference = sum(float((gradients[n] - g).pow(2).sum()) for n, g in expected_gradients.items()) ** 0.5
    assert norm > 1e-3
    assert difference <= 1e-12 * norm


def test_unpacked_forms_equal_the_model_on_unpacked_rows(reference):
    """One sequence a row, no padding: row mask, fixed positions and the first slot equal the packed forms."""
    fields = list(batch())
    fields[1] = torch.ones_like(fields[1])
    fields[3] = torch.arange(24, dtype=torch.int32).repeat(2, 1)
    fields[6] = (fields[6] > 0).to(torch.int32)
    for index in (7, 8, 9):
        fields[index] = fields[index][:, :1]
    fields[7] = torch.zeros_like(fields[7])
    variant = variants.build(MODEL, LossConfig(), UNPACKED, **SIZES).double()
    variant.load_state_dict(reference.state_dict())
    assert torch.allclose(variant(*fields).loss, reference(*fields).loss, rtol=1e-12, atol=0)


@pytest.mark.parametrize("replicas, sharded", [(1, False), (2, True), (16, True)])
def test_tensors_are_sharded_from_two_replicas_on(replicas, sharded):
    placement = PlacementConfig(replicas=replicas, replicated_tensor_sharding=True)
    assert _placement_of(Config(placement=placement)).sharded == sharded
