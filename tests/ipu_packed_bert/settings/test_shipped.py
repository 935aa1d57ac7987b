"""Every committed configuration: in range, what its name says, and the published values whatever the defaults are."""

import json
import re
from functools import lru_cache

import pytest

from ipu_packed_bert.settings import loading as configurations
from ipu_packed_bert.settings.declare import plain
from ipu_packed_bert.settings.rules import check_for_ipus
from ipu_packed_bert.settings.schema import EPSILON, FIXED
from ipu_packed_bert.settings.shipped import config_file, for_one_gpu, shipped_names
from ipu_profiling.planning.plan import plan
from tests.imports import CONFIGS, ROOT

load_config = lru_cache(None)(configurations.load_config)  # each file is read once, whatever is asked of it
FINE_TUNING = [CONFIGS / f"{name}.yml" for name in shipped_names() if name.startswith("finetune_")]
PATHS = [CONFIGS / f"{name}.yml" for name in shipped_names() if not name.startswith("finetune_")]
FILES = [path for path in PATHS if path.is_file()]  # the others are derived from them
NAME = re.compile(
    r"(?P<packing>packed|unpacked)_(?:(?P<phase>phase1|phase2)(?:_(?P<length>\d+))?(?P<base>_base)?_(?P<machine>(?:bow_)?pod(?:16|64)|pod4|gpu1|gpu8)"
    r"|(?P<small>small_ipu1|host))\.yml"
)

# Every setting of Graphcore's published configurations for POD16 (graphcore/examples, nlp/bert/pytorch), those of SQuAD
# (configs_squad.yml) that are the same here, what the configurations for GPUs share, and the sizes of both models.
TABLE = json.loads((ROOT / "tests" / "data" / "published_settings.json").read_text())
# What the published ones for POD64 have otherwise: loss scale, first and other memory proportions. BERT-base has none.
PUBLISHED_POD64 = {
    ("large", 128): (32768.0, 0.14, 0.19),
    ("large", 384): (16384.0, 0.15, 0.25),
    ("large", 512): (16384.0, 0.13, 0.19),
}
REPLICAS = {"pod4": 1, "pod16": 4, "pod64": 16, "bow_pod16": 4, "bow_pod64": 16}
# Published NVIDIA configuration, BERT-large with LAMB (NVIDIA/DeepLearningExamples, PyTorch/LanguageModeling/BERT,
# scripts/configs/pretrain_config.sh, dgxa100_8gpu_fp16): sequences an update, steps, peak learning rate, warm-up share.
PUBLISHED_GPU = {
    128: (65536, 7038, 6.0e-3, 0.2843),
    512: (32768, 1563, 4.0e-3, 0.128),
}
MASKS = {128: 20, 384: 56, 512: 76}


def values_of(config, keys):
    """Return values of settings by full name, those of former settings included."""
    return {key: FIXED[key] if key in FIXED else plain(config.value(key)) for key in keys}


@pytest.mark.parametrize("path", PATHS, ids=lambda path: path.name)
def test_what_the_name_says(path):
    name = NAME.fullmatch(path.name)
    assert name, "a name says packed or unpacked, phase or host, size and machine"
    config = load_config(path)

    packed = name["packing"] == "packed"
    assert config.packed == packed
    packer = "optimal" if name["small"] == "host" else "nnlshp"
    assert (config.data.packer, config.data.max_sequences_per_pack) == ((packer, 3) if packed else ("none", 1))
    assert config.predictions_per_sequence == MASKS[config.data.max_sequence_length]
    if name["machine"] is None:
        assert config.ipus == 1
        assert bool(config.without_ipus) == (name["small"] == "small_ipu1")
        assert config.engine.kind == ("host" if name["small"] == "host" else "auto")
        return
    length = 128 if name["phase"] == "phase1" else int(name["length"] or 512)
    size = "base" if name["base"] else "large"
    assert config.data.max_sequence_length == length
    if name["machine"].startswith("gpu"):
        for_gpus(
            config,
            size,
            length,
            memory={"gpu1": 80e9, "gpu8": 40e9}[name["machine"]],
        )
        return
    replicas = REPLICAS[name["machine"]]
    assert config.placement.machine == ("bow" if name["machine"].startswith("bow") else "mk2")
    # The files leave out what has its default: a default that changes must not change a published run.
    of_pod16 = re.sub(r"(bow_)?pod\d+", "pod16", path.name)
    wanted = {**TABLE["shared"], **TABLE["files"][of_pod16]}
    # Every machine has the batch of a POD16, by as many times the accumulation as it has fewer replicas.
    wanted["batch.gradient_accumulation"] = wanted["batch.gradient_accumulation"] * 4 // replicas
    wanted["placement.replicas"] = replicas
    wanted["placement.replicated_tensor_sharding"] = replicas > 1
    if name["machine"].endswith("pod64") and (size, length) in PUBLISHED_POD64:
        wanted["engine.loss_scaling"], first, others = PUBLISHED_POD64[size, length]
        wanted["placement.available_memory_proportion"] = [first, others, others, others]
    assert len(wanted) == 61
    assert values_of(config, wanted) == wanted
    assert config.packs_per_update(1.0) == {128: 65536}.get(length, 16384)


def for_gpus(config, size, length, memory):
    steps, rate, warmup = PUBLISHED_GPU[length][1:]
    wanted = {**TABLE["gpus"], **TABLE["sizes"][size], "run.steps": steps}
    wanted["optimizer.learning_rate"] = rate
    wanted["optimizer.warmup_fraction"] = warmup
    assert values_of(config, wanted) == wanted
    assert config.packs_per_update(1.0) == PUBLISHED_GPU[length][0]
    assert EPSILON == 1e-6
    assert config.ipus == 1
    assert not config.without_ipus
    # Half as much again as is computed must fit: kernels' buffers and the allocator's waste are not counted.
    assert 0.2 * memory < plan(config, packing_factor=2.0).host_memory.most < memory / 1.5


def test_a_configuration_is_found_by_its_name_in_any_directory(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in shipped_names():
        assert config_file(name) == config_file(f"configs/{name}.yml") == CONFIGS / f"{name}.yml"
    assert for_one_gpu("packed_phase1_base_bow_pod64") == "packed_phase1_base_gpu1"
    assert for_one_gpu("packed_phase2_gpu1") is None is for_one_gpu("unpacked_phase2_pod16")


def test_a_directory_of_its_name_hides_no_configuration(tmp_path, monkeypatch):
    (tmp_path / "packed_host").mkdir()
    monkeypatch.chdir(tmp_path)
    assert config_file("packed_host") == CONFIGS / "packed_host.yml"


def test_the_table_of_published_settings_is_whole():
    assert set(TABLE["files"]) == {path.name for path in PATHS if re.search("[^w]_pod16", path.name)}
    assert len(TABLE["files"]) == 12


@pytest.mark.parametrize(
    "path", [path for path in PATHS if "_pod" in path.name or "_ipu" in path.name], ids=lambda path: path.name
)
def test_without_ipus_it_is_the_same_run_in_small(path):
    config = load_config(path)
    small, changes = config.applied_without_ipus()
    assert {change.key for change in changes} >= {"model.hidden_size", "batch.gradient_accumulation", "run.steps"}
    # Same shape of packs, same loss, same kind of optimiser: only sizes, speed and data differ.
    assert small.data.max_sequence_length == config.data.max_sequence_length
    assert small.data.max_sequences_per_pack == config.data.max_sequences_per_pack
    assert small.data.packer == ("optimal" if config.packed else "none")
    assert small.loss == config.loss
    assert small.optimizer.name == config.optimizer.name
    assert small.data.corpus == "embedded"
    assert small.ipus == 1
    # Minutes on two cores: rows of all updates, before packing makes them fewer.
    assert small.run.steps * small.batch.micro_batch * small.batch.gradient_accumulation <= 6000
    assert small.data.directory != config.data.directory


def test_packed_and_unpacked_differ_only_in_packing():
    compared = 0
    for path in PATHS:
        unpacked = CONFIGS / f"un{path.name}"
        if unpacked not in PATHS:
            continue
        trees = [load_config(path).as_dict(), load_config(unpacked).as_dict()]
        for tree in [
            *trees,
            *(tree.get("without_ipus", {}) for tree in trees),
        ]:
            for key in ("directory", "packer", "max_sequences_per_pack"):
                tree.get("data", {}).pop(key, None)
            tree.get("run", {}).pop("compare_unpacked", None)  # of packs only
        assert trees[0] == trees[1]
        compared += 1
    assert compared == 1 + 30


def test_configurations_with_the_same_directory_build_the_same_data_set():
    lines = {}
    for path in PATHS:
        for config in (load_config(path), load_config(path).applied_without_ipus()[0]):
            config = config.changed("data", max_predictions_per_sequence=config.predictions_per_sequence)
            lines.setdefault(config.data.directory, set()).add(config.build_line())
    assert len(lines) >= 10
    assert [directory for directory, of_directory in lines.items() if len(of_directory) > 1] == []


@pytest.mark.parametrize("path", FINE_TUNING, ids=lambda path: path.name)
def test_fine_tuning_what_the_name_says(path):
    config = load_config(path)
    _, name, packing, *size = path.stem.split("_")
    assert config.task.name == {"squad": "squad", "tokens": "tokens"}.get(name, "single_label")
    assert config.packed == (packing == "packed")
    assert not configurations.load_config(path, ["data.packer=none"]).packed
    if not size:
        assert config.ipus == 1
        return
    wanted = TABLE["sizes"]["base" if "base" in size else "large"]
    assert values_of(config, wanted) == wanted
    assert config.model.vocabulary_size == 30522
    assert config.ipus == int(size[-1][3:])
    assert sum(config.placement.layers_per_ipu) == config.model.num_layers
    # Full pipelines at packing factors that were met: SQuAD at 384, and short texts and sentences at 128.
    for factor in {384: (1.0, 2.17, 2.232), 128: (1.0, 5.0, 9.0)}[config.data.max_sequence_length]:
        check_for_ipus(config.with_micro_batch(factor), factor)


@pytest.mark.parametrize("name", TABLE["squad"])
def test_published_settings_of_squad(name):
    config = load_config(CONFIGS / f"finetune_squad_packed_{name}.yml")
    wanted = {**TABLE["squad_shared"], **TABLE["squad"][name]}
    wanted["placement.optimizer_state_off_chip"] = name == "pod4"
    wanted["placement.replicated_tensor_sharding"] = config.placement.replicas > 1
    assert values_of(config, wanted) == wanted
