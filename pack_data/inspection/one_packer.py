"""Measures one packer at one depth; a module of its own, so that the processes of `compare` load nothing else."""

from __future__ import annotations

import multiprocessing
import os
import signal
from dataclasses import dataclass
from typing import Any, Dict, Iterator, Optional, Sequence, Tuple

from pack_data.cli.command import depth_text
from pack_data.cli.memory import PeakMemory
from pack_data.packers import get_packer
from pack_data.packing.histogram import LengthHistogram
from pack_data.sort import batch

Job = Tuple[str, Optional[int]]  # packer, depth


@dataclass(frozen=True)
class Row:
    """One packer at one depth."""

    algorithm: str
    max_sequences_per_pack: Optional[int]  # None = unlimited
    packs: int  # SORT: rows, one sequence each
    slots: int  # "all tokens"
    padding_tokens: int
    strategies: Optional[int]  # None for SORT
    largest_depth: int
    efficiency: float
    packing_factor: float  # sequences per row
    speedup: float  # slots without packing / slots
    lower_bound: Optional[int]  # proven for this depth by the optimal packer, whichever packer this row is about
    gap: Optional[int]  # packs - lower_bound; None for SORT
    solve_seconds: float
    peak_memory: Optional[int]  # bytes above what the process had before; None where the system does not tell


_OF_A_PACKING = ("max_sequences_per_pack", "packs", "largest_depth", "packing_factor", "lower_bound", "gap")


def measure(algorithm: str, histogram: LengthHistogram, depth: Optional[int], batch_size: int = 256) -> Row:
    """Packs once.  The bound is the packer's own, if it gives one."""
    memory = PeakMemory()
    made: Any
    if algorithm == "sort":
        made = batch(histogram, batch_size=batch_size)
        own: Dict[str, Any] = dict(max_sequences_per_pack=1, packs=made.sequences, strategies=None, largest_depth=1)
        own.update(packing_factor=1.0, speedup=made.speedup, lower_bound=None, gap=None)
    else:
        made = get_packer(algorithm)(histogram, max_sequences_per_pack=depth)
        unpacked = histogram.max_sequence_length * histogram.sequences
        own = {name: getattr(made, name) for name in _OF_A_PACKING}
        own.update(strategies=len(made.strategies), speedup=unpacked / made.slots if made.slots else 1.0)
    same = {name: getattr(made, name) for name in ("slots", "padding_tokens", "efficiency", "solve_seconds")}
    return Row(algorithm=algorithm, **own, **same, peak_memory=memory.added())


def measure_apart(jobs: Sequence[Job], histogram: LengthHistogram, batch_size: int) -> Iterator[Row]:
    """Each job in a new process, one after another, so that each packer's memory is measured alone."""
    # One thread each: algorithms are compared, and on a busy machine several threads wait for each other.
    os.environ.update(dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1"))
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["pack_data.inspection.one_packer", "scipy.optimize", "scipy.sparse"])
    for name, depth in jobs:
        here, there = context.Pipe(duplex=False)
        process = context.Process(target=_report, args=(there, name, histogram, depth, batch_size))
        process.start()
        there.close()
        try:
            result = here.recv()
        except EOFError:
            raise ValueError(
                f"{name} at depth {depth_text(depth)} was killed, probably for lack of memory; leave it out with "
                "--packers"
            ) from None
        finally:
            process.terminate()
            process.join()
        if isinstance(result, BaseException):
            raise result
        yield result


def _report(pipe, name: str, histogram: LengthHistogram, depth: Optional[int], batch_size: int) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the command, which then ends this process
    try:
        pipe.send(measure(name, histogram, depth, batch_size))
    except Exception as error:  # raised again by the command
        pipe.send(error)
