"""The training graph: every ATen operator of forward, backward and update, with its shapes.

The training step runs once on meta tensors, the update on fake ones (shapes and types without memory), while a
dispatch mode records each operator that reaches the device. That is what make_fx captures, and also the module each
operator belongs to, in the backward pass too. Tracing imports torch; what reads the resulting `Graph` does not need it.

Encoder layers are alike: three are traced, and the one in the middle stands for all.
"""

from __future__ import annotations

import hashlib
import json
import re
import sys
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any, Callable, Dict, List, NamedTuple, Optional, Tuple

from ipu_packed_bert.cycles.matmul import write_cache

# The graphs that the cycle model compares, by how the parts that packing touches are written (`variants`).
# What engine/ipu/ runs with `engine.mask: product`, its default, and with `additive`: the model's mask, made once.
PACKED, ADDITIVE = "product", "additive"
# The graph of the PopART and MLPerf code of the paper's time: every layer builds the mask from the sequence numbers.
POPART = "layer"
# Canonical BERT, the paper's baseline: a padding mask, [CLS] at slot 0, the same positions in every row.
UNPACKED = "unpacked"

_LAYER = re.compile(r"bert\.encoder\.layer\.(\d+)(\.|$)")


class Value(NamedTuple):
    """One tensor of the graph."""

    shape: Tuple[int, ...]
    strides: Tuple[int, ...]
    dtype: str  # "float16", "float32", "int32", "int64", "bool"
    name: str  # of the parameter or batch field, "" for everything else

    @property
    def elements(self) -> int:
        count = 1
        for size in self.shape:
            count *= size
        return count


class Operation(NamedTuple):
    """One operator call."""

    operator: str  # "aten.mm.default"
    arguments: Tuple[Any, ...]  # numbers, strings, lists of them; a tensor is {"value": index}
    keywords: Dict[str, Any]
    outputs: Tuple[int, ...]  # indices of values
    scope: str  # dotted module name; in the backward pass that of the forward operator
    phase: str  # "forward", "backward" or "update"

    def inputs(self) -> List[int]:
        """Return the indices of all tensors read, in order."""
        return list(_values_in(self.arguments)) + list(_values_in(tuple(self.keywords.values())))


@dataclass(frozen=True, eq=False)
class Graph:
    """A traced training step."""

    values: Tuple[Value, ...]
    operations: Tuple[Operation, ...]
    parameters: Tuple[int, ...]  # indices of values
    gradients: Tuple[
        int, ...
    ]  # of the parameters, in the same order; -1 where a parameter has none
    num_layers: int  # encoder layers that were traced
    buffers: Tuple[int, ...] = ()  # indices of values: constants that the model holds

    def to_json(self) -> str:
        names = "values operations parameters gradients num_layers buffers".split()
        return json.dumps({name: getattr(self, name) for name in names})

    @classmethod
    def from_json(cls, text: str) -> Graph:
        plain = json.loads(text)
        return cls(
            values=tuple(Value(tuple(v[0]), tuple(v[1]), v[2], v[3]) for v in plain["values"]),
            operations=tuple(
                Operation(o[0], tuple(o[1]), o[2], tuple(o[3]), o[4], o[5])
                for o in plain["operations"]
            ),
            parameters=tuple(plain["parameters"]),
            gradients=tuple(plain["gradients"]),
            num_layers=plain["num_layers"],
            buffers=tuple(plain["buffers"]),
        )


def _values_in(arguments):
    for argument in arguments:
        if isinstance(argument, dict) and "value" in argument:
            yield argument["value"]
        elif isinstance(argument, (list, tuple)):
            yield from _values_in(argument)


def layer_of(scope: str) -> Optional[int]:
    """Return the number of the encoder layer of a scope, or None."""
    found = _LAYER.match(scope)
    return int(found.group(1)) if found else None


class _Recorder:
    """Records what is dispatched. Tensors are told apart by identity, so all of them are kept until the end."""

    def __init__(self):
        self.values: List[Value] = []
        self.operations: List[Operation] = []
        self.scope = ""
        self.phase = "forward"
        self._index: Dict[int, int] = {}
        self._kept: List[Any] = []

    def value(self, tensor, name: str = "") -> int:
        if id(tensor) not in self._index:
            self._index[id(tensor)] = len(self.values)
            self._kept.append(tensor)
            self.values.append(
                Value(
                    tuple(int(size) for size in tensor.shape),
                    tuple(int(step) for step in tensor.stride()),
                    str(tensor.dtype).replace("torch.", ""),
                    name,
                )
            )
        return self._index[id(tensor)]

    def plain(self, argument: Any) -> Any:
        """`argument` in types that JSON has."""
        import torch

        if isinstance(argument, torch.Tensor):
            return {"value": self.value(argument)}
        if isinstance(argument, (list, tuple)):
            return [self.plain(part) for part in argument]
        if argument is None or isinstance(argument, (bool, int, float, str)):
            return argument
        return str(argument)

    def mode(self):
        import torch
        from torch.utils._python_dispatch import TorchDispatchMode

        recorder = self

        class Mode(TorchDispatchMode):
            def __torch_dispatch__(self, func, types, args=(), kwargs=None):
                kwargs = kwargs or {}
                if func.namespace != "aten" or func.__name__.startswith("promote_types"):
                    return func(*args, **kwargs)  # asks about a tensor; nothing reaches the device
                arguments = tuple(recorder.plain(argument) for argument in args)
                keywords = {key: recorder.plain(argument) for key, argument in kwargs.items()}
                if func.__name__.startswith("_foreach_") and func.__name__.split(".")[0].endswith(
                    "_"
                ):
                    result: Any = (
                        None  # in place: shapes stay, and torch 2.0 has no fake kernel for some
                    )
                else:
                    result = func(*args, **kwargs)
                if func is torch.ops.aten.native_layer_norm.default:
                    # Mean and deviation have the input's type, as on the CPU; of meta tensors they are float32.
                    result = (result[0], *(each.to(result[0].dtype) for each in result[1:]))
                flat = result if isinstance(result, (tuple, list)) else (result,)
                outputs = tuple(
                    recorder.value(tensor) for tensor in flat if hasattr(tensor, "stride")
                )
                recorder.operations.append(
                    Operation(
                        str(func), arguments, keywords, outputs, recorder.scope, recorder.phase
                    )
                )
                return result

        return Mode()


class _Scopes:
    """Finds the module of each operator: by hooks in the forward pass, by the autograd nodes in the backward pass."""

    def __init__(self, recorder: _Recorder, model):
        self._recorder = recorder
        self._stack: List[str] = []
        self._tagged: Dict[int, Any] = {}
        self._handles = []
        for name, module in model.named_modules():
            self._handles.append(module.register_forward_pre_hook(self._entering(name)))
            self._handles.append(module.register_forward_hook(self._leaving()))

    def remove(self) -> None:
        for handle in self._handles:
            handle.remove()

    def _entering(self, name: str) -> Callable:
        def hook(module, inputs):
            self._tag(inputs, self._recorder.scope)  # the caller made them
            self._stack.append(self._recorder.scope)
            self._recorder.scope = name

        return hook

    def _leaving(self) -> Callable:
        def hook(module, inputs, output):
            self._tag(output, self._recorder.scope)
            self._recorder.scope = self._stack.pop()

        return hook

    def _tag(self, tensors: Any, scope: str) -> None:
        """Give this scope to all nodes that led to `tensors` and have none yet; inner modules have done so before."""
        pending = list(self._nodes(tensors))
        while pending:
            node = pending.pop()
            if node is None or id(node) in self._tagged:
                continue
            self._tagged[id(node)] = node
            node.register_prehook(self._prehook(scope))
            pending.extend(following for following, _ in node.next_functions)

    def _prehook(self, scope: str) -> Callable:
        def hook(gradients):
            self._recorder.scope = scope

        return hook

    def _nodes(self, tensors: Any):
        if hasattr(tensors, "grad_fn"):
            yield tensors.grad_fn
        elif isinstance(tensors, (tuple, list)):
            for part in tensors:
                yield from self._nodes(part)


def capture(
    build: Callable[[], Any], batch_shapes: Dict[str, Tuple[Tuple[int, ...], str]], num_layers: int
) -> Graph:
    """Trace forward and backward of one micro-batch, with weights in half precision as on the device.

    build: makes the model, whose result has a scalar `loss`. batch_shapes: name -> (shape, dtype) of its inputs, in
    order.
    """
    import torch

    recorder = _Recorder()
    with torch.device("meta"):
        with _default_type(torch.float16):
            model = build()
        model.train()
        scopes = _Scopes(recorder, model)
        batch = []
        for name, (shape, dtype) in batch_shapes.items():
            tensor = torch.empty(shape, dtype=getattr(torch, dtype))
            recorder.value(tensor, name)
            batch.append(tensor)
        named = list(model.named_parameters())
        parameters = [recorder.value(parameter, name) for name, parameter in named]
        buffers = [recorder.value(buffer, name) for name, buffer in model.named_buffers()]
        with recorder.mode():
            loss = model(*batch).loss
            recorder.phase, recorder.scope = "backward", "loss"
            found = torch.autograd.grad(
                loss, [parameter for _, parameter in named], allow_unused=True
            )
        gradients = [-1 if gradient is None else recorder.value(gradient) for gradient in found]
        scopes.remove()
    return Graph(
        tuple(recorder.values),
        tuple(recorder.operations),
        tuple(parameters),
        tuple(gradients),
        num_layers,
        tuple(buffers),
    )


def capture_update(
    build: Callable[[], Any], optimizer: Callable[[Any], Any], num_layers: int
) -> Graph:
    """Trace one weight update, all of it in float32. optimizer: makes the optimiser of a model."""
    import torch
    from torch._subclasses.fake_tensor import FakeTensorMode

    recorder = _Recorder()
    recorder.phase, recorder.scope = "update", "update"
    with FakeTensorMode():  # torch 2.0 has meta kernels for too few of these operators
        with _default_type(torch.float32):
            model = build()
        named = list(model.named_parameters())
        parameters = [recorder.value(parameter, name) for name, parameter in named]
        for _, parameter in named:
            parameter.grad = torch.empty_like(parameter)
        gradients = [
            recorder.value(parameter.grad, "gradient of " + name) for name, parameter in named
        ]
        step = optimizer(model)
        with recorder.mode():
            step.step()
    return Graph(
        tuple(recorder.values),
        tuple(recorder.operations),
        tuple(parameters),
        tuple(gradients),
        num_layers,
    )


@contextmanager
def _default_type(dtype: Any):
    import torch

    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def sources_digest() -> str:
    """Digest of all that a trace depends on: the sources of model and capture, and the versions of Python and torch.

    torch's version is read without importing torch, so that a report from cached traces starts sooner.
    """
    here = Path(__file__).resolve()
    root = here.parents[1]
    files = sorted((root / "model").glob("*.py"))
    files += [here, here.parent / "variants.py", here.parent / "workload.py"]
    digest = hashlib.sha256(f"{metadata.version('torch')} {sys.version_info[:2]}".encode())
    for path in files:
        digest.update(path.read_bytes())
    return digest.hexdigest()


def cached(key: str, folder: Optional[Path], make: Callable[[], Graph]) -> Graph:
    """`make()`, or its result in an earlier process."""
    if folder is None:
        return make()
    path = folder / f"trace_{hashlib.sha256(key.encode()).hexdigest()[:24]}.json"
    try:
        return Graph.from_json(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, KeyError, IndexError, TypeError):  # absent or damaged: trace again
        graph = make()
        write_cache(path, graph.to_json())
        return graph
