"""float16 on a CPU whose torch lacks kernels for it (torch 2.0.1): such an operator is computed in float32, its result
rounded."""

import contextlib

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_map

_WITHOUT_KERNEL = set()  # operators; torch takes some 10 ms to say that it has none


def _widened(value):
    if value is torch.float16:  # an operator's argument
        return torch.float32
    return value.float() if isinstance(value, torch.Tensor) and value.dtype == torch.float16 else value


class HalfOnTheCpu(TorchDispatchMode):
    """While entered, an operator without a float16 kernel runs on float32 copies of its float16 tensors.

    What comes out as float32 is rounded to float16 unless one of the operator's own tensors was float32.
    """

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        # A program has thousands of operators, and few without a kernel: those alone are looked at closely.
        if func not in _WITHOUT_KERNEL:
            try:
                return func(*args, **kwargs)
            except RuntimeError as error:
                if "not implemented for 'Half'" not in str(error):
                    raise
                _WITHOUT_KERNEL.add(func)
        seen = {value.dtype for value in tree_flatten((args, kwargs))[0] if isinstance(value, torch.Tensor)}
        if torch.float16 not in seen:
            return func(*args, **kwargs)
        result = func(*tree_map(_widened, args), **tree_map(_widened, kwargs))

        def rounded(value):
            narrow = isinstance(value, torch.Tensor) and value.dtype == torch.float32 and torch.float32 not in seen
            return value.half() if narrow else value

        result = tree_map(rounded, result)
        if func._schema.is_mutable and isinstance(result, torch.Tensor):  # in place: into the tensor that was given
            args[0].copy_(result)
            return args[0]
        return result


def _lacks_kernels():
    row = torch.ones(1, 1, dtype=torch.float16)
    try:
        torch.mm(row, row)
    except RuntimeError:
        return True
    return False


# A torch that multiplies float16 has all kernels of our programs; to watch each operator takes longer than to run it.
half_on_the_cpu = HalfOnTheCpu if _lacks_kernels() else contextlib.nullcontext
