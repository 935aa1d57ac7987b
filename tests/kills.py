"""Kills at random moments: a build, a training run and what else writes, begun again until they are done.

    python -m tests.kills build --n 1000 [--seed S] [--minutes M]        # also: train, convert, checksums, checkpoints
    python -m tests.kills all --n 100

Each kill is a SIGKILL, every fifth a SIGTERM, at a moment drawn from the time of an undisturbed piece of work. The same
command is then given again, until it ends by itself; what is there then must be, byte for byte, what undisturbed work
leaves (of logs: every number but the clock). After each kill the drive also looks at what a reader would find.
The work is done in children forked from a process that has loaded everything, so that a kill costs no start of Python.
Exit status 1 if anything was lost, different or left behind.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import gc
import hashlib
import importlib
import os
import random
import shutil
import signal
import sys
import tempfile
import time
import traceback
from pathlib import Path
from typing import Any, Callable, Counter, List, NamedTuple, Optional
from unittest.mock import patch

from pack_data.building.convert import main as convert_main
from pack_data.cli.command import ArgumentParser, positive_int, run_main
from pack_data.store.data_set import MANIFEST, PackStore
from tests.imports import ROOT
from tests.pack_data.text_corpus import build_small, write_corpus


class Drive(NamedTuple):
    """A piece of work that may be killed. All functions get the folder that it works in.

    prepare: makes the inputs. work: does or goes on with it, in a child; its exit status. result: what must be the same
    at the end. holds: raises AssertionError where something must hold after a kill and does not.
    """

    prepare: Callable[[Path], None]
    work: Callable[[Path], Optional[int]]
    result: Callable[[Path], Any]
    holds: Callable[[Path], None] = lambda folder: None


class Outcome(NamedTuple):
    """Result of a drive. signals: number of each signal that reached the work; finished: compared pieces of work."""

    signals: Counter[str]
    finished: int
    wrong: List[str]

    @property
    def kills(self):
        return sum(self.signals.values())


def _caches():
    """List the cached functions of the product.

    The parent looks for them: a child would copy every page of memory that holds an object of a module.
    """
    caches = []
    for name, module in list(sys.modules.items()):
        if name.partition(".")[0] in ("pack_data", "ipu_packed_bert"):
            caches += [value for value in vars(module).values() if hasattr(value, "cache_clear")]
    return caches


def in_child(work):
    """Start the work in a child of this process, silent and with empty caches, as a new one; return its number."""
    caches = _caches()
    sys.stdout.flush()
    sys.stderr.flush()
    child = os.fork()
    if child:
        return child
    status = 70
    try:
        os.setpgid(0, 0)  # with the processes that it may start
        with open(os.devnull, "r+") as nothing:
            for number in (0, 1):
                os.dup2(nothing.fileno(), number)
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, signal.SIG_DFL)
        for cache in caches:
            cache.cache_clear()
        gc.disable()  # a collection would copy the parent's memory
        status = run_main(lambda _: work(), None)
    except SystemExit as error:
        status = int(error.code or 0)
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(status)


def wait(child, seconds):
    """Its exit status, -number after a signal; None where it still runs after so long."""
    end = None if seconds is None else time.monotonic() + seconds
    while True:
        done, status = os.waitpid(child, 0 if end is None else os.WNOHANG)
        if done:
            return -os.WTERMSIG(status) if os.WIFSIGNALED(status) else os.WEXITSTATUS(status)
        if end is not None and time.monotonic() >= end:
            return None
        time.sleep(0.0005)


def drive(
    one,
    folder,
    *,
    kills,
    seed,
    minutes=None,
    said=lambda text: None,
):
    """Kills the work so many times, and compares every result with that of undisturbed work."""
    rng = random.Random(seed)
    inputs = folder / "inputs"
    place = folder / "work"
    place.mkdir(parents=True)
    one.prepare(place)
    shutil.copytree(place, inputs)
    began = time.monotonic()
    assert wait(in_child(lambda: one.work(place)), None) == 0, "the undisturbed work fails"
    duration = time.monotonic() - began
    calm = one.result(place)
    signals = collections.Counter()
    wrong = []
    finished = 0
    reported = 0
    begun = time.monotonic()
    while sum(signals.values()) < kills and not (minutes and time.monotonic() - begun > 60 * minutes):
        shutil.rmtree(place)
        shutil.copytree(inputs, place)
        story = []
        # Short waits first: the work gets further with each of them, and ends at last.
        patience = duration * rng.choice((0.3, 0.6, 1.0))
        while True:
            child = in_child(lambda: one.work(place))
            moment = rng.random() * patience
            status = wait(child, moment)
            if status is None:
                kind = signal.SIGTERM if rng.random() < 0.2 else signal.SIGKILL
                with contextlib.suppress(ProcessLookupError):
                    os.kill(child, kind)
                # A process that saves before it ends, after SIGTERM, has the time that it needs.
                status = wait(child, None)
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.killpg(child, signal.SIGKILL)
                if status in (-kind, 128 + kind):
                    signals[kind.name] += 1
                    story.append(f"{kind.name} after {moment:.3f} s")
                    patience *= 1.15
                    with said_in(story, wrong):
                        one.holds(place)
                    continue
            if status != 0:
                wrong.append(f"exit status {status} after {', '.join(story) or 'nothing'}")
            break
        if status == 0:
            finished += 1
            with said_in(story, wrong):
                result = one.result(place)
                assert calm == result, f"another result: {differences(calm, result)}"
        for line in wrong[reported:]:
            said(f"wrong: {line}")
        reported = len(wrong)
        said(f"{sum(signals.values()):,} kills, {finished:,} finished, {len(wrong)} wrong")
    return Outcome(signals, finished, wrong)


@contextlib.contextmanager
def said_in(story, wrong):
    try:
        yield
    except (AssertionError, ValueError, OSError) as error:
        wrong.append(
            f"{type(error).__name__} after {', '.join(story) or 'nothing'}: {' '.join(str(error).split())[:300]}"
        )


def differences(calm, found):
    if isinstance(calm, dict) and isinstance(found, dict):
        names = [str(name) for name in {**calm, **found} if calm.get(name) != found.get(name)]
        return ", ".join(names[:8])
    return "another value"


def contents(folder):
    """Every file below a folder by its name, as sha256."""
    return {
        path.relative_to(folder).as_posix(): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }


def _corpus(folder):
    write_corpus(folder / "corpus", documents=25)


def _build(folder):
    from pack_data.building import inputs, stages

    # Several parts and shards of a small corpus.
    with patch.multiple(inputs, PART_CHARACTERS=4000), patch.multiple(stages, SLOTS_PER_SHARD=64 * 40):
        build_small(folder / "corpus", folder / "data", held_out=0.2, overwrite=True).close()
    return 0


def _corpus_and_former_data_set(folder):
    _corpus(folder)
    build_small(write_corpus(folder / "former", documents=9), folder / "data", seed=5).close()
    shutil.rmtree(folder / "former")


def _whole_or_none(folder):
    if (folder / "data" / MANIFEST).exists():
        with PackStore.open(folder / "data") as store:
            store.records(range(len(store)))


def _stages(folder):
    from pack_data.building import inputs, stages
    from pack_data.building.shares import STAGES, run_task
    from tests.pack_data.building.test_shares import options_of

    small = patch.multiple(inputs, GROUP_BYTES=3000, SOURCE_PART=20)
    with small, patch.multiple(stages, SLOTS_PER_SHARD=32 * 40):
        for stage, tasks in zip(STAGES, (2, 1, 3)):
            for task in range(tasks):
                run_task(options_of(folder), stage, task, tasks)
    return 0


def _sequences(folder):
    from tests.pack_data.building.test_shares import options_of

    options_of(folder)


def _run_with_data(folder, steps=30):
    import yaml

    from tests.tiny_runs import tiny_data, tiny_settings

    settings = tiny_settings(tiny_data(folder / "data", sequences=40))
    settings["model"].update(hidden_size=8, num_layers=1, intermediate_size=16)
    settings["placement"]["layers_per_ipu"] = [1]
    settings["run"].update(steps=steps, checkpoint_every=2, evaluate_every=10)
    (folder / "run.yml").write_text(yaml.safe_dump(settings))


def _train(folder):
    from ipu_packed_bert.commands import pretrain
    from ipu_packed_bert.run_files.checkpoints import checkpoints

    run = folder / "run"
    if checkpoints(run / "checkpoints"):
        return pretrain.main(["--resume", str(run)])
    shutil.rmtree(run, ignore_errors=True)  # nothing was saved: begun anew, as the refusal says
    return pretrain.main(["--config", str(folder / "run.yml"), "--out", str(run)])


def _logged(folder):
    """Both logs without the clock, and the last checkpoint's tensors and state."""
    from ipu_packed_bert.run_files.folder import EVALUATIONS, LOG, read_log

    clock = ("seconds",)
    records = {
        name: [
            {key: value for key, value in record.items() if key not in clock}
            for record in read_log(folder / "run" / name, note=lambda text: None)
        ]
        for name in (LOG, EVALUATIONS)
    }
    saved = sorted((folder / "run" / "checkpoints").iterdir())
    assert all(path.name.startswith("step_") for path in saved), f"left behind: {[path.name for path in saved]}"
    return {**records, **{f"checkpoint {name}": sha for name, sha in contents(saved[-1]).items()}}


def _resumable(folder):
    from ipu_packed_bert.run_files.checkpoints import checkpoints, load_checkpoint

    for path in checkpoints(folder / "run" / "checkpoints"):
        load_checkpoint(path)


def _data_set(folder):
    build_small(write_corpus(folder / "corpus", documents=60), folder / "data").close()


def _convert(folder):
    target = folder / "out"
    if target.exists():  # whole, as every target that is there
        return 0
    return convert_main([str(folder / "data"), str(target), "--to-format", "packed_tfrecord"])


def _converted(folder):
    # Killed when the target was whole, nothing runs again that could remove the lock.
    left = [path.name for path in folder.iterdir() if path.name not in ("corpus", "data", "out", ".out.lock")]
    assert not left, f"left behind: {left}"
    return contents(folder / "out")


DRIVES = {
    "build": Drive(
        _corpus,
        _build,
        lambda folder: {name: sha for name, sha in contents(folder).items() if not name.startswith("corpus/")},
        _whole_or_none,
    ),
    "replace": Drive(
        _corpus_and_former_data_set,
        _build,
        lambda folder: {name: sha for name, sha in contents(folder).items() if not name.startswith("corpus/")},
        _whole_or_none,
    ),
    "stages": Drive(
        _sequences,
        _stages,
        lambda folder: {name: sha for name, sha in contents(folder).items() if not name.startswith("source/")},
        _whole_or_none,
    ),
    "train": Drive(_run_with_data, _train, _logged, _resumable),
    "convert": Drive(_data_set, _convert, _converted),
}


@contextlib.contextmanager
def memory_folder(prefix):
    """A directory in memory where that can be had: the order of the steps is proved; a disk makes each of them slow."""
    memory = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
    folder = Path(tempfile.mkdtemp(prefix=prefix, dir=memory))
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def load_all():
    """Every module that the work loads, so that the children find them loaded."""
    import torch

    torch.set_num_threads(1)
    for name in ("torch.utils.tensorboard", "matplotlib.pyplot", "matplotlib.backends.backend_agg", "pyarrow.parquet"):
        with contextlib.suppress(ImportError):
            importlib.import_module(name)
    for package in ("pack_data", "ipu_packed_bert"):
        for path in sorted((ROOT / package).rglob("*.py")):
            name = ".".join(path.relative_to(ROOT).with_suffix("").parts)
            with contextlib.suppress(ImportError):  # the SDK's
                importlib.import_module(name[: -len(".__init__")] if name.endswith(".__init__") else name)


def main(argv=None):
    parser = ArgumentParser(
        prog="python -m tests.kills", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("what", choices=(*DRIVES, "all"))
    parser.add_argument("--n", type=positive_int, default=100, help="kills (default 100)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--minutes", type=float, help="stop after so long")
    args = parser.parse_args(argv)
    load_all()
    failed = False
    for name in DRIVES if args.what == "all" else [args.what]:
        spoken = [time.monotonic()]

        def said(text, name=name, spoken=spoken):
            if time.monotonic() - spoken[0] > 30 or text.startswith("wrong"):
                spoken[0] = time.monotonic()
                print(f"{name:<12} {text}", flush=True)

        with memory_folder(f"kills-{name}-") as folder:
            outcome = drive(DRIVES[name], folder / name, kills=args.n, seed=args.seed, minutes=args.minutes, said=said)
        kinds = ", ".join(f"{count:,} {kind}" for kind, count in sorted(outcome.signals.items()))
        print(
            f"{name:<12} {outcome.kills:,} kills ({kinds}), {outcome.finished:,} results equal to the undisturbed one"
            f"{f', {len(outcome.wrong)} wrong' if outcome.wrong else ', none lost or different'}",
            flush=True,
        )
        print("".join(f"  {line}\n" for line in outcome.wrong[:20]), end="")
        failed |= bool(outcome.wrong)
    return int(failed)


if __name__ == "__main__":
    sys.exit(run_main(main))
