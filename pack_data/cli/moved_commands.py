"""Refuse the command spellings of version 1, such as `python -m pack_data.build`, and name the new ones."""

from __future__ import annotations

import sys
from typing import Any

MOVED = {
    "build": "packed-bert build",
    "verify": "packed-bert verify",
    "convert": "packed-bert convert",
    "compare": "packed-bert compare",
    "stream": "packed-bert stream",
    "histogram": "packed-bert look",
    "certificate": "packed-bert verify",
    "batching": "packed-bert stream",
    "benchmark": "packed-bert compare",
}


class MovedCommands:
    """An import finder that ends `python -m pack_data.NAME` if the command has moved.

    It stands last on `sys.meta_path`, so Python asks it only about modules that do not exist.
    """

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> None:
        """Print the new spelling and exit with status 2; return None for every other module."""
        parts = name.split(".")
        if parts[0] != "pack_data" or parts[2:] not in ([], ["__main__"]):
            return
        if len(parts) == 1 or parts[1] not in MOVED:
            return
        new_spelling = MOVED[parts[1]]
        print(
            f"error: python -m pack_data.{parts[1]} has moved; type {new_spelling}", file=sys.stderr
        )
        raise SystemExit(2)


def refuse_moved_commands() -> None:
    """Install the finder; meant for the moment in which `python -m` looks for a module."""
    sys.meta_path.append(MovedCommands())
