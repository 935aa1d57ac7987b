"""packed-bert build: text in, a packed data set out; or the part of a build that one of many processes does.

The options are declared in `pack_data.building.options`, the build is `pack_data.building.command`.  Loads no torch.
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING, Optional, Sequence, Tuple

from pack_data.building.options import STAGES, BuildOptions
from pack_data.cli.options import add_options
from pack_data.cli.parser import ArgumentParser, typed
from pack_data.reading.declare import setting, settings_in, words_of
from pack_data.reading.fields import printable
from pack_data.reading.words import counted

if TYPE_CHECKING:
    from pack_data.building.stages import Built

# Fields of BuildOptions that name the input, one of which must be given.
_INPUTS = ("corpus", "synthetic", "source")
# Fields of BuildOptions of which at most one may be given.
_PLACES = ("workers", "on")


def _task_of(text: str) -> Tuple[int, int]:
    task, _, tasks = text.partition("/")
    if not (task.isdecimal() and tasks.isdecimal() and int(task) < int(tasks)):
        raise ValueError(
            f"--task {text}: pass I/N for task I of N, counted from 0, such as 0/64 to 63/64"
        )
    return int(task), int(tasks)


@dataclass(frozen=True)
class _Share:
    """The part of a build that this process does."""

    stage: str = setting(
        "all",
        "one stage of the build, for many processes on machines that see the same directories: every task of count, "
        "then recipe, then every task of deal; with --from or --synthetic",
        choices=("all", *STAGES),
        rare=True,
    )
    missing: Optional[int] = setting(
        None, "print the next stage and which of its N tasks are to run", minimum=1, rare=True
    )
    slurm: Optional[int] = setting(
        None, "print a script that submits this build to Slurm in N tasks", minimum=1, rare=True
    )
    task: str = setting(
        "0/1",
        "with --stage count and deal: task I, from 0 to N-1; it may run again, and N may differ",
        metavar="I/N",
        rare=True,
    )


def _parser() -> ArgumentParser:
    """Return the parser of the fields of BuildOptions, and of the options of builds in many processes."""
    parser = ArgumentParser(prog=typed("build"), description="Packs text into a data set.")
    options = settings_in(BuildOptions)
    shares = settings_in(_Share)
    inputs = [options.pop(name) for name in _INPUTS]
    per_core = "processes; the result does not depend on it (default: one per core)"
    options["workers"] = options["workers"]._replace(default=None, meaning=per_core)
    places = [options.pop(name) for name in _PLACES]
    task = shares.pop("task")
    add_options(parser, [options.pop("out")])
    add_options(parser.add_mutually_exclusive_group(required=True), inputs)
    add_options(parser, options.values())
    add_options(parser.add_mutually_exclusive_group(), shares.values())
    add_options(parser, [task])
    add_options(parser.add_mutually_exclusive_group(), places)
    # `main` refuses this option of version 1.
    parser.add_argument(
        "--append", action="store_true", default=argparse.SUPPRESS, help=argparse.SUPPRESS
    )
    return parser


def main(argv: Optional[Sequence[str]] = None) -> int:
    """Build the data set that the arguments describe, or do the part of it that --stage, --missing, --slurm name."""
    parser = _parser()
    given = vars(parser.parse_args(argv))
    if given.pop("append", False):
        raise ValueError(
            "--append is gone in version 2; build the new files as a second data set, and train on both: "
            "data.mixed_with names the second"
        )
    of_share = {name: given.pop(name) for name in settings_in(_Share) if name in given}
    share = _Share(**of_share)
    task, tasks = _task_of(share.task)
    if "task" in of_share and share.stage not in (STAGES[0], STAGES[-1]):
        parser.error(f"--task: use it with --stage {STAGES[0]} or --stage {STAGES[-1]}")

    # Loaded late: --help and a wrong option need no build.
    from pack_data.building.command import build_and_report
    from pack_data.building.shares import check_shared, missing_tasks, run_task, slurm_script

    # One process per core is the default of the command: a script needs a guard for it. A task has one core, except
    # the recipe, of which there is one.
    is_whole = share == _Share()
    workers = None if is_whole or share.stage == STAGES[1] else 1
    options = BuildOptions(**{"workers": workers, **given})
    if is_whole:
        return _report(build_and_report(options))
    if share.missing is not None:
        next_stage, missing = missing_tasks(options, share.missing)
        if next_stage:
            print(next_stage, ",".join(map(str, missing)))
        else:
            print(f"nothing is missing: {options.out} is built")
        return 0
    if share.slurm is not None:
        words = words_of(settings_in(BuildOptions), given)
        print(slurm_script(check_shared(options), words, share.slurm), end="")
        return 0
    done = run_task(options, share.stage, task, tasks)
    print(done.words)
    return _report(done.built) if done.built else 0


def _report(built: Built) -> int:
    """Print what was built, and close the data set. Return the exit status."""
    from pack_data.building.account import ACCOUNT, lines
    from pack_data.building.held_out import TRAINING, held_out_folder
    from pack_data.display.accounting import table
    from pack_data.display.facts import with_unit
    from pack_data.store.data_set import read_manifest

    with built.store as store:
        if "commit" not in built.seconds:
            print(f"nothing to build: {store.folder} holds exactly this already")
            return 0
        manifest = store.manifest
        manifests = [manifest]
        if manifest.made_with.get("side") == TRAINING:
            manifests.append(read_manifest(held_out_folder(store.folder)))
        if ACCOUNT in manifest.made_with:
            for line in lines([side.made_with[ACCOUNT] for side in manifests]):
                print(line)
        print(table(built.packing, str(store.folder)))
        remarks = [f"skipped {line}" for line in manifest.made_with.get("skipped", ())]
        for remark in (*remarks, *built.remarks):
            print(printable(remark), file=sys.stderr)
        if manifest.schema.multiple_of > 1:
            multiple = manifest.schema.multiple_of
            rounding = counted(manifest.rounding, "slot")
            print(
                f"\nrounded up to multiples of {multiple}: {rounding} of the tokens above are rounding"
            )
        size = sum(entry.bytes for entry in manifest.shards)
        print(
            f"\n{store.folder}: {counted(len(store), 'pack')} in {counted(len(manifest.shards), 'shard')}, "
            f"{with_unit(size, 'bytes')}, {round(size / len(store)):,} bytes a pack"
        )
        for held_out in manifests[1:]:
            documents = counted(held_out.made_with["documents"], "document")
            sequences = counted(held_out.sequences, "sequence")
            print(
                f"{held_out_folder(store.folder)}: {counted(held_out.packs, 'pack')} of {sequences}, from the "
                f"{documents} held out"
            )
    return 0
