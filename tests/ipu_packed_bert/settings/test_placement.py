"""Blocks, IPUs and stages that a configuration asks for."""

import dataclasses
from pathlib import Path

import pytest

from ipu_packed_bert.settings.pretraining import Config, ConfigError, LossConfig, load_config
from ipu_packed_bert.settings.schema import ModelConfig, PlacementConfig
from ipu_packed_bert.settings.shipped import shipped_names
from tests.pretraining import placed

FOLDER = Path(__file__).resolve().parents[3] / "configs"
CONFIGS = [FOLDER / f"{name}.yml" for name in shipped_names() if "finetune" not in name]
POD = [path for path in CONFIGS if "host" not in path.stem and "_gpu" not in path.stem]


def made(layers_per_ipu, *, next_sentence=True):
    return Config(
        model=ModelConfig(num_layers=sum(layers_per_ipu)),
        loss=LossConfig(next_sentence=next_sentence),
        placement=PlacementConfig(
            ipus_per_replica=len(layers_per_ipu),
            layers_per_ipu=tuple(layers_per_ipu),
            available_memory_proportion=(0.2,) * len(layers_per_ipu),
        ),
    )


def test_the_published_pipeline_of_bert_large():
    """[3, 7, 7, 7]: embeddings and heads with three layers on IPU 0; 5 forward stages, 9 in training."""
    placement = placed(made([3, 7, 7, 7]))
    assert [stage.ipu for stage in placement.stages] == [0, 1, 2, 3, 0]
    assert [len(stage.blocks) for stage in placement.stages] == [4, 7, 7, 7, 3]
    assert len(placement.stages) == 5
    assert [block.name for block in placement.on(0)] == [
        "embeddings",
        "layer 0",
        "layer 1",
        "layer 2",
        "MLM head",
        "pooler",
        "NSP head",
    ]
    assert placement.on(2)[0].module == "bert.encoder.layer.10"


def test_the_published_pipeline_of_bert_base():
    placement = placed(made([0, 4, 4, 4]))
    assert [stage.ipu for stage in placement.stages] == [0, 1, 2, 3, 0]
    assert len(placement.stages) == 5


def test_one_ipu_is_one_stage():
    assert len(placed(made([3])).stages) == 1


def test_an_ipu_without_layers_between_others():
    assert [stage.ipu for stage in placed(made([1, 0, 2, 0])).stages] == [0, 2, 0]


def test_heads_follow_the_loss():
    assert "pooler" not in [block.name for block in placed(made([2], next_sentence=False)).blocks]


@pytest.mark.parametrize("path", POD, ids=lambda path: path.stem)
def test_every_layer_has_one_place(path):
    config = load_config(path)
    placement = placed(config)
    modules = [block.module for block in placement.blocks]
    assert len(modules) == len(set(modules))
    assert [m for m in modules if ".layer." in m] == [f"bert.encoder.layer.{n}" for n in range(config.model.num_layers)]
    ipus = [block.ipu for block in placement.blocks if ".layer." in block.module]
    assert ipus == sorted(ipus)
    assert {block.ipu for block in placement.blocks if ".layer." not in block.module} == {0}
    assert 2 * len(placement.stages) - 1 == config.pipeline_stages <= config.accumulation(2.0)
    assert config.pipeline_stages == (1 if path.stem.endswith("ipu1") else 9)


def test_there_are_configs():
    assert len(POD) >= 15


@pytest.mark.parametrize(
    "override, complaint",
    [
        ("placement.layers_per_ipu=[3, 7, 7, 6]", "places 23 layers"),
        ("placement.replicas=3", "power of two"),
        ("batch.gradient_accumulation=8", "at least the 9 stages"),
        ("placement.available_memory_proportion=[0.1]", "one for each of the 4 IPUs"),
    ],
)
def test_impossible_placements_are_refused_before_anything_is_compiled(override, complaint):
    path = next(path for path in POD if path.stem == "packed_phase2_pod16")
    with pytest.raises(ConfigError, match=complaint):
        load_config(path, [override])


def test_the_configuration_counts_the_same_stages():
    for layers in ([3, 7, 7, 7], [0, 4, 4, 4], [2], [1, 0, 2, 0], [4, 4]):
        config = made(layers)
        assert 2 * len(placed(config).stages) - 1 == config.pipeline_stages
        assert placed(dataclasses.replace(config)) == placed(config)
