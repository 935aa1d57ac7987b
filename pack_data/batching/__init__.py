"""Batches of examples of different lengths: which examples share a batch (plans), its arrays (collators)."""

from pack_data.batching.collators import padded_batch, padding_free_batch
from pack_data.batching.plans import WAYS, BatchOptions, EpochPlan, Way, get_way
from pack_data.batching.sampler import IndexBatchSampler, MicroBatchSampler

__all__ = [
    "BatchOptions",
    "EpochPlan",
    "IndexBatchSampler",
    "MicroBatchSampler",
    "WAYS",
    "Way",
    "get_way",
    "padded_batch",
    "padding_free_batch",
]
