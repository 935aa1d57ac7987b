"""The device of the host engine, and the types that it computes in."""

from __future__ import annotations

import contextlib
import os
import time
from typing import Any, Iterator, Optional, Tuple

import torch

from ipu_packed_bert.processes.ranks import ONE, Processes
from ipu_packed_bert.settings.schema import EngineConfig
from pack_data.cli.command import counted
from pack_data.cli.timing import Clock, seconds_in_turn

# Compute capability of the first NVIDIA GPUs with products in bfloat16 and TF32, and the variable-length kernel.
AMPERE = (8, 0)


def find_device(engine: EngineConfig, processes: Processes = ONE) -> torch.device:
    """Return the device that `engine.device` names; each of several processes has a CUDA device of its machine.

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
                f"LOCAL_RANK is {processes.local_rank}, but this machine has {counted(devices, 'CUDA device')}, one per"
                f" rank; use torchrun --nproc-per-node {devices}, or train on CPUs: --set engine.device=cpu"
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
    """Return "CPU", or the name of the GPU."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"


def capability(device: torch.device) -> Optional[Tuple[int, int]]:
    """Return NVIDIA's compute capability; None for a CPU."""
    return torch.cuda.get_device_capability(device) if device.type == "cuda" else None


def clock_of(device: torch.device, *, of_process: bool = False) -> Clock:
    """Return a clock in seconds; on CUDA it waits until the device has finished.

    Args:
        device: device of the work.
        of_process: on a CPU, count the time of this process only.
    """
    if device.type != "cuda":
        return time.process_time if of_process else time.perf_counter

    def clock() -> float:
        torch.cuda.synchronize(device)
        return time.perf_counter()

    return clock


def computes_in(precision: str, device: torch.device) -> bool:
    """Return whether a device computes in `engine.precision`; a CPU may emulate bfloat16, which is as exact."""
    version = capability(device)
    if version is None:
        return precision != "tf32"
    return precision == "float32" or version >= AMPERE


def refuse_precision(precision: str, device: torch.device) -> None:
    """Raise ValueError if the device does not compute in `engine.precision`."""
    if computes_in(precision, device):
        return
    version = capability(device)
    if version is None:
        raise ValueError(
            "engine.precision is tf32, which CPUs do not have; use float32 or bfloat16"
        )
    raise ValueError(
        f"engine.precision is {precision}; {device_name(device)} has compute capability {version[0]}.{version[1]}, "
        f"{precision} needs {AMPERE[0]}.{AMPERE[1]}: --set engine.precision=float32"
    )


def arithmetic(precision: str, device: torch.device) -> torch.dtype:
    """Return the type of factors in products; weights, sums of gradients and the optimiser's state are float32."""
    return torch.bfloat16 if precision == "bfloat16" else torch.float32


@contextlib.contextmanager
def numerics_of(engine: EngineConfig, device: torch.device) -> Iterator[None]:
    """Have CUDA compute as the settings say, whatever the process has chosen.

    float32 products are IEEE's, or TF32 if `engine.precision` is tf32; with `engine.deterministic` every kernel sums in
    one order. Both settings belong to the process, so that they apply to the threads of the backward pass too. In
    bfloat16 each weight is cast once and not in every micro-batch: no weight may change inside.

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
    """Return a context in which weights cast by `autocast` are kept: torch drops them with the outermost autocast."""
    if precision == "bfloat16":
        return torch.autocast(device.type, enabled=False)
    return contextlib.nullcontext()


def product_rate(device: torch.device, engine: EngineConfig, *, size: int = 0) -> float:
    """Measure the multiply-adds per second of a square matrix product in `engine.precision`, the best of three.

    Args:
        device: device of the engine.
        engine: settings of the engine.
        size: rows of the matrices; 0: 4096 on CUDA, 1024 on a CPU.
    """
    size = size or (4096 if device.type == "cuda" else 1024)
    factor = torch.ones(size, size, dtype=arithmetic(engine.precision, device), device=device)
    with numerics_of(engine, device):
        product = {"product": lambda: torch.mm(factor, factor)}
        times = seconds_in_turn(product, 3, clock_of(device))
    return size**3 / float(times["product"].min())
