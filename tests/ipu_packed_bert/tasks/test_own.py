"""A task in a file of the user's: its class and its settings are found by FILE.py:CLASS, from any folder."""

import json
from pathlib import Path

import pytest

from ipu_packed_bert.settings.loading import config_from_tree, load_config
from ipu_packed_bert.settings.user_task import _trust
from ipu_packed_bert.tasks import task_class
from ipu_packed_bert.tasks.classification import ClassificationTask
from ipu_packed_bert.training.predictions import find_trained
from tests.fine_tuning_files import OWN_TASKS, tiny_fine_tuned


@pytest.fixture
def own(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("own_task.py").write_text(OWN_TASKS)
    _trust("own_task.py")
    return {"task": {"name": "own_task.py:Own", "words": 5}, "data": {"training": "a.csv"}}


def test_class_and_settings_are_those_of_the_file(own, tmp_path, monkeypatch):
    config = config_from_tree(own, "own.yml", ["task.words=7"])
    name = f"{tmp_path / 'own_task.py'}:Own"
    assert (config.task.name, config.task.words) == (name, 7)
    actual = task_class(name)
    assert issubclass(actual, ClassificationTask)
    assert actual.settings is type(config.task)
    # What a run keeps is found from another folder, and is the same configuration.
    Path("kept.yml").write_text(config.to_yaml())
    monkeypatch.chdir("/")
    assert load_config(tmp_path / "kept.yml").task == config.task
    assert task_class(name) is actual


def test_a_run_does_not_load_a_file_beside_itself(own, tmp_path):
    """Runs write full paths: another one may be of a folder that somebody else made."""
    Path("own_task.py").write_text("raise SystemExit('it was run')")
    _trust("own_task.py")
    with pytest.raises(ValueError, match="full path"):
        config_from_tree(own, "config.yml", stored=True)
    with pytest.raises(SystemExit):
        config_from_tree({**own, "task": {"name": f"{tmp_path / 'own_task.py'}:Own"}}, "config.yml", stored=True)


@pytest.mark.parametrize("kind", ["single_label", "multi_label", "regression"])
def test_the_config_of_a_classifier_determines_its_task(kind, tmp_path):
    folder = tiny_fine_tuned(tmp_path / "model", kind)
    assert task_class(find_trained(folder).tree["task"]["name"]) is task_class(kind)
    about = json.loads((folder / "config.json").read_text())
    for problem, labels, expected in (
        (None, 3, "single_label"),
        (None, 1, "regression"),
        ("multi_label_classification", 3, "multi_label"),
    ):
        names = {str(number): f"label {number}" for number in range(labels)}
        changed = {**about, "problem_type": problem, "id2label": names}
        (folder / "config.json").write_text(json.dumps(changed))
        assert task_class(find_trained(folder).tree["task"]["name"]) is task_class(expected)


def test_an_exported_folder_is_asked_by_the_name_of_its_task(own, tmp_path):
    folder = tiny_fine_tuned(tmp_path / "model", "single_label")
    for architecture in ("BertForSequenceClassification", "BertModel"):
        about = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps({**about, "architectures": [architecture]}))
        actual = find_trained(folder, "own_task.py:Own")
        assert actual.tree["task"]["name"] == f"{tmp_path / 'own_task.py'}:Own"
        assert actual.labels == ["0", "1", "2"]
