"""The program of every task that learns from files can be lowered for IPUs: at full size, for every configuration.

As `test_ipu_lowering.py` for pre-training: traced as PopTorch would trace it, with shapes and types but no numbers.
"""

import dataclasses
import itertools
from collections import defaultdict

import pytest
import torch
from torch.overrides import TorchFunctionMode

from ipu_packed_bert.settings.loading import load_config
from ipu_packed_bert.settings.placement import place
from ipu_packed_bert.settings.shipped import config_file, shipped_names
from ipu_packed_bert.tasks import task_class
from ipu_packed_bert.tasks.inputs import Tokenizer
from tests.fakes.lowering import ALLOWED, Traced, assert_lowers
from tests.fakes.sdk import installed
from tests.fine_tuning_files import KINDS, VOCABULARY, training_file
from tests.tiers import sample

CONFIGS = [config_file(name) for name in shipped_names() if name.startswith("finetune_") and "pod" in name]
ROWS = 3


@pytest.fixture
def sdk():
    with installed() as modules:
        yield modules


def configured(path, folder, kind, *overrides):
    """A configuration of the task of this kind, on a small file."""
    file = training_file(folder, kind)
    data = [
        f"data.training={file}",
        f"data.evaluation={file}",
        f"task.name={kind}",
    ]
    return load_config(path, [*data, *overrides])


def task_of(config, *, layers=None):
    """The task with the network that the configuration is for: of two layers, or `layers`."""
    model = dataclasses.replace(config.model, num_layers=layers or 2)
    return task_class(config.task.name)(config, Tokenizer(VOCABULARY), model)


def two_layers(config):
    """Embeddings on the first IPU, a layer each on the second and on the last one."""
    ipus = config.placement.ipus_per_replica
    layers = (0, 1) + (0,) * (ipus - 3) + (1,) if ipus > 2 else (2,)
    return config.changed("placement", layers_per_ipu=layers)


class Trace(Traced):
    """One micro-batch of a configuration, as the engine hands it to PopTorch: a training or a prediction program."""

    def __init__(self, config, task, sdk, *, training=True, mode=None):
        ipu, stand_in = sdk
        with torch.device("meta"):
            program = ipu.program.build_program(config, task, place(config.placement, task.heads))
        fields = task.fields if training else task.prediction_fields
        if not training:
            program = ipu.program.Predictions(program.network)
        layout = task.layout(config.with_micro_batch(1.0), 1.0)
        batch = layout.filled(task.packs.batch(task.packs.order(0)[:1], 0), rows=ROWS)
        assert {str(batch[name].dtype) for name in fields} <= {
            "int32",
            "float32",
        }
        inputs = [(batch[name].shape, getattr(torch, str(batch[name].dtype))) for name in fields]
        super().__init__(program, inputs, stand_in, training=training, mode=mode)
        # Which inputs are read at all: one that is not has no business on the device.
        read = {id(tensor) for operator in self.operators for tensor in operator.inputs}
        self.unread = [name for name, tensor in zip(fields, self.inputs) if id(tensor) not in read]

    @property
    def names(self):
        return [operator.name for operator in self.operators]

    @property
    def homes(self):
        """The IPUs on which each weight is read."""
        names = {id(tensor): name for name, tensor in self.weights.items()}
        ipus = defaultdict(set)
        for operator in self.operators:
            for tensor in operator.inputs:
                ipus[names.get(id(tensor))].add(operator.ipu)
        return ipus


def check(trace, config, task):
    assert_lowers(trace, config, place(config.placement, task.heads).blocks)
    assert trace.unread == []
    assert trace.names.count("_softmax") == trace.graph.checkpoints == task.model.num_layers
    parameters = {name for name, _ in trace.program.named_parameters()}
    assert {len(trace.homes[name]) for name in parameters} == {1}


SQUAD = next(path for path in CONFIGS if path.stem == "finetune_squad_packed_base_pod4")
EACH = [(path, load_config(path).task.name) for path in CONFIGS]
CASES = EACH + [(SQUAD, kind) for kind in KINDS if (SQUAD, kind) not in EACH]


@pytest.mark.parametrize("path, kind", sample(CASES, 4), ids=lambda case: getattr(case, "stem", case))
def test_training_and_prediction_lower(path, kind, sdk, tmp_path):
    config = two_layers(configured(path, tmp_path, kind))
    task = task_of(config)
    training = Trace(config, task, sdk)
    check(training, config, task)
    # Exactly one loss, in float32; as many sums as the task has.
    (loss,) = training.graph.losses
    assert loss.dtype == torch.float32
    assert loss.dim() == 0
    assert [tuple(output.shape) for output in training.outputs] == [()] * len(task.outputs)
    assert "dropout" in training.names
    # The head is where the last layer is, so that nothing returns to the first IPU.
    last = max(ipu for ipu, layers in enumerate(config.placement.layers_per_ipu) if layers)
    assert {ipu for _, ipu in training.graph.blocks[-len(task.heads) :]} == {last}
    assert last > 0
    prediction = Trace(config, task, sdk, training=False)
    check(prediction, config, task)
    places = task.max_sequence_length if task.of_slots else task.max_sequences_per_pack
    assert prediction.outputs.shape[:2] == (ROWS, places)
    assert prediction.outputs.dtype == torch.float32
    assert "dropout" not in prediction.names
    assert prediction.graph.losses == []


VARIANTS = (
    "engine.mask=additive",
    "engine.half_weights=false",
    "data.packer=none",
)


@pytest.mark.parametrize(
    "kind, override",
    sample(itertools.product(["squad", "regression"], VARIANTS), 2),
)
def test_variants_lower(kind, override, sdk, tmp_path):
    config = two_layers(configured(SQUAD, tmp_path, kind, override))
    task = task_of(config)
    check(Trace(config, task, sdk), config, task)


@pytest.mark.slow
def test_one_at_full_depth(sdk, tmp_path):
    path = next(path for path in CONFIGS if path.stem == "finetune_squad_packed_pod16")
    config = configured(path, tmp_path, "squad")
    task = task_of(config, layers=config.model.num_layers)
    trace = Trace(config, task, sdk)
    check(trace, config, task)
    assert trace.names.count("_softmax") == 24
    assert config.pipeline_stages == 15
    assert len({ipu for _, ipu in trace.graph.blocks}) == 8


class Called(TorchFunctionMode):
    """Record the operators before torch decomposes them, because PopTorch lowers some of them whole."""

    def __init__(self):
        super().__init__()
        self.names = set()

    def __torch_function__(self, function, types, arguments=(), keywords=None):
        self.names.add(function.__name__)
        return function(*arguments, **(keywords or {}))


@pytest.mark.parametrize("kind", sample(KINDS, 2))
def test_what_the_code_calls_has_a_lowering_too(kind, sdk, tmp_path):
    config = two_layers(configured(SQUAD, tmp_path, kind))
    called = Called()
    Trace(config, task_of(config), sdk, mode=called)
    # torch's names of what PopTorch registers under another.
    names = {
        "cross_entropy": "cross_entropy_loss",
        "nll_loss": "nll_loss_nd",
        "float": "to",
    }
    lowered = {names.get(name, name) for name in called.names if not name.startswith("__")}
    assert lowered - set(ALLOWED) <= {"dim", "is_floating_point"}
    assert {"layer_norm", "dropout", "softmax", "embedding"} <= lowered
