"""Services besides TensorBoard that show the curves of a run, selected by `run.track`.

They are configured by environment variables: WANDB_PROJECT, WANDB_MODE, MLFLOW_TRACKING_URI, MLFLOW_EXPERIMENT_NAME.
"""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any, Callable, Dict, Mapping, NamedTuple, Optional

from ipu_packed_bert.run_files.folder import CONFIG, ENVIRONMENT
from pack_data.reading.durable import write_atomically
from pack_data.reading.fields import one_line
from pack_data.reading.packages import load_package

RUN_OF_MLFLOW = "mlflow-run"  # file in the run directory with the identifier of the run at MLflow


class Tracker(NamedTuple):
    """A service that receives curves."""

    log: Callable[[int, Dict[str, float]], Any]  # takes the step, and values by name
    finish: Callable[[], Any]


def tracker(kind: str, folder: Path, settings: Mapping[str, Any]) -> Optional[Tracker]:
    """Start the service of `run.track`; a resumed run continues its curves.

    If the service fails, print the reason and return None: the run goes on.
    """
    try:
        return {"wandb": _wandb, "mlflow": _mlflow}[kind](folder, settings)
    except Exception as error:  # services raise their own classes
        print(f"note      {folder}: no curves for run.track={kind} ({one_line(error)})", flush=True)
        return None


def _wandb(folder: Path, settings: Mapping[str, Any]) -> Tracker:
    wandb = load_package("wandb", "run.track=wandb")
    # The first environment.json does not change when a run is resumed.
    digest = hashlib.sha256((folder / ENVIRONMENT).read_bytes()).hexdigest()
    run = wandb.init(
        id=digest[:16], resume="allow", name=folder.name, dir=str(folder), config=dict(settings)
    )
    return Tracker(lambda step, values: run.log(values, step=step), run.finish)


def _mlflow(folder: Path, settings: Mapping[str, Any]) -> Tracker:
    mlflow = load_package("mlflow", "run.track=mlflow")
    file = folder / RUN_OF_MLFLOW
    run_id = file.read_text() if file.exists() else None
    run = mlflow.start_run(run_id=run_id, run_name=folder.name)
    write_atomically(file, run.info.run_id.encode())
    mlflow.log_dict(dict(settings), CONFIG)
    return Tracker(lambda step, values: mlflow.log_metrics(values, step=step), mlflow.end_run)
