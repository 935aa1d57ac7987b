"""The processes of a run: one, or several of torchrun or poprun, which make every update together.

This module has what both launchers share: sums, and a common stop and error. `engine/ipu/poprun.py` connects the
processes of poprun, the instances of the IPU engine. torch is imported only if there are several.
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
from typing import Any, Callable, Iterator, List, Mapping, Optional, Sequence, TypeVar

from ipu_packed_bert.processes.beats import SILENCE, Beats, first_error, leave_error
from pack_data.reading.fields import one_line
from pack_data.reading.words import NotFinite

_T = TypeVar("_T")

# Variables in which other launchers state the number of processes.
_OTHER_LAUNCHERS = {
    "SLURM_STEP_NUM_TASKS": "srun",
    "OMPI_COMM_WORLD_SIZE": "mpirun",
    "PMI_SIZE": "mpiexec",
}
_TORCHRUN = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
# Signals with which a terminal, a batch system or a limit ends a run, which saves first; in order of precedence, if
# ranks receive different ones.
STOPPING = (
    signal.SIGTERM,
    signal.SIGINT,
    signal.SIGHUP,  # the terminal closed
    signal.SIGUSR1,  # sbatch --signal=USR1@90: the time limit is near
    signal.SIGUSR2,
    signal.SIGXCPU,  # the limit of processor time
)
# Longest wait in one exchange: rank 0 saves, exports and scores files while the others wait.
PATIENCE = timedelta(hours=2)


def _end_group() -> None:
    """End the group of torch.distributed.

    torch before 2.8 (its pull request 154976) holds Python's lock while it joins threads of gloo, which may need the
    lock to release their tensors: a deadlock, unless they have released them before.
    """
    import torch
    import torch.distributed as dist

    if torch.__version__ < "2.8":
        time.sleep(0.3)
    dist.destroy_process_group()


class Processes:
    """The single process of a run; the subclass `Ranks` has several. All processes call methods in the same order."""

    rank = 0  # rank 0 writes the files of the run
    size = 1
    local_rank = 0  # rank on its machine
    launcher = ""  # "torchrun" or "poprun", if there are several processes

    def __init__(self) -> None:
        self.received: Optional[int] = None  # signal that this process received
        self.status = 0  # exit status of the command, once its work is done

    @property
    def stop(self) -> Optional[int]:
        """Signal that ends the run, the same on all processes after each `summed`."""
        return self.received

    def summed(self, values: Sequence[float]) -> List[float]:
        """Return the sum of each value over the processes, in float64."""
        return list(values)

    def gathered(self, value: _T) -> List[_T]:
        """Return the values of all processes, by rank."""
        return [value]

    def of_first(self, make: Callable[..., _T], *arguments: Any) -> _T:
        """Call a function on rank 0 only, and return its result on all ranks."""
        return make(*arguments)

    @contextlib.contextmanager
    def first_alone(self) -> Iterator[None]:
        """Return a context that the other ranks enter after rank 0 has left it, however long that takes."""
        yield

    @contextlib.contextmanager
    def shielded(self) -> Iterator[None]:
        """Return a context that the error of another process does not end, for work that is worth finishing."""
        yield

    def refuse_differences(self, settings: Mapping[str, Any]) -> None:
        """Raise ValueError on all ranks if a setting differs between them."""


ONE = Processes()


class Ranks(Processes):
    """Processes of torch.distributed.

    Numbers and objects use gloo, on CPUs. An error on one rank ends all: it is written to the store of torchrun, the
    connections close, the exchange in which the others are fails at once, and they end silently with the same exit
    status.

    Args:
        store: store of torch.distributed that all ranks use.
        rank: this rank.
        size: number of ranks.
        local_rank: rank on this machine.
        connect: opens another connection to the store, for heartbeats; without it lost ranks are not detected.
    """

    launcher = "torchrun"
    restart = "torchrun --max-restarts with --resume-if-there does"  # for messages

    def __init__(
        self,
        store: Any,
        rank: int,
        size: int,
        local_rank: int,
        *,
        connect: Optional[Callable[[], Any]] = None,
    ):
        super().__init__()
        self._store = store
        self.rank = rank
        self.size = size
        self.local_rank = local_rank
        self._beats = Beats(connect, rank, size, self.restart) if connect else None
        self._agreed: Optional[int] = None
        self._alone = 0  # contexts of `first_alone` so far

    def meet(self) -> None:
        """Connect the ranks; must be called before any exchange."""
        import torch.distributed as dist

        if self._beats:
            self._beats.begin()
        group = dist.PrefixStore("group", self._store)
        dist.init_process_group(
            "gloo", store=group, rank=self.rank, world_size=self.size, timeout=PATIENCE
        )

    @property
    def stop(self) -> Optional[int]:
        return self._agreed

    def summed(self, values: Sequence[float]) -> List[float]:
        import torch
        import torch.distributed as dist

        received = [float(self.received == number) for number in STOPPING]
        sums = torch.tensor([*values, *received], dtype=torch.float64)
        dist.all_reduce(sums)
        totals = sums.tolist()
        for number, ranks in zip(STOPPING, totals[len(values) :]):
            if self._agreed is None and ranks:
                self._agreed = int(number)
        return totals[: len(values)]

    def gathered(self, value: _T) -> List[_T]:
        import torch.distributed as dist

        values: List[Any] = [None] * self.size
        dist.all_gather_object(values, value)
        return values

    def of_first(self, make: Callable[..., _T], *arguments: Any) -> _T:
        import torch
        import torch.distributed as dist

        message: List[Any] = [None]
        if not self.rank:
            with self.shielded():
                value = make(*arguments)
            data, tensors = _TensorsApart.split(value)
            message = [(data, [(tensor.shape, tensor.dtype) for tensor in tensors])]
        dist.broadcast_object_list(message)
        if self.rank:
            data, shapes = message[0]
            tensors = [torch.empty(shape, dtype=dtype) for shape, dtype in shapes]
        for tensor in tensors:
            if tensor.numel():  # gloo of torch 2.0 divides by it
                # As bytes, because gloo does not support all types.
                dist.broadcast(tensor.reshape(-1).view(torch.uint8), 0)
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
        else:
            with self.shielded():
                yield
            self._store.add(done, 1)

    @contextlib.contextmanager
    def shielded(self) -> Iterator[None]:
        if self._beats is None:
            yield
            return
        self._beats.shielded = True
        try:
            yield
        finally:
            self._beats.shielded = False

    def refuse_differences(self, settings: Mapping[str, Any]) -> None:
        settings_of_ranks = self.gathered((socket.gethostname(), dict(settings)))
        first_host, first = settings_of_ranks[0]
        for rank, (host, other) in enumerate(settings_of_ranks):
            for name in {**first, **other}:
                expected = first.get(name, "missing")
                value = other.get(name, "missing")
                if value != expected:
                    raise ValueError(
                        f"{name} is {expected} on rank 0 ({first_host}) and {value} on rank {rank} ({host}); start"
                        " every process with the same command line, files, data and versions"
                    )

    def leave(self) -> None:
        """End the connections after the last exchange, in the order in which no rank needs what another has ended.

        A launcher kills the others once one has failed, so all ranks wait for each other first. Then each stops its
        beats, and only when all have done so may rank 0 end, which may keep the store. A failure after the last
        exchange does not change the exit status, because the work is complete.
        """
        import torch.distributed as dist

        self.summed(())
        if self._beats:
            self._beats.status = self.status
            self._beats.end()
        with contextlib.suppress(RuntimeError):
            dist.monitored_barrier(timeout=timedelta(seconds=SILENCE))
        with contextlib.suppress(RuntimeError):
            _end_group()

    def ended(self, error: BaseException) -> Optional[int]:
        """Return the exit status if another rank reports the error; None if this process must report it."""
        if self._beats:
            self._beats.shielded = True
        try:
            if _is_lost_connection(error):
                return self._status_of_others()
            return self._status_of(error)
        except RuntimeError:  # the store has ended with its process
            return None

    def _status_of(self, error: BaseException) -> Optional[int]:
        """Store an error of this rank; return its exit status if rank 0 reports the same error."""
        status = 1
        patience = 1.0  # seconds
        if isinstance(error, NotFinite):
            status = 3
            patience = 60.0  # rank 0 writes the summary first
        elif isinstance(error, (ValueError, OSError)):
            status = 2
        leave_error(self._store, self.rank, status, str(error))
        if self.rank and self._wait_for("errors/0", seconds=patience):
            first = json.loads(self._store.get("error/0"))
            # If values are not finite, texts differ: only rank 0 knows which checkpoint was saved.
            is_same = first["status"] == status and first["text"] == str(error)
            if is_same or first["status"] == status == 3:
                return status
        return None

    def _status_of_others(self) -> Optional[int]:
        """Return the exit status of the rank whose error closed the connection."""
        # If one rank has waited in vain, the others need not.
        if self._wait_for("errors", seconds=0.0 if self._store.add("lost", 0) else 1.0):
            error = first_error(self._store, self.size)
            if error:
                return int(error["status"])
        return None if self._store.add("lost", 1) == 1 else 1

    def _wait_for(self, key: str, *, seconds: float) -> bool:
        end = time.monotonic() + seconds
        while not self._store.add(key, 0):
            if time.monotonic() > end:
                return False
            time.sleep(0.02)
        return True


class _ConnectionLost(RuntimeError):
    """The connection to another process was lost, because that process has ended."""


def _is_lost_connection(error: BaseException) -> bool:
    """Return True if another process has ended."""
    import torch.distributed as dist

    # gloo raises plain RuntimeErrors; before torch 2.1, so do NCCL and the store.
    words = ["gloo"]
    error_class = getattr(dist, "DistError", None)
    if error_class is None:
        error_class = _ConnectionLost
        words += ["nccl", "connection", "socket"]
    if isinstance(error, (_ConnectionLost, error_class)):
        return True
    text = str(error).lower()
    return isinstance(error, RuntimeError) and any(word in text for word in words)


class _TensorsApart:
    """Serialisation of a value without its tensors, which are sent one by one, so that no copy of all is needed."""

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
    """Return True if poprun started this process."""
    return any(name.startswith("POPDIST_") for name in environment)


def _refuse_launcher(environment: Mapping[str, str] = os.environ) -> None:
    """Raise ValueError if the launcher of several processes does not connect them to one run."""
    if of_poprun(environment):
        return
    way_out = "start them with torchrun, as docs/cluster.md shows, or start one process"
    if environment.get("WORLD_SIZE", "1") != "1":
        missing = [name for name in _TORCHRUN if not environment.get(name)]
        if missing:
            raise ValueError(
                f"WORLD_SIZE is {environment['WORLD_SIZE']}, but {', '.join(missing)} is not set, so every process "
                f"would repeat the whole run; {way_out}"
            )
        return
    for name, launcher in _OTHER_LAUNCHERS.items():
        if "WORLD_SIZE" not in environment and environment.get(name, "1") != "1":
            raise ValueError(
                f"{name} is {environment[name]}, so every process of {launcher} would repeat the whole run; {way_out}"
            )


def refuse_several(command: str, environment: Mapping[str, str] = os.environ) -> None:
    """Raise ValueError if several processes run a command that needs one."""
    _refuse_launcher(environment)
    if of_poprun(environment):
        raise ValueError(
            f"poprun started this process, but each process would repeat {command}; start it once, without poprun"
        )
    if environment.get("WORLD_SIZE", "1") != "1":
        raise ValueError(
            f"WORLD_SIZE is {environment['WORLD_SIZE']}, but each process of torchrun would repeat {command}; start it"
            " once, without torchrun"
        )


@contextlib.contextmanager
def joined(
    environment: Mapping[str, str] = os.environ,
    *,
    command: str = "this command",
    instances: Optional[Callable[[], Optional[Ranks]]] = None,
) -> Iterator[Processes]:
    """Connect the processes of this run; inside, only rank 0 prints, and an error of one ends all with its exit status.

    Args:
        environment: environment variables, which the launcher sets.
        command: name of the command, for errors.
        instances: returns the ranks of poprun's processes, or None if there is one; leave out for commands without
            IPUs.

    Yields:
        The processes.

    Raises:
        ValueError: the launcher of several processes does not connect them.
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
            ranks.meet()  # fails if another one has ended with an error before all are connected
            yield ranks
            ranks.leave()
        except Exception as error:
            status = ranks.ended(error)
            if status is not None:
                raise SystemExit(status) from None
            if _is_lost_connection(error):
                # The connection itself may have failed, so torch's message is included.
                details = one_line(error, 200)
                print(
                    f"error: rank {ranks.rank}: another process of this run ended{details and f' ({details})'}, so all"
                    f" end; continue from the newest checkpoint ({ranks.restart})",
                    file=sys.stderr,
                )
                raise SystemExit(1) from None
            if ranks.rank and isinstance(error, (ValueError, OSError, NotFinite)):
                error_class = NotFinite if isinstance(error, NotFinite) else ValueError
                raise error_class(f"rank {ranks.rank} on {socket.gethostname()}: {error}") from None
            raise
        finally:
            if ranks._beats:
                ranks._beats.end()


def _of_torchrun(environment: Mapping[str, str]) -> Optional[Ranks]:
    """Return the ranks that torchrun started, or None if there is one."""
    if environment.get("WORLD_SIZE", "1") == "1":
        return None
    import torch.distributed as dist

    server, rank, size = next(dist.rendezvous("env://", timeout=timedelta(minutes=10)))

    def connect(keep_alive: Any = server) -> Any:  # rank 0 may run the store's server
        store = dist.TCPStore(
            environment["MASTER_ADDR"],
            int(environment["MASTER_PORT"]),
            is_master=False,
            wait_for_workers=False,
        )
        # torchrun may use one store for all attempts; entries of earlier ones must not be read.
        attempt = environment.get("TORCHELASTIC_RESTART_COUNT", "0")
        return dist.PrefixStore(f"attempt {attempt}", store)

    return Ranks(connect(), rank, size, int(environment["LOCAL_RANK"]), connect=connect)
