"""Measures one packer at one depth; a module of its own, so that the processes of `compare` load nothing else."""

from __future__ import annotations

import multiprocessing
import os
import signal
from dataclasses import dataclass, fields
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
    # Proven for this depth by the optimal packer, whichever packer this row is about.
    lower_bound: Optional[int]
    gap: Optional[int]  # packs - lower_bound; None for SORT
    solve_seconds: float
    # Bytes above those that the process had before; None if the system does not report them.
    peak_memory: Optional[int]


def measure_each(
    jobs: Sequence[Job], histogram: LengthHistogram, batch_size: int, *, isolated: bool
) -> Iterator[Row]:
    """Run the jobs one after another and yield a row for each.

    Args:
        jobs: packers and depths.
        histogram: what is packed.
        batch_size: rows in a batch of SORT.
        isolated: run each job in a new process, so that its memory is measured alone.

    Raises:
        ValueError: a packer refuses its depth, or its process was killed.
    """
    if not (isolated and "forkserver" in multiprocessing.get_all_start_methods()):
        for name, depth in jobs:
            yield _measure(name, histogram, depth, batch_size)
        return

    # One thread each: algorithms are compared, and on a busy machine several threads wait for each other.
    for variable in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"):
        os.environ[variable] = "1"
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(
        ["pack_data.inspection.one_packer", "scipy.optimize", "scipy.sparse"]
    )
    for name, depth in jobs:
        receiver, sender = context.Pipe(duplex=False)
        process = context.Process(
            target=_send_row, args=(sender, name, histogram, depth, batch_size)
        )
        process.start()
        sender.close()
        try:
            result = receiver.recv()
        except EOFError:
            raise ValueError(
                f"{name} at depth {depth_text(depth)}: its process was killed, probably for lack of memory; leave it "
                "out with --packers"
            ) from None
        finally:
            process.terminate()
            process.join()
        if isinstance(result, BaseException):
            raise result
        yield result


def _send_row(
    pipe: Any, name: str, histogram: LengthHistogram, depth: Optional[int], batch_size: int
) -> None:
    """Send the row of a job, or the exception that it raised."""
    # Ctrl-C is for the command, which then ends this process.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        pipe.send(_measure(name, histogram, depth, batch_size))
    except Exception as error:  # raised again by the command
        pipe.send(error)


def _measure(
    algorithm: str, histogram: LengthHistogram, depth: Optional[int], batch_size: int
) -> Row:
    """Pack once. The lower bound is the packer's own, if it has one."""
    memory = PeakMemory()
    packed: Any
    if algorithm == "sort":
        packed = batch(histogram, batch_size=batch_size)
    else:
        packed = get_packer(algorithm)(histogram, max_sequences_per_pack=depth)
    values: Dict[str, Any] = {
        column.name: getattr(packed, column.name, None) for column in fields(Row)
    }
    values["algorithm"] = algorithm
    values["peak_memory"] = memory.added()
    if values["strategies"] is not None:
        values["strategies"] = len(packed.strategies)
    return Row(**values)
