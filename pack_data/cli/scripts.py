"""Imports of the scripts in a checkout, which a Python without the packages may start. Needs no package itself."""

from __future__ import annotations

import sys
from contextlib import contextmanager
from typing import Iterator


@contextmanager
def explained_imports() -> Iterator[None]:
    """End the program with one line and exit status 2 if an import in the block lacks a package."""
    try:
        yield
    except ModuleNotFoundError as error:
        print(
            f"error: {sys.executable} has no package {error.name}; `make pretrain` installs all packages in .venv, "
            "then start this script with .venv/bin/python",
            file=sys.stderr,
        )
        raise SystemExit(2) from None
