"""Training in 1 to 4 instances, as poprun starts them, on the stand-ins for PopTorch and popdist.

found = at_work(folder, [Job("two", 2, trained, dict(data=..., steps=5))])["two"]      # what each instance says

Four real processes are started once, which exchange gradients; the first `size` of them make each job, one after
another.
"""

from __future__ import annotations

import contextlib
import io
import os
import signal
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from ipu_packed_bert import engine as engines
from ipu_packed_bert.commands import pretrain
from ipu_packed_bert.data.global_batches import GlobalBatches, StoredPacks
from ipu_packed_bert.processes.ranks import _end_group, joined
from ipu_packed_bert.settings.loading import config_from_tree
from ipu_packed_bert.tasks.pretraining import Pretraining
from ipu_packed_bert.training import summary as run_summary
from ipu_packed_bert.training.examples import prepare
from pack_data.cli.command import run_main
from pack_data.store.data_set import PackStore
from tests.fakes.machine import machine
from tests.fakes.popdist import PopRun
from tests.fakes.sdk import installed
from tests.pretraining import ipu_engine
from tests.ranks_at_work import fine_tuning_made, run_all, updates_made
from tests.tiny_runs import held_out_of, not_drawn, tiny_settings

REPLICAS = 4  # of a job, one IPU each
ON_IPUS = (
    f"engine.kind=ipu placement.replicas={REPLICAS} placement.replicated_tensor_sharding=true engine.loss_scaling=128 "
    "engine.half_weights=false engine.gradient_accumulator_type=float32 model.hidden_dropout=0 batch.micro_batch=1"
).split()
ENVIRONMENT = {"POPDIST_NUM_TOTAL_REPLICAS": str(REPLICAS)}


class Work(NamedTuple):
    """Arguments of a job."""

    sdk: Any
    folder: Path
    rank: int
    size: int
    run: PopRun


def at_work(folder, jobs):
    """Return the results of all instances by name of the job."""
    run_all(folder, [partial(_work, rank, folder, jobs) for rank in range(4)])
    return {job.name: [torch.load(folder / f"{job.name}-{rank}") for rank in range(job.size)] for job in jobs}


def _work(rank, folder, jobs):
    os.environ.update(ENVIRONMENT)
    for number, job in enumerate(jobs):
        if rank >= job.size:
            continue
        run = PopRun(
            index=rank,
            instances=job.size,
            replicas=REPLICAS,
            store=dist.FileStore(str(folder / f"device-{number}"), job.size),
        )
        with installed(ipus=REPLICAS // job.size, poprun=run) as (sdk, _):
            from ipu_packed_bert.engine.ipu import poprun

            poprun._meeting_point = lambda *_: dist.FileStore(str(folder / f"host-{number}"), job.size)  # noqa: B023
            try:
                result = job.make(Work(sdk, folder, rank, job.size, run), **job.options)
            finally:
                if dist.is_initialized():  # a run that failed ends with its process, which closes its connections
                    _end_group()
        torch.save(result, folder / f"{job.name}-{rank}")


@contextlib.contextmanager
def _double(sdk):
    """Host and device compute in float64."""
    plain = sdk.program.build_network
    machine.float64 = True
    sdk.program.build_network = lambda *arguments, **named: plain(*arguments, **named).double()
    yield


def trained(work, *, data, steps, overrides=(), after=None):
    """Updates on a data set of `tiny_data` in float64, continued `after` another job, and what they told."""
    config = config_from_tree(tiny_settings(data), "tiny", [*ON_IPUS, *overrides])
    with contextlib.ExitStack() as opened:
        processes = opened.enter_context(joined(instances=engines.instances))
        opened.enter_context(_double(work.sdk))
        with PackStore.open(data) as store, held_out_of(store) as evaluation:
            factor = 1.0
            task = Pretraining(config, store.schema)
            engine = ipu_engine(work.sdk, config, store.schema, packing_factor=factor, processes=processes)
            batches = GlobalBatches(
                StoredPacks(store, seed=config.run.seed),
                task.layout(config, factor),
                share=engine.share,
                held_out=StoredPacks(evaluation),
            )
            with contextlib.closing(engine), contextlib.closing(engine.feed(batches)) as batches:
                engine.compile(batches.first())
                before = processes.of_first(torch.load, work.folder / f"{after}-0") if after else None
                updates = updates_made(engine, task, batches, steps, before)
                return {**updates, "compilations": machine.compilations, "description": engine.description}


def fine_tuned(work, *, config, steps):
    """Updates of a fine-tuning run in float64, and what it predicts afterwards."""
    with contextlib.ExitStack() as opened:
        processes = opened.enter_context(joined(instances=engines.instances))
        opened.enter_context(_double(work.sdk))
        prepared = prepare(config, processes=processes)
        opened.enter_context(contextlib.closing(prepared.engine))
        return fine_tuning_made(prepared, steps)


def ran(work, *, arguments, at=0, happens=""):
    """`run_pretraining.py` with these arguments: its exit status, and what it said.

    After `at` updates something happens to the last instance: "signal", "nan" or "mistake".
    """
    last = work.rank == work.size - 1
    if last and happens:
        _to_happen(work.sdk.engine.IpuEngine, at, happens)
    run_summary.draw_curves = not_drawn
    out = io.StringIO()
    error = io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(error):
        try:
            status = run_main(pretrain.main, [*arguments])
        except SystemExit as end:
            status = end.code
    return {"status": status, "out": out.getvalue(), "error": error.getvalue()}


def _to_happen(engine, at, what):
    count = [0]
    step = engine.step
    result = engine._result

    def stepped(self, *arguments):
        count[0] += 1
        if count[0] == at + 1 and what == "mistake":
            raise ValueError("the file ends in the middle of a pack")
        if count[0] == at + 1 and what == "signal":
            os.kill(os.getpid(), signal.SIGTERM)
        return step(self, *arguments)

    def spoilt(self, outputs, *arguments):
        if count[0] == at + 1 and what == "nan":
            count[0] += 1
            outputs = [output * float("nan") for output in outputs]
        return result(self, outputs, *arguments)

    engine.step = stepped
    engine._result = spoilt


def exchanged(work):
    """All that travels between instances on the host."""
    with joined(instances=engines.instances) as processes:
        built = []
        with processes.first_alone():
            built.append(work.rank)
        value = {"numbers": [1, 2], "half": torch.arange(3).half(), "none": torch.zeros(0), "one": torch.tensor(7)}
        return {
            "sum": processes.summed([1.0, float(work.rank), 2.0**40 + work.rank]),
            "all": processes.gathered("x" * work.rank),
            "first": processes.of_first(value.copy),
            "share": (processes.rank, processes.size),
        }
