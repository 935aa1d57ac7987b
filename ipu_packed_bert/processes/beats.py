"""Errors and heartbeats that the ranks of a run exchange in its store.

A rank that is suspended, or on a machine that is lost, does not close its connections: without heartbeats the others
would wait for hours.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import sys
import threading
from typing import Any, Callable, Dict, Optional

from pack_data.reading.fields import one_line

# Seconds without a beat after which a rank counts as lost: all others have ended two beats later, within 30 s.
SILENCE = 24.0
_ROUNDS = 10  # beats in that time
_STARTS = 20  # factor of SILENCE before the first beat of a rank, which is still loading


def leave_error(store: Any, rank: int, status: int, text: str) -> None:
    """Store the error of a rank, so that the others end with its exit status and print nothing."""
    error = {"rank": rank, "host": socket.gethostname(), "status": status, "text": text}
    store.set(f"error/{rank}", json.dumps(error))
    store.add(f"errors/{rank}", 1)
    store.add("errors", 1)


def first_error(store: Any, size: int) -> Optional[Dict[str, Any]]:
    """Return the stored error of the lowest of `size` ranks, with its rank, host, status and text."""
    if store.add("errors", 0):
        for rank in range(size):
            if store.add(f"errors/{rank}", 0):
                return json.loads(store.get(f"error/{rank}"))
    return None


class Beats:
    """Heartbeats of one rank, sent and watched by threads, so that long updates, builds and saves do not matter.

    Rank 0 watches all others, and they watch rank 0, to keep the load on the store low. A rank also ends itself if it
    has not noticed the error of another one for as long as a silence: sums by NCCL would wait for their time limit.

    Attributes:
        shielded: if True, the error of another rank does not end this one, which saves something or reports an error.
        status: exit status if the store stops answering; that of the command once its work is done.

    Args:
        connect: opens a new connection to the store; one with a blocked waiter cannot be shared.
        rank: this rank.
        size: number of ranks.
        restart: how to restart the run, for errors.
    """

    def __init__(self, connect: Callable[[], Any], rank: int, size: int, restart: str):
        self._connect = connect
        self._rank = rank
        self._size = size
        self.shielded = False
        self.status = 1
        self._restart = restart
        self._watched = (0,) if rank else range(1, size)
        self._silence = SILENCE
        self._rounds = 0
        self._over = threading.Event()
        self._beating: Optional[threading.Thread] = None

    def begin(self) -> None:
        """Send the first beat and start the threads; must be called before the ranks connect."""
        store = self._connect()
        store.set(f"host/{self._rank}", socket.gethostname())
        store.add(f"beats/{self._rank}", 1)
        # Not a daemon: Python aborts if it ends while a thread is inside the store.
        self._beating = threading.Thread(target=self._beat, args=(store,), name="beats")
        self._beating.start()
        threading.Thread(target=self._watch_store, name="watch", daemon=True).start()

    def end(self) -> None:
        """Stop the beats and wait for the last call of the store, which `_watch_store` limits."""
        self._over.set()
        if self._beating:
            self._beating.join()

    def _beat(self, store: Any) -> None:
        seen = dict.fromkeys(self._watched, 0)
        missed = dict.fromkeys(self._watched, 0)
        rounds_with_error = 0
        try:
            while not self._over.wait(self._silence / _ROUNDS):
                store.add(f"beats/{self._rank}", 1)
                for rank in self._watched:
                    beats = store.add(f"beats/{rank}", 0)
                    # Rounds are counted, not seconds, so that a rank that was suspended itself does not blame others.
                    missed[rank] = missed[rank] + 1 if beats == seen[rank] else 0
                    seen[rank] = beats
                    patience = _ROUNDS if beats else _ROUNDS * _STARTS
                    if missed[rank] >= patience:
                        self._give_up(store, rank, begun=beats > 0)
                if store.add("given up", 0):
                    os._exit(1)
                error = None if self.shielded else first_error(store, self._size)
                # An update that is not finite (status 3) ends every rank by itself.
                rounds_with_error = rounds_with_error + 1 if error and error["status"] != 3 else 0
                if error and rounds_with_error >= _ROUNDS:
                    self._end_with(error)
                self._rounds += 1
        except RuntimeError:
            # The store has ended with its process; the next exchange fails.
            self._over.set()

    def _end_with(self, error: Dict[str, Any]) -> None:
        text = one_line(error["text"], 150)
        print(
            f"error: rank {error['rank']} on {error['host']} ended with an error ({text}), so rank"
            f" {self._rank} ends; fix it, then continue from the newest checkpoint",
            file=sys.stderr,
            flush=True,
        )
        os._exit(error["status"])

    def _give_up(self, store: Any, rank: int, *, begun: bool) -> None:
        # The rank may have ended with an error. Only the first that notices its silence reports it.
        if store.add("errors", 0) or store.add("noticed", 1) > 1:
            return
        name = f"rank {rank}"
        seconds = self._silence
        if begun:
            name += f" on {store.get(f'host/{rank}').decode()}"
        else:
            seconds *= _STARTS
        problem = f"{name} has been silent for {seconds:g} s"
        leave_error(store, self._rank, 1, problem)
        self._say(problem)
        store.add("given up", 1)
        os._exit(1)

    def _watch_store(self) -> None:
        """End the process if the store does not answer, because its process is suspended or its machine is lost."""
        rounds = 0
        missed = 0
        while self._beating and self._beating.is_alive():
            self._beating.join(self._silence / _ROUNDS)
            missed = missed + 1 if rounds == self._rounds else 0
            rounds = self._rounds
            if missed >= _ROUNDS and self._beating.is_alive():
                self._leave_silent_store()

    def _leave_silent_store(self) -> None:
        if self.status == 1:
            launcher = "rank 0, or the launcher that keeps the run's store"
            self._say(f"rank {self._rank}: {launcher}, has been silent for {self._silence:g} s")
        with contextlib.suppress(OSError, ValueError):  # closed
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(self.status)

    def _say(self, problem: str) -> None:
        print(
            f"error: {problem}: it was suspended, or its machine is lost; all ranks end; continue from the newest"
            f" checkpoint ({self._restart})",
            file=sys.stderr,
            flush=True,
        )
