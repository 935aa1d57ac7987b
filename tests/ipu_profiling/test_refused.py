"""Bad input of plan, report and measured cycles is refused in one line; see `tests.refusals`."""

import itertools
import sys

import pytest

from ipu_packed_bert.data.data_sets import described
from ipu_packed_bert.settings.loading import load_config
from ipu_profiling.cycles.pipeline import PipelinePlacement
from ipu_profiling.measured.popvision import find_profile, read_profile
from ipu_profiling.measured.runs import Measured, read, with_micro_batches
from ipu_profiling.planning import command as plan_command
from ipu_profiling.planning.plan import plan
from ipu_profiling.report import calibrate, command
from pack_data.cli.command import run_main
from tests.fakes import pva
from tests.imports import CONFIGS
from tests.ipu_profiling.measured_sources import run_folder, write_profile
from tests.refusals import faults_of_refusals, refused, rows_of
from tests.tiny_runs import tiny_config, tiny_data

KIND = '"kind": "packed-bert ipu-check"'
BUNDLE = f'{{{KIND}, "format": 1, "configuration": {{"micro_batches": 5, "settings": {{}}}}, "measured": %s}}'
REFUSED = [
    *rows_of(
        r"""
# The packing factor of a plan.
plan(large(), packing_factor=0.0) => --packing-factor | 0 | at least
plan(large(), packing_factor=0.99) => --packing-factor | 0.99 | at least
plan(large(), packing_factor=float('nan')) => --packing-factor | nan
plan(large(), packing_factor=float('inf')) => --packing-factor | inf
plan(large(), packing_factor=3.1) => 3.1 | at most 3 sequences | max_sequences_per_pack
plan(*built, packing_factor=built[0].data.max_sequences_per_pack + 0.1) => --packing-factor | at most
plan(squad('data.max_sequences_per_pack=4'), packing_factor=4.1) => 4.1 | at most 4 sequences
plan(large('batch.gradient_accumulation=9'), packing_factor=1.995) => gradient_accumulation is 9 | 9 stages
PipelinePlacement((3, 7), (0.1, 0.1))._ipu_of_layer(24) => layer 24 | layers_per_ipu
# Logs of runs.
read(run(cycles=None)) => log.jsonl | engine.log_cycles=true
read(run(steps=1)) => log.jsonl | 2 steps
read(run(changed={2: {'cycles': -144}})) => log.jsonl, line 3 | cycles
read(run(changed={2: {'cycles': 0}})) => log.jsonl, line 3 | cycles
read(run(changed={2: {'cycles': '144'}})) => log.jsonl, line 3 | cycles
read(run(changed={2: {'cycles': 2.0**100}})) => log.jsonl, line 3 | cycles
read(run(changed={2: {'cycles': float('nan')}})) => log.jsonl | line 3 | JSON
read(run(changed={2: {'packs': 0}})) => log.jsonl, line 3 | packs
read(run(changed={2: {'packs': 1.5}})) => log.jsonl, line 3 | packs
read(run(changed={2: {'packs': True}})) => log.jsonl, line 3 | packs
read(run(config='data: [')) => config.yml
read(run(config='- 1')) => config.yml
read(run(config='model: {}')) => config.yml | data
read(run(config='data: {}\nmodel: 3')) => config.yml | model
read(run(config='data: {}\nbatch: {micro_batch: many}')) => config.yml | batch.micro_batch
read(run(config='data: {}\nplacement: {replicas: 0}')) => config.yml | placement.replicas
# Bundles and profiles.
read(text('x.csv', 'ipu,cycles')) => x.csv | log.jsonl
read(text('x.json', '{}')) => x.json | packed-bert ipu-check
read(text('bundle.json', '[]')) => bundle.json | packed-bert ipu-check
read(text('bundle.json', '{"kind": "x", "format": 1}')) => bundle.json | packed-bert ipu-check
with_micro_batches(Measured('profile', 'x.pop', 3.0), None) => x.pop | --micro-batches
with_micro_batches(Measured('profile', 'x.pop', 3.0, micro_batches=2), 3) => x.pop | 2 | 3
find_profile(folder) => empty | profile.pop
read_profile(folder / 'nowhere.pop') => nowhere.pop | profile.pop
read_profile(profile, ipus=8) => profile.pop | 2 IPUs | 8
read(write_profile(folder / 'compiled', [0, 0])) => profile.pop | no execution
"""
    ),
    (f"read(text('bundle.json', '{{{KIND}, \"format\": 2}}'))", ["bundle.json", "format", "2"]),
    (f"read(text('bundle.json', '{{{KIND}, \"format\": 1}}'))", ["bundle.json", "configuration"]),
    (f"read(text('bundle.json', {BUNDLE!r} % '{{\"update_cycles\": null}}'))", ["bundle.json", "ipu-check", "updates"]),
    (f"read(text('bundle.json', {BUNDLE!r} % '{{\"update_cycles\": \"9\"}}'))", ["measured.update_cycles", "number"]),
]

# Options of a command -> names in its line.
REFUSED_OPTIONS = [
    (command.main, "--html nowhere/page.html", ["nowhere"]),
    (command.main, "--table update", ["--table", "breakdown"]),
    (command.main, "--measured somewhere", ["somewhere", "log.jsonl"]),
    (command.main, "--micro-batches 9", ["--micro-batches", "--measured"]),
    (command.main, "--config missing.yml", ["missing.yml"]),
    (command.main, "--histogram lengths.csv --table 1", ["lengths.csv"]),
    (command.main, "--set model.hiden_size=3", ["hiden_size", "hidden_size"]),
    (command.main, "--table 1 --set data.max_sequence_length=256", ["max_sequence_length", "256", "512", "--config"]),
    (command.main, "--set data.max_sequence_length=256", ["256", "--packing-factor", "--histogram"]),
    (command.main, "--packing-factor 0", ["--packing-factor", "0"]),
    (command.main, "--table breakdown --packing-factor 3.1", ["3.1", "at most 3 sequences"]),
    (
        command.main,
        "--set batch.gradient_accumulation=8 --packing-factor 1",
        ["gradient_accumulation is 8", "9 stages"],
    ),
    (command.main, "--table points --plot new.svg", ["--plot", "--figure"]),
    (command.main, "--nonsense", ["--nonsense"]),
    (calibrate.main, "--nonsense", ["--nonsense"]),
    (plan_command.main, "--config packed_phase2_pod16 --search", ["--search"]),
]


@pytest.fixture
def scope(tmp_path, monkeypatch):
    """Return the names of the calls."""
    monkeypatch.setitem(sys.modules, "pva", pva)
    (tmp_path / "empty").mkdir()
    numbers = itertools.count()

    def text(name, content):
        (tmp_path / name).write_text(content)
        return tmp_path / name

    built = load_config(tiny_config(tmp_path / "tiny.yml", tiny_data(tmp_path / "data")))
    return {
        "Measured": Measured,
        "PipelinePlacement": PipelinePlacement,
        "built": described(built),
        "find_profile": find_profile,
        "folder": tmp_path / "empty",
        "large": lambda *settings: load_config(CONFIGS / "packed_phase2_pod16.yml", settings),
        "plan": plan,
        "read": read,
        "read_profile": read_profile,
        "with_micro_batches": with_micro_batches,
        "write_profile": write_profile,
        "profile": write_profile(tmp_path / "profiled", [3, 3]),
        "run": lambda **options: run_folder(tmp_path / f"run-{next(numbers)}", **options),
        "squad": lambda *settings: load_config(CONFIGS / "finetune_squad_packed_pod16.yml", settings),
        "text": text,
    }


def test_calls_are_refused(scope):
    faults = faults_of_refusals(REFUSED, scope)
    assert not faults, "\n".join(faults)


def test_options_are_refused(cached_cycles, monkeypatch, capsys, tmp_path):
    monkeypatch.chdir(tmp_path)
    faults = []
    for main, options, names in REFUSED_OPTIONS:
        status = run_main(main, options.split())
        printed = capsys.readouterr()
        line = printed.err.rpartition("error: ")[2]
        missing = [name for name in names if name not in line]
        if status != 2 or printed.out or line.count("\n") != 1 or missing:
            faults.append(f"{options}: status {status}, {missing} missing in: {printed.err}")
    assert not faults, "\n".join(faults)
    assert not list(tmp_path.iterdir())


def test_a_profile_without_the_sdk_is_refused(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "pva", None)
    (tmp_path / "profile.pop").touch()
    with refused("profile.pop", "pva"):
        read(tmp_path / "profile.pop")
