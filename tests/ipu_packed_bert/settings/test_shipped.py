"""Every committed configuration: in range, what its name says, and the published values whatever the defaults are."""

import dataclasses
import json
import re
from functools import lru_cache

import pytest
import yaml

from ipu_packed_bert.settings import loading as configurations
from ipu_packed_bert.settings.config import Config
from ipu_packed_bert.settings.declare import plain
from ipu_packed_bert.settings.launch_lines import compiled_words
from ipu_packed_bert.settings.rules import check_for_ipus, schedule_too_short
from ipu_packed_bert.settings.schema import EPSILON, FIXED
from ipu_packed_bert.settings.shipped import config_file, for_one_gpu, shipped_names
from ipu_packed_bert.settings.yaml_files import load_yaml
from ipu_profiling.measured.bundle import way_out
from ipu_profiling.planning.ipu_memory import memory_words
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

# Every setting of Graphcore's published configurations for POD16 (graphcore/examples, nlp/bert/pytorch).
TABLE = json.loads((ROOT / "tests" / "data" / "published_settings.json").read_text())
# What the published ones for POD64 have otherwise: loss scale, first and other memory proportions. BERT-base has none.
PUBLISHED_POD64 = {
    ("large", 128): (32768.0, 0.14, 0.19),
    ("large", 384): (16384.0, 0.15, 0.25),
    ("large", 512): (16384.0, 0.13, 0.19),
}
REPLICAS = {"pod4": 1, "pod16": 4, "pod64": 16, "bow_pod16": 4, "bow_pod64": 16}
# hidden, layers, heads, intermediate, layers per IPU
# Published NVIDIA configuration, BERT-large with LAMB (NVIDIA/DeepLearningExamples, PyTorch/LanguageModeling/BERT,
# scripts/configs/pretrain_config.sh, dgxa100_8gpu_fp16): sequences an update, steps, peak learning rate, warm-up share.
PUBLISHED_GPU = {128: (65536, 7038, 6.0e-3, 0.2843), 512: (32768, 1563, 4.0e-3, 0.128)}
SIZES = {"base": (768, 12, 12, 3072, (0, 4, 4, 4)), "large": (1024, 24, 16, 4096, (3, 7, 7, 7))}
MASKS = {128: 20, 384: 56, 512: 76}


def test_all_that_were_asked_for_are_there():
    sizes = [
        f"{packing}_{phase}{base}_{machine}.yml"
        for packing in ("packed", "unpacked")
        for phase in ("phase1", "phase2", "phase2_384")
        for base in ("", "_base")
        for machine in REPLICAS
    ]
    assert len(sizes) == 60
    others = [
        "packed_phase1_gpu1.yml",
        "packed_phase2_gpu1.yml",
        "packed_phase2_gpu8.yml",
        "packed_phase1_base_gpu1.yml",
        "packed_phase2_base_gpu1.yml",
        "packed_small_ipu1.yml",
        "packed_host.yml",
        "unpacked_host.yml",
    ]
    assert {path.name for path in PATHS} == set(sizes + others) and len(FILES) + len(FINE_TUNING) < 20


@pytest.mark.parametrize("name", shipped_names())
def test_a_configuration_is_found_by_name_and_as_a_file_of_the_folder(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)  # no folder configs/ is here
    for text in (name, f"configs/{name}.yml"):
        assert config_file(text) == CONFIGS / f"{name}.yml"
    mine = tmp_path / "mine.yml"
    mine.write_text(f"extends: {name}\n")
    assert load_yaml(mine) == load_yaml(CONFIGS / f"{name}.yml")


def test_every_entry_of_the_derived_ones_is_a_configuration_or_part_of_one():
    entries = yaml.safe_load((CONFIGS / "derived.yml").read_text())
    extended = set()
    for entry in entries.values():
        bases = entry.get("extends", [])
        extended.update(bases if isinstance(bases, list) else [bases])
    parts = {name for name in entries if name.startswith("_")}
    assert set(entries) - parts <= set(shipped_names()) and parts <= extended <= parts | set(shipped_names())
    assert not any((CONFIGS / f"{name}.yml").is_file() for name in entries) and "derived" not in shipped_names()


@pytest.mark.parametrize("path", PATHS, ids=lambda path: path.name)
def test_what_the_name_says(path):
    name = NAME.fullmatch(path.name)
    assert name, "a name says packed or unpacked, phase or host, size and machine"
    config = load_config(path)

    packed = name["packing"] == "packed"
    assert config.packed == packed
    packer = "optimal" if name["small"] == "host" else "nnlshp"
    assert (config.data.packer, config.data.max_sequences_per_pack) == ((packer, 3) if packed else ("none", 1))
    assert not path.is_file() or "packed" in path.read_text().split("\n")[0]
    assert config.predictions_per_sequence == MASKS[config.data.max_sequence_length]
    # A packed and an unpacked run, or two lengths, must never share a folder.
    for each in (config, config.applied_without_ipus()[0]):
        words = each.data.directory.replace("/", "_").split("_")
        assert ("packed" if packed else "unpacked") in words and str(each.data.max_sequence_length) in words

    if name["machine"] is None:
        assert config.ipus == 1
        assert bool(config.without_ipus) == (name["small"] == "small_ipu1")
        assert config.engine.kind == ("host" if name["small"] == "host" else "auto")
        return
    length = 128 if name["phase"] == "phase1" else int(name["length"] or 512)
    size = "base" if name["base"] else "large"
    assert config.data.max_sequence_length == length
    if name["machine"].startswith("gpu"):
        for_gpus(config, size, length, memory={"gpu1": 80e9, "gpu8": 40e9}[name["machine"]])
        return
    replicas = REPLICAS[name["machine"]]
    if path.is_file():  # its head says whose settings they are
        head = [line for line in path.read_text().splitlines() if line.startswith("#")]
        assert "ublished" in head[1] and f"{replicas} replicas of a pipeline of 4" in head[0]
    assert config.model.hidden_size == SIZES[size][0]
    assert config.placement.machine == ("bow" if name["machine"].startswith("bow") else "mk2")
    # The files leave out what has its default: a default that changes must not change a published run.
    wanted = {**TABLE["shared"], **TABLE["files"][re.sub(r"(bow_)?pod\d+", "pod16", path.name)]}
    # Every machine has the batch of a POD16, by as many times the accumulation as it has fewer replicas.
    wanted["batch.gradient_accumulation"] = wanted["batch.gradient_accumulation"] * 4 // replicas
    wanted.update({"placement.replicas": replicas, "placement.replicated_tensor_sharding": replicas > 1})
    if name["machine"].endswith("pod64") and (size, length) in PUBLISHED_POD64:
        wanted["engine.loss_scaling"], first, others = PUBLISHED_POD64[size, length]
        wanted["placement.available_memory_proportion"] = [first, others, others, others]
    values = {key: FIXED[key] if key in FIXED else plain(config.value(key)) for key in wanted}
    assert values == wanted and len(wanted) == 61
    assert config.packs_per_update(1.0) == {128: 65536}.get(length, 16384)


def for_gpus(config, size, length, memory):
    model, optimizer, engine = config.model, config.optimizer, config.engine
    assert (model.hidden_size, model.num_layers, model.num_heads, model.intermediate_size) == SIZES[size][:4]
    assert (config.packs_per_update(1.0), config.run.steps) == PUBLISHED_GPU[length][:2]
    assert (optimizer.learning_rate, optimizer.warmup_fraction) == PUBLISHED_GPU[length][2:]
    assert (optimizer.name, optimizer.schedule, optimizer.schedule_power) == ("lamb", "polynomial", 0.5)
    assert (optimizer.max_gradient_norm, EPSILON, optimizer.weight_decay) == (1.0, 1e-6, 0.01)
    assert model.layer_norm_eps == 1e-12 and optimizer.bias_correction and not config.without_ipus
    # What takes the variable-length kernel, and is refused where no GPU is.
    assert (engine.kind, engine.device, engine.precision) == ("host", "cuda", "bfloat16")
    assert model.attention_dropout == 0.0 and config.ipus == 1
    # Half as much again as is computed must fit: kernels' buffers and the allocator's waste are not counted.
    assert 0.2 * memory < plan(config, packing_factor=2.0).host_memory.most < memory / 1.5


def test_the_table_of_published_settings_is_whole():
    assert set(TABLE["files"]) == {path.name for path in PATHS if re.search("[^w]_pod16", path.name)}
    assert len(TABLE["files"]) == 12


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_a_file_holds_what_its_run_sets_and_no_more(path):
    """A setting that a file states changes the run, or is one that a reader of the file looks for."""
    tree = yaml.safe_load(path.read_text())
    stated = {}
    for section in tree.keys() - {"without_ipus"}:
        stated.update({f"{section}.{key}": value for key, value in tree[section].items()})
    tree_of = Config().as_dict()
    looked_for = {
        "data.packer",
        "data.max_sequences_per_pack",
        "data.max_sequence_length",
        "data.max_predictions_per_sequence",
        "engine.loss_scaling",
        *(
            f"model.{name}"
            for name in ("vocabulary_size", "hidden_size", "num_layers", "num_heads", "intermediate_size")
        ),
        "optimizer.learning_rate",
        "optimizer.warmup_fraction",
        "batch.micro_batch",
        "batch.gradient_accumulation",
        "run.steps",
    }
    unneeded = {key for key, value in stated.items() if tree_of[key.split(".")[0]][key.split(".")[1]] == value}
    assert not unneeded - looked_for


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
    assert small.loss == config.loss and small.optimizer.name == config.optimizer.name
    assert small.data.corpus == "embedded" and small.ipus == 1
    # Minutes on two cores: rows of all updates, before packing makes them fewer.
    assert small.run.steps * small.batch.micro_batch * small.batch.gradient_accumulation <= 6000
    assert small.data.directory != config.data.directory


def test_packed_and_unpacked_differ_only_in_packing():
    pairs = [(CONFIGS / ("un" + path.name), path) for path in PATHS if path.name.startswith("packed")]
    compared = 0
    for unpacked, packed in pairs:
        if unpacked in PATHS:
            first, second = load_config(unpacked).as_dict(), load_config(packed).as_dict()
            for tree in (first, second, first.get("without_ipus", {}), second.get("without_ipus", {})):
                for key in ("directory", "packer", "max_sequences_per_pack"):
                    tree.get("data", {}).pop(key, None)
                tree.get("run", {}).pop("compare_unpacked", None)  # of packs only
            assert first == second
            compared += 1
    assert compared == 1 + 30


def test_configurations_with_the_same_directory_build_the_same_data_set():
    lines = {}
    for path in PATHS:
        for config in (load_config(path), load_config(path).applied_without_ipus()[0]):
            config = config.changed("data", max_predictions_per_sequence=config.predictions_per_sequence)
            lines.setdefault(config.data.directory, set()).add(config.build_line())
    assert len(lines) >= 10
    assert {directory: found for directory, found in lines.items() if len(found) > 1} == {}


def test_the_configuration_for_a_gpu_is_that_of_the_same_model_and_length():
    compared = 0
    for path in PATHS:
        other = for_one_gpu(path.stem)
        if other:
            first, second = load_config(path), load_config(CONFIGS / f"{other}.yml")
            assert first.data.max_sequence_length == second.data.max_sequence_length and first.packed == second.packed
            assert first.model.hidden_size == second.model.hidden_size
            assert first.model.num_layers == second.model.num_layers
            compared += 1
    assert compared >= 4
    assert for_one_gpu("packed_phase2_gpu1") is None and for_one_gpu("unpacked_phase2_pod16") is None


@pytest.mark.parametrize("path", FINE_TUNING, ids=lambda path: path.name)
def test_fine_tuning_what_the_name_says(path):
    name = re.fullmatch(
        r"finetune_(?P<data>[a-z0-9]+)_(?P<packing>packed|unpacked)(?:(?P<base>_base)?_(?P<machine>pod4|pod16))?\.yml",
        path.name,
    )
    assert name, "must be finetune, the data or task, packed or unpacked, and for IPUs size and machine"
    config, tasks = load_config(path), {"squad": "squad", "tokens": "tokens"}
    assert config.task.name == tasks.get(name["data"], "single_label")
    assert config.packed == (name["packing"] == "packed")
    assert not path.is_file() or name["packing"] in path.read_text().split("\n")[0]
    assert not configurations.load_config(path, ["data.packer=none"]).packed
    if name["machine"] is None:
        files = config.data.training, config.data.evaluation
        assert all(file.startswith(name["data"] + "/") for file in files) and config.ipus == 1
        return
    hidden, layers, heads, intermediate, _ = SIZES["base" if name["base"] else "large"]
    model, placement = config.model, config.placement
    assert (model.hidden_size, model.num_layers, model.num_heads) == (hidden, layers, heads)
    assert (model.intermediate_size, model.vocabulary_size) == (intermediate, 30522)
    assert config.ipus == int(name["machine"][3:]) and sum(placement.layers_per_ipu) == layers
    assert not path.is_file() or name["machine"].upper() in path.read_text().split("\n")[0]
    # Full pipelines at packing factors that were met: SQuAD at 384, and short texts and sentences at 128.
    for factor in {384: (1.0, 2.17, 2.232), 128: (1.0, 5.0, 9.0)}[config.data.max_sequence_length]:
        check_for_ipus(config.with_micro_batch(factor), factor)


# Published Graphcore configurations (graphcore/examples, nlp/bert/pytorch, configs_squad.yml): sequences an update
# (micro-batch x accumulation x replicas), replicas, peak learning rate, warm-up share, attention dropout, layers and
# memory proportion of each IPU. What is None is otherwise here, and the file says why.
PUBLISHED_SQUAD = {
    "base_pod16": (None, 4, 6.0e-5, 0.25, 0.1, (0, 4, 4, 4), (0.25,) * 4),
    "base_pod4": (1 * 8 * 4, None, 6.0e-5, 0.25, 0.1, (0, 4, 4, 4), (0.25,) * 4),
    "pod16": (
        4 * 32 * 2,
        2,
        5.0e-5,
        0.1,
        0.15,
        (2, 3, 3, 3, 3, 3, 3, 4),
        (0.08, 0.28, 0.32, 0.32, 0.36, 0.38, 0.4, 0.32),
    ),
    "pod4": (2 * 64 * 2, None, 5.0e-5, 0.1, 0.15, (3, 7, 7, 7), (0.15, 0.25, 0.25, 0.25)),
}


@pytest.mark.parametrize("name", PUBLISHED_SQUAD)
def test_published_settings_of_squad(name):
    config = load_config(CONFIGS / f"finetune_squad_packed_{name}.yml")
    optimizer, placement = config.optimizer, config.placement
    found = (
        config.batch.sequences_per_update,
        placement.replicas,
        optimizer.learning_rate,
        optimizer.warmup_fraction,
        config.start.attention_dropout,
        placement.layers_per_ipu,
        placement.available_memory_proportion,
    )
    assert all(theirs in (None, ours) for ours, theirs in zip(found, PUBLISHED_SQUAD[name]))
    assert (optimizer.name, optimizer.schedule, optimizer.weight_decay) == ("adamw", "linear", 0.01)
    assert (optimizer.bias_correction, optimizer.max_gradient_norm, EPSILON) == (False, None, 1e-6)
    assert (optimizer.beta1, optimizer.beta2, config.start.hidden_dropout) == (0.9, 0.999, 0.1)
    assert (config.engine.loss_scaling, config.engine.first_moment_type, config.run.epochs) == (64.0, "float16", 3)
    assert placement.optimizer_state_off_chip == (name == "pod4") and config.data.max_sequence_length == 384
    assert placement.replicated_tensor_sharding == (placement.replicas > 1)


SET = re.compile(r"--set (\S+?=[^\s;`]+)")


def of_each_placement():
    """A configuration of each shape of placement, with and without a block without_ipus, of pre-training and tasks."""
    found = {}
    for path in PATHS + FINE_TUNING:
        config = load_config(path)
        small = bool(getattr(config, "without_ipus", ()))
        placement = dataclasses.replace(config.placement, machine="mk2", available_memory_proportion=())
        found.setdefault((placement, small, path in FINE_TUNING), path)
    return sorted(found.values())


SHAPES = of_each_placement()


def printed_for(config):
    """The settings of each line that a message tells the user to type, whichever IPU is full and whatever fits."""
    texts = [config.on_replicas(1), compiled_words("program", 1)]
    if config.command == "pretrain":
        # As a run that keeps everything, so that every way out is printed.
        engine = dataclasses.replace(config.engine, recompute_layers=False, half_logits=False)
        placement = dataclasses.replace(config.placement, optimizer_state_off_chip=False)
        full = dataclasses.replace(config, engine=engine, placement=placement)
        memory = [placed.total for placed in plan(full, packing_factor=1.0).memory]
        for ipu in (None, *range(config.placement.ipus_per_replica)):
            for smaller in (None, 1):
                texts += way_out(full, ipu=ipu, smaller=smaller, memory=memory)
        texts += memory_words(plan(full, packing_factor=1.0), 1)
        texts.append(schedule_too_short("", 2 * config.run.steps, config.run.steps))
    found = [tuple(SET.findall(text)) for text in texts]
    return list(dict.fromkeys(settings for settings in found if settings))


def test_there_is_a_configuration_of_each_shape_of_placement():
    assert len(SHAPES) >= 8
    assert {load_config(path).placement.ipus_per_replica for path in SHAPES if path in PATHS} == {1, 4}


@pytest.mark.parametrize("path", SHAPES, ids=lambda path: path.stem)
def test_every_set_that_a_message_prints_is_taken(path):
    before = load_config(path).with_micro_batch(1.0)
    lines = printed_for(before)
    assert len(lines) >= (1 if path in FINE_TUNING else 7)
    for options in lines:
        changed = configurations.load_config(path, options)
        assert all(changed.origins[setting.partition("=")[0]] == "--set" for setting in options)
        if path in FINE_TUNING:
            continue
        assert plan(changed, packing_factor=1.0).update is not None
        if before.without_ipus:  # a placement that is printed is the pod's: the small run keeps its own
            small, former = (each.applied_without_ipus()[0].placement for each in (changed, before))
            assert dataclasses.replace(small, optimizer_state_off_chip=True) == former
