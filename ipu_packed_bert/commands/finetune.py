"""Fine-tune a BERT on packs: python -m ipu_packed_bert.finetune --config configs/finetune_squad_packed.yml"""

from __future__ import annotations

import argparse
import contextlib
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Optional, Sequence

from ipu_packed_bert.configurations import config_file, refuse_no_run
from ipu_packed_bert.processes import Processes, joined
from ipu_packed_bert.resuming import check_allowed
from ipu_packed_bert.run_folder import CONFIG
from ipu_packed_bert.tasks.settings import FinetuneConfig, load_config
from pack_data.command import ArgumentParser

if TYPE_CHECKING:
    from ipu_packed_bert.runs import Prepared


def describe(prepared: Prepared) -> None:
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
    if batches.sharing:
        print(f"ranks     {batches.sharing}")
    print(f"engine    {prepared.engine.description}", flush=True)


def parse(argv: Optional[Sequence[str]]) -> argparse.Namespace:
    parser = ArgumentParser(prog="python -m ipu_packed_bert.finetune", description=__doc__)
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument(
        "--config",
        metavar="FILE|NAME",
        help="a run's settings: a file, or the name of one that comes with the program, such as finetune_squad_packed",
    )
    what.add_argument(
        "--resume",
        metavar="RUN",
        help="continue the run in this folder from its newest checkpoint; a finished one is evaluated again",
    )
    parser.add_argument(
        "--data-dir", type=Path, metavar="DIR", help="folder in which the data files of the configuration lie"
    )
    parser.add_argument("--engine", choices=("auto", "ipu", "host"), help="where to run; as --set engine.kind=...")
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
        "--set",
        action="append",
        default=[],
        metavar="a.b=c",
        dest="overrides",
        help="override one setting, any number of times: --set data.packer=none",
    )
    parser.add_argument(
        "--allow-change",
        action="append",
        default=[],
        metavar="KEY[,KEY]",
        help="with --resume: settings that may differ from the checkpoint's although that changes the experiment",
    )
    parser.add_argument(
        "--show-config", action="store_true", help="print every setting and where it comes from, and stop"
    )
    parser.add_argument("--progress", action="store_true", default=None, help="a bar although stderr is no terminal")
    args = parser.parse_args(argv)
    if args.resume and args.out:
        parser.error("--out names a new run; --resume continues in the run's own folder")
    if args.resume_if_there and not (args.config and args.out):
        parser.error("--resume-if-there needs --config, to begin with, and --out, the folder that may hold the run")
    if args.allow_change and not args.resume:
        parser.error("--allow-change goes with --resume; a new run changes nothing")
    if args.engine:
        args.overrides.append(f"engine.kind={args.engine}")
    if args.compare_unpacked is not None:
        args.overrides.append(f"run.compare_unpacked={args.compare_unpacked}")
    return args


def there(folder: str) -> bool:
    from ipu_packed_bert.runlog import resumes

    return resumes(folder)


def main(argv: Optional[Sequence[str]] = None) -> int:
    with joined() as processes:
        return begun(parse(argv), processes)


def resumed_config(folder: str, overrides: Sequence[str] = ()) -> FinetuneConfig:
    return load_config(Path(folder, CONFIG), overrides, stored=True)


def begun(args: argparse.Namespace, processes: Processes) -> int:
    processes.refuse_differences({"the command line": " ".join(sys.argv[1:])})
    # Rank 0 alone reads and writes run folders: the others may be on machines that have none.
    if args.resume_if_there and processes.of_first(there, args.out):
        args.resume, args.out = args.out, None
    if args.resume:
        processes.of_first(refuse_no_run, "--resume", args.resume)
        former = processes.of_first(resumed_config, args.resume)
        config = processes.of_first(resumed_config, args.resume, args.overrides)
    else:
        former, config = None, load_config(config_file(args.config), args.overrides)
    if args.show_config:
        print(config.annotated(), end="")
        return 0

    # torch loads from here on: a wrong configuration is refused without it.
    from ipu_packed_bert.runlog import refuse_a_run_in, refuse_a_run_under_way
    from ipu_packed_bert.runs import fine_tune, prepare, resumed
    from ipu_packed_bert.tasks.files import located

    former_run = None
    if args.resume:
        processes.of_first(refuse_a_run_under_way, args.resume)
        allowed = check_allowed(args.allow_change, config.sections)
        former_run = processes.of_first(resumed, args.resume, config, allowed)
    else:
        processes.of_first(refuse_a_run_in, args.out)
    # With the files' full names, so that the run can be resumed without --data-dir.
    prepared = prepare(located(config, args.data_dir), former=former, processes=processes)
    describe(prepared)
    with contextlib.closing(prepared.engine), contextlib.closing(prepared.batches):
        if prepared.steps:
            prepared.engine.compile(prepared.batches.first())
        return fine_tune(prepared, args.resume or args.out, resumed=former_run, progress=args.progress)
