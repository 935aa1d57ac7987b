"""packed-bert build: text in, a packed data set out.

    documents in parts -> examples -> histogram -> packing -> assignment -> sorted by shard -> shards -> manifest

Every stage works on parts of a few megabytes and records its progress in OUT.building, a directory next to the data
set. So memory does not grow with the corpus, a build that was killed continues, and the bytes do not depend on the
number of workers. A previous data set in OUT stays readable until the new manifest replaces its own.

With --held-out the documents are split first, and every stage is done for both sides; the two data sets appear
together. The stages are in pack_data/building.
"""

from __future__ import annotations

from contextlib import closing
from dataclasses import replace
from pathlib import Path

from pack_data.building.options import BuildOptions
from pack_data.building.runner import check_not_in_a_starting_worker, open_runner
from pack_data.building.shares import missing_tasks, run_task
from pack_data.building.stages import Built, Stages
from pack_data.building.work_folder import check_out, work_folder
from pack_data.packers import get_packer
from pack_data.packing.packing import Packing
from pack_data.reading import hugging_face
from pack_data.reading.fields import shown
from pack_data.store.data_set import PackStore

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
