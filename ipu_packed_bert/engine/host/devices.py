"""Where the host engine runs: the device, what it can compute in, and what a whole run takes there."""

from __future__ import annotations

import contextlib
import os
import shutil
import sys
import time
from typing import Any, Iterator, List, Optional, Tuple, TypeVar

import torch

from ipu_packed_bert.planning.host_memory import TORCH, multiply_adds
from ipu_packed_bert.planning.plan import RunPlan, host_needs
from ipu_packed_bert.processes.ranks import ONE, Processes
from ipu_packed_bert.settings.schema import Configuration, EngineConfig
from ipu_packed_bert.tasks.task import Task
from pack_data.cli.timing import Clock, seconds_in_turn

# The first NVIDIA GPUs with products in bfloat16 and TF32, and with the variable-length attention kernel.
AMPERE = (8, 0)

_Config = TypeVar("_Config", bound=Configuration)


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


# Of a plain matrix product's rate: what training steps of large transformers reach, with layer norms, dropout, copies.
_SHARE = 0.5
_GIB = float(1 << 30)


def product_rate(device: torch.device, engine: EngineConfig, *, size: int = 0) -> float:
    """Multiply-adds a second of a square matrix product in `engine.precision`, the best of a few."""
    size = size or (4096 if device.type == "cuda" else 1024)
    factor = torch.ones(size, size, dtype=arithmetic(engine.precision, device), device=device)
    with numerics_of(engine, device):
        times = seconds_in_turn({"product": lambda: torch.mm(factor, factor)}, 3, clock_of(device))
    return size**3 / float(times["product"].min())


# When torch.compile pays on a CPU.  Measured on 2 cores with AMX, torch 2.13, memory kept between updates: seconds that
# it takes for training and evaluation (101 + 32); of an eager update's time the share that a compiled one saves, and
# the multiply-adds of that a second on one core.  With dropout it took longer than eager code (1.03 of the time at
# hidden 256, 1.06 at 768), in float32 too (1.05, 0.99).
_COMPILE_SECONDS = 133.0
_SAVED = {"bfloat16": 0.05}
_RATE = 4e10
# Compiling must pay so many times over on one core, because a run may have more of them.
_TIMES = 10.0
# Beyond, attention within sequences, whose shapes cannot be compiled, saves as much.
_COMPILED_SLOTS = 1024


def compile_decided(config: _Config, task: Task, *, packs: int) -> _Config:
    """`engine.compile` true or false, which is written down; `auto` is decided for a run of so many packs.

    No clock is read: it follows from configuration, torch and C++ compiler, so all ranks of a run find the same.
    """
    engine = config.engine
    if engine.compile != "auto":
        return config
    work = packs * multiply_adds(task.model, slots=task.max_sequence_length, predictions=0)
    return config.compiled(
        engine.kind == "host"
        and find_device(engine).type == "cpu"
        and engine.attention != "varlen"
        and task.max_sequence_length <= _COMPILED_SLOTS
        and _can_compile()
        and task.model.hidden_dropout == task.model.attention_dropout == 0.0
        and _SAVED.get(engine.precision, 0.0) * work / _RATE >= _TIMES * _COMPILE_SECONDS
    )


def _can_compile() -> bool:
    """Whether torch is 2.1 or newer, and its C++ compiler is here."""
    compiler = os.environ.get("CXX") or ("clang++" if sys.platform == "darwin" else "g++")
    return hasattr(torch, "compiler") and shutil.which(compiler) is not None


def memory_here(device: torch.device) -> int:
    """Bytes of the device, or of this computer; 0 where the system does not say."""
    if device.type == "cuda":
        return torch.cuda.get_device_properties(device).total_memory
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, OSError, ValueError):
        return 0


def whole_lines(made: RunPlan, device: torch.device, *, rate: float) -> List[str]:
    """Memory and hours of the run, as people read them. rate: `product_rate`."""
    needs, config = host_needs(made), made.config
    there, most = memory_here(device), needs.memory.most + (TORCH if device.type == "cpu" else 0)
    here = f" of the {there / _GIB:,.1f} GiB here" if there else ""
    lines = [
        f"  memory  about {most / _GIB:,.1f} GiB in a step{here}, computed"
        + ("" if not there or most < there else ": more than there is, so lower batch.micro_batch")
    ]
    if needs.multiply_adds is None:
        return lines + ["  time    unknown: no packing factor; give --packing-factor"]
    hours = needs.multiply_adds / (_SHARE * rate) / 3600.0
    lines.append(
        f"  time    about {_duration(hours)} for {made.steps:,} updates on this {device_name(device)}, computed"
        f" from {_SHARE:.0%} of a matrix product's {2e-12 * rate:,.2g} TFLOP/s in {config.engine.precision}, measured"
        " now"
    )
    return lines


def _duration(hours: float) -> str:
    """ "7.1 hours", "51 days", "3.2 years"."""
    for unit, length in (("years", 24 * 365.25), ("days", 24.0)):
        if hours >= 2 * length:
            return f"{hours / length:,.1f} {unit}"
    return f"{hours:,.1f} hours"
