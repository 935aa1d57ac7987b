"""Ten updates of a configuration on IPUs: compile, step, count cycles or profile. It returns measured values only."""

from __future__ import annotations

import contextlib
import json
import math
import os
import time
from dataclasses import replace
from pathlib import Path
from typing import Any, Dict, Iterator, List, Optional

from ipu_packed_bert.settings.config import Config
from pack_data.packing.histogram import LengthHistogram
from pack_data.spfhp import pack

UPDATES = 10  # the first one is left out of the cycles
_DEFAULT_DEPTH = 8  # sequences per pack, if the configuration does not limit it


def for_hardware(config: Config) -> Config:
    """Return a configuration for the attached IPUs.

    Raises:
        ValueError: the SDK or the IPUs are missing.
    """
    from ipu_packed_bert.engine import choose_engine

    config = replace(config, without_ipus=()).changed("engine", kind="ipu", offline_export=None)
    config = config.with_micro_batch(1.0)
    choice = choose_engine(config, way_out="")
    if not choice.hardware:
        raise ValueError(
            f"{config.path}: {choice.reason}; the check needs IPUs, `make test-ipu` tests the IPU Model"
        )
    return config


class IpuUpdates:
    """The program of a configuration with few micro-batches, and its updates of one random batch.

    Args:
        config: configuration of `for_hardware`.
        profile: directory of the profile; None: count the cycles of the updates instead.
    """

    def __init__(self, config: Config, profile: Optional[Path]):
        # The fewest micro-batches that fill the pipeline.
        shorter = config.changed("batch", gradient_accumulation=config.pipeline_stages)
        shorter = shorter.changed("optimizer", packing_adjustment="none").with_schedule()
        depth = config.data.depth or _DEFAULT_DEPTH
        shorter = shorter.changed("data", max_sequences_per_pack=depth)
        self.config = shorter.changed(
            "engine",
            log_cycles=profile is None,
            profile_directory=None if profile is None else str(profile),
            executable_cache=None,
            executable=None,
        )
        self.batch = _random_batch(self.config)
        self.losses: List[Optional[float]] = []  # None: not finite
        self.seconds: List[float] = []
        self._cycles: List[int] = []
        self._engine: Any = None

    def compile(self) -> float:
        """Compile the program; return the seconds."""
        from ipu_packed_bert.engine import build_engine, choose_engine
        from ipu_packed_bert.tasks.pretraining import Pretraining

        config = self.config
        choice = choose_engine(config)
        self._engine = build_engine(config, Pretraining(config), choice, packing_factor=1.0)
        started = time.perf_counter()
        self._engine.compile(self.batch)
        return time.perf_counter() - started

    def run(self) -> None:
        """Make the updates; `losses` and `seconds` have those that are done."""
        from ipu_packed_bert.model.optimizer import learning_rate

        for number in range(UPDATES):
            rate = learning_rate(min(number, self.config.run.steps - 1), self.config)
            result = self._engine.step(self.batch, rate)
            self.losses.append(result.loss if math.isfinite(result.loss) else None)
            self.seconds.append(result.seconds)
            if result.cycles is not None:
                self._cycles.append(result.cycles)

    @property
    def cycles(self) -> Optional[int]:
        """Cycles of an update, the upper median without the first; None if they are not counted."""
        return upper_median(self._cycles[1:]) if self._cycles else None

    def host_loss(self) -> float:
        """Compute the loss before the first update on the host, in float32 and without dropout."""
        from ipu_packed_bert.engine.host import HostEngine
        from ipu_packed_bert.tasks.pretraining import Pretraining

        config = self.config.changed("engine", kind="host", device="cpu", precision="float32")
        return HostEngine(config, Pretraining(config), packing_factor=1.0).evaluate(self.batch).loss

    def close(self) -> None:
        """Release the program; Poplar then writes the profile."""
        engine = self._engine
        self._engine = None
        if engine is not None:
            with contextlib.suppress(Exception):
                engine.close()


def upper_median(values: List[Any]) -> Any:
    """Return the median, or the larger of two."""
    return sorted(values)[len(values) // 2]


def _random_batch(config: Config) -> Dict[str, Any]:
    """Return a global batch with as many sequences of every length; a static program does not depend on it."""
    from ipu_packed_bert.benchmarks.work import draw_work

    slots = config.data.max_sequence_length
    histogram = LengthHistogram.from_lengths(list(range(min(8, slots), slots + 1)), slots)
    return draw_work(
        pack(histogram, max_sequences_per_pack=config.data.depth),
        packs=config.packs_per_update(1.0),
        micro_batch=config.batch.micro_batch,
        vocabulary=config.model.vocabulary_size,
        max_predictions=config.predictions_per_sequence,
        seed=config.run.seed,
    ).packed


@contextlib.contextmanager
def profiling(profile: bool) -> Iterator[None]:
    """Make Poplar profile all updates (not two) of one replica, and compile programs that do not fit.

    Poplar reads these options from the environment; options that the user has set take precedence. Graphcore profiled
    one replica without all symbols too (MLPerf v1.1, scripts/pod128-run.sh).
    """
    name = "POPLAR_ENGINE_OPTIONS"
    original = os.environ.get(name)
    options = {
        # Two more runs copy the weights to and from the device.
        "autoReport.executionProfileProgramRunCount": str(UPDATES + 2),
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
