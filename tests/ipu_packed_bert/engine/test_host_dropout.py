"""Dropout masks of random words: the law of dropout, one mask for forward and backward, independent streams."""

import numpy as np
import pytest
import torch
from torch import nn

from ipu_packed_bert.engine.host.dropout import CheapDropout

VALUES = 1 << 20


def dropped(layer, values):
    """The factors of the layer, which the backward pass must repeat."""
    values.grad = None
    output = layer(values)
    output.backward(torch.ones_like(output))
    assert torch.equal(output, values * values.grad)
    return values.grad


@pytest.mark.parametrize("rate", [0.1, 0.5, 0.9])
def test_masks_follow_the_law_of_dropout(rate):
    network = nn.Sequential(nn.Dropout(rate), nn.Dropout(rate))
    dropout = CheapDropout(network)
    values = torch.randn(2, VALUES // 2 - 1, requires_grad=True)
    masks = []
    for micro_batch in (1, 2):
        dropout.seed([3, 2, 0, micro_batch])
        masks += [dropped(layer, values) for layer in network]
        assert torch.equal(masks[-1], dropped(network[1], values))  # computed again
    for mask in masks:
        kept = np.unique(mask.numpy())
        assert len(kept) == 2 and kept[0] == 0.0 and kept[1] == pytest.approx(1.0 / (1.0 - rate), rel=1e-4)
        # Six standard deviations of the share of dropped values, and of pairs of neighbours.
        deviation = (rate * (1.0 - rate) / VALUES) ** 0.5
        zeros = (mask == 0.0).double()
        assert abs(float(zeros.mean()) - rate) < 6.0 * deviation + 1e-5
        for lag in (1, 2, 4, 256):
            pairs = zeros[:, lag:] * zeros[:, :-lag]
            assert abs(float(pairs.mean()) - rate**2) < 6.0 * (rate**2 * (1.0 - rate**2) / VALUES) ** 0.5 * 1.5 + 1e-5
    correlations = np.corrcoef([mask.flatten().numpy() for mask in masks]) - np.eye(len(masks))
    assert np.abs(correlations).max() < 6.0 / VALUES**0.5


def test_no_values_are_dropped_in_evaluation_or_at_rate_zero():
    values = torch.randn(5, 3)
    for layer in (nn.Dropout(0.5).eval(), nn.Dropout(0.0)):
        CheapDropout(layer).seed([1])
        assert torch.equal(layer(values), values)
