"""Kill random ranks of a run under torchrun: the restarted run has the weights and the log of an undisturbed one.

python tests/kill_ranks.py --n 50      (six to eleven minutes on two cores; exit status 1 where something differs)
python tests/kill_ranks.py --n 3 --ranks 8 --signal STOP      (each time one line must name the rank that was stopped)
"""

from __future__ import annotations

import argparse
import contextlib
import os
import random
import re
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import List, NamedTuple

NAMED = re.compile(r"error: rank \d+ on \S+ has been silent for ")
ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import torch  # noqa: E402

from ipu_packed_bert.run_files.checkpoints import load_newest  # noqa: E402
from ipu_packed_bert.run_files.folder import CHECKPOINTS, LOG, read_log  # noqa: E402
from tests.tiny_runs import tiny_config, tiny_data  # noqa: E402


class Ended(NamedTuple):
    status: int  # of torchrun
    kills: int  # that hit a rank
    output: str
    seconds: List[float]  # after each, until the other ranks had ended


def torchrun(config, out, *, ranks, steps, restarts=0):
    """The line that starts the run, or goes on with it."""
    return [
        *(sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)),
        *("--max-restarts", str(restarts), str(ROOT / "run_pretraining.py")),
        *("--config", str(config), "--out", str(out), "--steps", str(steps), "--resume-if-there"),
    ]


def started(line, output):
    # One torch thread a rank, and nothing of the caller's own launcher.
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    with open(output, "ab") as file:
        return subprocess.Popen(line, stdout=file, stderr=file, env=environment)


def ranks_of(launcher):
    """The processes whose parent is the launcher, and that have replaced its program with their own."""
    processes = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            parent = int(path.read_text().rpartition(")")[2].split()[1])
            if parent == launcher and b"run_pretraining" in (path.parent / "cmdline").read_bytes():
                processes.append(int(path.parent.name))
        except (OSError, ValueError):  # it has ended meanwhile
            continue
    return processes


def length(log):
    return log.stat().st_size if log.exists() else 0


def disturbed(
    config,
    out,
    *,
    ranks,
    steps,
    kills,
    seed,
    then=None,
    by=signal.SIGKILL,
):
    """A run whose ranks are killed so many times, most of them soon after it has made another update.

    then: what the launcher is sent when the run has made an update more. by: SIGSTOP stops ranks, never while they
    start, and they are killed when the others have ended.
    """
    rng = random.Random(seed)
    output = out.with_suffix(".txt")
    seconds = []
    launcher = started(torchrun(config, out, ranks=ranks, steps=steps, restarts=kills), output)
    while len(seconds) < kills and launcher.poll() is None:
        before = length(out / LOG)
        since = time.monotonic()
        starts = by == signal.SIGKILL and rng.random() >= 0.8  # some are killed while they start
        patience = rng.uniform(0.0, 8.0) if starts else 600.0
        while length(out / LOG) <= before and time.monotonic() - since < patience and launcher.poll() is None:
            time.sleep(0.005)
        time.sleep(rng.uniform(0.0, 0.2))
        found = ranks_of(launcher.pid)
        if not found:
            continue
        hit = rng.choice(found)
        try:
            os.kill(hit, by)
        except ProcessLookupError:
            continue
        struck = time.monotonic()
        # Until the launcher has noticed: the ranks of the next attempt are others.
        while set(ranks_of(launcher.pid)) & set(found) - {hit} and launcher.poll() is None:
            time.sleep(0.02)
        seconds.append(time.monotonic() - struck)
        with contextlib.suppress(ProcessLookupError):
            os.kill(hit, signal.SIGKILL)
        while hit in ranks_of(launcher.pid) and launcher.poll() is None:
            time.sleep(0.02)
    if then is not None:
        before = length(out / LOG)
        while length(out / LOG) <= before and launcher.poll() is None:
            time.sleep(0.005)
        launcher.send_signal(then)
    status = launcher.wait(600)
    return Ended(status, len(seconds), output.read_text(), seconds)


def undisturbed(config, out, *, ranks, steps):
    output = out.with_suffix(".txt")
    status = started(torchrun(config, out, ranks=ranks, steps=steps), output).wait(600)
    return Ended(status, 0, output.read_text(), [])


def differences(one, other):
    """Return the differences between two runs, times excluded."""
    records = [
        [{name: value for name, value in record.items() if name != "seconds"} for record in read_log(run / LOG)]
        for run in (one, other)
    ]
    differing = [f"update {ours['step']}" for ours, theirs in zip(*records) if ours != theirs]
    if len(records[0]) != len(records[1]):
        differing.append(f"{len(records[0])} records and {len(records[1])}")
    states = [load_newest(run / CHECKPOINTS) for run in (one, other)]
    if states[0].step != states[1].step or states[0].batches != states[1].batches:
        differing.append("the place in the data")
    for name, weight in states[0].engine["model"].items():
        if not torch.equal(weight, states[1].engine["model"][name]):
            differing.append(name)
    return differing


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--n", type=int, default=50)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--signal", choices=("KILL", "STOP"), default="KILL")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        config = tiny_config(folder / "tiny.yml", tiny_data(folder / "data"))
        steps = 12 * args.n
        began = time.monotonic()
        plain = undisturbed(config, folder / "undisturbed", ranks=args.ranks, steps=steps)
        by = signal.Signals[f"SIG{args.signal}"]
        killed = disturbed(
            config, folder / "killed", ranks=args.ranks, steps=steps, kills=args.n, seed=args.seed, by=by
        )
        assert plain.status == 0, plain.output
        faults = (
            differences(folder / "undisturbed", folder / "killed") if killed.status == 0 else [killed.output[-3000:]]
        )
        lines = [line for line in killed.output.splitlines() if line.startswith("error: ")]
        if args.signal == "STOP" and [bool(NAMED.match(line)) for line in lines] != [True] * killed.kills:
            faults.append(f"not one line that names the rank for each: {lines}")
        print(
            f"{killed.kills} times SIG{args.signal} to a random one of {args.ranks} ranks, {steps} updates, "
            f"{time.monotonic() - began:.0f} s; the others had ended after {min(killed.seconds, default=0):.1f} to "
            f"{max(killed.seconds, default=0):.1f} s, with {len(lines)} lines: "
            f"{'; '.join(faults) or 'weights and log as undisturbed'}"
        )
        return 1 if faults or killed.kills < args.n else 0


if __name__ == "__main__":
    sys.exit(main())
