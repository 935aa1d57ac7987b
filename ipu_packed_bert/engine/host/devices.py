"""The device of the host engine and its arithmetic."""

from __future__ import annotations

import contextlib
import os
import time
from typing import Any, Iterator, Optional, Tuple

import torch

from ipu_packed_bert.engine.timing import seconds_in_turn
from ipu_packed_bert.processes.ranks import ONE, Processes
from ipu_packed_bert.settings.schema import EngineConfig
from pack_data.cli.timing import Clock
from pack_data.reading.words import counted

# Compute capability of the first NVIDIA GPUs with bfloat16 and TF32 products and the variable-length kernel.
AMPERE = (8, 0)


def find_device(engine: EngineConfig, processes: Processes = ONE) -> torch.device:
    """Return the device of `engine.device`; with several processes, each one gets a CUDA device of its machine.

    Args:
        engine: settings of the engine.
        processes: the processes that make the updates together.

    Raises:
        ValueError: there is no such device.
    """
    if processes.size > 1 and torch.cuda.is_available() and engine.device in ("auto", "cuda"):
        devices = torch.cuda.device_count()
        if processes.local_rank >= devices:
            raise ValueError(
                f"LOCAL_RANK is {processes.local_rank}, but this machine has {counted(devices, 'CUDA device')}, and"
                f" each rank needs one; use torchrun --nproc-per-node {devices}, or train on CPUs:"
                " --set engine.device=cpu"
            )
        return torch.device("cuda", processes.local_rank)
    if engine.device == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if engine.device == "cuda" and not torch.cuda.is_available():
        raise ValueError(
            "engine.device is cuda, but torch finds no CUDA device here: --set engine.device=cpu"
        )
    return torch.device(engine.device)


def device_name(device: torch.device) -> str:
    """Return "CPU" or the name of the GPU."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"


def capability(device: torch.device) -> Optional[Tuple[int, int]]:
    """Return NVIDIA's compute capability; None for a CPU."""
    return torch.cuda.get_device_capability(device) if device.type == "cuda" else None


def clock_of(device: torch.device, *, of_process: bool = False) -> Clock:
    """Return a clock in seconds; on CUDA it waits for the device.

    Args:
        device: device that does the work.
        of_process: on a CPU, count this process's CPU time instead of wall-clock time.
    """
    if device.type != "cuda":
        return time.process_time if of_process else time.perf_counter

    def clock() -> float:
        torch.cuda.synchronize(device)
        return time.perf_counter()

    return clock


def computes_in(precision: str, device: torch.device) -> bool:
    """Return True if a device supports `engine.precision`; a CPU may emulate bfloat16, which is as exact."""
    version = capability(device)
    if version is None:
        return precision != "tf32"
    return precision == "float32" or version >= AMPERE


def refuse_precision(precision: str, device: torch.device) -> None:
    """Raise ValueError if the device does not support `engine.precision`."""
    if computes_in(precision, device):
        return
    version = capability(device)
    if version is None:
        raise ValueError("engine.precision is tf32, which needs a GPU; use float32 or bfloat16")
    raise ValueError(
        f"engine.precision is {precision}; {device_name(device)} has compute capability {version[0]}.{version[1]}, "
        f"{precision} needs {AMPERE[0]}.{AMPERE[1]}: --set engine.precision=float32"
    )


def arithmetic(precision: str, device: torch.device) -> torch.dtype:
    """Return the type of the operands of products; weights, gradients and optimiser state are float32."""
    return torch.bfloat16 if precision == "bfloat16" else torch.float32


@contextlib.contextmanager
def numerics_of(engine: EngineConfig, device: torch.device) -> Iterator[None]:
    """Apply the numerics of the settings to CUDA inside the context, whatever the process uses outside.

    float32 products are IEEE, or TF32 if `engine.precision` is tf32; with `engine.deterministic` every kernel has a
    fixed order of summation. Both are process-wide, so they also apply to the threads of the backward pass. In bfloat16
    each weight is cast once instead of once per micro-batch, so no weight may change inside the context.

    Args:
        engine: settings of the engine.
        device: device of the engine.
    """
    if device.type != "cuda":
        with _casts_kept(engine.precision, device):
            yield
        return
    precision = torch.get_float32_matmul_precision()
    deterministic = torch.are_deterministic_algorithms_enabled()
    only_warns = torch.is_deterministic_algorithms_warn_only_enabled()
    torch.set_float32_matmul_precision("high" if engine.precision == "tf32" else "highest")
    if engine.deterministic:
        # cuBLAS then needs a workspace of fixed size, and reads this variable when it is first used.
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.use_deterministic_algorithms(True)
    try:
        with _casts_kept(engine.precision, device):
            yield
    finally:
        torch.set_float32_matmul_precision(precision)
        torch.use_deterministic_algorithms(deterministic, warn_only=only_warns)


def autocast(precision: str, device: torch.device) -> Any:
    """Return a context in which products run in bfloat16 if that is `engine.precision`."""
    if precision == "bfloat16":
        return torch.autocast(device.type, dtype=torch.bfloat16)
    return contextlib.nullcontext()


def _casts_kept(precision: str, device: torch.device) -> Any:
    """Return a context that keeps weights cast by `autocast`: torch drops them with the outermost autocast."""
    if precision == "bfloat16":
        return torch.autocast(device.type, enabled=False)
    return contextlib.nullcontext()


def product_rate(device: torch.device, engine: EngineConfig, *, size: int = 0) -> float:
    """Measure the multiply-adds per second of a square matrix product in `engine.precision`, best of three.

    Args:
        device: device of the engine.
        engine: settings of the engine.
        size: rows of the matrices; 0 means 4096 on CUDA and 1024 on a CPU.
    """
    size = size or (4096 if device.type == "cuda" else 1024)
    factor = torch.ones(size, size, dtype=arithmetic(engine.precision, device), device=device)
    with numerics_of(engine, device):
        product = {"product": lambda: torch.mm(factor, factor)}
        times = seconds_in_turn(product, 3, clock_of(device))
    return size**3 / float(times["product"].min())
