"""Settings: each rule refuses its neighbour, and each mistake is one line with the setting, its value and the rule."""

import pytest
import yaml

from ipu_packed_bert.settings.config import ConfigError, settings_of
from ipu_packed_bert.settings.declare import declared
from ipu_packed_bert.settings.finetuning import TASKS
from ipu_packed_bert.settings.loading import config_from_tree, load_config
from ipu_packed_bert.settings.reader import FILE, SettingsReader, parse_override
from ipu_packed_bert.settings.yaml_files import load_yaml
from tests.ipu_packed_bert.settings.test_reader import Owner, Tree
from tests.refusals import faults_of_refusals

OF_COMMANDS = [settings_of("pretrain")] + [settings_of("finetune", task.settings) for task in TASKS.values()]
FOREST = declared([("tree", "tree", Tree), ("owner", "owner", Owner)], "pretrain")


def neighbours(setting):
    """Yield values beside each bound of a setting, and whether each is in range."""
    rule = setting.rule
    kinds = (setting.kind, *getattr(setting.kind, "__args__", ()))
    step = 1 if int in kinds else 1e-9
    if rule.minimum is not None:
        yield rule.minimum, True
        yield rule.minimum - step, False
    if rule.maximum is not None:
        yield rule.maximum, True
        yield rule.maximum + step, False
    if rule.above is not None:
        yield rule.above, False
        yield rule.above + step, True
    if rule.below is not None:
        yield rule.below, False
        yield rule.below - step, True
    for choice in rule.choices:
        yield choice, True
    if rule.choices:
        yield "no such choice", False


def test_each_rule_takes_its_bound_and_refuses_its_neighbour():
    faults = []
    tried = 0
    for settings in OF_COMMANDS:
        for key, setting in settings.items():
            section, _, name = key.partition(".")
            is_list = "Tuple" in str(setting.kind)
            for value, is_in_range in [*neighbours(setting), ({}, False)]:
                reader = SettingsReader(settings, "a.yml")
                reader.read({section: {name: [value] if is_list else value}}, FILE)
                tried += 1
                if bool(reader.problems) == is_in_range:
                    faults.append(f"{key}={value}: {reader.problems}")
    assert tried > 500 and not faults, "\n".join(faults)


def loaded(text, *overrides, command=None):
    return config_from_tree(yaml.safe_load(text), "a.yml", overrides, command=command)


def forest(text, *overrides):
    reader = SettingsReader(FOREST, "a.yml")
    reader.read(yaml.safe_load(text), FILE)
    for override in overrides:
        reader.override(parse_override(override))
    reader.refuse_problems()


REFUSED = [
    # ---- names and types
    ("loaded('modle: {}')", ["modle", "did you mean model?"]),
    ("loaded('model: {num_layers: \\'12\\'}')", ["model.num_layers", "'12'", "whole number"]),
    ("loaded('model: {num_layers: null}')", ["model.num_layers", "None", "whole number"]),
    ("loaded('model: {layer_norm_eps: .nan}')", ["model.layer_norm_eps", "nan", "finite"]),
    ("loaded('optimizer: {learning_rate: 1e}')", ["optimizer.learning_rate", "'1e'", "number"]),
    ("loaded('optimizer: {learning_rate: 1e999}')", ["optimizer.learning_rate", "'1e999'", "finite"]),
    ("loaded('placement: {machine: mk1}')", ["placement.machine", "'mk1'", "mk2, bow"]),
    ("loaded('without_ipus: 3')", ["without_ipus", "3", "sections"]),
    ("loaded('without_ipu: {}')", ["without_ipu ", "without_ipus?"]),
    ("loaded('without_ipus: {batch: {micro_batches: 3}}')", ["without_ipus.batch.micro_batches", "micro_batch?"]),
    ("loaded('without_ipus: {batch: {micro_batch: 0}}')", ["without_ipus.batch.micro_batch", "0", "at least 1"]),
    (
        "loaded('data: {max_sequence_length: 2000000}')",
        ["max_position_embeddings is 2000000", "data.max_sequence_length"],
    ),
    ("loaded('model: {micro_batch: 4}')", ["model.micro_batch", "batch.micro_batch?"]),
    ("loaded('seed: 4')", ["seed", "data.seed or run.seed?"]),
    ("loaded('{}', 'steps=3')", ["--set steps", "run.steps?"]),
    ("loaded('{}', 'without_ipusx=4')", ["--set without_ipusx", "without_ipus?"]),
    ("loaded('{}', 'without_ipus.micro_batch=4')", ["without_ipus.batch.micro_batch?"]),
    ("loaded('{}', 'optimizer.lr=4')", ["--set optimizer.lr", "optimizer.learning_rate?"]),
    ("loaded('{}', 'data.depth=4')", ["--set data.depth", "data.max_sequences_per_pack?"]),
    ("loaded('{}', 'run.steps=3.5e0')", ["--set run.steps", "'3.5e0'", "whole number"]),
    ("loaded('{}', 'without_ipus=3')", ["--set without_ipus", "null"]),
    # ---- rules between settings; what follows from a broken one is not reported
    ("loaded('model: {num_layers: many}\\nplacement: {layers_per_ipu: [4]}')", ["a.yml: model.num_layers", "'many'"]),
    (
        "loaded('data: {packer: none, max_sequences_per_pack: 3}')",
        ["data.max_sequences_per_pack", "3", "data.packer", "none"],
    ),
    ("loaded('data: {packer: nnlshp, max_sequences_per_pack: 4}')", ["data.max_sequences_per_pack", "4", "nnlshp"]),
    (
        "loaded('data: {packer: nnlshp, max_sequences_per_pack: null}')",
        ["data.max_sequences_per_pack", "null", "nnlshp"],
    ),
    (
        "loaded('{data: {max_sequence_length: 1024}, model: {max_position_embeddings: 512}}')",
        ["data.max_sequence_length", "1024", "model.max_position_embeddings", "512"],
    ),
    ("loaded('data: {max_predictions_per_sequence: 512}')", ["data.max_predictions_per_sequence", "512"]),
    ("loaded('model: {num_heads: 5}')", ["model.hidden_size", "768", "model.num_heads", "5"]),
    ("loaded('placement: {layers_per_ipu: [7]}')", ["placement.layers_per_ipu", "7", "model.num_layers", "12"]),
    ("loaded('placement: {layers_per_ipu: [6, 6]}')", ["placement.layers_per_ipu", "2", "ipus_per_replica"]),
    ("loaded('placement: {available_memory_proportion: [0.1, 0.1]}')", ["available_memory_proportion", "2", "1"]),
    ("loaded('placement: {embedding_serialization_factor: 4}')", ["serialization_factor", "4", "30522"]),
    ("loaded('placement: {replicas: 3}')", ["placement.replicas", "3 x 1 = 3", "power of two"]),
    ("loaded('placement: {replicated_tensor_sharding: true}')", ["replicated_tensor_sharding", "placement.replicas"]),
    ("loaded('engine: {ipu_model: true, offline_export: x}')", ["engine.ipu_model", "engine.offline_export"]),
    *[
        (f"loaded('engine: {{executable: x, {other}}}')", ["engine.executable", other.partition(":")[0]])
        for other in ("log_cycles: true", "ipu_model: true", "offline_export: y")
    ],
    (
        "loaded('{engine: {kind: ipu}, optimizer: {max_gradient_norm: 1.0}}')",
        ["optimizer.max_gradient_norm", "1.0", "optimizer.name", "lamb"],
    ),
    ("loaded('data: {shares: [0.5, 0.5]}')", ["data.shares", "2", "data.mixed_with", "1"]),
    ("loaded('data: {directory: d, mixed_with: [./d]}')", ["data.mixed_with", "./d", "twice", "data.shares"]),
    ("loaded('run: {evaluate_every: 5}')", ["run.evaluate_every", "5", "--out data/packed", "--held-out 0.01"]),
    ("loaded('{run: {steps: 9}, optimizer: {schedule_steps: 5}}')", ["run.steps", "9", "schedule_steps", "5"]),
    (
        "loaded('without_ipus: {model: {num_layers: 3}, placement: {layers_per_ipu: [4]}}')",
        ["without_ipus: placement.layers_per_ipu", "4", "model.num_layers", "3"],
    ),
    # ---- fine-tuning
    ("loaded('model: {checkpoint: bert}', command='finetune')", ["data.training", "data.evaluation"]),
    ("loaded('data: {evaluation: a.csv}', command='finetune')", ["data.training", "model.checkpoint"]),
    (
        "loaded('{data: {training: a.csv}, model: {vocabulary_size: 127}}', command='finetune')",
        ["model.vocabulary_size is 127", "128"],
    ),
    ("loaded('{data: {training: a.csv}, run: {evaluate_every: 2}}')", ["run.evaluate_every", "2", "data.evaluation"]),
    (
        "loaded('{data: {evaluation: a}, model: {checkpoint: b}, task: {name: squad, drop_seen_paragraphs: true}}')",
        ["task.drop_seen_paragraphs", "data.training"],
    ),
    (
        "loaded('{data: {evaluation: a}, model: {checkpoint: b}, engine: {offline_export: c}}')",
        ["engine.offline_export", "data.training"],
    ),
    (
        "loaded('task: {name: pretraining}', command='finetune')",
        ["task.name", "pretraining", "run_pretraining.py|pretrain"],
    ),
    ("loaded('task: {name: squad}', command='pretrain')", ["task.name", "squad", "finetune"]),
    # ---- the reader, on a schema of its own
    ("forest('[1]')", ["the file", "[1]", "sections"]),
    ("forest('tree: 3')", ["tree", "3", "key: value"]),
    ("forest('tree: {rings: []}')", ["tree.rings", "[]", "[3, 7]"]),
    ("forest('tree: {rings: [1, 0]}')", ["tree.rings", "[1, 0]", "each", "at least 1"]),
    ("forest('tree: {height: 0.0}')", ["tree.height", "0.0", "above 0 and at most 120"]),
    ("forest('tree: {felled: 1}')", ["tree.felled", "1", "true or false"]),
    ("forest('tree: {leaves: true}')", ["tree.leaves", "True", "whole number"]),
    ("forest('owner: {name: 3}')", ["owner.name", "3", "text"]),
    ("forest('{}', 'tree.height')", ["--set tree.height", "section.key=value"]),
    ("forest('{}', 'tree.height=[')", ["--set tree.height=[", "YAML"]),
    ("forest('{}', 'tree=3')", ["--set tree", "3", "settings"]),
    # ---- files
    *[
        (f"in_file('extends: {name}')", ["a.yml", "extends"])
        for name in ("a", "nothing", "../a", "a.yml", "7", "[]", "null")
    ],
    ("in_file('tree: {height: 1}\\ntree: {}')", ["a.yml", "tree is there twice"]),
    ("in_file('tree:\\n  height: 1\\n  height: 2')", ["a.yml", "height is there twice"]),
    ("in_file('tree: {height: 3\\ncolour: [')", ["a.yml", "line 2, column 7"]),
    ("in_file('? {a: b}\\n: c')", ["a.yml", "not valid YAML"]),
    ("in_file('tree: &x [1, [*x]]')", ["a.yml", "line 1, column 7", "recursive"]),
    ("load_config('/nothing.yml')", ["/nothing.yml", "no such file"]),
]


def test_each_mistake_is_one_line_that_names_setting_value_and_rule(tmp_path):
    def in_file(text):
        (tmp_path / "a.yml").write_text(text + "\n")
        return load_yaml(tmp_path / "a.yml")

    scope = {"loaded": loaded, "forest": forest, "in_file": in_file, "load_config": load_config}
    faults = faults_of_refusals([(call, names, ConfigError) for call, names in REFUSED], scope)
    assert not faults, "\n".join(faults)


def test_all_mistakes_are_named_and_what_follows_from_them_is_not():
    with pytest.raises(ConfigError) as caught:
        loaded("{model: {num_layer: 12, num_heads: five}, placement: {layers_per_ipu: [4], replicas: 3}}")
    first, *lines = str(caught.value).split("\n")
    assert "2 problems" not in first
    assert first == f"a.yml: {len(lines)} problems"
    named = [line.split()[0] for line in lines]
    assert named == ["model.num_layer", "model.num_heads", "placement.replicas"]
