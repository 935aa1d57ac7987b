"""Checks of the directory of a new run, before anything is computed. Loads no torch."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Optional

from ipu_packed_bert.run_files.folder import CHECKPOINTS, LOG, checkpoints
from pack_data.store.data_set import MANIFEST


def refuse_a_run_in(folder: Optional[str]) -> None:
    """Raise ValueError if a new run would overwrite another, or cannot be written to the directory."""
    if folder is None:
        return
    for place in (Path(folder), *Path(folder).parents):
        if place.exists() and not place.is_dir():
            raise ValueError(
                f"--out {folder}: {place} is a file, but a run is a directory; choose another name"
            )
    if Path(folder, MANIFEST).exists():
        raise ValueError(f"--out {folder}: has a data set; choose another directory for the run")
    if Path(folder, LOG).exists():
        way_out = f"; continue it with --resume {shlex.quote(str(folder))}"
        if not checkpoints(Path(folder, CHECKPOINTS)):
            way_out = ", which has no checkpoint; begin it again with --resume-if-there"
        raise ValueError(f"{folder}: already has a run{way_out}, or choose another --out")
