"""The parser of every command line, and the words that start this program from a shell."""

from __future__ import annotations

import argparse
import difflib
import os
import shlex
import shutil
import sys
import textwrap
from pathlib import Path
from typing import Any, Callable, List, NoReturn, Sequence

from pack_data.reading.words import settings_by_meaning

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


def _is_rare(action: argparse.Action) -> bool:
    """Return True if only --help-all shows the option."""
    return getattr(action, "is_rare", False)


class ArgumentParser(argparse.ArgumentParser):
    """An argument parser that raises ValueError, so that `run_main` prints its errors like every other error.

    --help prints the first paragraph of the description and the common options; --help-all prints everything.
    """

    def __init__(self, **options: Any) -> None:
        self._arguments: Sequence[str] = ()
        self.accepts: Callable[[str], bool] = bool  # of --set: True for a setting of this command
        name = str(options.get("prog", "")).rpartition("python -m pack_data.")[2]
        if name and sys.argv[1:2] == [name]:
            # The command runs as `packed-bert NAME`.
            options["prog"] = typed(name)
        super().__init__(**{"formatter_class": argparse.RawDescriptionHelpFormatter, **options})
        if self.add_help:
            hidden = argparse.SUPPRESS
            self.add_argument("--help-all", nargs=0, action=_HelpAll, default=hidden, help=hidden)

    def rare(self, *names: str) -> None:
        """Show these options in --help-all only."""
        for name in names:
            self._option_string_actions[name].is_rare = True  # type: ignore[attr-defined]

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

        if any(map(_is_rare, self._actions)):
            formatter.add_text(f"more options: {self.prog} --help-all")
        elif details or self.epilog:
            formatter.add_text(f"more: {self.prog} --help-all")
        return formatter.format_help()

    def _common(self, actions: Sequence[argparse.Action]) -> List[argparse.Action]:
        return [action for action in actions if not _is_rare(action)]

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
