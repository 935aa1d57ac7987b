"""Where the host engine runs: the device, and what it can compute in."""

from __future__ import annotations

import contextlib
import os
import time
from typing import Any, Iterator, Optional, Tuple

import torch

from ipu_packed_bert.processes.ranks import ONE, Processes
from ipu_packed_bert.settings.schema import EngineConfig
from pack_data.cli.timing import Clock, seconds_in_turn

# The first NVIDIA GPUs with products in bfloat16 and TF32, and with the variable-length attention kernel.
AMPERE = (8, 0)


def find_device(engine: EngineConfig, processes: Processes = ONE) -> torch.device:
    """The device that `engine.device` names; each of several processes has one of its machine's CUDA devices.

    Raises ValueError, in one line, where it is not here.
    """
    if processes.size > 1 and torch.cuda.is_available() and engine.device in ("auto", "cuda"):
        devices = torch.cuda.device_count()
        if processes.local_rank >= devices:
            raise ValueError(
                f"LOCAL_RANK is {processes.local_rank}, and this machine has {devices} CUDA device"
                f"{'' if devices == 1 else 's'}, one for each rank; give torchrun --nproc-per-node {devices}, or train "
                "on CPUs: --set engine.device=cpu"
            )
        return torch.device("cuda", processes.local_rank)
    if engine.device == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if engine.device == "cuda" and not torch.cuda.is_available():
        raise ValueError("engine.device is cuda; torch finds no CUDA device here: --set engine.device=cpu")
    return torch.device(engine.device)


def device_name(device: torch.device) -> str:
    """As people know it: "CPU", or the name of the GPU."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"


def capability(device: torch.device) -> Optional[Tuple[int, int]]:
    """NVIDIA's compute capability; None on a CPU."""
    return torch.cuda.get_device_capability(device) if device.type == "cuda" else None


def clock_of(device: torch.device, *, of_process: bool = False) -> Clock:
    """Seconds; on CUDA when the device has done its work. of_process: on a CPU, where other programs do not count."""
    if device.type != "cuda":
        return time.process_time if of_process else time.perf_counter

    def clock() -> float:
        torch.cuda.synchronize(device)
        return time.perf_counter()

    return clock


def computes_in(precision: str, device: torch.device) -> bool:
    """Whether the device itself computes in this type; a CPU may have to emulate bfloat16, and is as exact."""
    found = capability(device)
    if found is None:
        return precision != "tf32"
    return precision == "float32" or found >= AMPERE


def refuse_precision(precision: str, device: torch.device) -> None:
    """Raise ValueError where the device does not compute in `engine.precision`."""
    found = capability(device)
    if computes_in(precision, device):
        return
    if found is None:
        raise ValueError("engine.precision is tf32; CPUs have no TF32: float32 and bfloat16 run here")
    raise ValueError(
        f"engine.precision is {precision}; {device_name(device)} has compute capability {found[0]}.{found[1]}, "
        f"{precision} needs {AMPERE[0]}.{AMPERE[1]}: --set engine.precision=float32"
    )


def arithmetic(precision: str, device: torch.device) -> torch.dtype:
    """The type of the products' factors; weights, sums of gradients and the optimiser's state are float32."""
    return torch.bfloat16 if precision == "bfloat16" else torch.float32


@contextlib.contextmanager
def numerics_of(engine: EngineConfig, device: torch.device) -> Iterator[None]:
    """Inside, CUDA computes as the settings say, whatever the process had chosen.

    float32 products are IEEE's, or TF32 where `engine.precision` is that; with `engine.deterministic` every kernel sums
    in one order. Both choices belong to the whole process, so that they hold for the threads of the backward pass too.
    In bfloat16 each weight is cast once and not in every micro-batch: no weight may change inside.
    """
    if device.type != "cuda":
        with _casts_kept(engine.precision, device):
            yield
        return
    precision, deterministic = torch.get_float32_matmul_precision(), torch.are_deterministic_algorithms_enabled()
    only_warns = torch.is_deterministic_algorithms_warn_only_enabled()
    torch.set_float32_matmul_precision("high" if engine.precision == "tf32" else "highest")
    if engine.deterministic:
        # cuBLAS needs a workspace of fixed size for it, and reads this when it is first used.
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.use_deterministic_algorithms(True)
    try:
        with _casts_kept(engine.precision, device):
            yield
    finally:
        torch.set_float32_matmul_precision(precision)
        torch.use_deterministic_algorithms(deterministic, warn_only=only_warns)


def autocast(precision: str, device: torch.device) -> Any:
    """Inside, products run in bfloat16 where that is the precision."""
    if precision == "bfloat16":
        return torch.autocast(device.type, dtype=torch.bfloat16)
    return contextlib.nullcontext()


def _casts_kept(precision: str, device: torch.device) -> Any:
    """Inside, what `autocast` cast of the weights outlives it: torch forgets it where the outermost autocast ends."""
    if precision == "bfloat16":
        return torch.autocast(device.type, enabled=False)
    return contextlib.nullcontext()


def product_rate(device: torch.device, engine: EngineConfig, *, size: int = 0) -> float:
    """Multiply-adds a second of a square matrix product in `engine.precision`, the best of a few."""
    size = size or (4096 if device.type == "cuda" else 1024)
    factor = torch.ones(size, size, dtype=arithmetic(engine.precision, device), device=device)
    with numerics_of(engine, device):
        times = seconds_in_turn({"product": lambda: torch.mm(factor, factor)}, 3, clock_of(device))
    return size**3 / float(times["product"].min())
