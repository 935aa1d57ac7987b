"""Tasks that are no part of this package: a class in a file of the user's, named FILE.py:CLASS in `task.name`.

A configuration or a run may come from somebody else, and so may the file that it names. So a file is run only where
the user named it on a command line, now or before: its sha256 is kept in the user's own state folder, never in a run's.
"""

from __future__ import annotations

import hashlib
import os
import re
import shlex
import sys
import zlib
from pathlib import Path
from types import ModuleType
from typing import Any, Sequence, Set, Union

from ipu_packed_bert.settings.reader import peek
from pack_data.reading.files import read_regular, write_atomically

PATTERN = r"(.+\.py):(\w+)"
_MOST_BYTES = 1 << 24  # of a file of Python
_trusted: Set[str] = set()  # the sha256 of what this process may run


def is_own(name: Any) -> bool:
    return isinstance(name, str) and re.fullmatch(PATTERN, name) is not None


def full_name(name: str) -> str:
    """The same with the file's full path, by which a run finds it again from any folder; other names as they are."""
    return os.path.abspath(name) if is_own(name) else name


def trust(path: Union[str, os.PathLike]) -> None:
    """Let this file be run as it is now, by this process and later ones of this user; ValueError where it is none."""
    found = _sha256(_content(os.path.abspath(path)))
    _trusted.add(found)
    note = _state_folder() / found
    try:
        if not note.exists():
            note.parent.mkdir(parents=True, exist_ok=True)
            write_atomically(note, f"{os.path.abspath(path)}\n".encode("utf-8", "surrogateescape"))
    except OSError as error:
        print(f"note: {note.parent} cannot be written ({error.strerror}): name {path} each time", file=sys.stderr)


def trust_what_was_named(files: Sequence[str], overrides: Sequence[str]) -> None:
    """Trust the files of --trust-task, and the one that --set task.name=FILE.py:CLASS names, of a command line."""
    name = peek("task.name", None, overrides)
    for path in [*files, *([_file_of(name)] if is_own(name) else [])]:
        trust(path)


def _state_folder() -> Path:
    """A file for each that the user trusts: its name is the sha256, and it holds the path, for people."""
    base = os.environ.get("XDG_STATE_HOME", "")
    if not os.path.isabs(base):  # XDG's rule; a relative one would be in whatever folder one is
        base = os.path.expanduser("~/.local/state")
    return Path(base, "packed_bert", "trusted_tasks")


def own_class(name: str) -> Any:
    """The class that the name is of.  ValueError where there is none, or it is no task."""
    path, kind = _file_of(name), name.rpartition(":")[2]
    if not os.path.exists(path):
        raise ValueError(f"task.name is {name}; there is no file {path}: put it there, a run keeps its full path")
    found = getattr(_loaded(path), kind, None)
    # Asked by an attribute: `examples` imports the settings, which import this module.
    if not isinstance(found, type) or not isinstance(getattr(found, "settings", None), type):
        raise ValueError(f"task.name is {name}; {path} has no class {kind} that is an ExampleTask")
    lacking = ", ".join(sorted(getattr(found, "__abstractmethods__", ())))
    if lacking:
        raise ValueError(f"task.name is {name}; the class {kind} of {path} lacks {lacking}: write what is missing")
    return found


def _file_of(name: str) -> str:
    return full_name(name).rpartition(":")[0]


def _content(path: str) -> bytes:
    return read_regular(path, way_out="name a file of Python", most_bytes=_MOST_BYTES)


def _sha256(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def _loaded(path: str) -> ModuleType:
    """The file as a module, once a process.  What the file itself raises is its author's to read, as it is."""
    name = f"{Path(path).stem}_{zlib.crc32(os.fsencode(path)):08x}"
    if name not in sys.modules:
        content = _content(path)
        if _sha256(content) not in _trusted and not os.path.isfile(_state_folder() / _sha256(content)):
            raise ValueError(
                f"task.name is of {path}, which this command would run; you have not trusted it, or it was changed "
                f"since: read it, then add --trust-task {shlex.quote(path)}, once"
            )
        module = sys.modules[name] = ModuleType(name)  # dataclasses look their module up
        module.__file__ = path
        try:
            # Of what was checked: Python's loader would take compiled code that lies beside the file.
            exec(compile(content, path, "exec"), module.__dict__)
        except BaseException:
            del sys.modules[name]
            raise
    return sys.modules[name]
