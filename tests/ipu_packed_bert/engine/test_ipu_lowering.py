"""Static proof, for every IPU configuration, that what the engine hands to PopTorch can be lowered.

The program is traced as PopTorch would trace it, with shapes and types but no numbers: weights and inputs are fake
tensors on another device than the host's, so that any tensor captured from the host is an error, and BERT-large needs
no memory.
One configuration is traced at full depth, the others with two layers.  What this cannot show: the compiler's memory
limits, and whether an operator's lowering takes these very arguments.
"""

import dataclasses
import re

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from ipu_packed_bert.model.packed import BATCH_FIELDS
from ipu_packed_bert.settings.loading import load_config
from ipu_packed_bert.settings.shipped import config_file, shipped_names
from ipu_packed_bert.tasks.pretraining import Pretraining
from tests.fakes.lowering import ALLOWED, DEVICE, Recorder, Traced, assert_lowers, wide_types
from tests.fakes.sdk import installed
from tests.pretraining import placed
from tests.tiers import sample

# Those derived from others change replicas, accumulation, loss scale, memory or clock: operators stay.
CONFIGS = [
    config_file(name) for name in shipped_names() if re.fullmatch("(un)?packed_.*(?<!_bow)_(pod16|gpu[18]|ipu1)", name)
]
FULL_DEPTH = "packed_phase2_pod16"


@pytest.fixture
def sdk():
    with installed() as modules:
        yield modules


def two_layers(config):
    """The same program with two layers, each on an IPU of its own where there are several."""
    ipus = config.placement.ipus_per_replica
    layers = (0, 1, 1) + (0,) * (ipus - 3) if ipus > 2 else (2,)
    return dataclasses.replace(
        config,
        model=dataclasses.replace(config.model, num_layers=2),
        placement=dataclasses.replace(config.placement, layers_per_ipu=layers),
    )


def widths(config):
    depth = config.data.max_sequences_per_pack
    slots = config.data.max_sequence_length
    predictions = config.data.max_predictions_per_sequence + depth
    for name in BATCH_FIELDS:
        if name.endswith("_scale"):
            yield name, None
        else:
            yield name, predictions if name.startswith("masked") else depth if name.startswith("next") else slots


class Trace(Traced):
    """Forward pass and loss of a configuration."""

    def __init__(self, config, sdk, *, training=True):
        ipu, stand_in = sdk
        with torch.device("meta"):
            program = ipu.program.build_program(config, Pretraining(config), placed(config))
        rows = config.batch.micro_batch
        inputs = [
            ((rows,), torch.float32) if width is None else ((rows, width), torch.int32) for _, width in widths(config)
        ]
        super().__init__(program, inputs, stand_in, training=training)
        self.loss = self.graph.losses[0]


def check(trace, config):
    assert_lowers(trace, config, placed(config).blocks)
    # Exactly one loss, in float32, a scalar; the other outputs are scalars too.
    assert len(trace.graph.losses) == 1
    assert trace.loss.dtype == torch.float32
    assert trace.loss.dim() == 0
    assert [tuple(output.shape) for output in trace.outputs] == [()] * 5
    # A checkpoint behind each layer.
    assert trace.graph.checkpoints == config.model.num_layers
    factor = config.placement.embedding_serialization_factor
    assert [f for _, f in trace.graph.serialised] == ([factor] if factor > 1 else [])
    # Guards against an empty trace.
    names = [operator.name for operator in trace.operators]
    assert names.count("_softmax") == config.model.num_layers
    assert "dropout" in names
    # The mask as configured: a product mask makes no tensor of [rows, slots, slots], every such one is of all heads.
    slots = config.data.max_sequence_length
    rows = config.batch.micro_batch
    additive = config.engine.mask == "additive"
    square = [t.numel() for operator in trace.operators for t in operator.outputs if t.shape[-2:] == (slots, slots)]
    assert names.count("where") == (1 if additive else 0)
    assert (rows * slots * slots in square) == additive
    assert square.count(rows * config.model.num_heads * slots * slots) >= 2 * config.model.num_layers


@pytest.mark.parametrize("path", sample(CONFIGS, 4), ids=lambda path: path.stem)
def test_the_program_lowers(path, sdk):
    config = load_config(path)
    if path.stem != FULL_DEPTH:
        config = two_layers(config)
    check(Trace(config, sdk), config)


@pytest.mark.parametrize("path", CONFIGS[::8], ids=lambda path: path.stem)
def test_the_additive_mask_lowers(path, sdk):
    config = two_layers(load_config(path, ["engine.mask=additive"]))
    check(Trace(config, sdk), config)


def test_half_logits_are_never_widened(sdk):
    """No float32 tensor of one value for every word: that is what the option is for."""
    path = next(path for path in CONFIGS if path.stem == FULL_DEPTH)
    wide = []
    for value in ("false", "true"):
        config = two_layers(load_config(path, [f"engine.half_logits={value}"]))
        tensors = [tensor for operator in Trace(config, sdk).operators for tensor in operator.outputs]
        words = [t for t in tensors if t.numel() % config.model.vocabulary_size == 0 and t.is_floating_point()]
        wide.append(sum(t.numel() for t in words if t.dtype == torch.float32))
        assert words
    assert wide[0] > 0
    assert wide[1] == 0


@pytest.mark.parametrize(
    "overrides",
    [
        ["loss.normalisation=sequence"],
        ["loss.next_sentence=false"],
        ["engine.half_weights=false"],
        ["engine.half_logits=true"],
        ["model.attention_dropout=0.1"],
    ],
)
def test_variants_lower(overrides, sdk):
    config = two_layers(load_config(next(path for path in CONFIGS if path.stem == FULL_DEPTH), overrides))
    check(Trace(config, sdk), config)


def test_evaluation_lowers(sdk):
    trace = Trace(two_layers(load_config(CONFIGS[0])), sdk, training=False)
    names = {operator.name for operator in trace.operators}
    assert trace.problems == []
    assert names <= ALLOWED
    assert "dropout" not in names
    assert "_softmax" in names


def test_wide_types_are_noticed():
    with FakeTensorMode(allow_non_fake_inputs=False):
        x = torch.zeros((3, 3), device=DEVICE, dtype=torch.int32)
        recorder = Recorder([x], reject=False)
        with recorder:
            x.sum()  # torch sums integers in int64
            x.to(torch.float64)
            torch.argmax(x, 1)  # an index: allowed
    assert [operator.name for operator in wide_types(recorder.operators)] == ["sum", "to"]
