"""The forward pass with its loss uses operators that PopTorch lowers, and only those.

PopTorch takes an operator where it has a kernel registered for it: some before torch decomposes them (`dropout`,
`reshape`), the others after. Both levels are held against the list of operators with a lowering: the functions that the
model's code calls, and what torch makes of them. Dropout, which is taken whole, is looked at on the upper level only.
PopTorch differentiates the graph itself, so the backward pass of torch doesn't matter.
"""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten

from ipu_packed_bert.model.packed import BATCH_FIELDS, PackedBertForPreTraining
from ipu_packed_bert.settings.schema import LossConfig
from tests.packed_examples import lay_out, random_sequences, with_scales
from tests.tiny_runs import TINY

DATA = Path(__file__).parents[2] / "data"
LOWERING = json.loads((DATA / "poptorch_lowering.json").read_text(encoding="utf-8"))
OPERATORS = set(json.loads((DATA / "poptorch_api.json").read_text(encoding="utf-8"))["aten_ops_with_lowering"])
MODEL = replace(TINY, hidden_dropout=0.1, attention_dropout=0.1)


def function_name(function) -> str:
    """The operator behind a Python function: `Tensor.__add__` -> add, `functional.cross_entropy` ->
    cross_entropy_loss."""
    name = function.__name__
    return LOWERING["python_names"].get(name, name)


def decomposed_name(function) -> str:
    """The operator that PopTorch has for one that torch decomposes into: `aten::_to_copy` -> to."""
    name = function._schema.name.split("::")[1]
    return LOWERING["decomposed_names"].get(name, name)


class Functions(TorchFunctionMode):
    """Outermost calls of torch's functions on tensors: what a caller wrote, not what it is made of."""

    def __init__(self):
        super().__init__()
        self.names = set()

    def __torch_function__(self, function, types, arguments=(), keywords=None):
        if function.__name__ not in LOWERING["no_operators"]:
            self.names.add(function_name(function))
        return function(*arguments, **(keywords or {}))  # the mode is off inside


class Decomposed(TorchDispatchMode):
    """Operators that reach a backend, after torch's own decompositions."""

    def __init__(self):
        super().__init__()
        self.names, self.types = set(), set()

    def __torch_dispatch__(self, function, types, arguments=(), keywords=None):
        result = function(*arguments, **(keywords or {}))
        self.names.add(decomposed_name(function))
        self.types.update(each.dtype for each in tree_flatten(result)[0] if isinstance(each, torch.Tensor))
        return result


def fields(seed=0):
    rng = np.random.default_rng(seed)
    lengths = [[5, 9, 3], [12], [7, 7]][seed % 3]
    examples = random_sequences(rng, lengths=lengths, vocabulary=61)
    batch = lay_out([list(range(len(lengths))), []], examples, slots=24, depth=3, predictions=7)
    batch = with_scales(batch, micro_batches=1, normalisation="token")
    return [torch.from_numpy(batch[name]) for name in BATCH_FIELDS]


def trace(network, recorder, seed=0):
    inputs = fields(seed)
    # Without gradients: autograd adds detached copies that no compiler is shown.
    with torch.no_grad(), recorder:
        network(*inputs)
    return recorder


@pytest.mark.parametrize("next_sentence", [True, False])
@pytest.mark.parametrize("normalisation", ["token", "sequence"])
def test_every_operator_has_a_lowering(normalisation, next_sentence):
    loss = LossConfig(normalisation=normalisation, next_sentence=next_sentence)
    network = PackedBertForPreTraining(MODEL, loss)
    called = trace(network.train(), Functions()).names
    decomposed = trace(network.eval(), Decomposed())
    assert sorted(called - OPERATORS) == []
    assert sorted(decomposed.names - OPERATORS) == []
    assert decomposed.types <= {torch.float32, torch.int32, torch.int64, torch.bool}
    # Guard against an empty trace.
    assert set("embedding dropout layer_norm linear matmul softmax gather cross_entropy_loss".split()) <= called
    assert {"_softmax", "gather", "nll_loss_forward", "argmax", "where"} <= decomposed.names


def test_the_program_does_not_depend_on_the_data():
    class Sequence(Decomposed):
        def __init__(self):
            super().__init__()
            self.calls = []

        def __torch_dispatch__(self, function, types, arguments=(), keywords=None):
            result = super().__torch_dispatch__(function, types, arguments, keywords)
            self.calls.append((str(function), [tuple(each.shape) for each in tree_flatten(result)[0]]))
            return result

    network = PackedBertForPreTraining(MODEL, LossConfig(normalisation="sequence")).train()
    first, second, third = (trace(network, Sequence(), seed).calls for seed in range(3))
    assert first == second == third and len(first) > 100


@pytest.mark.parametrize(
    "refused",
    [
        lambda tensor: tensor.nonzero(),
        lambda tensor: tensor.masked_select(tensor > 0),
        lambda tensor: torch.tril(tensor),
        lambda tensor: torch.unique(tensor),
        lambda tensor: tensor.sum().item(),
    ],
    ids=["nonzero", "masked_select", "tril", "unique", "item"],
)
def test_of_the_test(refused):
    """Operators that PopTorch refuses are detected on both levels."""
    tensor = torch.eye(3)
    for recorder in (Functions(), Decomposed()):
        with torch.no_grad(), recorder:
            refused(tensor)
        assert recorder.names - OPERATORS


def test_fast_attention_has_no_lowering():
    network = PackedBertForPreTraining(MODEL, LossConfig(), attention="sdpa")
    assert "scaled_dot_product_attention" in trace(network, Functions()).names - OPERATORS
