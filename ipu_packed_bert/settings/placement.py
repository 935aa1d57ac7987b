"""The placement of the network's blocks on the IPUs of a replica, as data; an engine applies it to the model.

The embeddings are on the first IPU; the encoder's layers follow `placement.layers_per_ipu`.  Pre-training's heads are
on the first IPU too, because the vocabulary projection uses the embedding table and tied weights must not be on two
IPUs; the heads of other tasks are on the IPU of the last layer.  A pipeline stage is a run of blocks on one IPU, so
four IPUs have five forward stages in pre-training (0, 1, 2, 3 and 0 again) and nine with the backward pass, in
fine-tuning four and seven: every stage except the last also runs backwards.
"""

from __future__ import annotations

from itertools import groupby
from typing import NamedTuple, Sequence, Tuple

from ipu_packed_bert.settings.schema import PlacementConfig


class PlacedPart(NamedTuple):
    """A part of a network that a placement moves as a whole."""

    name: str
    module: str  # path inside the network
    with_table: bool = False  # on the first IPU, with the embedding table, not with the last layer


class Block(NamedTuple):
    """A part of the network: all operators from the first of `module` to the next block run on `ipu`."""

    name: str
    module: str  # path inside the network
    ipu: int


class _Stage(NamedTuple):
    """Blocks that follow one another on one IPU."""

    ipu: int
    blocks: Tuple[Block, ...]


class Placement(NamedTuple):
    """One replica: its blocks in the order of the forward pass."""

    blocks: Tuple[Block, ...]
    ipus: int

    @property
    def stages(self) -> Tuple[_Stage, ...]:
        """Stages of the forward pass."""
        by_ipu = groupby(self.blocks, key=lambda block: block.ipu)
        return tuple(_Stage(ipu, tuple(blocks)) for ipu, blocks in by_ipu)

    def on(self, ipu: int) -> Tuple[Block, ...]:
        """Return the blocks of an IPU."""
        return tuple(block for block in self.blocks if block.ipu == ipu)


def pretraining_heads(*, next_sentence: bool) -> Tuple[PlacedPart, ...]:
    """Return the modules after the last layer in pre-training.

    Args:
        next_sentence: the network predicts the next sentence, as `loss.next_sentence` says.
    """
    parts = [("MLM head", "cls.predictions")]
    if next_sentence:
        parts += [("pooler", "bert.pooler"), ("NSP head", "cls.seq_relationship")]
    return tuple(PlacedPart(name, module, with_table=True) for name, module in parts)


def place(placement: PlacementConfig, heads: Sequence[PlacedPart]) -> Placement:
    """Return the placement of a network's blocks.

    Args:
        placement: the checked section `placement`.
        heads: parts of the task's network after the encoder.
    """
    blocks = [Block("embeddings", "bert.embeddings", 0)]
    layer = 0
    last = 0  # IPU of the last layer
    for ipu, layers in enumerate(placement.layers_per_ipu):
        for _ in range(layers):
            blocks.append(Block(f"layer {layer}", f"bert.encoder.layer.{layer}", ipu))
            layer += 1
            last = ipu
    for head in heads:
        blocks.append(Block(head.name, head.module, 0 if head.with_table else last))
    return Placement(tuple(blocks), placement.ipus_per_replica)
