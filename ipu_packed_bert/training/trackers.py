"""Services besides TensorBoard that show the curves of a run, if `run.track` names one.

Their own settings are in the environment: WANDB_PROJECT, WANDB_MODE, MLFLOW_TRACKING_URI, MLFLOW_EXPERIMENT_NAME.
"""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any, Callable, Dict, Mapping, NamedTuple, Optional

from ipu_packed_bert.run_files.folder import CONFIG, ENVIRONMENT
from pack_data.reading.fields import one_line
from pack_data.reading.files import write_atomically
from pack_data.reading.packages import load_package

RUN_OF_MLFLOW = "mlflow-run"  # a run's file: its number there


class Tracker(NamedTuple):
    """What a service takes."""

    log: Callable[[int, Dict[str, float]], Any]  # the step, and values by name
    finish: Callable[[], Any]


def tracker(kind: str, folder: Path, settings: Mapping[str, Any]) -> Optional[Tracker]:
    """Start the service of `run.track`; a resumed run continues its own curves.

    None, and a line that says why, where the service does not begin: it does not end the run.
    """
    try:
        return {"wandb": _wandb, "mlflow": _mlflow}[kind](folder, settings)
    except Exception as error:  # a service has errors of its own
        print(f"note      {folder}: no curves for run.track={kind} ({one_line(error)})", flush=True)
        return None


def _wandb(folder: Path, settings: Mapping[str, Any]) -> Tracker:
    wandb = load_package("wandb", "run.track=wandb")
    number = hashlib.sha256((folder / ENVIRONMENT).read_bytes()).hexdigest()[
        :16
    ]  # the same after a resumption
    run = wandb.init(
        id=number, resume="allow", name=folder.name, dir=str(folder), config=dict(settings)
    )
    return Tracker(lambda step, values: run.log(values, step=step), run.finish)


def _mlflow(folder: Path, settings: Mapping[str, Any]) -> Tracker:
    mlflow, number = load_package("mlflow", "run.track=mlflow"), folder / RUN_OF_MLFLOW
    before = number.read_text() if number.exists() else None
    run = mlflow.start_run(run_id=before, run_name=folder.name)
    write_atomically(number, run.info.run_id.encode())
    mlflow.log_dict(dict(settings), CONFIG)
    return Tracker(lambda step, values: mlflow.log_metrics(values, step=step), mlflow.end_run)
