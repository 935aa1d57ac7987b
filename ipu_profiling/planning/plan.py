"""The plan of a run of any task: its placement on IPUs, the size of an update, its memory and traffic.

It is computed from the configuration and from existing data: the manifest of a data set, or files of examples, which
are packed. It needs no device; torch is imported for files of examples only.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Dict, Mapping, NamedTuple, Optional

from ipu_packed_bert.data.data_sets import known_packing_factor
from ipu_packed_bert.data.factors import (
    PackingFactor,
    checked_factor,
    planned_factor,
    published_for,
)
from ipu_packed_bert.settings.config import Config
from ipu_packed_bert.settings.finetuning import SQUAD
from ipu_packed_bert.settings.placement import place
from ipu_packed_bert.settings.rules import check_accumulation, check_for_ipus
from ipu_packed_bert.settings.schema import FINETUNE
from ipu_packed_bert.tasks import task_class
from ipu_packed_bert.tasks.files import located
from ipu_profiling.planning.host_memory import HostMemory, host_memory
from ipu_profiling.planning.ipu_memory import GUESSED_DEPTH, ReplicaMemory, memory_of_packs
from pack_data.display.facts import Fact, with_unit
from pack_data.reading.words import counted
from pack_data.store.data_set import Manifest

if TYPE_CHECKING:
    from ipu_packed_bert.tasks.examples import ExampleTask


class _Update(NamedTuple):
    """One weight update at a packing factor."""

    factor: PackingFactor
    accumulation: int
    packs: int  # of data
    rows: int  # the packs of data, and the empty ones that fill the last micro-batches


@dataclass(frozen=True)
class RunPlan(ReplicaMemory):
    """The plan of a configuration of any task; with the micro-batch that runs, if the packing factor is known."""

    update: Optional[_Update]  # None while no packing factor is known
    bytes_per_pack: int  # host to device
    training_packs: Optional[int]  # None while the data are missing
    about: Mapping[str, Fact]  # the data and the length of the run
    task: Optional[ExampleTask] = None  # of files of examples, if these and the checkpoint exist

    @property
    def on_host(self) -> bool:
        """True if the run needs no IPU."""
        return self.config.engine.kind == "host"

    @property
    def row(self) -> str:
        """The word for a row of sequences."""
        return "row" if self.config.command == FINETUNE else "pack"

    @property
    def host_memory(self) -> HostMemory:
        """Memory of a run on a CPU or a GPU."""
        return host_memory(
            self.config,
            self.model,
            parameters=self.parameters,
            slots=self.config.data.max_sequence_length,
            predictions=self.predictions,
            packing_factor=1.0 if self.update is None else self.update.factor.value,
        )

    @property
    def training_stages(self) -> int:
        """Stages of the training pipeline: each but the last runs backwards too."""
        return 2 * len(self.placement.stages) - 1


def plan(
    config: Config,
    manifest: Optional[Manifest] = None,
    *,
    data_dir: Optional[Path] = None,
    packing_factor: Optional[float] = None,
) -> RunPlan:
    """Plan the run of a configuration.

    Args:
        config: configuration of pre-training or of fine-tuning.
        manifest: manifest of the data set of packs, if it exists.
        data_dir: the first directory in which files of examples are looked up.
        packing_factor: sequences per pack, in place of that of the data.

    Raises:
        ConfigError: an update has fewer micro-batches than the pipeline has stages, or the placement does not fit the
            network.
    """
    if config.command == FINETUNE:
        return _of_examples(config, data_dir, packing_factor)
    return _of_packs(config, manifest, packing_factor)


def _update(config: Config, factor: PackingFactor) -> _Update:
    accumulation = config.accumulation(factor.value)
    packs = config.packs_per_update(factor.value)
    rows = config.micro_batches_per_update(factor.value) * config.batch.micro_batch
    return _Update(factor, accumulation, packs, rows)


def _updates_per_epoch(packs: int, update: _Update) -> int:
    return -(-packs // update.packs)


def _about(data: str, length: str) -> Dict[str, Fact]:
    """Return the data and, if it is known, the length of a run."""
    rows = {"data": Fact("data", data)}
    if length:
        rows["run"] = Fact("run", length)
    return rows


# ---- pre-training ----------------------------------------------------------------------------------------------------


def _of_packs(
    config: Config, manifest: Optional[Manifest], packing_factor: Optional[float]
) -> RunPlan:
    data = config.data
    factor = known_packing_factor(config, manifest, packing_factor)
    update = None
    if factor is not None:
        config = config.with_micro_batch(factor.value)
        check_accumulation(config, factor.value)
        update = _update(config, factor)
    config = config.with_micro_batch(1.0)  # without an update, its memory

    counted_memory = memory_of_packs(config)
    packs: Optional[int] = None
    if manifest is not None:
        packs = manifest.packs
        schema = manifest.schema
        counted_memory = replace(
            counted_memory,
            depth=schema.max_sequences_per_pack,
            predictions=schema.max_predictions_per_pack,
        )
    depth = counted_memory.depth
    # int32: four fields of slots, three of masked tokens, three of sequences; and two float32 scales.
    numbers = 4 * data.max_sequence_length + 3 * counted_memory.predictions + 3 * depth + 2
    return RunPlan(
        **vars(counted_memory),
        update=update,
        bytes_per_pack=4 * numbers,
        training_packs=packs,
        about=_about(_packs_in_words(config, packs), _steps_in_words(config, packs, update)),
    )


def _packs_in_words(config: Config, packs: Optional[int]) -> str:
    data = config.data
    limit = data.depth
    texts = {None: "any number of sequences", 1: "one sequence"}
    sequences = texts.get(limit, f"up to {limit} sequences")
    state = "packs not built yet" if packs is None else f"{counted(packs, 'pack')} to train on"
    return f"{data.named}: {state}, {data.max_sequence_length:,} slots, {sequences} each"


def _steps_in_words(config: Config, packs: Optional[int], update: Optional[_Update]) -> str:
    steps = config.run.steps
    if packs is None or update is None:
        return f"{counted(steps, 'update')} (the length of an epoch is unknown until the data set is built)"
    updates = _updates_per_epoch(packs, update)
    epochs = with_unit(steps / updates, "epochs")
    return f"{counted(steps, 'update')}, {updates:,} an epoch: {epochs}"


# ---- files of examples -----------------------------------------------------------------------------------------------


def _of_examples(
    config: Config, data_dir: Optional[Path], packing_factor: Optional[float]
) -> RunPlan:
    """Plan from the sizes of the checkpoint and the files, as far as they exist; the files are packed."""
    # These import torch.
    from ipu_packed_bert.tasks.inputs import Tokenizer
    from ipu_packed_bert.tasks.starting_weights import find_start, is_there, with_dropout

    start = None
    missing = ""  # the first file that does not exist
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
    task = None
    if start is not None and not missing:
        task = kind(config, Tokenizer(start.vocabulary), start.model, start.labels)

    update = None
    factor = _factor(config, task, packing_factor)
    if factor is not None:
        config = config.with_micro_batch(factor.value)
        if on_ipus:
            check_for_ipus(config, factor.value)
        update = _update(config, factor)
    else:
        rows = config.rows_at_once(config.batch.sequences_per_update)
        config = config.changed("batch", micro_batch=rows)

    slots = config.data.max_sequence_length
    depth = config.data.depth or GUESSED_DEPTH
    numbers = 4 * slots + 4 * depth + 1  # of a row
    packs = None
    data = f"{config.task.name}, rows of {slots:,} slots; "
    if task is None:
        data += f"{missing} is missing"
    else:
        depth = task.max_sequences_per_pack or depth
        batch = task.packs.batch(task.packs.order(0)[:1], 0)
        numbers = sum(batch[name].size for name in task.fields if name in batch) + len(task.scales)
        packs = len(task.packs)
        packing = task.packs.packing
        data += f"{counted(packing.sequences, 'sequence')} in {counted(packing.packs, 'row')} "
        data += f"of up to {packing.largest_depth}"

    about = _about(data, _epochs(config, task, update))
    sizes = "the configuration's" if start is None else start.description
    about["sizes"] = Fact("sizes", sizes)
    return RunPlan(
        config=config,
        model=model,
        update=update,
        placement=place(config.placement, kind.heads),
        depth=depth,
        predictions=0,  # a head has a few outputs and no masked tokens
        bytes_per_pack=4 * numbers,
        training_packs=packs,
        about=about,
        task=task,
    )


def _epochs(config: Config, task: Optional[ExampleTask], update: Optional[_Update]) -> str:
    """Describe the length of a run; "" while the size of an update is unknown."""
    if update is None:
        return ""
    run = counted(config.run.epochs, "epoch")
    if task is not None and task.training_packs is not None:
        return f"{run} of {counted(_updates_per_epoch(len(task.packs), update), 'update')}"
    if config.data.training is None:
        return f"{run}; no training, only evaluation"
    return run


def _factor(
    config: Config, task: Optional[ExampleTask], option: Optional[float]
) -> Optional[PackingFactor]:
    """Return the factor of existing files, or of --packing-factor, or for SQuAD of its published histogram."""
    data = config.data
    if option is not None:
        checked_factor(option, data.depth)
    if task is not None:
        files = data.training or data.evaluation
        return PackingFactor(task.packs.packing.packing_factor, str(files))
    if option is not None:
        return PackingFactor(option, "--packing-factor")
    if not config.packed:
        return PackingFactor(1.0, "one sequence in a row")
    published = published_for(data.max_sequence_length)
    if config.task.name == SQUAD and published is not None and published.name.startswith(SQUAD):
        return planned_factor(data.max_sequence_length, data.packer, data.depth)
    return None
