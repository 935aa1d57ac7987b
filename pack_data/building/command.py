"""packed-bert build: text in, a packed data set out.

    documents in parts -> examples -> histogram -> packing -> assignment -> sorted by shard -> shards -> manifest

Every stage works on parts of a few megabytes and records its progress in OUT.building, a directory next to the data
set. So memory does not grow with the corpus, a build that was killed continues, and the bytes do not depend on the
number of workers. A previous data set in OUT stays readable until the new manifest replaces its own.

With --held-out the documents are split first, and every stage is done for both sides; the two data sets appear
together. The stages are in pack_data/building.
"""

from __future__ import annotations

import argparse
import sys
from contextlib import closing
from dataclasses import fields, replace
from pathlib import Path
from typing import Any, Iterable, Optional, Sequence, Tuple

from pack_data.building.account import ACCOUNT, lines
from pack_data.building.held_out import TRAINING, held_out_folder
from pack_data.building.options import BuildOptions, flag_of
from pack_data.building.runner import check_not_in_a_starting_worker, open_runner
from pack_data.building.shares import STAGES, check_shared, missing_tasks, run_task, slurm_script
from pack_data.building.stages import Built, Stages
from pack_data.building.work_folder import check_out, work_folder
from pack_data.cli.command import ArgumentParser, positive_int, typed
from pack_data.cli.reading_options import add_reading_options
from pack_data.packers import get_packer
from pack_data.packing.packing import Packing
from pack_data.reading import hugging_face
from pack_data.reading.fields import printable, shown
from pack_data.reading.words import counted
from pack_data.store.data_set import PackStore, read_manifest

__all__ = ["BuildOptions", "Built", "build", "build_and_report", "missing_tasks", "run_task"]


def build(options: BuildOptions) -> PackStore:
    """Build the data set, or continue a build that was killed, and open it.

    It works in this process alone. With options.workers above 1, or None for one per core, a script calls it under
    `if __name__ == "__main__":`, because each worker process imports the script.

    Args:
        options: The sources, and all that decides the bytes of the data set.

    Returns:
        The data set, open for reading.

    Raises:
        ValueError: For a mistake in the options or the sources.
    """
    return build_and_report(options).store


def build_and_report(options: BuildOptions) -> Built:
    """Build as `build` does; also return the packing, the seconds of each stage, and remarks.

    Args:
        options: The sources, and all that decides the bytes of the data set.

    Returns:
        The data set and how it was built.

    Raises:
        ValueError: For a mistake in the options or the sources.
    """
    if not isinstance(options, BuildOptions):
        raise TypeError(
            f"build takes BuildOptions, not {shown(options)}: build(BuildOptions(out=DIRECTORY, corpus=TEXTS))"
        )
    try:
        import fcntl  # noqa: F401
    except ImportError:
        raise ValueError(
            "packed-bert build needs a POSIX system such as Linux or macOS (fcntl is missing here); "
            "build there and copy the directory"
        ) from None
    check_not_in_a_starting_worker()
    out = Path(options.out) if Path(options.out).name else Path(options.out).resolve()
    with hugging_face.as_file(options.source, out.parent) as source:
        check_out(out, list(options.given_files().values()))
        if options.recipe is not None:
            # Before the corpus is read: a file that is no recipe is refused at once.
            Packing.load(options.recipe)
        with work_folder(out) as work:
            options = replace(options, out=out, source=source)
            options.example_options()
            if options.recipe is None:
                get_packer(options.packer)
            with closing(open_runner(options.workers, options.on)) as runner:
                return Stages(options, work, runner).run()


# ---- the command -----------------------------------------------------------------------------------------------------

# Fields of BuildOptions that name the input, one of which must be given.
_INPUTS = ("corpus", "synthetic", "source")
# Fields of BuildOptions of which at most one may be given.
_PLACES = ("workers", "on")


def _parser() -> ArgumentParser:
    """Return the parser of the fields of BuildOptions, and of the options of builds in many processes."""
    # An option that is not given is not in the result: its default is that of BuildOptions.
    parser = ArgumentParser(
        prog=typed("build"),
        description="Packs text into a data set.",
        argument_default=argparse.SUPPRESS,
    )
    parser.add_argument(
        "--out",
        required=True,
        metavar="DIR",
        help="directory of the data set; an old one stays until the new one is done",
    )
    _add_options(parser.add_mutually_exclusive_group(required=True), _INPUTS)
    add_reading_options(parser)
    names = [item.name for item in fields(BuildOptions)]
    _add_options(parser, (name for name in names if name not in (*_INPUTS, *_PLACES)))
    _add_options_of_tasks(parser)
    _add_options(parser.add_mutually_exclusive_group(), _PLACES)
    # `main` refuses this option of version 1.
    parser.add_argument("--append", action="store_true", help=argparse.SUPPRESS)
    rare = [flag_of(item.name) for item in fields(BuildOptions) if item.metadata.get("rare")]
    parser.rare(
        *rare,
        "--split",
        "--skip-bad",
        "--max-record-bytes",
        "--stage",
        "--missing",
        "--slurm",
        "--task",
    )
    return parser


def _add_options(group: Any, names: Iterable[str]) -> None:
    """Add the options of these fields of BuildOptions; a field without metadata has none."""
    for name in names:
        metadata = BuildOptions.__dataclass_fields__[name].metadata
        if metadata:
            group.add_argument(flag_of(name), dest=name, **metadata["argument"])


def _add_options_of_tasks(parser: ArgumentParser) -> None:
    by_many = parser.add_mutually_exclusive_group()
    by_many.add_argument(
        "--stage",
        choices=("all", *STAGES),
        help="one stage of the build, for many processes on machines that see the same directories: every task of "
        "count, then recipe, then every task of deal; with --from or --synthetic (default: all, in this process)",
    )
    by_many.add_argument(
        "--missing",
        type=positive_int,
        metavar="N",
        help="print the next stage and which of its N tasks are to run",
    )
    by_many.add_argument(
        "--slurm",
        type=positive_int,
        metavar="N",
        help="print a script that submits this build to Slurm in N tasks",
    )
    parser.add_argument(
        "--task",
        type=_task_of,
        metavar="I/N",
        help="with --stage count and deal: task I, from 0 to N-1; it may run again, and N may differ (default 0/1)",
    )


def _task_of(text: str) -> Tuple[int, int]:
    task, _, tasks = text.partition("/")
    if not (task.isdecimal() and tasks.isdecimal() and int(task) < int(tasks)):
        raise argparse.ArgumentTypeError(
            f"{text}: pass I/N for task I of N, counted from 0, such as 0/64 to 63/64"
        )
    return int(task), int(tasks)


def main(argv: Optional[Sequence[str]] = None) -> int:
    """Build the data set that the arguments describe, or do the part of it that --stage, --missing, --slurm name."""
    arguments = sys.argv[1:] if argv is None else list(argv)
    parser = _parser()
    given = vars(parser.parse_args(arguments))
    if given.pop("append", False):
        raise ValueError(
            "--append is gone in version 2; build the new files as a second data set, and train on both: "
            "data.mixed_with names the second"
        )
    stage = given.pop("stage", "all")
    task = given.pop("task", None)
    missing = given.pop("missing", None)
    slurm = given.pop("slurm", None)
    if task and stage not in (STAGES[0], STAGES[-1]):
        parser.error(f"--task: use it with --stage {STAGES[0]} or --stage {STAGES[-1]}")
    if stage == "all" and missing is None and slurm is None:
        # One process per core is the default of the command: a script needs a guard for it.
        return _report(build_and_report(BuildOptions(**{"workers": None, **given})))

    # A task has one core, except the recipe, of which there is one.
    options = BuildOptions(**{"workers": None if stage == STAGES[1] else 1, **given})
    if missing is not None:
        next_stage, tasks = missing_tasks(options, missing)
        if next_stage:
            print(next_stage, ",".join(map(str, tasks)))
        else:
            print(f"nothing is missing: {options.out} is built")
        return 0
    if slurm is not None:
        print(slurm_script(check_shared(options), _without_slurm(arguments), slurm), end="")
        return 0
    done = run_task(options, stage, *(task or (0, 1)))
    print(done.words)
    return _report(done.built) if done.built else 0


def _without_slurm(arguments: Sequence[str]) -> Sequence[str]:
    """Return the arguments without --slurm N (or --slurm=N, or an abbreviation)."""
    place = next(place for place, argument in enumerate(arguments) if argument.startswith("--sl"))
    end = place + (1 if "=" in arguments[place] else 2)
    return [*arguments[:place], *arguments[end:]]


def _report(built: Built) -> int:
    """Print what was built, and close the data set. Return the exit status."""
    # Loaded late: --help prints no table.
    from pack_data.display.accounting import table

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
            f"{size / 1e6:,.1f} MB, {size / len(store):,.0f} bytes a pack"
        )
        for held_out in manifests[1:]:
            documents = counted(held_out.made_with["documents"], "document")
            sequences = counted(held_out.sequences, "sequence")
            print(
                f"{held_out_folder(store.folder)}: {counted(held_out.packs, 'pack')} of {sequences}, from the "
                f"{documents} held out"
            )
    return 0
