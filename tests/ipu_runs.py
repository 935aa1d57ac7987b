"""A tiny BERT on IPUs: its configuration, its global batches, and what of its state two engines must have alike."""

import dataclasses
import enum

import numpy as np

from ipu_packed_bert.settings.config import Config
from ipu_packed_bert.settings.schema import BatchConfig, DataConfig, EngineConfig, OptimizerConfig, PlacementConfig
from pack_data.store.packs import PackSchema
from tests.packed_examples import lay_out, random_packs, random_sequences, with_scales
from tests.tiny_runs import TINY
from tests.update_batches import change

SLOTS = 24
VOCABULARY = 62


def make_config(*, layers_per_ipu=(2,), replicas=1, accumulation=4, micro_batch=2, **sections):
    """A two-layer BERT in float32 with nothing random, on IPUs of which each has its share of the layers."""
    config = Config(
        data=DataConfig(max_sequence_length=SLOTS, max_predictions_per_sequence=5, max_sequences_per_pack=3),
        model=dataclasses.replace(
            TINY, vocabulary_size=VOCABULARY, num_layers=sum(layers_per_ipu), initializer_range=0.2
        ),
        optimizer=OptimizerConfig(),
        batch=BatchConfig(micro_batch=micro_batch, gradient_accumulation=accumulation),
        engine=EngineConfig(
            kind="ipu",
            half_weights=False,
            loss_scaling=128.0,
            gradient_accumulator_type="float32",
            stochastic_rounding=False,
            log_cycles=True,
        ),
        placement=PlacementConfig(
            replicas=replicas,
            ipus_per_replica=len(layers_per_ipu),
            layers_per_ipu=tuple(layers_per_ipu),
            available_memory_proportion=(0.2,) * len(layers_per_ipu),
            embedding_serialization_factor=2,
            replicated_tensor_sharding=replicas > 1,
        ),
    )
    return change(config, **sections)


def make_batch(config, *, depth=3, seed=0, shortest=3, longest=15):
    """A global batch that the configuration asks for, with mixed packs, the last of them empty."""
    rng = np.random.default_rng([seed, depth])
    rows = config.packs_per_update(1.0)
    number = rows + rows // 2 if depth <= 3 else rows * depth
    lengths = [int(length) for length in rng.integers(shortest, longest + 1, number)]
    examples = random_sequences(rng, lengths=lengths, vocabulary=VOCABULARY)
    packs = random_packs(rng, lengths, slots=SLOTS, depth=depth)[: rows - 1]
    packs += [[]] * (rows - len(packs))
    batch = lay_out(packs, examples, slots=SLOTS, depth=depth, predictions=5 + depth)
    return with_scales(
        batch, micro_batches=config.micro_batches_per_update(1.0), normalisation=config.loss.normalisation
    )


def schema(depth=3):
    return PackSchema(SLOTS, depth, 5 + depth)


def weights_of(state):
    """(names, tensors) without the attention's key bias: its gradient is zero but for rounding, which LAMB blows up."""
    return [state["model"][name] for name in sorted(state["model"]) if not name.endswith("key.bias")]


def plain(value):
    """Return an option of PopTorch for comparison: a member of an enumeration as number, a function as word."""
    if isinstance(value, enum.Enum):
        return value.value
    if isinstance(value, dict):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(item) for item in value]
    return "callable" if callable(value) else value
