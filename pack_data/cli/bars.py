"""Bars of progress. A module of its own: tqdm is loaded where a bar is asked for."""

from __future__ import annotations

import threading
from typing import Any, Optional

from tqdm import tqdm

from pack_data.cli.timing import left_text

_DELAY = 0.5  # seconds in which nothing is drawn: short work shows no bar
_SIZE = 80, 24
_EVERY = 10.0  # seconds between two lines of a file


class DelayedBar(tqdm):
    """On a terminal tqdm's bar, elsewhere a line now and then."""

    monitor_interval = 0  # no thread beside, which a process that is forked would copy

    def __init__(self, *, terminal: bool, **options: Any) -> None:
        self._terminal, self._drawn, self._due = terminal, False, _EVERY
        super().__init__(**options)
        if (getattr(self, "ncols", None) or 1) < 1:  # a terminal that does not know its size, as scripts open them
            self.ncols, self.nrows, self.dynamic_ncols = *_SIZE, None

    def display(self, msg: Optional[str] = None, pos: Optional[int] = None) -> Any:
        """Draws the bar, or writes `packs: 120 of 400 packs, 1 min 20 s left`; an empty msg takes the bar away."""
        if self._terminal:
            self._drawn = self._drawn or bool(msg) or (msg is None and self.format_dict["elapsed"] >= _DELAY)
            return self._drawn and super().display(msg, pos)
        now = self.format_dict
        if msg is None and now["elapsed"] >= self._due:
            self._due = now["elapsed"] + _EVERY
            of = f" of {self.total:,}" if self.total else ""
            rate = now["rate"] or (self.n - self.initial) / max(now["elapsed"], 1e-9)
            left = f", {left_text((self.total - self.n) / rate)}" if self.total and rate > 0 else ""
            print(f"{self.desc.rstrip(': ')}: {self.n:,}{of} {self.unit.strip()}{left}", file=self.fp, flush=True)
        return False

    def announce(self) -> None:
        """Shows at once what a single long step is, while no update comes."""
        if self._terminal:
            self.display(str(self) if self.total else f"{self.desc.rstrip(': ')} ...")
        elif not self.disable:
            print(self.desc.rstrip(": "), file=self.fp, flush=True)


# The default lock is a semaphore between processes; multiprocessing would warn at exit that it was not freed. Set once:
# another thread may hold it.
DelayedBar.set_lock(threading.RLock())
