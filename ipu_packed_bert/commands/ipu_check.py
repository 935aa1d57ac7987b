"""Compile a program, make ten updates on IPUs, and compare them with the plan and the cycle model.

packed-bert ipu-check --config packed_phase2_pod16

The command counts the cycles of the updates. With --profile it profiles the program instead, which gives memory and
cycles of each IPU (slower; needs Poplar's analysis library).

Each stage prints a line when it is done; a stage that fails prints the cause and the fix. The bundle (bundle.json, see
docs/ipu_check.md), which can be attached to a report, is written after every stage, so Ctrl-C keeps the results so far.
No data set is read: the batch is drawn at random.

Exit status: 0 all stages are done and nothing differs; 1 a stage failed, the program does not fit or a number differs;
2 the user's mistake.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import platform
import re
import time
from dataclasses import replace
from pathlib import Path
from typing import Any, Callable, Iterator, List, NamedTuple, Optional, Sequence

from ipu_packed_bert.cycles import calibration
from ipu_packed_bert.cycles.matmul import cache_folder
from ipu_packed_bert.cycles.target import MK2, TARGETS
from ipu_packed_bert.cycles.workload import Machine
from ipu_packed_bert.data.data_sets import described
from ipu_packed_bert.planning.plan import plan
from ipu_packed_bert.report import ipu_bundle, popvision
from ipu_packed_bert.settings.config import Config
from ipu_packed_bert.settings.loading import load_config
from ipu_packed_bert.settings.shipped import config_file
from pack_data.cli.command import ArgumentParser, typed
from pack_data.packing.histogram import LengthHistogram
from pack_data.spfhp import pack

_UPDATES = 10


def _parse(argv: Optional[Sequence[str]]) -> Any:
    parser = ArgumentParser(prog=typed("ipu-check"), description=__doc__)
    parser.add_argument(
        "--config", required=True, metavar="FILE|NAME", help="a configuration of pre-training"
    )
    parser.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="a.b=c",
        dest="overrides",
        help="override one setting",
    )
    parser.add_argument(
        "--profile",
        action="store_true",
        help="profile the updates instead of counting their cycles",
    )
    parser.add_argument(
        "--out", type=Path, metavar="DIR", help="a new folder; default runs/ipu-check-NAME-TIME"
    )
    return parser.parse_args(argv)


def main(argv: Optional[Sequence[str]] = None) -> int:
    args = _parse(argv)
    config, _ = described(load_config(config_file(args.config), args.overrides, command="pretrain"))
    from ipu_packed_bert.engine import choose_engine

    config = replace(
        config, engine=replace(config.engine, kind="ipu", offline_export=None), without_ipus=()
    )
    choice = choose_engine(
        config
    )  # a missing SDK and missing IPUs are one line, before anything is written
    if not choice.hardware:
        raise ValueError(
            f"{config.path}: {choice.reason}; the check is of IPUs, `make test-ipu` tests the IPU Model"
        )
    # The profile of a former check would be taken for that of this one.
    if (
        args.out is not None
        and args.out.exists()
        and (not args.out.is_dir() or any(args.out.iterdir()))
    ):
        raise ValueError(f"--out {args.out}: exists and is not an empty folder; give another one")
    check = _Check(config, args)
    try:
        check.run()
    except KeyboardInterrupt:
        check.finish()
        print(f"\ninterrupted; what there is: {check.file}")
        raise
    print("\n" + "\n".join(check.finish()))
    print(f"\nbundle    {check.file}, to be attached to a report")
    return check.bundle.verdict.status


class _Explained(NamedTuple):
    """What a stage did not do, in words."""

    said: str
    means: str
    way_out: str


class _Failed(Exception):
    """A stage that did not do what it should, as explained."""


_NO_MEMORY = re.compile(
    r"out of memory on tile (\d+)|out of memory|memory allocation|graph_memory_allocation", re.I
)


def _explained(error: BaseException, config: Config) -> _Explained:
    """Explain an error of the SDK."""
    if isinstance(error, _Failed):
        return error.args[0]
    text = " ".join(str(error).split())[:400] or type(error).__name__
    memory = _NO_MEMORY.search(text)
    if memory:
        ipu = int(memory[1]) // MK2.tiles if memory[1] else None
        on = "an IPU" if ipu is None else f"IPU {ipu}"
        return _Explained(
            text, f"the program does not fit on {on}", "; or ".join(_ways_out(config, ipu))
        )
    if isinstance(error, ValueError):  # of this program, whose messages say the way out
        return _Explained(text, "this stage cannot be done as things are", "as the line says")
    return _Explained(
        f"{type(error).__name__}: {text}",
        "the SDK or this program did not expect it",
        "docs/ipu.md, What may go wrong; or attach the bundle to a report",
    )


def _ways_out(config: Config, ipu: Optional[int]) -> List[str]:
    smaller = plan(config, packing_factor=1.0).micro_batch_that_fits()
    return ipu_bundle.way_out(config, ipu=ipu, smaller=smaller)


class _Check:
    """The stages, and the bundle as far as it has got."""

    def __init__(self, config: Config, args: Any):
        from ipu_packed_bert.engine.ipu.devices import inventory

        self.args, there = args, inventory(config)
        name = f"ipu-check-{config.name}-{time.strftime('%Y%m%d-%H%M%S')}"
        self.folder: Path = args.out or Path("runs", name)
        self.file = self.folder / "bundle.json"
        self.engine: Any = None
        # As few micro-batches as fill the pipeline.
        self.config = replace(
            config,
            batch=replace(config.batch, gradient_accumulation=config.pipeline_stages),
            optimizer=replace(config.optimizer, packing_adjustment="none"),
            engine=replace(
                config.engine,
                log_cycles=not args.profile,
                profile_directory=str(self.folder / "profile") if args.profile else None,
                executable_cache=None,
                executable=None,
            ),
        ).with_schedule()
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
            device=ipu_bundle.CheckedDevice(there.architecture, MK2.memory_per_tile),
            versions=_versions(there.poptorch),
            predicted=ipu_bundle.Predicted(),
            measured=ipu_bundle.MeasuredUpdates(),
            verdict=ipu_bundle.Verdict(1, [], []),
        )
        self.batch = self._drawn()

    def run(self) -> None:
        try:
            self._stage("predicted", self._predicted)
            print(
                f"{'':<10}to come: compiling, in silence, ten minutes to an hour for a large BERT; then updates"
            )
            with _profiling(self.args.profile):
                self._stage("compiled", self._compiled)
                if self._done("compiled"):
                    self._stage("updates", self._updates)
                self._close()  # a profile is written when the program is let go of
            if self.args.profile:
                self._stage("profile", self._profile)
        finally:
            self._close()

    def _stage(self, name: str, work: Callable[[], str]) -> None:
        """One stage: its line on the terminal, its entry in the bundle."""
        print(f"{name:<10}", end="", flush=True)
        stage = ipu_bundle.Stage(name, ipu_bundle.INTERRUPTED, seconds=0.0, said="")
        self.bundle.stages.append(stage)
        ipu_bundle.write_bundle(self.file, self.bundle)
        started = time.perf_counter()
        try:
            stage.said = work()
            stage.status = ipu_bundle.DONE
        except (
            Exception
        ) as error:  # the SDK's errors are of many kinds; none may take the other stages with it
            stage.said, stage.means, stage.way_out = _explained(error, self.config)
            stage.status = ipu_bundle.FAILED
        finally:
            stage.seconds = round(time.perf_counter() - started, 3)
        status = "" if stage.status == ipu_bundle.DONE else f"{stage.status}: "
        print(f"{stage.seconds:8.1f} s  {status}{stage.said}", flush=True)
        if stage.means is not None:
            print(f"{'':<10}it means  {stage.means}\n{'':<10}way out   {stage.way_out}", flush=True)
        ipu_bundle.write_bundle(self.file, self.bundle)

    def _done(self, name: str) -> bool:
        return any(
            stage.name == name and stage.status == ipu_bundle.DONE for stage in self.bundle.stages
        )

    def finish(self) -> List[str]:
        """Write the verdict into the bundle and return the page's lines."""
        problems = ipu_bundle.problems(self.bundle)
        stages = self.bundle.stages
        unfinished = not self._done("updates") or any(
            stage.status != ipu_bundle.DONE for stage in stages
        )
        measured = self.bundle.measured.memory or []
        full = [memory.ipu for memory in measured if memory.fullest_tile > MK2.memory_per_tile]
        ways = _ways_out(self.config, full[0] if len(full) == 1 else None) if full else []
        self.bundle.verdict = ipu_bundle.Verdict(int(bool(problems) or unfinished), problems, ways)
        ipu_bundle.write_bundle(self.file, self.bundle)
        return ipu_bundle.page(self.bundle)

    def _close(self) -> None:
        engine, self.engine = self.engine, None
        if engine is not None:
            with contextlib.suppress(Exception):
                engine.close()

    # ---- stages ------------------------------------------------------------------------------------------------------

    def _predicted(self) -> str:
        config, predicted = self.config, self.bundle.predicted
        planned = plan(config, packing_factor=1.0)
        predicted.memory = [
            ipu_bundle.PlannedMemory(memory.ipu, memory.total) for memory in planned.memory
        ]
        predicted.fits = planned.fits
        predicted.loss = _host_loss(config, self.batch)
        if config.data.max_sequences_per_pack is None:
            config = replace(config, data=replace(config.data, max_sequences_per_pack=self._depth))
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
        predicted.work = [
            popvision.Work(ipu.number, pipeline.work_cycles(ipu, number, fitted.parameters))
            for ipu in pipeline.ipus
        ]
        fits = {True: "fits", False: "does not fit", None: "tight, unknown"}[planned.fits]
        return (
            f"{fits}: {planned.fullest:.0%} of the fullest IPU is counted; first loss {predicted.loss:.4f} on the host;"
            f" {predicted.update_cycles.value:,.0f} cycles of an update"
        )

    def _compiled(self) -> str:
        from ipu_packed_bert.engine import build_engine, choose_engine
        from ipu_packed_bert.tasks.pretraining import Pretraining

        config = self.config
        task = Pretraining(
            replace(config, data=replace(config.data, max_sequences_per_pack=self._depth))
        )
        self.engine = build_engine(config, task, choose_engine(config), packing_factor=1.0)
        started = time.perf_counter()
        self.engine.compile(self.batch)
        self.bundle.measured.compile_seconds = time.perf_counter() - started
        if self.args.profile:  # under which Poplar compiles what does not fit, too
            with contextlib.suppress(ValueError):  # the stage "profile" says what is missing
                self._read_memory()
            full = [
                each for each in ipu_bundle.problems(self.bundle) if each.startswith("does not fit")
            ]
            if full:
                raise _Failed(
                    _Explained(
                        full[0], "Poplar would not load it", "; or ".join(_ways_out(config, None))
                    )
                )
        return f"for {config.ipus} IPUs"

    def _updates(self) -> str:
        from ipu_packed_bert.model.optimizer import learning_rate

        losses: List[Optional[float]] = []
        seconds: List[float] = []
        cycles: List[int] = []
        measured = self.bundle.measured
        measured.losses, measured.seconds = losses, seconds
        for number in range(_UPDATES):
            result = self.engine.step(
                self.batch, learning_rate(min(number, self.config.run.steps - 1), self.config)
            )
            losses.append(result.loss if math.isfinite(result.loss) else None)
            seconds.append(result.seconds)
            if result.cycles is not None:
                cycles.append(result.cycles)
        if cycles:
            measured.update_cycles = sorted(cycles[1:])[len(cycles[1:]) // 2]
        first, last = (
            "not finite" if loss is None else f"{loss:.4f}" for loss in (losses[0], losses[-1])
        )
        counted = f", {measured.update_cycles:,} cycles" if cycles else ""
        return f"{len(losses)}, loss {first} to {last}, {sorted(seconds)[len(seconds) // 2]:.3f} s{counted} each"

    def _read_memory(self) -> popvision.Profile:
        file = popvision.find_profile(self.folder / "profile")
        found = popvision.read_profile(file, ipus=self.config.placement.ipus_per_replica)
        self.bundle.versions.poplar = found.poplar
        self.bundle.measured.memory = list(found.memory)
        return found

    def _profile(self) -> str:
        found, measured = self._read_memory(), self.bundle.measured
        if found.work:
            measured.update_cycles = max(work.cycles for work in found.work)
            measured.work = list(found.work)
        tiles = [memory.fullest_tile for memory in found.memory]
        most = (
            f"fullest tile {max(tiles) / MK2.memory_per_tile:.0%}" if tiles else "no memory in it"
        )
        return f"{most}, {found.runs} updates"

    # ---- the batch ---------------------------------------------------------------------------------------------------

    @property
    def _depth(self) -> int:
        return self.config.data.max_sequences_per_pack or 8

    def _drawn(self) -> Any:
        """One global batch, of sequences of all lengths alike; what a static program computes does not depend on it."""
        from ipu_packed_bert.benchmarks.work import draw_work

        config, slots = self.config, self.config.data.max_sequence_length
        histogram = LengthHistogram.from_lengths(list(range(min(8, slots), slots + 1)), slots)
        return draw_work(
            pack(histogram, max_sequences_per_pack=self._depth),
            packs=config.packs_per_update(1.0),
            micro_batch=config.batch.micro_batch,
            vocabulary=config.model.vocabulary_size,
            max_predictions=config.predictions_per_sequence,
            seed=config.run.seed,
        ).packed


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

    config = replace(
        config, engine=replace(config.engine, kind="host", device="cpu", precision="float32")
    )
    return HostEngine(config, Pretraining(config), packing_factor=1.0).evaluate(batch).loss


@contextlib.contextmanager
def _profiling(profile: bool) -> Iterator[None]:
    """Poplar profiles all updates, instead of two, on one replica, and finishes a program that does not fit.

    It reads these options from the environment; what the user set there stays. One replica without all symbols is what
    Graphcore profiled itself (MLPerf v1.1, scripts/pod128-run.sh).
    """
    name = "POPLAR_ENGINE_OPTIONS"
    former = os.environ.get(name)
    options = {
        "autoReport.executionProfileProgramRunCount": str(
            _UPDATES + 2
        ),  # weights come and go in runs of their own
        "debug.allowOutOfMemory": "true",
        "debug.outputAllSymbols": "false",
        "profiler.replicaToProfile": "0",
    }
    try:
        given = json.loads(former or "{}")
    except ValueError:
        raise ValueError(f"{name}: no JSON; unset it, or mend it") from None
    if profile:
        os.environ[name] = json.dumps({**options, **given})
    try:
        yield
    finally:
        os.environ.pop(name, None)
        if former is not None:
            os.environ[name] = former
