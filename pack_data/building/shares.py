"""One build by many processes, on one machine or on many that see its folders: a Slurm array, Ray, Dask, datatrove.

    count   task I of N   the sequences of its own files, and their lengths
    recipe  one task      one packing of all sequences, with its proof, and the place of each
    deal    task I of N   its own shards; the last task to end completes the data set

Every stage waits for the one before. A task may run twice, at once even, on any machine: its files are there whole or
not at all, and their bytes depend on nothing but the input. Another N, in one of the stages too, gives the same data
set, and so does a build in one process, which is the same stages with N = 1.
"""

from __future__ import annotations

import shlex
import sys
from contextlib import ExitStack
from pathlib import Path
from typing import Callable, ContextManager, List, NamedTuple, Optional, Sequence, Tuple

from pack_data.building.options import BuildOptions
from pack_data.building.runner import TaskRunner, open_runner
from pack_data.building.stages import Built, NotBegunError, Stages, TaskShare
from pack_data.building.work_folder import COMMIT, PLAN, check_out, clear, complete, remove, work_of_tasks
from pack_data.cli.command import counted

STAGES = ("count", "recipe", "deal")
# Seconds: for the task that begins the build, which reads all files for their checksums; for tasks that end just now.
_BEGINNING, _ENDING = 24 * 3600.0, 5.0


class Done(NamedTuple):
    """What a task has done, in words, and the data set where the task completed it."""

    words: str
    built: Optional[Built] = None


def run_task(options: BuildOptions, stage: str, task: int = 0, tasks: int = 1) -> Done:
    """Task `task` of `tasks` of a stage of STAGES.

    ValueError for a user's mistake, and where the stage before is not done.
    """
    if stage not in STAGES:
        raise ValueError(f"stage {stage!r} is none of {', '.join(STAGES)}")
    if not 0 <= task < tasks:
        raise ValueError(f"task {task} of {tasks}: the numbers go from 0 to {tasks - 1}")
    out = check_shared(options)
    with ExitStack() as ending:
        runner = open_runner(options.workers, options.on)
        ending.callback(runner.close)

        def stages(work: Path, tasks_beside: bool) -> Stages:
            return Stages(options, work, runner, tasks_beside)

        def work_on() -> str:
            # A second recipe waits for the first, and finds it.
            with _entered(out, alone=stage == STAGES[1]) as work:
                if (work / COMMIT).exists():
                    raise NotBegunError(f"{work}: a task was stopped while it completed the data set")
                build = stages(work, True)
                if not build.begin():
                    return ""
                return _work(build, stage, TaskShare(task, tasks))

        try:
            done = work_on()
        except NotBegunError:
            with _entered(out, alone=True) as work:
                if complete(work):
                    clear(work)
                elif stage == STAGES[0]:
                    stages(work, False).begin()
            done = work_on()
        if not done:
            _leave(out)
            return Done(f"nothing to build: {out} holds exactly this already")
        return Done(done) if stage != STAGES[-1] else _completed(out, stages, done)


def missing_tasks(options: BuildOptions, tasks: int) -> Tuple[str, List[int]]:
    """The stage that is next, and which of `tasks` tasks of it are to be run; ("", []) where the data set is there.

    ValueError while a task has the folder for itself: the first of all, or the recipe.
    """
    out = check_shared(options)
    with work_of_tasks(out, patience=_ENDING) as work:
        if (work / COMMIT).exists():
            return STAGES[2], [0]
        build = Stages(options, work, TaskRunner(), True)
        try:
            begun = build.begin()
        except NotBegunError:
            return STAGES[0], list(range(tasks))
        if begun:
            if not build.is_gathered:
                left = {task.part % tasks for task in build.uncounted()}
                return (STAGES[0], sorted(left)) if left else (STAGES[1], [0])
            if not build.load():
                return STAGES[1], [0]
            # Where every shard is there, a task was stopped before it completed the data set.
            return STAGES[2], sorted({shard % tasks for shard in build.undealt()} or {0})
    _leave(out)
    return "", []


def slurm_script(out: Path, arguments: Sequence[str], tasks: int) -> str:
    """A script that hands the build of `out` to Slurm. arguments: of the build, without its stages."""
    build = " ".join(map(shlex.quote, [sys.executable, "-m", "ipu_packed_bert", "build", *arguments]))
    return f"""#!/bin/bash
# Builds {out}. Every node must see the files under the same paths, and their locks (docs/how_to/billions.md).
# Where a task failed, hand it in again: what is done ends at once. What is missing: {build} --missing {tasks}
set -eu
submit() {{ sbatch --parsable --requeue --kill-on-invalid-dep=yes --ntasks=1 --cpus-per-task=1 --mem=2G "$@"; }}
count=$(submit --job-name=count --array=0-{tasks - 1} --wrap {_task(build, "count", tasks)})
recipe=$(submit --job-name=recipe --dependency=afterok:$count --wrap {shlex.quote(build + " --stage recipe")})
submit --job-name=deal --dependency=afterok:$recipe --array=0-{tasks - 1} --wrap {_task(build, "deal", tasks)}
"""


def _task(build: str, stage: str, tasks: int) -> str:
    return shlex.quote(f"{build} --stage {stage} --task $SLURM_ARRAY_TASK_ID/{tasks}")


def check_shared(options: BuildOptions) -> Path:
    """Where the data set goes. ValueError where it cannot be built in tasks."""
    if options.source is None and options.synthetic is None:
        raise ValueError(
            "--stage: one process deals out the documents of a --corpus; build it with --workers, or give sequences "
            "made elsewhere (--from)"
        )
    if not isinstance(options.source, (str, Path, type(None))):
        raise ValueError("--stage: every task reads the source anew; write it to files first")
    if options.overwrite:
        raise ValueError("--stage makes a data set that is not there yet: leave out --overwrite")
    check_out(Path(options.out), list(options.given_files().values()))
    return Path(options.out)


def _entered(out: Path, alone: bool = False) -> ContextManager[Path]:
    return work_of_tasks(out, alone=alone, patience=_BEGINNING)


def _leave(out: Path) -> None:
    """Removes an empty work folder, unless another task has it."""
    try:
        with work_of_tasks(out, alone=True, patience=0) as work:
            if not (work / PLAN).exists():
                remove(work)
    except ValueError:
        pass


def _work(build: Stages, stage: str, share: TaskShare) -> str:
    if stage == STAGES[0]:
        build.count(share)
    elif stage == STAGES[1]:
        return f"{build.recipe()[0].table(str(build.out))}\n\nrecipe: every sequence has its place"
    else:
        if not build.load():
            raise ValueError(f"{build.work}: the recipe is not complete; run --stage recipe first")
        build.deal(share)
    return f"{stage}: task {share.number} of {share.tasks} is done"


def _completed(out: Path, stages: Callable[[Path, bool], Stages], done: str) -> Done:
    """Completes the data set where all shards are there and no other task is at work."""
    with ExitStack() as held:
        try:
            work = held.enter_context(work_of_tasks(out, alone=True, patience=_ENDING))
        except ValueError:
            return Done(f"{done}; others are at work, the last one completes the data set")
        build = stages(work, False)
        if complete(work) or not (work / PLAN).exists() or not build.begin():
            remove(work)
            return Done(f"{done}; another task has completed the data set")
        build.load()
        left = len(build.undealt())
        if left:
            return Done(f"{done}; {counted(left, 'shard')} left to other tasks")
        built = build.commit()
        remove(work)
        return Done(f"{done}, and the data set is complete", built)
