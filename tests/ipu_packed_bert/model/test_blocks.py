"""The blocks of a row: every token once, short sequences of one length in one call."""

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn import functional as F

from ipu_packed_bert.model import blocks
from ipu_packed_bert.model.blocks import attend_in_blocks, blocks_of


def heads_of(tokens):
    """Query, key and value [T, N, A]."""
    draw = torch.Generator().manual_seed(0)
    return [torch.randn(tokens, 4, 8, generator=draw, dtype=torch.float64) for _ in range(3)]


def test_a_thousand_short_examples_are_not_a_thousand_calls():
    lengths = torch.randint(1, 21, (1000,), generator=torch.Generator().manual_seed(2)).tolist() + [100, 100]
    calls = []

    def attend(query, key, value):
        calls.append(query.shape)
        return value

    heads = heads_of(sum(lengths))
    found = attend_in_blocks(heads, blocks_of(lengths), attend)
    assert torch.equal(found, heads[2])  # each token is where it was
    assert len(calls) == 20 + 2 and sum(shape[0] for shape in calls) == 1002


@settings(max_examples=30)
@given(lengths=st.lists(st.integers(0, 12), min_size=1, max_size=30))
def test_blocks_hold_every_token_once(lengths):
    found = blocks_of(lengths)
    assert sorted(length for count, length in found.groups for _ in range(count)) == sorted(filter(None, lengths))
    if found.order is not None:
        assert torch.equal(found.order[found.back], torch.arange(sum(lengths)))


def test_how_long_a_group_may_be_is_no_matter(monkeypatch):
    lengths = [5, 2, 9, 5, 2, 5]
    heads = heads_of(28)
    found = []
    for together in (0, 4, 64):
        monkeypatch.setattr(blocks, "MAX_GROUPED_TOKENS", together)
        arranged = blocks_of(lengths)
        assert len(arranged.groups) == {0: 6, 4: 5, 64: 3}[together]
        found.append(attend_in_blocks(heads, arranged, F.scaled_dot_product_attention))
    assert torch.allclose(found[0], found[1], atol=1e-12) and torch.allclose(found[0], found[2], atol=1e-12)
