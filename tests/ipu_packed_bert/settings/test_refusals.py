"""Refusals of settings, data sets, run files and processes that no other test reaches."""

import errno
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import yaml

from ipu_packed_bert.data.data_sets import _facts, open_packs
from ipu_packed_bert.data.global_batches import StoredPacks
from ipu_packed_bert.processes.ranks import Ranks, joined
from ipu_packed_bert.run_files import checkpoints as saved
from ipu_packed_bert.run_files.checkpoints import Damaged, checkpoint_path, load_checkpoint, save_checkpoint
from ipu_packed_bert.run_files.safetensors_files import read_tensors
from ipu_packed_bert.settings.config import Config, ConfigError
from ipu_packed_bert.settings.loading import config_from_tree
from ipu_packed_bert.settings.schema import BatchConfig, DataConfig, OptimizerConfig
from ipu_packed_bert.tasks.pretraining import Pretraining
from pack_data.store.data_set import PackStore, read_manifest
from tests.refusals import refused
from tests.tiny_runs import DEPTH, tiny_data, tiny_settings

BERT_512 = Config(data=DataConfig(directory="data/none", max_sequence_length=100))


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    return tiny_data(tmp_path_factory.mktemp("refusals") / "data")


def loaded(text):
    return config_from_tree(yaml.safe_load(text), "a.yml", command="finetune")


def first_pack(data):
    StoredPacks(PackStore.open(Path(data)), vocabulary=8).batch([0], 0)


def room_for_masked_tokens(data, predictions):
    manifest = read_manifest(Path(data))
    config = config_from_tree(tiny_settings(data), "a.yml", [f"data.max_predictions_per_sequence={predictions}"])
    Pretraining(config, replace(manifest.schema, max_predictions_per_pack=9))


def differences(_):
    class TwoRanks(Ranks):
        def gathered(self, value):
            return [("host-a", {"seed": 5}), ("host-b", {"seed": 6})]

    TwoRanks(None, 0, 2, 0).refuse_differences({})


@pytest.mark.parametrize(
    "refuse, names",
    [
        (lambda _: open_packs(BERT_512), ["data/none", "rank 0"]),
        (first_pack, ["pack 0", "model.vocabulary_size is 8"]),
        (lambda data: room_for_masked_tokens(data, 10), ["9 masked", "data.max_predictions_per_sequence is 10"]),
        (differences, ["seed", "5", "host-a", "6", "rank 1", "host-b"]),
    ],
)
def test_a_refusal_names_field_and_value(data, refuse, names):
    with refused(*names):
        refuse(data)


def test_room_for_as_many_masked_tokens_as_wanted_is_enough(data):
    room_for_masked_tokens(data, 9)


def test_one_file_of_fine_tuning_is_enough():
    assert loaded("{data: {evaluation: a.csv}, model: {checkpoint: bert}}").data.training is None
    assert loaded("data: {training: a.csv}").task.name == "squad"


@pytest.mark.parametrize("size, derived", [(127, 8192), (128, 128)])
def test_a_vocabulary_follows_from_a_size_that_can_be_trained(size, derived):
    assert config_from_tree({"model": {"vocabulary_size": size}}, "a.yml").data.vocabulary_size == derived


def test_a_simulated_device_fills_its_pipeline_whatever_is_adjusted():
    optimizer = OptimizerConfig(packing_adjustment="none")
    config = Config(optimizer=optimizer, batch=BatchConfig(gradient_accumulation=64)).for_simulation(2.5)
    assert config.accumulation(2.5) == config.pipeline_stages


def test_a_packer_of_others_becomes_the_optimal_one(data):
    manifest = read_manifest(Path(data))
    packers = [("spfhp", DEPTH, "spfhp"), ("theirs", DEPTH, "optimal"), ("nnlshp", 9, "optimal")]
    for algorithm, depth, packer in packers:
        schema = replace(manifest.schema, max_sequences_per_pack=depth)
        stated = _facts(Config(), replace(manifest, algorithm=algorithm, schema=schema))
        assert (stated["data.packer"], stated["data.max_sequences_per_pack"]) == (packer, depth)


@pytest.fixture
def checkpoint(tmp_path):
    engine = {"model": {"a.weight": torch.ones(2)}}
    save_checkpoint(tmp_path, saved.Checkpoint(3, engine, {}, "run: {}\n"), keep=None)
    return checkpoint_path(tmp_path, 3)


def test_a_disk_that_fails_is_damage_and_a_refused_file_is_not(checkpoint, monkeypatch):
    for code, kind in ((errno.EIO, Damaged), (errno.EACCES, PermissionError)):

        def failing(path, code=code):
            raise OSError(code, f"error {code}", str(path))

        monkeypatch.setattr(saved, "_sha256", failing)
        with refused(f"error {code}", kind=kind):
            load_checkpoint(checkpoint)


def test_a_state_beyond_its_limit_is_damage(checkpoint, monkeypatch):
    monkeypatch.setitem(saved._MAX_BYTES, saved.STATE, 9)
    with refused("step_00000003", "state.json", "9 bytes", kind=Damaged):
        load_checkpoint(checkpoint)


def test_memory_that_is_used_up_is_not_called_damage(checkpoint, monkeypatch):
    import safetensors

    def full(*_, **__):
        raise MemoryError("used up")

    monkeypatch.setattr(safetensors, "safe_open", full)
    with refused("used up", kind=MemoryError):
        read_tensors(checkpoint / "model.safetensors")


class OneOfTwo(Ranks):
    """Rank 1 of two, which meets nobody; ``status`` is what the other one left."""

    def __init__(self, status):
        super().__init__(None, 1, 2, 0)
        self.status = status

    def meet(self):
        pass

    def ended(self, error):
        return self.status


@pytest.mark.parametrize(
    "status, error, kind, text",
    [
        (3, ValueError("mistake"), SystemExit, "3"),
        (None, RuntimeError("gloo: closed"), SystemExit, "1"),
        (None, ValueError("mistake"), ValueError, "rank 1 on .*: mistake"),
        (None, KeyError("fault"), KeyError, "fault"),
    ],
)
def test_the_error_of_one_process_ends_it_with_the_status_of_all(status, error, kind, text, capsys):
    with refused(text, kind=kind), joined({"POPDIST_RANK": "1"}, instances=lambda: OneOfTwo(status)):
        raise error
    lost = isinstance(error, RuntimeError)
    assert ("rank 1" in capsys.readouterr().err) == lost


def test_the_first_rank_that_failed_is_not_waited_for():
    class Store:
        def add(self, key, number):
            return int(key == "errors")

    with pytest.raises(RuntimeError), Ranks(Store(), 1, 2, 0).first_alone():
        raise AssertionError("entered")


@pytest.mark.parametrize("name", ["merges", "bytes"])
def test_yaml_beyond_its_limits(name):
    from ipu_packed_bert.settings.yaml_files import parse_yaml

    keys = "".join(f"k{number}: {number}\n  " for number in range(10_001))
    text = {"merges": f"a: &a\n  {keys}\nb: {{<<: *a}}\n", "bytes": "#" * (1 << 20) + "\n"}[name]
    with refused("a.yml", "not valid YAML", {"merges": "keys", "bytes": "1,048,576"}[name], kind=ConfigError):
        parse_yaml(text, "a.yml")


def test_a_file_that_was_not_trusted_is_not_run(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    (tmp_path / "mine.py").write_text("raise SystemExit('it ran')\n")
    tree = {"task": {"name": f"{tmp_path / 'mine.py'}:Task"}, "data": {"training": "a.csv"}}
    with refused("mine.py", "--trust-task", unchanged=tmp_path):
        config_from_tree(tree, "a.yml")
