"""Tasks outside this package: a class in a file of the user's, named FILE.py:CLASS in `task.name`.

A configuration or a run may come from somebody else, and so may the file that it names. A file is therefore run only
if the user named it on a command line, now or before: its sha256 is kept in the user's state directory, never in a run.
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
_MAX_BYTES = 1 << 24  # size of a Python file; nobody writes 16 MiB by hand
_trusted: Set[str] = set()  # sha256 of the files that this process may run


def is_own(name: Any) -> bool:
    """Return True if a task's name has the form FILE.py:CLASS."""
    return isinstance(name, str) and re.fullmatch(PATTERN, name) is not None


def full_name(name: str) -> str:
    """Return a task's name with the full path of its file, if it has one: a run finds it from any directory."""
    return os.path.abspath(name) if is_own(name) else name


def trust(path: Union[str, os.PathLike]) -> None:
    """Allow this process, and later ones of this user, to run a file with its present content.

    Raises:
        ValueError: if there is no such file.
    """
    digest = _sha256(_content(os.path.abspath(path)))
    _trusted.add(digest)
    note = _state_folder() / digest
    try:
        if not note.exists():
            note.parent.mkdir(parents=True, exist_ok=True)
            write_atomically(note, f"{os.path.abspath(path)}\n".encode("utf-8", "surrogateescape"))
    except OSError as error:
        print(
            f"note: {note.parent} cannot be written ({error.strerror}): pass --trust-task {path} each time",
            file=sys.stderr,
        )


def trust_what_was_named(files: Sequence[str], overrides: Sequence[str]) -> None:
    """Trust the files of --trust-task, and the file of --set task.name=FILE.py:CLASS."""
    name = peek("task.name", None, overrides)
    named_files = [_file_of(name)] if is_own(name) else []
    for path in [*files, *named_files]:
        trust(path)


def _state_folder() -> Path:
    """Return the directory of the user's trusted files: names are sha256, contents the paths, for people."""
    base = os.environ.get("XDG_STATE_HOME", "")
    if not os.path.isabs(base):  # XDG's rule; a relative path would depend on the current directory
        base = os.path.expanduser("~/.local/state")
    return Path(base, "packed_bert", "trusted_tasks")


def own_class(name: str) -> Any:
    """Return the class that a task's name FILE.py:CLASS names.

    Raises:
        ValueError: if there is no such file or class, or the class is not a task.
    """
    path = _file_of(name)
    class_name = name.rpartition(":")[2]
    if not os.path.exists(path):
        raise ValueError(
            f"task.name is {name}; there is no file {path}: put it there, a run keeps its full path"
        )
    task = getattr(_loaded(path), class_name, None)
    # The attribute identifies a task: `tasks.examples` imports the settings, which import this module.
    if not isinstance(task, type) or not isinstance(getattr(task, "settings", None), type):
        raise ValueError(
            f"task.name is {name}; {path} has no class {class_name} that is an ExampleTask"
        )
    missing = ", ".join(sorted(getattr(task, "__abstractmethods__", ())))
    if missing:
        raise ValueError(
            f"task.name is {name}; the class {class_name} of {path} lacks {missing}: define what is missing"
        )
    return task


def _file_of(name: str) -> str:
    return full_name(name).rpartition(":")[0]


def _content(path: str) -> bytes:
    return read_regular(path, way_out="pass a Python file", most_bytes=_MAX_BYTES)


def _sha256(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def _loaded(path: str) -> ModuleType:
    """Import a trusted file once per process; errors of the file itself are passed on unchanged."""
    name = f"{Path(path).stem}_{zlib.crc32(os.fsencode(path)):08x}"
    if name not in sys.modules:
        content = _content(path)
        if _sha256(content) not in _trusted and not os.path.isfile(
            _state_folder() / _sha256(content)
        ):
            raise ValueError(
                f"task.name is of {path}, which this command would run; you have not trusted it, or it was changed "
                f"since: read it, then add --trust-task {shlex.quote(path)} once"
            )
        module = ModuleType(name)
        sys.modules[name] = module  # dataclasses look their module up
        module.__file__ = path
        try:
            # Python's own loader could run compiled code beside the file that was not checked.
            exec(compile(content, path, "exec"), module.__dict__)
        except BaseException:
            del sys.modules[name]
            raise
    return sys.modules[name]
