"""`engine.compile: auto`: whether torch.compile pays in a run, by a rule that reads no clock."""

from __future__ import annotations

import os
import shutil
import sys

import torch

from ipu_packed_bert.engine.host.devices import find_device
from ipu_packed_bert.planning.host_memory import multiply_adds
from ipu_packed_bert.settings.schema import Configuration
from ipu_packed_bert.tasks.task import Task

# Measured on 2 cores with AMX, torch 2.13 (docs/training.md).  Seconds that the programs of training and evaluation
# take to compile; of an eager update's time the share that a compiled one saves, and its multiply-adds a second on one
# core.  In float32 a compiled update took longer; tf32 is of GPUs, where nothing was measured.
_SECONDS = 130.0
_SAVED = {"float32": 0.0, "tf32": 0.0, "bfloat16": 0.2}
_RATE = 4e10
# Beyond, attention within sequences, whose shapes cannot be compiled, saves as much.
_SLOTS = 1024
# Compiling must pay so many times over on one core, because a run may have more of them.
_TIMES = 10.0


def pays(config: Configuration, task: Task, *, packs: int) -> bool:
    """Whether a run of so many packs gains time by torch.compile; config: with `engine.compile` false.

    Follows from the configuration, torch and the C++ compiler that is here, so all ranks of a run find the same.
    """
    engine = config.engine
    if find_device(engine).type != "cpu" or engine.attention == "varlen" or task.max_sequence_length > _SLOTS:
        return False
    work = packs * multiply_adds(task.model, slots=task.max_sequence_length, predictions=0)
    return _can_compile() and _SAVED[engine.precision] * work / _RATE >= _TIMES * _SECONDS


def _can_compile() -> bool:
    """Whether torch is 2.1 or newer, and its C++ compiler is here."""
    compiler = os.environ.get("CXX") or ("clang++" if sys.platform == "darwin" else "g++")
    return hasattr(torch, "compiler") and shutil.which(compiler) is not None
