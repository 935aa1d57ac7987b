"""What every command line of this project shares: errors in one line, types of options, progress bars."""

from __future__ import annotations

import argparse
import difflib
import os
import re
import shlex
import sys
import textwrap
from pathlib import Path
from typing import Any, Callable, List, Mapping, NoReturn, Optional, Sequence, Set, Union

from pack_data.reading.packages import package_of, require


class Problems(ValueError):
    """Several problems in one error, a line each: `run_main` keeps the lines, and makes one line of any other error."""


class NotFinite(ArithmeticError):
    """A training run has a loss or weights that are infinite or no numbers: exit status 3."""


_SCRIPT = "run_pretraining.py"  # of a checkout; packed-bert pretrain


def typed(command: str) -> str:
    """What to type for a command of packed-bert, in the form in which the running one was typed."""
    started = Path(sys.argv[0])
    if started.stem == "packed-bert":
        return f"packed-bert {command}"
    if command == "pretrain" and started.parts[-2:] != ("ipu_packed_bert", "__main__.py"):
        return f"python {shlex.quote(sys.argv[0] if started.name == _SCRIPT else _SCRIPT)}"
    return f"python -m ipu_packed_bert {command}"


class _HelpAll(argparse.Action):
    def __call__(self, parser: Any, *_: Any) -> None:
        print(parser.format_help_all(), end="")
        parser.exit()


class ArgumentParser(argparse.ArgumentParser):
    """An argument parser whose complaints are ValueErrors, so that `run_main` prints them like every other error.

    --help prints the first paragraph of the description and the options that are not rare, --help-all everything.
    """

    def __init__(self, **options: Any) -> None:
        self._given: Sequence[str] = ()
        self._rare: Set[argparse.Action] = set()
        name = str(options.get("prog", "")).rpartition("python -m pack_data.")[2]
        if name and sys.argv[1:2] == [name]:  # as packed-bert NAME
            options["prog"] = typed(name)
        super().__init__(**{"formatter_class": argparse.RawDescriptionHelpFormatter, **options})
        if self.add_help:
            self.add_argument("--help-all", nargs=0, action=_HelpAll, help=argparse.SUPPRESS)

    def rare(self, *names: str) -> None:
        """These options stand in --help-all alone."""
        self._rare |= {self._option_string_actions[name] for name in names}

    def format_help_all(self) -> str:
        """What --help-all prints."""
        return super().format_help()

    def format_help(self) -> str:
        first, _, rest = (self.description or "").partition("\n\n")
        formatter = self._get_formatter()
        formatter.add_usage(
            self.usage, [each for each in self._actions if each not in self._rare], self._mutually_exclusive_groups
        )
        formatter.add_text(textwrap.fill(" ".join(first.split()), formatter._width, break_on_hyphens=False))
        for group in self._action_groups:
            formatter.start_section(group.title)
            formatter.add_arguments([each for each in group._group_actions if each not in self._rare])
            formatter.end_section()
        if self._rare or rest or self.epilog:
            formatter.add_text(f"more{' options' * bool(self._rare)}: {self.prog} --help-all")
        return formatter.format_help()

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        self._given = [str(each) for each in (sys.argv[1:] if args is None else args)]
        self._refuse_empty()
        return super().parse_known_args(args, namespace)

    def error(self, message: str) -> NoReturn:
        raise ValueError(f"{message}{self._misspelt()} (try {self.prog} --help)")

    def _refuse_empty(self) -> None:
        """An empty path would be the folder that one is in: a variable of the shell that is not set writes that."""
        for before, given in zip(["", *self._given], self._given):
            name, equals, value = given.partition("=")
            if given == "--":
                break
            if not given or (given.startswith("--") and equals and not value):
                option = name or (before if before.startswith("-") else "an argument")
                self.error(f"{option}: is empty; give it a value, or leave it out")

    def _misspelt(self) -> str:
        """The first option given that is none but nearly one: argparse names what is missing before what is unknown."""
        known = [each for each in self._option_string_actions if each.startswith("--")]
        for given in self._given:
            name = given.split("=")[0]
            if name == "--":
                break
            if name.startswith("--") and not any(each.startswith(name) for each in known):
                near = difflib.get_close_matches(name, known, n=1, cutoff=0.75)
                if near:
                    return f"; {name} is no option, did you mean {near[0]}?"
        return ""


# What moves the cursor, colours or reorders what stands on a terminal: C0 but tab and end of line, DEL, C1, Unicode's
# ends of lines and changes of direction. The name of a file may hold all of them.
_CONTROLS = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u2028-\u202e\u2066-\u2069]")


def _written_out(text: str) -> str:
    """A text with its control characters as Python writes them."""
    return _CONTROLS.sub(lambda found: ascii(found[0])[1:-1], text)


class _Terminal:
    """A terminal that gets no control characters; `bare` is the one for bars, which move the cursor."""

    def __init__(self, bare: Any) -> None:
        self.bare = bare

    def write(self, text: str) -> int:
        return self.bare.write(_written_out(text))

    def __getattr__(self, name: str) -> Any:
        return getattr(self.bare, name)


def bare_stderr() -> Any:
    """Standard error for bars."""
    return getattr(sys.stderr, "bare", sys.stderr)


def run_main(main: Callable[[Optional[Sequence[str]]], Optional[int]], argv: Optional[Sequence[str]] = None) -> int:
    """Runs a command and returns its exit status; what ends it early is one line on stderr (`Problems`: a line each).

    0 done, 1 a verdict (the command's own), 2 the user's mistake, 3 training that is no longer finite, 128 + n ended by
    signal n. No control character comes to a terminal, or into a message.
    """
    streams = sys.stdout, sys.stderr
    sys.stdout, sys.stderr = (_Terminal(each) if each and each.isatty() else each for each in streams)
    try:
        return _status(main, argv)
    finally:
        sys.stdout, sys.stderr = streams


def _status(main: Callable[[Optional[Sequence[str]]], Optional[int]], argv: Optional[Sequence[str]]) -> int:
    try:
        status = main(argv) or 0
        if sys.stdout is not None:
            sys.stdout.flush()
        return status
    except BrokenPipeError:  # the reader (`| head`) has gone; Python would complain once more while it shuts down
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141
    except (ValueError, OSError) as error:
        text = str(error)
        if isinstance(error, OSError) and error.filename and error.strerror:  # the system's alone names no way out
            text = f"{error.filename}: {error.strerror}; choose another file or folder, or mend what is in the way"
        lines = map(_written_out, text.splitlines())
        print("error: " + ("\n" if isinstance(error, Problems) else " ").join(lines), file=sys.stderr)
        return 2
    except (MemoryError, RuntimeError) as error:
        # torch's allocators say it with a RuntimeError.
        words = " ".join(str(error).split())
        if not isinstance(error, MemoryError) and "allocate memory" not in words and "out of memory" not in words:
            raise
        print(f"error: not enough memory{words and f' ({words[:200]})'}; choose smaller sizes", file=sys.stderr)
        return 2
    except NotFinite as error:
        print(f"error: {error}", file=sys.stderr)
        return 3
    except ModuleNotFoundError as error:  # torch, where only the packers' packages are installed
        package = package_of(error.name)
        if package is None:
            raise
        print(f"error: this command needs the package {package}: pip install {package}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130


def list_commands(package: str, commands: Mapping[str, str], argv: Optional[Sequence[str]] = None) -> int:
    """The main of `python -m PACKAGE`: prints the package's commands, a line each."""
    width = max(map(len, commands))
    lines = [f"python -m {package}.NAME --help says more about each:", ""]
    lines += [f"  {command:<{width}}  {summary}" for command, summary in commands.items()]
    arguments = sys.argv[1:] if argv is None else argv
    given = [each for each in arguments if each not in ("-h", "--help")]
    if given:
        way_out = (
            f"type python -m {package}.{' '.join(given)}"
            if given[0] in commands
            else f"the commands are {', '.join(commands)}"
        )
        raise ValueError(f"{given[0]}: python -m {package} only lists its commands; {way_out}")
    print("\n".join(lines))
    return 0


def _whole_number(text: str) -> int:
    """-1 for what is none. Signs between thousands alone: `2,4`, meant as two numbers, is not read as 24."""
    number = re.fullmatch("[0-9]{1,18}|[0-9]{1,3}(,[0-9]{3}){1,5}|[0-9]{1,3}(_[0-9]{3}){1,5}", text.strip())
    return int(number[0].replace(",", "")) if number else -1


def _at_least(least: int) -> Callable[[str], int]:
    """An argparse type: a whole number of at least so much; `1_000` and `1,000` are read as well."""

    def number(text: str) -> int:
        value = _whole_number(text)
        if value < least:
            raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of at least {least}")
        return value

    return number


positive_int, count_from_zero = _at_least(1), _at_least(0)


def positive_ints(text: str) -> List[int]:
    """An argparse type: numbers of at least 1, separated by commas."""
    return [positive_int(part) for part in text.split(",")]


def available_cores() -> int:
    """Cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def most_processes() -> int:
    """More than these gain nothing on this machine: each takes its own memory and waits for the others."""
    return max(64, 4 * available_cores())


def process_count(text: str) -> int:
    """An argparse type: processes of this machine, at least 1 and no more than can be of use."""
    value = positive_int(text)
    if value > most_processes():
        raise argparse.ArgumentTypeError(
            f"{text!r} is more than the {most_processes()} processes that can be of use here; this machine has "
            f"{counted(available_cores(), 'core')}"
        )
    return value


def positive_seconds(text: str) -> float:
    """An argparse type: seconds, a number above 0."""
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value < float("inf"):
        raise argparse.ArgumentTypeError(f"{text!r} is no number of seconds above 0")
    return value


_UNITS = {"": 1, "kb": 10**3, "mb": 10**6, "gb": 10**9, "kib": 1 << 10, "mib": 1 << 20, "gib": 1 << 30}


def byte_count(text: str) -> int:
    """An argparse type: bytes, as `65536`, `64MiB` or `1GB`; at least 1."""
    parts = re.fullmatch(r"([0-9][0-9_,]*) ?([kmg]i?b|)", text.strip().lower())
    value = _whole_number(parts[1]) * _UNITS[parts[2]] if parts else 0
    if value < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is no number of bytes; give one such as 65536, 64MiB or 1GB")
    return value


def parse_depth(text: str) -> Optional[int]:
    """An argparse type for a packing depth: a number of at least 1, or `unlimited` (None)."""
    if text == "unlimited":
        return None
    try:
        return positive_int(text)
    except argparse.ArgumentTypeError:
        raise argparse.ArgumentTypeError(
            f"{text!r} is no packing depth: give a number of at least 1, or 'unlimited'"
        ) from None


def depth_text(max_sequences_per_pack: Optional[int]) -> str:
    return "unlimited" if max_sequences_per_pack is None else str(max_sequences_per_pack)


_PICTURES = (".png", ".pdf", ".svg")
_SHOWS = (*_PICTURES, ".html")  # what only shows something, and may be written again where it was


def check_output(
    option: str, file: Union[str, Path], *, reads: Sequence[Union[str, Path]] = (), endings: Sequence[str] = ()
) -> None:
    """Raises ValueError where no file of this name can be written: before the work, which may take long.

    reads: what the command reads, which is not to be written over. endings: what the name has to end in, if anything.
    """
    if not Path(file).parent.is_dir():
        raise ValueError(f"{option} {file}: there is no folder {Path(file).parent}; make it first")
    if Path(file).is_dir():
        raise ValueError(f"{option} {file}: is a folder; name a file in it")
    if any(os.path.exists(read) and os.path.exists(file) and os.path.samefile(read, file) for read in reads):
        raise ValueError(f"{option} {file}: is what is to be read; name another file")
    folders = {Path(read).resolve() for read in reads if Path(read).is_dir()}
    if os.path.exists(file) and Path(file).suffix.lower() not in _SHOWS and folders & set(Path(file).resolve().parents):
        raise ValueError(f"{option} {file}: is there, in a folder that is to be read; name another file")
    if endings and Path(file).suffix.lower() not in endings:
        raise ValueError(f"{option} {file}: must end in {', '.join(endings[:-1])} or {endings[-1]}")


def check_picture(option: str, file: Union[str, Path], *, reads: Sequence[Union[str, Path]] = ()) -> None:
    """Raises ValueError where no picture can be drawn into this file."""
    check_output(option, file, reads=reads, endings=_PICTURES)
    require(option, "matplotlib")


def check_page(option: str, file: Union[str, Path], *, reads: Sequence[Union[str, Path]] = ()) -> None:
    """Raises ValueError where no page can be written into this file."""
    check_output(option, file, reads=reads)
    require(option, "matplotlib", "jinja2")


def check_folder(option: str, folder: Union[str, Path], what: str) -> None:
    """Raises ValueError where no folder of this name can be made, because a file is in the way. what: "a run", say."""
    for place in (Path(folder), *Path(folder).parents):
        if place.exists() and not place.is_dir():
            raise ValueError(f"{option} {folder}: {place} is a file; {what} is a folder, choose another name")


def progress_bar(
    total: Optional[int], description: str, *, unit: str = " steps", done: int = 0, at_once: bool = False
) -> Any:
    """A bar of tqdm on stderr; where that is no terminal, a line every ten seconds. Nothing of what is quickly done.

    done: of the total, before; it says nothing about the speed. at_once: work of some seconds that counts nothing: its
    name stands on a terminal while it lasts.
    """
    from pack_data.cli.bars import DelayedBar

    file = bare_stderr()
    gone = file is None or getattr(file, "closed", False)
    terminal = not gone and file.isatty()
    bar = DelayedBar(
        total=total,
        initial=done,
        desc=_written_out(description),
        unit=unit,
        file=file,
        disable=gone,
        leave=False,
        terminal=terminal,
        mininterval=0.1 if terminal else 1.0,
    )
    if at_once and terminal:
        bar.announce()
    return bar


def counted(number: int, thing: str) -> str:
    """`1 shard`, `2 shards`."""
    return f"{number:,} {thing}" + ("" if number == 1 else "s")
