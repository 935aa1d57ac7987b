"""Shared parts of every command line: one-line errors, option types, checks of output files."""

from __future__ import annotations

import argparse
import difflib
import errno
import os
import re
import shlex
import shutil
import sys
import textwrap
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Callable, Iterator, List, Mapping, NoReturn, Optional, Sequence, Set, Union

from pack_data.cli.terminal import Terminal, escaped, progress_shown
from pack_data.reading.packages import package_of, require
from pack_data.reading.words import Problems, counted, settings_by_meaning


class NotFinite(ArithmeticError):
    """A loss or weights of a training run are infinite or NaN; the exit status is 3."""


# The script in a checkout that does the same as `packed-bert pretrain`.
_SCRIPT = "run_pretraining.py"


def runnable(command: str) -> str:
    """Return how to run a command of packed-bert from this shell, with the interpreter of this process."""
    program, *words = shlex.split(typed(command))
    path = sys.argv[0] if program == "packed-bert" else sys.executable
    return shlex.join([program_name(path), *words])


def program_name(path: str) -> str:
    """Return how to start a program from this shell: by its name if the shell finds it, or else by its path."""
    path = os.path.abspath(path)
    name = os.path.basename(path)
    found = shutil.which(name)
    if found is not None and os.path.abspath(found) == path:
        return name
    below = os.path.relpath(path)
    return path if below.startswith(os.pardir) else below


def typed(command: str) -> str:
    """Return a command of packed-bert in the form that started this process, for usage lines."""
    started = Path(sys.argv[0])
    if started.stem == "packed-bert":
        return f"packed-bert {command}"
    if command == "pretrain" and started.parts[-2:] != ("ipu_packed_bert", "__main__.py"):
        return f"python {shlex.quote(sys.argv[0] if started.name == _SCRIPT else _SCRIPT)}"
    return f"python -m ipu_packed_bert {command}"


class _HelpAll(argparse.Action):
    """The option --help-all."""

    def __call__(self, parser: Any, *_: Any) -> None:
        print(parser._format_help_all(), end="")
        parser.exit()


class ArgumentParser(argparse.ArgumentParser):
    """An argument parser that raises ValueError, so that `run_main` prints its errors like every other error.

    --help prints the first paragraph of the description and the common options; --help-all prints everything.
    """

    def __init__(self, **options: Any) -> None:
        self._arguments: Sequence[str] = ()
        self._rare: Set[argparse.Action] = set()
        self.accepts: Callable[[str], bool] = bool  # of --set: True for a setting of this command
        name = str(options.get("prog", "")).rpartition("python -m pack_data.")[2]
        if name and sys.argv[1:2] == [name]:
            # The command runs as `packed-bert NAME`.
            options["prog"] = typed(name)
        super().__init__(**{"formatter_class": argparse.RawDescriptionHelpFormatter, **options})
        if self.add_help:
            self.add_argument("--help-all", nargs=0, action=_HelpAll, help=argparse.SUPPRESS)

    def rare(self, *names: str) -> None:
        """Show these options in --help-all only."""
        self._rare |= {self._option_string_actions[name] for name in names}

    def _format_help_all(self) -> str:
        """Return the text of --help-all."""
        return super().format_help()

    def format_help(self) -> str:
        """Return the text of --help."""
        summary, _, details = (self.description or "").partition("\n\n")
        formatter = self._get_formatter()
        formatter.add_usage(
            self.usage, self._common(self._actions), self._mutually_exclusive_groups
        )
        formatter.add_text(
            textwrap.fill(" ".join(summary.split()), formatter._width, break_on_hyphens=False)
        )

        for group in self._action_groups:
            formatter.start_section(group.title)
            formatter.add_arguments(self._common(group._group_actions))
            formatter.end_section()

        if self._rare:
            formatter.add_text(f"more options: {self.prog} --help-all")
        elif details or self.epilog:
            formatter.add_text(f"more: {self.prog} --help-all")
        return formatter.format_help()

    def _common(self, actions: Sequence[argparse.Action]) -> List[argparse.Action]:
        return [action for action in actions if action not in self._rare]

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        arguments = sys.argv[1:] if args is None else args
        self._arguments = [str(argument) for argument in arguments]
        self._refuse_empty()
        return super().parse_known_args(args, namespace)

    def error(self, message: str) -> NoReturn:
        hint = self._misspelt() or self._without_option(message)
        raise ValueError(f"{message}{hint} (try {self.prog} --help)")

    def _without_option(self, message: str) -> str:
        """Return a hint about a word that argparse cannot place, because it needs an option before it."""
        unplaced: Sequence[str] = ()
        if message.startswith("unrecognized"):
            unplaced = message.split()[-1:]
        if message.endswith(" is required"):
            unplaced = self._arguments[:1]
        for word in unplaced:
            wanted = "--set" if "=" in word else "--config"
            if word.startswith("-"):
                continue
            if "--histogram" in self._option_string_actions:
                return f"; pass a file of lengths with --histogram {word}"
            if wanted in self._option_string_actions:
                return f"; did you mean {wanted} {word}?"
        return ""

    def _refuse_empty(self) -> None:
        """Refuse an empty value, as an unset shell variable gives: as a path it would mean the current directory."""
        previous = ""
        for argument in self._arguments:
            if argument == "--":
                break
            name, equals, value = argument.partition("=")
            is_empty_option = argument.startswith("--") and equals and not value
            if not argument or is_empty_option:
                option = name or (previous if previous.startswith("-") else "an argument")
                self.error(f"{option} is empty; give it a value, or leave it out")
            previous = argument

    def _misspelt(self) -> str:
        """Return a hint about the first unknown option that resembles a known one.

        argparse names a missing option before it names an unknown one, which is often the same option misspelt.
        """
        known = [name for name in self._option_string_actions if name.startswith("--")]
        for argument in self._arguments:
            if argument == "--":
                break
            name = argument.split("=")[0]
            is_known = any(option.startswith(name) for option in known)
            if not name.startswith("--") or is_known:
                continue
            near = self._of_same_meaning(name)
            near += difflib.get_close_matches(name, known, n=1, cutoff=0.75)
            if near:
                return f"; there is no option {name}, did you mean {near[0]}?"
        return ""

    def _of_same_meaning(self, name: str) -> List[str]:
        """Return the option, or else --set and the setting, that an unknown option means in other projects."""
        settings = list(filter(self.accepts, settings_by_meaning(name[2:].replace("-", "_"))))
        options = ["--" + setting.rpartition(".")[2].replace("_", "-") for setting in settings]
        known = [option for option in options if option in self._option_string_actions]
        if not known and "--set" in self._option_string_actions:
            return [f"--set {setting}=VALUE" for setting in settings]
        return known


def run_main(
    main: Callable[[Optional[Sequence[str]]], Optional[int]], argv: Optional[Sequence[str]] = None
) -> int:
    """Run a command and return its exit status; print an error as one line on stderr (`Problems`: one line each).

    The status is 0 if the command succeeded, 1 for a negative verdict of the command itself, 2 for a mistake of the
    user, 3 if training is no longer finite, and 128 + n after signal n. Control characters are escaped.
    """
    stdout = sys.stdout
    stderr = sys.stderr
    sys.stdout = _without_controls(stdout)
    sys.stderr = _without_controls(stderr)
    try:
        with progress_shown():
            return _status(main, argv)
    finally:
        sys.stdout = stdout
        sys.stderr = stderr


def _without_controls(stream: Any) -> Any:
    return Terminal(stream) if stream and stream.isatty() else stream


def _status(
    main: Callable[[Optional[Sequence[str]]], Optional[int]], argv: Optional[Sequence[str]]
) -> int:
    try:
        status = main(argv) or 0
        if sys.stdout is not None:
            sys.stdout.flush()
        return status
    except BrokenPipeError:
        # The reader of the pipe (`| head`) has ended. Without this Python prints another error at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141
    except (ValueError, OSError) as error:
        _print_error(error)
        return 2
    except (MemoryError, RuntimeError) as error:
        if not _is_out_of_memory(error):
            raise
        words = " ".join(str(error).split())
        detail = f" ({words[:200]})" if words else ""
        print(f"error: not enough memory{detail}; choose smaller sizes", file=sys.stderr)
        return 2
    except NotFinite as error:
        print(f"error: {error}", file=sys.stderr)
        return 3
    except ModuleNotFoundError as error:
        # torch, for example, if only the packages of the packers are installed.
        package = package_of(error.name)
        if package is None:
            raise
        print(
            f"error: this command needs the package {package}: pip install {package}",
            file=sys.stderr,
        )
        return 2
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130


_MAKE_ROOM = "make room, then run the command again"
# Error of the system -> instruction to the user.
_WAYS_OUT = {
    errno.EMFILE: "raise the limit of this shell with ulimit -n",
    errno.ENOSPC: _MAKE_ROOM,
    errno.EDQUOT: _MAKE_ROOM,
    errno.EIO: "check the disk, then run the command again",
    errno.ESTALE: "the file server has lost or replaced it; run the command again",
}


def _print_error(error: Exception) -> None:
    text = str(error)
    if isinstance(error, OSError) and error.filename and error.strerror:
        # The message of the system names no way out.
        way_out = _WAYS_OUT.get(
            error.errno or 0, "choose another file or directory, or fix this one"
        )
        text = f"{error.filename}: {error.strerror}; {way_out}"
    separator = "\n" if isinstance(error, Problems) else " "
    print("error: " + separator.join(map(escaped, text.splitlines())), file=sys.stderr)


def _is_out_of_memory(error: Exception) -> bool:
    # torch's allocators raise a RuntimeError.
    text = " ".join(str(error).split())
    return isinstance(error, MemoryError) or "allocate memory" in text or "out of memory" in text


def list_commands(
    package: str, commands: Mapping[str, str], argv: Optional[Sequence[str]] = None
) -> int:
    """Print the commands of a package, one per line: the `main` of `python -m PACKAGE`."""
    arguments = sys.argv[1:] if argv is None else argv
    names = [argument for argument in arguments if argument not in ("-h", "--help")]
    if names:
        way_out = f"the commands are {', '.join(commands)}"
        if names[0] in commands:
            way_out = f"type python -m {package}.{' '.join(names)}"
        raise ValueError(f"{names[0]}: python -m {package} only lists its commands; {way_out}")

    width = max(map(len, commands))
    print(f"python -m {package}.NAME --help says more about each:\n")
    for command, summary in commands.items():
        print(f"  {command:<{width}}  {summary}")
    return 0


def _whole_number(text: str) -> int:
    """Return the number, or -1 if the text is none.

    Separators are accepted between thousands only: `2,4`, meant as two numbers, is not read as 24.
    """
    match = re.fullmatch(
        "[0-9]{1,18}|[0-9]{1,3}(,[0-9]{3}){1,5}|[0-9]{1,3}(_[0-9]{3}){1,5}", text.strip()
    )
    return int(match[0].replace(",", "")) if match else -1


def _at_least(least: int) -> Callable[[str], int]:
    """Return an argparse type for whole numbers from `least` on; `1_000` and `1,000` are numbers too."""

    def number(text: str) -> int:
        value = _whole_number(text)
        if value < least:
            raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of at least {least}")
        return value

    return number


positive_int = _at_least(1)
count_from_zero = _at_least(0)


def positive_ints(text: str) -> List[int]:
    """Read numbers of at least 1, separated by commas (an argparse type)."""
    return [positive_int(part) for part in text.split(",")]


def available_cores() -> int:
    """Return the number of cores that this process may use."""
    try:
        return len(os.sched_getaffinity(0))
    except (AttributeError, OSError):  # macOS has no such call, and a sandbox may refuse it
        return os.cpu_count() or 1


def most_processes() -> int:
    """Return the number of processes beyond which more only take memory and wait for each other."""
    return max(64, 4 * available_cores())


@contextmanager
def starting_workers(workers: int) -> Iterator[None]:
    """Raise ValueError, with a way out, if the system cannot start worker processes in the block."""
    try:
        yield
    except OSError as error:
        raise ValueError(
            f"--workers {workers}: the processes cannot be started ({error.strerror}); they need a writable /dev/shm "
            "and about ten open files each (ulimit -n): pass --workers 1"
        ) from None


def process_count(text: str) -> int:
    """Read a number of processes, from 1 to `most_processes()` (an argparse type)."""
    value = positive_int(text)
    if value > most_processes():
        raise argparse.ArgumentTypeError(
            f"{text!r} is above {most_processes()}, the most processes that help on this machine with "
            f"{counted(available_cores(), 'core')}"
        )
    return value


def positive_seconds(text: str) -> float:
    """Read a number of seconds above 0 (an argparse type)."""
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value < float("inf"):
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of seconds above 0")
    return value


_UNITS = {
    "": 1,
    "kb": 10**3,
    "mb": 10**6,
    "gb": 10**9,
    "kib": 1 << 10,
    "mib": 1 << 20,
    "gib": 1 << 30,
}


def byte_count(text: str) -> int:
    """Read a number of bytes from 1 on, such as `65536`, `64MiB` or `1GB` (an argparse type)."""
    match = re.fullmatch(r"([0-9][0-9_,]*) ?([kmg]i?b|)", text.strip().lower())
    value = _whole_number(match[1]) * _UNITS[match[2]] if match else 0
    if value < 1:
        raise argparse.ArgumentTypeError(
            f"{text!r} is not a number of bytes; give one such as 65536, 64MiB or 1GB"
        )
    return value


def parse_depth(text: str) -> Optional[int]:
    """Read a packing depth: a number of at least 1, or `unlimited`, which is None (an argparse type)."""
    if text == "unlimited":
        return None
    try:
        return positive_int(text)
    except argparse.ArgumentTypeError:
        raise argparse.ArgumentTypeError(
            f"{text!r} is not a packing depth; give a number of at least 1, or 'unlimited'"
        ) from None


def depth_text(max_sequences_per_pack: Optional[int]) -> str:
    """Return a packing depth as users type it; None is `unlimited`."""
    return "unlimited" if max_sequences_per_pack is None else str(max_sequences_per_pack)


_PICTURES = (".png", ".pdf", ".svg")
# Files that only show something: a command may replace its own earlier output.
_REPLACEABLE = (*_PICTURES, ".html")


def check_output(
    option: str,
    file: Union[str, Path],
    *,
    reads: Sequence[Union[str, Path]] = (),
    endings: Sequence[str] = (),
) -> None:
    """Raise ValueError if a file cannot be written; meant for the time before the work, which may take long.

    Args:
        option: The option that names the file, for the message.
        file: The file to write.
        reads: Files and directories that the command reads, which it must not overwrite.
        endings: The suffixes that the file may have; all, if empty.
    """
    path = Path(file)
    if not path.parent.is_dir():
        raise ValueError(f"{option} {file}: there is no directory {path.parent}; create it first")
    if path.is_dir():
        raise ValueError(f"{option} {file}: this is a directory; name a file in it")

    suffix = path.suffix.lower()
    if path.exists():
        if any(os.path.exists(read) and os.path.samefile(read, path) for read in reads):
            raise ValueError(f"{option} {file}: the command reads this file; name another one")
        directories = {Path(read).resolve() for read in reads if Path(read).is_dir()}
        if suffix not in _REPLACEABLE and directories & set(path.resolve().parents):
            raise ValueError(
                f"{option} {file}: the file exists in a directory that the command reads; name another one"
            )

    if endings and suffix not in endings:
        raise ValueError(
            f"{option} {file}: the name must end in {', '.join(endings[:-1])} or {endings[-1]}"
        )


def check_picture(
    option: str, file: Union[str, Path], *, reads: Sequence[Union[str, Path]] = ()
) -> None:
    """Raise ValueError if no picture can be written to this file."""
    check_output(option, file, reads=reads, endings=_PICTURES)
    require(option, "matplotlib")


def check_page(
    option: str, file: Union[str, Path], *, reads: Sequence[Union[str, Path]] = ()
) -> None:
    """Raise ValueError if no HTML page can be written to this file."""
    check_output(option, file, reads=reads)
    require(option, "matplotlib", "jinja2")
