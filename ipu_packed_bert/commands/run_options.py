"""What every command that trains does with its options: which run to begin or to go on with, and where; their checks.

Loads no torch.
"""

from __future__ import annotations

import abc
import argparse
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Collection, Generic, List, Mapping, Optional, Sequence, Type, TypeVar

from ipu_packed_bert.data.factors import parse_factor
from ipu_packed_bert.engine import instances
from ipu_packed_bert.processes.ranks import Processes, joined
from ipu_packed_bert.run_files.folder import CONFIG
from ipu_packed_bert.settings.schema import Configuration
from ipu_packed_bert.settings.shipped import config_file, refuse_no_run
from pack_data.cli.command import ArgumentParser

if TYPE_CHECKING:
    from ipu_packed_bert.planning.plan import RunPlan
    from ipu_packed_bert.training.run import Prepared

C = TypeVar("C", bound=Configuration)

# Options that are short for a --set of this setting.
_SHORT_FOR = {"engine": "engine.kind", "compare_unpacked": "run.compare_unpacked"}


def add_which_run(parser: argparse.ArgumentParser, *, named: str, finished: str = "") -> None:
    """--config and --resume. named: an example of a configuration. finished: what becomes of a run that is finished."""
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument(
        "--config",
        metavar="FILE|NAME",
        help=f"a run's settings: a file, or the name of one that comes with the program, such as {named}",
    )
    what.add_argument(
        "--resume", metavar="RUN", help=f"continue the run in this folder from its newest checkpoint{finished}"
    )


def add_settings(parser: argparse.ArgumentParser, text: str) -> None:
    """--engine and --set, which override settings; text: the help of --set."""
    parser.add_argument("--engine", choices=("auto", "ipu", "host"), help="where to run; as --set engine.kind=...")
    parser.add_argument("--set", action="append", default=[], metavar="a.b=c", dest="overrides", help=text)


def add_trust(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--trust-task",
        action="append",
        default=[],
        metavar="FILE.py",
        help="a task.name=FILE.py:CLASS of the configuration or run may run this file, now and, unchanged, later; --set"
        " task.name=FILE.py:CLASS says the same",
    )


def add_run_options(parser: ArgumentParser, *, setting: str) -> None:
    """The others that every task has. setting: an example of --set."""
    parser.set_defaults(start_from=None, data_dir=None, whole=False)  # not every command has these
    add_settings(parser, f"override one setting, any number of times: --set {setting}")
    parser.add_argument("--out", metavar="RUN", help="folder of a new run; default runs/NAME-TIME")
    parser.add_argument(
        "--resume-if-there",
        action="store_true",
        help="with --config and --out: go on with the run in that folder, if it has saved a checkpoint; the same line"
        " then starts a run and restarts it (torchrun --max-restarts, a queue that runs a job again)",
    )
    parser.add_argument(
        "--compare-unpacked",
        type=int,
        metavar="N",
        help="at the end of the run, N updates beside the same sequences unpacked: speed, loss and gradients; as --set"
        " run.compare_unpacked=...",
    )
    parser.add_argument(
        "--allow-change",
        action="append",
        default=[],
        metavar="KEY[,KEY]",
        help="with --resume: settings that may differ from the checkpoint's although that changes the experiment",
    )
    parser.add_argument(
        "--plan", action="store_true", help="print what would run and where, without a device, and stop"
    )
    parser.add_argument(
        "--packing-factor",
        type=parse_factor,
        metavar="P",
        help="sequences in a row for --plan, while the data are not there",
    )
    parser.add_argument(
        "--show-config", action="store_true", help="print every setting and where it comes from, and stop"
    )
    parser.rare("--resume-if-there", "--compare-unpacked", "--allow-change", "--packing-factor")


def parse_run(
    parser: argparse.ArgumentParser, argv: Optional[Sequence[str]], short_for: Optional[Mapping[str, str]] = None
) -> argparse.Namespace:
    """The options, checked. short_for: the command's own options that are short for a --set."""
    args = parser.parse_args(argv)
    if args.resume and args.out:
        parser.error("--out names a new run; --resume continues in the run's own folder")
    if args.resume_if_there and not (args.config and args.out):
        parser.error("--resume-if-there needs --config, to begin with, and --out, the folder that may hold the run")
    if args.allow_change and not args.resume:
        parser.error("--allow-change goes with --resume; a new run changes nothing")
    for option, key in {**_SHORT_FOR, **(short_for or {})}.items():
        value = getattr(args, option)
        if value is not None:
            args.overrides.append(f"{key}={json.dumps(value)}")  # JSON is YAML, with texts in quotes
    return args


def _options_without_plan(args: argparse.Namespace) -> List[str]:
    """The options that begin, or go on with, the run that --plan tells of."""
    options = ["--resume", args.resume] if args.resume else ["--config", args.config]
    for option in ("start_from", "data_dir", "out"):
        if getattr(args, option):
            options += [f"--{option.replace('_', '-')}", str(getattr(args, option))]
    options += ["--resume-if-there"] * args.resume_if_there
    for option, values in (("--set", args.overrides), ("--allow-change", args.allow_change)):
        options += [word for value in values for word in (option, value)]
    return options


def _resumes_there(args: argparse.Namespace, processes: Processes) -> bool:
    """Whether --resume-if-there found a run to go on with; the options then are as --resume gives them."""
    if not args.resume_if_there:
        return False
    from ipu_packed_bert.training.run_folder import resumes

    # Rank 0 alone reads and writes run folders: the others may be on machines that have none.
    if not processes.of_first(resumes, args.out):
        return False
    args.resume, args.out = args.out, None
    return True


class Training(abc.ABC, Generic[C]):
    """A command that trains."""

    @abc.abstractmethod
    def parse(self, argv: Optional[Sequence[str]]) -> argparse.Namespace:
        """The options, checked."""

    @abc.abstractmethod
    def load(self, path: Path, overrides: Sequence[str], *, stored: bool) -> C:
        """The configuration. stored: a run has written the file."""

    def _settled(self, args: argparse.Namespace) -> Collection[str]:
        """Settings that a run that --resume-if-there found has decided when it began, whatever --set says."""
        return ()

    def _described(self, config: C) -> C:
        """The configuration with what its data say, where they are there."""
        return config

    @abc.abstractmethod
    def _plan(self, config: C, args: argparse.Namespace) -> RunPlan:
        """What the configuration amounts to."""

    def _for_run(self, config: C, args: argparse.Namespace) -> C:
        """Return the configuration with what the command's own options say about a run."""
        return config

    @abc.abstractmethod
    def _kind(self) -> Type[Prepared[C]]:
        """What its run learns from; loads torch."""

    def main(self, argv: Optional[Sequence[str]] = None) -> int:
        with joined(instances=instances) as processes:
            return self.begun(self.parse(argv), processes)

    def begun(self, args: argparse.Namespace, processes: Processes) -> int:
        """Does what the options say; the exit status."""
        processes.refuse_differences({"the command line": " ".join(sys.argv[1:])})
        if _resumes_there(args, processes):
            settled = self._settled(args)
            args.overrides = [each for each in args.overrides if each.partition("=")[0].strip() not in settled]
            args.start_from = None
        if args.resume or args.start_from:
            processes.of_first(_refuse_no_runs, args)
        config = processes.of_first(self._resumed_config, args.resume, args.overrides) if args.resume else None
        if config is None:
            config = self.load(config_file(args.config), args.overrides, stored=False)
        if args.show_config:
            print(self._described(config).annotated(), end="")
            return 0
        if args.plan:
            from ipu_packed_bert.planning.plan import print_plan

            return print_plan(self._plan(config, args), _options_without_plan(args))
        # torch loads from here on: a wrong configuration is refused, and a plan printed, without it.
        from ipu_packed_bert.training.run import run

        return run(self._kind(), self._for_run(config, args), args, processes)

    def _resumed_config(self, folder: str, overrides: Sequence[str] = ()) -> C:
        """A run's configuration. It states the schedule's length, so that more steps do not change the next rate."""
        return self.load(Path(folder, CONFIG), overrides, stored=True)


def _refuse_no_runs(args: argparse.Namespace) -> None:
    for option, folder in (("--resume", args.resume), ("--start-from", args.start_from)):
        if folder:
            refuse_no_run(option, folder)
