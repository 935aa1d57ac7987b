"""`packed-bert ipu-check` on the stand-ins for PopTorch and PopVision's library: stages, page, bundle and statuses."""

import getpass
import json
import shlex
import socket
import sys
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import yaml

from ipu_packed_bert.benchmarks import ipu_updates
from ipu_packed_bert.settings.loading import load_config
from ipu_packed_bert.settings.shipped import config_file, shipped_names
from ipu_profiling.cycles import calibration
from ipu_profiling.cycles.target import MK2
from ipu_profiling.cycles.workload import Machine
from ipu_profiling.ipu_check import command as ipu_check_command
from ipu_profiling.ipu_check import stages as ipu_check
from ipu_profiling.measured import bundle as ipu_bundle
from ipu_profiling.measured import popvision, runs
from ipu_profiling.planning.ipu_memory import memory_words
from ipu_profiling.planning.plan import plan
from pack_data.cli.command import run_main
from pack_data.display.facts import as_json
from tests.fakes import profiles, pva
from tests.fakes.machine import machine
from tests.fakes.sdk import installed
from tests.refusals import refused
from tests.tiers import sample
from tests.tiny_runs import tiny_settings

STAGES = ["predicted", "compiled", "updates"]
# Shipped configurations of pre-training on IPUs, unpacked and derived ones included.
PODS = [name for name in shipped_names() if "packed_phase" in name and "gpu" not in name] + ["packed_small_ipu1"]


def configuration(folder):
    """Two replicas of two IPUs, float32 so that the stand-in is fast."""
    settings = tiny_settings()
    settings["engine"] = {"kind": "ipu", "half_weights": False}
    settings["placement"] = {
        "replicas": 2,
        "ipus_per_replica": 2,
        "layers_per_ipu": [1, 1],
        "available_memory_proportion": [0.2, 0.2],
        "replicated_tensor_sharding": True,
    }
    settings["batch"] = {"micro_batch": 1, "gradient_accumulation": 40}
    (folder / "tiny.yml").write_text(yaml.safe_dump(settings))
    return folder / "tiny.yml"


def checked(folder, cache, *options, ipus=4, before=lambda: None):
    """(exit status, bundle or None) of the command."""
    with pytest.MonkeyPatch.context() as patch, installed(ipus=ipus):
        patch.setenv("XDG_CACHE_HOME", str(cache))
        if sys.modules.get("pva", pva) is not None:
            patch.setitem(sys.modules, "pva", pva)
        patch.setattr(ipu_updates, "UPDATES", 2)
        before()
        words = ["--config", str(configuration(folder)), "--out", str(folder / "check"), *options]
        status = run_main(ipu_check_command.main, words)
    bundle = folder / "check" / "bundle.json"
    return status, json.loads(bundle.read_text()) if bundle.is_file() else None


class Whole(NamedTuple):
    """Checks in which nothing differs, because the stand-in counts the cycles that the model says."""

    status: int
    bundle: Any  # of counted cycles
    profiled: Any  # of a profile
    config: Any
    folder: Path
    cycles: Any  # of an update by the model: low, fitted, high

    def read(self):
        tree = json.loads((self.folder / "bundle.json").read_text())
        return ipu_bundle.Bundle(**{key: tree[key] for key in tree if key not in ("format", "kind")})


@pytest.fixture(scope="module")
def whole(tmp_path_factory, cycle_cache):
    folder = tmp_path_factory.mktemp("whole")
    config = load_config(configuration(folder))
    pipeline = Machine(MK2, cycle_cache / "ipu_packed_bert").pipeline(config)
    fitted = calibration.load()
    cycles = list(fitted.duration(lambda each: pipeline.step(5, each).cycles))

    def count():
        machine.cycles = int(cycles[1])

    (folder / "profiled").mkdir()
    status, bundle = checked(folder, cycle_cache, before=count)
    profiled, with_profile = checked(folder / "profiled", cycle_cache, "--profile", before=count)
    assert profiled == 0
    return Whole(status, bundle, with_profile, config, folder / "check", cycles)


@pytest.fixture
def check(tmp_path, cycle_cache):
    """check(*options, ipus=..., before=...) -> (exit status, bundle)"""

    def run(*options, **more):
        return checked(tmp_path, cycle_cache, *options, **more)

    run.folder = tmp_path / "check"
    run.config = load_config(configuration(tmp_path))
    return run


def statuses(bundle):
    return {stage["name"]: stage["status"] for stage in bundle["stages"]}


def test_all_stages_are_done_and_nothing_differs(whole):
    bundle = whole.bundle
    profiled = whole.profiled
    assert whole.status == 0
    assert statuses(bundle) == dict.fromkeys(STAGES, "done")
    assert statuses(profiled) == dict.fromkeys([*STAGES, "profile"], "done")
    for item in (bundle, profiled):
        assert item["verdict"] == {"status": 0, "problems": [], "way_out": []}
        # As few micro-batches as the stages of two IPUs with the heads on the first.
        assert item["configuration"]["micro_batches"] == 5
        assert item["predicted"]["update_cycles"] == pytest.approx(whole.cycles)
        assert len(item["measured"]["losses"]) == len(item["measured"]["seconds"]) == 2
        assert item["measured"]["losses"][0] == pytest.approx(item["predicted"]["loss"], rel=2e-3)
    assert bundle["measured"]["update_cycles"] == int(whole.cycles[1])
    assert "work" not in bundle["measured"]
    # The same program, profiled or not, from the same weights.
    assert profiled["measured"]["losses"] == pytest.approx(bundle["measured"]["losses"], rel=1e-3)
    for side in (profiled["predicted"], profiled["measured"]):
        assert [work["ipu"] for work in side["work"]] == [0, 1]
        assert all(work["cycles"] > 0 for work in side["work"])
    # The stand-in's profile has the weights, some constants, and code.
    for actual in profiled["measured"]["memory"]:
        assert actual["bytes"] == actual["always_live"] + 8 * profiles.CODE_BYTES
    figures, verdict = map(as_json, ipu_bundle.facts(whole.read()))
    assert figures["first loss"] == bundle["measured"]["losses"][0]
    assert "nothing differs" in verdict["verdict"]


def test_the_report_reads_the_settings_and_cycles_of_a_bundle(whole):
    for bundle, folder in ((whole.bundle, "check"), (whole.profiled, "profiled/check")):
        source = runs.read(whole.folder.parent / folder)
        assert source.settings == bundle["configuration"]["settings"]
        assert source.cycles == bundle["measured"]["update_cycles"]
        assert list(map(vars, source.work)) == bundle["measured"].get("work", [])
        assert source.micro_batches == 5


@pytest.mark.parametrize(
    "what, value, word",
    [
        ("update_cycles", 10**12, "cycles"),
        ("update_cycles", 1, "cycles"),
        ("losses", [9.0, 5.0], "the host's"),
        ("losses", [None, 5.0], "not finite"),
        ("losses", [5.5, None], "not finite"),
        ("memory", [{"ipu": 1, "fullest_tile": MK2.memory_per_tile + 1}], "does not fit"),
    ],
)
def test_what_differs_is_a_verdict(whole, what, value, word):
    bundle = whole.read()
    assert ipu_bundle.problems(bundle) == []
    bundle.measured[what] = value
    actual = ipu_bundle.problems(bundle)
    assert len(actual) == 1
    assert word in actual[0]


def test_the_bundle_tells_nobodys_names(check, tmp_path, monkeypatch):
    """No path, host, user or address, also where the SDK's error has them."""
    monkeypatch.setattr(socket, "gethostname", lambda: "secretbox.example.org")
    monkeypatch.setattr(getpass, "getuser", lambda: "jdoe42")
    output = (
        f"secretbox: jdoe42 cannot read '{tmp_path}/a b.poptorch' (\\home\\jdoe42), ~/x, 10.1.22.3:8090, error=/etc/x"
    )

    def damaged():
        from tests.fakes import poptorch

        def fail(self, *args, **kwargs):
            raise poptorch.Error(output)

        monkeypatch.setattr(poptorch.PoplarExecutor, "compile", fail)

    status, bundle = check(before=damaged)
    assert status == 1
    assert statuses(bundle) == {"predicted": "done", "compiled": "failed"}
    failed = next(stage for stage in bundle["stages"] if stage["status"] == "failed")
    assert failed["said"]
    assert failed["means"]
    assert failed["way_out"]
    text = (check.folder / "bundle.json").read_text()
    for name in ("secretbox", "jdoe42", str(tmp_path), "10.1.22.3", "/etc", "example.org", "~/x", Path.home().name):
        assert name in ("root", "") or name not in text, name
    assert not {"directory", "corpus", "vocabulary"} & set(bundle["configuration"]["settings"]["data"])


@pytest.mark.parametrize("options", [(), ("--profile",)])
def test_a_program_that_does_not_fit(check, monkeypatch, options, capsys):
    """Every way out is options that the configuration takes."""
    monkeypatch.setattr(profiles, "CODE_BYTES", MK2.memory_per_tile)
    status, bundle = check(*options)
    assert status == 1
    expected = {"predicted": "done", "compiled": "failed"}
    assert statuses(bundle) == ({**expected, "profile": "done"} if options else expected)
    stage = bundle["stages"][1]
    if options:  # under which the stand-in compiles it, and the profile says which IPUs are too full
        assert [problem[:12] for problem in bundle["verdict"]["problems"]] == ["does not fit"] * 2
        assert bundle["verdict"]["way_out"] == stage["way_out"].split("; or ")
    else:
        assert stage["said"].startswith("Out of memory on tile 1: ")
        assert stage["means"].endswith("on IPU 0")
    ways = stage["way_out"].split("; or ")
    assert len(ways) >= 3
    assert "cause " in capsys.readouterr().out
    for way in ways:
        options = [word for word in shlex.split(way.partition(": ")[2]) if word != "--set" and "..." not in word]
        load_config(check.config.path, options)


# A run that keeps everything, so that every change is advised.
KEEPS = ("engine.recompute_layers=false", "engine.half_logits=false", "placement.optimizer_state_off_chip=false")


def changed_by(advice, config, *options):
    """Return a configuration with the --set options of an advice, in addition to those with which it was loaded."""
    words = shlex.split(advice.partition("; ")[0].rpartition(": ")[2].replace(" fits", ""))
    words += shlex.split(advice.partition("add ")[2].partition(" to ")[0])
    return load_config(config.path, [*options, *(word for word in words if "=" in word)])


def assert_same_updates(config, changed):
    for factor in (1.0, 1.5, 1.996):
        assert changed.packs_per_update(factor) == pytest.approx(config.packs_per_update(factor), rel=0.02)


@pytest.mark.parametrize("more", [(), KEEPS], ids=["shipped", "keeps"])
@pytest.mark.parametrize("name", sample(PODS, 1))
def test_advice_keeps_the_update_and_takes_less_memory(name, more):
    options = ("without_ipus=null", *more)
    config = load_config(config_file(name), options)
    before = plan(config, packing_factor=1.0).memory
    for ipu in (None, *range(len(before))):
        full = ipu if ipu is not None else max(before, key=lambda memory: memory.total).ipu
        for way in ipu_check._ways_out(config, ipu):
            changed = changed_by(way, config, *options)
            assert changed.as_dict() != config.as_dict(), way
            assert_same_updates(config, changed)
            after = plan(changed, packing_factor=1.0).memory
            # Recomputing layers changes no IPU without layers, the type of the loss only that of the heads.
            if way.startswith(("recompute the layers", "compute the loss")):
                assert after[full].together <= before[full].together, way
            else:
                assert after[full].together < before[full].together, way
            if way.startswith("move a layer"):
                assert max(memory.total for memory in after) <= max(memory.total for memory in before), way


@pytest.mark.parametrize("name", sample(PODS, 1))
def test_the_advice_of_a_plan_fits_and_keeps_the_update(name):
    options = ("without_ipus=null", "batch.micro_batch=256")
    config = load_config(config_file(name), options)
    planned = plan(config, packing_factor=1.0)
    assert planned.fits is False
    changed = changed_by(memory_words(planned, planned.micro_batch_that_fits())[1], config, *options)
    assert plan(changed, packing_factor=1.0).fits
    assert changed.batch.micro_batch < 256
    assert_same_updates(config, changed)
    for replicas in {1, max(1, config.placement.replicas // 2)}:
        assert_same_updates(config, changed_by(config.on_replicas(replicas), config, *options))


@pytest.mark.parametrize(
    "options, ipus, names",
    [
        ((), 0, ["no IPU is attached"]),
        ((), 2, ["needs 4 IPUs"]),
        (("--set", "engine.ipu_model=true"), 0, ["engine.ipu_model", "make test-ipu"]),
    ],
)
def test_what_is_no_ipu_is_not_checked(check, capsys, options, ipus, names):
    assert check(*options, ipus=ipus) == (2, None)
    printed = capsys.readouterr()
    assert printed.err.count("\n") == 1
    assert all(name in printed.err for name in names)


def test_ctrl_c_leaves_the_bundle_so_far(check, monkeypatch, capsys):
    def interrupt():
        from ipu_packed_bert.engine.ipu import engine

        step = engine.IpuEngine.step
        calls = []

        def stopped(self, *arguments):
            calls.append(1)
            if len(calls) > 1:
                raise KeyboardInterrupt
            return step(self, *arguments)

        monkeypatch.setattr(engine.IpuEngine, "step", stopped)

    status, bundle = check(before=interrupt)
    assert status == 130
    assert len(bundle["measured"]["losses"]) == 1
    assert bundle["stages"][-1]["name"] == "updates"
    assert bundle["stages"][-1]["status"] == "interrupted"
    assert "bundle.json" in capsys.readouterr().out
    assert bundle["verdict"]["status"] == 1


@pytest.mark.parametrize(
    "text",
    [
        "[]",
        "{}",
        '{"kind": "another", "format": 1}',
        '{"kind": "packed-bert ipu-check", "format": 2}',
        '{"kind": "packed-bert ipu-check", "format": 1}',
        '{"kind": "packed-bert ipu-check", "format": 1, "configuration": [], "device": 3}',
    ],
)
def test_what_is_no_bundle_is_one_line(tmp_path, text):
    (tmp_path / "bundle.json").write_text(text)
    with refused("bundle.json"):
        runs.read(tmp_path)


def test_a_profile_by_hand(tmp_path, monkeypatch):
    """Two IPUs of two tiles; a run that brings weights, and two updates of 30 and 50 cycles on IPU 0."""
    steps = [
        [("OnTileExecute", "/a/MatMul", (20, 5)), ("DoExchange", "/a", (4, 1)), ("Sync", "s", (6, 6))],
        [("OnTileExecute", "/a/MatMul", (40, 7)), ("OnTileExecute", "/b/PreArrange", (2, 0)), ("Unheard", "x", (8, 0))],
    ]
    weights = [("StreamCopyMid", "weights", (3, 3))]

    def run(each):
        return {"name": "", "steps": [dict(type=kind, name=name, cycles=cycles) for kind, name, cycles in each]}

    tiles = [{"bytes": size, "always_live": size - 1} for size in (10, 30, 5, 6)]
    stored = {"ipus": 2, "tiles": tiles, "runs": [run(each) for each in (weights, *steps)]}
    (tmp_path / "training").mkdir()
    (tmp_path / "training" / "profile.pop").write_text(json.dumps(stored))
    monkeypatch.setitem(sys.modules, "pva", pva)
    actual = popvision.read_profile(popvision.find_profile(tmp_path), ipus=2)
    assert actual.memory == (popvision.Memory(0, 40, 38, 30), popvision.Memory(1, 11, 9, 6))
    assert actual.runs == 2
    assert [work.cycles for work in actual.work] == [40, 9.5]
