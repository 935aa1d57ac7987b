"""Training BERT on packed sequences: the same loss and gradients as unpacked, in about half the time.

    from ipu_packed_bert import load_config
    config = load_config("configs/packed_host.yml", ["run.steps=10"])

`packed-bert`, or `python -m ipu_packed_bert`, lists the commands; `padding_free` is for causal models.
A public name is loaded when it is first used, so that configurations can be read and plans made without torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any, List

from pack_data import __version__ as __version__

if TYPE_CHECKING:
    from ipu_packed_bert.data.global_batches import GlobalBatches as GlobalBatches
    from ipu_packed_bert.data.global_batches import StoredPacks as StoredPacks
    from ipu_packed_bert.engine import build_engine as build_engine
    from ipu_packed_bert.engine import choose_engine as choose_engine
    from ipu_packed_bert.engine.base import Engine as Engine
    from ipu_packed_bert.engine.base import StepResult as StepResult
    from ipu_packed_bert.run_files.checkpoints import Checkpoint as Checkpoint
    from ipu_packed_bert.run_files.checkpoints import load_checkpoint as load_checkpoint
    from ipu_packed_bert.run_files.checkpoints import newest_checkpoint as newest_checkpoint
    from ipu_packed_bert.run_files.folder import read_log as read_log
    from ipu_packed_bert.settings.config import Config as Config
    from ipu_packed_bert.settings.config import ConfigError as ConfigError
    from ipu_packed_bert.settings.loading import load_config as load_config
    from ipu_packed_bert.settings.shipped import config_file as config_file
    from ipu_packed_bert.tasks.pretraining import Pretraining as Pretraining
    from ipu_packed_bert.training.export import export_run as export_run
    from ipu_packed_bert.training.export import import_folder as import_folder
    from ipu_packed_bert.training.loop import Outcome as Outcome

_PLACES = {
    "Checkpoint": "run_files.checkpoints",
    "Config": "settings.config",
    "ConfigError": "settings.config",
    "Engine": "engine.base",
    "GlobalBatches": "data.global_batches",
    "Outcome": "training.loop",
    "Pretraining": "tasks.pretraining",
    "StepResult": "engine.base",
    "StoredPacks": "data.global_batches",
    "build_engine": "engine",
    "choose_engine": "engine",
    "config_file": "settings.shipped",
    "export_run": "training.export",
    "import_folder": "training.export",
    "load_checkpoint": "run_files.checkpoints",
    "load_config": "settings.loading",
    "newest_checkpoint": "run_files.checkpoints",
    "read_log": "run_files.folder",
}

__all__ = sorted(_PLACES)


def __getattr__(name: str) -> Any:
    if name not in _PLACES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_PLACES[name]}"), name)


def __dir__() -> List[str]:
    return sorted([*globals(), *__all__])
