"""The plan of a run: what would sit on which IPU, how large an update is, how much memory and traffic that takes.

Everything is computed from the configuration and, where it is there, the data set's manifest; no device and no torch.
Counted are weights, gradient accumulators, optimiser state on the chip, activations, and the room that products may
take for temporary values (placement.available_memory_proportion). The program and its exchange are estimated.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Callable, ClassVar, Dict, List, NamedTuple, Optional, Sequence, Tuple

from ipu_packed_bert.cycles.target import MK2, TARGETS
from ipu_packed_bert.data.data_sets import known_packing_factor
from ipu_packed_bert.planning.host_memory import HostMemory, host_memory, multiply_adds
from ipu_packed_bert.settings.launch_lines import start_lines
from ipu_packed_bert.settings.placement import Block, Placement, place
from ipu_packed_bert.settings.pretraining import Config, check_accumulation
from ipu_packed_bert.settings.schema import ModelConfig, mask_columns
from ipu_packed_bert.tasks.pretraining import Pretraining
from pack_data.display.table import text_table
from pack_data.lengths.factors import PackingFactor
from pack_data.store.data_set import Manifest

IPU_BYTES = MK2.memory_per_tile * MK2.tiles
MIB = 1024.0 * 1024.0
# Counted memory of the fullest IPU of Graphcore's PyTorch configurations for POD16 (BERT-large at 128, IPU 1): beside
# that much, what is not counted is known to fit. Other published runs count more, most of it room for products that
# these may not take (all of every IPU, in MLPerf v2.0): what counts more than the first may fit, too.
FULLEST_PUBLISHED, FULLEST_THAT_RAN = 0.7983, 1.55
# What is not counted, code and exchange, as a share of a tile. No more than the published configurations leave: 20 % in
# PyTorch, 8 % in PopART and TensorFlow (BERT-large at 384, proportion 0.4), whose products may not use all their room.
CODE_LEAST, CODE_MOST = 0.08, 0.20
_WIDTH = {"float16": 2, "float32": 4}


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


class _Memory(NamedTuple):
    """Bytes on one IPU."""

    ipu: int
    blocks: Tuple[Block, ...]
    parameters: int
    weights: float
    gradients: float
    optimizer: float
    kept: float  # activations, from forward to backward, of all micro-batches under way
    at_work: float  # activations of the layer, or of the logits, that is computed or recomputed
    products: float  # what products may take for temporary values, at most

    @property
    def activations(self) -> float:
        return self.kept + self.at_work

    @property
    def total(self) -> float:
        """What must be there, whatever Poplar does."""
        return self.weights + self.gradients + self.optimizer + self.activations

    @property
    def together(self) -> float:
        """All that is counted."""
        return self.total + self.products

    @property
    def share(self) -> float:
        """:attr:`together`, of what an IPU has; of each tile as much, where all are equally full."""
        return self.together / IPU_BYTES


class Update(NamedTuple):
    """What one weight update takes, by the packing factor."""

    factor: PackingFactor
    accumulation: int
    packs: int
    sequences: float


@dataclass(frozen=True)
class RunPlan:
    """What a configuration amounts to, and its words; `finetune_plan` has those of a run that learns from examples."""

    config: Any  # of this kind of run
    model: ModelConfig
    update: Optional[Update]  # None while no packing factor is known
    placement: Placement
    depth: int  # sequences that a pack has room for; a guess where neither configuration nor data set says it
    predictions: int  # masked tokens that a pack has room for
    bytes_per_pack: int  # host to device
    training_packs: Optional[int]  # None while the data are not there

    command: ClassVar[str] = "pretrain"
    row: ClassVar[str] = "pack"  # what an update is made of
    run_is_known: ClassVar[bool] = True  # without an update, too
    unknown: ClassVar[str] = (
        "unknown: no data set yet and no published packing factor for {slots} slots; give --packing-factor"
    )

    @cached_property
    def memory(self) -> Tuple[_Memory, ...]:
        return tuple(ipu_memory(self, ipu) for ipu in range(self.placement.ipus))

    @property
    def slots(self) -> int:
        return int(self.config.data.max_sequence_length)

    @property
    def steps(self) -> Optional[int]:
        """Updates of the whole run; None while they are not known."""
        return int(self.config.run.steps)

    def _sizes_words(self) -> str:
        """Where the network's sizes come from, where the configuration does not have them."""
        return ""

    def _data_words(self) -> str:
        data = self.config.data
        depth = "any number of" if data.max_sequences_per_pack is None else f"up to {data.max_sequences_per_pack}"
        packs = (
            "packs still to be built" if self.training_packs is None else f"{self.training_packs:,} packs to train on"
        )
        sequences = "one sequence each" if data.max_sequences_per_pack == 1 else f"{depth} sequences each"
        return f"{data.directory}: {packs}, {data.max_sequence_length} slots, {sequences}"

    def _depth_words(self) -> str:
        """How many sequences the mask keeps apart."""
        known = self.training_packs is not None or self.config.data.max_sequences_per_pack is not None
        return f"up to {self.depth} sequences" if known else "the data set's sequences"

    def _divided_words(self) -> str:
        """What the packing factor made of the accumulation."""
        unpacked = self.config.batch.gradient_accumulation
        if self.update is None or self.update.accumulation == unpacked:
            return ""
        return f" ({unpacked:,} / {self.update.factor.value:.3f}, rounded up)"

    def _run_words(self) -> str:
        steps = self.config.run.steps
        if self.updates_per_epoch is None:
            return f"{steps:,} updates, an epoch's length is known once the data set is built"
        each = self.updates_per_epoch
        return f"{steps:,} updates, {each:,} an epoch: {steps / each:,.1f} epochs"

    def _ipu_lines(self) -> List[str]:
        """What else is known of an update on IPUs."""
        assert self.update is not None and self.bytes_per_update is not None
        return [
            f"  traffic   {self.bytes_per_update / MIB:,.1f} MiB an update from host to device"
            f" ({self.update.packs:,} packs of {self.bytes_per_pack:,} bytes)"
        ]

    def _speed_lines(self) -> List[str]:
        """What the cycle model says of a run on IPUs that fits, as the report prints it; nothing where it cannot."""
        from ipu_packed_bert.cycles.matmul import cache_folder
        from ipu_packed_bert.cycles.speed import known_speed

        if self.config.engine.kind == "host" or self.update is None:
            return []
        found = known_speed(self.config, self.update.factor.value, cache_folder())
        if found is None:
            return [
                "  speed     packed-bert report, with the same --config and --set, computes it; then it stands here, "
                "too"
            ]
        low, rate, high = found.rate
        return [
            f"  speed     {rate:,.0f} sequences/s, {low:,.0f} to {high:,.0f}; {found.days:.3f} days for the run: "
            "predicted by the cycle model"
        ]

    def _shared_micro_batches(self) -> Optional[int]:
        """Micro-batches of an update, for the line of what several processes share."""
        return None if self.update is None else self.update.packs // self.config.batch.micro_batch

    def _with_smaller_words(self, smaller: int) -> str:
        """How a smaller micro-batch that fits is asked for: the same packs in an update, from more micro-batches."""
        batch = self.config.batch
        accumulation = -(-batch.micro_batch * batch.gradient_accumulation // smaller)
        return (
            f"--set batch.micro_batch={smaller} fits; with --set batch.gradient_accumulation={accumulation} "
            "an update stays as large"
        )

    @property
    def bytes_per_update(self) -> Optional[int]:
        return None if self.update is None else self.update.packs * self.bytes_per_pack

    @property
    def updates_per_epoch(self) -> Optional[int]:
        if self.training_packs is None or self.update is None:
            return None
        return -(-self.training_packs // self.update.packs)

    @property
    def training_stages(self) -> int:
        """Stages of the training pipeline: each but the last runs backwards too."""
        return 2 * len(self.placement.stages) - 1

    @property
    def idle_share(self) -> Optional[float]:
        """Share of an update in which a stage waits, while the pipeline fills and drains.

        The stages are taken as equally long.
        """
        if self.update is None:
            return None
        waiting = self.training_stages - 1
        return waiting / (self.update.accumulation + waiting)

    @property
    def fullest(self) -> float:
        """Counted memory of the fullest IPU, as a share of what an IPU has."""
        return max(memory.share for memory in self.memory)

    @property
    def fits(self) -> Optional[bool]:
        """True up to `FULLEST_PUBLISHED`; on the host, whose is not planned here.

        False where an IPU has too little even without temporary values of products. None between the two, where what
        is not counted decides, and how much of their room the products take.
        """
        if self.config.engine.kind == "host" or self.fullest <= FULLEST_PUBLISHED:
            return True
        return False if max(memory.total for memory in self.memory) > IPU_BYTES else None

    def micro_batch_that_fits(self) -> Optional[int]:
        """The largest micro-batch below the configured one that counts no more than `FULLEST_PUBLISHED`."""
        batch = self.config.batch

        def fits(micro_batch: int) -> bool:
            config = replace(self.config, batch=replace(batch, micro_batch=micro_batch))
            return bool(replace(self, config=config).fits)

        return largest_that_fits(batch.micro_batch, fits)


def plan(config: Config, manifest: Optional[Manifest] = None, *, packing_factor: Optional[float] = None) -> RunPlan:
    """The plan of a configuration; ConfigError where an update has fewer micro-batches than the pipeline has stages."""
    factor = known_packing_factor(config, manifest, packing_factor)
    update = None
    if factor is not None:
        check_accumulation(config, factor.value)
        update = Update(
            factor,
            config.accumulation(factor.value),
            config.packs_per_update(factor.value),
            config.expected_sequences_per_update(factor.value),
        )
    placement = place(config.placement, Pretraining(config).heads)
    schema = manifest.schema if manifest is not None else None
    depth = schema.max_sequences_per_pack if schema else config.data.max_sequences_per_pack or 8
    # The published rule, until a data set says otherwise (see pack_data.store.packs.predictions_per_pack).
    predictions = schema.max_predictions_per_pack if schema else config.predictions_per_sequence + depth
    slots = config.data.max_sequence_length
    return RunPlan(
        config=config,
        model=config.model,
        update=update,
        placement=placement,
        depth=depth,
        predictions=predictions,
        # int32: four fields of slots, three of masked tokens, three of sequences; and two float32 scales.
        bytes_per_pack=4 * (4 * slots + 3 * predictions + 3 * depth + 2),
        training_packs=None if manifest is None else manifest.packs,
    )


class _HostNeeds(NamedTuple):
    """What a run takes on a CPU or a GPU, computed."""

    memory: HostMemory
    multiply_adds: Optional[float]  # of all updates; None while no packing factor is known


def host_needs(made: RunPlan) -> _HostNeeds:
    config, model, slots = made.config, made.model, made.slots
    pack = multiply_adds(
        model, slots=slots, predictions=made.predictions, recomputes=config.engine.recomputes(ipus=False)
    )
    number = sum(memory.parameters for memory in made.memory)
    return _HostNeeds(
        host_memory(config, model, parameters=number, slots=slots, predictions=made.predictions),
        None if made.update is None or made.steps is None else pack * made.update.packs * made.steps,
    )


def largest_that_fits(below: int, fits: Callable[[int], bool]) -> Optional[int]:
    """The largest micro-batch below this one that fits; None if not even one row does."""
    # _Memory grows with the micro-batch, so that the largest that fits is found by halving.
    low, high = 0, below
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low or None


def ipu_memory(made: RunPlan, ipu: int) -> _Memory:
    config, engine = made.config, made.config.engine
    blocks = made.placement.on(ipu)
    number = sum(parameters(block, made.model) for block in blocks)
    optimizer = 0.0
    if not config.placement.optimizer_state_off_chip:
        optimizer = number * (_WIDTH[engine.first_moment_type] + _WIDTH["float32"])
        if config.placement.replicated_tensor_sharding:
            optimizer /= config.placement.replicas
    kept, at_work = _activations(made, ipu)
    return _Memory(
        ipu=ipu,
        blocks=blocks,
        parameters=number,
        weights=number * _width(made),
        gradients=number * _WIDTH[engine.gradient_accumulator_type],
        optimizer=optimizer,
        kept=kept,
        at_work=at_work,
        products=config.placement.available_memory_proportion[ipu] * IPU_BYTES,
    )


def _width(made: RunPlan) -> int:
    return _WIDTH["float16" if made.config.engine.half_weights else "float32"]


def _activations(made: RunPlan, ipu: int) -> Tuple[float, float]:
    """Kept from forward to backward for every micro-batch under way, and the layer being worked on.

    In a pipeline of f forward stages, stage i runs backwards 2 (f - 1 - i) micro-batches after it ran forwards.
    """
    engine, stages = made.config.engine, made.placement.stages
    recomputes = engine.recomputes(ipus=True)
    kept, at_work = 0.0, 0.0
    for index, stage in enumerate(stages):
        if stage.ipu != ipu:
            continue
        under_way = 2 * (len(stages) - 1 - index) + 1
        layers = sum(1 for block in stage.blocks if ".layer." in block.module)
        outputs = layers if recomputes else 0
        # What comes into the stage, with the mask for its layers; and each layer's checkpoint, or all it computed.
        kept += under_way * (_hidden(made) + (_mask(made) if layers else 0.0) + outputs * _hidden(made))
        if not recomputes:
            kept += under_way * layers * _layer(made)
        for block in stage.blocks:
            if ".layer." in block.module:
                at_work = max(at_work, _layer(made))
            elif block.module == "cls.predictions":
                # Logits, and their soft-max and gradient.
                width = _width(made) + 2 * (_width(made) if engine.half_logits else _WIDTH["float32"])
                rows = made.config.batch.micro_batch
                at_work = max(at_work, width * rows * made.predictions * made.model.vocabulary_size)
    return kept, at_work


def _hidden(made: RunPlan) -> float:
    return _width(made) * made.config.batch.micro_batch * made.slots * made.model.hidden_size


def _mask(made: RunPlan) -> float:
    """What every layer reads: two codes for each slot, or a number for each pair of slots."""
    columns = 2 * mask_columns(made.model, made.depth)
    numbers = columns if made.config.engine.mask == "product" else made.slots
    return _width(made) * made.config.batch.micro_batch * made.slots * numbers


def _layer(made: RunPlan) -> float:
    """All that one layer computes forwards (Korthikanti et al. 2022, arXiv 2205.05198, section 4.1), in bytes."""
    slots, model = made.slots, made.model
    scores = 5 if model.attention_dropout else 2
    half = 34 * slots * model.hidden_size + scores * model.num_heads * slots * slots
    if made.config.engine.mask == "product":
        # Query and key once more, joined with their codes.
        half += 2 * 2 * slots * (model.hidden_size + model.num_heads * mask_columns(model, made.depth))
    return half * made.config.batch.micro_batch * _width(made) / _WIDTH["float16"]


# ------------------------------------------------------------------------------------------------------------ printing


def print_plan(made: RunPlan, options: Sequence[str] = ()) -> int:
    """Print a plan and its verdict; returns the exit status, 1 where the memory does not fit.

    options: of the command that starts the run, see :func:`launch.start_lines`.
    """
    text = lines(made)
    if made.config.engine.kind != "host":
        first, *rest = memory_words(made, None if made.fits else made.micro_batch_that_fits())
        text += [f"  verdict   {first}", *(f"            {line}" for line in rest)]
    if made.fits is not False:
        text += made._speed_lines()
        micro_batches = made._shared_micro_batches()
        text += start_lines(made.config, options, command=made.command, micro_batches=micro_batches)
    print("\n".join(text))
    return 1 if made.fits is False else 0


MEMORY_PARTS = ("weights", "gradients", "state", "kept", "at work", "products")
CODE_WORDS = (
    f"Code and exchange come on top, {CODE_LEAST:.0%} to {CODE_MOST:.0%} of a tile, estimated; products may take less"
)


def memory_parts(memory: _Memory) -> Dict[str, float]:
    """Bytes of what is counted, by the names of `MEMORY_PARTS`; they add up to ``memory.together``."""
    found = (memory.weights, memory.gradients, memory.optimizer, memory.kept, memory.at_work, memory.products)
    return dict(zip(MEMORY_PARTS, found))


def memory_words(made: RunPlan, smaller: Optional[int]) -> List[str]:
    """Whether the counted memory fits; where it does not surely, the way out: ``smaller``, a micro-batch that does."""
    found = fit_words(made)
    if made.fits:
        return [found]
    return [found, _NOTHING_FITS if smaller is None else made._with_smaller_words(smaller)]


_NOTHING_FITS = "no micro-batch fits: more IPUs a replica, or other placement.layers_per_ipu"


def fit_words(made: RunPlan) -> str:
    """Whether the counted memory fits, in words."""
    if made.fits:
        return (
            f"fits: at most {made.fullest:.0%} of a tile is counted, no more than in Graphcore's PyTorch "
            f"configurations ({FULLEST_PUBLISHED:.0%})"
        )
    if made.fits is False:
        most = max(made.memory, key=lambda memory: memory.total)
        return (
            f"does not fit: IPU {most.ipu} takes {most.total / IPU_BYTES:.0%} of its memory before products have any "
            "room"
        )
    fullest = max(made.memory, key=lambda memory: memory.share)
    return (
        f"tight, unknown: {made.fullest:.1%} of IPU {fullest.ipu} is counted; Graphcore's PyTorch configurations count "
        f"at most {FULLEST_PUBLISHED:.1%}, other published runs up to {FULLEST_THAT_RAN:.0%}; code and exchange take "
        f"{CODE_LEAST:.0%} to {CODE_MOST:.0%}"
    )


def lines(made: RunPlan) -> List[str]:
    """The plan as text, without the verdict: of the host where the configuration names it, else of the IPUs."""
    config, model, update = made.config, made.model, made.update
    total = sum(memory.parameters for memory in made.memory)
    host = config.engine.kind == "host"
    kept = "float32" if host or not config.engine.half_weights else "float16"
    text = [
        f"{config.path}",
        f"  model     BERT, {model.num_layers} layers of {model.hidden_size:,}, {model.num_heads} heads,"
        f" vocabulary {model.vocabulary_size:,}: {total / 1e6:,.1f} M parameters in {kept}{made._sizes_words()}",
        f"  data      {made._data_words()}",
        *(_host_lines(made) if host else [*device_lines(made), "", *memory_lines(made)]),
        "",
    ]
    if update is None:
        text.append(f"  update    {made.unknown.format(slots=made.slots)}")
    else:
        text += [
            f"  update    {update.packs:,} {made.row}s, about {update.sequences:,.0f} sequences"
            f" = micro-batch {config.batch.micro_batch} x accumulation {update.accumulation:,}{made._divided_words()}"
            f" x replicas {config.placement.replicas}",
            f"  packing   {update.factor.value:.3f} sequences in a {made.row}, from {update.factor.source}",
        ]
    if update is not None or made.run_is_known:
        text.append(f"  run       {made._run_words()}")
    if not host and update is not None:
        text += made._ipu_lines()
    return text


def _host_lines(made: RunPlan) -> List[str]:
    engine = made.config.engine
    threads = "as many threads as torch chooses"
    if engine.threads is not None:
        threads = f"{engine.threads} thread{_s(engine.threads)}"
    device = {
        "auto": f"a CUDA device if there is one, else the CPU with {threads}",
        "cpu": f"the CPU with {threads}",
        "cuda": "a CUDA device",
    }[engine.device]
    rows, memory = made.config.batch.micro_batch, host_needs(made).memory
    return [
        f"  devices   the host: {device}; no IPU",
        f"  engine    {engine.precision}, attention {engine.attention}"
        f"{', layers recomputed' if engine.recomputes(ipus=False) else ''}{', compiled' if engine.compile else ''}",
        f"  memory    {_mib(memory.held)} MiB of weights, gradients and optimiser state; {_mib(memory.activations)} MiB"
        f" kept of {rows} pack{_s(rows)} at a time; {_mib(memory.most)} MiB in a step, computed",
    ]


def device_lines(made: RunPlan) -> List[str]:
    """The mask, the IPUs and the pipeline."""
    config, placement = made.config, made.placement
    stages = placement.stages
    waiting = ""
    if made.idle_share is not None:
        waiting = f", waiting {made.idle_share:.1%} of the time while it fills and drains"
    return [
        f"  mask      {_mask_words(made)}",
        f"  devices   {config.placement.replicas} replica{_s(config.placement.replicas)} of {placement.ipus}"
        f" IPU{_s(placement.ipus)} = {config.ipus} IPU{_s(config.ipus)}, {_machine(config)}",
        f"  pipeline  {len(stages)} forward stage{_s(len(stages))}"
        + (
            f" on IPUs {', '.join(str(stage.ipu) for stage in stages)}; {made.training_stages} in training{waiting}"
            if len(stages) > 1
            else ", no pipeline"
        ),
    ]


def memory_lines(made: RunPlan, *, narrow: bool = False) -> List[str]:
    """The table of what each IPU holds. narrow: for 110 columns, without blocks, parameters and the bar."""
    config, engine = made.config, made.config.engine
    rows = [["IPU", "blocks", "parameters", *MEMORY_PARTS, "together", "KiB/tile", "of it"]]
    for memory in made.memory:
        rows.append(
            [
                str(memory.ipu),
                _blocks(memory.blocks),
                f"{memory.parameters / 1e6:,.1f} M",
                *(_mib(value) for value in memory_parts(memory).values()),
                _mib(memory.together),
                f"{memory.share * MK2.memory_per_tile / 1024:,.0f}",
                f"{memory.share:.0%} {_bar(memory.share)}",
            ]
        )
    if narrow:
        rows = [[row[0], *row[3:-1], row[-1].split()[0] if row is not rows[0] else row[-1]] for row in rows]
    left = () if narrow else (1, len(rows[0]) - 1)
    return text_table(rows, left=left, indent="  ") + [
        f"  MiB of {IPU_BYTES / MIB:,.0f} ({MK2.memory_per_tile // 1024} KiB x {MK2.tiles:,} tiles); computed."
        f" {CODE_WORDS}.",
        "  Optimiser state is "
        + ("in the memory beside the chip" if config.placement.optimizer_state_off_chip else "on the chip")
        + (", shared out among the replicas" if config.placement.replicated_tensor_sharding else "")
        + "; layers are "
        + ("recomputed from their checkpoints." if engine.recomputes(ipus=True) else "kept whole."),
    ]


def _machine(config: Config) -> str:
    target = TARGETS[config.placement.machine]
    return f"{target.name.capitalize()}, {target.clock_hz / 1e9:.2f} GHz"


def _mask_words(made: RunPlan) -> str:
    slots, travels = made.slots, f"{_mib(_mask(made))} MiB to each IPU"
    if made.config.engine.mask == "additive":
        return f"additive: {slots:,} x {slots:,} for each pack, added to every head's scores; {travels}"
    head, columns = made.model.hidden_size // made.model.num_heads, mask_columns(made.model, made.depth)
    return (
        f"in the query/key product: heads of {head} + {columns} columns keep {made._depth_words()} and padding apart; "
        f"{travels}"
    )


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
    tenths = min(10, int(round(10 * share)))
    return "#" * tenths + "." * (10 - tenths) + ("!" if share > 1 else "")


def _mib(value: float) -> str:
    if value >= 10 * MIB or not value:
        return f"{value / MIB:,.0f}"
    return f"{value / MIB:.1f}" if value >= MIB / 10 else f"{value / MIB:.2f}"


def _s(number: int) -> str:
    return "" if number == 1 else "s"
