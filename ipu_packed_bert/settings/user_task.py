"""Tasks outside this package: a class in a file of the user, named FILE.py:CLASS in `task.name`.

A configuration or a run may come from somebody else, and so may the file that it names. A file is therefore executed
only if the user has named it on a command line, now or before. Its sha256 is kept in the user's state directory, never
in a run.
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

from ipu_packed_bert.settings.reader import Override, peek
from ipu_packed_bert.settings.schema import OWN_TASK
from pack_data.reading.durable import write_atomically
from pack_data.reading.files import read_regular

_MAX_BYTES = 1 << 24  # of a Python file; none that a person wrote has 16 MiB
_trusted: Set[str] = set()  # sha256 of the files that this process may execute


def is_own(name: Any) -> bool:
    """Return True if a task's name has the form FILE.py:CLASS."""
    return isinstance(name, str) and re.fullmatch(OWN_TASK, name) is not None


def full_name(name: str) -> str:
    """Return a task's name with the full path of its file, which is valid in any directory, if it has a file."""
    return os.path.abspath(name) if is_own(name) else name


def _trust(path: Union[str, os.PathLike]) -> None:
    """Allow this process and later processes of this user to execute a file with its current content.

    Raises:
        ValueError: there is no such file.
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
            f"note: {note.parent}: cannot be written ({error.strerror}); pass --trust-task {path} each time",
            file=sys.stderr,
        )


def trust_what_was_named(files: Sequence[str], overrides: Sequence[Override]) -> None:
    """Trust the files of --trust-task, and the file of --set task.name=FILE.py:CLASS."""
    name = peek("task.name", None, overrides)
    named_files = [_file_of(name)] if is_own(name) else []
    for path in [*files, *named_files]:
        _trust(path)


def _state_folder() -> Path:
    """Return the directory of the user's trusted files; each entry is named by a sha256 and contains the path."""
    base = os.environ.get("XDG_STATE_HOME", "")
    if not os.path.isabs(base):  # the rule of XDG: ignore relative paths
        base = os.path.expanduser("~/.local/state")
    return Path(base, "packed_bert", "trusted_tasks")


def own_class(name: str) -> Any:
    """Return the class of a task's name FILE.py:CLASS.

    Raises:
        ValueError: there is no such file or class, or the class is not a task.
    """
    path = _file_of(name)
    class_name = name.rpartition(":")[2]
    if not os.path.exists(path):
        raise ValueError(
            f"task.name is {name}; there is no file {path}: restore it, because a run keeps its full path"
        )
    task = getattr(_loaded(path), class_name, None)
    # A task is identified by an attribute, because importing its base class would be circular.
    if not isinstance(task, type) or not isinstance(getattr(task, "settings", None), type):
        raise ValueError(
            f"task.name is {name}; {path} has no class {class_name} that is an ExampleTask; define it"
        )
    missing = ", ".join(sorted(getattr(task, "__abstractmethods__", ())))
    if missing:
        raise ValueError(
            f"task.name is {name}; the class {class_name} of {path} does not define {missing}; define them"
        )
    return task


def _file_of(name: str) -> str:
    return full_name(name).rpartition(":")[0]


def _content(path: str) -> bytes:
    return read_regular(path, way_out="pass a Python file", most_bytes=_MAX_BYTES)


def _sha256(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def _loaded(path: str) -> ModuleType:
    """Import a trusted file once per process; exceptions of the file itself are not caught."""
    name = f"{Path(path).stem}_{zlib.crc32(os.fsencode(path)):08x}"
    if name not in sys.modules:
        content = _content(path)
        digest = _sha256(content)
        if digest not in _trusted and not os.path.isfile(_state_folder() / digest):
            raise ValueError(
                f"task.name names {path}, which is not trusted, or was changed since; read it, then add "
                f"--trust-task {shlex.quote(path)} once"
            )
        module = ModuleType(name)
        sys.modules[name] = module  # dataclasses look up their module
        module.__file__ = path
        try:
            # Python's own loader could execute compiled code next to the file, which was not checked.
            exec(compile(content, path, "exec"), module.__dict__)
        except BaseException:
            del sys.modules[name]
            raise
    return sys.modules[name]
