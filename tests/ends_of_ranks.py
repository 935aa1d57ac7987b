"""Ends of runs of two ranks: each rank is a Python process that ends as a command ends, while heartbeats are sent.

python -m tests.ends_of_ranks 200 [--slow SECONDS] [--load N]

Prints the exit statuses of both ranks and how often they came. `--slow`: the last call of the store by each rank takes
so long inside torch. `--load`: processes that only compute, beside the ranks.
"""

import argparse
import collections
import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
from datetime import timedelta

from ipu_packed_bert.processes import beats, ranks

_BEAT = 0.01  # seconds between two beats, so that nearly every end meets one
_LIMIT = 120.0  # seconds for two ranks to end


class _SlowEnd:
    """An object whose removal, among the last steps of Python, takes some seconds, as under load."""

    def __init__(self, seconds):
        self._seconds = seconds
        self._sleep = time.sleep

    def __del__(self):
        self._sleep(self._seconds)


class _SlowStore:
    """A connection to the store whose first call takes `seconds` once the work is done."""

    def __init__(self, store, seconds):
        self._store = store
        self._seconds = seconds
        self.done = False

    def set(self, key, value):
        self._store.set(key, value)

    def add(self, key, number):
        if self.done and self._seconds:
            with contextlib.suppress(RuntimeError):
                self._store.wait(["never set"], timedelta(seconds=self._seconds))
            self._seconds = 0.0
        return self._store.add(key, number)


def _rank(rank, port, slow):
    """Work for a moment as a rank of torchrun; rank 0 keeps the store."""
    beats._ROUNDS = int(beats.SILENCE / _BEAT)
    environment = {
        "WORLD_SIZE": "2",
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "MASTER_ADDR": "localhost",
        "MASTER_PORT": str(port),
    }
    os.environ.update(environment)
    connections = []

    def run_of_slow_store(given):
        processes = ranks_of_torchrun(given)
        connect = processes._beats._connect

        def connect_slowly():
            connections.append(_SlowStore(connect(), slow))
            return connections[-1]

        processes._beats._connect = connect_slowly
        return processes

    ranks_of_torchrun = ranks._of_torchrun
    ranks._of_torchrun = run_of_slow_store
    with ranks.joined(environment) as processes:
        processes.summed([1.0])
        time.sleep(3 * _BEAT)
        connections[0].done = True
        time.sleep(3 * _BEAT)


def end(slow=0.0):
    """Return the exit statuses of two ranks; Python ends in each of them as after a command."""
    with socket.socket() as chosen:
        chosen.bind(("localhost", 0))
        port = chosen.getsockname()[1]
    children = []
    for rank in range(2):
        child = os.fork()
        if not child:
            sys.modules["slow end"] = _SlowEnd(slow + 0.1)
            _rank(rank, port, slow)
            sys.exit(0)
        children.append(child)
    return tuple(_status(child, time.monotonic() + _LIMIT) for child in children)


def _status(child, limit):
    """Wait for a child until a time, then kill it; return its exit status, or minus the number of its signal."""
    ended, status = os.waitpid(child, os.WNOHANG)
    while not ended and time.monotonic() < limit:
        time.sleep(0.01)
        ended, status = os.waitpid(child, os.WNOHANG)
    if not ended:
        os.kill(child, signal.SIGKILL)
        _, status = os.waitpid(child, 0)
    if os.WIFSIGNALED(status):
        return -os.WTERMSIG(status)
    return os.WEXITSTATUS(status)


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("ends", type=int)
    parser.add_argument("--slow", type=float, default=0.0)
    parser.add_argument("--load", type=int, default=0)
    args = parser.parse_args()
    load = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(args.load)]
    outcomes = collections.Counter()
    try:
        for _ in range(args.ends):
            outcomes[end(args.slow)] += 1
    finally:
        for process in load:
            process.kill()
    print(dict(outcomes))
    return int(set(outcomes) != {(0, 0)})


if __name__ == "__main__":
    sys.exit(main())
