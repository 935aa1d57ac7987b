"""Memory of each IPU of a replica, counted from the network's sizes and its placement.

The count includes weights, gradient accumulators, optimiser state on the chip, activations, and the temporary values of
the largest product as the cycle model plans it. It excludes the program and its exchange.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from typing import List, NamedTuple, Optional, Tuple

from ipu_packed_bert.settings.config import Config
from ipu_packed_bert.settings.placement import Block, Placement, place, pretraining_heads
from ipu_packed_bert.settings.schema import ModelConfig, mask_columns
from ipu_profiling.cycles.matmul import Planner, Product
from ipu_profiling.cycles.target import MK2
from pack_data.display.facts import number

IPU_BYTES = MK2.memory_per_tile * MK2.tiles
# The largest counted share of an IPU's memory in a published run: MLPerf v2.0's BERT-large on a Bow Pod64 (E4 of
# cycles/points.json). Code and exchange, which are not counted, are known to fit into the rest.
FULLEST_THAT_RAN = 0.88
GUESSED_DEPTH = 8  # sequences in a pack, if neither data nor configuration define it
_WIDTH = {"float16": 2, "float32": 4}  # bytes of an element
_PLANNER = Planner(MK2)  # Bow has the same tiles
_NOTHING_FITS = "no micro-batch fits: use more IPUs a replica, or change placement.layers_per_ipu"
_FITS = "fits: at most {fullest} of a tile is counted; the fullest published run has {ran}"
_DOES_NOT_FIT = (
    "does not fit: {fullest} of IPU {ipu} is counted, {kept} without temporary values of products"
)
_TIGHT = (
    "tight, unknown: {fullest} of IPU {ipu} is counted, without code and exchange; the fullest published run has "
    "{ran}"
)


class _IpuMemory(NamedTuple):
    """Bytes on one IPU."""

    ipu: int
    blocks: Tuple[Block, ...]
    parameters: int  # elements
    weights: float
    gradients: float
    optimizer: float
    kept: float  # activations from forward to backward, of all micro-batches in the pipeline
    at_work: float  # activations of the layer, or of the logits, while it is computed or recomputed
    products: float  # temporary values of the largest product

    @property
    def total(self) -> float:
        """Counted bytes that do not depend on the plans of products."""
        return self.weights + self.gradients + self.optimizer + self.kept + self.at_work

    @property
    def together(self) -> float:
        """All counted bytes."""
        return self.total + self.products

    @property
    def share(self) -> float:
        """All counted bytes as a fraction of an IPU's memory."""
        return self.together / IPU_BYTES


def _parameters(block: Block, model: ModelConfig) -> int:
    """Count the parameters of a block; the matrix of the vocabulary projection is the table of the embeddings."""
    hidden = model.hidden_size
    inner = model.intermediate_size
    dense = hidden * hidden + hidden
    norm = 2 * hidden
    if block.module == "bert.embeddings":
        rows = model.vocabulary_size + model.max_position_embeddings + model.type_vocabulary_size
        return rows * hidden + norm
    if _is_layer(block):
        feed_forward = hidden * inner + inner + inner * hidden + hidden
        return 4 * dense + norm + feed_forward + norm
    if block.module == "cls.predictions":
        return dense + norm + model.vocabulary_size
    if block.module == "bert.pooler":
        return dense
    return 2 * hidden + 2


def _is_layer(block: Block) -> bool:
    return ".layer." in block.module


@dataclass(frozen=True)
class ReplicaMemory:
    """The memory of a network on the IPUs of a replica."""

    config: Config
    model: ModelConfig
    placement: Placement
    depth: int  # most sequences of a pack; a guess if neither configuration nor data set define it
    predictions: int  # most masked tokens of a pack

    @cached_property
    def memory(self) -> Tuple[_IpuMemory, ...]:
        """Counted memory of each IPU of a replica."""
        return tuple(map(self._ipu, range(self.placement.ipus)))

    @property
    def parameters(self) -> int:
        """Elements of all weights."""
        return sum(memory.parameters for memory in self.memory)

    @property
    def fullest(self) -> float:
        """Counted memory of the fullest IPU, as a share of what an IPU has."""
        return max(memory.share for memory in self.memory)

    @property
    def fits(self) -> Optional[bool]:
        """True if the memory fits, False if it does not, None if that depends on code and exchange.

        It fits up to `FULLEST_THAT_RAN` and on the host, and not if an IPU has less than is counted.
        """
        if self.config.engine.kind == "host" or self.fullest <= FULLEST_THAT_RAN:
            return True
        return False if self.fullest > 1.0 else None

    def micro_batch_that_fits(self) -> Optional[int]:
        """Return the largest micro-batch below the configured one that counts no more than `FULLEST_THAT_RAN`."""
        # Memory grows with the micro-batch, so bisection finds the largest.
        low = 0
        high = self.config.batch.micro_batch
        while high - low > 1:
            middle = (low + high) // 2
            config = self.config.changed("batch", micro_batch=middle)
            if replace(self, config=config).fits:
                low = middle
            else:
                high = middle
        return low or None

    @property
    def mask_bytes(self) -> float:
        """Bytes of the mask of a micro-batch, which every layer reads.

        The product mask has two codes for each slot, the additive one a number for each pair of slots.
        """
        numbers = 2 * self._columns if self._columns else self._slots
        return self._width * self._rows * numbers

    # ---- sizes -------------------------------------------------------------------------------------------------------

    @property
    def _slots(self) -> int:
        return self.config.data.max_sequence_length

    @property
    def _rows(self) -> int:
        """Slots of a micro-batch."""
        return self.config.batch.micro_batch * self._slots

    @property
    def _width(self) -> int:
        """Bytes of a weight and of an activation."""
        return _WIDTH["float16" if self.config.engine.half_weights else "float32"]

    @property
    def _columns(self) -> int:
        """Columns of the mask in the query/key product; 0 for an additive mask."""
        if self.config.engine.mask != "product":
            return 0
        return mask_columns(self.model, self.depth)

    # ---- bytes -------------------------------------------------------------------------------------------------------

    def _ipu(self, ipu: int) -> _IpuMemory:
        placement = self.config.placement
        engine = self.config.engine
        blocks = self.placement.on(ipu)
        parameters = sum(_parameters(block, self.model) for block in blocks)
        optimizer = 0.0
        if not placement.optimizer_state_off_chip:
            optimizer = parameters * (_WIDTH[engine.first_moment_type] + _WIDTH["float32"])
            if placement.replicated_tensor_sharding:
                optimizer /= placement.replicas
        return _IpuMemory(
            ipu=ipu,
            blocks=blocks,
            parameters=parameters,
            weights=parameters * self._width,
            gradients=parameters * _WIDTH[engine.gradient_accumulator_type],
            optimizer=optimizer,
            kept=self._kept(ipu),
            at_work=max([self._at_work(block) for block in blocks], default=0.0),
            products=self._temporary_values(ipu),
        )

    def _kept(self, ipu: int) -> float:
        """Count the activations from forward to backward of all micro-batches in the pipeline.

        In a pipeline of f forward stages, stage i runs backwards 2 (f - 1 - i) micro-batches after it ran forwards.
        """
        recomputes = self.config.engine.recomputes(ipus=True)
        hidden = self._width * self._rows * self.model.hidden_size
        stages = self.placement.stages
        kept = 0.0
        for index, stage in enumerate(stages):
            if stage.ipu != ipu:
                continue
            micro_batches = 2 * (len(stages) - 1 - index) + 1
            layers = sum(map(_is_layer, stage.blocks))
            # The input of the stage, the mask of its layers, and each layer's checkpoint or all its activations.
            mask = self.mask_bytes if layers else 0.0
            per_layer = hidden if recomputes else self._layer()
            kept += micro_batches * (hidden + mask + layers * per_layer)
        return kept

    def _at_work(self, block: Block) -> float:
        """Count the activations of a block while it is computed."""
        if _is_layer(block):
            return self._layer()
        if block.module == "cls.predictions":
            # Logits, and their soft-max and gradient.
            loss_width = self._width if self.config.engine.half_logits else _WIDTH["float32"]
            logits = self.config.batch.micro_batch * self.predictions * self.model.vocabulary_size
            return (self._width + 2 * loss_width) * logits
        return 0.0

    def _layer(self) -> float:
        """Count the activations of a layer's forward pass (Korthikanti et al. 2022, arXiv 2205.05198, section 4.1)."""
        model = self.model
        scores = 5 if model.attention_dropout else 2
        half_bytes = 34 * model.hidden_size + scores * model.num_heads * self._slots
        if self._columns:
            # Query and key again, joined with their codes.
            half_bytes += 2 * 2 * (model.hidden_size + model.num_heads * self._columns)
        return half_bytes * self._rows * self._width / _WIDTH["float16"]

    def _temporary_values(self, ipu: int) -> float:
        """Count the temporary values of the largest product of an IPU, forwards or backwards."""
        engine = self.config.engine
        proportion = self.config.placement.available_memory_proportion[ipu]
        partial = _WIDTH["float16" if engine.half_weights and engine.half_partials else "float32"]
        most = 0
        for matrices, rows, inner, columns in self._products(ipu):
            # The forward pass, the gradient of the first operand, and that of the second.
            for shape in ((rows, inner, columns), (rows, columns, inner), (inner, rows, columns)):
                product = Product(
                    matrices,
                    *shape,
                    element_bytes=self._width,
                    partial_bytes=partial,
                    memory_proportion=proportion,
                )
                most = max(most, _PLANNER.plan(product).temporary_bytes)
        return float(most * MK2.tiles)

    def _products(self, ipu: int) -> List[Tuple[int, int, int, int]]:
        """Return matrices, rows, inner dimension and columns of the large products of an IPU's forward pass."""
        model = self.model
        slots = self._slots
        micro_batch = self.config.batch.micro_batch
        hidden = model.hidden_size
        inner = model.intermediate_size
        blocks = self.placement.on(ipu)
        products = []
        if any(map(_is_layer, blocks)):
            width = hidden // model.num_heads
            heads = micro_batch * model.num_heads
            dense = [
                (1, self._rows, hidden, hidden),
                (1, self._rows, hidden, inner),
                (1, self._rows, inner, hidden),
            ]
            attention = [(heads, slots, width + self._columns, slots), (heads, slots, slots, width)]
            products += dense + attention
        if any(block.module == "cls.predictions" for block in blocks):
            part = -(-model.vocabulary_size // self.config.placement.embedding_serialization_factor)
            rows = micro_batch * self.predictions
            products += [(1, rows, hidden, hidden), (1, rows, hidden, part)]
        return products


def memory_of_packs(config: Config) -> ReplicaMemory:
    """Return the memory of pre-training before its data set exists."""
    depth = config.data.depth or GUESSED_DEPTH
    heads = pretraining_heads(next_sentence=config.loss.next_sentence)
    return ReplicaMemory(
        config=config,
        model=config.model,
        placement=place(config.placement, heads),
        depth=depth,
        # The published rule (see pack_data.store.packs.predictions_per_pack).
        predictions=config.predictions_per_sequence + depth,
    )


def memory_words(
    counted: ReplicaMemory,
    smaller: Optional[int],
    *,
    packing_factor: Optional[float] = 1.0,
    row: str = "pack",
) -> List[str]:
    """Return lines that state whether the counted memory fits and, if that is not certain, what to change.

    Args:
        counted: the memory.
        smaller: a micro-batch that fits, if there is one.
        packing_factor: sequences in a pack, None if unknown.
        row: the word for a pack.
    """
    ran = number(FULLEST_THAT_RAN, "share")
    if counted.fits:
        return [_FITS.format(fullest=number(counted.fullest, "share"), ran=ran)]
    fullest = max(counted.memory, key=lambda memory: memory.share)
    verdict = _TIGHT if counted.fits is None else _DOES_NOT_FIT
    text = verdict.format(
        fullest=number(fullest.share, "share"),
        ipu=fullest.ipu,
        kept=number(fullest.total / IPU_BYTES, "share"),
        ran=ran,
    )
    if smaller is None:
        return [text, _NOTHING_FITS]
    if packing_factor is None:
        return [text, f"--set batch.micro_batch={smaller} fits"]
    options = counted.config.on_micro_batch(smaller, packing_factor)
    packs = counted.config.packs_per_update(packing_factor)
    return [text, f"{options} fits; an update keeps its {packs:,} {row}s"]
