"""Options of `pretrain`, `finetune` and `plan`, and the work that these do before torch is loaded.

`pretrain` and `finetune` are one command with two kinds of configuration; `plan` is `--plan` of either, and belongs to
`ipu_profiling`.
"""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any, Callable, Collection, List, Optional, Sequence, Tuple

from ipu_packed_bert.engine import instances, ipu_modules
from ipu_packed_bert.processes.ranks import Processes, joined
from ipu_packed_bert.run_files.folder import CONFIG
from ipu_packed_bert.run_files.new_run import refuse_a_run_in
from ipu_packed_bert.settings.command_line import RunOptions
from ipu_packed_bert.settings.config import Config, ConfigError, settings_of
from ipu_packed_bert.settings.loading import load_config, task_name
from ipu_packed_bert.settings.reader import Override, parse_override
from ipu_packed_bert.settings.schema import FINETUNE, PRETRAIN, PRETRAINING
from ipu_packed_bert.settings.shipped import config_file, refuse_no_run
from ipu_packed_bert.settings.user_task import trust_what_was_named
from ipu_packed_bert.settings.yaml_files import load_yaml
from pack_data.cli.options import add_options
from pack_data.cli.parser import ArgumentParser, typed
from pack_data.reading.declare import settings_in, words_of

Build = Callable[[Config], None]
# Configuration, options, processes, what builds a missing data set -> exit status.
Start = Callable[[Config, RunOptions, Processes, Optional[Build]], int]

_ABOUT = {
    "pretrain": "Pre-train a packed BERT: python run_pretraining.py --config configs/packed_phase2_pod16.yml",
    "finetune": "Fine-tune a BERT on packs: packed-bert finetune --config configs/finetune_squad_packed.yml",
    "plan": """Print what a configuration would run and where, without a device, and whether it fits.

Takes the options of pretrain and finetune. Nothing is measured: memory is computed from the sizes of the network.

Exit status: 0 it fits or may fit; 1 it does not fit; 2 a usage error.""",
}


def add_settings(parser: argparse.ArgumentParser, help: str) -> None:
    """Add --engine and --set, which override settings; ``help`` describes --set."""
    _add_setting(parser, "engine.kind")
    parser.add_argument(
        "--set",
        type=parse_override,
        action="append",
        default=[],
        metavar="a.b=c",
        dest="overrides",
        help=help,
    )


def parse(command: str, argv: Optional[Sequence[str]]) -> RunOptions:
    """Parse the options of `packed-bert pretrain`, `finetune` or `plan`; raise ValueError if they are inconsistent.

    The result has the attribute ``command``: for `plan` the command of the configuration, with ``plan`` True.
    """
    parser = _parser(command)
    args = RunOptions(command, **vars(parser.parse_args(argv)))
    if command == "plan":
        args = replace(args, plan=True, command=_command_of(args))
        for name, setting in settings_in(RunOptions).items():
            if setting.of not in ("", args.command) and getattr(args, name):
                parser.error(f"{setting.flag} does not apply to a {args.command} configuration")
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


def configuration(args: RunOptions, processes: Processes) -> Tuple[RunOptions, Config]:
    """Return the settled options of connected processes, and the configuration that they begin or continue."""
    args = _settled(args, processes)
    if args.resume or args.start_from:
        processes.of_first(_refuse_no_runs, args)
    return args, processes.of_first(_load, args) if args.resume else _load(args)


def _settled(args: RunOptions, processes: Processes) -> RunOptions:
    """Return the options of connected processes; --resume-if-there that finds a run becomes --resume."""
    if args.command == "finetune":
        trust_what_was_named(args.trust_task, args.overrides)
    processes.refuse_differences({"the command line": " ".join(sys.argv[1:])})
    if not args.resume_if_there:
        return args
    from ipu_packed_bert.training.run_folder import resumes

    # Only rank 0 reads and writes run directories: they need not exist on the machines of other ranks.
    if not processes.of_first(resumes, args.out):
        return args
    fixed = _fixed_settings(args)
    overrides = [override for override in args.overrides if override.key not in fixed]
    return replace(args, resume=args.out, out=None, start_from=None, overrides=overrides)


def show_config(config: Config) -> int:
    """Print all settings, completed by the data set of pre-training, and their origins; return the exit status."""
    from ipu_packed_bert.data.data_sets import described

    completed = described(config)[0] if config.command == PRETRAIN else config
    print(completed.annotated(), end="")
    return 0


def _train_with(
    start: Start, args: RunOptions, processes: Processes, build: Optional[Build] = None
) -> int:
    """Run a command with parsed options in connected processes; return the exit status."""
    args, config = configuration(args, processes)
    if args.show_config:
        return show_config(config)

    if not args.resume:
        processes.of_first(refuse_a_run_in, args.out)
    if config.engine.kind == "ipu":
        ipu_modules()
    return start(config, args, processes, build)


def _parser(command: str) -> ArgumentParser:
    parser = ArgumentParser(prog=typed(command), description=_ABOUT[command])
    options = settings_in(RunOptions)
    configurations = [options.pop(name) for name in ("config", "resume")]
    add_options(parser.add_mutually_exclusive_group(required=True), configurations)
    if command == "plan":
        options["packing_factor"] = options["packing_factor"]._replace(rare=False)
    others = {"pretrain": FINETUNE, "finetune": PRETRAIN, "plan": None}[command]
    add_options(parser, [setting for setting in options.values() if setting.of != others])
    example = "data.packer=none" if command == "finetune" else "batch.micro_batch=4"
    add_settings(parser, f"override a setting; may be repeated: --set {example}")
    _add_setting(parser, "run.compare_unpacked")
    if command != "finetune":
        for key in ("data.directory", "run.steps", "run.track"):
            _add_setting(parser, key)
    if command == "plan":
        parser.rare("--plan", "--show-config", "--out", "--data", "--steps", "--data-dir")
    return parser


def _add_setting(parser: argparse.ArgumentParser, key: str) -> None:
    """Add the option of a setting, short for --set; the last occurrence of either takes effect."""
    setting = settings_of(PRETRAIN)[key]
    is_path = setting.kind is str and not setting.rule.choices

    def override(value: str) -> Override:
        return parse_override(f"{key}={json.dumps(value) if is_path else value}")

    action: Any = parser.add_argument(
        setting.flag,
        action="append",
        default=[],
        dest="overrides",
        type=override,
        metavar=setting.metavar,
        help=f"{setting.meaning}; short for --set {key}=...",
    )
    action.is_rare = setting.rare


def _load(args: RunOptions) -> Config:
    """Load the configuration of a new or resumed run."""
    return load_config(_path(args), args.overrides, command=args.command, stored=bool(args.resume))


def _path(args: RunOptions) -> Path:
    return Path(args.resume, CONFIG) if args.resume else config_file(args.config)


def _command_of(args: RunOptions) -> str:
    """Return the command of a configuration; it reports mistakes in the file."""
    try:
        name = task_name(load_yaml(_path(args)), args.overrides)
    except ConfigError:
        return "pretrain"
    return "pretrain" if name == PRETRAINING else "finetune"


def _fixed_settings(args: RunOptions) -> Collection[str]:
    """Return the settings that a run determined when it began, which --resume-if-there ignores on the command line."""
    if args.command == "pretrain":
        config = load_config(config_file(args.config), command="pretrain")
        return [key for key, _ in config.without_ipus]
    return ["batch.micro_batch"]  # adjusted to divide an update evenly


def options_without_plan(args: RunOptions) -> List[str]:
    """Return the options that begin or resume the planned run."""
    names = ("resume", "config", "start_from", "data_dir", "out", "resume_if_there", "allow_change")
    values = {name: getattr(args, name) for name in names}
    options = words_of(
        settings_in(RunOptions), {name: value for name, value in values.items() if value}
    )
    for override in args.overrides:
        options += ["--set", override.text]
    return options


def _refuse_no_runs(args: RunOptions) -> None:
    for option, folder in (("--resume", args.resume), ("--start-from", args.start_from)):
        if folder:
            refuse_no_run(option, folder)
