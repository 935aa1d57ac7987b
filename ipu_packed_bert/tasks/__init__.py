"""Tasks that are trained on packs, one module each.

    task                                              the interface between a task and the training loop
    examples                                          base class of tasks with files of examples
    pretraining, questions, classification, tokens    the tasks; a user's task is a class in a file

`files` and `inputs` read examples and make sequences, `scores` has metrics, `starting_weights` loads checkpoints.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

from ipu_packed_bert.settings.finetuning import TASKS
from ipu_packed_bert.settings.user_task import is_own, own_class


def task_class(name: str) -> Any:
    """Import and return the class of a task with files of examples, by its name in the configuration."""
    if is_own(name):
        return own_class(name)
    module, _, class_name = TASKS[name].implementation.partition(".")
    return getattr(import_module(f"ipu_packed_bert.tasks.{module}"), class_name)
