"""Options of the commands that train, and what these do with them before torch is loaded.

`pretrain` and `finetune` are one command with two kinds of configuration.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Collection, List, Optional, Sequence

from ipu_packed_bert.data.data_sets import described
from ipu_packed_bert.data.factors import parse_factor
from ipu_packed_bert.engine import instances
from ipu_packed_bert.processes.ranks import Processes, joined
from ipu_packed_bert.run_files.folder import CONFIG
from ipu_packed_bert.settings.config import Config
from ipu_packed_bert.settings.loading import load_config
from ipu_packed_bert.settings.shipped import config_file, refuse_no_run
from ipu_packed_bert.settings.user_task import trust_what_was_named
from ipu_packed_bert.tasks.files import located
from pack_data.cli.command import ArgumentParser, typed

if TYPE_CHECKING:
    from ipu_packed_bert.planning.plan import RunPlan

_ABOUT = {
    "pretrain": "Pre-train a packed BERT: python run_pretraining.py --config configs/packed_phase2_pod16.yml",
    "finetune": "Fine-tune a BERT on packs: packed-bert finetune --config configs/finetune_squad_packed.yml",
}


def add_settings(parser: argparse.ArgumentParser, help: str) -> None:
    """Add --engine and --set, which override settings; ``help`` is that of --set."""
    _add_setting(parser, "--engine", "KIND", "engine.kind", "where to run: auto, ipu or host")
    parser.add_argument(
        "--set", action="append", default=[], metavar="a.b=c", dest="overrides", help=help
    )


def add_trust(parser: argparse.ArgumentParser) -> None:
    """Add --trust-task."""
    parser.add_argument(
        "--trust-task",
        action="append",
        default=[],
        metavar="FILE.py",
        help="a task.name=FILE.py:CLASS of the configuration or run may run this file, now and, unchanged, later; --set"
        " task.name=FILE.py:CLASS says the same",
    )


def parse(command: str, argv: Optional[Sequence[str]]) -> argparse.Namespace:
    """Return the options of `packed-bert pretrain` or `finetune`; raise ValueError if they contradict each other."""
    parser = _parser(command)
    args = parser.parse_args(argv)
    args.command = command
    if args.resume and args.out:
        parser.error("--out names a new run; --resume continues in the run's own folder")
    if args.resume and args.whole:
        parser.error("--whole begins a new run; --resume continues a run as it was begun")
    if args.resume and args.start_from:
        parser.error("--start-from begins a new run; --resume continues with the run's own weights")
    if args.resume_if_there and not (args.config and args.out):
        parser.error(
            "--resume-if-there needs --config, to begin with, and --out, the folder that may hold the run"
        )
    if args.allow_change and not args.resume:
        parser.error("--allow-change goes with --resume; a new run changes nothing")
    return args


def train(command: str, argv: Optional[Sequence[str]] = None) -> int:
    """Run `packed-bert pretrain` or `finetune`; return the exit status."""
    with joined(instances=instances) as processes:
        return train_with(parse(command, argv), processes)


def train_with(args: argparse.Namespace, processes: Processes) -> int:
    """Do what the options say, in processes that have met; return the exit status."""
    pretrains = args.command == "pretrain"
    if not pretrains:
        trust_what_was_named(args.trust_task, args.overrides)
    processes.refuse_differences({"the command line": " ".join(sys.argv[1:])})
    if _resumes_there(args, processes):
        settled = _settled(args)
        args.overrides = [
            each for each in args.overrides if each.partition("=")[0].strip() not in settled
        ]
        args.start_from = None
    if args.resume or args.start_from:
        processes.of_first(_refuse_no_runs, args)
    config = processes.of_first(_load, args) if args.resume else _load(args)
    if args.show_config:
        print((described(config)[0] if pretrains else config).annotated(), end="")
        return 0
    if args.plan:
        from ipu_packed_bert.planning.printing import print_plan

        return print_plan(_plan(config, args), _options_without_plan(args))

    # torch loads from here on: a wrong configuration is refused, and a plan printed, without it.
    from ipu_packed_bert.training.run import run

    if pretrains:
        from ipu_packed_bert.training.pretraining import PacksRun

        whole = dataclasses.replace(config, without_ipus=()) if args.whole else config
        return run(PacksRun, whole, args, processes)
    from ipu_packed_bert.training.examples import ExamplesRun

    # With full names, so that the run can be resumed without --data-dir.
    return run(ExamplesRun, located(config, args.data_dir), args, processes)


def _parser(command: str) -> ArgumentParser:
    pretrains = command == "pretrain"
    parser = ArgumentParser(prog=typed(command), description=_ABOUT[command])
    parser.set_defaults(
        start_from=None, data_dir=None, whole=False, trust_task=[]
    )  # not every command has these
    which = parser.add_mutually_exclusive_group(required=True)
    example = "packed_phase2_pod16" if pretrains else "finetune_squad_packed"
    which.add_argument(
        "--config",
        metavar="FILE|NAME",
        help=f"a run's settings: a file, or the name of one that comes with the program, such as {example}",
    )
    finished = "" if pretrains else "; a finished one is evaluated again"
    which.add_argument(
        "--resume",
        metavar="RUN",
        help=f"continue the run in this folder from its newest checkpoint{finished}",
    )
    if pretrains:
        parser.add_argument(
            "--start-from",
            metavar="RUN",
            help="a new run begins with the weights of that run's newest checkpoint (phase 2 after phase 1)",
        )
        _add_setting(parser, "--data", "DIR", "data.directory", "the packed data set")
        _add_setting(parser, "--steps", "N", "run.steps", "weight updates of the whole run")
        parser.add_argument(
            "--whole",
            action="store_true",
            help="where there are no IPUs, run the configuration in full, without its without_ipus block",
        )
        _add_setting(
            parser,
            "--track",
            "NAME",
            "run.track",
            "a service that shows the curves, too: wandb or mlflow",
        )
        parser.rare("--start-from", "--track", "--whole")
    else:
        parser.add_argument(
            "--data-dir",
            type=Path,
            metavar="DIR",
            help="folder in which the data files of the configuration lie",
        )
        add_trust(parser)
        parser.rare("--trust-task")
    setting = "batch.micro_batch=4" if pretrains else "data.packer=none"
    add_settings(parser, f"override one setting, any number of times: --set {setting}")
    parser.add_argument("--out", metavar="RUN", help="folder of a new run; default runs/NAME-TIME")
    parser.add_argument(
        "--resume-if-there",
        action="store_true",
        help="with --config and --out: go on with the run in that folder, if it has saved a checkpoint; the same line"
        " then starts a run and restarts it (torchrun --max-restarts, a queue that runs a job again)",
    )
    _add_setting(
        parser,
        "--compare-unpacked",
        "N",
        "run.compare_unpacked",
        "at the end of the run, N updates beside the same sequences unpacked: speed, loss and gradients",
    )
    parser.add_argument(
        "--allow-change",
        action="append",
        default=[],
        metavar="KEY[,KEY]",
        help="with --resume: settings that may differ from the checkpoint's although that changes the experiment",
    )
    parser.add_argument(
        "--plan",
        action="store_true",
        help="print what would run and where, without a device, and stop",
    )
    parser.add_argument(
        "--packing-factor",
        type=parse_factor,
        metavar="P",
        help="sequences in a row for --plan, while the data are not there",
    )
    parser.add_argument(
        "--show-config",
        action="store_true",
        help="print every setting and where it comes from, and stop",
    )
    parser.rare("--resume-if-there", "--compare-unpacked", "--allow-change", "--packing-factor")
    return parser


def _add_setting(
    parser: argparse.ArgumentParser, option: str, metavar: str, key: str, help: str
) -> None:
    """Add an option that is short for --set of one setting; the last one on the line wins."""

    def override(value: str) -> str:
        return f"{key}={json.dumps(value) if key == 'data.directory' else value}"

    parser.add_argument(
        option,
        action="append",
        default=[],
        dest="overrides",
        type=override,
        metavar=metavar,
        help=f"{help}; as --set {key}=...",
    )


def _load(args: argparse.Namespace) -> Config:
    """Return the configuration of a new run, or that of a resumed one, which states the schedule's length."""
    path = Path(args.resume, CONFIG) if args.resume else config_file(args.config)
    return load_config(path, args.overrides, command=args.command, stored=bool(args.resume))


def _plan(config: Config, args: argparse.Namespace) -> RunPlan:
    from ipu_packed_bert.planning.plan import plan

    manifest = None
    if args.command == "pretrain":
        config, manifest = described(config)
    return plan(config, manifest, data_dir=args.data_dir, packing_factor=args.packing_factor)


def _settled(args: argparse.Namespace) -> Collection[str]:
    """Return the settings that a run decided when it began: options of --resume-if-there do not change them."""
    if args.command == "pretrain":
        return [
            key for key, _ in load_config(config_file(args.config), command="pretrain").without_ipus
        ]
    return ["batch.micro_batch"]  # made to divide an update evenly


def _options_without_plan(args: argparse.Namespace) -> List[str]:
    """Return the options that begin or resume the run that --plan describes."""
    options = ["--resume", args.resume] if args.resume else ["--config", args.config]
    for option in ("start_from", "data_dir", "out"):
        if getattr(args, option):
            options += [f"--{option.replace('_', '-')}", str(getattr(args, option))]
    options += ["--resume-if-there"] * args.resume_if_there
    for option, values in (("--set", args.overrides), ("--allow-change", args.allow_change)):
        options += [word for value in values for word in (option, value)]
    return options


def _resumes_there(args: argparse.Namespace, processes: Processes) -> bool:
    """Return True if --resume-if-there finds a run to resume; the options then are those of --resume."""
    if not args.resume_if_there:
        return False
    from ipu_packed_bert.training.run_folder import resumes

    # Rank 0 alone reads and writes run folders: the others may be on machines that have none.
    if not processes.of_first(resumes, args.out):
        return False
    args.resume, args.out = args.out, None
    return True


def _refuse_no_runs(args: argparse.Namespace) -> None:
    for option, folder in (("--resume", args.resume), ("--start-from", args.start_from)):
        if folder:
            refuse_no_run(option, folder)
