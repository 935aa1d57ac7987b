"""Options of `pretrain`, `finetune` and `plan`, and the work that these do before torch is loaded.

`pretrain` and `finetune` are one command with two kinds of configuration; `plan` is `--plan` of either, and belongs to
`ipu_profiling`.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Callable, Collection, List, Optional, Sequence

from ipu_packed_bert.data.factors import parse_factor
from ipu_packed_bert.engine import instances, ipu_modules
from ipu_packed_bert.processes.ranks import Processes, joined
from ipu_packed_bert.run_files.folder import CONFIG
from ipu_packed_bert.run_files.new_run import refuse_a_run_in
from ipu_packed_bert.settings.config import Config, ConfigError
from ipu_packed_bert.settings.loading import load_config, task_name
from ipu_packed_bert.settings.schema import PRETRAIN, PRETRAINING
from ipu_packed_bert.settings.shipped import config_file, refuse_no_run
from ipu_packed_bert.settings.user_task import trust_what_was_named
from ipu_packed_bert.settings.yaml_files import load_yaml
from pack_data.cli.command import ArgumentParser, typed

Build = Callable[[Config], None]
# Configuration, options, processes, what builds a missing data set -> exit status.
Start = Callable[[Config, argparse.Namespace, Processes, Optional[Build]], int]

_ABOUT = {
    "pretrain": "Pre-train a packed BERT: python run_pretraining.py --config configs/packed_phase2_pod16.yml",
    "finetune": "Fine-tune a BERT on packs: packed-bert finetune --config configs/finetune_squad_packed.yml",
    "plan": """Print what a configuration would run and where, without a device, and whether it fits.

Takes the options of pretrain and finetune. Nothing is measured: memory is computed from the sizes of the network.

Exit status: 0 it fits or may fit; 1 it does not fit; 2 a usage error.""",
}
# Options of only one of the two commands.
_PRETRAINING_OPTIONS = ("start_from", "whole")
_FINE_TUNING_OPTIONS = ("data_dir", "trust_task")


def add_settings(parser: argparse.ArgumentParser, help: str) -> None:
    """Add --engine and --set, which override settings; ``help`` describes --set."""
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
        help="allow a configuration or run whose task.name is FILE.py:CLASS to run this file, now and later if it is"
        " unchanged; implied by --set task.name=FILE.py:CLASS",
    )


def parse(command: str, argv: Optional[Sequence[str]]) -> argparse.Namespace:
    """Parse the options of `packed-bert pretrain`, `finetune` or `plan`; raise ValueError if they are inconsistent.

    The result has the attribute ``command``: for `plan` the command of the configuration, with ``plan`` True.
    """
    parser = _parser(command)
    args = parser.parse_args(argv)
    args.command = command
    if command == "plan":
        args.plan = True
        args.command = _command_of(args)
        others = _FINE_TUNING_OPTIONS if args.command == "pretrain" else _PRETRAINING_OPTIONS
        for name in others:
            if getattr(args, name):
                option = f"--{name.replace('_', '-')}"
                parser.error(f"{option} does not apply to a {args.command} configuration")
    mistakes = (
        (
            args.resume and args.out,
            "--out names a new run; leave it out, --resume continues in the directory of the run",
        ),
        (
            args.resume and args.whole,
            "--whole applies to a new run; leave it out, --resume keeps the settings of the run",
        ),
        (
            args.resume and args.start_from,
            "--start-from begins a new run; leave it out, --resume has the weights of the run",
        ),
        (
            args.resume_if_there and not (args.config and args.out),
            "--resume-if-there needs --config, for a new run, and --out, the directory of the run",
        ),
        (
            args.allow_change and not args.resume,
            "--allow-change needs --resume; a new run has no settings to keep",
        ),
    )
    for is_wrong, message in mistakes:
        if is_wrong:
            parser.error(message)
    return args


def train(
    command: str,
    start: Start,
    argv: Optional[Sequence[str]] = None,
    build: Optional[Build] = None,
) -> int:
    """Run `packed-bert pretrain` or `finetune`; return the exit status.

    Args:
        command: `pretrain` or `finetune`.
        start: makes the run of a configuration.
        argv: the options, by default those of this process.
        build: builds the data set of a configuration of pre-training; without it, a missing one is refused.
    """
    with joined(instances=instances) as processes:
        args = parse(command, argv)
        if args.plan:
            raise ValueError("--plan: write it in full, or type packed-bert plan")
        processes.status = _train_with(start, args, processes, build)
        return processes.status


def configuration(args: argparse.Namespace, processes: Processes) -> Config:
    """Return the configuration that parsed options of connected processes begin or continue."""
    if args.command == "finetune":
        trust_what_was_named(args.trust_task, args.overrides)
    processes.refuse_differences({"the command line": " ".join(sys.argv[1:])})
    if _resumes_there(args, processes):
        fixed = _fixed_settings(args)
        args.overrides = [
            override
            for override in args.overrides
            if override.partition("=")[0].strip() not in fixed
        ]
        args.start_from = None
    if args.resume or args.start_from:
        processes.of_first(_refuse_no_runs, args)
    return processes.of_first(_load, args) if args.resume else _load(args)


def show_config(config: Config) -> int:
    """Print all settings, completed by the data set of pre-training, and their origins; return the exit status."""
    from ipu_packed_bert.data.data_sets import described

    completed = described(config)[0] if config.command == PRETRAIN else config
    print(completed.annotated(), end="")
    return 0


def _train_with(
    start: Start, args: argparse.Namespace, processes: Processes, build: Optional[Build] = None
) -> int:
    """Run a command with parsed options in connected processes; return the exit status."""
    config = configuration(args, processes)
    if args.show_config:
        return show_config(config)

    if not args.resume:
        processes.of_first(refuse_a_run_in, args.out)
    if config.engine.kind == "ipu":
        ipu_modules()
    return start(config, args, processes, build)


def _parser(command: str) -> ArgumentParser:
    parser = ArgumentParser(prog=typed(command), description=_ABOUT[command])
    # Not every command has these options.
    parser.set_defaults(start_from=None, data_dir=None, whole=False, trust_task=[])
    configuration = parser.add_mutually_exclusive_group(required=True)
    example = "finetune_squad_packed" if command == "finetune" else "packed_phase2_pod16"
    configuration.add_argument(
        "--config",
        metavar="FILE|NAME",
        help=f"settings of a new run: a file, or the name of a bundled configuration such as {example}",
    )
    finished = "; evaluate a finished one again" if command == "finetune" else ""
    configuration.add_argument(
        "--resume",
        metavar="RUN",
        help=f"continue the run in this directory from its newest checkpoint{finished}",
    )
    if command != "finetune":
        _add_pretraining_options(parser)
    if command != "pretrain":
        parser.add_argument(
            "--data-dir",
            type=Path,
            metavar="DIR",
            help="directory of the data files that the configuration names",
        )
        add_trust(parser)
        parser.rare("--trust-task")
    setting = "data.packer=none" if command == "finetune" else "batch.micro_batch=4"
    add_settings(parser, f"override a setting; may be repeated: --set {setting}")
    parser.add_argument(
        "--out", metavar="RUN", help="directory of a new run (default runs/NAME-TIME)"
    )
    parser.add_argument(
        "--resume-if-there",
        action="store_true",
        help="with --config and --out: resume the run in that directory if it has a checkpoint, else begin it, so that"
        " one command starts and restarts a run (torchrun --max-restarts, job queues)",
    )
    _add_setting(
        parser,
        "--compare-unpacked",
        "N",
        "run.compare_unpacked",
        "at the end of the run, compare N updates with unpacked ones: speed, loss and gradients",
    )
    parser.add_argument(
        "--allow-change",
        action="append",
        default=[],
        metavar="KEY[,KEY]",
        help="with --resume: settings that may differ from those of the checkpoint although they change the experiment",
    )
    parser.add_argument(
        "--plan",
        action="store_true",
        help="print what would run and where, and exit; needs no device",
    )
    parser.add_argument(
        "--packing-factor",
        type=parse_factor,
        metavar="P",
        help="sequences per pack for the plan; default: those of the data set, if it exists",
    )
    parser.add_argument(
        "--show-config",
        action="store_true",
        help="print all settings and their origins, and exit",
    )
    parser.rare("--resume-if-there", "--compare-unpacked", "--allow-change")
    if command == "plan":
        parser.rare("--plan", "--show-config", "--out", "--data", "--steps", "--data-dir")
    else:
        parser.rare("--packing-factor")
    return parser


def _add_pretraining_options(parser: ArgumentParser) -> None:
    parser.add_argument(
        "--start-from",
        metavar="RUN",
        help="begin with the weights of that run's newest checkpoint (phase 2 after phase 1)",
    )
    _add_setting(parser, "--data", "DIR", "data.directory", "the packed data set")
    _add_setting(parser, "--steps", "N", "run.steps", "weight updates of the whole run")
    parser.add_argument(
        "--whole",
        action="store_true",
        help="without IPUs, run the whole configuration and ignore its without_ipus block",
    )
    _add_setting(
        parser, "--track", "NAME", "run.track", "also show the curves in a service: wandb or mlflow"
    )
    parser.rare("--start-from", "--track", "--whole")


def _add_setting(
    parser: argparse.ArgumentParser, option: str, metavar: str, key: str, help: str
) -> None:
    """Add an option that is short for --set of one setting; the last occurrence of either takes effect."""

    def override(value: str) -> str:
        return f"{key}={json.dumps(value) if key == 'data.directory' else value}"

    parser.add_argument(
        option,
        action="append",
        default=[],
        dest="overrides",
        type=override,
        metavar=metavar,
        help=f"{help}; short for --set {key}=...",
    )


def _load(args: argparse.Namespace) -> Config:
    """Load the configuration of a new or resumed run."""
    return load_config(_path(args), args.overrides, command=args.command, stored=bool(args.resume))


def _path(args: argparse.Namespace) -> Path:
    return Path(args.resume, CONFIG) if args.resume else config_file(args.config)


def _command_of(args: argparse.Namespace) -> str:
    """Return the command of a configuration; it reports mistakes in the file."""
    try:
        name = task_name(load_yaml(_path(args)), args.overrides)
    except ConfigError:
        return "pretrain"
    return "pretrain" if name == PRETRAINING else "finetune"


def _fixed_settings(args: argparse.Namespace) -> Collection[str]:
    """Return the settings that a run determined when it began, which --resume-if-there ignores on the command line."""
    if args.command == "pretrain":
        config = load_config(config_file(args.config), command="pretrain")
        return [key for key, _ in config.without_ipus]
    return ["batch.micro_batch"]  # adjusted to divide an update evenly


def options_without_plan(args: argparse.Namespace) -> List[str]:
    """Return the options that begin or resume the planned run."""
    options = ["--resume", args.resume] if args.resume else ["--config", args.config]
    for name in ("start_from", "data_dir", "out"):
        value = getattr(args, name)
        if value:
            options += [f"--{name.replace('_', '-')}", str(value)]
    if args.resume_if_there:
        options.append("--resume-if-there")
    for override in args.overrides:
        options += ["--set", override]
    for keys in args.allow_change:
        options += ["--allow-change", keys]
    return options


def _resumes_there(args: argparse.Namespace, processes: Processes) -> bool:
    """Return True if --resume-if-there finds a run to resume; change the options to those of --resume."""
    if not args.resume_if_there:
        return False
    from ipu_packed_bert.training.run_folder import resumes

    # Only rank 0 reads and writes run directories: they need not exist on the machines of other ranks.
    if not processes.of_first(resumes, args.out):
        return False
    args.resume = args.out
    args.out = None
    return True


def _refuse_no_runs(args: argparse.Namespace) -> None:
    for option, folder in (("--resume", args.resume), ("--start-from", args.start_from)):
        if folder:
            refuse_no_run(option, folder)
