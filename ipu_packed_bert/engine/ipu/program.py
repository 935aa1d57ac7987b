"""What PopTorch compiles: the plain network with what the device needs differently, and where its blocks begin."""

from __future__ import annotations

from typing import Tuple

import torch
from torch import nn

from ipu_packed_bert.config import Config
from ipu_packed_bert.engine.base import build_model
from ipu_packed_bert.engine.ipu.sdk import poptorch
from ipu_packed_bert.model.packed import PackedBertForPreTraining
from ipu_packed_bert.model.products import OneHotSlots, mask_in_product
from ipu_packed_bert.placement import Placement, place


class SerialisedProduct(nn.Module):
    """As `model.bert.VocabularyProduct`, in `factor` parts of the vocabulary, one after the other in the same memory."""

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


def checkpoint(module: nn.Module, inputs: Tuple, output: torch.Tensor) -> torch.Tensor:
    """Forward hook: keep this output, recompute what led to it when gradients need it."""
    return poptorch.recomputationCheckpoint(output)


def adapt(network: PackedBertForPreTraining, config: Config, *, depth: int) -> None:
    """Put into a network what the device needs differently, in place; names, shapes and values of its weights stay.

    depth: sequences that a pack of the data set has room for; where the configuration leaves it open, only the data set
    knows it.
    """
    if config.engine.mask == "product":
        mask_in_product(network, sequences=depth, columns=config.mask_columns(depth))
    slots = config.data.max_sequence_length
    network.masked_lm_slots = OneHotSlots(slots)
    network.next_sentence_slots = OneHotSlots(slots)
    if config.placement.embedding_serialization_factor > 1:
        network.cls.predictions.product = SerialisedProduct(config.placement.embedding_serialization_factor)
    if config.engine.recompute_layers:
        for layer in network.bert.encoder.layer:
            layer.register_forward_hook(checkpoint)


def begin_blocks(network: PackedBertForPreTraining, placement: Placement) -> None:
    """Mark in a network where the blocks of `placement` begin, in place."""
    for block in placement.blocks:
        poptorch.BeginBlock(network.get_submodule(block.module), block.name, ipu_id=block.ipu)


class Program(nn.Module):
    """What PopTorch compiles: the network, with its loss named as the one that gradients come from."""

    def __init__(self, network: PackedBertForPreTraining):
        super().__init__()
        self.network = network

    def forward(self, *fields) -> Tuple[torch.Tensor, ...]:
        """The fields of `BATCH_FIELDS` of a micro-batch, in their order."""
        output = self.network(*fields)
        # The loss is a sum of two, so it must be named; it is a scalar already.
        loss = poptorch.identity_loss(output.loss, reduction="none")
        return loss, output.mlm_loss, output.nsp_loss, output.mlm_correct, output.nsp_correct


def build_program(config: Config, *, depth: int) -> Program:
    """The network as PopTorch gets it, with its initial weights; `depth` as in :func:`adapt`."""
    network = build_model(config, attention="eager")
    adapt(network, config, depth=depth)
    begin_blocks(network, place(config))
    if config.engine.half_weights:
        network.half()
    return Program(network)
