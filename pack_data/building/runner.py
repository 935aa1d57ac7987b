"""The runners of a build's work: in this process, in worker processes, or on a Dask cluster.

A task is a value. A function takes it, reads and writes files, and returns a small result. Tasks may run anywhere, in
any order, and twice: each writes whole files under names of its own.
"""

from __future__ import annotations

import multiprocessing
import os
import re
import signal
import sys
import threading
import time
from contextlib import contextmanager, suppress
from functools import partial
from multiprocessing.synchronize import Event
from pathlib import Path
from typing import Any, Callable, Dict, Iterable, Iterator, Optional

from pack_data.cli.command import available_cores, starting_workers
from pack_data.reading.cores import PROCESSES
from pack_data.reading.fields import whole_number
from pack_data.reading.packages import load_package

# Seconds between two looks of a worker at whether its parent still runs.
_PARENT_CHECK_SECONDS = 0.5


class TaskRunner:
    """Runs tasks and returns their results: this class runs them one after another in this process."""

    def map(self, function: Callable[[Any], Any], tasks: Iterable[Any]) -> Iterator[Any]:
        """Yield the results, in no particular order. Tasks are drawn as there is room for them, not all at once."""
        return map(function, tasks)

    def close(self) -> None:
        """End the workers."""


def open_runner(workers: Optional[int], on: Optional[str] = None) -> TaskRunner:
    """Return a runner on the cluster `on`, dask:ADDRESS, or in `workers` processes (None: one per core)."""
    if on is not None:
        return _DaskRunner(on)
    workers = available_cores() if workers is None else workers
    return _ProcessRunner(workers) if workers > 1 else TaskRunner()


def _way_out() -> str:
    """Return the way out if no worker could start: each imports the script that started it."""
    script = getattr(sys.modules["__main__"], "__file__", None)
    with suppress(OSError):
        if script and "__main__" not in Path(script).read_text(encoding="utf-8", errors="replace"):
            return f'put the work of {script} under `if __name__ == "__main__":`'
    return "the machine may be out of memory"


def check_not_in_a_starting_worker() -> None:
    """End a worker that runs the script of its parent again, without a message: the parent has one.

    A spawned process imports the script that started it. If the script has no `if __name__ == "__main__":`, the worker
    builds as the script does, before it is ready for a task.
    """
    if getattr(multiprocessing.current_process(), "_inheriting", False):
        raise SystemExit(1)


@contextmanager
def _ctrl_c_later() -> Iterator[None]:
    """Delay Ctrl-C until the block ends. A process started in it leaves Ctrl-C to this one from the beginning."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _end_workers_at_sigterm() -> Callable[[], Any]:
    """Let SIGTERM end this process in order, after its workers; return a function that undoes this.

    Otherwise the resource tracker of Python reports semaphores that were not released.
    """
    is_main = threading.current_thread() is threading.main_thread()
    if not is_main or signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL:
        return int

    def end(number: int, _: Any) -> None:
        for process in multiprocessing.active_children():
            process.terminate()  # files are written whole or not at all
        raise SystemExit(128 + number)

    signal.signal(signal.SIGTERM, end)
    return partial(signal.signal, signal.SIGTERM, signal.SIG_DFL)


def _begin(parent: int, begun: Event) -> None:
    """Leave Ctrl-C to the parent, and end this worker if its parent is killed; it would wait for tasks for ever."""
    begun.set()
    signal.signal(signal.SIGINT, signal.SIG_IGN)

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(_PARENT_CHECK_SECONDS)
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


class _ProcessRunner(TaskRunner):
    """Worker processes on this machine; they are spawned, not forked, because the caller may have threads."""

    def __init__(self, workers: int) -> None:
        from concurrent.futures import ProcessPoolExecutor

        self.workers = workers
        self._restore = _end_workers_at_sigterm()
        context = multiprocessing.get_context("spawn")
        with starting_workers(workers):
            self._begun = context.Event()  # a worker is ready for tasks
            arguments = (os.getpid(), self._begun)
            self._pool = ProcessPoolExecutor(workers, context, _begin, arguments)

    def map(self, function: Callable[[Any], Any], tasks: Iterable[Any]) -> Iterator[Any]:
        from concurrent.futures import FIRST_COMPLETED, wait
        from concurrent.futures.process import BrokenProcessPool

        waiting = set()
        source = iter(tasks)
        try:
            while True:
                for task in source:
                    # The pool starts its processes as tasks come.
                    with _ctrl_c_later(), starting_workers(self.workers):
                        waiting.add(self._pool.submit(function, task))
                    if len(waiting) >= 2 * self.workers:
                        break
                if not waiting:
                    return
                done, waiting = wait(waiting, return_when=FIRST_COMPLETED)
                for future in done:
                    yield future.result()
        except BrokenProcessPool:
            if not self._begun.is_set():
                raise ValueError(
                    f"workers = {self.workers}: no worker process could start; {_way_out()}, or leave workers at 1"
                ) from None
            raise ValueError(
                "a worker process was killed (out of memory?); run the same command again to continue; "
                "--workers 1 needs least memory"
            ) from None
        finally:
            for future in waiting:
                future.cancel()

    def close(self) -> None:
        self._pool.shutdown()
        self._restore()


class _DaskRunner(TaskRunner):
    """A Dask cluster: dask:ADDRESS of its scheduler, or dask:local:N for N workers on this machine.

    The workers must see the directory of the data set under the same path. A task whose worker dies is run by another.
    """

    def __init__(self, on: str) -> None:
        address = re.fullmatch("dask:(local:([0-9]{1,9})|(?!local:).+)", on)
        if not address:
            raise ValueError(
                f"--on {on}: pass dask:ADDRESS of a scheduler, or dask:local:N for N workers here"
            )
        distributed = load_package("distributed", f"--on {on}")
        where: Dict[str, Any] = {"address": address[1]}
        if address[2]:
            workers = whole_number(
                "--on dask:local:N: N", int(address[2]), least=1, most=PROCESSES["maximum"]
            )
            where = {"n_workers": workers, "threads_per_worker": 1, "dashboard_address": None}
        try:
            self.client = distributed.Client(**where)
        except RuntimeError as error:
            raise ValueError(f"--on {on}: no worker could start ({error}); {_way_out()}") from None

    def map(self, function: Callable[[Any], Any], tasks: Iterable[Any]) -> Iterator[Any]:
        from distributed import as_completed

        source = iter(tasks)
        running = as_completed()

        def submit_one() -> None:
            for task in source:
                # Not "pure": a task is run for the files it writes, which may have been removed since.
                running.add(self.client.submit(function, task, pure=False, retries=3))
                return

        for _ in range(2 * max(1, len(self.client.scheduler_info()["workers"]))):
            submit_one()
        for future in running:
            yield future.result()
            submit_one()

    def close(self) -> None:
        self.client.close()  # including the workers that it has started
