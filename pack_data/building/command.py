"""packed-bert build: text in, a packed data set out.

    documents in parts -> examples -> histogram -> packing -> assignment -> sorted by shard -> shards -> manifest

Every stage works on parts of a few megabytes and notes what is done in a folder beside the data set, OUT.building. So
memory does not grow with the corpus, a build that was killed continues, and the bytes do not depend on the number of
workers. A former data set in OUT stays readable until the new manifest replaces its own.

With --held-out the documents are split first, and every stage is done for both sides; the two data sets appear
together. The stages are in pack_data/building.
"""

from __future__ import annotations

import argparse
import contextlib
import sys
from dataclasses import fields, replace
from pathlib import Path
from typing import Any, Iterable, Mapping, Optional, Sequence, Tuple

from pack_data.building.held_out import TRAINING, held_out_folder
from pack_data.building.options import BuildOptions, flag_of
from pack_data.building.runner import check_not_in_a_starting_worker, open_runner
from pack_data.building.shares import STAGES, check_shared, missing_tasks, run_task, slurm_script
from pack_data.building.stages import Built, Stages
from pack_data.building.work_folder import check_out, work_folder
from pack_data.cli.bad_records import add_reading_options
from pack_data.cli.command import ArgumentParser, counted, positive_int, typed
from pack_data.packers import get_packer
from pack_data.packing.packing import Packing
from pack_data.reading import hugging_face
from pack_data.reading.fields import shown
from pack_data.store.data_set import PackStore, read_manifest

__all__ = ["BuildOptions", "Built", "build", "build_and_report", "missing_tasks", "run_task"]


def build(options: BuildOptions) -> PackStore:
    """Builds the data set, or continues a build that was killed, and opens it. ValueError for a user's mistake.

    It works in this process alone. With options.workers above 1, or None for one a core, a script calls it under
    `if __name__ == "__main__":`, because each worker process imports the script.
    """
    return build_and_report(options).store


def build_and_report(options: BuildOptions) -> Built:
    """As `build`; also returns the packing, the seconds of each stage, and remarks."""
    if not isinstance(options, BuildOptions):
        raise TypeError(
            f"build takes BuildOptions, not {shown(options)}: build(BuildOptions(out=FOLDER, corpus=TEXTS))"
        )
    try:
        import fcntl  # noqa: F401
    except ImportError:
        raise ValueError(
            "packed-bert build needs a POSIX system such as Linux or macOS (fcntl is missing here); "
            "build there and copy the folder"
        ) from None
    check_not_in_a_starting_worker()
    out = Path(options.out) if Path(options.out).name else Path(options.out).resolve()
    with hugging_face.as_file(options.source, out.parent) as source:
        check_out(out, list(options.given_files().values()))
        if options.recipe is not None:
            Packing.load(options.recipe)  # before the corpus is read: what is no recipe is refused at once
        with work_folder(out) as work, contextlib.ExitStack() as ending:
            options = replace(options, out=out, source=source)
            options.example_options()
            if options.recipe is None:
                get_packer(options.packer)
            runner = open_runner(options.workers, options.on)
            ending.callback(runner.close)
            return Stages(options, work, runner).run()


# ---- the command -----------------------------------------------------------------------------------------------------

# Fields of BuildOptions of which at most one may be given. The first group names the input, which must be given.
_INPUTS = ("corpus", "synthetic", "source")
_PLACES = ("workers", "on")


def _parser() -> ArgumentParser:
    """Return the parser of the fields of BuildOptions, and of the options of builds in many processes."""
    # An option that is not given is not in the result: its default is that of BuildOptions.
    parser = ArgumentParser(
        prog=typed("build"), description="Packs text into a data set.", argument_default=argparse.SUPPRESS
    )
    parser.add_argument(
        "--out",
        required=True,
        metavar="DIR",
        help="folder of the data set; what is there stays until the new one is complete",
    )
    _add_options(parser.add_mutually_exclusive_group(required=True), _INPUTS)
    add_reading_options(parser)
    others = [item.name for item in fields(BuildOptions) if item.name not in (*_INPUTS, *_PLACES)]
    _add_options(parser, others)
    _add_options_of_tasks(parser)
    _add_options(parser.add_mutually_exclusive_group(), _PLACES)
    parser.add_argument("--append", action="store_true", help=argparse.SUPPRESS)  # of version 1, refused by `main`
    rare = [flag_of(item.name) for item in fields(BuildOptions) if item.metadata.get("rare")]
    parser.rare(*rare, "--skip-bad", "--max-record-bytes", "--stage", "--missing", "--slurm", "--task")
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
        help="one stage of the build, for many processes on machines that see the same folders: every task of count, "
        "then recipe, then every task of deal; with --from or --synthetic (default: all, in this process)",
    )
    by_many.add_argument(
        "--missing", type=positive_int, metavar="N", help="print the stage that is next and which of N tasks are to run"
    )
    by_many.add_argument(
        "--slurm", type=positive_int, metavar="N", help="print a script that hands this build to Slurm in N tasks"
    )
    parser.add_argument(
        "--task",
        type=_task_of,
        metavar="I/N",
        help="of --stage count and deal: task I, from 0 to N-1; it may run again, and N may differ (default 0/1)",
    )


def _task_of(text: str) -> Tuple[int, int]:
    task, _, tasks = text.partition("/")
    if not (task.isdecimal() and tasks.isdecimal() and int(task) < int(tasks)):
        raise argparse.ArgumentTypeError(f"{text}: I/N is task I of N, counted from 0, such as 0/64 to 63/64")
    return int(task), int(tasks)


def main(argv: Optional[Sequence[str]] = None) -> int:
    arguments = sys.argv[1:] if argv is None else list(argv)
    parser = _parser()
    given = vars(parser.parse_args(arguments))
    if given.pop("append", False):
        raise ValueError(
            "--append is gone in version 2; build the new files as a second data set, and train on both: "
            "data.mixed_with names the second"
        )
    stage, task = given.pop("stage", "all"), given.pop("task", None)
    if task and stage not in (STAGES[0], STAGES[-1]):
        parser.error(f"--task is of --stage {STAGES[0]} and --stage {STAGES[-1]}")
    by_many = {name: given.pop(name) for name in ("missing", "slurm") if name in given}
    if by_many or stage != "all":
        return _for_many(given, arguments, stage, task or (0, 1), **by_many)
    # One process a core is for commands: a script that does it needs a guard.
    options = BuildOptions(**{"workers": None, **given})
    return _report(*build_and_report(options))


def _for_many(
    given: Mapping[str, Any],
    arguments: Sequence[str],
    stage: str,
    task: Tuple[int, int],
    missing: Optional[int] = None,
    slurm: Optional[int] = None,
) -> int:
    """What --stage, --missing and --slurm ask for."""
    # A task has one core, but the recipe, of which there is one.
    options = BuildOptions(**{"workers": None if stage == STAGES[1] else 1, **given})
    if missing is not None:
        which, tasks = missing_tasks(options, missing)
        print(f"{which} {','.join(map(str, tasks))}" if which else f"nothing is missing: {options.out} is built")
        return 0
    if slurm is not None:
        place = next(at for at, text in enumerate(arguments) if text.startswith("--sl"))
        rest = arguments[place + (1 if "=" in arguments[place] else 2) :]
        print(slurm_script(check_shared(options), [*arguments[:place], *rest], slurm), end="")
        return 0
    done = run_task(options, stage, *task)
    print(done.words)
    return _report(*done.built) if done.built else 0


def _report(store: PackStore, packing: Packing, seconds: Mapping[str, float], remarks: Sequence[str]) -> int:
    with store:
        if "commit" not in seconds:
            print(f"nothing to build: {store.folder} holds exactly this already")
            return 0
        manifest = store.manifest
        print(packing.table(f"{store.folder}"))
        for skipped in manifest.made_with.get("skipped", ()):
            print(f"skipped {skipped}", file=sys.stderr)
        if manifest.made_with.get("left_out"):
            print(
                f"left out: {', '.join(manifest.made_with['left_out'])} "
                "(kept are the first record's lists of tokens and fields of one whole number)",
                file=sys.stderr,
            )
        for remark in remarks:
            print(remark, file=sys.stderr)
        if manifest.schema.multiple_of > 1:
            multiple, added = manifest.schema.multiple_of, counted(manifest.rounding, "slot")
            print(f"\nrounded up to multiples of {multiple}: {added} of the tokens above are rounding")
        size, shards = sum(entry.bytes for entry in manifest.shards), counted(len(manifest.shards), "shard")
        print(
            f"\n{store.folder}: {len(store):,} packs in {shards}, {size / 1e6:,.1f} MB, "
            f"{size / len(store):,.0f} bytes a pack"
        )
        if manifest.made_with.get("side") == TRAINING:
            folder = held_out_folder(store.folder)
            held_out = read_manifest(folder)
            print(
                f"{folder}: {held_out.packs:,} packs of {held_out.sequences:,} sequences, "
                f"from the {counted(held_out.made_with['documents'], 'document')} held out"
            )
    return 0
