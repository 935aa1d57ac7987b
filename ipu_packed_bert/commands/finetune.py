"""Fine-tune a BERT on packs: packed-bert finetune --config configs/finetune_squad_packed.yml"""

from __future__ import annotations

import argparse
import contextlib
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Optional, Sequence

from ipu_packed_bert.commands.run_options import (
    add_run_options,
    add_trust,
    add_which_run,
    compiled_words,
    options_without_plan,
    parse_run,
    resumes_there,
)
from ipu_packed_bert.engine import instances
from ipu_packed_bert.processes.ranks import Processes, joined
from ipu_packed_bert.run_files.folder import CONFIG
from ipu_packed_bert.settings.allowed_changes import check_allowed
from ipu_packed_bert.settings.finetuning import FinetuneConfig, load_config
from ipu_packed_bert.settings.shipped import config_file, refuse_no_run
from ipu_packed_bert.settings.user_task import trust_what_was_named
from pack_data.cli.command import ArgumentParser, typed
from pack_data.lengths.factors import parse_factor

if TYPE_CHECKING:
    from ipu_packed_bert.training.finetuning_run import Prepared


def _describe(prepared: Prepared) -> None:
    """What would run, printed."""
    config, task, batches = prepared.config, prepared.task, prepared.batches
    print(f"start     {prepared.start.description}")
    if prepared.fresh:
        print(f"          initialised, not in the checkpoint: {', '.join(prepared.fresh)}")
    for note in task.notes:
        print(f"data      {note}")
    for what, packs in (("training", task.training_packs), ("evaluation", task.evaluation_packs)):
        if packs is not None:
            packing = packs.packing
            print(
                f"packing   {what}: {packing.sequences:,} sequences in {packing.packs:,} rows of"
                f" {packing.max_sequence_length} ({packing.algorithm}), {packing.packing_factor:.3f} in a row,"
                f" {packing.efficiency:.1%} of the slots are tokens"
            )
    if prepared.steps:
        rows, factor = batches.packs_per_update, task.packs.packing.packing_factor
        print(
            f"updates   {prepared.steps:,}, {batches.updates_per_epoch:,} an epoch, of {rows:,} rows or about"
            f" {rows * factor:,.0f} sequences ({batches.micro_batches_per_update:,} micro-batches of"
            f" {config.batch.micro_batch})"
        )
    if task.evaluation_packs is not None:
        print(f"scores    {', '.join(task.scores)}, where the file has labels")
    if batches.sharing:
        print(f"ranks     {batches.sharing}")
    print(f"engine    {prepared.engine.description}", flush=True)


def parse(argv: Optional[Sequence[str]]) -> argparse.Namespace:
    parser = ArgumentParser(prog=typed("finetune"), description=__doc__)
    add_which_run(parser, named="finetune_squad_packed", finished="; a finished one is evaluated again")
    parser.add_argument(
        "--data-dir", type=Path, metavar="DIR", help="folder in which the data files of the configuration lie"
    )
    parser.add_argument(
        "--plan", action="store_true", help="print what would run and where, without a device, and stop"
    )
    parser.add_argument(
        "--packing-factor",
        type=parse_factor,
        metavar="P",
        help="sequences in a row for --plan, while the files are not there",
    )
    add_run_options(parser, setting="data.packer=none")
    add_trust(parser)
    return parse_run(parser, argv)


def main(argv: Optional[Sequence[str]] = None) -> int:
    with joined(instances=instances) as processes:
        return begun(parse(argv), processes)


def resumed_config(folder: str, overrides: Sequence[str] = ()) -> FinetuneConfig:
    return load_config(Path(folder, CONFIG), overrides, stored=True)


def begun(args: argparse.Namespace, processes: Processes) -> int:
    processes.refuse_differences({"the command line": " ".join(sys.argv[1:])})
    resumes_there(args, processes)
    trust_what_was_named(args.trust_task, args.overrides)
    if args.resume:
        processes.of_first(refuse_no_run, "--resume", args.resume)
        former = processes.of_first(resumed_config, args.resume)
        config = processes.of_first(resumed_config, args.resume, args.overrides)
    else:
        former, config = None, load_config(config_file(args.config), args.overrides)
    if args.show_config:
        print(config.annotated(), end="")
        return 0
    if args.plan:
        from ipu_packed_bert.planning.finetuning_plan import print_plan

        options = options_without_plan(args)
        return print_plan(config, data_dir=args.data_dir, packing_factor=args.packing_factor, options=options)

    # torch loads from here on: a wrong configuration is refused without it.
    from ipu_packed_bert.tasks.files import located
    from ipu_packed_bert.training.finetuning_run import fine_tune, prepare, resumed
    from ipu_packed_bert.training.log import refuse_a_run_in, refuse_a_run_under_way

    former_run = None
    if args.resume:
        processes.of_first(refuse_a_run_under_way, args.resume)
        allowed = check_allowed(args.allow_change, config.sections)
        former_run = processes.of_first(resumed, args.resume, config, allowed)
    else:
        processes.of_first(refuse_a_run_in, args.out)
    # With the files' full names, so that the run can be resumed without --data-dir.
    prepared = prepare(located(config, args.data_dir), former=former, processes=processes)
    _describe(prepared)
    with contextlib.closing(prepared.engine), contextlib.closing(prepared.batches):
        if prepared.steps:
            prepared.engine.compile(prepared.batches.first())
        if config.engine.offline_export:
            print(f"compiled  {compiled_words(config.engine.offline_export, processes)}")
            return 0
        return fine_tune(prepared, args.resume or args.out, resumed=former_run, progress=args.progress)
