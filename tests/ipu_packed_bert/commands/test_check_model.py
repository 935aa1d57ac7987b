"""`packed-bert check-model`: a folder, a function, one's own collator, a batch of one's own."""

import configparser
import json
import os
import subprocess
import sys
from types import SimpleNamespace

import numpy as np
import pytest
import torch

transformers = pytest.importorskip(
    "transformers", minversion="4.57", reason="tested with 4.57 and newer: pip install 'transformers>=4.57'"
)

from pack_data.cli.command import run_main
from padding_free.check_model_command import main
from padding_free.leaks import layers
from tests.imports import ROOT
from tests.padding_free_faults import FAULTS, LONGEST, ROW, TinyModel, joined
from tests.padding_free_models import a_model, families


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("model")
    a_model(dtype=torch.float32).save_pretrained(path)
    return str(path)


@pytest.fixture
def own(monkeypatch):
    """A module of the user's own."""
    module = SimpleNamespace(
        right=lambda: TinyModel(np.random.default_rng(0)),
        collate=joined,
        late=lambda: (
            next(item for item in FAULTS if item.name == "scaling_by_the_place_in_the_row")
            .make(np.random.default_rng(0))
            .model
        ),
        swapped=lambda examples: joined(examples[::-1]),
    )
    monkeypatch.setitem(sys.modules, "own_code", module)


def test_a_folder_is_isolated_and_its_rows_are_told(folder, tmp_path, capsys):
    batch = tmp_path / "batch.jsonl"
    batch.write_text('{"input_ids": [3, 4, 5]}\n{"input_ids": [6, 7], "labels": [-100, 7]}\n')
    assert main([folder, "--row", "128", "--longest", "64", "--batch", str(batch), "--precision", "bfloat16"]) == 0
    text = capsys.readouterr().out
    assert 'attn_implementation="padding_free"' in text
    assert "128 tokens in" in text
    assert "5 tokens in 2 examples" in text
    assert "torch.bfloat16 and torch.float32" in text
    assert "verdict   isolated" in text


def test_all_layers_are_checked_on_request(folder, monkeypatch, capsys):
    monkeypatch.setattr(layers, "_LEAST_PARAMETERS", 0)
    is_limited = []
    for options in ([], ["--all-layers"]):
        assert main([folder, "--row", "64", "--longest", "32", *options]) == 0
        is_limited.append("have the kind" in capsys.readouterr().out)
    assert is_limited == [True, False]


def test_what_leaks_is_named_with_the_example_and_its_token(own, capsys):
    sizes = ["--row", str(ROW), "--longest", str(LONGEST)]
    assert main(["own_code:right", *sizes, "--attention", "padding_free", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["verdict"] == "isolated"
    assert main(["own_code:late", *sizes, "--json"]) == 1
    actual = json.loads(capsys.readouterr().out)
    assert actual["verdict"] == "leaks"
    assert "scores otherwise than alone from its token" in actual["reason"]
    assert actual["model"] == "own_code:late"
    first = actual["first"]
    assert set(first) == {"example", "token", "place", "difference"}
    assert first["difference"] > 1e-5
    assert 0 <= first["token"] <= first["place"] < ROW
    assert first["example"] > 0
    assert main(["own_code:late", *sizes]) == 1
    assert f"first     example {first['example']}, its token {first['token']}, place " in capsys.readouterr().out


def test_a_leak_begins_at_the_example_behind_another(monkeypatch, capsys):
    """A family whose layers look back over the boundary: the first row of the probe is of one token and 63."""
    monkeypatch.setitem(sys.modules, "own_code", SimpleNamespace(hybrid=lambda: families.build("lfm2")))
    assert main(["own_code:hybrid", "--json"]) == 1
    first = json.loads(capsys.readouterr().out)["first"]
    assert (first["example"], first["token"], first["place"]) == (1, 0, 3)
    assert first["difference"] > 1e-4


def test_a_collator_of_ones_own(own, capsys):
    sizes = ["--row", "64", "--longest", "32"]
    assert main(["own_code:right", *sizes, "--collator", "own_code:collate"]) == 0
    assert main(["own_code:right", *sizes, "--collator", "own_code:swapped"]) == 0  # another order is no fault


def test_a_model_that_fails_cannot_be_judged(monkeypatch, capsys):
    def fails():
        model = TinyModel(np.random.default_rng(0))
        model.forward = lambda **inputs: {}["logits"]
        return model

    monkeypatch.setitem(sys.modules, "own_code", SimpleNamespace(fails=fails))
    assert run_main(main, ["own_code:fails", "--row", "64", "--longest", "32", "--json"]) == 2


@pytest.mark.slow
def test_the_fixture_of_the_pytest_plugin(tmp_path):
    setup = configparser.ConfigParser()
    setup.read(ROOT / "setup.cfg")
    _, _, plugin = setup["options.entry_points"]["pytest11"].partition("=")
    (tmp_path / "pytest.ini").write_text("[pytest]\n")  # nothing of the directories above
    (tmp_path / "test_own.py").write_text("def test_own(assert_isolated):\n    print(assert_isolated.__module__)\n")
    # Without other plugins, and without this one if an installed package already offers it.
    environment = {**os.environ, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-m", "pytest", "-q", "-s", "-p", plugin.strip(), "test_own.py"]
    run = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert run.returncode == 0, run.stdout + run.stderr
    assert "padding_free.leaks.isolated" in run.stdout
