"""The plan of a run: what would sit on which IPU, how large an update is, how much memory and traffic that takes.

Everything is computed from the configuration and, where it is there, the data set's manifest; no device and no torch.
Memory counts weights, gradient accumulators, optimiser state on the chip and activations. The program itself, the
exchange buffers and the temporary values of products come on top: what is left free is what they have.
"""
from __future__ import annotations

from typing import Dict, List, NamedTuple, Optional, Tuple

from ipu_packed_bert.config import Config, ModelConfig, check_accumulation
from ipu_packed_bert.data import PackingFactor
from ipu_packed_bert.data import packing_factor as factor_of
from ipu_packed_bert.placement import Block, Placement, place
from pack_data.store import Manifest

TILE_BYTES, TILES = 624 * 1024, 1472  # in-processor memory of a Mk2 IPU (Graphcore, IPU hardware overview)
IPU_BYTES = TILE_BYTES * TILES
MIB = 1024.0 * 1024.0
WIDTH = {"float16": 2, "float32": 4}


def parameters(block: Block, model: ModelConfig) -> int:
    """Parameters of a block. The vocabulary projection's matrix is the embedding table, counted there."""
    hidden, inner = model.hidden_size, model.intermediate_size
    dense, norm = hidden * hidden + hidden, 2 * hidden
    if block.module == "bert.embeddings":
        rows = model.vocabulary_size + model.max_position_embeddings + model.type_vocabulary_size
        return rows * hidden + norm
    if block.module.startswith("bert.encoder.layer."):
        return 4 * dense + norm + (hidden * inner + inner) + (inner * hidden + hidden) + norm
    if block.module == "cls.predictions":
        return dense + norm + model.vocabulary_size
    if block.module == "bert.pooler":
        return dense
    return 2 * hidden + 2


class Memory(NamedTuple):
    """Bytes on one IPU."""

    ipu: int
    blocks: Tuple[Block, ...]
    parameters: int
    weights: float
    gradients: float
    optimizer: float
    activations: float

    @property
    def total(self) -> float:
        return self.weights + self.gradients + self.optimizer + self.activations


class Plan(NamedTuple):
    """What a configuration amounts to."""

    config: Config
    factor: PackingFactor
    placement: Placement
    memory: Tuple[Memory, ...]
    accumulation: int
    packs_per_update: int
    sequences_per_update: float
    depth: int  # sequences that a pack has room for; a guess where neither configuration nor data set says it
    bytes_per_pack: int  # host to device
    training_packs: Optional[int]  # None while the data set is not built

    @property
    def bytes_per_update(self) -> int:
        return self.packs_per_update * self.bytes_per_pack

    @property
    def updates_per_epoch(self) -> Optional[int]:
        return None if self.training_packs is None else -(-self.training_packs // self.packs_per_update)

    @property
    def idle_share(self) -> float:
        """Share of an update in which a stage waits, while the pipeline fills and drains; stages taken as equally long."""
        waiting = self.placement.training_stages - 1
        return waiting / (self.accumulation + waiting)


def plan(config: Config, manifest: Optional[Manifest] = None, *, packing_factor: Optional[float] = None) -> Plan:
    """Raises ConfigError where an update has fewer micro-batches than the pipeline has stages."""
    factor = factor_of(config, manifest, packing_factor)
    check_accumulation(config, factor.value)
    placement = place(config)
    schema = manifest.schema if manifest is not None else None
    depth = schema.max_sequences_per_pack if schema else config.data.max_sequences_per_pack or 8
    # The published rule, until a data set says otherwise (see pack_data.packs.predictions_per_pack).
    predictions = schema.max_predictions_per_pack if schema else (config.data.max_predictions_per_sequence or 76) + depth
    slots = config.data.max_sequence_length
    held_out = None if manifest is None else int(round(config.run.evaluation_fraction * manifest.packs))
    return Plan(
        config=config,
        factor=factor,
        placement=placement,
        memory=tuple(_memory(config, placement, ipu, predictions, depth) for ipu in range(placement.ipus)),
        accumulation=config.accumulation(factor.value),
        packs_per_update=config.packs_per_update(factor.value),
        sequences_per_update=config.expected_sequences_per_update(factor.value),
        depth=depth,
        # int32: four fields of slots, three of masked tokens, three of sequences; and two float32 scales.
        bytes_per_pack=4 * (4 * slots + 3 * predictions + 3 * depth + 2),
        training_packs=None if manifest is None else manifest.packs - held_out,
    )


def _memory(config: Config, placement: Placement, ipu: int, predictions: int, depth: int) -> Memory:
    engine, model = config.engine, config.model
    blocks = placement.on(ipu)
    number = sum(parameters(block, model) for block in blocks)
    optimizer = 0.0
    if not config.placement.optimizer_state_off_chip:
        optimizer = number * (WIDTH[engine.first_moment_type] + WIDTH["float32"])
        if config.placement.replicated_tensor_sharding:
            optimizer /= config.placement.replicas
    return Memory(
        ipu=ipu,
        blocks=blocks,
        parameters=number,
        weights=number * _width(config),
        gradients=number * WIDTH[engine.gradient_accumulator_type],
        optimizer=optimizer,
        activations=_activations(config, placement, ipu, predictions, depth),
    )


def _width(config: Config) -> int:
    return WIDTH["float16" if config.engine.half_weights else "float32"]


def _activations(config: Config, placement: Placement, ipu: int, predictions: int, depth: int) -> float:
    """Kept from forward to backward for every micro-batch under way, and the layer being worked on.

    In a pipeline of f forward stages, stage i runs backwards 2 (f - 1 - i) micro-batches after it ran forwards.
    """
    stages = placement.stages
    kept, at_work = 0.0, 0.0
    for index, stage in enumerate(stages):
        if stage.ipu != ipu:
            continue
        under_way = 2 * (len(stages) - 1 - index) + 1
        layers = sum(1 for block in stage.blocks if ".layer." in block.module)
        outputs = layers if config.engine.recompute_layers else 0
        # What comes into the stage, with the mask for its layers; and each layer's checkpoint, or all it computed.
        kept += under_way * (_hidden(config) + (_mask(config, depth) if layers else 0.0) + outputs * _hidden(config))
        if not config.engine.recompute_layers:
            kept += under_way * layers * _layer(config, depth)
        for block in stage.blocks:
            if ".layer." in block.module:
                at_work = max(at_work, _layer(config, depth))
            elif block.module == "cls.predictions":
                # Logits, and their soft-max and gradient in float32.
                width = _width(config) + 2 * WIDTH["float32"]
                at_work = max(at_work, width * config.batch.micro_batch * predictions * config.model.vocabulary_size)
    return kept + at_work


def _hidden(config: Config) -> float:
    return _width(config) * config.batch.micro_batch * config.data.max_sequence_length * config.model.hidden_size


def _mask(config: Config, depth: int) -> float:
    """What every layer reads: two codes for each slot, or a number for each pair of slots."""
    slots = config.data.max_sequence_length
    numbers = 2 * config.mask_columns(depth) if config.engine.mask == "product" else slots
    return _width(config) * config.batch.micro_batch * slots * numbers


def _layer(config: Config, depth: int) -> float:
    """All that one layer computes forwards (Korthikanti et al. 2022, arXiv 2205.05198, section 4.1), in bytes."""
    slots, model = config.data.max_sequence_length, config.model
    scores = 5 if model.attention_dropout else 2
    half = 34 * slots * model.hidden_size + scores * model.num_heads * slots * slots
    if config.engine.mask == "product":
        # Query and key once more, joined with their codes.
        half += 2 * 2 * slots * (model.hidden_size + model.num_heads * config.mask_columns(depth))
    return half * config.batch.micro_batch * _width(config) / WIDTH["float16"]


# ------------------------------------------------------------------------------------------------------------ printing


def print_plan(config: Config, manifest: Optional[Manifest] = None, *, packing_factor: Optional[float] = None) -> None:
    """Print :func:`plan` so that it can be read at a glance."""
    print("\n".join(lines(plan(config, manifest, packing_factor=packing_factor))))


def lines(made: Plan) -> List[str]:
    config, placement = made.config, made.placement
    model, engine = config.model, config.engine
    total = sum(memory.parameters for memory in made.memory)
    stages = placement.stages
    text = [
        f"{config.path}",
        f"  model     BERT, {model.num_layers} layers of {model.hidden_size:,}, {model.num_heads} heads,"
        f" vocabulary {model.vocabulary_size:,}: {total / 1e6:,.1f} M parameters in"
        f" {'float16' if engine.half_weights else 'float32'}",
        f"  data      {_data(made)}",
        f"  mask      {_mask_words(made)}",
        f"  devices   {config.placement.replicas} replica{_s(config.placement.replicas)} of {placement.ipus}"
        f" IPU{_s(placement.ipus)} = {config.ipus} IPU{_s(config.ipus)}",
        f"  pipeline  {len(stages)} forward stage{_s(len(stages))}"
        + (f" on IPUs {', '.join(str(stage.ipu) for stage in stages)}; {placement.training_stages} in training,"
           f" waiting {made.idle_share:.1%} of the time while it fills and drains" if len(stages) > 1 else ", no pipeline"),
        "",
    ]
    rows = [["IPU", "blocks", "parameters", "weights", "gradients", "optimiser", "activations", "together", "of the IPU"]]
    for memory in made.memory:
        rows.append([
            str(memory.ipu), _blocks(memory.blocks), f"{memory.parameters / 1e6:,.1f} M",
            *(_mib(value) for value in (memory.weights, memory.gradients, memory.optimizer, memory.activations, memory.total)),
            f"{memory.total / IPU_BYTES:.0%} {_bar(memory.total / IPU_BYTES)}",
        ])
    text += _table(rows, left={1, 8})
    text += [
        f"  Bytes in MiB, of {IPU_BYTES / MIB:,.0f} MiB an IPU ({TILE_BYTES // 1024} KiB x {TILES:,} tiles); computed. Program,"
        " exchange and temporary values need room too.",
        "  Optimiser state is " + ("in the memory beside the chip" if config.placement.optimizer_state_off_chip else "on the chip")
        + (", shared out among the replicas" if config.placement.replicated_tensor_sharding else "")
        + "; layers are " + ("recomputed from their checkpoints." if engine.recompute_layers else "kept whole."),
        "",
    ]
    divided = (f" ({config.batch.gradient_accumulation:,} / {made.factor.value:.3f}, rounded up)"
               if made.accumulation != config.batch.gradient_accumulation else "")
    text += [
        f"  update    {made.packs_per_update:,} packs, about {made.sequences_per_update:,.0f} sequences"
        f" = micro-batch {config.batch.micro_batch} x accumulation {made.accumulation:,}{divided}"
        f" x replicas {config.placement.replicas}",
        f"  packing   {made.factor.value:.3f} sequences in a pack, from {made.factor.source}",
        f"  run       {config.run.steps:,} updates, {_epochs(made)}",
        f"  traffic   {made.bytes_per_update / MIB:,.1f} MiB an update from host to device"
        f" ({made.packs_per_update:,} packs of {made.bytes_per_pack:,} bytes)",
    ]
    return text


def _data(made: Plan) -> str:
    data = made.config.data
    depth = "any number of" if data.max_sequences_per_pack is None else f"up to {data.max_sequences_per_pack}"
    packs = "packs still to be built" if made.training_packs is None else f"{made.training_packs:,} packs to train on"
    one = data.max_sequences_per_pack == 1
    return f"{data.directory}: {packs}, {data.max_sequence_length} slots, " + ("one sequence each" if one else f"{depth} sequences each")


def _mask_words(made: Plan) -> str:
    config, slots = made.config, made.config.data.max_sequence_length
    travels = f"{_mib(_mask(config, made.depth))} MiB to each IPU"
    if config.engine.mask == "additive":
        return f"additive: {slots:,} x {slots:,} for each pack, added to every head's scores; {travels}"
    head, columns = config.model.hidden_size // config.model.num_heads, config.mask_columns(made.depth)
    known = made.training_packs is not None or config.data.max_sequences_per_pack is not None
    sequences = f"up to {made.depth} sequences" if known else "the data set's sequences"
    return f"in the query/key product: heads of {head} + {columns} columns keep {sequences} and padding apart; {travels}"


def _epochs(made: Plan) -> str:
    if made.updates_per_epoch is None:
        return "an epoch's length is known once the data set is built"
    return f"{made.updates_per_epoch:,} an epoch: {made.config.run.steps / made.updates_per_epoch:,.1f} epochs"


def _blocks(blocks: Tuple[Block, ...]) -> str:
    """embeddings, layers 0-2, MLM head, ..."""
    names: List[str] = []
    layers: Dict[int, None] = {}
    for block in blocks:
        if ".layer." in block.module:
            if not layers:
                names.append("layers")
            layers[int(block.module.rsplit(".", 1)[1])] = None
        else:
            names.append(block.name)
    if not layers:
        return ", ".join(names) or "nothing"
    first, last = min(layers), max(layers)
    found = f"layer {first}" if first == last else f"layers {first}-{last}"
    return ", ".join(found if name == "layers" else name for name in names)


def _bar(share: float) -> str:
    """Ten characters, one for each tenth that is used; an exclamation mark where it is more than there is."""
    return "#" * min(10, int(round(10 * share))) + "." * max(0, 10 - int(round(10 * share))) + ("!" if share > 1 else "")


def _mib(value: float) -> str:
    if value >= 10 * MIB or not value:
        return f"{value / MIB:,.0f}"
    return f"{value / MIB:.1f}" if value >= MIB / 10 else f"{value / MIB:.2f}"


def _s(number: int) -> str:
    return "" if number == 1 else "s"


def _table(rows: List[List[str]], *, left) -> List[str]:
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return [
        "  " + "  ".join(cell.ljust(width) if column in left else cell.rjust(width)
                         for column, (cell, width) in enumerate(zip(row, widths))).rstrip()
        for row in rows
    ]
