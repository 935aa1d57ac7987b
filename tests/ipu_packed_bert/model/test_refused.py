"""Calls of the network and its optimiser that are refused in one line."""

# ruff: noqa: F401  The calls are texts, whose names ruff does not see.
import torch

from ipu_packed_bert.model.optimizer import build_optimizer, neutral_state, refuse_other_state
from ipu_packed_bert.model.packed import PackedBertForPreTraining
from ipu_packed_bert.model.products import _SequenceCodes
from ipu_packed_bert.settings.schema import LossConfig, OptimizerConfig
from tests.refusals import faults_of_refusals, rows_of
from tests.tiny_runs import TINY

NETWORK = PackedBertForPreTraining(TINY, LossConfig())
WEIGHTS = NETWORK.state_dict()
OPTIMIZER = build_optimizer(NETWORK, OptimizerConfig(), betas=(0.9, 0.999))
BIAS = "cls.predictions.bias"


def with_moment(moment):
    """Return a state of an engine with another first moment of one bias; None: without it."""
    state = {"model": WEIGHTS, "optimizer": neutral_state(OPTIMIZER, NETWORK)}
    state["optimizer"]["exp_avg"][BIAS] = moment
    if moment is None:
        del state["optimizer"]["exp_avg"][BIAS]
    return state


REFUSED = [
    *rows_of(
        """
PackedBertForPreTraining(TINY, LossConfig(), attention='flash') => attention | flash | eager, sdpa
_SequenceCodes(4, 4) => 4 | 6
"""
    ),
    (
        "refuse_other_state(with_moment(torch.zeros(21)), WEIGHTS)",
        ["exp_avg", BIAS, "(21,)", f"({TINY.vocabulary_size},)"],
    ),
    ("refuse_other_state(with_moment(None), WEIGHTS)", ["exp_avg", BIAS, "None"]),
]


def test_calls_are_refused():
    faults = faults_of_refusals(REFUSED, globals())
    assert not faults, "\n".join(faults)
