"""Settings: what is read, what is refused and in which words, and the arithmetic that follows from them."""

import math

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from ipu_packed_bert.settings.config import Config, ConfigError, fast_micro_batch
from ipu_packed_bert.settings.loading import config_from_tree, filled_in
from ipu_packed_bert.settings.rules import check_accumulation
from ipu_packed_bert.settings.schema import BatchConfig, EngineConfig, OptimizerConfig, PlacementConfig, TaskConfig
from tests.refusals import refused


def problems(tree, *overrides):
    with pytest.raises(ConfigError) as caught:
        config_from_tree(tree, "a.yml", overrides)
    lines = str(caught.value).split("\n")
    if len(lines) == 1:
        assert lines[0].startswith("a.yml: ")
        return [lines[0][len("a.yml: ") :]]
    assert lines[0] == f"a.yml: {len(lines) - 1} problems"
    return [line.strip() for line in lines[1:]]


def test_four_ipus_need_an_accumulation_of_nine():
    tree = {
        "placement": {"ipus_per_replica": 4, "layers_per_ipu": [3, 3, 3, 3], "available_memory_proportion": [0.2] * 4},
        "batch": {"gradient_accumulation": 8},
    }
    (problem,) = problems(tree)
    assert problem.startswith("batch.gradient_accumulation is 8; must be at least the 9 stages")
    tree["batch"]["gradient_accumulation"] = 16
    config = config_from_tree(tree, "a.yml")
    check_accumulation(config, 1.99)  # ceil(16 / 1.99) = 9
    with pytest.raises(ConfigError, match="8 with a packing factor of 2.000; must be at least the 9 stages"):
        check_accumulation(config, 2.0)


@pytest.mark.parametrize(
    "key, value, fixed",
    [
        ("run.on_nonfinite", "skip", "stop"),
        ("optimizer.eps", 1e-8, "1e-06"),
        ("optimizer.max_weight_norm", 0.0, "65500.0"),
    ],
)
def test_a_former_setting_is_accepted_with_the_value_it_is_fixed_at(key, value, fixed):
    """Files and checkpoints of version 1.0 state it."""
    section, name = key.split(".")
    stated = {section: {name: yaml.safe_load(fixed)}}
    assert config_from_tree(stated, "a.yml", [f"{key}={fixed}"]) == Config()
    for actual in (problems({section: {name: value}}), problems({}, f"{key}={value}")):
        assert len(actual) == 1
        assert key in actual[0]
        assert f"fixed at {fixed}" in actual[0]


def test_an_annotated_value_has_its_origin_and_meaning():
    config = config_from_tree({}, "a.yml", ["run.seed=1"])
    seed = config.annotated().partition("run:\n  seed: 1 ")[2].splitlines()[0]
    assert seed.split() == ["#", "--set;", *config.settings["run.seed"].meaning.split()]


@pytest.mark.parametrize(
    "accumulation, factor, packed",
    [
        # Published: the accumulation of the unpacked configuration and its packing factor -> with packs.
        (512, 1.17, 438),
        (512, 1.7, 302),
        (512, 2.0, 256),
        (2048, 1.17, 1751),
        (2048, 1.7, 1205),
        (2048, 2.0, 1024),
    ],
)
def test_published_accumulations(accumulation, factor, packed):
    batch = BatchConfig(micro_batch=2, gradient_accumulation=accumulation)
    config = Config(batch=batch, placement=PlacementConfig(replicas=4))
    assert config.accumulation(factor) == packed
    assert config.micro_batches_per_update(factor) == 4 * packed
    assert config.packs_per_update(factor) == 8 * packed
    assert config.expected_sequences_per_update(factor) == pytest.approx(8 * packed * factor)


@given(st.integers(1, 5000), st.floats(1.0, 20.0))
def test_a_packed_update_expects_at_least_the_unpacked_sequences_and_less_than_a_micro_batch_per_replica_more(
    value, factor
):
    batch = BatchConfig(micro_batch=3, gradient_accumulation=value)
    config = Config(batch=batch, placement=PlacementConfig(replicas=4))
    unpacked = value * 3 * 4
    assert unpacked <= config.expected_sequences_per_update(factor) * (1 + 1e-12)
    assert config.expected_sequences_per_update(factor) < (unpacked + 3 * 4 * factor) * (1 + 1e-12)


@given(st.integers(1, 8), st.integers(1, 500), st.integers(1, 4), st.integers(1, 4))
def test_accumulation_over_p_leaves_updates_as_they_are_and_the_other_rules_make_one_of_p(
    p, part, micro_batch, replicas
):
    """Section 3.3 for p = 1 to 8, where p divides the accumulation; else a micro-batch more, as above."""

    def sequences(rule, factor):
        config = Config(
            optimizer=OptimizerConfig(packing_adjustment=rule),
            batch=BatchConfig(micro_batch=micro_batch, gradient_accumulation=p * part),
            placement=PlacementConfig(replicas=replicas),
        )
        return config.expected_sequences_per_update(float(factor)), config.betas(float(factor))

    unpacked, betas = sequences("accumulation", 1)
    assert sequences("accumulation", p) == (unpacked, betas)  # so as many updates for as many sequences
    assert sequences("none", p) == (p * unpacked, betas)
    assert sequences("betas", p)[0] == p * unpacked
    assert sequences("betas", p)[1] == pytest.approx((betas[0] ** p, betas[1] ** p), rel=1e-12)


@given(st.integers(1, 9), st.floats(1.0, 16.0))
def test_a_simulated_device_gets_one_replica_and_the_fewest_micro_batches_that_fill_its_pipeline(later, factor):
    placement = PlacementConfig(
        replicas=4, ipus_per_replica=later + 1, layers_per_ipu=(0,) + (1,) * later, replicated_tensor_sharding=True
    )
    config = Config(placement=placement).for_simulation(factor)
    assert config.placement.replicas == 1
    assert not config.placement.replicated_tensor_sharding
    assert config.accumulation(factor) == config.pipeline_stages == 2 * (later + 2) - 1


def test_each_value_has_its_origin():
    tree = {
        "batch": {"micro_batch": 3},
        "data": {"vocabulary_size": 500},
        "without_ipus": {"batch": {"micro_batch": 1}},
    }
    config = config_from_tree(tree, "a.yml", ["run.steps=7"])
    assert set(config.origins) == set(config.settings)
    origins = [config.origins[key] for key in ("batch.micro_batch", "run.steps", "run.seed", "model.vocabulary_size")]
    assert origins == ["file", "--set", "default", "default, from data.vocabulary_size"]
    assert config.applied_without_ipus()[0].origins["batch.micro_batch"] == "without_ipus"
    filled = filled_in(config, {"run.seed": 9, "batch.micro_batch": 9, "model.vocabulary_size": 400}, "data set")
    assert (filled.run.seed, filled.batch.micro_batch, filled.model.vocabulary_size) == (9, 3, 400)
    assert filled.origins["run.seed"] == "data set"
    assert filled_in(Config(), {"run.seed": 9}, "data set") == Config()  # built in code: every value is meant


def test_what_follows_from_another_setting_need_not_be_typed():
    tree = {"model": {"num_layers": 3, "vocabulary_size": 8192}, "data": {"max_sequence_length": 1024}}
    config = config_from_tree(tree, "a.yml")
    assert config.placement.layers_per_ipu == (3,)
    assert config.data.vocabulary_size == 8192
    assert config.model.max_position_embeddings == 1024
    # A block for machines without IPUs is one IPU, whatever the pod.
    pod = {
        "model": {"num_layers": 24},
        "data": {"vocabulary_size": 1000},
        "placement": {
            "replicas": 4,
            "ipus_per_replica": 2,
            "layers_per_ipu": [12, 12],
            "available_memory_proportion": [0.1, 0.2],
            "replicated_tensor_sharding": True,
            "embedding_serialization_factor": 2,
        },
        "without_ipus": {"model": {"num_layers": 2}, "data": {"vocabulary_size": 300}},
    }
    small, _ = config_from_tree(pod, "a.yml").applied_without_ipus()
    assert small.placement == PlacementConfig(layers_per_ipu=(2,))
    assert small.model.vocabulary_size == 300
    # A placement that --set gives is the pod's: the block keeps one IPU, with its layers.
    options = ["placement.layers_per_ipu=[10,14]", "placement.available_memory_proportion=[0.3,0.1]"]
    changed = config_from_tree(pod, "a.yml", options)
    assert changed.placement.layers_per_ipu == (10, 14)
    assert changed.applied_without_ipus()[0] == small


@given(st.integers(2, 500), st.integers(1, 400), st.integers(100, 400), st.integers(1, 4))
def test_an_automatic_micro_batch_keeps_the_update_and_has_the_fewest_empty_packs(unpacked, packs, share, ranks):
    """At 512 slots 2 to 8 rows are similar, and 4 are best."""
    factor = (packs * share // 100) / packs
    config = Config(batch=BatchConfig("auto", gradient_accumulation=unpacked), engine=EngineConfig(kind="host"))
    rows = math.ceil(unpacked / factor)
    share = math.ceil(rows / ranks)
    of_rank = {size: math.ceil(math.ceil(rows / size) / ranks) * size for size in range(2, min(share, 8) + 1)}
    size = fast_micro_batch(rows, 512, ranks=ranks)
    assert of_rank.get(size, share) == min(of_rank.values(), default=share)
    assert size <= share
    assert size == 4 or of_rank.get(size, 1) < of_rank.get(4, math.inf)
    chosen = config.with_micro_batch(factor, ranks=ranks)
    assert chosen.accumulation(factor) == -(-rows // chosen.batch.micro_batch)
    assert chosen.packs_per_update(factor) == config.packs_per_update(factor) == rows
    assert chosen.with_micro_batch(factor) == chosen
    assert chosen.as_dict() == config.as_dict()


@pytest.mark.parametrize("slots", [2048, 4096, 1 << 20])
def test_long_packs_are_computed_one_by_one(slots):
    """A pack has as many slots as are computed at once, or more; 8 packs need no empty one in any size."""
    assert fast_micro_batch(8, slots) == 1


def test_positions_follow_from_longer_slots_only():
    """The comments of a configuration name what a default follows from."""
    positions = "model.max_position_embeddings"
    for slots, follows in ((128, False), (512, False), (513, True)):
        config = config_from_tree({"data": {"max_sequence_length": slots}}, "a.yml")
        assert ("data.max_sequence_length" in config.origins[positions]) == follows
        assert config.model.max_position_embeddings == max(slots, 512)


@given(st.integers(1, 300), st.integers(1, 9), st.sampled_from([1, 2, 4]), st.integers(1, 4), st.floats(1.0, 8.0))
def test_an_update_of_fine_tuning_depends_on_neither_micro_batch_nor_ranks_nor_replicas(
    sequences, micro_batch, replicas, ranks, factor
):
    """17 sequences in micro-batches of 1 to 5 were 12 updates an epoch or 9."""
    config = Config(
        task=TaskConfig(name="tokens"),
        batch=BatchConfig(micro_batch, sequences_per_update=sequences),
        placement=PlacementConfig(replicas=replicas),
    )
    chosen = config.with_micro_batch(factor, ranks=ranks)
    packs = chosen.packs_per_update(factor)
    assert packs == max(1, round(sequences / factor))
    rows = chosen.micro_batches_per_update(factor) * chosen.batch.micro_batch
    assert packs <= rows
    assert chosen.batch.micro_batch <= micro_batch
    # Empty packs only fill micro-batches: no replica has one that is empty from the start of the pipeline's fill.
    least = max(math.ceil(packs / replicas), chosen.pipeline_stages)
    assert rows < replicas * (least + chosen.batch.micro_batch)


@given(st.integers(2, 40), st.integers(20, 300), st.integers(1, 39), st.sampled_from([1, 4]), st.floats(1.0, 3.0))
def test_the_advised_micro_batch_keeps_the_size_of_an_update(micro_batch, accumulation, fits, replicas, factor):
    batch = BatchConfig(micro_batch, gradient_accumulation=accumulation)
    config = Config(batch=batch, placement=PlacementConfig(replicas=replicas))
    advice = config.on_micro_batch(min(fits, micro_batch - 1), factor)
    values = dict(word.split("=") for word in advice.split() if word != "--set")
    followed = config.with_settings({name: int(value) for name, value in values.items()}, "--set")
    assert 1 <= followed.batch.micro_batch <= fits
    assert followed.packs_per_update(factor) == config.packs_per_update(factor)
    rows = followed.micro_batches_per_update(factor) * followed.batch.micro_batch
    assert rows == followed.packs_per_update(factor)


def test_an_automatic_micro_batch_needs_the_host():
    config = config_from_tree({"batch": {"micro_batch": "auto"}, "engine": {"kind": "ipu"}}, "a.yml")
    with refused("a.yml: batch.micro_batch is auto", "--engine host", "--set batch.micro_batch=2", kind=ConfigError):
        config.with_micro_batch(2.0)
    assert problems({"batch": {"micro_batch": "many"}}) == [
        "batch.micro_batch is 'many'; must be one of auto or a whole number"
    ]
