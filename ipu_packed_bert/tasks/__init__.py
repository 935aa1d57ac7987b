"""Tasks: what is trained on packs, one file each.

    task          the contract between a task and what trains it; examples: what tasks with files of examples share
    pretraining   questions   classification   tokens   own: a class in a file of the user's

Beside them what they read and score with: files, scores; and starting_weights, where a run begins.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

from ipu_packed_bert.settings.finetuning import TASKS
from ipu_packed_bert.settings.user_task import is_own, own_class


def task_class(name: str) -> Any:
    """Import and return the class of a task that learns from files, by its name in the configuration."""
    if is_own(name):
        return own_class(name)
    module, _, kind = TASKS[name].implementation.partition(".")
    return getattr(import_module(f"ipu_packed_bert.tasks.{module}"), kind)
