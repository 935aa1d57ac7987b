"""The IPU engine on the stand-in for PopTorch: the same updates as the host engine, one compilation, portable state.

test_ipu_tier.py has what also runs on what the stand-in stands for.
"""

import contextlib
import copy
import json
import re
import sys
from pathlib import Path
from unittest import mock

import numpy as np
import pytest
import torch

from ipu_packed_bert.data.global_batches import GlobalBatches
from ipu_packed_bert.engine import choose_engine, sdk_errors
from ipu_packed_bert.engine.sdk_errors import SdkError, classify
from ipu_packed_bert.model.packed import BATCH_FIELDS
from ipu_packed_bert.settings.loading import load_config
from ipu_packed_bert.settings.rules import cross_check
from ipu_packed_bert.tasks.pretraining import Pretraining
from ipu_packed_bert.training import pretraining
from pack_data.store.data_set import PackStore
from tests.fakes.machine import machine
from tests.fakes.sdk import installed
from tests.ipu_runs import make_batch, make_config, schema, weights_of
from tests.pretraining import global_batches, host_engine, initial_network, ipu_engine, placed
from tests.refusals import refused
from tests.tiers import slow
from tests.tiny_runs import held_out_of, logged, tiny_config, tiny_data
from tests.tolerances import relative_error
from tests.update_batches import change

RATES = (0.01, 0.02, 0.005)


@pytest.fixture
def sdk():
    with installed(ipus=16) as modules:
        yield modules


def make_engine(sdk, config, *, depth=3):
    return ipu_engine(sdk[0], config, schema(depth))


def assert_same_weights(found, expected, tolerance=1e-6):
    assert set(found["model"]) == set(expected["model"])
    assert relative_error(weights_of(found), weights_of(expected)) <= tolerance
    for name in found["model"]:
        if name.endswith("key.bias"):
            assert float((found["model"][name] - expected["model"][name]).abs().max()) <= len(RATES) * max(RATES)


LAYOUTS = {
    "one IPU": {},
    "one IPU, 4 replicas": dict(replicas=4, accumulation=2),
    "pipeline of 2": dict(layers_per_ipu=(1, 1), accumulation=5),
    "pipeline of 4, 2 replicas": dict(layers_per_ipu=(0, 1, 1, 1), replicas=2, accumulation=9, micro_batch=1),
}


# Two programs of each layout, in which depth and mask differ.
PROGRAMS = (
    ("one IPU", 3, "product"),
    slow(("one IPU", 1, "additive")),
    ("one IPU, 4 replicas", 1, "additive"),
    slow(("one IPU, 4 replicas", 3, "product")),
    ("pipeline of 2", 3, "additive"),
    slow(("pipeline of 2", 1, "product")),
    ("pipeline of 4, 2 replicas", 1, "product"),
    slow(("pipeline of 4, 2 replicas", 3, "additive")),
)


def both(sdk, config, *, depth=3):
    """Return an engine on the mock and the host's."""
    return make_engine(sdk, config, depth=depth), host_engine(config, packing_factor=1.0)


def assert_updates_are_the_hosts(sdk, config, *, depth=3, **lengths):
    """Make three updates on both engines; return the states."""
    engine, host = both(sdk, config, depth=depth)
    for update, rate in enumerate(RATES):
        batch = make_batch(config, depth=depth, seed=update, **lengths)
        actual = engine.step(batch, rate)
        assert actual.metrics == pytest.approx(host.step(batch, rate).metrics, rel=1e-5)
        assert actual.cycles > 0
    states = (engine.state(), host.state())
    assert_same_weights(*states)
    return states


@pytest.mark.parametrize("layout, depth, mask", PROGRAMS)
def test_three_updates_equal_the_hosts(sdk, layout, depth, mask):
    config = make_config(**LAYOUTS[layout], data={"max_sequences_per_pack": depth}, engine={"mask": mask})
    states = assert_updates_are_the_hosts(sdk, config, depth=depth)
    ours, theirs = (state["optimizer"] for state in states)
    assert ours["step"] == theirs["step"] == len(RATES)
    for moment in ("exp_avg", "exp_avg_sq"):
        names = [name for name in ours[moment] if not name.endswith("key.bias")]
        assert relative_error(*([state[moment][name] for name in names] for state in (ours, theirs))) < 1e-5
    assert machine.compilations == ["training"]


VARIANTS = {
    "loss by sequences": {"loss": {"normalisation": "sequence"}},
    "without next sentences": {"loss": {"next_sentence": False}},
    "AdamW": {"optimizer": {"name": "adamw"}},
    "AdamW, clipped": {"optimizer": {"name": "adamw", "max_gradient_norm": 0.05}},
    "LAMB without bias correction": {"optimizer": {"bias_correction": False}},
    "no recomputation": {"engine": {"recompute_layers": False}},
    "no serialisation": {"placement": {"embedding_serialization_factor": 1}},
}


@pytest.mark.parametrize("sections", VARIANTS.values(), ids=VARIANTS)
def test_variants_equal_the_hosts(sdk, sections):
    assert_updates_are_the_hosts(sdk, make_config(layers_per_ipu=(1, 1), accumulation=5, **sections))


def test_any_depth(sdk):
    """The configuration leaves the depth open: the data set has it, and with it the width of the mask's codes."""
    config = make_config(data={"max_sequences_per_pack": None})
    assert config.engine.mask == "product"
    assert make_batch(config, depth=9, shortest=1, longest=4)["input_mask"].max() > 7
    assert_updates_are_the_hosts(sdk, config, depth=9, shortest=1, longest=4)


@pytest.mark.parametrize("mask", ["product", "additive"])
@pytest.mark.parametrize("next_sentence", [True, False])
def test_the_adapted_network_computes_the_same(sdk, next_sentence, mask):
    """Mask, serialised product, one-hot slots, checkpoints and blocks: losses and gradients in float64."""
    ipu, _ = sdk
    sections = {"loss": {"next_sentence": next_sentence}, "engine": {"mask": mask}}
    config = make_config(layers_per_ipu=(1, 1), accumulation=5, **sections)
    plain = initial_network(config).double()
    adapted = initial_network(config).double()
    ipu.program._adapt(adapted, config, Pretraining(config, schema()))
    ipu.program._begin_blocks(adapted, placed(config))
    assert type(adapted.masked_lm_slots) is not type(plain.masked_lm_slots)
    assert (type(adapted.attention_mask) is type(plain.attention_mask)) == (mask == "additive")
    assert type(adapted.cls.predictions.product) is not type(plain.cls.predictions.product)
    adapted.load_state_dict(plain.state_dict())  # the same names and shapes
    fields = [torch.from_numpy(make_batch(config)[name]) for name in BATCH_FIELDS]
    outputs = []
    gradients = []
    for network in (plain, adapted):
        output = network(*fields)
        output.loss.backward()
        outputs.append([value.item() for value in output])
        parameters = network.named_parameters()
        gradients.append([item.grad for name, item in parameters if not name.endswith("key.bias")])
    assert outputs[1] == pytest.approx(outputs[0], rel=1e-12, abs=1e-12)
    assert relative_error(*gradients) <= 1e-12


def test_evaluation_equals_the_hosts_and_changes_nothing(sdk):
    config = make_config(layers_per_ipu=(1, 1), replicas=2, accumulation=5, model={"hidden_dropout": 0.1})
    batches = [make_batch(config, seed=seed) for seed in range(3)]
    host = host_engine(config, packing_factor=1.0)
    engine = make_engine(sdk, config)
    undisturbed = make_engine(sdk, config)
    engine.step(batches[0], 0.01)
    host.load_state(engine.state())
    actual = engine.evaluate(batches[1])
    expected = host.evaluate(batches[1])
    assert actual.metrics == pytest.approx(expected.metrics, rel=1e-5)
    engine.evaluate(batches[2])
    engine.step(batches[1], 0.01)
    after = engine.state()
    engine.close()
    for batch in batches[:2]:
        undisturbed.step(batch, 0.01)
    assert_same_weights(after, undisturbed.state())
    assert machine.compilations == ["training", "inference", "training"]


@pytest.mark.parametrize("compiled", [True, False], ids=["after compilation", "before compilation"])
def test_checkpoints_move_from_host_to_ipu(sdk, compiled):
    config = make_config(layers_per_ipu=(1, 1), accumulation=5)
    host = host_engine(config, packing_factor=1.0)
    batches = [make_batch(config, seed=seed) for seed in range(4)]
    for batch in batches[:2]:
        host.step(batch, 0.01)
    engine = make_engine(sdk, config)
    if compiled:
        engine.step(batches[3], 0.05)  # must leave no trace
    engine.load_state(host.state())
    assert_same_weights(engine.state(), host.state(), tolerance=0.0)
    assert engine.state()["optimizer"]["step"] == 2
    for batch in batches[2:]:
        engine.step(batch, 0.01)
        host.step(batch, 0.01)
    assert_same_weights(engine.state(), host.state())


@pytest.mark.parametrize("name", ["lamb", slow("adamw")])
def test_a_resumed_run_is_bit_identical(sdk, name):
    """With dropout, whose random state is part of the device's state; across two engines."""
    config = make_config(model={"hidden_dropout": 0.1}, optimizer={"name": name})
    batches = [make_batch(config, seed=seed) for seed in range(4)]
    whole = make_engine(sdk, config)
    losses = [whole.step(batch, 0.01).loss for batch in batches]
    end = whole.state()
    whole.close()
    first = make_engine(sdk, config)
    for batch in batches[:2]:
        first.step(batch, 0.01)
    state = first.state()
    first.close()
    second = make_engine(sdk, config)
    second.compile(batches[0])
    second.load_state(state)
    assert [second.step(batch, 0.01).loss for batch in batches[2:]] == losses[2:]
    assert_same_weights(second.state(), end, tolerance=0.0)
    two = make_config(model={"hidden_dropout": 0.1}, optimizer={"name": name}, replicas=2)  # another random state
    other = make_engine(sdk, two)
    other.load_state(state)
    assert other.streams != first.streams
    assert other.step(make_batch(two), 0.01).finite


def test_moments_are_found_by_the_end_of_their_names(sdk):
    ipu, _ = sdk
    parameters = {"a.weight": torch.zeros(2), "b.a.weight": torch.zeros(2)}
    device = {
        "Accl1___model.network.a.weight": torch.ones(2),
        "Accl1___model.network.b.a.weight": 2 * torch.ones(2),
        "Accl2___model.network.a.weight": 3 * torch.ones(2),
        "Accl2___model.network.b.a.weight": 4 * torch.ones(2),
        "Step___model.network.a.weight": torch.ones(1),
        "Accum___model.network.a.weight": torch.ones(2),
    }
    actual = ipu.state.moments(device, parameters)
    assert float(actual["exp_avg"]["b.a.weight"][0]) == 2.0
    assert float(actual["exp_avg_sq"]["a.weight"][0]) == 3.0
    del device["Accl2___model.network.b.a.weight"]
    with pytest.raises(ValueError, match="no exp_avg_sq of b.a.weight"):
        ipu.state.moments(device, parameters)


def test_options_say_what_the_configuration_says(sdk):
    ipu, stand_in = sdk
    path = "configs/packed_phase2_pod16.yml"
    settings = (
        "executable_cache=cache",
        "profile_directory=profile",
        "log_cycles=true",
        "automatic_loss_scaling=true",
    )
    config = load_config(path, [f"engine.{item}" for item in settings])
    device = ipu.devices.Device("ipu", "")
    options = ipu.options.training_options(config, device, ipu.devices.Instance(0, 1, 4, False), accumulation=1027)
    values = options.toDict()
    expected = {
        "replication_factor": 4,
        "device_iterations": 1,
        "output_mode": stand_in.OutputMode.Sum,
        "random_seed": config.run.seed,
        "available_memory_proportion": {0: 0.10, 1: 0.15, 2: 0.15, 3: 0.15},
        "execution_mode": 0,  # pipelined
        "cachePath": "cache",
        "instrumentWithHardwareCycleCounter": True,
        "syntheticDataMode": 0,
        "gradient_accumulation": 1027,
        "automaticLossScalingSettings.enabled": True,
        "accumulation_and_replication_reduction_type": stand_in.ReductionType.Mean,
        "enableStochasticRounding": True,
        "partialsTypeMatMuls": "half",
        "location_optimizer": {"onChip": 0, "useReplicatedTensorSharding": 1},
        "accumulateOuterFragmentSettings.schedule": 3,
    }
    assert {name: values[name] for name in expected} == expected
    # Engine options are set as a whole: those of profiling and the others must both be there.
    assert set(values["engineOptions"]) == {
        "opt.useAutoloader",
        "target.syncReplicasIndependently",
        "debug.allowOutOfMemory",
        "autoReport.all",
        "autoReport.directory",
    }
    assert values["engineOptions"]["autoReport.directory"] == "profile"

    instance = ipu.devices.Instance(0, 1, 4, False)
    evaluation = ipu.options.evaluation_options(config, device, instance, iterations=12).toDict()
    assert evaluation["device_iterations"] == 12
    assert evaluation["gradient_accumulation"] == 1
    assert evaluation["enableStochasticRounding"] is False


def training_options(ipu, config, kind="ipu"):
    instance = ipu.devices.Instance(0, 1, 1, False)
    return ipu.options.training_options(config, ipu.devices.Device(kind, ""), instance, accumulation=4).toDict()


# (engine settings, kind of device, option of PopTorch, its value)
REACHED = [
    ({"half_partials": False}, "ipu", "partialsTypeMatMuls", "float"),
    ({"stochastic_rounding": False}, "ipu", "enableStochasticRounding", False),
    ({"synthetic_data": True}, "ipu", "syntheticDataMode", 2),
    ({"log_cycles": False}, "ipu", "instrumentWithHardwareCycleCounter", False),
    (
        {"recompute_layers": None},
        "ipu",
        "autoRecomputation",
        4,
    ),  # RecomputeAll: not PopTorch's default on one IPU
    ({"recompute_layers": False}, "ipu", "autoRecomputation", 0),
    ({"ipu_model": True}, "ipu_model", "use_model", True),
    ({"ipu_model": True}, "ipu_model", "instrumentWithHardwareCycleCounter", False),
    ({"ipu_model": True, "executable_cache": "cache"}, "ipu_model", "cachePath", None),
]


def test_engine_settings_reach_the_options(sdk):
    for settings, kind, name, expected in REACHED:
        assert training_options(sdk[0], make_config(engine=settings), kind).get(name) == expected, name


def test_parameter_groups_and_types(sdk):
    ipu, _ = sdk
    config = make_config(engine={"first_moment_type": "float16", "gradient_accumulator_type": "float16"})
    program = ipu.program.build_program(config, Pretraining(config, schema()), placed(config))
    optimizer = ipu.options.build_optimizer(program, config, betas=(0.8, 0.99))
    groups = [(group["weight_decay"], group["max_weight_norm"]) for group in optimizer.param_groups]
    assert groups == [(0.0, 0.0), (0.0, 65500.0), (0.01, 65500.0)]
    assert optimizer.param_groups[0]["betas"] == (0.8, 0.99)
    assert optimizer.param_groups[0]["eps"] == 1e-6
    assert optimizer.accum_type == optimizer.first_order_momentum_accum_type == torch.float16
    assert optimizer.second_order_momentum_accum_type == torch.float32
    assert optimizer.loss_scaling == 128.0
    # Automatic scaling starts from 1.
    automatic = config.changed("engine", automatic_loss_scaling=True)
    assert ipu.options.build_optimizer(program, automatic, betas=(0.8, 0.99)).loss_scaling == 1.0
    constant = optimizer.variable_attrs.isConstant
    assert constant("weight_decay")
    assert constant("max_weight_norm")
    assert not constant("lr")


def test_half_first_moments_travel_as_float32(sdk):
    config = make_config(engine={"first_moment_type": "float16"})
    engine = make_engine(sdk, config)
    engine.step(make_batch(config), 0.01)
    state = engine.state()
    assert {t.dtype for t in state["optimizer"]["exp_avg"].values()} == {torch.float32}
    host = host_engine(config, packing_factor=1.0)
    host.load_state(state)
    engine.load_state(host.state())
    expected = host.step(make_batch(config), 0.01).loss
    assert engine.step(make_batch(config), 0.01).loss == pytest.approx(expected, rel=1e-4)


SDK_MESSAGES = [
    (
        "host memory",
        "'poplar_stream_memory_allocation_error': memory allocation of a stream buffer failed",
    ),
    ("host memory", "std::bad_alloc"),
    ("host memory", "mmap: Cannot allocate memory"),
    ("tile memory", "'poplar_graph_memory_allocation_error': Out of memory on tile 12: 7 bytes"),
    ("tile memory", "Out of memory: Cannot fit all variable data onto one or more tiles"),
    (
        "linker",
        "'poplar_link_error': Failed to link the program. Output: ld.lld: error: undefined symbol __x",
    ),
    # graphcore/poptorch, issues 3 and 14.
    (
        "no device",
        "In a/Compiler.cpp:627: 'poptorch_cpp_error': Failed to acquire 1 IPU(s)\nError raised in:\n [0] x",
    ),
    ("no device", "Failed to acquire 4 IPU(s): IPUOF_VIPU_API_PARTITION_ID is not set"),
    ("no device", "Could not connect to the V-IPU controller"),
    ("no device", "Could not find a device that supports the IPU-Link configuration"),
    (
        "link",
        "'poplar_unrecoverable_runtime_error': Fabric error: connection not established: CONNECTION_KILL",
    ),
    ("link", "IPUoF: IPU-Links are down"),
    ("reset needed", "'poplar_recoverable_runtime_error': host sync timeout [IPU_RESET]"),
    ("reset needed", "'poplar_recoverable_runtime_error': Fabric error"),
    ("wrong version", "Invalid file x: Version mismatch: 3.3 is not 3.4"),
    ("other", "'poplar_unrecoverable_runtime_error': the hardware has failed"),
    ("other", "'popart_exception': no device-to-host stream of tensor ipu_reset_counter"),
    (
        "other",
        "'std::out_of_range': basic_string::replace: __pos (which is 5) > this->size() (which is 0)" * 9,
    ),
]


def test_no_message_of_the_sdk_has_phrases_of_two_kinds():
    """A kind that the type decides may have another one's phrases: the type comes first."""
    for kind, message in SDK_MESSAGES:
        error = RuntimeError(message)
        assert classify(error).kind == kind, message
        assert len(str(SdkError(classify(error)))) < 300
        by_phrases = [item.name for item in sdk_errors._KINDS if re.search(item.phrases, message, re.I)]
        by_type = sdk_errors._of_type(RuntimeError(), message)
        assert by_phrases in ([kind], []) or by_type.name == kind
        assert by_phrases or by_type or kind == "other"


def test_a_stored_type_and_an_action_decide_before_the_message():
    stored = type("Error", (Exception,), {"type": "poplar_link_error"})
    recoverable = type("Error", (Exception,), {"recovery_action": "FULL_RESET"})
    assert classify(stored("the IPU-Links are down")).kind == "linker"
    assert classify(recoverable("Out of memory")).kind == "reset needed"
    assert classify(MemoryError()).kind == "host memory"


def test_an_error_of_the_sdk_is_one_line(sdk, monkeypatch):
    config = make_config()
    batch = make_batch(config)
    engine = make_engine(sdk, config)

    def fail(*_, **__):
        raise sdk[1].Error("Failed to acquire 4 IPU(s)\nError raised in:\n [0] x")

    calls = {"compile": lambda: engine.compile(batch), "__call__": lambda: engine.step(batch, 0.01)}
    calls["copyWeightsToHost"] = lambda: engine.evaluate(batch)
    for method, call in calls.items():
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(sdk[1].PoplarExecutor, method, fail)
            with refused("engine.kind ipu", "4 IPU", kind=SdkError) as caught:
                call()
        assert caught.value.problem.kind == "no device"
        engine.step(batch, 0.01)
    monkeypatch.setattr(sdk[1].PoplarExecutor, "__call__", mock.Mock(side_effect=RuntimeError("a fault of ours")))
    with refused("a fault of ours", kind=RuntimeError):
        engine.step(batch, 0.01)


@pytest.mark.parametrize(
    "fault, complaint",
    [
        (
            "assert False, 'PopTorch only works with torch==2.0.1'",
            "torch==2.0.1",
        ),  # as PopTorch compares versions
        (
            "raise ImportError('libpopart.so: cannot open shared object file')",
            "libpopart.so",
        ),  # the SDK is not enabled
    ],
)
def test_a_broken_sdk_is_one_line(tmp_path, monkeypatch, fault, complaint):
    import ipu_packed_bert.engine as package

    (tmp_path / "poptorch.py").write_text(fault)
    monkeypatch.syspath_prepend(str(tmp_path))
    ours = [name for name in sys.modules if name.startswith("ipu_packed_bert.engine.ipu")]
    for name in ["poptorch", *ours]:
        monkeypatch.delitem(sys.modules, name, raising=False)
    monkeypatch.delattr(package, "ipu", raising=False)
    with refused(complaint) as error:
        choose_engine(make_config())
    assert "Poplar SDK" in str(error.value)
    assert choose_engine(make_config().changed("engine", kind="auto")).kind == "host"


def test_hardware_then_the_ipu_model(monkeypatch):
    with installed(ipus=4):
        choice = choose_engine(make_config(replicas=4, accumulation=2))
        assert choice.hardware
        assert choice.reason == "IPU hardware: 4 IPUs (4 x 1)"
        # Simulated devices of PopTorch's environment come first, the whole one before the small one.
        for model, small, named in (
            ("0", "0", "hardware"),
            ("0", "1", "4 tiles"),
            ("1", "1", "by POPTORCH_IPU_MODEL:"),
        ):
            monkeypatch.setenv("POPTORCH_IPU_MODEL", model)
            monkeypatch.setenv("POPTORCH_SMALL_IPU_MODEL", small)
            choice = choose_engine(make_config())
            assert choice.hardware == (named == "hardware")
            assert named in choice.reason
    monkeypatch.undo()
    with installed(ipus=0):
        choice = choose_engine(make_config(engine={"kind": "auto"}))
        assert choice.kind == "ipu_model"
        assert "IPU Model" in choice.reason
        with refused("no IPU is attached"):
            choose_engine(make_config())


@pytest.mark.parametrize("attached", [1, 2, 7])
def test_fewer_ipus_than_replicas(attached):
    """A configuration of one's own: the settings that the line names make it fit, with updates as large."""
    config = make_config(replicas=8, accumulation=3)
    with installed(ipus=attached):
        with refused("needs 8 IPUs") as error:
            choose_engine(config)
        settings = dict(item.split("=") for item in str(error.value).split() if "=" in item)
        fitting = change(
            config,
            placement={
                "replicas": int(settings["placement.replicas"]),
                "replicated_tensor_sharding": "placement.replicated_tensor_sharding" not in settings,
            },
            batch={"gradient_accumulation": int(settings["batch.gradient_accumulation"])},
        )
        assert choose_engine(fitting).hardware
        assert not cross_check(fitting)
        assert fitting.packs_per_update(1.0) == config.packs_per_update(1.0)
        assert not choose_engine(config.changed("engine", ipu_model=True)).hardware


def test_the_ipu_model_on_request(sdk):
    config = make_config(engine={"ipu_model": True})
    assert choose_engine(config).kind == "ipu_model"
    engine = make_engine(sdk, config)
    host = host_engine(config, packing_factor=1.0)
    batch = make_batch(config)
    assert engine.step(batch, 0.01).cycles is None
    host.step(batch, 0.01)
    assert engine.evaluate(batch).metrics == pytest.approx(host.evaluate(batch).metrics, rel=1e-5)
    assert machine.attached == 0
    with refused("runs one replica", "placement.replicas"):
        make_engine(sdk, change(config, placement={"replicas": 2}))


def export(tmp_path, **sections):
    """Compile a training program where no IPU is; return its file and the configuration to run it."""
    file = str(tmp_path / "programs" / "training.poptorch")
    config = make_config(**sections, engine={"offline_export": file, "log_cycles": False})
    with installed(ipus=0) as sdk:
        assert choose_engine(config).hardware  # the configuration for IPUs applies
        engine = make_engine(sdk, config)
        engine.compile(make_batch(config))
        with refused("engine.offline_export", file):
            engine.step(make_batch(config), 0.01)
        assert engine.state()["optimizer"]["step"] == 0
    return file, config.changed("engine", offline_export=None, executable=file)


def test_an_executable_makes_the_updates_of_a_compiled_program(tmp_path):
    file, config = export(tmp_path, accumulation=2, micro_batch=1)
    states = []
    with installed(ipus=16) as sdk:
        for item in (config, config.changed("engine", executable=None)):
            machine.reset(16)
            engine = make_engine(sdk, item)
            engine.compile(make_batch(config))
            for step, rate in enumerate(RATES):
                engine.step(make_batch(config, seed=step), rate)
            engine.evaluate(make_batch(config))
            states.append(engine.state())
            loaded = item.engine.executable is not None
            assert machine.compilations == (["inference"] if loaded else ["training", "inference"])
            engine.close()
        # A state goes on in a loaded program as in a compiled one.
        resumed = make_engine(sdk, config)
        resumed.compile(make_batch(config))
        resumed.load_state(states[1])
        assert resumed.state()["optimizer"]["step"] == len(RATES)
    for part in ("model", "optimizer"):
        names = states[0][part] if part == "model" else states[0][part]["exp_avg"]
        first, second = (item[part] if part == "model" else item[part]["exp_avg"] for item in states)
        assert all(torch.equal(first[name], second[name]) for name in names)
        assert names


# Other sections of the configuration -> what the refusal names; none: the program is the same.
OTHER_SECTIONS = [
    ({"engine": {"stochastic_rounding": True}}, ["engine.stochastic_rounding false", "true"]),
    ({"model": {"intermediate_size": 64}}, ["model.intermediate_size 32", "64"]),
    ({"batch": {"micro_batch": 1}}, ["batch.micro_batch 2", "1"]),
    ({"batch": {"gradient_accumulation": 6}}, ["accumulation 4", "6"]),
    ({"optimizer": {"packing_adjustment": "betas"}}, []),  # a packing factor of 1 changes no beta
    ({"run": {"seed": 6}, "optimizer": {"learning_rate": 0.1}}, []),  # sent to the device
]


def test_an_executable_of_another_configuration_or_another_file_is_one_line(tmp_path, monkeypatch):
    file, config = export(tmp_path)
    note_path = Path(file + ".json")
    program = Path(file).read_bytes()
    note = json.loads(note_path.read_text())
    batch = make_batch(config)
    narrow = {**batch, "input_ids": batch["input_ids"][:, :-8]}
    other_partials = config.changed("engine", half_partials=False)
    compiled_for = note["compiled_for"]
    with installed(ipus=16) as sdk:
        for sections, names in OTHER_SECTIONS:
            expected = refused("compile it again", file, *names) if names else contextlib.nullcontext()
            with expected:
                make_engine(sdk, change(config, **sections)).compile(batch)
        for content, damage, run_config, run_batch in (
            (program, note, config, narrow),
            (
                program,
                {**note, "compiled_for": {**compiled_for, "poptorch": "3.3.0"}},
                config,
                batch,
            ),
            (program[:100], note, config, batch),
            (program, {**note, "format": 2}, config, batch),
            # Another program under this note: PopTorch itself refuses it.
            (
                program,
                {**note, "compiled_for": {**compiled_for, "engine.half_partials": False}},
                other_partials,
                batch,
            ),
            (program, None, config, batch),
        ):
            Path(file).write_bytes(content)
            note_path.write_text(json.dumps(damage))
            if damage is None:
                note_path.unlink()
            with refused("engine.offline_export", file):
                make_engine(sdk, run_config).compile(run_batch)
        # No fault of the file.
        Path(file).write_bytes(program)
        note_path.write_text(json.dumps(note))
        error = sdk[1].Error("Failed to acquire 4 IPU(s)")
        monkeypatch.setattr(sdk[1].PoplarExecutor, "loadExecutable", mock.Mock(side_effect=error))
        with refused("engine.kind ipu", "4 IPU", kind=SdkError):
            make_engine(sdk, config).compile(batch)


def test_a_program_compiled_away_from_the_data(tiny, tmp_path, monkeypatch, capsys):
    """The embedded corpus does not determine its accumulation; the run on the data names both and the option."""
    monkeypatch.setattr(pretraining, "of_embedded_corpus", lambda manifest: True)
    file = tmp_path / "training.poptorch"
    line = [
        "--config",
        tiny,
        "--engine",
        "ipu",
        "--steps",
        "5000",
        "--set",
        "engine.half_weights=false",
    ]
    line += [
        "--set",
        "batch.gradient_accumulation=24",
        "--set",
        "optimizer.packing_adjustment=accumulation",
    ]
    with installed(ipus=0):
        assert command(*line, "--set", f"engine.offline_export={file}", "--packing-factor", "3") == 0
    printed = capsys.readouterr().out
    assert "factor 3.000 of --packing-factor" in printed
    assert "accumulation 8" in printed
    assert re.search(r"warning .* [\d,]+ epochs of the embedded corpus.*--data", printed)
    with installed(ipus=16), refused("accumulation 8", "this run has 1", "--packing-factor"):
        command(*line, "--out", str(tmp_path / "run"), "--set", f"engine.executable={file}")


@pytest.fixture
def loading(tmp_path):
    """loading(*overrides) -> a tiny data set, its configuration, and batches of it"""
    folder = tiny_data(tmp_path / "data")

    def made(*overrides):
        config = load_config(tiny_config(tmp_path / "tiny.yml", folder), list(overrides))
        store = PackStore.open(folder)
        return store, config, global_batches(store, config, packing_factor=1.0)

    return made


def test_batches_ahead_are_the_batches(sdk, tiny, store):
    """Read by another process: the same batches, the same place to resume from, epoch after epoch."""
    config = load_config(tiny, ["engine.kind=ipu"])
    plain = global_batches(store, config, packing_factor=1.0, evaluation=held_out_of(store))
    engine = ipu_engine(sdk[0], config, store.schema)
    ahead = engine.feed(global_batches(store, config, packing_factor=1.0, evaluation=held_out_of(store)))
    assert type(ahead) is not GlobalBatches
    assert ahead.packs_per_update == plain.packs_per_update
    in_this_process = config.changed("engine", asynchronous_loading=False)
    assert ipu_engine(sdk[0], in_this_process, store.schema).feed(plain) is plain
    states = []
    for _ in range(2 * plain.updates_per_epoch + 1):
        expected = next(plain)
        actual = next(ahead)
        assert list(actual) == list(BATCH_FIELDS)
        for name in BATCH_FIELDS:
            assert np.array_equal(actual[name], expected[name])
            assert actual[name].dtype == expected[name].dtype
        assert ahead.state() == plain.state()
        states.append(ahead.state())
    assert states[-1]["epoch"] == 2
    # Resumed in the middle of an epoch.
    plain.load_state(states[1])
    ahead.load_state(states[1])
    assert np.array_equal(next(ahead)["input_ids"], next(plain)["input_ids"])
    assert len(list(ahead.held_out())) == len(list(plain.held_out())) > 1
    ahead.close()
    plain.close()


@pytest.mark.parametrize("asked_for", [1, 2])
def test_a_dead_reader_is_one_line(sdk, loading, asked_for, monkeypatch):
    """Damaged data ends the other process: the run ends with the line that the data's own reader has for it."""
    store, config, batches = loading()
    ahead = ipu_engine(sdk[0], config, store.schema).feed(batches)
    read = GlobalBatches.__next__
    left = [asked_for - 1]

    def damaged(self):
        if not left[0]:
            raise ValueError("data/packed: shard 3 is damaged\nbuild it again")
        left[0] -= 1
        return read(self)

    monkeypatch.setattr(GlobalBatches, "__next__", damaged)
    for _ in range(asked_for - 1):
        next(ahead)
    with refused("shard 3 is damaged build it again"):
        next(ahead)
    complaint = ahead._error_file
    ahead.close()
    assert not complaint.parent.exists()


def command(*arguments):
    from ipu_packed_bert.commands import pretrain

    return pretrain.main(list(arguments))


def test_a_run_compiles_once_and_continues_on_the_host(tiny, tmp_path, capsys):
    """12 updates with evaluations and checkpoints: two programs. Saved on IPUs after 6 updates, resumed on the host."""
    ipu = tmp_path / "ipu"
    half = tmp_path / "half"
    host = tmp_path / "host"
    same = f"--config {tiny} --set engine.half_weights=false --set model.hidden_dropout=0".split()
    same += "--set engine.gradient_accumulator_type=float32".split()
    with installed(ipus=1):
        assert command(*same, *f"--out {ipu} --set engine.kind=auto".split()) == 0
        assert sorted(machine.compilations) == ["inference", "training"]
        assert machine.attached == 0
        assert "IPU hardware: 1 IPU (1 x 1)" in capsys.readouterr().out
        shorter = f"--out {half} --set engine.kind=auto --steps 6 --set optimizer.warmup_fraction=0"
        assert command(*same, *shorter.split()) == 0
    assert command(*same, *f"--out {host} --engine host".split()) == 0
    assert logged(ipu, "loss") == pytest.approx(logged(host, "loss"), rel=1e-4)
    assert command(*f"--resume {half} --engine host --steps 8 --set optimizer.schedule_steps=8".split()) == 0
    assert len(logged(half, "loss")) == 8


def test_the_order_of_rows_decides_nothing(sdk):
    """Any order of an update's rows, so any split into replicas and times, and any ids in padding."""
    config = make_config(replicas=2, accumulation=3)
    batch = make_batch(config)
    order = np.random.default_rng(1).permutation(len(batch["input_ids"]))
    garbage = {**batch, "input_ids": np.where(batch["input_mask"] == 0, 7, batch["input_ids"])}
    states = []
    for update in (batch, {name: field[order] for name, field in garbage.items()}):
        engine = make_engine(sdk, config)
        engine.step(update, 0.01)
        states.append(engine.state())
        engine.close()
    assert_same_weights(*states)


def test_evaluation_and_training_share_the_ipus():
    """A machine with exactly the IPUs of the run."""
    config = make_config(layers_per_ipu=(1, 1), accumulation=5)
    with installed(ipus=2) as sdk:
        engine = make_engine(sdk, config)
        for seed in range(2):
            batch = make_batch(config, seed=seed)
            engine.step(batch, 0.01)
            engine.evaluate(batch)
        engine.close()
        assert machine.attached == 0


def test_state_is_plain_and_survives_saving(sdk, tmp_path):
    config = make_config()
    engine = make_engine(sdk, config)
    fresh = engine.state()["optimizer"]
    assert fresh["step"] == 0
    assert not any(moment.any() for moment in fresh["exp_avg"].values())
    engine.step(make_batch(config), 0.01)
    torch.save(engine.state(), tmp_path / "state.pt")
    state = torch.load(tmp_path / "state.pt", weights_only=True)
    assert {t.dtype for t in state["model"].values()} == {torch.float32}
    engine.load_state(state)
    # It is a copy: training on does not change it.
    kept = copy.deepcopy(state)
    engine.step(make_batch(config), 0.01)
    assert_same_weights(state, kept, tolerance=0.0)


def test_the_readers_process_ends_without_a_traceback(loading, tmp_path):
    """SystemExit with a number: Python prints nothing of it, in the main process or another."""
    from ipu_packed_bert.engine.ipu.feed import Reader

    _, _, batches = loading()
    complaint = tmp_path / "complaint"
    reader = Reader(batches.packs.again(), batches.layout, (0, 1), batches.state(), 1, error_file=str(complaint))
    for shard in (tmp_path / "data").glob("packs-*.npy"):
        shard.write_bytes(b"")
    with pytest.raises(SystemExit) as ended:
        next(iter(reader))
    assert ended.value.code == 1
    assert complaint.read_text().count("packs-") == 1


def test_auto_runs_on_the_ipu_model_where_there_is_no_hardware(tiny, tmp_path, capsys):
    """The SDK without an IPU: what `auto` found is what the engine builds, instead of looking for hardware again."""
    run = tmp_path / "model"
    options = f"--config {tiny} --out {run} --set engine.kind=auto --set engine.half_weights=false --steps 2"
    with installed(ipus=0):
        assert command(*options.split()) == 0
    assert "IPU Model" in capsys.readouterr().out
    assert len(logged(run, "loss")) == 2


def test_fewer_ipus_than_asked_for():
    """Nothing is simulated in silence; one line has what is there, what is wanted and what fits."""
    for name, kind, ipus, way_out in (
        ("packed_phase2_pod16", "ipu", 8, "replicas=2 --set batch.gradient_accumulation=4096"),
        ("packed_phase1_base_bow_pod64", "auto", 16, "--set placement.replicas=4 "),
        ("packed_phase2_pod16", "auto", 2, "too few for one replica"),
    ):
        config = load_config(Path("configs") / f"{name}.yml", [f"engine.kind={kind}"])
        with installed(ipus=ipus), refused(f"needs {config.ipus} IPU", f"has {ipus} IPU", way_out):
            choose_engine(config)


def test_a_program_is_exported_and_run_by_the_command(tiny, tmp_path, capsys):
    run = tmp_path / "run"
    file = tmp_path / "training.poptorch"
    line = ["--config", tiny, "--engine", "ipu", "--set", "engine.half_weights=false"]
    with installed(ipus=0):
        assert command(*line, "--out", str(run), "--set", f"engine.offline_export={file}") == 0
    assert f"--set engine.executable={file}" in capsys.readouterr().out
    assert file.exists()
    assert not (run).exists()
    with installed(ipus=16):
        assert command(*line, "--out", str(run), "--set", f"engine.executable={file}") == 0
        assert machine.compilations == ["inference"]  # the evaluation at the end
