"""Calls of the network and its optimiser that are refused in one line."""

# ruff: noqa: F401  The calls are texts, whose names ruff does not see.
import torch

from ipu_packed_bert.model.optimizer import build_optimizer, load_neutral_state, neutral_state
from ipu_packed_bert.model.packed import PackedBertForPreTraining
from ipu_packed_bert.model.products import _SequenceCodes
from ipu_packed_bert.settings.schema import LossConfig, OptimizerConfig
from tests.refusals import faults_of_refusals
from tests.tiny_runs import TINY

NETWORK = PackedBertForPreTraining(TINY, LossConfig())
OPTIMIZER = build_optimizer(NETWORK, OptimizerConfig(), betas=(0.9, 0.999))
BIAS = "cls.predictions.bias"


def moments(**changes):
    """Return a state of the optimiser with another first moment of one bias; None: without it."""
    state = neutral_state(OPTIMIZER, NETWORK)
    state["exp_avg"].update({BIAS: changes["bias"]})
    if changes["bias"] is None:
        del state["exp_avg"][BIAS]
    return state


REFUSED = [
    ("PackedBertForPreTraining(TINY, LossConfig(), attention='flash')", ["attention", "flash", "eager, sdpa"]),
    ("_SequenceCodes(4, 4)", ["4", "6"]),
    (
        "load_neutral_state(OPTIMIZER, NETWORK, moments(bias=torch.zeros(21)))",
        ["exp_avg", BIAS, "(21,)", f"({TINY.vocabulary_size},)"],
    ),
    ("load_neutral_state(OPTIMIZER, NETWORK, moments(bias=None))", ["exp_avg", BIAS, "None"]),
]


def test_calls_are_refused():
    faults = faults_of_refusals(REFUSED, globals())
    assert not faults, "\n".join(faults)
