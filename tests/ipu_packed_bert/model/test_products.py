"""The packed parts written as products: equal to the plain ones, exact in every type."""

import numpy as np
import pytest
import torch

from ipu_packed_bert.model.packed import BATCH_FIELDS, GatherSlots
from ipu_packed_bert.model.products import OneHotSlots, _SequenceCodes, mask_in_product
from ipu_packed_bert.settings.config import Config
from ipu_packed_bert.settings.schema import (
    ModelConfig,
    mask_columns,
)
from tests.packed_examples import lay_out, random_packs, random_sequences, with_scales
from tests.pretraining import initial_network
from tests.tolerances import relative_error

SLOTS = 32
VOCABULARY = 61
HIDDEN = -1024.0


CONFIG = Config(
    model=ModelConfig(
        vocabulary_size=VOCABULARY,
        hidden_size=32,
        num_layers=2,
        num_heads=4,
        intermediate_size=48,
        max_position_embeddings=SLOTS,
        hidden_dropout=0.0,
        initializer_range=0.4,
    )
)


def network_of(depth):
    """Return a float64 network with the mask as a product; 0: with the additive mask."""
    network = initial_network(CONFIG).double()
    if depth:
        mask_in_product(network, sequences=depth, columns=mask_columns(CONFIG.model, depth))
    return network


def fields_of(depth, *, seed=0, rows=6):
    """Mixed packs of up to `depth` sequences and padding, one of them full, one empty."""
    rng = np.random.default_rng([seed, depth])
    longest = max(2, 2 * SLOTS // (depth + 1))
    lengths = [
        *rng.integers(1, longest, rows * depth).tolist(),
        SLOTS,
    ]
    packs = random_packs(rng, lengths, slots=SLOTS, depth=depth)[: rows - 2]
    packs += [[len(lengths) - 1], []]
    examples = random_sequences(rng, lengths=lengths, vocabulary=VOCABULARY)
    batch = lay_out(packs, examples, slots=SLOTS, depth=depth, predictions=SLOTS)
    batch = with_scales(batch, micro_batches=1, normalisation="token")
    return {name: torch.from_numpy(batch[name]) for name in BATCH_FIELDS}


@pytest.mark.parametrize("depth", [1, 3, 7, 16])
def test_losses_and_gradients_are_those_of_the_additive_mask(depth):
    """float64, 1e-12; with weights far from the initial ones, so that scores differ by tens."""
    fields = fields_of(depth)
    assert fields["input_mask"].unique().tolist() == list(range(depth + 1))
    outputs = []
    gradients = []
    for network in (network_of(0), network_of(depth)):
        output = network(*fields.values())
        output.loss.backward()
        outputs.append([value.item() for value in output])
        parameters = network.named_parameters()
        gradients.append([item.grad for name, item in parameters if not name.endswith("key.bias")])
    assert outputs[1] == pytest.approx(outputs[0], rel=1e-12, abs=1e-12)
    assert relative_error(*gradients) <= 1e-12


def test_a_control_without_codes():
    """All codes zero, so that everybody sees everybody: the losses differ by far more than any tolerance."""
    fields = fields_of(3)
    blind = network_of(3)
    blind.attention_mask.codes.zero_()
    expected = network_of(0)(*fields.values()).loss
    actual = blind(*fields.values()).loss
    assert abs(actual / expected - 1.0).item() > 1e-3


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_one_hot_slots_gather(dtype):
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(3, SLOTS, 8, generator=generator, dtype=dtype)
    slots = torch.randint(0, SLOTS, (3, 5), generator=generator, dtype=torch.int32)
    assert torch.equal(
        OneHotSlots(SLOTS)(hidden, slots),
        GatherSlots()(hidden, slots),
    )


@pytest.mark.parametrize(
    "dtype",
    [torch.float16, torch.bfloat16, torch.float32, torch.float64],
)
@pytest.mark.parametrize(
    "sequences",
    [1, 2, 3, 4, 15, 16, 255],
)
def test_products_of_codes_are_exactly_zero_or_multiples_of_1024(sequences, dtype):
    """-1024 for each binary digit in which two numbers differ; the codes themselves are exact in every type."""
    numbers = torch.arange(sequences + 1, dtype=torch.int32)
    # CPU products of half numbers are not in every torch: the codes are looked up in float32, where each sum has one
    # term.
    columns = 2 * sequences.bit_length() + 3
    codes = _SequenceCodes(sequences, columns)(numbers[None], torch.float32)[0]
    assert codes.shape[-1] == columns
    assert torch.equal(codes.to(dtype).float(), codes)
    assert set(codes.abs().unique().tolist()) == {0.0, 32.0}
    product = codes[0].double() @ codes[1].double().T
    for number in range(sequences + 1):
        digits = [bin(number ^ other).count("1") for other in range(sequences + 1)]
        assert product[number].tolist() == [HIDDEN * differing for differing in digits]
    assert torch.equal(product.to(dtype).double(), product)


def half_sums(terms, order):
    """Sums over the last axis, one after the other in `order`, each partial sum rounded to float16."""
    total = np.zeros(terms.shape[:-1], dtype=np.float16)
    for index in order:
        total = (total + terms[..., index]).astype(np.float16)
    return total


@pytest.mark.parametrize("seed", range(2))
def test_half_partials_in_any_order_leave_the_scores_of_a_sequence_as_they_are(seed):
    """The worst accumulator: every partial sum in float16, the code's terms anywhere between those of the head.

    Within a sequence the sum is bit for bit what it is without codes, since each added term is 0.  Between two
    sequences soft-max gives exactly 0, as for the additive mask.
    """
    rng = np.random.default_rng(seed)
    width = 64
    depth = 7
    numbers = fields_of(depth, seed=seed)["input_mask"][:2]
    codes = _SequenceCodes(depth, 16)(numbers, torch.float32).numpy().astype(np.float16)
    query, key = rng.normal(0.0, 2.0, (2, 2, SLOTS, width)).astype(np.float16)

    def terms(left, right):
        product = left[:, :, None, :].astype(np.float32) * right[:, None, :, :]
        return product.astype(np.float16)

    head = terms(query, key)
    mask = terms(
        codes[:, 0],
        codes[:, 1],
    )
    order = rng.permutation(width + mask.shape[-1])
    with_codes = half_sums(np.concatenate((head, mask), axis=-1), order)
    without = half_sums(head, [index for index in order if index < width])
    same = (numbers.unsqueeze(2) == numbers.unsqueeze(1)).numpy()
    assert 0 < same.sum() < same.size
    assert np.abs(without).max() > 20
    assert (with_codes[same].view(np.uint16) == without[same].view(np.uint16)).all()
    seen = np.where(same, with_codes, -np.inf)
    largest = seen.max(axis=-1, keepdims=True)
    weights = np.exp((with_codes - largest).astype(np.float32))
    assert (weights[~same] == 0.0).all()


def test_gradients_of_the_codes_columns_stay_as_small_as_the_others():
    """They are computed and thrown away; were they large, they could overflow float16 and be counted as loss scaling
    gone wrong."""
    fields = fields_of(3)
    network = network_of(3)
    seen = []

    def watch(module, inputs, output):
        query, _, codes = inputs
        output.register_hook(lambda gradient: seen.append((gradient, query.detach(), codes)))

    network.bert.encoder.layer[0].attention.self.scores.register_forward_hook(watch)
    network(*fields.values()).loss.backward()
    ((gradient, query, codes),) = seen
    turned = gradient.transpose(2, 3)
    query_codes = codes[:, 0].unsqueeze(1)
    of_codes = torch.matmul(turned, query_codes).abs().max()
    of_key = torch.matmul(turned, query).abs().max()
    largest = float(query.abs().max())
    assert 0 < of_codes < 32 * max(1.0, 1.0 / largest) * of_key


def test_columns():
    """2 columns for each digit; 64 + 2 x 2 = 68 -> 80; 16 columns are enough for 255 sequences."""
    for depth, head, columns in (
        (1, 64, 16),
        (255, 64, 16),
        (256, 64, 32),
        (3, 8, 8),
        (3, 12, 4),
        (3, 13, 19),
    ):
        model = ModelConfig(hidden_size=2 * head, num_heads=2)
        assert mask_columns(model, depth) == columns
        assert (head + columns) % 16 == 0
