"""Runs that are killed three times, at every kind of place, and resumed each time.

A place is a call that the killed process does not survive: number `at` of a function, counted from the start of the
process. A run with the same number of ranks throughout ends with the logs and the last checkpoint of an undisturbed
one, bit for bit. With other numbers of ranks, its updates have the same sequences, and the same losses up to rounding.
"""

from __future__ import annotations

import importlib
import os
import random
import signal
import sys
from functools import partial
from typing import NamedTuple

import pytest
import yaml

from ipu_packed_bert.commands import finetune, pretrain
from ipu_packed_bert.commands.run_options import _train_with
from ipu_packed_bert.run_files.folder import LOG
from tests.fine_tuning_files import tiny_config as fine_tuning_config
from tests.fine_tuning_files import tiny_table
from tests.ipu_packed_bert.commands.test_torchrun import ended
from tests.kills import DRIVES
from tests.tiny_runs import tiny_data, tiny_settings

COMMANDS = {"pretrain": pretrain, "finetune": finetune}


class Place(NamedTuple):
    """Before or after a call of one of some functions, and by which signal the process ends there."""

    module: str
    owner: str  # a class of the module, "" for the module itself
    functions: str
    after: bool = False
    signal: int = signal.SIGKILL


_ENGINE = "ipu_packed_bert.engine.host.engine"
_CHECKPOINTS = "ipu_packed_bert.run_files.checkpoints"
PLACES = {
    "before an update": Place(_ENGINE, "HostEngine", "step"),
    "after an update": Place(_ENGINE, "HostEngine", "step", after=True),
    "told to end in an update": Place(_ENGINE, "HostEngine", "step", signal=signal.SIGTERM),
    "inside an accumulation": Place(_ENGINE, "HostEngine", "_seed_dropout"),
    "inside an evaluation": Place(_ENGINE, "HostEngine", "evaluate predict"),
    "before a checkpoint": Place(_CHECKPOINTS, "", "_write"),
    "inside a checkpoint": Place(_CHECKPOINTS, "", "_write_file"),
    "after a checkpoint": Place(_CHECKPOINTS, "", "_write", after=True),
    "while checkpoints are removed": Place(_CHECKPOINTS, "", "discard"),
}


class Stop(NamedTuple):
    """Call number `at` (from 1) of a place, on one rank."""

    place: str
    at: int
    rank: int


def write_runs(folder):
    """Write the configuration of a run of each command; return the files."""
    settings = tiny_settings(tiny_data(folder / "data", sequences=40))
    settings["model"].update(hidden_size=8, num_layers=1, intermediate_size=16)
    settings["placement"]["layers_per_ipu"] = [1]
    settings["run"].update(steps=12, checkpoint_every=2, evaluate_every=3, keep_checkpoints=2)
    (folder / "pretrain.yml").write_text(yaml.safe_dump(settings))
    table = tiny_table(folder / "train.csv", "single_label")
    run = {"checkpoint_every": 2, "evaluate_every": 3, "keep_checkpoints": 2}
    config = fine_tuning_config(None, table, task="single_label", model={"hidden_dropout": 0.1}, run=run)
    (folder / "finetune.yml").write_text(config.to_yaml())
    return {command: folder / f"{command}.yml" for command in COMMANDS}


def _leg(command, file, out, stop, processes):
    """Start the run or go on with it, up to the place; in a process of its own."""
    if stop and stop.rank == processes.rank:
        _end_at(PLACES[stop.place], stop.at)
    sys.argv[1:] = ["--config", str(file), "--out", str(out), "--resume-if-there"]
    module = COMMANDS[command]
    return _train_with(module._start, module.parse(None), processes)


def _end_at(place, at):
    module = importlib.import_module(place.module)
    owner = getattr(module, place.owner) if place.owner else module
    calls = []

    def stopping(original):
        def called(*args, **kwargs):
            calls.append(1)
            is_there = len(calls) == at
            if is_there and not place.after:
                os.kill(os.getpid(), place.signal)
            result = original(*args, **kwargs)
            if is_there and place.after:
                os.kill(os.getpid(), place.signal)
            return result

        return called

    for function in place.functions.split():
        setattr(owner, function, stopping(getattr(owner, function)))


def made(command, file, out, ranks, stops):
    """Make a run in legs, the last without a stop; return how many of them ended early."""
    early = 0
    for size, stop in zip(ranks, [*stops, None]):
        found = ended(partial(_leg, command, file, out, stop), size=size)
        statuses = [status for status, _ in found]
        early += any(statuses)
    assert statuses == [0] * ranks[-1], found
    return early


def result(run):
    """Return both logs without the clock, and the files of the last checkpoint."""
    return DRIVES["train"].result(run.parent)


def checked(whole, found, *, exact):
    """Raise AssertionError if a run differs from the undisturbed one."""
    if exact:
        assert found == whole, [name for name in whole if found.get(name) != whole[name]]
        return
    for ours, theirs in zip(whole[LOG], found[LOG]):
        for name, value in ours.items():
            is_exact = not isinstance(value, float)
            expected = value if is_exact else pytest.approx(value, rel=1e-3, abs=1e-4)
            assert theirs[name] == expected, f"update {ours['step']}: {name} {theirs[name]}, not {value}"
    assert len(whole[LOG]) == len(found[LOG])


def draw(rng, place, sizes):
    """Draw the numbers of ranks of four legs, and three stops of which the first is at a place."""
    ranks = [rng.choice(sizes) for _ in range(4)]
    stops = []
    for size in ranks[:3]:
        most = 6 if place == "inside an accumulation" else 3
        writes = "checkpoint" in place
        stops.append(Stop(place, rng.randint(1, most), 0 if writes else rng.randrange(size)))
        place = rng.choice(list(PLACES))
    return ranks, stops


def try_runs(folder, *, number, seed, first=0):
    """Yield for each run how many of its stops happened, and "" if it ends as undisturbed, else what is wrong."""
    files = write_runs(folder)
    whole = {}
    for index in range(first, first + number):
        rng = random.Random(f"{seed} {index}")
        command = rng.choice(sorted(COMMANDS))
        sizes = rng.choice(((1,), (1,), (2,), (1, 2, 3)))
        ranks, stops = draw(rng, list(PLACES)[index % len(PLACES)], sizes)
        key = (command, ranks[0])
        if key not in whole:
            out = folder / f"{command}-{ranks[0]}" / "run"
            made(command, files[command], out, [ranks[0]], [])
            whole[key] = result(out)
        out = folder / f"{index}" / "run"
        story = f"run {index}, seed {seed}: {command}, ranks {ranks}, {[f'{one.place} {one.at}' for one in stops]}"
        early = 0
        try:
            early = made(command, files[command], out, ranks, stops)
            checked(whole[key], result(out), exact=len(set(ranks)) == 1)
            yield early, ""
        except AssertionError as error:
            yield early, f"{story}: {' '.join(str(error).split())[:600]}"
