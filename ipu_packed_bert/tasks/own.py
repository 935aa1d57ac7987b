"""Tasks that are no part of this package: a class in a file of the user's, named FILE.py:CLASS in `task.name`."""

from __future__ import annotations

import hashlib
import importlib.util
import os
import re
import sys
import zlib
from pathlib import Path
from types import ModuleType
from typing import Any, Dict

PATTERN = r"(.+\.py):(\w+)"
SHA256 = "task_sha256"  # of the file, among the data of a run's environment


def is_own(name: Any) -> bool:
    return isinstance(name, str) and re.fullmatch(PATTERN, name) is not None


def full_name(name: str) -> str:
    """The same with the file's full path, by which a run finds it again from any folder; other names as they are."""
    return os.path.abspath(name) if is_own(name) else name


def own_class(name: str) -> Any:
    """The class that the name is of.  ValueError where there is none, or it is no task."""
    path, _, kind = full_name(name).rpartition(":")
    if not Path(path).is_file():
        raise ValueError(f"task.name is {name}; there is no file {path}: put it there, a run keeps its full path")
    found = getattr(_loaded(path), kind, None)
    # Asked by an attribute: `examples` imports the settings, which import this module.
    if not isinstance(found, type) or not isinstance(getattr(found, "settings", None), type):
        raise ValueError(f"task.name is {name}; {path} has no class {kind} that is an ExampleTask")
    lacking = ", ".join(sorted(getattr(found, "__abstractmethods__", ())))
    if lacking:
        raise ValueError(f"task.name is {name}; the class {kind} of {path} lacks {lacking}: write what is missing")
    return found


def recorded(name: str) -> Dict[str, str]:
    """The checksum of an own task's file, by which a resumed run notices a change; nothing of other tasks."""
    if not is_own(name):
        return {}
    return {SHA256: hashlib.sha256(Path(full_name(name).rpartition(":")[0]).read_bytes()).hexdigest()}


def _loaded(path: str) -> ModuleType:
    """The file as a module, once a process.  What the file itself raises is its author's to read, as it is."""
    name = f"{Path(path).stem}_{zlib.crc32(path.encode()):08x}"
    if name not in sys.modules:
        spec = importlib.util.spec_from_file_location(name, path)
        assert spec is not None and spec.loader is not None  # its name ends in .py
        module = sys.modules[name] = importlib.util.module_from_spec(spec)  # dataclasses look their module up
        try:
            spec.loader.exec_module(module)
        except BaseException:
            del sys.modules[name]
            raise
    return sys.modules[name]
