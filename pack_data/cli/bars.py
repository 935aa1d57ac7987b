"""Progress bars, in a module of their own so that tqdm is imported only if a bar is needed."""

from __future__ import annotations

import threading
from typing import Any, Optional

from tqdm import tqdm

from pack_data.cli.timing import time_text

# Seconds before a bar is drawn, so that short work shows none.
_DELAY = 0.5
# Seconds between two lines in a file.
_LINE_INTERVAL = 10.0
# The size of a terminal that does not report one.
_COLUMNS = 80
_ROWS = 24


class DelayedBar(tqdm):
    """tqdm's bar on a terminal; elsewhere a line every ten seconds."""

    # No monitor thread, which a forked process would inherit.
    monitor_interval = 0

    def __init__(self, *, terminal: bool, **options: Any) -> None:
        self._terminal = terminal
        self._drawn = False
        self._due = _LINE_INTERVAL
        super().__init__(**options)
        columns = getattr(self, "ncols", None)
        if columns is not None and columns < 1:
            # A terminal that a script opened may not know its size.
            self.ncols = _COLUMNS
            self.nrows = _ROWS
            self.dynamic_ncols = None

    def display(self, msg: Optional[str] = None, pos: Optional[int] = None) -> Any:
        """Draw the bar, or print `packs: 120 of 400 packs, 1 min 20 s left`; an empty msg removes the bar."""
        if self._terminal:
            self._drawn = (
                self._drawn or bool(msg) or (msg is None and self.format_dict["elapsed"] >= _DELAY)
            )
            return self._drawn and super().display(msg, pos)
        elapsed = self.format_dict["elapsed"]
        if msg is None and elapsed >= self._due:
            self._due = elapsed + _LINE_INTERVAL
            print(self._line(), file=self.fp, flush=True)
        return False

    def _line(self) -> str:
        total = left = ""
        if self.total:
            total = f" of {self.total:,}"
            elapsed = self.format_dict["elapsed"]
            rate = self.format_dict["rate"] or (self.n - self.initial) / max(elapsed, 1e-9)
            if rate > 0:
                left = f", {time_text((self.total - self.n) / rate)} left"
        return f"{self.desc.rstrip(': ')}: {self.n:,}{total} {self.unit.strip()}{left}"

    def announce(self) -> None:
        """Show the name of the work at once, before the first update."""
        if self._terminal:
            self.display(str(self) if self.total else f"{self.desc.rstrip(': ')} ...")
        elif not self.disable:
            print(self.desc.rstrip(": "), file=self.fp, flush=True)


# The default lock is a semaphore between processes; multiprocessing would warn at exit that it was not freed. The lock
# is set once, because another thread may hold it.
DelayedBar.set_lock(threading.RLock())
