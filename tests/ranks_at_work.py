"""Training in 1 to 4 ranks of torch.distributed on this machine, in float64: what tests of several processes compare.

found = at_work(folder, [("two", 2, pretrained, dict(data=..., overrides=[...], steps=5))], ranks=2)["two"]

Four processes are started once; the first `size` of them make each job, one after another.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import multiprocessing.connection
import multiprocessing.forkserver
import time
import traceback
from functools import partial
from typing import Any, Callable, Dict, NamedTuple

import torch
import torch.distributed as dist

from ipu_packed_bert.data.global_batches import GlobalBatches, StoredPacks
from ipu_packed_bert.engine.host import HostEngine
from ipu_packed_bert.processes.ranks import Processes, Ranks
from ipu_packed_bert.settings.loading import config_from_tree
from ipu_packed_bert.tasks.pretraining import Pretraining
from ipu_packed_bert.training.examples import prepare
from pack_data.store.data_set import PackStore
from tests.tiny_runs import held_out_of, tiny_settings


class Job(NamedTuple):
    name: str
    size: int  # ranks, or instances
    # Of ranks: (processes, folder, **options) -> what is saved of rank 0.
    # Of instances: (work, **options) -> what is said of this instance.
    make: Callable[..., Any]
    options: Dict[str, Any]


class DoubleEngine(HostEngine):
    def _build(self):
        return super()._build().double()


def pretrained(
    processes,
    folder,
    *,
    data,
    steps,
    overrides=(),
    after=None,
    double=True,
):
    """Updates made on a data set of `tiny_data`, continued `after` another job, and what they told."""
    config = config_from_tree(tiny_settings(data), "tiny", ["model.hidden_dropout=0.0", *overrides])
    with PackStore.open(data) as store, held_out_of(store) as evaluation:
        factor = store.manifest.packing_factor
        config = config.with_micro_batch(factor, ranks=processes.size)
        task = Pretraining(config, store.schema)
        engine = (DoubleEngine if double else HostEngine)(
            config, task, packing_factor=factor, device="cpu", processes=processes
        )
        batches = GlobalBatches(
            StoredPacks(store, seed=config.run.seed),
            task.layout(config, factor),
            share=engine.share,
            held_out=StoredPacks(evaluation),
        )
        with contextlib.closing(batches):
            before = processes.of_first(torch.load, folder / after) if after else None
            return updates_made(engine, task, batches, steps, before)


def updates_made(engine, task, batches, steps, former=None):
    """Updates that go on from what a `former` call has given, and what they told."""
    if former:
        engine.load_state(former["engine"])
        batches.load_state(former["batches"])
    results = [engine.step(next(batches), 0.01) for _ in range(steps)]
    log = [{**result.metrics, **result.counts, "gradient_norm": result.gradient_norm} for result in results]
    held_out = task.evaluate(engine, batches.held_out())
    evaluation = {**held_out.metrics, **held_out.counts}
    return {"engine": engine.state(), "batches": batches.state(), "log": log, "held_out": evaluation}


def fine_tuned(processes, folder, *, config, steps):
    """Updates of a fine-tuning run, and what it predicts afterwards."""
    with _double():
        prepared = prepare(config, processes=processes)
    return fine_tuning_made(prepared, steps)


def fine_tuning_made(prepared, steps):
    task = prepared.task
    engine = prepared.engine
    with contextlib.closing(prepared.batches) as batches:
        log = [engine.step(next(batches), 0.01).metrics for _ in range(steps)]
        predicted = task.predict(engine, batches.held_out())
        outputs = [torch.from_numpy(output) for output in predicted.outputs]
        return {"engine": engine.state(), "log": log, "held_out": predicted.counts, "outputs": outputs}


@contextlib.contextmanager
def _double():
    plain = HostEngine._build
    HostEngine._build = lambda self: plain(self).double()  # type: ignore[method-assign]
    try:
        yield
    finally:
        HostEngine._build = plain  # type: ignore[method-assign]


def at_work(folder, jobs, *, ranks=4):
    """The result of each job, by its name."""
    run_all(folder, [partial(_work, rank, folder, jobs) for rank in range(ranks)])
    return {job.name: torch.load(folder / job.name) for job in jobs}


# What a rank loads, and what the test modules load whose functions it runs.
LOADED = [
    __name__,
    "ipu_packed_bert.commands.pretrain",
    "ipu_packed_bert.commands.finetune",
    "torch._dynamo",
    "torch.utils.tensorboard",
    "tests.kill_ranks",
    "tests.fine_tuning_files",
    "pytest",
]


def forking():
    """Start processes by forking a server that has loaded the modules and has no threads."""
    server = multiprocessing.forkserver._forkserver  # type: ignore[attr-defined]
    if server._preload_modules != LOADED:
        # A test of a command may have started it without torch, and each rank would load that.
        server._stop()
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(LOADED)
    return context


def run_all(folder, works):
    """Each in a process of its own, at the same time; what one raises is told in a file `failed-*` of the folder."""
    context = forking()
    started = [
        context.Process(target=_told, args=(work, folder / f"failed-{rank}"), daemon=True)
        for rank, work in enumerate(works)
    ]
    for process in started:
        process.start()
    waiting = {process.sentinel: process for process in started}
    end = time.monotonic() + 600
    while waiting and time.monotonic() < end:
        for sentinel in multiprocessing.connection.wait(list(waiting), timeout=5):
            if waiting.pop(sentinel).exitcode:
                end = time.monotonic() + 2  # the others wait for it
    for process in waiting.values():
        process.terminate()
        process.join()
    assert [process.exitcode for process in started] == [0] * len(works), (
        "\n".join(path.read_text() for path in folder.glob("failed-*"))
        or f"exit statuses {[process.exitcode for process in started]}"
    )


def _told(work, where):
    torch.set_num_threads(1)
    try:
        work()
    except BaseException:
        where.write_text(traceback.format_exc())
        raise


def _work(rank, folder, jobs):
    for number, job in enumerate(jobs):
        if rank >= job.size:
            continue
        processes = Processes()
        if job.size > 1:
            processes = Ranks(dist.FileStore(str(folder / f"store-{number}"), job.size), rank, job.size, rank)
            processes.meet()
        result = job.make(processes, folder, **job.options)
        if rank == 0:
            torch.save(result, folder / job.name)
        if isinstance(processes, Ranks):
            processes.leave()
