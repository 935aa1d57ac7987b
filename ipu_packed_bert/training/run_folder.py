"""The directory of a run: made, locked and resumed by one process at a time; what it was begun with."""

from __future__ import annotations

import contextlib
import json
import os
import platform
import shlex
import subprocess
import sys
import time
from pathlib import Path
from typing import Any, ContextManager, Dict, Iterator, List, Mapping, Optional, Union

import numpy as np
import torch

from ipu_packed_bert.run_files.checkpoints import checkpoints
from ipu_packed_bert.run_files.folder import (
    CHECKPOINTS,
    CONFIG,
    EVALUATIONS,
    LOCK,
    LOG,
    SUMMARY,
    environment_of,
)
from ipu_packed_bert.run_files.vocabulary_identity import Identity
from ipu_packed_bert.settings.config import Config
from ipu_packed_bert.training.trackers import RUN_OF_MLFLOW
from pack_data.cli.command import check_folder
from pack_data.reading.files import locked, write_atomically
from pack_data.store.data_set import MANIFEST, Manifest


def refuse_a_run_in(folder: Optional[str]) -> None:
    """Raise ValueError if a new run would overwrite one, or cannot be made there."""
    if folder is None:
        return
    check_folder("--out", folder, "a run")
    if Path(folder, MANIFEST).exists():
        raise ValueError(
            f"--out {folder}: holds a data set; a run is a folder of its own, choose another name"
        )
    if Path(folder, LOG).exists():
        go_on = f"; continue it with --resume {shlex.quote(str(folder))}"
        if not _saved(folder):
            go_on = ", which has saved no checkpoint; begin it again with --resume-if-there"
        raise ValueError(f"{folder}: holds a run already{go_on}, or give another --out")


def _saved(folder: Union[str, Path]) -> bool:
    """Whether a run has saved a checkpoint."""
    return bool(checkpoints(Path(folder, CHECKPOINTS)))


def locked_run(folder: Union[str, Path], way_out: str = "") -> ContextManager[None]:
    """While entered, no other process writes the run; ValueError where one does."""
    return locked(
        Path(folder, LOCK), f"{folder}: another process writes this run; wait for it{way_out}"
    )


def resumes(folder: Union[str, Path]) -> bool:
    """Whether there is a run that has saved something; what was logged of one that ended before that is taken away.

    Raises ValueError where another process writes it.
    """
    if not _saved(folder) and Path(folder, LOG).exists():
        with locked_run(folder):
            if _saved(folder):  # before the lock, by a process that has ended since
                return True
            for name in (LOG, EVALUATIONS, RUN_OF_MLFLOW):
                Path(folder, name).unlink(missing_ok=True)
        print(f"note      {folder} ended before its first checkpoint; it begins again")
    return _saved(folder)


@contextlib.contextmanager
def open_run_folder(
    folder: Optional[str], config: Config, *, first_step: int, environment: Dict[str, Any]
) -> Iterator[Path]:
    """Open the directory of a run with its config.yml and environment.json, locked in the block.

    ``folder`` None makes a new one, ``runs/NAME-TIME``.
    ``first_step`` above 0 means that the run is resumed: its environment goes beside the first one, and it is locked
    already. Raises ValueError, before anything is written, where another process writes the run, or has written it.
    """
    path = _new_folder(config.name) if folder is None else Path(folder)
    path.mkdir(parents=True, exist_ok=True)
    with contextlib.nullcontext() if first_step else locked_run(path, ", or give another --out"):
        if (
            not first_step
        ):  # since the first look at the folder, another process may have come and gone
            refuse_a_run_in(str(path))
        # What the run came to before: it goes on now, and says so anew at its end.
        (path / SUMMARY).unlink(missing_ok=True)
        write_atomically(path / CONFIG, config.to_yaml().encode())
        write_atomically(
            path / environment_of(first_step), (json.dumps(environment, indent=1) + "\n").encode()
        )
        yield path


def _new_folder(name: str) -> Path:
    """``runs/NAME-TIME``, made by this call."""
    first = path = Path("runs", f"{name}-{time.strftime('%Y%m%d-%H%M%S')}")
    number = 1
    while True:
        try:
            path.mkdir(parents=True)
            return path
        except FileExistsError:  # a run begun within the same second
            number += 1
            path = first.with_name(f"{first.name}-{number}")


def data_of(manifest: Manifest) -> Dict[str, Any]:
    """Return the facts about a data set for environment.json."""
    return {
        "digest": f"{manifest.digest:016x}",
        "packs": manifest.packs,
        "sequences": manifest.sequences,
        "algorithm": manifest.algorithm,
        **Identity.of_data(manifest).recorded,
    }


def environment(
    *, device: str, seed: int, data: Mapping[str, Any], command: List[str]
) -> Dict[str, Any]:
    """Return what else, besides config and data, a run depends on."""
    versions = {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "numpy": np.__version__,
    }
    poptorch = sys.modules.get("poptorch")  # there only if the IPU engine has loaded it
    if poptorch is not None:
        versions["poptorch"] = poptorch.__version__
    return {
        "started": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        "command": command,
        "seed": seed,
        "device": device,
        "data": dict(data),
        "versions": versions,
        "commit": commit_here(),
        "platform": platform.platform(),
        "host": platform.node(),
        "cpus": os.cpu_count(),
        "torch_threads": torch.get_num_threads(),
        "cuda": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
    }


def commit_here() -> Optional[str]:
    """Commit of the checkout this file is in, with "+" if files differ from it; None outside a checkout."""

    def git(*arguments: str) -> str:
        return subprocess.run(
            ("git", "-C", str(Path(__file__).resolve().parent)) + arguments,
            check=True,
            timeout=20,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        ).stdout.strip()

    try:
        return git("rev-parse", "HEAD") + (
            "+" if git("status", "--porcelain", "--untracked-files=no") else ""
        )
    except (OSError, subprocess.SubprocessError):
        return None
