"""The first day on IPUs: what is there, a program compiled and loaded, ten profiled updates, and what came of them
beside what the plan and the cycle model say.  packed-bert ipu-check --config packed_phase2_pod16

Each stage prints a line when it is done. One that fails says what was done, what that means and the way out, and the
stages that can go on without it do. The bundle (bundle.json, see docs/ipu_check.md) is written after every stage, so
that Ctrl-C leaves what there is; it can be attached to a report. No data set is read: the batch is drawn at random.

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
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any, Callable, ContextManager, Dict, Iterator, List, Optional, Sequence, Tuple

from ipu_packed_bert.cycles import calibration
from ipu_packed_bert.cycles.matmul import cache_folder
from ipu_packed_bert.cycles.target import MK2, TARGETS
from ipu_packed_bert.cycles.workload import Machine
from ipu_packed_bert.data.data_sets import described
from ipu_packed_bert.planning.plan import plan
from ipu_packed_bert.report import ipu_bundle, popvision
from ipu_packed_bert.report.measured import model_work
from ipu_packed_bert.settings.pretraining import Config, load_config
from ipu_packed_bert.settings.shipped import config_file
from pack_data.cli.command import ArgumentParser, positive_int, typed
from pack_data.histogram import LengthHistogram
from pack_data.reading.files import write_atomically
from pack_data.spfhp import pack

_UPDATES = 10


def _parse(argv: Optional[Sequence[str]]) -> Any:
    parser = ArgumentParser(prog=typed("ipu-check"), description=__doc__)
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--config", metavar="FILE|NAME", help="a configuration of pre-training")
    what.add_argument("--show", type=Path, metavar="FILE", help="print the page of a bundle, and stop")
    parser.add_argument(
        "--set", action="append", default=[], metavar="a.b=c", dest="overrides", help="override one setting"
    )
    parser.add_argument(
        "--micro-batches",
        type=positive_int,
        metavar="N",
        help="of a replica in an update; default, and at least: the pipeline's stages",
    )
    parser.add_argument("--updates", type=positive_int, default=_UPDATES, metavar="N", help="default %(default)s")
    parser.add_argument("--no-host", action="store_true", help="do not compute the first loss on the host")
    parser.add_argument(
        "--count", action="store_true", help="compile a second time, without the profile, and count cycles"
    )
    parser.add_argument("--out", type=Path, metavar="DIR", help="a new folder; default runs/ipu-check-NAME-TIME")
    return parser.parse_args(argv)


def main(argv: Optional[Sequence[str]] = None) -> int:
    args = _parse(argv)
    if args.show is not None:
        bundle = ipu_bundle.read_bundle(args.show)
        print("\n".join(ipu_bundle.page(bundle)))
        return int(bundle["verdict"]["status"])
    config, _ = described(load_config(config_file(args.config), args.overrides))
    from ipu_packed_bert.engine import choose_engine

    # A missing SDK and poprun are one line, before anything is written.
    choose_engine(replace(config, engine=replace(config.engine, kind="ipu", offline_export="program")))
    from ipu_packed_bert.engine.ipu.devices import inventory

    found = inventory(config)
    checked = config if found.model_asked_by is None else config.applied_without_ipus()[0]
    if args.micro_batches is not None and args.micro_batches < checked.pipeline_stages:
        raise ValueError(
            f"--micro-batches is {args.micro_batches}; must be at least {checked.pipeline_stages}, the stages of the "
            "pipeline"
        )
    # The profile and the program of a former check would be taken for those of this one.
    if args.out is not None and args.out.exists() and (not args.out.is_dir() or any(args.out.iterdir())):
        raise ValueError(f"--out {args.out}: exists and is not an empty folder; give another one")
    check = _Check(config, args, found)
    try:
        check.run()
    except KeyboardInterrupt:
        check.finish()
        print(f"\ninterrupted; what there is: {check.file}")
        raise
    print("\n" + "\n".join(check.finish()))
    print(f"\nbundle    {check.file}, to be attached to a report; the profile is in {check.folder / 'profile'}")
    return int(check.bundle["verdict"]["status"])


class _LeftOut(Exception):
    """A stage that has no business here; the text says why."""


class _Failed(Exception):
    """A stage that did not do what it should, in words."""

    def __init__(self, done: str, means: str, way_out: str):
        super().__init__(done)
        self.done, self.means, self.way_out = done, means, way_out


# What of an error's text tells what it means: (words, what it means, the way out).
_NO_MEMORY = re.compile(r"out of memory on tile (\d+)|out of memory|memory allocation|graph_memory_allocation", re.I)
_MEANINGS = (
    (
        re.compile(r"no device|attach|acquire|in use|partition|V-IPU|vipu", re.I),
        "the IPUs are not attached to this process, or another one has them",
        "gc-info -l lists them, gc-monitor says who uses them; under V-IPU, check the partition and IPUOF_VIPU_API_*",
    ),
    (
        re.compile(r"version mismatch|invalid file|cannot open.*executable", re.I),
        "the program was compiled by another version of the SDK, or its file is damaged",
        "run the check again in one shell, with one SDK enabled",
    ),
)


def explained(error: BaseException, config: Config) -> _Failed:
    """What an error of the SDK means."""
    text = " ".join(str(error).split())[:400] or type(error).__name__
    if isinstance(error, _Failed):
        return error
    memory = _NO_MEMORY.search(text)
    if memory:
        ipu = int(memory[1]) // MK2.tiles if memory[1] else None
        on = "an IPU" if ipu is None else f"IPU {ipu}"
        ways = ipu_bundle.way_out(config, ipu=ipu, smaller=plan(config, packing_factor=1.0).micro_batch_that_fits())
        return _Failed(text, f"the program does not fit on {on}", "; or ".join(ways))
    if isinstance(error, ValueError):  # of this program, whose messages say the way out
        return _Failed(text, "this stage cannot be done as things are", "as the line says")
    for words, means, way_out in _MEANINGS:
        if words.search(text):
            return _Failed(text, means, way_out)
    return _Failed(
        f"{type(error).__name__}: {text}", "the SDK or this program did not expect it", "attach the bundle to a report"
    )


class _Check:
    """The stages, and the bundle as far as it has got."""

    def __init__(self, config: Config, args: Any, inventory: Any):
        """inventory: what `inventory` found."""
        self.args, self.inventory = args, inventory
        self.asked = replace(config, engine=replace(config.engine, kind="ipu"))
        name = f"ipu-check-{config.name}-{time.strftime('%Y%m%d-%H%M%S')}"
        self.folder: Path = args.out or Path("runs", name)
        self.file = self.folder / "bundle.json"
        self.engine: Any = None
        self._batch: Any = None
        self.bundle: Dict[str, Any] = {
            "format": ipu_bundle.FORMAT,
            "kind": ipu_bundle.KIND,
            "stages": [],
            "configuration": {},
            "device": {"kind": "none", "bytes_per_tile": MK2.memory_per_tile},
            "versions": {},
            "predicted": {},
            "measured": {},
            "verdict": {"status": 1, "problems": [], "way_out": []},
        }
        self.fits = True  # as far as it is known
        self.set_place("none", replace(self.asked, without_ipus=()))

    def run(self) -> None:
        try:
            for name in ("attached", "versions", "predicted", "compiled", "loaded", "updates", "profile", "counted"):
                if name == "compiled":
                    print(f"{'':<10}{self.expected()}")
                self.stage(name, getattr(self, name))
        finally:
            self.close()

    def stage(self, name: str, work: Callable[[], str]) -> None:
        """One stage: its line on the terminal, its entry in the bundle."""
        print(f"{name:<10}", end="", flush=True)
        entry: Dict[str, Any] = {"name": name, "status": ipu_bundle.INTERRUPTED, "seconds": 0.0, "said": ""}
        self.bundle["stages"].append(entry)
        self.write()
        started = time.perf_counter()
        lines = []
        try:
            entry["said"] = work()
            entry["status"] = ipu_bundle.DONE
        except _LeftOut as left_out:
            entry.update(status=ipu_bundle.LEFT_OUT, said=str(left_out))
        except Exception as error:  # the SDK's errors are of many kinds; none may take the other stages with it
            found = explained(error, self.config)
            entry.update(status=ipu_bundle.FAILED, said=found.done, means=found.means, way_out=found.way_out)
            self.close()  # an engine that failed is of no use to the next stage
            lines = [f"{'':<10}it means  {found.means}", f"{'':<10}way out   {found.way_out}"]
        finally:
            entry["seconds"] = round(time.perf_counter() - started, 3)
        status = "" if entry["status"] == ipu_bundle.DONE else f"{entry['status']}: "
        print("\n".join([f"{entry['seconds']:8.1f} s  {status}{entry['said']}", *lines]), flush=True)
        self.write()

    def write(self) -> None:
        ipu_bundle.write_bundle(self.file, self.bundle)

    def done(self, name: str) -> bool:
        return any(each["name"] == name and each["status"] == ipu_bundle.DONE for each in self.bundle["stages"])

    def finish(self) -> List[str]:
        """The verdict, into the bundle; the page, into page.txt. Returns the page's lines."""
        found = ipu_bundle.problems(self.bundle)
        unfinished = not self.done("updates") or any(
            each["status"] in (ipu_bundle.FAILED, ipu_bundle.INTERRUPTED) for each in self.bundle["stages"]
        )
        ways = self.ways_out() if any(each.startswith("does not fit") for each in found) else []
        self.bundle["verdict"] = {"status": int(bool(found) or unfinished), "problems": found, "way_out": ways}
        self.write()
        lines = ipu_bundle.page(self.bundle)
        write_atomically(self.folder / "page.txt", ("\n".join(lines) + "\n").encode())
        return lines

    def close(self) -> None:
        engine, self.engine = self.engine, None
        if engine is not None:
            with contextlib.suppress(Exception):
                engine.close()

    # ---- stages ------------------------------------------------------------------------------------------------------

    def attached(self) -> str:
        there = self.inventory
        placement, wanted = self.asked.placement, self.asked.ipus
        self.bundle["versions"]["poptorch"] = there.poptorch
        device = self.bundle["device"]
        device.update(attached=there.attached, wanted=wanted, architecture=there.architecture)
        device.update(asked_for_model=there.model_asked_by is not None)
        config = replace(self.asked, without_ipus=())
        if there.model_asked_by is not None:
            config, _ = self.asked.applied_without_ipus()
            config = config.for_simulation(1.0)
            self.set_place("ipu_model", replace(config, engine=replace(config.engine, kind="ipu", ipu_model=True)))
            return f"the Poplar IPU Model, asked for by {there.model_asked_by}: simulated, without a cycle counter"
        replicas = there.attached // placement.ipus_per_replica
        if replicas < placement.replicas:
            self.set_place("none", config)
            if replicas:
                shared = placement.replicated_tensor_sharding and replicas > 1
                fewer = replace(placement, replicas=replicas, replicated_tensor_sharding=shared)
                self.set_place("ipu", replace(config, placement=fewer))
            raise _Failed(
                f"too few IPUs are attached: {there.attached} of {wanted}",
                f"what follows is checked with {replicas} of {placement.replicas} replicas"
                if replicas
                else "the program is compiled, and nothing is run",
                "gc-info -l lists them; under V-IPU make a partition that is large enough (vipu create partition)",
            )
        self.set_place("ipu", config)
        return f"{there.attached} IPUs, as many as wanted ({placement.replicas} x {placement.ipus_per_replica})"

    def set_place(self, kind: str, config: Config) -> None:
        """Where the updates run, "ipu", "ipu_model" or "none", and the configuration with few micro-batches."""
        number = max(self.args.micro_batches or 0, config.pipeline_stages)
        config = replace(
            config,
            batch=replace(config.batch, gradient_accumulation=number),
            optimizer=replace(config.optimizer, packing_adjustment="none"),
            engine=replace(
                config.engine, log_cycles=False, executable_cache=None, offline_export=None, executable=None
            ),
        ).with_schedule()
        self.kind, self.config, self._batch = kind, config, None
        self.bundle["device"]["kind"] = kind
        self.bundle["configuration"] = {
            "name": config.name,
            "micro_batches": config.batch.gradient_accumulation,
            "micro_batch": config.batch.micro_batch,
            "replicas": config.placement.replicas,
            "ipus_per_replica": config.placement.ipus_per_replica,
            "packs": config.packs_per_update(1.0),
            "settings": ipu_bundle.public_settings(config),
        }

    def versions(self) -> str:
        import numpy
        import torch

        from ipu_packed_bert.training.log import commit_here

        found = self.bundle["versions"]
        found.update(
            commit=commit_here(),
            python=platform.python_version(),
            torch=torch.__version__,
            numpy=numpy.__version__,
            system=f"{platform.system()} {platform.machine()}",
        )
        return ", ".join(f"{name} {value}" for name, value in found.items() if name != "commit")

    def predicted(self) -> str:
        config = self.config
        found, said = self.bundle["predicted"], []
        made = plan(config, packing_factor=1.0)
        kinds = ("ipu", "weights", "gradients", "optimizer", "activations")
        found["memory"] = [
            {**{kind: getattr(memory, kind) for kind in kinds}, "together": memory.total} for memory in made.memory
        ]
        fits = {True: "fits", False: "does not fit", None: "tight, unknown"}[made.fits]
        found["fits"] = made.fits
        said.append(f"{fits}: {made.fullest:.0%} of the fullest IPU is counted")
        if not self.args.no_host:
            found["loss"] = _host_loss(config, self.batch())
            said.append(f"first loss {found['loss']:.4f} on the host")
        if config.data.max_sequences_per_pack is None:
            config = replace(config, data=replace(config.data, max_sequences_per_pack=self.depth))
        target = TARGETS[config.placement.machine]
        machine = Machine(target, cache_folder())
        pipeline = machine.pipeline(config)
        machine.save()
        fitted = calibration.load()
        number = config.batch.gradient_accumulation
        found["update_cycles"] = list(fitted.interval(lambda each: pipeline.step(number, each).cycles))
        found["pipeline_cycles"] = list(fitted.interval(pipeline.pipeline_cycle))
        found["once_per_update_cycles"] = list(fitted.interval(pipeline.update_cycles))
        found["seconds"] = fitted.interval(lambda each: pipeline.step(number, each).seconds).value
        found["clock_hz"] = target.clock_hz
        found["work"] = model_work(pipeline, number, fitted.parameters)
        said.append(f"{found['update_cycles'][1]:,.0f} cycles of an update")
        return "; ".join(said)

    def expected(self) -> str:
        """How long the stages to come take, in words: nobody has published the seconds of a compilation."""
        seconds = self.bundle["predicted"].get("seconds") if self.kind == "ipu" else None
        each = "" if seconds is None else f" of {seconds:.2f} s on the IPUs"
        updates = "no update" if self.kind == "none" else f"{self.args.updates} updates{each}, slower with the profile"
        return (
            f"to come: compiling, in silence, ten minutes to an hour for a large BERT{' twice' * self.args.count}; "
            f"then {updates}; minutes for the profile itself"
        )

    @property
    def profile_folder(self) -> Path:
        return self.folder / "profile"

    @property
    def program(self) -> str:
        return str(self.folder / "program.poptorch")

    def engine_of(self, **engine: Any) -> Any:
        """An engine of the checked configuration with settings of its own."""
        from ipu_packed_bert.engine import build_engine, choose_engine
        from ipu_packed_bert.tasks.pretraining import Pretraining

        self.close()
        config = replace(self.config, engine=replace(self.config.engine, **engine))
        choice = choose_engine(config)
        task = Pretraining(replace(config, data=replace(config.data, max_sequences_per_pack=self.depth)))
        self.engine = build_engine(config, task, choice, packing_factor=1.0)
        return self.engine

    def compiled(self) -> str:
        self.folder.mkdir(parents=True, exist_ok=True)
        with profiling(self.args.updates), _hardware_meant():
            engine = self.engine_of(
                ipu_model=False, offline_export=self.program, profile_directory=str(self.profile_folder / "compiled")
            )
            started = time.perf_counter()
            engine.compile(self.batch())
            seconds = time.perf_counter() - started
            self.close()
        size = os.path.getsize(self.program)
        self.bundle["measured"].update(compile_seconds=seconds, program_bytes=size)
        with contextlib.suppress(ValueError):  # the stage "profile" says what is missing
            self.read_memory("compiled")
        full = [each for each in ipu_bundle.problems(self.bundle) if each.startswith("does not fit")]
        if full:
            self.fits = False
            raise _Failed(full[0], "Poplar would not load it", "; or ".join(self.ways_out()))
        return f"{size / ipu_bundle.MIB:,.1f} MiB, for {self.config.ipus} IPUs, without a device"

    def refuse_what_does_not_fit(self) -> None:
        if not self.fits:
            raise _LeftOut("the program does not fit")

    def ways_out(self) -> List[str]:
        limit = MK2.memory_per_tile
        full = [each["ipu"] for each in self.bundle["measured"].get("memory", ()) if each["fullest_tile"] > limit]
        smaller = plan(self.config, packing_factor=1.0).micro_batch_that_fits()
        return ipu_bundle.way_out(self.config, ipu=full[0] if len(full) == 1 else None, smaller=smaller)

    def loaded(self) -> str:
        self.refuse_what_does_not_fit()
        if self.kind != "ipu":
            raise _LeftOut("a compiled program runs on IPUs only")
        if not self.done("compiled"):
            raise _LeftOut("there is no compiled program; the next stage compiles one where it runs")
        with profiling(self.args.updates):
            engine = self.engine_of(executable=self.program, profile_directory=str(self.profile_folder / "run"))
            engine.compile(self.batch())
        return f"on {self.config.ipus} IPUs"

    def updates(self) -> str:
        self.refuse_what_does_not_fit()
        if self.kind == "none":
            raise _LeftOut("there are not enough IPUs for one replica")
        with profiling(self.args.updates):
            if self.engine is None:
                engine = self.engine_of(
                    profile_directory=str(self.profile_folder / "run"), ipu_model=self.kind == "ipu_model"
                )
                engine.compile(self.batch())
            losses, seconds, _ = self.make_updates("")
            self.close()  # the profile is written when the program is let go of
        first, last = ("not finite" if loss is None else f"{loss:.4f}" for loss in (losses[0], losses[-1]))
        return f"{len(losses)}, loss {first} to {last}, {sorted(seconds)[len(seconds) // 2]:.3f} s each"

    def make_updates(self, prefix: str) -> Tuple[List[Optional[float]], List[float], List[int]]:
        """Losses, seconds and cycles of as many updates as wanted on one batch, which the bundle gets at once."""
        from ipu_packed_bert.model.optimizer import learning_rate

        losses: List[Optional[float]] = []
        seconds: List[float] = []
        cycles: List[int] = []
        self.bundle["measured"].update({f"{prefix}losses": losses, f"{prefix}seconds": seconds})
        for number in range(self.args.updates):
            result = self.engine.step(self.batch(), learning_rate(min(number, self.config.run.steps - 1), self.config))
            losses.append(result.loss if math.isfinite(result.loss) else None)
            seconds.append(result.seconds)
            if result.cycles is not None:
                cycles.append(result.cycles)
        return losses, seconds, cycles

    def profile(self) -> str:
        parts = [part for part in ("run", "compiled") if (self.profile_folder / part).is_dir()]
        if not parts:
            raise _LeftOut("nothing was profiled")
        problem = None
        for part in parts:
            try:
                self.read_memory(part)
                self._read_work(part)
            except ValueError as error:  # the other part may be readable
                problem = error
        measured = self.bundle["measured"]
        if problem is not None:
            raise problem
        tiles = [memory["fullest_tile"] for memory in measured.get("memory", ())]
        most = f"fullest tile {max(tiles) / MK2.memory_per_tile:.0%}" if tiles else "no memory in it"
        cycles = measured.get("profiled_cycles")
        return f"{most}, {'no cycles' if cycles is None else f'{cycles:,.0f} cycles of an update'}"

    def read(self, part: str) -> popvision.Profile:
        file = popvision.find_profile(self.profile_folder / part)
        found = popvision.read_profile(file, ipus=self.config.placement.ipus_per_replica)
        self.bundle["versions"]["poplar"] = found.poplar
        return found

    def read_memory(self, part: str) -> None:
        """Of the program for IPUs: the IPU Model may have other tiles, and no limit."""
        if part == "compiled" or self.kind == "ipu":
            memory = self.read(part).memory
            if memory:
                self.bundle["measured"]["memory"] = [each._asdict() for each in memory]

    def _read_work(self, part: str) -> None:
        profile, measured = self.read(part), self.bundle["measured"]
        if profile.work:
            measured["profiled_runs"] = profile.runs
            measured["profiled_cycles"] = max(work.cycles for work in profile.work)
            measured["work"] = [work._asdict() for work in profile.work]
            measured["largest_programs"] = [
                {"name": name, "class": where, "cycles": cycles} for name, where, cycles in profile.largest
            ]

    def counted(self) -> str:
        self.refuse_what_does_not_fit()
        if self.kind != "ipu":
            raise _LeftOut("only IPUs count cycles")
        if not self.args.count:
            raise _LeftOut("--count compiles a second time for it")
        self.engine_of(log_cycles=True, profile_directory=None)
        self.engine.compile(self.batch())
        measured = self.bundle["measured"]
        _, _, cycles = self.make_updates("counted_")
        measured["counted_cycles"] = sorted(cycles[1:] or cycles)[len(cycles[1:] or cycles) // 2]
        self.close()
        return f"{measured['counted_cycles']:,} cycles of an update, the median without the first; no profile"

    # ---- the batch ---------------------------------------------------------------------------------------------------

    @property
    def depth(self) -> int:
        return self.packing().max_sequences_per_pack or 8

    def packing(self) -> Any:
        """Packs of sequences of all lengths alike; what a static program computes does not depend on them."""
        data = self.config.data
        slots = data.max_sequence_length
        histogram = LengthHistogram.from_lengths(list(range(min(8, slots), slots + 1)), slots)
        return pack(histogram, max_sequences_per_pack=data.max_sequences_per_pack or 8)

    def batch(self) -> Any:
        """One global batch; the same in every stage."""
        from ipu_packed_bert.benchmarks.work import draw_work

        config = self.config
        if self._batch is None:
            self._batch = draw_work(
                self.packing(),
                packs=config.packs_per_update(1.0),
                micro_batch=config.batch.micro_batch,
                vocabulary=config.model.vocabulary_size,
                max_predictions=config.predictions_per_sequence,
                seed=config.run.seed,
            ).packed
        return self._batch


def _host_loss(config: Config, batch: Any) -> float:
    """The loss of a batch before the first update, in float32 and without dropout."""
    from ipu_packed_bert.engine.host import HostEngine
    from ipu_packed_bert.tasks.pretraining import Pretraining

    config = replace(config, engine=replace(config.engine, kind="host", device="cpu", precision="float32"))
    return HostEngine(config, Pretraining(config), packing_factor=1.0).evaluate(batch).loss


@contextlib.contextmanager
def _environment(**settings: Optional[str]) -> Iterator[None]:
    """While entered, the environment has these variables, or has them not where they are None."""
    former = {name: os.environ.pop(name, None) for name in settings}
    os.environ.update({name: text for name, text in settings.items() if text is not None})
    try:
        yield
    finally:
        for name, text in former.items():
            os.environ.pop(name, None)
            if text is not None:
                os.environ[name] = text


def _hardware_meant() -> ContextManager[None]:
    """While entered, nothing asks PopTorch for the IPU Model, which it would compile for."""
    return _environment(POPTORCH_IPU_MODEL=None, POPTORCH_SMALL_IPU_MODEL=None)


def profiling(runs: int) -> ContextManager[None]:
    """Poplar profiles so many runs of a program, instead of two, on one replica, and finishes one that does not fit.

    Poplar reads these options from the environment; what the user set there stays. One replica without all symbols is
    what Graphcore profiled itself (MLPerf v1.1, scripts/pod128-run.sh).
    """
    try:
        given = json.loads(os.environ.get("POPLAR_ENGINE_OPTIONS") or "{}")
    except ValueError:
        raise ValueError("POPLAR_ENGINE_OPTIONS: no JSON; unset it, or mend it") from None
    options = {
        "autoReport.executionProfileProgramRunCount": str(runs + 2),  # weights come and go in runs of their own
        "debug.allowOutOfMemory": "true",
        "debug.outputAllSymbols": "false",
        "profiler.replicaToProfile": "0",
    }
    return _environment(POPLAR_ENGINE_OPTIONS=json.dumps({**options, **given}))


if __name__ == "__main__":
    from pack_data.cli.command import run_main

    sys.exit(run_main(main))
