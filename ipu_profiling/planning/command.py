"""Print what a configuration would run and where, without a device; exit status 1 if it does not fit."""

from __future__ import annotations

import sys
from typing import Optional, Sequence

from ipu_packed_bert.commands.run_options import (
    configuration,
    options_without_plan,
    parse,
    show_config,
)
from ipu_packed_bert.engine import instances
from ipu_packed_bert.processes.ranks import Processes, joined
from ipu_packed_bert.settings.command_line import RunOptions


def main(argv: Optional[Sequence[str]] = None) -> int:
    """Plan a configuration of pre-training or fine-tuning."""
    return plan_of("plan", sys.argv[1:] if argv is None else argv)


def plan_of(command: str, argv: Sequence[str]) -> int:
    """Print the plan that a command line of `plan`, `pretrain` or `finetune` describes; return the exit status."""
    with joined(instances=instances) as processes:
        processes.status = _plan_with(parse(command, argv), processes)
        return processes.status


def _plan_with(args: RunOptions, processes: Processes) -> int:
    # Loaded after the options are parsed: --help and mistakes need neither.
    from ipu_packed_bert.data.data_sets import described, refuse_missing
    from ipu_profiling.planning.plan import plan
    from ipu_profiling.planning.printing import print_plan

    args, config = configuration(args, processes)
    if args.show_config:
        return show_config(config)
    manifest = None
    if args.command == "pretrain":
        completed, manifest = described(config)
        if args.packing_factor is None:
            processes.of_first(refuse_missing, config)
        config = completed
    run_plan = plan(config, manifest, data_dir=args.data_dir, packing_factor=args.packing_factor)
    return print_plan(run_plan, options_without_plan(args))
