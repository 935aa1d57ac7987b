"""The training graph: every ATen operator of forward, backward and update, with its shapes.

The training step runs once on meta tensors, the update on fake tensors (shapes and types without memory), while a
dispatch mode records each operator that reaches the device. It records what make_fx captures and also the module of
each operator, in the backward pass too. Tracing imports torch; readers of the resulting `Graph` do not need it.

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

from ipu_profiling.cycles.matmul import write_cache

# The graphs that the cycle model compares; they differ in the parts that packing changes (`variants`).
# The graphs of engine/ipu/ with `engine.mask: product` (the default) and `additive`: one mask for all layers.
PACKED = "product"
ADDITIVE = "additive"
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
        """Number of elements."""
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
    # Of the parameters, in the same order; -1 if a parameter has no gradient.
    gradients: Tuple[int, ...]
    num_layers: int  # encoder layers that were traced
    buffers: Tuple[int, ...] = ()  # indices of values: constants of the model

    def to_json(self) -> str:
        """Write the graph as JSON, for `from_json`."""
        return json.dumps(vars(self))

    @classmethod
    def from_json(cls, text: str) -> Graph:
        """Read the JSON of `to_json`.

        Raises:
            ValueError, KeyError, IndexError, TypeError: the text is damaged.
        """
        tree = json.loads(text)
        values = []
        for shape, strides, dtype, name in tree["values"]:
            values.append(Value(tuple(shape), tuple(strides), dtype, name))
        operations = []
        for operator, arguments, keywords, outputs, scope, phase in tree["operations"]:
            operations.append(
                Operation(operator, tuple(arguments), keywords, tuple(outputs), scope, phase)
            )
        return cls(
            values=tuple(values),
            operations=tuple(operations),
            parameters=tuple(tree["parameters"]),
            gradients=tuple(tree["gradients"]),
            num_layers=tree["num_layers"],
            buffers=tuple(tree["buffers"]),
        )


def _values_in(arguments):
    for argument in arguments:
        if isinstance(argument, dict) and "value" in argument:
            yield argument["value"]
        elif isinstance(argument, (list, tuple)):
            yield from _values_in(argument)


def layer_of(scope: str) -> Optional[int]:
    """Return the number of the encoder layer of a scope, or None."""
    match = _LAYER.match(scope)
    return int(match.group(1)) if match else None


class _Recorder:
    """The operators that were dispatched; tensors are distinguished by identity, so all of them are kept."""

    def __init__(self):
        self.values: List[Value] = []
        self.operations: List[Operation] = []
        self.scope = ""
        self.phase = "forward"
        self._index: Dict[int, int] = {}
        self._kept: List[Any] = []

    def value(self, tensor, name: str = "") -> int:
        """Return the index of a tensor in `values`, where it is added at its first use."""
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
        """Return an argument in types of JSON."""
        import torch

        if isinstance(argument, torch.Tensor):
            return {"value": self.value(argument)}
        if isinstance(argument, (list, tuple)):
            return [self.plain(part) for part in argument]
        if argument is None or isinstance(argument, (bool, int, float, str)):
            return argument
        return str(argument)

    def mode(self):
        """Return the dispatch mode that records operators."""
        import torch
        from torch.utils._python_dispatch import TorchDispatchMode

        recorder = self

        class Mode(TorchDispatchMode):
            def __torch_dispatch__(self, func, types, args=(), kwargs=None):
                kwargs = kwargs or {}
                if func.namespace != "aten" or func.__name__.startswith("promote_types"):
                    return func(*args, **kwargs)  # a query: nothing reaches the device
                arguments = tuple(map(recorder.plain, args))
                keywords = {key: recorder.plain(argument) for key, argument in kwargs.items()}

                name = func.__name__.split(".")[0]
                result: Any = None
                # Lists in place keep their shapes, and torch 2.0 lacks a fake kernel for some of their operators.
                if not (name.startswith("_foreach_") and name.endswith("_")):
                    result = func(*args, **kwargs)
                if func is torch.ops.aten.native_layer_norm.default:
                    # The CPU returns mean and deviation in the input's type, meta tensors return float32.
                    normalized, mean, deviation = result
                    dtype = normalized.dtype
                    result = (normalized, mean.to(dtype), deviation.to(dtype))

                results = result if isinstance(result, (tuple, list)) else (result,)
                outputs = tuple(recorder.value(r) for r in results if hasattr(r, "stride"))
                operation = Operation(
                    str(func), arguments, keywords, outputs, recorder.scope, recorder.phase
                )
                recorder.operations.append(operation)
                return result

        return Mode()


class _Scopes:
    """The module of each operator, by hooks in the forward pass and by autograd nodes in the backward pass."""

    def __init__(self, recorder: _Recorder, model):
        self._recorder = recorder
        self._stack: List[str] = []
        self._tagged: Dict[int, Any] = {}
        self._handles = []
        for name, module in model.named_modules():
            self._handles.append(module.register_forward_pre_hook(self._entering(name)))
            self._handles.append(module.register_forward_hook(self._leaving()))

    def remove(self) -> None:
        """Remove the hooks."""
        for handle in self._handles:
            handle.remove()

    def _entering(self, name: str) -> Callable:
        def hook(module, inputs):
            self._tag(inputs, self._recorder.scope)  # the caller computed them
            self._stack.append(self._recorder.scope)
            self._recorder.scope = name

        return hook

    def _leaving(self) -> Callable:
        def hook(module, inputs, output):
            self._tag(output, self._recorder.scope)
            self._recorder.scope = self._stack.pop()

        return hook

    def _tag(self, tensors: Any, scope: str) -> None:
        """Assign a scope to all nodes behind `tensors` that have none yet; inner modules come before outer ones."""
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

    Args:
        build: builds the model, whose result has a scalar `loss`.
        batch_shapes: name -> (shape, dtype) of the model's inputs, in order.
        num_layers: encoder layers of the model.
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
            recorder.phase = "backward"
            recorder.scope = "loss"
            gradients = torch.autograd.grad(
                loss, [parameter for _, parameter in named], allow_unused=True
            )
        indices = [-1 if gradient is None else recorder.value(gradient) for gradient in gradients]
        scopes.remove()
    return Graph(
        tuple(recorder.values),
        tuple(recorder.operations),
        tuple(parameters),
        tuple(indices),
        num_layers,
        tuple(buffers),
    )


def capture_update(
    build: Callable[[], Any], optimizer: Callable[[Any], Any], num_layers: int
) -> Graph:
    """Trace one weight update, all of it in float32.

    Args:
        build: builds the model.
        optimizer: returns the optimiser of a model.
        num_layers: encoder layers of the model.
    """
    import torch
    from torch._subclasses.fake_tensor import FakeTensorMode

    recorder = _Recorder()
    recorder.phase = "update"
    recorder.scope = "update"
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
    """Return a digest of the sources of model and tracing and of the versions of Python and torch.

    torch's version is read without importing torch, so that a report from cached traces starts sooner.
    """
    here = Path(__file__).resolve()
    files = sorted((here.parents[2] / "ipu_packed_bert" / "model").glob("*.py"))
    files += [here, here.parent / "variants.py", here.parent / "workload.py"]
    digest = hashlib.sha256(f"{metadata.version('torch')} {sys.version_info[:2]}".encode())
    for path in files:
        digest.update(path.read_bytes())
    return digest.hexdigest()


def cached(key: str, folder: Optional[Path], trace: Callable[[], Graph]) -> Graph:
    """Return the graph that an earlier process stored under `key`, or trace and store it.

    Args:
        key: a text that names all that the graph depends on.
        folder: the directory of the cache; None: trace without a cache.
        trace: traces the graph.
    """
    if folder is None:
        return trace()
    path = folder / f"trace_{hashlib.sha256(key.encode()).hexdigest()[:24]}.json"
    try:
        return Graph.from_json(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, KeyError, IndexError, TypeError):  # absent or damaged: trace again
        graph = trace()
        write_cache(path, graph.to_json())
        return graph
