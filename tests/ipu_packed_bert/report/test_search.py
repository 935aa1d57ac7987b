"""The search for plans: the best is the best of all it looked at, all fit, and what is written is what was found."""

import json
import re
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ipu_packed_bert.commands import plan as plan_command
from ipu_packed_bert.cycles import calibration
from ipu_packed_bert.data.factors import PackingFactor
from ipu_packed_bert.planning.plan import FULLEST_THAT_RAN, plan
from ipu_packed_bert.report import command, search
from ipu_packed_bert.settings.pretraining import cross_check, load_config
from ipu_packed_bert.settings.shipped import FOLDER
from pack_data.cli.command import run_main
from pack_data.display.table import WIDTH

FACTORS = {2: 1.6, 3: 1.996, 4: 2.001, 6: 2.001, 8: 2.001}


class RoomyIsFast:
    """A machine on which layers and too little room for products cost time; remembers what it was asked."""

    def __init__(self):
        self.asked = []

    def pipeline(self, config):
        self.asked.append(config)
        placement, batch = config.placement, config.batch
        slowest = max(
            (layers + 0.5) * (1 + 0.1 / room)
            for layers, room in zip(placement.layers_per_ipu, placement.available_memory_proportion)
        )
        seconds = slowest * batch.micro_batch**0.9 * (1.0 if config.engine.mask == "product" else 1.1)

        def rate(accumulation, factor, parameters):
            packs = accumulation * batch.micro_batch * placement.replicas
            return packs * factor / (seconds * (accumulation + config.pipeline_stages) * (1 + parameters.layout))

        return SimpleNamespace(sequences_per_second=rate)


def searched(name, *overrides, ipus=None, depths=search.DEPTHS):
    base = load_config(FOLDER / f"{name}.yml", ["without_ipus=null", *overrides])
    machine = RoomyIsFast()
    made = search.Search(
        base,
        machine,
        calibration.load(),
        lambda packer, depth: PackingFactor(FACTORS[depth], packer),
        ipus=ipus or base.ipus,
        depths=depths,
    )
    return base, machine, made.run()


@pytest.mark.parametrize(
    "name, ipus",
    [("packed_phase2_pod4", 4), ("packed_phase2_pod16", 16), ("packed_phase2_pod64", 64), ("packed_phase2_pod16", 64)],
)
def test_the_best_is_the_best_of_all_that_fit(name, ipus):
    base, machine, found = searched(name, ipus=ipus)
    best = found.best[0]
    rates = {search.choice_of(each.config): each.rate for each in found.best}
    assert len(machine.asked) > 10 and len(rates) == len(found.best)
    drawn = calibration.load().draws.parameters
    for config in machine.asked:
        factor = FACTORS[config.data.max_sequences_per_pack]
        rates_drawn = RoomyIsFast().pipeline(config).sequences_per_second(config.accumulation(factor), factor, drawn)
        assert np.median(rates_drawn) <= best.rate
        # Promised only where the plan says that it fits; as large an update, on all IPUs of the pod, by all rules.
        made = plan(config, packing_factor=factor)
        assert made.fits is True and made.fullest <= FULLEST_THAT_RAN
        assert config.ipus == ipus and cross_check(config) == []
        packs = base.packs_per_update(1.0)
        assert abs(config.packs_per_update(1.0) / packs - 1) <= search.UPDATE_DIFFERS
    if base.ipus == ipus:
        assert machine.asked[0] == base and found.base.rate <= best.rate
    else:
        assert found.base is None
    assert found.failures and sum(found.failures.values()) < found.tried
    # Both masks and another depth were looked at.
    assert {config.engine.mask for config in machine.asked} == {"product", "additive"}
    assert {config.data.max_sequences_per_pack for config in machine.asked} == {3, 4}


def test_another_packing_is_another_data_set():
    base, machine, _ = searched("packed_phase2_pod16")
    folders = {(c.data.packer, c.data.max_sequences_per_pack): c.data.directory for c in machine.asked}
    assert folders["nnlshp", 3] == base.data.directory and len(set(folders.values())) == len(folders) > 1


def test_why_the_others_are_no_plans():
    _, _, found = searched("packed_phase2_pod4", "batch.gradient_accumulation=20", depths=())
    assert set(found.failures) <= {search.NO_ROOM, search.NOT_FILLED, search.OTHER_UPDATE, search.REFUSED}
    assert found.failures[search.NO_ROOM] and found.failures[search.OTHER_UPDATE]


@given(layers=st.integers(1, 60), ipus=st.sampled_from([1, 2, 4, 8, 16]))
def test_placements(layers, ipus):
    found = search._placements(layers, ipus)
    assert found and len(set(found)) == len(found)
    for placement in found:
        assert len(placement) == ipus and sum(placement) == layers
        later = placement[1:]
        assert list(later) == sorted(later) and (not later or later[-1] - later[0] <= 1)


def test_what_is_written_is_what_was_found(tmp_path):
    base = FOLDER / "packed_phase2_pod16.yml"
    _, _, found = searched("packed_phase2_pod16")
    best, file = found.best[0], tmp_path / "best.yml"
    plan_command._write(file, base, best)
    written = load_config(file, ["without_ipus=null"])
    assert written.sections == best.config.sections
    factor = FACTORS[written.data.max_sequences_per_pack]
    assert plan(written, packing_factor=factor).memory == best.made.memory
    # The block for machines without IPUs stays.
    assert load_config(file).without_ipus == load_config(base).without_ipus


SMALL = (
    "model.hidden_size=64 model.num_heads=4 model.intermediate_size=128 model.vocabulary_size=512 model.num_layers=4 "
    "data.vocabulary_size=512 data.max_sequence_length=128 data.max_predictions_per_sequence=20 "
    "placement.layers_per_ipu=[1,1,1,1] batch.gradient_accumulation=32"
).split()


def test_the_command(tmp_path, cycle_cache, monkeypatch, capsys):
    """With the cycle model, on a network so small that any micro-batch fits; the report says the same of the file."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(cycle_cache))
    less = {"MICRO_BATCHES": (1, 2), "ROOMS": (0.2, 0.4), "MOST_IPUS": 2, "KEPT": 1, "REFINED": 1}
    for name, value in less.items():
        monkeypatch.setattr(search, name, value)
    words = [word for each in SMALL for word in ("--set", each)]
    file = tmp_path / "best.yml"
    options = ["--search", "--config", "packed_phase2_pod4", "--packing-factor", "1.5", *words]
    assert run_main(plan_command.main, [*options, "--write", str(file)]) == 0
    page = capsys.readouterr().out
    assert all(len(line) <= WIDTH for line in page.splitlines()) and str(file) in page.splitlines()[-1]
    (rates,) = re.findall(r"^ *1  +([\d,]+), [\d,]+ to [\d,]+ ", page, re.MULTILINE)
    (written,) = re.findall(r"^ *as written  +([\d,]+), ", page, re.MULTILINE)
    assert float(rates.replace(",", "")) >= float(written.replace(",", ""))
    assert run_main(command.main, ["--config", str(file), "--packing-factor", "1.5", "--json"]) == 0
    (answer,) = json.loads(capsys.readouterr().out)["tables"]
    assert answer["rows"][1]["packed"] == rates
    planned = plan(load_config(file, ["without_ipus=null"]), packing_factor=1.5)
    assert planned.fits and planned.fullest <= FULLEST_THAT_RAN


@pytest.mark.parametrize(
    "options, status, words",
    [
        (["--config", "packed_phase2_pod4", "--ipus", "1"], 1, "no plan fits"),
        (["--config", "packed_phase2_gpu1"], 2, "engine.kind is host"),
        (["--config", "packed_phase2_pod4", "--ipus", "12"], 2, "power of two"),
        (["--config", "packed_phase2_pod4", "--histogram", "squad_1_1_384"], 2, "is of 384; give a matching one"),
        (["--config", "packed_phase2_pod4", "--set", "data.max_sequence_length=256"], 2, "no histogram of length 256"),
    ],
)
def test_what_cannot_be_searched(options, status, words, monkeypatch, tmp_path, capsys):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    if status == 1:
        options = [*options, "--packing-factor", "2"]
    assert run_main(plan_command.main, ["--search", *options]) == status
    out, error = capsys.readouterr()
    assert words in (out if status == 1 else error)
    assert status == 1 or len(error.splitlines()) == 1
