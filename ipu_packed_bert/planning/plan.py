"""The plan of a run of any task: what sits on which IPU, how large an update is, how much memory and traffic it takes.

Everything is computed from the configuration and, where they are there, the data: a data set's manifest, or files of
examples, which are packed. No device; torch loads for files of examples only.
Counted are weights, gradient accumulators, optimiser state on the chip, activations, and the temporary values of the
product that takes most, as the cycle model plans it. The program and its exchange are not counted.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Callable, Dict, List, NamedTuple, Optional, Sequence, Tuple

from ipu_packed_bert.cycles.matmul import Planner, Product
from ipu_packed_bert.cycles.target import MK2, TARGETS
from ipu_packed_bert.data.data_sets import known_packing_factor
from ipu_packed_bert.data.factors import PackingFactor, checked_factor, planned_factor, published_for
from ipu_packed_bert.planning.host_memory import TORCH, HostMemory, host_memory, multiply_adds
from ipu_packed_bert.settings.config import Config
from ipu_packed_bert.settings.finetuning import SQUAD
from ipu_packed_bert.settings.launch_lines import start_lines
from ipu_packed_bert.settings.placement import Block, Placement, place
from ipu_packed_bert.settings.rules import check_accumulation, check_for_ipus
from ipu_packed_bert.settings.schema import FINETUNE, ModelConfig, mask_columns
from ipu_packed_bert.tasks import task_class
from ipu_packed_bert.tasks.files import located
from ipu_packed_bert.tasks.pretraining import Pretraining
from pack_data.display.table import text_table
from pack_data.store.data_set import Manifest

if TYPE_CHECKING:
    from ipu_packed_bert.tasks.examples import ExampleTask

IPU_BYTES = MK2.memory_per_tile * MK2.tiles
MIB = 1024.0 * 1024.0
# Counted memory of the fullest IPU of the published runs, as a share of it: MLPerf v2.0's BERT-large on a Bow Pod64 (E4
# of cycles/points.py). Beside that much, what is not counted, code and exchange, is known to fit.
FULLEST_THAT_RAN = 0.88
_GUESSED_DEPTH = 8  # sequences in a pack, where neither data nor configuration say
_WIDTH = {"float16": 2, "float32": 4}


def _parameters(block: Block, model: ModelConfig) -> int:
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
    products: float  # temporary values of the product that takes most

    @property
    def activations(self) -> float:
        return self.kept + self.at_work

    @property
    def total(self) -> float:
        """What must be there, whatever Poplar plans."""
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
    unpacked: Optional[int] = None  # the accumulation that the packing factor may divide


class _Words(NamedTuple):
    """What is printed of a plan and differs between pre-training and tasks with files of examples."""

    row: str  # what an update is made of
    data: str
    apart: str  # what the mask keeps apart
    run: str  # "" while it is not known
    unknown: str  # why an update is not known, and the way out
    sizes: str = ""  # where the network's sizes come from, where the configuration does not have them


@dataclass(frozen=True)
class RunPlan:
    """What a configuration of any task amounts to."""

    config: Config  # with the micro-batch that runs, where the packing factor is known
    model: ModelConfig
    update: Optional[Update]  # None while no packing factor is known
    placement: Placement
    depth: int  # sequences that a pack has room for; a guess where neither configuration nor data set says it
    predictions: int  # masked tokens that a pack has room for
    bytes_per_pack: int  # host to device
    training_packs: Optional[int]  # None while the data are not there
    steps: Optional[int]  # updates of the whole run; None while they are not known
    words: _Words
    task: Optional[ExampleTask] = None  # of files of examples, where these and the checkpoint are there

    @cached_property
    def memory(self) -> Tuple[_Memory, ...]:
        return tuple(_ipu_memory(self, ipu) for ipu in range(self.placement.ipus))

    @property
    def slots(self) -> int:
        return self.config.data.max_sequence_length

    @property
    def updates_per_epoch(self) -> Optional[int]:
        return _updates_per_epoch(self.training_packs, self.update)

    @property
    def training_stages(self) -> int:
        """Stages of the training pipeline: each but the last runs backwards too."""
        return 2 * len(self.placement.stages) - 1

    @property
    def _idle_share(self) -> Optional[float]:
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
        """True up to `FULLEST_THAT_RAN`; on the host, whose is not planned here.

        False where more is counted than an IPU has. None between the two, where code and exchange decide.
        """
        if self.config.engine.kind == "host" or self.fullest <= FULLEST_THAT_RAN:
            return True
        return False if self.fullest > 1.0 else None

    def micro_batch_that_fits(self) -> Optional[int]:
        """The largest micro-batch below the configured one that counts no more than `FULLEST_THAT_RAN`."""
        batch = self.config.batch

        def fits(micro_batch: int) -> bool:
            config = replace(self.config, batch=replace(batch, micro_batch=micro_batch))
            return bool(replace(self, config=config).fits)

        return _largest_that_fits(batch.micro_batch, fits)


def plan(
    config: Config,
    manifest: Optional[Manifest] = None,
    *,
    data_dir: Optional[Path] = None,
    packing_factor: Optional[float] = None,
) -> RunPlan:
    """The plan of a configuration.

    manifest: of the data set of packs, where it is there. data_dir: where files of examples are looked for first.
    Raises ConfigError where an update has fewer micro-batches than the pipeline has stages, or the placement does not
    fit the network.
    """
    if config.command == FINETUNE:
        return _of_examples(config, data_dir, packing_factor)
    return _of_packs(config, manifest, packing_factor)


def _of_packs(config: Config, manifest: Optional[Manifest], packing_factor: Optional[float]) -> RunPlan:
    data, factor = config.data, known_packing_factor(config, manifest, packing_factor)
    update = None
    if factor is not None:
        check_accumulation(config, factor.value)
        update = _update(config, factor, unpacked=config.batch.gradient_accumulation)
    schema = manifest.schema if manifest is not None else None
    packs = None if manifest is None else manifest.packs
    depth = schema.max_sequences_per_pack if schema else data.max_sequences_per_pack or _GUESSED_DEPTH
    # The published rule, until a data set says otherwise (see pack_data.store.packs.predictions_per_pack).
    predictions = schema.max_predictions_per_pack if schema else config.predictions_per_sequence + depth
    # int32: four fields of slots, three of masked tokens, three of sequences; and two float32 scales.
    bytes_per_pack = 4 * (4 * data.max_sequence_length + 3 * predictions + 3 * depth + 2)
    sequences = f"up to {data.max_sequences_per_pack} sequences"
    if data.max_sequences_per_pack in (None, 1):
        sequences = "any number of sequences" if data.max_sequences_per_pack is None else "one sequence"
    known = packs is not None or data.max_sequences_per_pack is not None
    each = _updates_per_epoch(packs, update)
    epochs = ", an epoch's length is known once the data set is built"
    if each is not None:
        epochs = f", {each:,} an epoch: {config.run.steps / each:,.1f} epochs"
    words = _Words(
        row="pack",
        data=f"{data.named}: {'packs still to be built' if packs is None else f'{packs:,} packs to train on'},"
        f" {data.max_sequence_length} slots, {sequences} each",
        apart=f"up to {depth} sequences" if known else "the data set's sequences",
        run=f"{config.run.steps:,} updates{epochs}",
        unknown=f"unknown: no data set yet and no published packing factor for {data.max_sequence_length} slots; "
        "give --packing-factor",
    )
    return RunPlan(
        config=config,
        model=config.model,
        update=update,
        placement=place(config.placement, Pretraining(config).heads),
        depth=depth,
        predictions=predictions,
        bytes_per_pack=bytes_per_pack,
        training_packs=packs,
        steps=config.run.steps,
        words=words,
    )


def _of_examples(config: Config, data_dir: Optional[Path], packing_factor: Optional[float]) -> RunPlan:
    """What is there is read: the checkpoint's sizes, and the files, which are packed. Of the rest it is said."""
    from ipu_packed_bert.tasks.examples import Tokenizer
    from ipu_packed_bert.tasks.starting_weights import find_start, is_there, with_dropout  # load torch

    task, start, missing = None, None, ""
    try:
        config = located(config, data_dir)
    except ValueError as error:
        missing = str(error).partition(":")[0]
    if config.start.checkpoint is not None and not is_there(config.start.checkpoint):
        missing = missing or config.start.checkpoint
    elif config.start.checkpoint is not None or not missing:
        start = find_start(config)
    on_ipus, kind = config.engine.kind != "host", task_class(config.task.name)
    model = with_dropout(config.model, config) if start is None else start.model
    config = config.for_model(model, ipus=on_ipus)
    if start is not None and not missing:
        task = kind(config, Tokenizer(start.vocabulary), start.model, start.labels)
    factor, update = _factor(config, task, packing_factor), None
    if factor is not None:
        config = config.with_micro_batch(factor.value)
        if on_ipus:
            check_for_ipus(config, factor.value)
        update = _update(config, factor)
    depth, slots = config.data.max_sequences_per_pack or _GUESSED_DEPTH, config.data.max_sequence_length
    fields = 4 * slots + 4 * depth + 1
    data = f"{config.task.name}, rows of {slots} slots; "
    packs, training = None, False
    if task is None:
        data += f"{missing} is not there"
    else:
        depth = task.max_sequences_per_pack or depth
        batch = task.packs.batch(task.packs.order(0)[:1], 0)
        fields = sum(batch[name].size for name in task.fields if name in batch) + len(task.scales)
        packs, training = len(task.packs), task.training_packs is not None
        packing = task.packs.packing
        data += f"{packing.sequences:,} sequences in {packing.packs:,} rows of up to {packing.largest_depth}"
    each, run = _updates_per_epoch(packs, update), ""
    if update is not None:
        run = f"{config.run.epochs} epoch{_s(config.run.epochs)}"
        if training:
            run += f" of {each:,} updates"
        elif config.data.training is None:
            run += "; no training, only evaluation"
    sizes = "the configuration's" if start is None else start.description
    words = _Words(
        row="row",
        data=data,
        apart=f"up to {depth} sequences",
        run=run,
        unknown="unknown without the files; give --packing-factor, sequences in a row",
        sizes=f"; sizes: {sizes}",
    )
    return RunPlan(
        config=config,
        model=model,
        update=update,
        placement=place(config.placement, kind.heads),
        depth=depth,
        predictions=0,  # a head has a few outputs, and no masked tokens
        bytes_per_pack=4 * fields,
        training_packs=packs,
        steps=None if each is None else each * config.run.epochs,
        words=words,
        task=task,
    )


def _update(config: Config, factor: PackingFactor, unpacked: Optional[int] = None) -> Update:
    packs = config.packs_per_update(factor.value)
    return Update(factor, config.accumulation(factor.value), packs, packs * factor.value, unpacked)


def _updates_per_epoch(packs: Optional[int], update: Optional[Update]) -> Optional[int]:
    return None if packs is None or update is None else -(-packs // update.packs)


def _factor(config: Config, task: Optional[ExampleTask], given: Optional[float]) -> Optional[PackingFactor]:
    """Of the files if they are there, else the one given, else for SQuAD of the histogram published at this length."""
    data = config.data
    if given is not None:
        checked_factor(given, data.max_sequences_per_pack)
    if task is not None:
        return PackingFactor(task.packs.packing.packing_factor, f"{data.training or data.evaluation}")
    if given is not None:
        return PackingFactor(given, "--packing-factor")
    if not config.packed:
        return PackingFactor(1.0, "one sequence in a row")
    published = published_for(data.max_sequence_length)
    if config.task.name == SQUAD and published is not None and published.name.startswith(SQUAD):
        return planned_factor(data.max_sequence_length, data.packer, data.max_sequences_per_pack)
    return None


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


def _largest_that_fits(below: int, fits: Callable[[int], bool]) -> Optional[int]:
    """The largest micro-batch below this one that fits; None if not even one row does."""
    # _Memory grows with the micro-batch, so that the largest that fits is found by halving.
    low, high = 0, below
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low or None


def _ipu_memory(made: RunPlan, ipu: int) -> _Memory:
    config, engine = made.config, made.config.engine
    blocks = made.placement.on(ipu)
    number = sum(_parameters(block, made.model) for block in blocks)
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
        products=_temporary_values(made, ipu),
    )


_PLANNER = Planner(MK2)  # of the tiles; Bow has the same


def _temporary_values(made: RunPlan, ipu: int) -> float:
    """Bytes that the product of an IPU which takes most has for temporary values, forwards or backwards."""
    engine, proportion = made.config.engine, made.config.placement.available_memory_proportion[ipu]
    size = _width(made)
    partial = _WIDTH["float16" if engine.half_weights and engine.half_partials else "float32"]
    most = 0
    for matrices, rows, inner, columns in _products(made, ipu):
        # Forwards, the gradient of the first operand, that of the second.
        for shape in ((rows, inner, columns), (rows, columns, inner), (inner, rows, columns)):
            product = Product(matrices, *shape, element_bytes=size, partial_bytes=partial, memory_proportion=proportion)
            most = max(most, _PLANNER.plan(product).temporary_bytes)
    return float(most * MK2.tiles)


def _products(made: RunPlan, ipu: int) -> List[Tuple[int, int, int, int]]:
    """Matrices, rows, inner dimension and columns of an IPU's products of any size, forwards."""
    model, slots, micro_batch = made.model, made.slots, made.config.batch.micro_batch
    hidden, inner, rows = model.hidden_size, model.intermediate_size, micro_batch * made.slots
    modules = {block.module for block in made.placement.on(ipu)}
    found = []
    if any(".layer." in module for module in modules):
        width, heads = hidden // model.num_heads, micro_batch * model.num_heads
        codes = mask_columns(model, made.depth) if made.config.engine.mask == "product" else 0
        found = [(1, rows, hidden, hidden), (1, rows, hidden, inner), (1, rows, inner, hidden)]
        found += [(heads, slots, width + codes, slots), (heads, slots, slots, width)]
    if "cls.predictions" in modules:
        part = -(-model.vocabulary_size // made.config.placement.embedding_serialization_factor)
        found += [(1, micro_batch * made.predictions, hidden, columns) for columns in (hidden, part)]
    return found


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
    text = _lines(made)
    if made.config.engine.kind != "host":
        first, *rest = memory_words(made, None if made.fits else made.micro_batch_that_fits())
        text += [f"  verdict   {first}", *(f"            {line}" for line in rest)]
    if made.fits is not False:
        micro_batches = None
        if made.update is not None and isinstance(made.config, Config):
            micro_batches = made.update.packs // made.config.batch.micro_batch
        text += start_lines(made.config, options, micro_batches=micro_batches)
    print("\n".join(text))
    return 1 if made.fits is False else 0


def memory_words(made: RunPlan, smaller: Optional[int]) -> List[str]:
    """Whether the counted memory fits; where it does not surely, the way out: ``smaller``, a micro-batch that does."""
    found = _fit_words(made)
    if made.fits:
        return [found]
    return [found, _NOTHING_FITS if smaller is None else made.config.on_micro_batch(smaller)]


_NOTHING_FITS = "no micro-batch fits: more IPUs a replica, or other placement.layers_per_ipu"


def _fit_words(made: RunPlan) -> str:
    """Whether the counted memory fits, in words."""
    if made.fits:
        return (
            f"fits: at most {made.fullest:.0%} of a tile is counted, no more than in the published run that counts "
            f"most ({FULLEST_THAT_RAN:.0%})"
        )
    fullest = max(made.memory, key=lambda memory: memory.share)
    counted = f"{fullest.share:.1%} of IPU {fullest.ipu} is counted"
    if made.fits is False:
        return f"does not fit: {counted}, {fullest.total / IPU_BYTES:.0%} without temporary values of products"
    return (
        f"tight, unknown: {counted}; the published run that counts most has {FULLEST_THAT_RAN:.1%}; code and exchange "
        "are not counted"
    )


def _lines(made: RunPlan) -> List[str]:
    """The plan as text, without the verdict: of the host where the configuration names it, else of the IPUs."""
    config, model, update, words = made.config, made.model, made.update, made.words
    total = sum(memory.parameters for memory in made.memory)
    host = config.engine.kind == "host"
    kept = "float32" if host or not config.engine.half_weights else "float16"
    text = [
        f"{config.path}",
        f"  model     BERT, {model.num_layers} layers of {model.hidden_size:,}, {model.num_heads} heads,"
        f" vocabulary {model.vocabulary_size:,}: {total / 1e6:,.1f} M parameters in {kept}{words.sizes}",
        f"  data      {words.data}",
        *(_host_lines(made) if host else [*_device_lines(made), "", *_memory_lines(made)]),
        "",
    ]
    if update is None:
        text.append(f"  update    {words.unknown}")
    else:
        divided = ""
        if update.unpacked not in (None, update.accumulation):
            divided = f" ({update.unpacked:,} / {update.factor.value:.3f}, rounded up)"
        text += [
            f"  update    {update.packs:,} {words.row}s, about {update.sequences:,.0f} sequences"
            f" = micro-batch {config.batch.micro_batch} x accumulation {update.accumulation:,}{divided}"
            f" x replicas {config.placement.replicas}",
            f"  packing   {update.factor.value:.3f} sequences in a {words.row}, from {update.factor.source}",
        ]
    if words.run:
        text.append(f"  run       {words.run}")
    if not host and update is not None:
        sent = update.packs * made.bytes_per_pack / MIB
        text.append(
            f"  traffic   {sent:{',.1f' if sent >= 1 else ',.2f'}} MiB an update from host to device"
            f" ({update.packs:,} {words.row}s of {made.bytes_per_pack:,} bytes)"
        )
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
    compiled = ", compiled" if engine.compile else ""
    return [
        f"  devices   the host: {device}; no IPU",
        f"  engine    {engine.precision}, attention {engine.attention}"
        f"{', layers recomputed' if engine.recomputes(ipus=False) else ''}{compiled}",
        f"  memory    {_mib(memory.held)} MiB of weights, gradients and optimiser state; {_mib(memory.activations)} MiB"
        f" kept of {rows} pack{_s(rows)} at a time; {_mib(memory.most)} MiB in a step, computed"
        + ("" if engine.device == "cuda" else f"; a process on a CPU {_mib(memory.most + TORCH)} MiB"),
    ]


def _device_lines(made: RunPlan) -> List[str]:
    """The mask, the IPUs and the pipeline."""
    config, placement = made.config, made.placement
    stages = placement.stages
    waiting = ""
    if made._idle_share is not None:
        waiting = f", waiting {made._idle_share:.1%} of the time while it fills and drains"
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


def _memory_lines(made: RunPlan) -> List[str]:
    """The table of what each IPU holds."""
    config, engine = made.config, made.config.engine
    parts = ("weights", "gradients", "state", "kept", "at work", "products", "together")
    rows = [["IPU", "blocks", "parameters", *parts, "KiB/tile", "of it"]]
    for memory in made.memory:
        held = (memory.weights, memory.gradients, memory.optimizer, memory.kept, memory.at_work, memory.products)
        rows.append(
            [
                str(memory.ipu),
                _blocks(memory.blocks),
                f"{memory.parameters / 1e6:,.1f} M",
                *(_mib(value) for value in (*held, memory.together)),
                f"{memory.share * MK2.memory_per_tile / 1024:,.0f}",
                f"{memory.share:.0%} {_bar(memory.share)}",
            ]
        )
    return text_table(rows, left=(1, len(rows[0]) - 1), indent="  ") + [
        f"  MiB of {IPU_BYTES / MIB:,.0f} ({MK2.memory_per_tile // 1024} KiB x {MK2.tiles:,} tiles); computed."
        " Code and exchange come on top.",
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
        f"in the query/key product: heads of {head} + {columns} columns keep {made.words.apart} and padding apart; "
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
