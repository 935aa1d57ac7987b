"""Batches of examples of different lengths: which examples share a batch (plans), its arrays (collators), its cost."""

from pack_data.batching.collators import padded_batch, padding_free_batch
from pack_data.batching.plans import WAYS, BatchOptions, EpochPlan, Way, get_way
from pack_data.batching.properties import WayReport, report
from pack_data.batching.sampler import IndexBatchSampler, MicroBatchSampler

__all__ = [
    "BatchOptions",
    "EpochPlan",
    "IndexBatchSampler",
    "MicroBatchSampler",
    "WAYS",
    "Way",
    "WayReport",
    "get_way",
    "padded_batch",
    "padding_free_batch",
    "report",
]
