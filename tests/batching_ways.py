"""Lengths, and all nine ways to make batches of them."""

import numpy as np
import pytest

from pack_data.batching.plans import WAYS

MSL = 32


every_way = pytest.mark.parametrize("way", WAYS.values(), ids=list(WAYS))


def drawn(count, seed=0, longest=MSL):
    return np.random.default_rng(seed).integers(1, longest + 1, count)


def batches(plan):
    return [plan.batch(step, rank) for step in range(plan.steps) for rank in range(plan.ranks)]
