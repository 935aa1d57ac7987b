"""The plan of a run of any task: what sits on which IPU, how large an update is, how much memory and traffic it takes.

Everything is computed from the configuration and the data that exist: a data set's manifest, or files of examples,
which are packed. No device is needed; torch loads for files of examples only.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, Optional, Tuple

from ipu_packed_bert.data.data_sets import known_packing_factor
from ipu_packed_bert.data.factors import (
    PackingFactor,
    checked_factor,
    planned_factor,
    published_for,
)
from ipu_packed_bert.planning.host_memory import HostMemory, host_memory
from ipu_packed_bert.planning.ipu_memory import IpuMemory, ReplicaMemory
from ipu_packed_bert.settings.config import Config
from ipu_packed_bert.settings.finetuning import SQUAD
from ipu_packed_bert.settings.placement import Placement, place
from ipu_packed_bert.settings.rules import check_accumulation, check_for_ipus
from ipu_packed_bert.settings.schema import FINETUNE, ModelConfig
from ipu_packed_bert.tasks import task_class
from ipu_packed_bert.tasks.files import located
from ipu_packed_bert.tasks.pretraining import Pretraining
from pack_data.store.data_set import Manifest

if TYPE_CHECKING:
    from ipu_packed_bert.tasks.examples import ExampleTask

# Counted memory of the fullest IPU of the published runs, as a share of it: MLPerf v2.0's BERT-large on a Bow Pod64 (E4
# of cycles/points.py). Beside that much, what is not counted, code and exchange, is known to fit.
FULLEST_THAT_RAN = 0.88
_GUESSED_DEPTH = 8  # sequences in a pack, if neither data nor configuration say


class _Update(NamedTuple):
    """One weight update at a packing factor."""

    factor: PackingFactor
    accumulation: int
    packs: int
    unpacked: Optional[int] = None  # the accumulation that the packing factor may divide


class _Words(NamedTuple):
    """The printed words that differ between pre-training and tasks with files of examples."""

    row: str  # what an update is made of
    data: str
    apart: str  # what the mask keeps apart
    run: str  # "" while it is not known
    unknown: str  # why an update is not known, and the way out
    sizes: str = ""  # where the network's sizes come from, if the configuration does not have them


@dataclass(frozen=True)
class RunPlan:
    """The plan of a configuration of any task."""

    config: Config  # with the micro-batch that runs, if the packing factor is known
    model: ModelConfig
    update: Optional[_Update]  # None while no packing factor is known
    placement: Placement
    depth: int  # sequences that a pack has room for; a guess if neither configuration nor data set says it
    predictions: int  # masked tokens that a pack has room for
    bytes_per_pack: int  # host to device
    training_packs: Optional[int]  # None while the data are missing
    words: _Words
    task: Optional[ExampleTask] = None  # of files of examples, if these and the checkpoint exist

    @property
    def _replica(self) -> ReplicaMemory:
        return ReplicaMemory(self.config, self.model, self.placement, self.depth, self.predictions)

    @cached_property
    def memory(self) -> Tuple[IpuMemory, ...]:
        return self._replica.counted()

    @property
    def mask_bytes(self) -> float:
        return self._replica.mask_bytes()

    @property
    def parameters(self) -> int:
        return sum(memory.parameters for memory in self.memory)

    @property
    def host_memory(self) -> HostMemory:
        """Memory of a run on a CPU or a GPU."""
        slots = self.config.data.max_sequence_length
        return host_memory(
            self.config,
            self.model,
            parameters=self.parameters,
            slots=slots,
            predictions=self.predictions,
        )

    @property
    def updates_per_epoch(self) -> Optional[int]:
        return _updates_per_epoch(self.training_packs, self.update)

    @property
    def training_stages(self) -> int:
        """Stages of the training pipeline: each but the last runs backwards too."""
        return 2 * len(self.placement.stages) - 1

    @property
    def fullest(self) -> float:
        """Counted memory of the fullest IPU, as a share of what an IPU has."""
        return max(memory.share for memory in self.memory)

    @property
    def fits(self) -> Optional[bool]:
        """True up to `FULLEST_THAT_RAN`; on the host, whose is not planned here.

        False if more is counted than an IPU has. None between the two, where code and exchange decide.
        """
        if self.config.engine.kind == "host" or self.fullest <= FULLEST_THAT_RAN:
            return True
        return False if self.fullest > 1.0 else None

    def micro_batch_that_fits(self) -> Optional[int]:
        """Return the largest micro-batch below the configured one that counts no more than `FULLEST_THAT_RAN`."""
        batch = self.config.batch
        # Memory grows with the micro-batch, so that the largest is found by halving.
        low, high = 0, batch.micro_batch
        while high - low > 1:
            middle = (low + high) // 2
            config = replace(self.config, batch=replace(batch, micro_batch=middle))
            if replace(self, config=config).fits:
                low = middle
            else:
                high = middle
        return low or None


def plan(
    config: Config,
    manifest: Optional[Manifest] = None,
    *,
    data_dir: Optional[Path] = None,
    packing_factor: Optional[float] = None,
) -> RunPlan:
    """Plan the run of a configuration.

    Args:
        config: of pre-training or of fine-tuning.
        manifest: of the data set of packs, if it exists.
        data_dir: directory in which files of examples are looked for first.
        packing_factor: sequences of a pack, instead of what is known of the data.

    Raises:
        ConfigError: if an update has fewer micro-batches than the pipeline has stages, or the placement does not fit
            the network.
    """
    if config.command == FINETUNE:
        return _of_examples(config, data_dir, packing_factor)
    return _of_packs(config, manifest, packing_factor)


def _update(config: Config, factor: PackingFactor, unpacked: Optional[int] = None) -> _Update:
    return _Update(
        factor, config.accumulation(factor.value), config.packs_per_update(factor.value), unpacked
    )


def _updates_per_epoch(packs: Optional[int], update: Optional[_Update]) -> Optional[int]:
    return None if packs is None or update is None else -(-packs // update.packs)


# ---- pre-training ----------------------------------------------------------------------------------------------------


def _of_packs(
    config: Config, manifest: Optional[Manifest], packing_factor: Optional[float]
) -> RunPlan:
    data = config.data
    factor = known_packing_factor(config, manifest, packing_factor)
    update = None
    if factor is not None:
        check_accumulation(config, factor.value)
        update = _update(config, factor, unpacked=config.batch.gradient_accumulation)

    if manifest is not None:
        packs: Optional[int] = manifest.packs
        depth = manifest.schema.max_sequences_per_pack
        predictions = manifest.schema.max_predictions_per_pack
    else:
        packs = None
        depth = data.max_sequences_per_pack or _GUESSED_DEPTH
        # The published rule, until a data set says otherwise (see pack_data.store.packs.predictions_per_pack).
        predictions = config.predictions_per_sequence + depth
    # int32: four fields of slots, three of masked tokens, three of sequences; and two float32 scales.
    bytes_per_pack = 4 * (4 * data.max_sequence_length + 3 * predictions + 3 * depth + 2)
    return RunPlan(
        config=config,
        model=config.model,
        update=update,
        placement=place(config.placement, Pretraining(config).heads),
        depth=depth,
        predictions=predictions,
        bytes_per_pack=bytes_per_pack,
        training_packs=packs,
        words=_words_of_packs(config, packs, depth, update),
    )


def _words_of_packs(
    config: Config, packs: Optional[int], depth: int, update: Optional[_Update]
) -> _Words:
    data = config.data
    limit = data.max_sequences_per_pack
    sequences = {None: "any number of sequences", 1: "one sequence"}.get(
        limit, f"up to {limit} sequences"
    )
    state = "packs still to be built" if packs is None else f"{packs:,} packs to train on"
    known = packs is not None or limit is not None
    updates = _updates_per_epoch(packs, update)
    if updates is None:
        epochs = "an epoch's length is known once the data set is built"
    else:
        epochs = f"{updates:,} an epoch: {config.run.steps / updates:,.1f} epochs"
    return _Words(
        row="pack",
        data=f"{data.named}: {state}, {data.max_sequence_length} slots, {sequences} each",
        apart=f"up to {depth} sequences" if known else "the data set's sequences",
        run=f"{config.run.steps:,} updates, {epochs}",
        unknown=f"unknown: no data set yet and no published packing factor for {data.max_sequence_length} slots; "
        "give --packing-factor",
    )


# ---- files of examples -----------------------------------------------------------------------------------------------


def _of_examples(
    config: Config, data_dir: Optional[Path], packing_factor: Optional[float]
) -> RunPlan:
    """Plan from what exists: the checkpoint's sizes, and the files, which are packed."""
    from ipu_packed_bert.tasks.inputs import Tokenizer
    from ipu_packed_bert.tasks.starting_weights import (
        find_start,
        is_there,
        with_dropout,
    )  # load torch

    task, start, missing = None, None, ""
    try:
        config = located(config, data_dir)
    except ValueError as error:
        missing = str(error).partition(":")[0]
    checkpoint = config.start.checkpoint
    if checkpoint is not None and not is_there(checkpoint):
        missing = missing or checkpoint
    elif checkpoint is not None or not missing:
        start = find_start(config)
    on_ipus = config.engine.kind != "host"
    kind = task_class(config.task.name)
    model = with_dropout(config.model, config) if start is None else start.model
    config = config.for_model(model, ipus=on_ipus)
    if start is not None and not missing:
        task = kind(config, Tokenizer(start.vocabulary), start.model, start.labels)

    update = None
    factor = _factor(config, task, packing_factor)
    if factor is not None:
        config = config.with_micro_batch(factor.value)
        if on_ipus:
            check_for_ipus(config, factor.value)
        update = _update(config, factor)

    depth, slots = (
        config.data.max_sequences_per_pack or _GUESSED_DEPTH,
        config.data.max_sequence_length,
    )
    numbers = 4 * slots + 4 * depth + 1
    data = f"{config.task.name}, rows of {slots} slots; "
    packs = None
    if task is None:
        data += f"{missing} is not there"
    else:
        depth = task.max_sequences_per_pack or depth
        batch = task.packs.batch(task.packs.order(0)[:1], 0)
        numbers = sum(batch[name].size for name in task.fields if name in batch) + len(task.scales)
        packs = len(task.packs)
        packing = task.packs.packing
        data += f"{packing.sequences:,} sequences in {packing.packs:,} rows of up to {packing.largest_depth}"

    sizes = "the configuration's" if start is None else start.description
    words = _Words(
        row="row",
        data=data,
        apart=f"up to {depth} sequences",
        run="" if update is None else _epochs(config, task, _updates_per_epoch(packs, update)),
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
        bytes_per_pack=4 * numbers,
        training_packs=packs,
        words=words,
        task=task,
    )


def _epochs(config: Config, task: Optional[ExampleTask], updates: Optional[int]) -> str:
    epochs = config.run.epochs
    run = f"{epochs} epoch{'' if epochs == 1 else 's'}"
    if task is not None and task.training_packs is not None:
        return f"{run} of {updates:,} updates"
    return run if config.data.training is not None else f"{run}; no training, only evaluation"


def _factor(
    config: Config, task: Optional[ExampleTask], given: Optional[float]
) -> Optional[PackingFactor]:
    """Return the factor of the files if they exist, else the given one, else for SQuAD that of its histogram."""
    data = config.data
    if given is not None:
        checked_factor(given, data.max_sequences_per_pack)
    if task is not None:
        return PackingFactor(
            task.packs.packing.packing_factor, f"{data.training or data.evaluation}"
        )
    if given is not None:
        return PackingFactor(given, "--packing-factor")
    if not config.packed:
        return PackingFactor(1.0, "one sequence in a row")
    published = published_for(data.max_sequence_length)
    if config.task.name == SQUAD and published is not None and published.name.startswith(SQUAD):
        return planned_factor(data.max_sequence_length, data.packer, data.max_sequences_per_pack)
    return None
