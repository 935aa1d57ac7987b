"""The stages of `packed-bert ipu-check`."""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import os
import platform
import time
from dataclasses import replace
from pathlib import Path
from typing import Any, Callable, Iterator, List, Optional, Sequence

from ipu_packed_bert.data.data_sets import described
from ipu_packed_bert.engine.sdk_errors import SdkError, SdkProblem, classify
from ipu_packed_bert.settings.config import Config
from ipu_packed_bert.settings.loading import load_config
from ipu_packed_bert.settings.shipped import config_file
from ipu_profiling.cycles import calibration
from ipu_profiling.cycles.matmul import cache_folder
from ipu_profiling.cycles.target import MK2, TARGETS
from ipu_profiling.cycles.workload import Machine
from ipu_profiling.measured import bundle as ipu_bundle
from ipu_profiling.measured import popvision
from ipu_profiling.planning.plan import plan
from pack_data.packing.histogram import LengthHistogram
from pack_data.reading.durable import check_new_folder
from pack_data.spfhp import pack

_UPDATES = 10  # the first one is left out of the cycles
_DEFAULT_DEPTH = 8  # sequences per pack, if the configuration does not limit it


def check(args: argparse.Namespace) -> int:
    """Check a configuration on the attached IPUs; return the exit status."""
    config, _ = described(load_config(config_file(args.config), args.overrides, command="pretrain"))
    from ipu_packed_bert.engine import choose_engine

    config = replace(config, without_ipus=()).changed("engine", kind="ipu", offline_export=None)
    config = config.with_micro_batch(1.0)
    # Reports a missing SDK or IPU before anything is written.
    choice = choose_engine(config, way_out="")
    if not choice.hardware:
        raise ValueError(
            f"{config.path}: {choice.reason}; the check needs IPUs, `make test-ipu` tests the IPU Model"
        )
    # The profile of an earlier check could be mistaken for that of this one.
    if args.out is not None:
        check_new_folder(args.out, f"--out {args.out}")
    stages = _Check(config, args)
    try:
        stages.run()
    except KeyboardInterrupt:
        stages.finish()
        print(f"\ninterrupted; the results so far are in {stages.file}")
        raise
    print("\n" + "\n".join(stages.finish()))
    print(f"\nbundle    {stages.file}, can be attached to a report")
    return stages.bundle.verdict.status


def _explained(error: BaseException, config: Config) -> SdkProblem:
    """Explain an error of a stage; of an IPU without enough memory, advise changes of `config`."""
    if isinstance(error, SdkError):
        problem = error.problem
    elif isinstance(error, ValueError):
        # Our own errors name the remedy.
        return classify(error)._replace(
            cause="this stage needs a change first", remedy="see the error"
        )
    else:
        problem = classify(error)
    if problem.kind == "other":
        return problem._replace(text=f"{type(error).__name__}: {problem.text}")
    if problem.kind != "tile memory":
        return problem
    ipu = None if problem.tile is None else problem.tile // MK2.tiles
    name = "an IPU" if ipu is None else f"IPU {ipu}"
    return problem._replace(
        cause=f"the program does not fit on {name}", remedy="; or ".join(_ways_out(config, ipu))
    )


def _ways_out(config: Config, ipu: Optional[int]) -> List[str]:
    """Return the advice for the user's configuration `config`."""
    planned = plan(config, packing_factor=1.0)
    memory = [placed.total for placed in planned.memory]
    smaller = planned.micro_batch_that_fits()
    return ipu_bundle.way_out(config, ipu=ipu, smaller=smaller, memory=memory)


class _Check:
    """The stages, and the bundle of their results."""

    def __init__(self, config: Config, args: Any):
        from ipu_packed_bert.engine.ipu.devices import inventory

        self.args = args
        self.configured = config  # of the run; `self.config` is the shorter one of the check
        devices = inventory(config)
        name = f"ipu-check-{config.name}-{time.strftime('%Y%m%d-%H%M%S')}"
        self.folder: Path = args.out or Path("runs", name)
        self.file = self.folder / "bundle.json"
        self.engine: Any = None
        # The fewest micro-batches that fill the pipeline.
        checked = config.changed("batch", gradient_accumulation=config.pipeline_stages)
        checked = checked.changed("optimizer", packing_adjustment="none").with_schedule()
        self.config = checked.changed(
            "engine",
            log_cycles=not args.profile,
            profile_directory=str(self.folder / "profile") if args.profile else None,
            executable_cache=None,
            executable=None,
        )
        self.bundle = ipu_bundle.Bundle(
            stages=[],
            configuration=ipu_bundle.Checked(
                name=config.name,
                micro_batches=self.config.batch.gradient_accumulation,
                micro_batch=config.batch.micro_batch,
                replicas=config.placement.replicas,
                ipus_per_replica=config.placement.ipus_per_replica,
                packs=self.config.packs_per_update(1.0),
                settings=ipu_bundle.public_settings(self.config),
            ),
            device=ipu_bundle.CheckedDevice(devices.architecture, MK2.memory_per_tile),
            versions=_versions(devices.poptorch),
            predicted=ipu_bundle.Predicted(),
            measured=ipu_bundle.MeasuredUpdates(),
            verdict=ipu_bundle.Verdict(1, [], []),
        )
        depth = config.data.max_sequences_per_pack or _DEFAULT_DEPTH
        self.config = self.config.changed("data", max_sequences_per_pack=depth)
        self.batch = _random_batch(self.config)

    def run(self) -> None:
        """Run all stages."""
        try:
            self._stage("predicted", self._predicted)
            print(
                f"{'':<10}next: compilation, without output, ten minutes to an hour for a large BERT; then updates"
            )
            with _profiling(self.args.profile):
                self._stage("compiled", self._compiled)
                if self._done("compiled"):
                    self._stage("updates", self._updates)
                self._close()  # Poplar writes the profile when the program is released
            if self.args.profile:
                self._stage("profile", self._profile)
        finally:
            self._close()

    def _stage(self, name: str, work: Callable[[], str]) -> None:
        """Run a stage; print its line and record it in the bundle."""
        print(f"{name:<10}", end="", flush=True)
        stage = ipu_bundle.Stage(name, ipu_bundle.INTERRUPTED, seconds=0.0, said="")
        self.bundle.stages.append(stage)
        ipu_bundle.write_bundle(self.file, self.bundle)
        started = time.perf_counter()
        try:
            stage.said = work()
            stage.status = ipu_bundle.DONE
        except Exception as error:
            # The SDK raises many classes, and none may end the other stages.
            problem = _explained(error, self.configured)
            stage.said = problem.text
            stage.means = problem.cause
            stage.way_out = problem.remedy
            stage.status = ipu_bundle.FAILED
        finally:
            stage.seconds = round(time.perf_counter() - started, 3)
        status = "" if stage.status == ipu_bundle.DONE else f"{stage.status}: "
        print(f"{stage.seconds:8.1f} s  {status}{stage.said}", flush=True)
        if stage.means is not None:
            print(f"{'':<10}cause     {stage.means}\n{'':<10}remedy    {stage.way_out}", flush=True)
        ipu_bundle.write_bundle(self.file, self.bundle)

    def _done(self, name: str) -> bool:
        return name in [
            stage.name for stage in self.bundle.stages if stage.status == ipu_bundle.DONE
        ]

    def finish(self) -> List[str]:
        """Write the verdict to the bundle; return the lines of the report."""
        problems = ipu_bundle.problems(self.bundle)
        complete = all(stage.status == ipu_bundle.DONE for stage in self.bundle.stages)
        failed = bool(problems) or not complete or not self._done("updates")
        measured = self.bundle.measured.memory or []
        full = [memory.ipu for memory in measured if memory.fullest_tile > MK2.memory_per_tile]
        ways_out: List[str] = []
        if full:
            ways_out = _ways_out(self.configured, full[0] if len(full) == 1 else None)
        self.bundle.verdict = ipu_bundle.Verdict(int(failed), problems, ways_out)
        ipu_bundle.write_bundle(self.file, self.bundle)
        return ipu_bundle.page(self.bundle)

    def _close(self) -> None:
        engine = self.engine
        self.engine = None
        if engine is not None:
            with contextlib.suppress(Exception):
                engine.close()

    # ---- stages ------------------------------------------------------------------------------------------------------

    def _predicted(self) -> str:
        config = self.config
        predicted = self.bundle.predicted
        planned = plan(config, packing_factor=1.0)
        predicted.memory = [
            ipu_bundle.PlannedMemory(memory.ipu, memory.total) for memory in planned.memory
        ]
        predicted.fits = planned.fits
        predicted.loss = _host_loss(config, self.batch)
        target = TARGETS[config.placement.machine]
        machine = Machine(target, cache_folder())
        pipeline = machine.pipeline(config)
        machine.save()
        fitted = calibration.load()
        number = config.batch.gradient_accumulation
        predicted.update_cycles = fitted.duration(
            lambda parameters: pipeline.step(number, parameters).cycles
        )
        predicted.seconds = pipeline.step(number, fitted.parameters).seconds
        predicted.clock_hz = target.clock_hz
        predicted.work = []
        for ipu in pipeline.ipus:
            cycles = pipeline.work_cycles(ipu, number, fitted.parameters)
            predicted.work.append(popvision.Work(ipu.number, cycles))
        fits = {True: "fits", False: "does not fit", None: "may fit"}[planned.fits]
        return (
            f"{fits}: the plan counts {planned.fullest:.0%} of the fullest IPU; first loss {predicted.loss:.4f} on the"
            f" host; {predicted.update_cycles.value:,.0f} cycles per update"
        )

    def _compiled(self) -> str:
        from ipu_packed_bert.engine import build_engine, choose_engine
        from ipu_packed_bert.tasks.pretraining import Pretraining

        config = self.config
        self.engine = build_engine(
            config, Pretraining(config), choose_engine(config), packing_factor=1.0
        )
        started = time.perf_counter()
        self.engine.compile(self.batch)
        self.bundle.measured.compile_seconds = time.perf_counter() - started
        if self.args.profile:  # Poplar then also compiles a program that does not fit
            with contextlib.suppress(ValueError):  # the stage "profile" reports it
                self._read_memory()
            for problem in ipu_bundle.problems(self.bundle):
                if problem.startswith("does not fit"):
                    raise RuntimeError(f"out of memory: {problem}")
        return f"for {config.ipus} IPUs"

    def _updates(self) -> str:
        from ipu_packed_bert.model.optimizer import learning_rate

        losses: List[Optional[float]] = []
        seconds: List[float] = []
        cycles: List[int] = []
        measured = self.bundle.measured
        measured.losses = losses
        measured.seconds = seconds
        for number in range(_UPDATES):
            rate = learning_rate(min(number, self.config.run.steps - 1), self.config)
            result = self.engine.step(self.batch, rate)
            losses.append(result.loss if math.isfinite(result.loss) else None)
            seconds.append(result.seconds)
            if result.cycles is not None:
                cycles.append(result.cycles)

        speed = f"{_upper_median(seconds):.3f} s"
        if cycles:
            measured.update_cycles = _upper_median(cycles[1:])
            speed += f", {measured.update_cycles:,} cycles"
        change = f"{_loss_text(losses[0])} to {_loss_text(losses[-1])}"
        return f"{len(losses)}, loss {change}, {speed} each"

    def _read_memory(self) -> popvision.Profile:
        file = popvision.find_profile(self.folder / "profile")
        profile = popvision.read_profile(file, ipus=self.config.placement.ipus_per_replica)
        self.bundle.versions.poplar = profile.poplar
        self.bundle.measured.memory = list(profile.memory)
        return profile

    def _profile(self) -> str:
        profile = self._read_memory()
        measured = self.bundle.measured
        if profile.work:
            measured.update_cycles = max(work.cycles for work in profile.work)
            measured.work = list(profile.work)
        fullest = "memory not recorded"
        if profile.memory:
            tile = max(memory.fullest_tile for memory in profile.memory)
            fullest = f"fullest tile {tile / MK2.memory_per_tile:.0%}"
        return f"{fullest}, {profile.runs} updates"


def _random_batch(config: Config) -> Any:
    """Return a global batch with as many sequences of every length; a static program does not depend on it."""
    from ipu_packed_bert.benchmarks.work import draw_work

    slots = config.data.max_sequence_length
    histogram = LengthHistogram.from_lengths(list(range(min(8, slots), slots + 1)), slots)
    return draw_work(
        pack(histogram, max_sequences_per_pack=config.data.max_sequences_per_pack),
        packs=config.packs_per_update(1.0),
        micro_batch=config.batch.micro_batch,
        vocabulary=config.model.vocabulary_size,
        max_predictions=config.predictions_per_sequence,
        seed=config.run.seed,
    ).packed


def _upper_median(values: Sequence[Any]) -> Any:
    return sorted(values)[len(values) // 2]


def _loss_text(loss: Optional[float]) -> str:
    return "not finite" if loss is None else f"{loss:.4f}"


def _versions(poptorch: str) -> ipu_bundle.Versions:
    import numpy
    import torch

    from ipu_packed_bert.training.run_folder import commit_here

    return ipu_bundle.Versions(
        commit=commit_here(),
        python=platform.python_version(),
        torch=torch.__version__,
        numpy=numpy.__version__,
        poptorch=poptorch,
        system=f"{platform.system()} {platform.machine()}",
    )


def _host_loss(config: Config, batch: Any) -> float:
    """Compute the loss of a batch before the first update, in float32 and without dropout."""
    from ipu_packed_bert.engine.host import HostEngine
    from ipu_packed_bert.tasks.pretraining import Pretraining

    config = config.changed("engine", kind="host", device="cpu", precision="float32")
    return HostEngine(config, Pretraining(config), packing_factor=1.0).evaluate(batch).loss


@contextlib.contextmanager
def _profiling(profile: bool) -> Iterator[None]:
    """Make Poplar profile all updates (not two) of one replica, and compile programs that do not fit.

    Poplar reads these options from the environment; options that the user has set take precedence. Graphcore profiled
    one replica without all symbols too (MLPerf v1.1, scripts/pod128-run.sh).
    """
    name = "POPLAR_ENGINE_OPTIONS"
    original = os.environ.get(name)
    options = {
        # Two more runs copy the weights to and from the device.
        "autoReport.executionProfileProgramRunCount": str(_UPDATES + 2),
        "debug.allowOutOfMemory": "true",
        "debug.outputAllSymbols": "false",
        "profiler.replicaToProfile": "0",
    }
    try:
        user_options = json.loads(original or "{}")
    except ValueError:
        raise ValueError(f"{name}: is not JSON; correct or unset it") from None
    if profile:
        os.environ[name] = json.dumps({**options, **user_options})
    try:
        yield
    finally:
        os.environ.pop(name, None)
        if original is not None:
            os.environ[name] = original
