"""The directory of a run: created, locked and resumed by one process at a time, with a record of its environment."""

from __future__ import annotations

import contextlib
import json
import os
import platform
import subprocess
import sys
import time
from pathlib import Path
from typing import Any, ContextManager, Dict, Iterator, List, Mapping, Optional, Union

import numpy as np
import torch

from ipu_packed_bert.run_files.folder import (
    CHECKPOINTS,
    CONFIG,
    EVALUATIONS,
    LOCK,
    LOG,
    SUMMARY,
    checkpoints,
    environment_of,
)
from ipu_packed_bert.run_files.new_run import refuse_a_run_in
from ipu_packed_bert.run_files.vocabulary_identity import Identity
from ipu_packed_bert.settings.config import Config
from ipu_packed_bert.training.trackers import RUN_OF_MLFLOW
from pack_data.reading.durable import write_atomically
from pack_data.reading.files import locked
from pack_data.store.data_set import Manifest


def locked_run(folder: Union[str, Path], way_out: str = "") -> ContextManager[None]:
    """Return a context that locks a run; entering raises ValueError if another process has locked it."""
    return locked(
        Path(folder, LOCK), f"{folder}: another process writes this run; wait for it{way_out}"
    )


def resumes(folder: Union[str, Path]) -> bool:
    """Return True if a run has a checkpoint to resume; remove the logs of a run that ended before its first.

    Raise ValueError if another process writes the run.
    """
    saved = Path(folder, CHECKPOINTS)
    if not checkpoints(saved) and Path(folder, LOG).exists():
        with locked_run(folder):
            if checkpoints(saved):  # before the lock, by a process that has ended since
                return True
            for name in (LOG, EVALUATIONS, RUN_OF_MLFLOW):
                Path(folder, name).unlink(missing_ok=True)
        print(f"note      {folder} ended before its first checkpoint; it begins again")
    return bool(checkpoints(saved))


@contextlib.contextmanager
def open_run_folder(
    folder: Optional[str], config: Config, *, first_step: int, environment: Dict[str, Any]
) -> Iterator[Path]:
    """Open the directory of a run, locked inside the context, and write its config.yml and environment.json.

    A resumed run (``first_step`` above 0) is locked already, and its environment gets a file of its own.

    Args:
        folder: the directory; None creates ``runs/NAME-TIME``.
        config: settings of the run.
        first_step: updates made before this process.
        environment: content of the environment file.

    Raises:
        ValueError: another process writes the run or has written one; nothing is changed.
    """
    path = _new_folder(config.name) if folder is None else Path(folder)
    path.mkdir(parents=True, exist_ok=True)
    with contextlib.ExitStack() as lock:
        if not first_step:
            lock.enter_context(locked_run(path, ", or choose another --out"))
            # Another process may have written a run since the first check.
            refuse_a_run_in(str(path))
        # A resumed run writes a new summary at its end.
        (path / SUMMARY).unlink(missing_ok=True)
        write_atomically(path / CONFIG, config.to_yaml().encode())
        text = json.dumps(environment, indent=1) + "\n"
        write_atomically(path / environment_of(first_step), text.encode())
        yield path


def _new_folder(name: str) -> Path:
    """Create and return ``runs/NAME-TIME``."""
    first = path = Path("runs", f"{name}-{time.strftime('%Y%m%d-%H%M%S')}")
    number = 1
    while True:
        try:
            path.mkdir(parents=True)
            return path
        except FileExistsError:  # another run began within the same second
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
    """Return everything besides the configuration that a run depends on: data, versions, machine."""
    versions = {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "numpy": np.__version__,
    }
    poptorch = sys.modules.get("poptorch")  # loaded by the IPU engine only
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
    """Return the commit of this file's checkout, with "+" if tracked files have changed; None outside a checkout."""

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
        commit = git("rev-parse", "HEAD")
        changed = git("status", "--porcelain", "--untracked-files=no")
    except (OSError, subprocess.SubprocessError):
        return None
    return f"{commit}+" if changed else commit
