"""The output of commands on a terminal: text without control characters, and progress bars."""

from __future__ import annotations

import re
import sys
from contextlib import contextmanager
from typing import Any, Iterator, Optional

# Characters that move the cursor, colour or reorder text on a terminal: C0 but tab and end of line, DEL, C1, Unicode's
# line ends and changes of direction. The name of a file may hold all of them.
_CONTROLS = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u2028-\u202e\u2066-\u2069]")


def escaped(text: str) -> str:
    """Replace control characters by their Python escapes."""
    return _CONTROLS.sub(lambda match: ascii(match[0])[1:-1], text)


class Terminal:
    """A terminal that receives no control characters, except through `bare`, where progress bars move the cursor."""

    def __init__(self, bare: Any) -> None:
        self.bare = bare

    def write(self, text: str) -> int:
        return self.bare.write(escaped(text))

    def __getattr__(self, name: str) -> Any:
        return getattr(self.bare, name)


def bare_stderr() -> Any:
    """Return standard error as progress bars need it: control characters pass."""
    return getattr(sys.stderr, "bare", sys.stderr)


# True inside commands and calls with progress=True; other library calls print nothing.
_shows_progress = False


@contextmanager
def progress_shown(is_shown: bool = True) -> Iterator[None]:
    """Show progress bars in the block if `is_shown`, or if a block around it shows them."""
    global _shows_progress
    before = _shows_progress
    _shows_progress = before or is_shown
    try:
        yield
    finally:
        _shows_progress = before


def progress_bar(
    total: Optional[int],
    description: str,
    *,
    unit: str = " steps",
    done: int = 0,
    at_once: bool = False,
) -> Any:
    """Return a tqdm bar on stderr, which prints a line every ten seconds instead if stderr is not a terminal.

    Short work shows nothing, and neither does a library call (`progress_shown`).

    Args:
        total: The number of steps, if it is known.
        description: The name of the work.
        unit: The unit of a step, with a leading space.
        done: Steps done by an earlier process; they do not count for the speed.
        at_once: Show the name at once, for work of some seconds that has no steps.
    """
    from pack_data.cli.bars import DelayedBar

    file = bare_stderr()
    is_closed = file is None or getattr(file, "closed", False)
    is_hidden = is_closed or not _shows_progress
    is_terminal = not is_hidden and file.isatty()
    bar = DelayedBar(
        total=total,
        initial=done,
        desc=escaped(description),
        unit=unit,
        file=file,
        disable=is_hidden,
        leave=False,
        terminal=is_terminal,
        mininterval=0.1 if is_terminal else 1.0,
    )
    if at_once and is_terminal:
        bar.announce()
    return bar
