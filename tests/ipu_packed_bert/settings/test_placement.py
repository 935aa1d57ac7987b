"""Blocks, IPUs and stages that a configuration asks for."""

import pytest

from ipu_packed_bert.settings.config import Config
from ipu_packed_bert.settings.schema import LossConfig, ModelConfig, PlacementConfig
from tests.pretraining import placed


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
    assert [len(stage.blocks) for stage in placement.stages] == [4, 7, 7, 7, 3]
    names = [block.name for block in placement.on(0)]
    assert names == ["embeddings", "layer 0", "layer 1", "layer 2", "MLM head", "pooler", "NSP head"]
    assert placement.on(2)[0].module == "bert.encoder.layer.10"


@pytest.mark.parametrize(
    "layers, ipus",
    [
        ([3, 7, 7, 7], [0, 1, 2, 3, 0]),
        ([0, 4, 4, 4], [0, 1, 2, 3, 0]),  # published, BERT-base
        ([1, 0, 2, 0], [0, 2, 0]),
        ([6, 6], [0, 1, 0]),
        ([3], [0]),
        ([12, 0, 0, 0], [0]),
    ],
)
def test_stages(layers, ipus):
    """The heads return to the first IPU; training has 2 f - 1 stages for f forward ones."""
    config = made(layers)
    assert [stage.ipu for stage in placed(config).stages] == ipus
    assert config.pipeline_stages == 2 * len(ipus) - 1


def test_heads_follow_the_loss():
    assert "pooler" not in [block.name for block in placed(made([2], next_sentence=False)).blocks]
