"""The modules that PopTorch compiles: the plain network, adapted to the device and divided into blocks."""

from __future__ import annotations

from typing import Any, Tuple

import torch
from torch import nn

from ipu_packed_bert.engine.base import build_network
from ipu_packed_bert.engine.ipu.devices import poptorch
from ipu_packed_bert.model.bert import VocabularyProduct
from ipu_packed_bert.model.loss import PretrainingLoss
from ipu_packed_bert.model.packed import GatherSlots, PackedBert
from ipu_packed_bert.model.products import OneHotSlots, mask_in_product
from ipu_packed_bert.settings.config import Config
from ipu_packed_bert.settings.placement import Placement
from ipu_packed_bert.settings.schema import mask_columns
from ipu_packed_bert.tasks.task import Task


class _SerialisedProduct(nn.Module):
    """`model.bert.VocabularyProduct`, computed in `factor` parts of the vocabulary that share memory."""

    def __init__(self, factor: int):
        super().__init__()
        self.factor = factor

    def forward(self, hidden_BPH, table_VH, bias_V) -> torch.Tensor:
        rows, slots, hidden = hidden_BPH.shape
        product = poptorch.serializedMatMul(
            hidden_BPH.reshape(rows * slots, hidden),
            table_VH.t(),
            poptorch.MatMulSerializationMode.OutputChannels,
            self.factor,
        )
        return (product + bias_V).view(rows, slots, table_VH.shape[0])


def _checkpoint(module: nn.Module, inputs: Tuple, output: torch.Tensor) -> torch.Tensor:
    """Keep this output, so that gradients recompute only what follows it (a forward hook)."""
    return poptorch.recomputationCheckpoint(output)


def _adapt(network: PackedBert, config: Config, task: Task) -> None:
    """Replace modules that the device needs in another form, in place; weights keep names, shapes and values."""
    if config.engine.mask == "product":
        depth = task.max_sequences_per_pack
        assert depth is not None  # known once the data set is open
        mask_in_product(network, sequences=depth, columns=mask_columns(task.model, depth))
    for module in network.modules():
        if isinstance(module, PretrainingLoss):
            module.widen_logits = not config.engine.half_logits
    factor = config.placement.embedding_serialization_factor
    for module in list(network.modules()):
        for name, child in module.named_children():
            if isinstance(child, GatherSlots):
                setattr(module, name, OneHotSlots(task.max_sequence_length))
            elif isinstance(child, VocabularyProduct) and factor > 1:
                setattr(module, name, _SerialisedProduct(factor))
    if config.engine.recomputes(ipus=True):
        layers: Any = network.bert.encoder.layer
        for layer in layers:
            layer.register_forward_hook(_checkpoint)


def _begin_blocks(network: PackedBert, placement: Placement) -> None:
    """Mark the modules with which the blocks of a placement begin, in place."""
    for block in placement.blocks:
        poptorch.BeginBlock(network.get_submodule(block.module), block.name, ipu_id=block.ipu)


class Program(nn.Module):
    """The module for training and evaluation: the network, with its loss marked as the source of gradients."""

    def __init__(self, network: PackedBert):
        super().__init__()
        self.network = network

    def forward(self, *fields) -> Tuple[torch.Tensor, ...]:
        """Compute the task's outputs from its fields of a micro-batch, in order."""
        loss, *sums = self.network(*fields)
        # PopTorch must know the loss, which may be a sum; it is a scalar already.
        return (poptorch.identity_loss(loss, reduction="none"), *sums)


class Predictions(nn.Module):
    """The module for prediction: the network of a task without its loss."""

    def __init__(self, network: PackedBert):
        super().__init__()
        self.network = network

    def forward(self, *fields) -> torch.Tensor:
        """Compute the predictions of each row from the task's `prediction_fields` of a micro-batch, in order."""
        network: Any = self.network
        return network.predictions(*fields)


def build_program(config: Config, task: Task, placement: Placement) -> Program:
    """Build the network for PopTorch with its initial weights."""
    network = build_network(task, config.run.seed, attention="eager")
    _adapt(network, config, task)
    _begin_blocks(network, placement)
    if config.engine.half_weights:
        network.half()
    return Program(network)
