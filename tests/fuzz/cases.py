"""One case: a valid sample, one to three changes of it, and what a reader makes of the result.

A case is decided by (reader, seed, number), so that the three make it again on any machine with the same packages.
"""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import hashlib
import importlib.util
import io
import os
import random
import re
import resource
import shutil
import signal
import stat
import sys
import tempfile
import traceback
import typing
import warnings
from pathlib import Path
from typing import Any, Callable, List, Mapping, NamedTuple, Optional, Tuple

import numpy as np

from pack_data.cli.command import run_main
from pack_data.reading.words import Problems
from tests.fuzz.mutators import STRUCTURE, Mutator

REFUSED = "refused"
UNCHANGED = "unchanged"
HARMLESS = "harmless change"
MESSAGE = "message"
TRACEBACK = "traceback"
HANG = "hang"
SILENT = "silent change"
OUTCOMES = (REFUSED, UNCHANGED, HARMLESS, MESSAGE, TRACEBACK, HANG, SILENT)
FAILURES = (MESSAGE, TRACEBACK, HANG, SILENT)

SECONDS = 5.0  # of processor time; a reader of a sample of a few kB takes milliseconds
WAITING = 120.0  # on the clock, which runs on while other programs have the processor
MEMORY = 2 << 30  # what a case may map beyond what the process had
LONGEST_LINE = 600  # characters of an error, besides the place of the file


class Target(NamedTuple):
    """Files of a sample and what is done to them; every target is taken as often as its share of the weights."""

    pattern: str
    mutators: Tuple[Mutator, ...]
    weight: float = 1.0


class Found(NamedTuple):
    """Values that were read. `must`: no damage may change them; `may`: the format stores them once, unchecked."""

    must: Any
    may: Any = None


@dataclasses.dataclass(frozen=True)
class Reader:
    """A way into the program for bytes of others.

    make: writes a valid sample into an empty folder. read: reads it as the command does. agrees: whether what was
    found (`Found.must`, as digests) is as good as the original's. or_without: a folder of the sample; what is read
    without it is right too, where the program says that it passes over a damaged one. command: the same through a
    command line, (main, arguments). needs: packages without which there is nothing to test.
    """

    name: str
    make: Callable[[Path], None]
    read: Callable[[Path], Any]
    targets: Tuple[Target, ...]
    command: Optional[Callable[[Path], Tuple[Callable[..., Optional[int]], List[str]]]] = None
    needs: Tuple[str, ...] = ()
    agrees: Callable[[Any, Any], bool] = lambda original, found: original == found
    or_without: Optional[str] = None
    weight: float = 1.0

    @property
    def missing(self):
        return [name for name in self.needs if not _installed(name)]


def _installed(name):
    try:
        return importlib.util.find_spec(name) is not None
    except ModuleNotFoundError:  # a package of it is missing
        return False


class Result(NamedTuple):
    outcome: str
    detail: str  # of a failure: the error, where it was raised, what was wrong
    damage: str  # the changes that were made


class Hang(BaseException):
    """Raised in a case by the alarm; not caught by any `except Exception`."""


class Mistyped(Exception):
    """A value was accepted that is not of the type that its field states."""


def digest(value):
    """A text that is equal for equal values; arrays with their types, floats bit by bit."""
    return hashlib.sha256(repr(_plain(value)).encode("utf-8", "surrogatepass")).hexdigest()


def _plain(value):
    """Convert a value to nested tuples with the type of every part."""
    if isinstance(value, (np.ndarray, np.generic)):
        array = np.asarray(value)
        return array.dtype.descr, array.shape, _plain(array.tolist()) if array.dtype.hasobject else array.tobytes()
    if hasattr(value, "untyped_storage"):  # a tensor, of a type that NumPy may not have
        import torch

        return (
            str(value.dtype),
            tuple(value.shape),
            bytes(value.detach().contiguous().view(-1).view(torch.uint8).numpy()),
        )
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return type(value).__name__, [
            (field.name, _plain(getattr(value, field.name))) for field in dataclasses.fields(value)
        ]
    if isinstance(value, Mapping):
        return "mapping", sorted((repr(_plain(key)), _plain(item)) for key, item in value.items())
    if isinstance(value, (list, tuple)):
        return type(value).__name__ if hasattr(value, "_fields") else "list", [_plain(item) for item in value]
    if isinstance(value, (set, frozenset)):
        return "set", sorted(map(digest, value))
    if isinstance(value, float):
        return "float", value.hex()
    if value is None or isinstance(value, (bool, int, str, bytes, os.PathLike, datetime.date)):
        return type(value).__name__, value
    if hasattr(value, "as_py"):
        return _plain(value.as_py())
    raise TypeError(f"nothing here tells how to compare a {type(value).__name__}")


def typed(value):
    """The value; Mistyped where a dataclass or a named tuple in it has a field of another type than it states."""
    hints = {}
    if dataclasses.is_dataclass(value) or hasattr(value, "_fields"):
        hints = typing.get_type_hints(type(value))
    for name, hint in hints.items():
        if not _is(getattr(value, name, None), hint):
            raise Mistyped(f"{type(value).__name__}.{name} is {getattr(value, name)!r:.60}, not {hint}")
        part = getattr(value, name, None)
        if dataclasses.is_dataclass(part) or hasattr(part, "_fields"):
            typed(part)
    return value


def _is(value, hint):
    origin = typing.get_origin(hint)
    arguments = typing.get_args(hint)
    if hint is Any or isinstance(hint, (str, typing.TypeVar)):
        return True
    if origin is typing.Union:
        return any(_is(value, argument) for argument in arguments)
    if hint in (int, float):
        return isinstance(value, (int, float) if hint is float else int) and not isinstance(value, bool)
    if origin is tuple:
        if not isinstance(value, tuple):
            return False
        if len(arguments) == 2 and arguments[1] is Ellipsis:
            return all(_is(item, arguments[0]) for item in value)
        return len(value) == len(arguments) and all(map(_is, value, arguments))
    if origin is list:
        return isinstance(value, list) and all(_is(item, arguments[0]) for item in value)
    if isinstance(origin, type) and issubclass(origin, typing.Mapping):
        return isinstance(value, Mapping) and all(
            _is(key, arguments[0]) and _is(item, arguments[1]) for key, item in value.items()
        )
    return isinstance(value, hint) if isinstance(hint, type) else True


@contextlib.contextmanager
def limits():
    """Raises Hang after SECONDS or WAITING; more than MEMORY beyond what the process has now is a MemoryError."""

    def ring(number, frame):
        raise Hang

    with open("/proc/self/statm") as statm:
        mapped = int(statm.read().split()[0]) * resource.getpagesize()
    limit_before = resource.getrlimit(resource.RLIMIT_AS)
    handlers = {number: signal.signal(number, ring) for number in (signal.SIGALRM, signal.SIGPROF)}
    resource.setrlimit(resource.RLIMIT_AS, (mapped + MEMORY, limit_before[1]))
    # Again and again: code that catches every exception gets the next one.
    signal.setitimer(signal.ITIMER_PROF, SECONDS, 0.5)
    signal.setitimer(signal.ITIMER_REAL, WAITING, 0.5)
    try:
        yield
    finally:
        for timer in (signal.ITIMER_PROF, signal.ITIMER_REAL):
            signal.setitimer(timer, 0)
        resource.setrlimit(resource.RLIMIT_AS, limit_before)
        for number, handler in handlers.items():
            signal.signal(number, handler)


class Sample:
    """The valid files of a reader, made once, and what the reader finds in them."""

    def __init__(self, reader, folder):
        self.reader = reader
        self.folder = folder
        # Of one name everywhere: some files hold the place of others.
        self.pristine = folder / "pristine"
        self.sample = folder / "sample"
        if not self.pristine.exists():  # readers of the same files share them
            self.sample.mkdir(parents=True)
            with quiet():
                reader.make(self.sample)
            shutil.copytree(self.sample, self.pristine)
        self.restore()
        # Of two forms of a file the sample may have one.
        self.targets = [target for target in reader.targets if any(self.pristine.glob(target.pattern))]
        assert self.targets, f"{reader.name}: the sample has none of the files to change"
        self.original = self._found()
        self.right = [self.original[0]]
        if reader.or_without is not None:
            self.restore()
            shutil.rmtree(self.sample / reader.or_without)
            self.right.append(self._found()[0])
            assert self.right[0] != self.right[1]

    def _found(self):
        with quiet():
            found = self.reader.read(self.sample)
        must, may = found if isinstance(found, Found) else (found, None)
        return ([digest(part) for part in must] if isinstance(must, list) else digest(must)), digest(may)

    def restore(self):
        """Makes the sample valid again; files that nobody touched stay."""
        if self.sample.exists():
            known = _states(self.pristine)
            for name, state in _states(self.sample).items():
                if known.get(name) != state:
                    path = self.sample / name
                    shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink()
            if not set(known) - set(_states(self.sample)):
                return
        # copytree keeps the times, which tell the files that were changed.
        _copy_missing(self.pristine, self.sample)

    def damage(self, seed, number):
        """Makes the changes of a case; what they were, and whether what is read may be another valid value."""
        rng = random.Random(f"{self.reader.name}/{seed}/{number}")
        self.restore()
        target = rng.choices(self.targets, [candidate.weight for candidate in self.targets])[0]
        files = sorted(path for path in self.sample.glob(target.pattern) if path.is_file())
        path = rng.choice(files)
        remade = False
        words = []
        # The changes that a library makes come first: they need a file that is whole.
        mutators = [rng.choice(target.mutators) for _ in range(rng.choice((1, 1, 1, 2)))]
        for mutator in sorted(mutators, key=lambda each: each.name != STRUCTURE):
            if not path.is_file() or path.is_symlink() or (words and mutator.name == STRUCTURE):
                break
            # A second change may not understand the first one's result.
            with contextlib.suppress(*([Exception] if words else [])):
                mutator.apply(rng, path)
            remade |= mutator.remade
            words.append(mutator.name)
        return f"{path.relative_to(self.sample)}: {', '.join(words)}", remade

    def run(self, seed, number, *, by_command=False, begun=lambda words: None):
        """begun: told what the changes are, before the reader sees them."""
        words, remade = self.damage(seed, number)
        begun(words)
        try:
            with quiet() as said, limits(), warnings.catch_warnings():
                warnings.filterwarnings("error", module=r"(pack_data|ipu_packed_bert)(\..*)?$")
                if by_command:
                    return Result(*self._command(said), words)
                found = self._found()
        except Hang:
            return Result(HANG, f"more than {SECONDS:g} s of processor time, or {WAITING:g} s on the clock", words)
        except (ValueError, OSError) as error:
            wrong = self.wrong_message(error)
            if isinstance(error, UnicodeError) or wrong:
                return Result(MESSAGE, f"{wrong or 'a UnicodeError as it is'}: {_where(error)}", words)
            return Result(REFUSED, str(error), words)
        except Mistyped as error:
            return Result(SILENT, str(error), words)
        except KeyboardInterrupt:
            raise
        except BaseException as error:  # SystemExit too
            return Result(TRACEBACK, _where(error), words)
        if found == self.original:
            return Result(UNCHANGED, "", words)
        if remade or any(self.reader.agrees(right, found[0]) for right in self.right):
            return Result(HARMLESS, "", words)
        return Result(SILENT, "another value was read", words)

    def wrong_message(self, error):
        """Describe the fault of an error message, or return ""."""
        return self._wrong_lines(str(error).split("\n"), several=isinstance(error, Problems))

    def _wrong_lines(self, lines, several):
        if len(lines) > 1 and not several:
            return f"{len(lines)} lines"
        longest = max(len(line.replace(str(self.sample), "")) for line in lines)
        if longest > LONGEST_LINE:
            return f"a line of {longest} characters"
        if any(not character.isprintable() for line in lines for character in line):
            return "characters that cannot be printed"
        if not any(str(self.sample) in line for line in lines):
            return "names no file"
        return ""

    def _command(self, said):
        assert self.reader.command is not None
        main, arguments = self.reader.command(self.sample)
        status = run_main(main, arguments)
        errors = [line for line in said.getvalue().split("\n") if line]
        if status in (0, 1):
            return UNCHANGED, ""
        begun = [line for line in errors if line.startswith("error: ")]
        if status != 2 or len(begun) != 1:
            return MESSAGE, f"exit status {status}, {len(begun)} error lines: {' | '.join(errors)[:300]}"
        lines = errors[errors.index(begun[0]) :]
        wrong = self._wrong_lines(lines, several=all(line.startswith("  ") for line in lines[1:]))
        return (MESSAGE, f"{wrong}: {' | '.join(lines)[:300]}") if wrong else (REFUSED, begun[0])


def _states(folder):
    """Kind, size and time of every file and folder below; those of a folder do not matter."""
    states = {}
    for at, folders, files in os.walk(folder):
        for name in [*folders, *files]:
            path = os.path.join(at, name)
            state = os.lstat(path)
            is_folder = stat.S_ISDIR(state.st_mode)
            states[os.path.relpath(path, folder)] = (
                (stat.S_IFMT(state.st_mode), 0, 0)
                if is_folder
                else (stat.S_IFMT(state.st_mode), state.st_size, state.st_mtime_ns)
            )
    # What is in a folder before the folder itself, so that nothing is looked for in one that was removed.
    return dict(sorted(states.items(), reverse=True))


def _copy_missing(source, target):
    target.mkdir(exist_ok=True)
    for path in source.iterdir():
        copy = target / path.name
        if path.is_dir():
            _copy_missing(path, copy)
        elif not copy.exists():
            shutil.copy2(path, copy)


@contextlib.contextmanager
def quiet():
    """Nothing of what is printed; gives what goes to stderr."""
    errors = io.StringIO()
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(errors):
        yield errors


def _where(error):
    """Type, words and the innermost line of this project that an error came through."""
    frames = [
        frame
        for frame in traceback.extract_tb(error.__traceback__)
        if re.search(r"/(pack_data|padding_free|ipu_packed_bert|ipu_profiling)/", frame.filename)
    ]
    place = f" at {'/'.join(Path(frames[-1].filename).parts[-2:])}:{frames[-1].lineno}" if frames else ""
    try:
        words = " ".join(str(error).split())[:200]
    except Exception:
        words = "?"
    return f"{type(error).__name__}{place}: {words}"


@contextlib.contextmanager
def samples(readers):
    folder = Path(tempfile.mkdtemp(prefix="fuzz-", dir="/dev/shm" if os.access("/dev/shm", os.W_OK) else None))
    try:
        makers = list(dict.fromkeys(reader.make for reader in readers))
        yield [Sample(reader, folder / str(makers.index(reader.make))) for reader in readers]
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def load_readers(names=()):
    """The readers of these names (all where none is given): those that can run here, and those that lack a package."""
    from tests.fuzz.data_readers import READERS as of_data
    from tests.fuzz.run_readers import READERS as of_runs

    readers = [*of_data, *of_runs]
    unknown = set(names) - {reader.name for reader in readers}
    if unknown:
        raise ValueError(
            f"no reader {', '.join(sorted(unknown))}; there are {', '.join(reader.name for reader in readers)}"
        )
    chosen = [reader for reader in readers if not names or reader.name in names]
    return [reader for reader in chosen if not reader.missing], [reader for reader in chosen if reader.missing]


def numbers_of(readers, count):
    """(place of the reader, case number) of `count` cases, the readers in turn by their weights."""
    due = [0.0] * len(readers)
    taken = [0] * len(readers)
    cases = []
    total = sum(reader.weight for reader in readers)
    for _ in range(count):
        for place, reader in enumerate(readers):
            due[place] += reader.weight / total
        place = max(range(len(readers)), key=lambda each: due[each])
        due[place] -= 1.0
        cases.append((place, taken[place]))
        taken[place] += 1
    return cases


if sys.platform == "win32":  # pragma: no cover
    raise ImportError("the fuzzer needs alarms and memory limits, which Windows lacks")
