"""Operators of a forward pass under the names of PopTorch 3.4, and the rules for them.

PopTorch intercepts operators before they are decomposed, so its list has `dropout`, `to` or `linear` where a dispatch
mode of torch sees `native_dropout`, `_to_copy` or `addmm`; :data:`POPTORCH_NAMES` translates.  `ALLOWED` is read from
the published interface (tests/data/poptorch_api.json).
"""

import json
from pathlib import Path

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.func import functional_call
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten

API = json.loads((Path(__file__).resolve().parent.parent / "data" / "poptorch_api.json").read_text(encoding="utf-8"))
DEVICE = torch.device("meta")  # any but the host's
ALLOWED = frozenset(API["aten_ops_with_lowering"])

# What torch decomposes an operator into -> the operator as PopTorch registers it.
POPTORCH_NAMES = {
    "_to_copy": "to",
    "native_dropout": "dropout",
    "bernoulli_": "dropout",
    "empty_like": "dropout",
    "_scaled_dot_product_attention_math": "scaled_dot_product_attention",
    "lift_fresh": "detach",
    "alias": "detach",
    "zero_": "zeros_like",
    "fill_": "full_like",
    "scalar_tensor": "full",
    "new_empty": "new_zeros",
    "empty": "zeros",
}
# Refused whatever the list says: the shape of the result would depend on values, or a value would be read on the host.
DATA_DEPENDENT = frozenset(
    (
        "nonzero masked_select unique unique2 _unique2 unique_dim unique_consecutive _local_scalar_dense item "
        "is_nonzero equal repeat_interleave"
    ).split()
)
# Operators that take an integer tensor as an index or a label: there int64 is what torch demands and PopTorch narrows.
INDEXING = frozenset(
    (
        "to view _unsafe_view reshape flatten expand unsqueeze squeeze detach clone gather embedding index_select "
        "nll_loss_forward cross_entropy_loss argmax permute transpose select slice"
    ).split()
)
SUPPORTED_TYPES = frozenset(
    {
        torch.bool,
        torch.uint8,
        torch.int8,
        torch.int16,
        torch.int32,
        torch.float16,
        torch.float32,
        torch.int64,
        torch.float64,  # narrowed to int32 and float32
    }
)


def poptorch_name(func):
    """`aten::_to_copy.default` -> `to`: without overload, in-place underscore and torch's decomposition."""
    name = func._schema.name.split("::")[1]
    if name in POPTORCH_NAMES:
        return POPTORCH_NAMES[name]
    # Private decompositions of torch keep their underscore: `_softmax`; in-place operators lower as the functional one.
    if name not in ALLOWED and name.endswith("_") and name[:-1]:
        name = name[:-1]
    return POPTORCH_NAMES.get(name, name)


class Operator:
    """One operator of a traced forward pass."""

    def __init__(self, name, inputs, outputs, ipu):
        self.name = name
        self.inputs = inputs
        self.outputs = outputs
        self.ipu = ipu

    def __repr__(self):
        return "{}({}) -> {}".format(
            self.name, ", ".join(describe(t) for t in self.inputs), ", ".join(describe(t) for t in self.outputs)
        )


def describe(tensor):
    return "{}{}".format(str(tensor.dtype).replace("torch.", ""), list(tensor.shape))


class Recorder(TorchDispatchMode):
    """Records and checks every operator that runs under it.

    ``known`` are the tensors a graph may start from: inputs, parameters and buffers.  Any other tensor that an
    operator reads, and that no operator made, is a constant captured from the host.
    """

    def __init__(self, known, current_ipu=lambda: None, reject=True):
        super().__init__()
        self.operators = []
        self.problems = []
        self.current_ipu = current_ipu
        self.reject = reject
        self._known = {id(tensor): tensor for tensor in known}

    def _problem(self, text):
        self.problems.append(text)
        if self.reject:
            raise RuntimeError("PopTorch cannot lower this graph: " + text)

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if func._schema.name.startswith("prim::"):
            return func(*args, **kwargs)  # a question about a tensor, such as its device
        name = poptorch_name(func)
        inputs = [t for t in tree_flatten((args, kwargs))[0] if isinstance(t, torch.Tensor)]
        raw = func._schema.name.split("::")[1]
        if raw in DATA_DEPENDENT:
            self._problem(f"{raw} depends on values, shapes must be static")
        if name == "index" and any(
            t is not None and t.dtype in (torch.bool, torch.uint8) for t in tree_flatten(args[1])[0]
        ):
            self._problem("reading with a boolean mask has a data-dependent shape")
        outputs = func(*args, **kwargs)
        created = [t for t in tree_flatten(outputs)[0] if isinstance(t, torch.Tensor)]
        if name not in ALLOWED:
            self._problem(f"no lowering for aten::{name} ({raw})")
        for tensor in inputs:
            if id(tensor) not in self._known and raw != "lift_fresh":
                self._problem(f"{name} reads a host tensor {describe(tensor)} that is no input, parameter or buffer")
        if raw == "lift_fresh":
            self._problem(f"a constant {describe(inputs[0])} is captured from the host; register it as a buffer")
        for tensor in inputs + created:
            if tensor.dtype not in SUPPORTED_TYPES:
                self._problem(f"{describe(tensor)} in {name}: not a type of the device")
            if any(not isinstance(size, int) for size in tensor.shape):
                self._problem(f"{name} has a dynamic shape")
        self.operators.append(Operator(name, inputs, created, self.current_ipu()))
        for tensor in created:
            self._known[id(tensor)] = tensor  # kept alive, so that no id is used twice
        return outputs


def wide_types(operators):
    """Operators in which int64 or float64 matters: float64 anywhere, int64 where it is more than an index or a
    label."""
    actual = []
    for operator in operators:
        tensors = operator.inputs + operator.outputs
        if (
            any(t.dtype == torch.float64 for t in tensors)
            or any(t.dtype == torch.int64 for t in tensors)
            and operator.name not in INDEXING
        ):
            actual.append(operator)
    return actual


class Traced:
    """A program's forward pass of one micro-batch of inputs, as the engine hands it to PopTorch.

    inputs: (shape, type) of each. mode: what notes the calls, instead of a Recorder.
    """

    def __init__(self, program, inputs, stand_in, *, training=True, mode=None):
        with FakeTensorMode(allow_non_fake_inputs=False):
            tensors = dict([*program.named_parameters(), *program.named_buffers()])
            self.weights = {name: torch.empty(t.shape, dtype=t.dtype, device=DEVICE) for name, t in tensors.items()}
            self.inputs = [torch.zeros(shape, dtype=dtype, device=DEVICE) for shape, dtype in inputs]
            self.graph = stand_in._Graph()
            tensors = [*self.weights.values(), *self.inputs]
            recorder = Recorder(tensors, current_ipu=lambda: self.graph.ipu, reject=False)
            stand_in._graph = self.graph
            try:
                with torch.no_grad(), recorder if mode is None else mode:
                    self.outputs = functional_call(program.train(training), dict(self.weights), tuple(self.inputs))
            finally:
                stand_in._graph = None
        self.operators = recorder.operators
        self.problems = recorder.problems
        self.program = program


def assert_lowers(trace, config, blocks):
    """Check the operators, types, weights and blocks of a traced program of a configuration."""
    assert trace.problems == []
    names = [operator.name for operator in trace.operators]
    assert set(names) <= ALLOWED
    # A gather is dear on IPUs: its gradient is a scatter.
    assert "gather" not in names
    assert names.count("embedding") == 3
    assert wide_types(trace.operators) == []
    assert all(tensor.device == DEVICE for operator in trace.operators for tensor in operator.outputs)
    types = {tensor.dtype for tensor in trace.weights.values() if tensor.is_floating_point()}
    assert types == {torch.float16 if config.engine.half_weights else torch.float32}
    assert trace.graph.blocks == [(block.name, block.ipu) for block in blocks]
