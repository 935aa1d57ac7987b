"""The processes of a run: one, or those that torchrun or poprun started, which make every update together.

What is the same for both launchers is here: whose share is whose, sums, one stop for all, one error for all.  poprun's
processes, the instances of the IPU engine, meet in `engine/ipu/poprun.py`.  torch loads only where there are several.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import pickle
import signal
import socket
import sys
import time
from datetime import timedelta
from typing import Any, Callable, Dict, Iterator, List, Mapping, Optional, Sequence, TypeVar

from ipu_packed_bert.processes.beats import Beats, leave_error
from pack_data.cli.command import NotFinite

_T = TypeVar("_T")

# What other launchers say of how many processes they started.
_OTHER_LAUNCHERS = {
    "SLURM_STEP_NUM_TASKS": "srun",
    "OMPI_COMM_WORLD_SIZE": "mpirun",
    "PMI_SIZE": "mpiexec",
}
_TORCHRUN = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
_SIGNALS = (signal.SIGTERM, signal.SIGINT)  # where ranks got different ones, the first counts
# Longest wait in one exchange: rank 0 saves, exports and scores files while the others wait for it.
_PATIENCE = timedelta(hours=2)


def end_group() -> None:
    """End the group of torch.distributed.

    torch before 2.8 (its pull request 154976) holds Python's lock while it waits for threads of gloo, which may need
    that lock to let go of their tensors: for ever, if they have not done so before.
    """
    import torch
    import torch.distributed as dist

    if torch.__version__ < "2.8":
        time.sleep(0.3)
    dist.destroy_process_group()


class Processes:
    """The one process of a run; `Ranks` are several.  Every method is called by all of them, in the same order."""

    rank = 0  # rank 0 writes the run down
    size = 1
    local_rank = 0  # on its machine
    launcher = ""  # "torchrun" or "poprun"; empty: none, or none that counts

    def __init__(self) -> None:
        self.received: Optional[int] = None  # signal that this process got

    @property
    def stop(self) -> Optional[int]:
        """The signal that ends the run, at the same update on all: agreed upon in `summed`."""
        return self.received

    def summed(self, values: Sequence[float]) -> List[float]:
        """Each value, summed over the processes, in float64."""
        return list(values)

    def gathered(self, value: _T) -> List[_T]:
        """Return the values of all processes, by rank."""
        return [value]

    def of_first(self, make: Callable[..., _T], *arguments: Any) -> _T:
        """Return what rank 0 makes, on all ranks; the others make nothing."""
        return make(*arguments)

    @contextlib.contextmanager
    def first_alone(self) -> Iterator[None]:
        """Let the others enter when rank 0 has left; rank 0 may take any time."""
        yield

    def refuse_differences(self, settings: Mapping[str, Any]) -> None:
        """Raise ValueError on all ranks if a setting differs between them."""


ONE = Processes()


class Ranks(Processes):
    """Processes of torch.distributed.

    Numbers and objects travel by gloo, on CPUs.  What fails on one rank ends all: its error is left in the store
    that torchrun keeps, its connections close, the exchange that the others are in fails at once, and they end with
    its exit status without a word.
    """

    launcher = "torchrun"
    restart = "torchrun --max-restarts with --resume-if-there does"  # how a run goes on from its newest checkpoint

    def __init__(
        self,
        store: Any,
        rank: int,
        size: int,
        local_rank: int,
        *,
        connect: Optional[Callable[[], Any]] = None,
    ):
        """connect: to the same store once more, for beats; without it no rank notices that another one is silent."""
        super().__init__()
        self._store, self.rank, self.size, self.local_rank = store, rank, size, local_rank
        self._beats = Beats(connect, rank, size, self.restart) if connect else None
        self._agreed: Optional[int] = None
        self._alone = 0

    def meet(self) -> None:
        """Before anything is exchanged."""
        import torch.distributed as dist

        if self._beats:
            self._beats.begin()
        group = dist.PrefixStore("group", self._store)
        dist.init_process_group(
            "gloo", store=group, rank=self.rank, world_size=self.size, timeout=_PATIENCE
        )

    @property
    def stop(self) -> Optional[int]:
        return self._agreed

    def summed(self, values: Sequence[float]) -> List[float]:
        import torch
        import torch.distributed as dist

        received = [float(self.received == number) for number in _SIGNALS]
        sums = torch.tensor([*values, *received], dtype=torch.float64)
        dist.all_reduce(sums)
        found = sums.tolist()
        for number, ranks in zip(_SIGNALS, found[len(values) :]):
            if ranks and self._agreed is None:
                self._agreed = int(number)
        return found[: len(values)]

    def gathered(self, value: _T) -> List[_T]:
        import torch.distributed as dist

        found: List[Any] = [None] * self.size
        dist.all_gather_object(found, value)
        return found

    def of_first(self, make: Callable[..., _T], *arguments: Any) -> _T:
        import torch
        import torch.distributed as dist

        message: List[Any] = [None]
        if not self.rank:
            value = make(*arguments)
            data, tensors = _TensorsApart.split(value)
            message = [(data, [(tensor.shape, tensor.dtype) for tensor in tensors])]
        dist.broadcast_object_list(message)
        if self.rank:
            data, shapes = message[0]
            tensors = [torch.empty(shape, dtype=dtype) for shape, dtype in shapes]
        for tensor in tensors:
            if tensor.numel():  # torch 2.0's gloo divides by it
                dist.broadcast(tensor.reshape(-1).view(torch.uint8), 0)  # gloo knows not every type
        return _TensorsApart.joined(data, tensors) if self.rank else value

    @contextlib.contextmanager
    def first_alone(self) -> Iterator[None]:
        self._alone += 1
        done = f"alone/{self._alone}"
        if self.rank:
            while not self._store.add(done, 0):
                if self._store.add("errors", 0):
                    raise _ConnectionLost
                time.sleep(0.1)
        yield
        if not self.rank:
            self._store.add(done, 1)

    def refuse_differences(self, settings: Mapping[str, Any]) -> None:
        found = self.gathered((socket.gethostname(), dict(settings)))
        host, first = found[0]
        for rank, (other, its) in enumerate(found):
            for name in {**first, **its}:
                ours, theirs = (each.get(name, "missing") for each in (first, its))
                if ours != theirs:
                    raise ValueError(
                        f"{name} is {ours} on rank 0 ({host}) and {theirs} on rank {rank} ({other}); start every "
                        "process with the same command line, files, data and versions"
                    )

    def leave(self) -> None:
        """Wait for all ranks at the end: a launcher kills the others once one fails; rank 0 may still write."""
        self.summed(())
        end_group()

    def ended(self, error: BaseException) -> Optional[int]:
        """Exit status with which this process ends without a word; None where it has to say its error."""
        try:
            return (
                self._ended_of_others(error)
                if _is_lost_connection(error)
                else self._ended_by(error)
            )
        except RuntimeError:  # the store has gone with the process that kept it
            return None

    def _ended_by(self, error: BaseException) -> Optional[int]:
        status = (
            3
            if isinstance(error, NotFinite)
            else 2
            if isinstance(error, (ValueError, OSError))
            else 1
        )
        leave_error(self._store, self.rank, status, str(error))
        # The same mistake is found by all: rank 0 says it. Where training is no longer finite, only rank 0 knows what
        # was saved; it writes the summary first.
        if self.rank and self._wait_for("errors/0", seconds=60.0 if status == 3 else 1.0):
            first = json.loads(self._store.get("error/0"))
            if first == {"status": status, "text": str(error)} or first["status"] == status == 3:
                return status
        return None

    def _ended_of_others(self, error: BaseException) -> Optional[int]:
        # Where one rank has waited in vain, the others need not: each that ends is lost to the next.
        if self._wait_for("errors", seconds=0.0 if self._store.add("lost", 0) else 1.0):
            for rank in range(self.size):
                if self._store.add(f"errors/{rank}", 0):
                    return int(json.loads(self._store.get(f"error/{rank}"))["status"])
        return None if self._store.add("lost", 1) == 1 else 1

    def _wait_for(self, key: str, *, seconds: float) -> bool:
        end = time.monotonic() + seconds
        while not self._store.add(key, 0):
            if time.monotonic() > end:
                return False
            time.sleep(0.02)
        return True


class _ConnectionLost(RuntimeError):
    """Another process has ended."""


def _is_lost_connection(error: BaseException) -> bool:
    """Whether an exchange failed, and not this process.  torch has no type of its own for it before 2.1."""
    words = str(error).lower()
    return isinstance(error, _ConnectionLost) or (
        isinstance(error, RuntimeError)
        and any(word in words for word in ("gloo", "nccl", "connection", "socket"))
    )


class _TensorsApart:
    """A value as bytes, its tensors apart: they travel one by one, without a copy of all."""

    @staticmethod
    def split(value: Any) -> Any:
        import torch

        tensors: List[torch.Tensor] = []

        class Pickler(pickle.Pickler):
            def persistent_id(self, obj: Any) -> Optional[int]:
                if not isinstance(obj, torch.Tensor):
                    return None
                tensors.append(obj.detach().cpu().contiguous())
                return len(tensors) - 1

        file = io.BytesIO()
        Pickler(file).dump(value)
        return file.getvalue(), tensors

    @staticmethod
    def joined(data: bytes, tensors: Sequence[Any]) -> Any:
        class Unpickler(pickle.Unpickler):
            def persistent_load(self, number: Any) -> Any:
                return tensors[number]

        return Unpickler(io.BytesIO(data)).load()


def of_poprun(environment: Mapping[str, str] = os.environ) -> bool:
    """Whether poprun started this process."""
    return any(name.startswith("POPDIST_") for name in environment)


def _refuse_launcher(environment: Mapping[str, str] = os.environ) -> None:
    """Raise ValueError in a process that was started with others in a way that does not make them one run."""
    if of_poprun(environment):
        return
    way_out = "start them with torchrun, as docs/cluster.md shows, or start one process"
    if environment.get("WORLD_SIZE", "1") != "1":
        missing = [name for name in _TORCHRUN if not environment.get(name)]
        if missing:
            raise ValueError(
                f"WORLD_SIZE is {environment['WORLD_SIZE']} and {', '.join(missing)} is not set: every process would "
                f"make this whole run for itself; {way_out}"
            )
        return
    for name, launcher in _OTHER_LAUNCHERS.items():
        if "WORLD_SIZE" not in environment and environment.get(name, "1") != "1":
            raise ValueError(
                f"{name} is {environment[name]}: every process of {launcher} would make this whole run for itself; "
                f"{way_out}"
            )


def refuse_several(command: str, environment: Mapping[str, str] = os.environ) -> None:
    """Raise ValueError in each of several processes of a command that needs one process."""
    _refuse_launcher(environment)
    if of_poprun(environment):
        raise ValueError(
            f"poprun started this process: each would make all of {command} for itself; start it once, without poprun"
        )
    if environment.get("WORLD_SIZE", "1") != "1":
        raise ValueError(
            f"WORLD_SIZE is {environment['WORLD_SIZE']}: every process of torchrun would make all of {command} for "
            "itself; start it once, without torchrun"
        )


@contextlib.contextmanager
def joined(
    environment: Mapping[str, str] = os.environ,
    *,
    command: str = "this command",
    instances: Optional[Callable[[], Optional[Ranks]]] = None,
) -> Iterator[Processes]:
    """Join the processes of this run; inside, only rank 0 prints, and an error of one ends all with its exit status.

    instances: what makes the ranks of poprun's processes, None where it started one; not given where `command` runs
    without IPUs.  Raises ValueError where another launcher started this process beside others.
    """
    _refuse_launcher(environment)
    if of_poprun(environment):
        if instances is None:
            refuse_several(command, environment)
        ranks = instances() if instances else None
    else:
        ranks = _of_torchrun(environment)
    if ranks is None:
        yield Processes()
        return
    with contextlib.ExitStack() as silent:
        if ranks.rank:
            nowhere = silent.enter_context(open(os.devnull, "w", encoding="utf-8"))
            silent.enter_context(contextlib.redirect_stdout(nowhere))
        try:
            ranks.meet()  # fails where another one has met a mistake, and gone, before all have met
            yield ranks
            ranks.leave()
        except Exception as error:
            status = ranks.ended(error)
            if status is not None:
                raise SystemExit(status) from None
            if _is_lost_connection(error):
                # It may have been the connection itself: what torch says of it is all that there is to find out by.
                words = " ".join(str(error).split())[:200]
                print(
                    f"error: rank {ranks.rank}: another process of this run ended{words and f' ({words})'}, so all do; "
                    f"go on from the newest checkpoint ({ranks.restart})",
                    file=sys.stderr,
                )
                raise SystemExit(1) from None
            if ranks.rank and isinstance(error, (ValueError, OSError, NotFinite)):
                kind = NotFinite if isinstance(error, NotFinite) else ValueError
                raise kind(f"rank {ranks.rank} on {socket.gethostname()}: {error}") from None
            raise
        finally:
            if ranks._beats:
                ranks._beats.end()


def _of_torchrun(environment: Mapping[str, str]) -> Optional[Ranks]:
    """Return the ranks that torchrun started, or None if there is one."""
    if environment.get("WORLD_SIZE", "1") == "1":
        return None
    import torch.distributed as dist

    kept, rank, size = next(dist.rendezvous("env://", timeout=timedelta(minutes=10)))

    def connect(keeping: Any = kept) -> Any:  # rank 0 may be the one that keeps the store
        address, port = environment["MASTER_ADDR"], int(environment["MASTER_PORT"])
        store = dist.TCPStore(address, port, is_master=False, wait_for_workers=False)
        # torchrun may keep one store for all attempts: what an earlier one left there, addresses too, is not ours.
        return dist.PrefixStore(
            f"attempt {environment.get('TORCHELASTIC_RESTART_COUNT', '0')}", store
        )

    return Ranks(connect(), rank, size, int(environment["LOCAL_RANK"]), connect=connect)


def flat(tree: Mapping[str, Any], prefix: str = "") -> Dict[str, Any]:
    """Nested settings by full name."""
    found: Dict[str, Any] = {}
    for name, value in tree.items():
        found.update(
            flat(value, f"{prefix}{name}.")
            if isinstance(value, Mapping)
            else {prefix + name: value}
        )
    return found
