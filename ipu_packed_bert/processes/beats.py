"""What the ranks of a run leave for each other in its store: errors, and beats, which say that a rank is alive.

A rank that was stopped, or whose machine is lost, closes no connection: the others would wait for it for hours.
"""

from __future__ import annotations

import json
import os
import socket
import sys
import threading
from functools import partial
from typing import Any, Callable, List

SILENCE = 30.0  # seconds without a beat after which a rank is given up
_ROUNDS = 10  # of beats in that time
_LAST = 1.0  # seconds to wait for a beat that is under way: the store may answer no more
_STARTS = 20  # so many times as long may pass before a rank's first beat, while its program loads


def leave_error(store: Any, rank: int, status: int, text: str) -> None:
    """For the others, who then end with this status, and without a word."""
    store.set(f"error/{rank}", json.dumps({"status": status, "text": text}))
    store.add(f"errors/{rank}", 1)
    store.add("errors", 1)


class Beats:
    """Those of one rank, made and watched by threads: an update, a build or a save is no silence, however long.

    Rank 0 watches all others, and they watch rank 0, so that the store has few questions to answer.
    """

    def __init__(self, connect: Callable[[], Any], rank: int, size: int, restart: str):
        """connect: to the store, anew: a connection on which somebody waits is of no use to others."""
        self._connect, self._rank, self._restart = connect, rank, restart
        self._watched = (0,) if rank else range(1, size)
        self._silence, self._rounds, self._over = SILENCE, 0, threading.Event()
        self._threads: List[threading.Thread] = []

    def begin(self) -> None:
        """Before the ranks meet; when they have met, each has made its first beat."""
        store = self._connect()
        store.set(f"host/{self._rank}", socket.gethostname())
        store.add(f"beats/{self._rank}", 1)
        for work in (partial(self._beat, store), self._watch_store):
            self._threads.append(threading.Thread(target=work, name="beats", daemon=True))
            self._threads[-1].start()

    def end(self) -> None:
        """When this returns no beat is under way: Python aborts where it ends while a thread is in the store."""
        self._over.set()
        for thread in self._threads:
            if thread is not threading.current_thread():
                thread.join(_LAST)

    def _beat(self, store: Any) -> None:
        seen, missed = dict.fromkeys(self._watched, 0), dict.fromkeys(self._watched, 0)
        try:
            while not self._over.wait(self._silence / _ROUNDS):
                store.add(f"beats/{self._rank}", 1)
                for rank, before in seen.items():
                    # Rounds are counted, not seconds: a rank that was stopped itself accuses nobody when it goes on.
                    seen[rank] = store.add(f"beats/{rank}", 0)
                    missed[rank] = missed[rank] + 1 if before == seen[rank] else 0
                    if missed[rank] >= _ROUNDS * (1 if seen[rank] else _STARTS):
                        self._give_up(store, rank, begun=seen[rank] > 0)
                if store.add("given up", 0):
                    os._exit(1)
                self._rounds += 1
        except (
            RuntimeError
        ):  # the store has gone with the process that kept it, which the next exchange notices
            self._over.set()

    def _give_up(self, store: Any, rank: int, *, begun: bool) -> None:
        # It may have met a mistake, and gone; of those that notice its silence, one says it.
        if store.add("errors", 0) or store.add("noticed", 1) > 1:
            return
        host = f" on {store.get(f'host/{rank}').decode()}" if begun else ""
        words = (
            f"rank {rank}{host} has been silent for {self._silence * (1 if begun else _STARTS):g} s"
        )
        leave_error(store, self._rank, 1, words)
        self._say(words)
        store.add("given up", 1)
        os._exit(1)

    def _watch_store(self) -> None:
        """Where its keeper was stopped, or its machine is lost, the store does not answer."""
        before, missed = 0, 0
        while not self._over.wait(self._silence / _ROUNDS):
            missed = missed + 1 if before == self._rounds else 0
            before = self._rounds
            if missed >= _ROUNDS:
                launcher = "rank 0, or the launcher that keeps the run's store"
                self._say(f"rank {self._rank}: {launcher}, has been silent for {self._silence:g} s")
                os._exit(1)

    def _say(self, words: str) -> None:
        print(
            f"error: {words}: it was stopped, or its machine is lost; all ranks end, go on from the newest checkpoint"
            f" ({self._restart})",
            file=sys.stderr,
            flush=True,
        )
