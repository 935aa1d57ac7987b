"""One build by many processes, on one machine or on many that see its directories: a Slurm array, Ray, Dask, datatrove.

    count   task I of N   the sequences of its files, and their lengths
    recipe  one task      one packing of all sequences, with its proof, and the place of each
    deal    task I of N   its shards; the last task to end completes the data set

Every stage waits for the one before. A task may run twice, even at the same time, on any machine: its files are there
whole or not at all, and their bytes depend on nothing but the input. Another N, even in one of the stages only, gives
the same data set, and so does a build in one process, which is the same stages with N = 1.
"""

from __future__ import annotations

import shlex
import sys
from contextlib import ExitStack, closing, suppress
from pathlib import Path
from typing import List, NamedTuple, Optional, Sequence, Tuple

from pack_data.building.options import STAGES, BuildOptions
from pack_data.building.runner import TaskRunner, open_runner
from pack_data.building.stages import Built, NotBegunError, Stages, TaskShare
from pack_data.building.work_folder import (
    COMMIT,
    PLAN,
    check_out,
    clear,
    complete,
    remove,
    work_of_tasks,
)
from pack_data.reading.words import counted

_COUNT, _RECIPE, _DEAL = STAGES
# Seconds to wait for the work directory: for the task that begins the build, which reads all files for their checksums.
_SECONDS_TO_BEGIN = 24 * 3600.0
# Seconds to wait for tasks that are about to end.
_SECONDS_TO_END = 5.0


class Done(NamedTuple):
    """The work that a task has done, as text for the user, and the data set if the task completed it."""

    words: str
    built: Optional[Built] = None


def run_task(options: BuildOptions, stage: str, task: int = 0, tasks: int = 1) -> Done:
    """Run one task of a stage.

    Args:
        options: The build; the same in every task.
        stage: One of STAGES.
        task: The number of the task, from 0.
        tasks: The number of tasks of the stage.

    Returns:
        What was done, and the data set if this task completed it.

    Raises:
        ValueError: For a mistake in the options, and if the stage before is not done.
    """
    if stage not in STAGES:
        raise ValueError(f"stage {stage!r}: must be one of {', '.join(STAGES)}")
    if not 0 <= task < tasks:
        raise ValueError(f"task {task} of {tasks}: the numbers go from 0 to {tasks - 1}")
    out = check_shared(options)
    with closing(open_runner(options.workers, options.on)) as runner:

        def run_stage() -> str:
            # A second recipe waits for the first, whose result it then reads.
            with work_of_tasks(out, alone=stage == _RECIPE, patience=_SECONDS_TO_BEGIN) as work:
                if (work / COMMIT).exists():
                    raise NotBegunError(
                        f"{work}: a task was stopped while it completed the data set"
                    )
                build = Stages(options, work, runner, tasks_beside=True)
                return _work(build, stage, TaskShare(task, tasks)) if build.begin() else ""

        try:
            words = run_stage()
        except NotBegunError:
            with work_of_tasks(out, alone=True, patience=_SECONDS_TO_BEGIN) as work:
                if complete(work):
                    clear(work)
                elif stage == _COUNT:
                    Stages(options, work, runner, tasks_beside=False).begin()
            words = run_stage()
        if not words:
            _remove_if_empty(out)
            return Done(f"nothing to build: {out} holds exactly this already")
        return _completed(options, out, runner, words) if stage == _DEAL else Done(words)


def missing_tasks(options: BuildOptions, tasks: int) -> Tuple[str, List[int]]:
    """Return the next stage and the tasks of it that are still to be run.

    Args:
        options: The build.
        tasks: The number of tasks of the stage.

    Returns:
        The stage and the numbers of its tasks; ("", []) if the data set is complete.

    Raises:
        ValueError: While a task has the directory for itself: the first of all, or the recipe.
    """
    out = check_shared(options)
    with work_of_tasks(out, patience=_SECONDS_TO_END) as work:
        if (work / COMMIT).exists():
            return _DEAL, [0]
        build = Stages(options, work, TaskRunner(), tasks_beside=True)
        try:
            is_begun = build.begin()
        except NotBegunError:
            return _COUNT, list(range(tasks))
        if is_begun:
            if not build.is_gathered:
                uncounted = {task.part % tasks for task in build.uncounted()}
                return (_COUNT, sorted(uncounted)) if uncounted else (_RECIPE, [0])
            if not build.load():
                return _RECIPE, [0]
            # If every shard is there, a task was stopped before it completed the data set.
            return _DEAL, sorted({shard % tasks for shard in build.undealt()} or {0})
    _remove_if_empty(out)
    return "", []


def slurm_script(out: Path, arguments: Sequence[str], tasks: int) -> str:
    """Return a script that submits the build of `out` to Slurm. arguments: of the build, without its stages."""
    build = shlex.join([sys.executable, "-m", "ipu_packed_bert", "build", *arguments])
    task = f"--task $SLURM_ARRAY_TASK_ID/{tasks}"
    count = shlex.quote(f"{build} --stage {_COUNT} {task}")
    recipe = shlex.quote(f"{build} --stage {_RECIPE}")
    deal = shlex.quote(f"{build} --stage {_DEAL} {task}")
    return f"""#!/bin/bash
# Builds {out}. Every node must see the files under the same paths, and their locks (docs/how_to/billions.md).
# If a task failed, submit this script again: finished tasks end at once. Missing tasks: {build} --missing {tasks}
set -eu
submit() {{ sbatch --parsable --requeue --kill-on-invalid-dep=yes --ntasks=1 --cpus-per-task=1 --mem=2G "$@"; }}
count=$(submit --job-name=count --array=0-{tasks - 1} --wrap {count})
recipe=$(submit --job-name=recipe --dependency=afterok:$count --wrap {recipe})
submit --job-name=deal --dependency=afterok:$recipe --array=0-{tasks - 1} --wrap {deal}
"""


def check_shared(options: BuildOptions) -> Path:
    """Return the directory of the data set. ValueError if it cannot be built in tasks."""
    if options.source is None and options.synthetic is None:
        raise ValueError(
            "--stage: the documents of a --corpus are dealt out by one process; build it with --workers, or pass "
            "sequences made elsewhere (--from)"
        )
    if not isinstance(options.source, (str, Path, type(None))):
        raise ValueError("--stage: every task reads the source anew; write it to files first")
    if options.overwrite:
        raise ValueError("--stage makes a data set that does not exist yet: leave out --overwrite")
    check_out(Path(options.out), list(options.given_files().values()))
    return Path(options.out)


def _remove_if_empty(out: Path) -> None:
    """Remove the work directory if it holds no build, unless another task uses it."""
    with suppress(ValueError), work_of_tasks(out, alone=True, patience=0) as work:
        if not (work / PLAN).exists():
            remove(work)


def _work(build: Stages, stage: str, share: TaskShare) -> str:
    """Do the work of a task and describe it."""
    # Loaded late: --help prints no table.
    from pack_data.display.accounting import table

    if stage == _RECIPE:
        return f"{table(build.recipe()[0], str(build.out))}\n\nrecipe: every sequence has its place"
    if stage == _COUNT:
        build.count(share)
    elif build.load():
        build.deal(share)
    else:
        raise ValueError(f"{build.work}: the recipe is not complete; run --stage recipe first")
    return f"{stage}: task {share.number} of {share.tasks} is done"


def _completed(options: BuildOptions, out: Path, runner: TaskRunner, words: str) -> Done:
    """Complete the data set if all shards are there and no other task is at work."""
    with ExitStack() as held:
        try:
            work = held.enter_context(work_of_tasks(out, alone=True, patience=_SECONDS_TO_END))
        except ValueError:
            return Done(f"{words}; other tasks are at work, the last one completes the data set")
        build = Stages(options, work, runner, tasks_beside=False)
        if complete(work) or not (work / PLAN).exists() or not build.begin():
            remove(work)
            return Done(f"{words}; another task has completed the data set")
        build.load()
        missing = len(build.undealt())
        if missing:
            return Done(f"{words}; {counted(missing, 'shard')} left to other tasks")
        built = build.commit()
        remove(work)
        return Done(f"{words}, and the data set is complete", built)
