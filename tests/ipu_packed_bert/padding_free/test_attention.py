"""Our attention: each example of a row by itself, whatever the layer asks for, equal to the formula; else refused."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("transformers", minversion="4.57", reason="for models of Transformers 4.57 and newer")

from ipu_packed_bert.padding_free import attention  # noqa: E402
from ipu_packed_bert.padding_free.attention import Settings, attend_row, padding_free_attention  # noqa: E402
from tests.refusals import refused

HEADS, WIDTH = 4, 8


def heads_of(tokens, key_heads=HEADS, seed=0):
    draw = torch.Generator().manual_seed(seed)
    sizes = (HEADS, key_heads, key_heads)
    return [torch.randn(1, heads, tokens, WIDTH, generator=draw, dtype=torch.float64) for heads in sizes]


def boundaries_of(lengths):
    return torch.tensor([0, *lengths]).cumsum(0).int()


def by_the_formula(query, key, value, lengths, wanted, chunk=None, bias=None):
    """The softmax over a dense mask of the whole row."""
    tokens = query.shape[2]
    number = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))
    place = torch.cat([torch.arange(length) for length in lengths])
    seen = number[:, None] == number
    behind = place[:, None] - place
    seen &= behind >= 0 if wanted.causal else behind < tokens
    if wanted.window is not None:
        seen &= behind < wanted.window
    if chunk is not None:
        seen &= (place // chunk)[:, None] == place // chunk
    key, value = (each.repeat_interleave(HEADS // each.shape[1], dim=1) for each in (key, value))
    scores = query @ key.transpose(2, 3) * (WIDTH**-0.5 if wanted.scale is None else wanted.scale)
    if wanted.softcap is not None:
        scores = wanted.softcap * torch.tanh(scores / wanted.softcap)
    if bias is not None:
        scores = scores + bias
    scores = scores.masked_fill(~seen, -torch.inf)
    if wanted.sinks is not None:
        scores = torch.cat([scores, wanted.sinks.view(1, -1, 1, 1).expand(1, -1, tokens, 1)], dim=3)
    return (torch.softmax(scores, dim=3)[..., :tokens] @ value).transpose(1, 2)


SINKS = torch.linspace(-1, 2, HEADS, dtype=torch.float64)
LAYERS = {
    "plain": (Settings(), {}),
    "scale": (Settings(scale=0.7), {}),
    "both ways": (Settings(causal=False), {}),
    "window": (Settings(window=3), {}),
    "soft cap": (Settings(softcap=0.5), {}),
    "sinks": (Settings(sinks=SINKS), {}),
    "window, soft cap and sinks": (Settings(window=2, softcap=1.5, sinks=SINKS), {}),
    "chunk": (Settings(), {"chunk": 4}),
}


@pytest.mark.parametrize("layer", LAYERS)
@pytest.mark.parametrize("key_heads", [HEADS, 2, 1])
@settings(max_examples=8)
@given(lengths=st.lists(st.integers(1, 9), min_size=1, max_size=9), seed=st.integers(0, 99))
def test_each_example_by_itself(layer, key_heads, lengths, seed):
    wanted, more = LAYERS[layer]
    heads = heads_of(sum(lengths), key_heads, seed)
    found = attend_row(*heads, boundaries_of(lengths), wanted, **more)
    assert torch.allclose(found, by_the_formula(*heads, lengths, wanted, **more), rtol=0, atol=1e-12)


@pytest.mark.parametrize("layer", ["plain", "window, soft cap and sinks", "chunk"])
def test_gradients_are_those_of_the_formula(layer):
    wanted, more = LAYERS[layer]
    lengths = [5, 2, 2, 9, 1, 5]
    weights = torch.arange(24, dtype=torch.float64)[:, None, None]
    gradients = []
    for call in (
        lambda *heads: attend_row(*heads, boundaries_of(lengths), wanted, **more),
        lambda *heads: by_the_formula(*heads, lengths, wanted, **more),
    ):
        heads = [each.requires_grad_() for each in heads_of(24, 2)]
        gradients.append(torch.autograd.grad((call(*heads) * weights).square().sum(), heads))
    for one, other in zip(*gradients):
        assert torch.allclose(one, other, rtol=1e-10, atol=1e-10 * float(other.abs().max()))


@pytest.mark.parametrize("window", [None, 100, 128, 200])
def test_long_examples_are_cut_into_pieces_of_a_window(window):
    lengths, wanted = [300, 7, 129, 300], Settings(window=window)
    heads = heads_of(sum(lengths), 2)
    expected = by_the_formula(*heads, lengths, wanted)
    assert torch.allclose(attend_row(*heads, boundaries_of(lengths), wanted), expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize("shape", [(1, HEADS, 1, 17), (1, 1, 17, 17), (1, HEADS, 17, 17)])
@pytest.mark.parametrize("window", [None, 3])
def test_a_bias_of_the_positions_is_added(shape, window):
    lengths, wanted = [4, 6, 6, 1], Settings(window=window)
    heads, bias = heads_of(17, 2), torch.randn(shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    expected = by_the_formula(*heads, lengths, wanted, bias=bias)
    assert torch.allclose(attend_row(*heads, boundaries_of(lengths), wanted, bias=bias), expected, rtol=0, atol=1e-12)


def test_dropout_is_applied_within_each_example():
    """Its mean over draws is the context without it."""
    lengths, heads = [6, 3, 6], heads_of(15)
    torch.manual_seed(0)
    for wanted in (Settings(dropout=0.4), Settings(dropout=0.4, softcap=2.0)):
        draws = torch.stack([attend_row(*heads, boundaries_of(lengths), wanted) for _ in range(600)])
        expected = attend_row(*heads, boundaries_of(lengths), wanted._replace(dropout=0.0))
        assert float((draws.mean(0) - expected).abs().max()) < 0.3 and float(draws.std(0).mean()) > 0.1


# ---- what a model hands over

LAYER = SimpleNamespace(is_causal=True)


def test_boundaries_of_another_row_are_refused():
    heads = heads_of(10)
    with refused("must rise from 0 to 10"):
        padding_free_attention(LAYER, *heads, cu_seq_lens_q=boundaries_of([3, 4]))
    with pytest.raises(ValueError, match="same boundaries for both"):
        padding_free_attention(LAYER, *heads, cu_seq_lens_q=boundaries_of([3, 7]), cu_seq_lens_k=boundaries_of([4, 6]))


@pytest.mark.parametrize(
    "given_, match",
    [
        ({"block_indices": torch.zeros(1)}, "block_indices"),
        ({"attention_mask": torch.ones(1, 1, 10, 10, dtype=torch.bool)}, "use_cache=False"),
        ({"sliding_window": 4, "is_causal": False}, "window on both sides"),
    ],
)
def test_what_it_does_not_compute_is_refused(given_, match):
    with refused(match):
        padding_free_attention(LAYER, *heads_of(10), cu_seq_lens_q=boundaries_of([3, 7]), **given_)


def test_boundaries_that_change_in_place_are_read_again():
    heads, boundaries = heads_of(10), boundaries_of([3, 7])
    for lengths in ([3, 7], [6, 4]):
        boundaries.copy_(boundaries_of(lengths))
        found, _ = padding_free_attention(LAYER, *heads, cu_seq_lens_q=boundaries)
        assert torch.allclose(found, by_the_formula(*heads, lengths, Settings()), rtol=0, atol=1e-12)


def test_the_kernel_gets_what_the_layer_asks_for(monkeypatch):
    """On CUDA in half precision.  The kernel itself is torch's."""
    calls = []

    def kernel(query, key, value, *boundaries, **options):
        calls.append((query.shape, key.shape, boundaries, options))
        return query

    monkeypatch.setattr(attention, "_kernel", lambda query, value, wanted: kernel)
    query, key, value = heads_of(10, 2)
    starts = boundaries_of([3, 7])
    found = attend_row(query, key, value, starts, Settings(scale=0.3, window=4), longest=7)
    assert torch.equal(found, query.transpose(1, 2))
    (shape, key_shape, (first, second, *most), options) = calls[0]
    assert shape == (10, HEADS, WIDTH) and key_shape == (10, 2, WIDTH) and most == [7, 7]
    assert first is second is starts
    assert options == {"scale": 0.3, "window_size": (3, 0), "enable_gqa": True}
    attend_row(*heads_of(10), starts, Settings(), chunk=4)  # which the kernel has not
    assert len(calls) == 1
