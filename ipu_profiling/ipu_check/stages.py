"""The stages of `packed-bert ipu-check`."""

from __future__ import annotations

import argparse
import contextlib
import platform
import time
from pathlib import Path
from typing import Any, Callable, Dict, List, Optional

from ipu_packed_bert.benchmarks.ipu_updates import (
    IpuUpdates,
    for_hardware,
    profiling,
    upper_median,
)
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
from ipu_profiling.planning.ipu_memory import memory_of_packs
from pack_data.display.facts import Facts, number, printed, with_unit
from pack_data.reading.durable import check_new_folder


def check(args: argparse.Namespace) -> int:
    """Check a configuration on the attached IPUs; return the exit status."""
    config, _ = described(load_config(config_file(args.config), args.overrides, command="pretrain"))
    # Reports a missing SDK or IPU before anything is written.
    config = for_hardware(config)
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
    print("\n" + "\n\n".join(map(printed, stages.finish())))
    print(f"\nbundle    {stages.file}, can be attached to a report")
    return int(stages.bundle.verdict["status"])


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
    planned = memory_of_packs(config)
    memory = [placed.total for placed in planned.memory]
    smaller = planned.micro_batch_that_fits()
    return ipu_bundle.way_out(config, ipu=ipu, smaller=smaller, memory=memory)


class _Check:
    """The stages, and the bundle of their results."""

    def __init__(self, config: Config, args: argparse.Namespace):
        from ipu_packed_bert.engine.ipu.devices import inventory

        self.configured = config  # of the run; the updates have a shorter one
        self.profile: bool = args.profile
        devices = inventory(config)
        name = f"ipu-check-{config.name}-{time.strftime('%Y%m%d-%H%M%S')}"
        self.folder: Path = args.out or Path("runs", name)
        self.file = self.folder / "bundle.json"
        self.updates = IpuUpdates(config, self.folder / "profile" if self.profile else None)
        checked = self.updates.config
        self.bundle = ipu_bundle.Bundle(
            configuration={
                "name": config.name,
                "micro_batches": checked.batch.gradient_accumulation,
                "micro_batch": config.batch.micro_batch,
                "replicas": config.placement.replicas,
                "ipus_per_replica": config.placement.ipus_per_replica,
                "packs": checked.packs_per_update(1.0),
                "settings": ipu_bundle.public_settings(checked),
            },
            device={
                "architecture": devices.architecture,
                "bytes_per_tile": MK2.memory_per_tile,
            },
            versions=_versions(devices.poptorch),
        )

    def run(self) -> None:
        """Run all stages."""
        try:
            self._stage("predicted", self._predicted)
            print(
                f"{'':<10}next: compilation, without output, ten minutes to an hour for a large BERT; then updates"
            )
            with profiling(self.profile):
                self._stage("compiled", self._compiled)
                if self._done("compiled"):
                    self._stage("updates", self._updates)
                self.updates.close()  # Poplar writes the profile when the program is released
            if self.profile:
                self._stage("profile", self._profile)
        finally:
            self.updates.close()

    def _stage(self, name: str, work: Callable[[], str]) -> None:
        """Run a stage; print its line and record it in the bundle."""
        print(f"{name:<10}", end="", flush=True)
        stage: Dict[str, Any] = {
            "name": name,
            "status": ipu_bundle.INTERRUPTED,
            "seconds": 0.0,
            "said": "",
        }
        self.bundle.stages.append(stage)
        ipu_bundle.write_bundle(self.file, self.bundle)
        status = ""
        started = time.perf_counter()
        try:
            stage.update(said=work(), status=ipu_bundle.DONE)
        except Exception as error:
            # The SDK raises many classes, and none may end the other stages.
            problem = _explained(error, self.configured)
            stage.update(said=problem.text, means=problem.cause, way_out=problem.remedy)
            stage["status"] = ipu_bundle.FAILED
            status = f"{ipu_bundle.FAILED}: "
        finally:
            seconds = round(time.perf_counter() - started, 3)
            stage["seconds"] = seconds
        print(f"{with_unit(seconds, 's'):>10}  {status}{stage['said']}", flush=True)
        if "means" in stage:
            print(
                f"{'':<10}cause     {stage['means']}\n{'':<10}remedy    {stage['way_out']}",
                flush=True,
            )
        ipu_bundle.write_bundle(self.file, self.bundle)

    def _done(self, name: str) -> bool:
        done = [stage["name"] for stage in self.bundle.stages if stage["status"] == ipu_bundle.DONE]
        return name in done

    def finish(self) -> List[Facts]:
        """Write the verdict to the bundle; return its facts."""
        problems = ipu_bundle.problems(self.bundle)
        statuses = [stage["status"] for stage in self.bundle.stages]
        complete = set(statuses) == {ipu_bundle.DONE} and self._done("updates")
        measured = self.bundle.measured.get("memory", [])
        full = [each["ipu"] for each in measured if each["fullest_tile"] > MK2.memory_per_tile]
        ways_out: List[str] = []
        if full:
            ways_out = _ways_out(self.configured, full[0] if len(full) == 1 else None)
        failed = bool(problems) or not complete
        self.bundle.verdict.update(status=int(failed), problems=problems, way_out=ways_out)
        ipu_bundle.write_bundle(self.file, self.bundle)
        return ipu_bundle.facts(self.bundle)

    # ---- stages ------------------------------------------------------------------------------------------------------

    def _predicted(self) -> str:
        config = self.updates.config
        planned = memory_of_packs(config)
        memory = [{"ipu": placed.ipu, "together": placed.total} for placed in planned.memory]
        loss = self.updates.host_loss()
        predicted = self.bundle.predicted
        predicted.update(memory=memory, fits=planned.fits, loss=loss)

        target = TARGETS[config.placement.machine]
        machine = Machine(target, cache_folder())
        pipeline = machine.pipeline(config)
        machine.save()
        fitted = calibration.load()
        count = config.batch.gradient_accumulation
        cycles = fitted.duration(lambda parameters: pipeline.step(count, parameters).cycles)
        work = []
        for ipu in pipeline.ipus:
            of_ipu = pipeline.work_cycles(ipu, count, fitted.parameters)
            work.append({"ipu": ipu.number, "cycles": of_ipu})
        predicted.update(
            update_cycles=cycles,
            seconds=pipeline.step(count, fitted.parameters).seconds,
            clock_hz=target.clock_hz,
            work=work,
        )
        fits = {True: "fits", False: "does not fit", None: "may fit"}[planned.fits]
        return (
            f"{fits}: the plan counts {number(planned.fullest, '%')} of the fullest IPU; first loss "
            f"{_loss_text(loss)} on the host; {with_unit(cycles.value, 'cycles')} per update"
        )

    def _compiled(self) -> str:
        self.bundle.measured["compile_seconds"] = self.updates.compile()
        if self.profile:  # Poplar then also compiles a program that does not fit
            with contextlib.suppress(ValueError):  # the stage "profile" reports it
                self._read_memory()
            for problem in ipu_bundle.problems(self.bundle):
                if problem.startswith("does not fit"):
                    raise RuntimeError(f"out of memory: {problem}")
        return f"for {self.configured.ipus} IPUs"

    def _updates(self) -> str:
        updates = self.updates
        measured = self.bundle.measured
        # If the updates are interrupted, the lists have those that are done.
        measured.update(losses=updates.losses, seconds=updates.seconds)
        updates.run()
        speed = with_unit(upper_median(updates.seconds), "s")
        if updates.cycles is not None:
            measured["update_cycles"] = updates.cycles
            speed += f", {with_unit(updates.cycles, 'cycles')}"
        change = f"{_loss_text(updates.losses[0])} to {_loss_text(updates.losses[-1])}"
        return f"{len(updates.losses)}, loss {change}, {speed} each"

    def _read_memory(self) -> popvision.Profile:
        file = popvision.find_profile(self.folder / "profile")
        profile = popvision.read_profile(file, ipus=self.configured.placement.ipus_per_replica)
        self.bundle.versions["poplar"] = profile.poplar
        self.bundle.measured["memory"] = list(map(vars, profile.memory))
        return profile

    def _profile(self) -> str:
        profile = self._read_memory()
        measured = self.bundle.measured
        if profile.work:
            measured["update_cycles"] = max(work.cycles for work in profile.work)
            measured["work"] = list(map(vars, profile.work))
        fullest = "memory not recorded"
        if profile.memory:
            tile = max(memory.fullest_tile for memory in profile.memory)
            fullest = f"fullest tile {number(tile / MK2.memory_per_tile, '%')}"
        return f"{fullest}, {profile.runs} updates"


def _loss_text(loss: Optional[float]) -> str:
    return "not finite" if loss is None else number(loss, "nats")


def _versions(poptorch: str) -> Dict[str, Optional[str]]:
    import numpy
    import torch

    from ipu_packed_bert.training.run_folder import commit_here

    return {
        "commit": commit_here(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "numpy": numpy.__version__,
        "poptorch": poptorch,
        "system": f"{platform.system()} {platform.machine()}",
    }
