"""A GPU that computes nothing: product code runs on fake CUDA tensors, which have shapes, types and devices.

    with FakeGpu() as gpu:
        engine = HostEngine(config, task, packing_factor=2.0, device=gpu.DEVICE)
        engine.step(batch, 1e-3)
    gpu.peak, gpu.waits, gpu.operators

Dispatch is real: an operator that refuses these shapes or types, or tensors of two devices, raises an error. Whether it
has a CUDA kernel is not seen. Integers keep their values, so boundaries, indices and all that the host reads from them
are right; a floating-point number that the host reads is 1. The peak is the sum of the live tensors, in the allocator's
blocks of 512 bytes.

A CPU build of torch has no streams of CUDA, so its autograd engine cannot run here; `_backward` walks the same graph.
"""

from __future__ import annotations

import ctypes
import heapq
import weakref
from concurrent.futures import Future
from contextlib import ExitStack, nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Dict, List, Set

import numpy as np
import pytest
import torch
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
)
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.weak import WeakIdKeyDictionary

from ipu_packed_bert.engine.host import feed
from tests.fakes.cuda import Streams, pretend

aten = torch.ops.aten

BLOCK = 512  # bytes, in which the caching allocator counts
_META = 14
_CUDA = 1  # of c10::DeviceType
_INDEXING = ("index", "index_put", "index_put_", "_index_put_impl_")
_COPYING = ("_to_copy", "copy_")


class CannotPretend(RuntimeError):
    """This build of torch does not let a test register a guard of CUDA devices."""


def _register_guard():
    """Register a guard of CUDA devices that does nothing, in a build of torch that has none.

    Raise CannotPretend if torch's table of guards is not where it was.
    """
    torch._C._ensureCUDADeviceGuardSet()  # enough in a CUDA build
    libraries = sorted(Path(torch.__file__).parent.glob("lib/libc10.*"))
    try:
        table = (ctypes.c_void_p * 16).in_dll(
            ctypes.CDLL(str(libraries[0])), "_ZN3c104impl26device_guard_impl_registryE"
        )
    except (IndexError, OSError, ValueError) as error:
        raise CannotPretend(f"torch {torch.__version__}: {error}") from error
    if table[_CUDA] is None:
        table[_CUDA] = table[_META]


class _InPlaceOfThreads:
    """An executor that runs each call at once: modes of torch belong to one thread."""

    def __init__(self, **_):
        pass

    def submit(self, function, *arguments):
        future: Future = Future()
        future.set_result(function(*arguments))
        return future

    def shutdown(self):
        pass


class FakeGpu(TorchDispatchMode):
    """The GPU; peak and waits are those since `reset`."""

    DEVICE = "cuda:0"

    def __init__(self):
        super().__init__()
        self._values = WeakIdKeyDictionary()  # fake integer tensor -> its values on the CPU
        self._alive: Dict[int, Any] = {}  # storage -> weak reference
        self._inside = ExitStack()
        self._unpacked: List[List[torch.Tensor]] = []  # saved tensors that the node in progress has read
        self.operators: Set[str] = set()
        self.live = 0
        self.reset()

    def reset(self):
        """Count peak and waits anew."""
        self.peak = self.live
        self.waits: List[str] = []

    # ---- what torch answers

    def __enter__(self):
        _register_guard()
        patch = self._inside.enter_context(pytest.MonkeyPatch.context())
        pretend(patch)
        Streams(patch)
        patch.setattr(feed, "ThreadPoolExecutor", _InPlaceOfThreads)
        patch.setattr(torch.Tensor, "backward", lambda loss: self._backward(loss))
        patch.setattr(torch.nn.Module, "to", _moved)
        patch.setattr(FakeTensorMode, "avoid_device_init", True)
        patch.setattr(FakeTensor, "tolist", lambda tensor: self._tolist(tensor))
        patch.setattr(torch.nn.functional, "scaled_dot_product_attention", _attend)
        patch.setattr(torch._C, "_current_graph_task_id", lambda: 1)
        for name, answer in dict(
            is_bf16_supported=True,
            get_rng_state=torch.zeros(16, dtype=torch.uint8),
            set_rng_state=None,
            manual_seed=None,
            current_device=0,
            get_device_properties=SimpleNamespace(major=9, minor=0, multi_processor_count=132),
        ).items():
            patch.setattr(torch.cuda, name, lambda *_, _answer=answer, **__: _answer)
        patch.setattr(torch.cuda, "device", lambda device: nullcontext())
        self._inside.enter_context(FakeTensorMode(allow_non_fake_inputs=True))
        super().__enter__()
        self._inside.enter_context(torch.autograd.graph.saved_tensors_hooks(lambda tensor: [tensor], self._unpack))
        return self

    def __exit__(self, *error):
        super().__exit__(*error)
        self._inside.close()

    # ---- one operator

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        name = func._schema.name.split("::")[-1]
        if func.namespace not in ("prim", "profiler"):
            self.operators.add(str(func))
        if name in _INDEXING:
            args = (args[0], self._places(args[1]), *args[2:])
        is_read = False
        try:
            result = func(*args, **kwargs)
        except (DataDependentOutputException, DynamicOutputShapeException):
            is_read = True
            self.waits += [name] * (args[0].device.type == "cuda")
            result = self._read(func, args, kwargs)
        outputs = [item for item in tree_leaves(result) if isinstance(item, FakeTensor)]
        if name in _COPYING:
            self._count_copy(args, outputs, kwargs)
        if not is_read and not all(output.is_floating_point() for output in outputs):
            self._compute(func, args, kwargs, outputs)
        for output in outputs:
            if output.device.type == "cuda":
                self._hold(output)
        return result

    def _known(self, value):
        """Return the values of a tensor; the fake tensor itself if they are not known."""
        if isinstance(value, FakeTensor):
            return self._values.get(value, value)
        return "cpu" if isinstance(value, torch.device) else value

    def _compute(self, func, args, kwargs, outputs):
        """Compute the values of integer results, if those of all arguments are known."""
        known_args, known_kwargs = tree_map(self._known, (args, kwargs))
        if any(isinstance(item, FakeTensor) for item in tree_leaves((known_args, known_kwargs))):
            for output in outputs:  # it may be an argument, changed in place
                self._values.pop(output, None)
            return
        with _disable_current_modes():
            real = func(*known_args, **known_kwargs)
        for output, value in zip(outputs, filter(torch.is_tensor, tree_leaves(real))):
            self._values[output] = value

    def _read(self, func, args, kwargs):
        """Return what the host reads: real sizes and values, or 1 for an unknown number."""
        device = args[0].device
        args = tree_map(self._known, args)
        if any(isinstance(item, FakeTensor) for item in tree_leaves(args)):
            assert func is aten._local_scalar_dense.default, f"{func} reads values that only a GPU has"
            return 1.0 if args[0].is_floating_point() else 1
        with _disable_current_modes():
            real = func(*args, **tree_map(self._known, kwargs))
        return tree_map(lambda value: self._faked(value, device), real)

    def _faked(self, value, device):
        """Return a fake tensor of these values."""
        if not torch.is_tensor(value):
            return value
        fake = torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=device)
        self._values[fake] = value
        return fake

    def _places(self, indices):
        """Return indices with places instead of masks, as CUDA finds them, waiting for their number."""
        places: List[Any] = []
        for index in indices:
            if index is None or index.dtype != torch.bool:
                places.append(index)
                continue
            self.waits += ["index by a mask"] * (index.device.type == "cuda")
            with _disable_current_modes():
                actual = self._known(index).nonzero(as_tuple=True)
            places += [self._faked(item, index.device) for item in actual]
        return places

    def _count_copy(self, args, outputs, kwargs):
        """Count a copy between host and device that the host waits for."""
        source = args[1] if len(args) > 1 and torch.is_tensor(args[1]) else args[0]
        from_gpu = source.device.type == "cuda"
        to_gpu = outputs[0].device.type == "cuda"
        if from_gpu != to_gpu and not kwargs.get("non_blocking"):
            self.waits.append("copy to the host" if from_gpu else "copy to the device")

    def _tolist(self, tensor):
        """Return numbers that the host reads at once."""
        if tensor.device.type == "cuda":
            self.waits.append("tolist")
        values = self._values.get(tensor)
        if values is None:
            return np.ones(tensor.shape).tolist()
        with _disable_current_modes():
            return values.tolist()

    # ---- memory

    def _hold(self, tensor):
        """Count a tensor's memory until its storage dies."""
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key in self._alive:
            return
        size = -(-storage.nbytes() // BLOCK) * BLOCK

        def free(_):
            del self._alive[key]
            self.live -= size

        self._alive[key] = weakref.ref(storage, free)
        self.live += size
        self.peak = max(self.peak, self.live)

    # ---- the backward pass

    def _unpack(self, holder):
        self._unpacked.append(holder)
        return holder[0]

    @torch.no_grad()
    def _backward(self, loss):
        """Walk the graph of autograd as its engine does: the newest node first, gradients in the shapes of forward."""
        uses: Dict[Any, int] = {loss.grad_fn: 0}
        pending = [loss.grad_fn]
        while pending:
            for following, _ in pending.pop().next_functions:
                if following is not None and following not in uses:
                    pending.append(following)
                    uses[following] = 0
                if following is not None:
                    uses[following] += 1
        gradients: Dict[Any, List[Any]] = {loss.grad_fn: [torch.ones_like(loss)]}
        ready = [(0, 0, loss.grad_fn)]
        number = 0
        while ready:
            node = heapq.heappop(ready)[2]
            inputs = gradients.pop(node)
            if hasattr(node, "variable"):
                _accumulate(node.variable, inputs[0])
                continue
            results = node.apply(*inputs) if hasattr(node, "apply") else node(*inputs)
            del inputs
            results = list(results) if isinstance(results, tuple) else [results]
            while self._unpacked:  # the engine frees what a node has saved
                self._unpacked.pop().clear()
            for place, (following, index) in enumerate(node.next_functions):
                if following is None:
                    continue
                result = results[place]
                results[place] = None
                slots = gradients.setdefault(following, [None] * len(following._input_metadata))
                slots[index] = _sum(slots[index], result, following._input_metadata[index])
                uses[following] -= 1
                if not uses[following]:
                    number += 1
                    order = -1e18 if hasattr(following, "variable") else -following._sequence_nr()
                    heapq.heappush(ready, (order, number, following))


def _sum(sum_before, gradient, metadata):
    """Add a gradient in the shape and type of the forward value."""
    if gradient is None:
        return sum_before
    if gradient.shape != metadata.shape:
        gradient = gradient.sum_to_size(metadata.shape)
    gradient = gradient.to(metadata.dtype)
    return gradient if sum_before is None else sum_before + gradient


def _accumulate(weight, gradient):
    if gradient is None:
        return
    if weight.grad is not None:
        weight.grad.add_(gradient)
        return
    is_alike = gradient.stride() == weight.stride()
    weight.grad = gradient.detach() if is_alike else gradient.clone(memory_format=torch.contiguous_format)


def _attend(
    query,
    key,
    value,
    attn_mask=None,
    dropout_p=0.0,
    is_causal=False,
    scale=None,
):
    """Choose the kernel of `scaled_dot_product_attention` as a GPU does; a CPU build would choose plain products."""
    if torch.is_autocast_enabled("cuda"):
        query, key, value = (item.to(torch.get_autocast_dtype("cuda")) for item in (query, key, value))
    options: Dict[str, Any] = dict(dropout_p=dropout_p, is_causal=is_causal, scale=scale)
    if attn_mask is None and query.dtype != torch.float32:
        return aten._scaled_dot_product_flash_attention(query, key, value, **options)[0]
    if attn_mask is not None:
        if attn_mask.dtype == torch.bool:
            hidden = query.new_full((), float("-inf"))
            attn_mask = torch.where(attn_mask, torch.zeros_like(hidden), hidden)
        attn_mask = attn_mask.to(query.dtype).expand(*query.shape[:3], key.shape[2])
    return aten._scaled_dot_product_efficient_attention(query, key, value, attn_mask, True, **options)[0]


def _moved(module, device):
    """Do the work of `Module.to`, which cannot move fake parameters."""
    moved: Dict[int, Any] = {}
    for part in module.modules():
        for kept in (part._parameters, part._buffers):
            for name, tensor in kept.items():
                if tensor is None:
                    continue
                if id(tensor) not in moved:
                    copy = tensor.detach().to(device)
                    is_weight = isinstance(tensor, torch.nn.Parameter)
                    moved[id(tensor)] = torch.nn.Parameter(copy, tensor.requires_grad) if is_weight else copy
                kept[name] = moved[id(tensor)]
    return module
