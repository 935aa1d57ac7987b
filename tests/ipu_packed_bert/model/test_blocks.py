"""The blocks of a row: every token once, short sequences of one length in one call."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn import functional as F

from ipu_packed_bert.model import blocks as of_model
from pack_data.store import attention_blocks
from pack_data.store.attention_blocks import blocks_of
from padding_free import blocks as of_padding_free

both = pytest.mark.parametrize("blocks", [of_model, of_padding_free], ids=["model", "padding_free"])


def heads_of(tokens):
    """Query, key and value [T, N, A]."""
    draw = torch.Generator().manual_seed(0)
    return [torch.randn(tokens, 4, 8, generator=draw, dtype=torch.float64) for _ in range(3)]


@both
def test_a_thousand_short_examples_are_not_a_thousand_calls(blocks):
    lengths = torch.randint(1, 21, (1000,), generator=torch.Generator().manual_seed(2)).tolist() + [100, 100]
    calls = []

    def attend(query, key, value):
        calls.append(query.shape)
        return value

    heads = heads_of(sum(lengths))
    actual = blocks.attend_in_blocks(heads, blocks.blocks_on(lengths), attend)
    assert torch.equal(actual, heads[2])  # each token is where it was
    assert len(calls) == 20 + 2
    assert sum(shape[0] for shape in calls) == 1002


@settings(max_examples=30)
@given(lengths=st.lists(st.integers(0, 12), min_size=1, max_size=30))
def test_blocks_hold_every_token_once(lengths):
    actual = blocks_of(lengths)
    assert sorted(length for count, length in actual.groups for _ in range(count)) == sorted(filter(None, lengths))
    if actual.order is not None:
        assert (actual.order[actual.back] == np.arange(sum(lengths))).all()


@both
def test_how_long_a_group_may_be_is_no_matter(blocks, monkeypatch):
    lengths = [5, 2, 9, 5, 2, 5]
    heads = heads_of(28)
    actual = []
    for together in (0, 4, 64):
        monkeypatch.setattr(attention_blocks, "MAX_GROUPED_TOKENS", together)
        arranged = blocks.blocks_on(lengths)
        assert len(arranged.groups) == {0: 6, 4: 5, 64: 3}[together]
        actual.append(blocks.attend_in_blocks(heads, arranged, F.scaled_dot_product_attention))
    assert torch.allclose(actual[0], actual[1], atol=1e-12)
    assert torch.allclose(actual[0], actual[2], atol=1e-12)
