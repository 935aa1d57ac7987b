"""Where the work of a build runs: in this process, in worker processes, or on a Dask cluster.

A task is a value. A function takes it, reads and writes files, and returns a small result. Tasks may run anywhere, in
any order, and twice: each writes whole files under names of its own.
"""

from __future__ import annotations

import multiprocessing
import os
import re
import signal
import threading
import time
from contextlib import contextmanager
from multiprocessing.synchronize import Event
from typing import Any, Callable, Iterable, Iterator, Optional

from pack_data.cli.command import available_cores, most_processes
from pack_data.reading.fields import whole_number
from pack_data.reading.packages import load_package

_GUARD = (
    'each of them imports the script that started it, so put what the script does under `if __name__ == "__main__":`'
)


class TaskRunner:
    """Runs tasks and gives their results: this one runs them one after another, here."""

    def map(self, function: Callable[[Any], Any], tasks: Iterable[Any]) -> Iterator[Any]:
        """The results, in no promised order. Tasks are drawn when there is room for them, not all at once."""
        return map(function, tasks)

    def close(self) -> None:
        """Ends the workers."""


def open_runner(workers: Optional[int], on: Optional[str] = None) -> TaskRunner:
    """on: a cluster, dask:ADDRESS. Otherwise `workers` processes, None for one a core; 1 is this process alone."""
    if on is not None:
        return DaskRunner(on)
    workers = available_cores() if workers is None else workers
    return _ProcessRunner(workers) if workers > 1 else TaskRunner()


def check_not_in_a_starting_worker() -> None:
    """Ends, without a word, a worker that runs the script of its parent again: the parent has the words for it.

    A spawned process imports the script that started it. Where the script has no `if __name__ == "__main__":`, the
    worker builds as the script does, before it is ready for a task.
    """
    if getattr(multiprocessing.current_process(), "_inheriting", False):
        raise SystemExit(1)


@contextmanager
def _ctrl_c_later() -> Iterator[None]:
    """Ctrl-C waits until this is left. A process that is started meanwhile leaves it to this one from the beginning."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _begin(parent: int, begun: Event) -> None:
    """Leaves Ctrl-C to the parent, and ends a worker whose parent was killed, which would wait for tasks for ever."""
    begun.set()
    signal.signal(signal.SIGINT, signal.SIG_IGN)

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(0.5)
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


class _ProcessRunner(TaskRunner):
    """Worker processes of this machine. They are spawned, not forked, because the caller may have threads."""

    def __init__(self, workers: int) -> None:
        from concurrent.futures import ProcessPoolExecutor

        self.workers = workers
        context = multiprocessing.get_context("spawn")
        self._begun = context.Event()  # a worker is ready for tasks
        self._pool = ProcessPoolExecutor(
            workers, mp_context=context, initializer=_begin, initargs=(os.getpid(), self._begun)
        )

    def map(self, function: Callable[[Any], Any], tasks: Iterable[Any]) -> Iterator[Any]:
        from concurrent.futures import FIRST_COMPLETED, wait
        from concurrent.futures.process import BrokenProcessPool

        waiting = set()
        source = iter(tasks)
        try:
            while True:
                for task in source:
                    with _ctrl_c_later():  # the pool starts its processes as tasks come
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
                    f"workers = {self.workers}: no worker process could start; {_GUARD}, or leave workers at 1"
                ) from None
            raise ValueError(
                "a worker process was killed (out of memory?); run the same command again, it continues; "
                "--workers 1 needs least memory"
            ) from None
        finally:
            for future in waiting:
                future.cancel()

    def close(self) -> None:
        self._pool.shutdown()


class DaskRunner(TaskRunner):
    """A Dask cluster: dask:ADDRESS of its scheduler, or dask:local:N for N workers on this machine.

    The workers must see the folder of the data set under the same path. A task whose worker dies is given to another.
    """

    def __init__(self, on: str) -> None:
        form = re.fullmatch("dask:(local:([0-9]{1,9})|(?!local:).+)", on)
        if not form:
            raise ValueError(f"--on {on}: is not dask:ADDRESS of a scheduler, nor dask:local:N for N workers here")
        distributed, where = load_package("distributed", f"--on {on}"), {"address": form[1]}
        if form[2]:
            count = whole_number("--on dask:local:N: N", int(form[2]), least=1, most=most_processes())
            where = {"n_workers": count, "threads_per_worker": 1, "dashboard_address": None}
        try:
            self.client = distributed.Client(**where)
        except RuntimeError as error:
            raise ValueError(f"--on {on}: no worker could start ({error}); {_GUARD}") from None

    def map(self, function: Callable[[Any], Any], tasks: Iterable[Any]) -> Iterator[Any]:
        from distributed import as_completed

        source = iter(tasks)
        running = as_completed()

        def submit_one() -> None:
            for task in source:
                # Not "pure": a task is run for the files it writes, and those may have been removed since.
                running.add(self.client.submit(function, task, pure=False, retries=3))
                return

        for _ in range(2 * max(1, len(self.client.scheduler_info()["workers"]))):
            submit_one()
        for future in running:
            yield future.result()
            submit_one()

    def close(self) -> None:
        self.client.close()  # with the workers that it has started
