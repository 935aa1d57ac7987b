"""Attention within each sequence: the same losses and gradients as a dense mask, from blocks no larger than a
sequence."""

import importlib
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn import functional as F

from ipu_packed_bert.engine.host.attention import OPERATOR_FROM, block_rule
from ipu_packed_bert.model.packed import BATCH_FIELDS, PackedBertForPreTraining
from ipu_packed_bert.model.varlen import (
    BlockRule,
    _SequenceBlocks,
    _SequenceBoundaries,
    attend_within_sequences,
)
from ipu_packed_bert.settings.config import Config
from ipu_packed_bert.settings.schema import (
    BatchConfig,
    DataConfig,
    EngineConfig,
    LossConfig,
    OptimizerConfig,
)
from pack_data.store.attention_blocks import blocks_of
from tests.graphs import count_graphs, graphs_of
from tests.packed_examples import fill_up, lay_out, random_packs, random_sequences, with_scales
from tests.pretraining import host_engine
from tests.tiny_runs import TINY
from tests.tolerances import assert_same

SLOTS = 24
DEPTH = 4
MODEL = TINY


def networks(dtype, *, kernel=False):
    """The same weights twice: a dense mask, and attention within sequences."""
    pair = []
    for attention in ("eager", "sdpa"):
        torch.manual_seed(1)
        network = PackedBertForPreTraining(MODEL, LossConfig(), attention=attention).to(dtype)
        with torch.no_grad():
            for parameter in network.parameters():
                parameter.add_(torch.randn(parameter.shape, dtype=dtype) * (0.3 if dtype == torch.float64 else 0.1))
        pair.append(network)
    attend_within_sequences(pair[1], sequences=DEPTH, kernel=kernel)
    return pair


def random_batch(seed, sequences, dtype=np.float64):
    rng = np.random.default_rng(seed)
    lengths = [int(length) for length in rng.integers(1, SLOTS + 1, sequences)]
    lengths[::2] = [1 + length // 4 for length in lengths[::2]]
    examples = random_sequences(rng, lengths=lengths, vocabulary=MODEL.vocabulary_size)
    packs = fill_up(random_packs(rng, lengths, slots=SLOTS, depth=DEPTH), 3)  # an empty pack every now and then
    batch = lay_out(packs, examples, slots=SLOTS, depth=DEPTH, predictions=4 + DEPTH)
    return packs, lengths, with_scales(batch, micro_batches=1, normalisation="token", dtype=dtype)


def gradients(network, batch):
    """Output and gradients, without those of the key biases, which are zero but for rounding."""
    network.zero_grad(set_to_none=True)
    output = network(*(torch.from_numpy(batch[name]) for name in BATCH_FIELDS))
    output.loss.backward()
    rest = [parameter.grad for name, parameter in network.named_parameters() if not name.endswith("key.bias")]
    return [torch.stack(output).detach()] + rest


@settings(max_examples=20)
@given(seed=st.integers(0, 2**32 - 1), sequences=st.integers(1, 10))
def test_blocks_are_the_dense_mask(seed, sequences):
    dense, blocks = networks(torch.float64)
    _, _, batch = random_batch(seed, sequences)
    assert_same(found=gradients(blocks, batch), expected=gradients(dense, batch), dtype=torch.float64)


@pytest.mark.parametrize("eager", [False, True])
@pytest.mark.parametrize("pays", [False, True])
def test_mask_and_blocks_are_chosen_from_and_are_the_dense_mask(eager, pays):
    dense, chosen = networks(torch.float64)
    shapes_asked = []

    def pay(*sizes):
        shapes_asked.append(sizes[1:])
        return pays

    rule = BlockRule(lambda tokens, dropout: eager, pay)
    attend_within_sequences(chosen, sequences=DEPTH, kernel=False, rule=rule)
    _, _, batch = random_batch(3, 8)
    numbers = torch.from_numpy(batch["input_mask"])
    assert isinstance(chosen.attention_mask(numbers, torch.float64), torch.Tensor) != pays
    assert_same(found=gradients(chosen, batch), expected=gradients(dense, batch), dtype=torch.float64)
    assert shapes_asked == [tuple(numbers.shape)] * 2


@pytest.mark.parametrize(("dtype", "dropout"), [(torch.float32, 0.0), (torch.float32, 0.1), (torch.bfloat16, 0.0)])
def test_the_rule_of_a_cpu_follows_lengths(dtype, dropout):
    model = replace(MODEL, hidden_size=256, num_heads=4, intermediate_size=1024, attention_dropout=dropout)
    cpu = torch.device("cpu")
    rule = block_rule(dtype, model, cpu)

    def pays(slots, *rows):
        return rule.pays(blocks_of([length for row in rows for length in row]), len(rows), slots)

    assert pays(512, [170, 172, 170], [256, 256])
    assert pays(512, *[[8] * 64] * 64)
    assert not pays(128, *[[9 + row, 17 + row, 25 + row, 77 - 3 * row] for row in range(8)])  # 32 calls, for little
    if dtype == torch.float32 and not dropout:
        assert not pays(512, [512], [512])  # as much as a mask
    assert not pays(64, *[[9 + row, 17, 38 - row] for row in range(8)])
    assert pays(64, *[[20]] * 40)  # padding, which it leaves out
    assert [rule.eager(tokens, dropout) for tokens in (64, OPERATOR_FROM)] == [
        dtype == torch.bfloat16 or dropout > 0.0,
        dropout > 0.0,
    ]
    assert not rule.eager(64, 0.0) or dtype == torch.bfloat16  # evaluation has no dropout


@pytest.mark.parametrize("kind", ["dense", "blocks", "kernel"])
def test_padding_between_sequences_changes_no_update(kind, request):
    """Each sequence begins at a multiple of 3; the same sequences without padding between them, and a dense mask."""
    if kind == "kernel":
        request.getfixturevalue("kernel")
    dense, actual = networks(torch.float64, kernel=kind == "kernel")
    actual = dense if kind == "dense" else actual
    rng = np.random.default_rng(5)
    lengths = [int(length) for length in rng.integers(1, SLOTS // 2, 9)]
    examples = random_sequences(rng, lengths=lengths, vocabulary=MODEL.vocabulary_size)
    rounded = [-(-length // 3) * 3 for length in lengths]
    packs = fill_up(random_packs(rng, rounded, slots=SLOTS, depth=DEPTH), 3)

    def batch_of(multiple_of):
        batch = lay_out(
            packs,
            examples,
            slots=SLOTS,
            depth=DEPTH,
            predictions=4 + DEPTH,
            multiple_of=multiple_of,
        )
        return with_scales(batch, micro_batches=1, normalisation="token", dtype=np.float64)

    apart = batch_of(3)
    row = apart["input_mask"][0]
    assert np.flatnonzero(row == 0)[0] < np.flatnonzero(row)[-1]  # padding between sequences
    assert_same(found=gradients(actual, apart), expected=gradients(dense, batch_of(1)), dtype=torch.float64)


def test_no_block_is_larger_than_a_sequence_and_padding_has_none(monkeypatch):
    real = F.scaled_dot_product_attention
    seen = []

    def watched(query, key, value, **options):
        assert query.shape == key.shape == value.shape
        seen.append(query.shape)
        return real(query, key, value, **options)

    monkeypatch.setattr(F, "scaled_dot_product_attention", watched)
    packs, lengths, batch = random_batch(5, 9)
    assert sum(lengths) < len(packs) * SLOTS  # there is padding
    _, blocks = networks(torch.float64)
    gradients(blocks, batch)
    actual = []
    for count, _, length, _ in seen:
        actual += [length] * count
    assert sorted(actual) == sorted(lengths * MODEL.num_layers)
    assert len(seen) == len(set(actual)) * MODEL.num_layers < len(actual)  # those of one length together


@pytest.fixture(scope="module")
def kernel():
    """torch's operator with our kernel for the CPU; the real one runs on CUDA in half types only."""
    pytest.importorskip("torch.nn.attention.varlen", reason="torch before 2.10 has no variable-length kernel")
    importlib.import_module("padding_free.varlen_on_cpu")


@settings(max_examples=15)
@given(seed=st.integers(0, 2**32 - 1), sequences=st.integers(1, 10))
def test_the_kernel_s_boundaries_are_the_dense_mask(kernel, seed, sequences):
    dense, varlen = networks(torch.float64, kernel=True)
    packs, _, batch = random_batch(seed, sequences)
    assert_same(found=gradients(varlen, batch), expected=gradients(dense, batch), dtype=torch.float64)
    boundaries = varlen.attention_mask(torch.from_numpy(batch["input_mask"]), torch.float64)
    assert len(boundaries) == len(packs) * 2 * DEPTH + 1


@pytest.mark.slow
def test_compiled_with_the_kernel_the_graphs_serve_all_boundaries(kernel, monkeypatch):
    """In bfloat16, as it runs on CUDA; without compiled kernels, which would take longer."""
    graphs = count_graphs(monkeypatch, "aot_eager")
    batches = [random_batch(seed, 6, dtype=np.float32)[2] for seed in (3, 4)]
    batches = [{name: values[:3] for name, values in batch.items()} for batch in batches]
    assert not np.array_equal(batches[0]["input_mask"], batches[1]["input_mask"])
    one_layer = replace(config(), model=replace(MODEL, num_layers=1, hidden_size=16))
    half = one_layer.changed("engine", precision="bfloat16", compile=True)
    dense = host_engine(one_layer)
    engine = host_engine(half)
    attend_within_sequences(engine.model, sequences=DEPTH, kernel=True)
    for batch in batches:
        assert engine.step(batch, 1e-3).loss == pytest.approx(dense.step(batch, 1e-3).loss, rel=3e-2)
    assert len(graphs) == graphs_of(engine.model)


def config(slots=SLOTS, **engine):
    return Config(
        data=DataConfig(max_sequence_length=slots, max_sequences_per_pack=DEPTH),
        model=MODEL,
        optimizer=OptimizerConfig(packing_adjustment="none"),
        batch=BatchConfig(micro_batch=3, gradient_accumulation=1),
        engine=EngineConfig(kind="host", **engine),
    )


BLOCKS = BlockRule(eager=lambda tokens, dropout: True, pays=lambda *sizes: True)


NUMBERS = [[1, 1, 2, 2, 2, 0], [1, 1, 1, 1, 1, 1], [0, 0, 0, 0, 0, 0], [1, 0, 2, 0, 0, 0]]


def test_boundaries_are_static_and_count_the_padding():
    found = _SequenceBoundaries(2)(torch.tensor(NUMBERS, dtype=torch.int32), torch.float32)
    assert found.tolist() == [0, 2, 2, 5, 6, 12, 12, 12, 12, 12, 18, 18, 18, 19, 20, 21, 24]
    assert found.dtype == torch.int32


def test_blocks_leave_padding_out():
    numbers = torch.tensor(NUMBERS, dtype=torch.int32)
    found = _SequenceBlocks(BLOCKS)(numbers, torch.float32)
    assert found.slots.tolist() == [0, 1, 2, 3, 4, 6, 7, 8, 9, 10, 11, 18, 20]
    assert found.blocks.groups == blocks_of([2, 3, 6, 1, 1]).groups
    full = _SequenceBlocks(BLOCKS)(numbers[1:2], torch.float32)
    assert full.slots is None
    assert full.blocks.groups == ((1, 6),)
    empty = _SequenceBlocks(BLOCKS)(numbers[2:3], torch.float32)
    assert empty.slots.tolist() == [0]
    assert empty.blocks.groups == ((1, 1),)
