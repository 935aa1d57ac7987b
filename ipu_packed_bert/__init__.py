"""Training BERT on packed sequences: the same loss and gradients as unpacked, in about half the time.

    from ipu_packed_bert import load_config
    config = load_config("configs/packed_host.yml", ["run.steps=10"])

`packed-bert`, or `python -m ipu_packed_bert`, lists the commands; `ipu_packed_bert.padding_free` is for causal models.
A public name is loaded when it is first used, so that configurations can be read and plans made without torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any, List

from pack_data import __version__ as __version__

if TYPE_CHECKING:
    from ipu_packed_bert.checkpoint import Checkpoint, load_checkpoint, newest_checkpoint
    from ipu_packed_bert.commands.export import export_run, import_folder
    from ipu_packed_bert.config import Config, ConfigError, load_config
    from ipu_packed_bert.configurations import config_file
    from ipu_packed_bert.engine import build_engine, choose_engine
    from ipu_packed_bert.engine.base import Engine, StepResult
    from ipu_packed_bert.loader import GlobalBatches, StoredPacks
    from ipu_packed_bert.run_folder import read_log
    from ipu_packed_bert.tasks.pretraining import Pretraining
    from ipu_packed_bert.train import Outcome

_PLACES = {
    "Checkpoint": "checkpoint",
    "Config": "config",
    "ConfigError": "config",
    "Engine": "engine.base",
    "GlobalBatches": "loader",
    "Outcome": "train",
    "Pretraining": "tasks.pretraining",
    "StepResult": "engine.base",
    "StoredPacks": "loader",
    "build_engine": "engine",
    "choose_engine": "engine",
    "config_file": "configurations",
    "export_run": "commands.export",
    "import_folder": "commands.export",
    "load_checkpoint": "checkpoint",
    "load_config": "config",
    "newest_checkpoint": "checkpoint",
    "read_log": "run_folder",
}

__all__ = [
    "Checkpoint",
    "Config",
    "ConfigError",
    "Engine",
    "GlobalBatches",
    "Outcome",
    "Pretraining",
    "StepResult",
    "StoredPacks",
    "build_engine",
    "choose_engine",
    "config_file",
    "export_run",
    "import_folder",
    "load_checkpoint",
    "load_config",
    "newest_checkpoint",
    "read_log",
]


def __getattr__(name: str) -> Any:
    if name not in _PLACES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_PLACES[name]}"), name)


def __dir__() -> List[str]:
    return sorted([*globals(), *__all__])
