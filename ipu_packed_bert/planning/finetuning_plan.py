"""The plan of a fine-tuning run, as `plan` for pre-training: what on which IPU, how large an update, how much memory.

What is there is read: the checkpoint's sizes, and the files, which are packed. What is not there is said to be unknown.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import List, Optional

from ipu_packed_bert.cycles.fine_tuning import TaskCycles, task_cycles
from ipu_packed_bert.cycles.matmul import Planner, cache_folder
from ipu_packed_bert.cycles.target import TARGETS
from ipu_packed_bert.planning.plan import MIB, RunPlan, Update
from ipu_packed_bert.settings.finetuning import SQUAD, FinetuneConfig
from ipu_packed_bert.settings.placement import place
from ipu_packed_bert.settings.schema import ModelConfig
from ipu_packed_bert.tasks import task_class
from ipu_packed_bert.tasks.examples import ExampleTask
from ipu_packed_bert.tasks.files import located
from ipu_packed_bert.tasks.starting_weights import Start, find_start, is_there
from ipu_packed_bert.tasks.tokenizer import Tokenizer
from pack_data.lengths.factors import PackingFactor, checked_factor, planned_factor, published_for

_GUESSED_DEPTH = 8  # sequences in a row, where neither files nor configuration say


@dataclass(frozen=True)
class _FinetunePlan(RunPlan):
    """What a configuration amounts to; its micro-batch is the one that runs, where the packing factor is known."""

    task: Optional[ExampleTask]  # None where a file or the checkpoint is not there
    missing: str  # what is not there, "" where all is
    sizes: str  # where the network's sizes come from
    cycles: Optional[TaskCycles]  # None without a task, and on the host

    command = "finetune"
    row = "row"
    run_is_known = False
    unknown = "unknown without the files; give --packing-factor, sequences in a row"

    @property
    def steps(self) -> Optional[int]:
        each = self.updates_per_epoch
        return None if each is None else each * self.config.run.epochs

    def _sizes_words(self) -> str:
        return f"; sizes: {self.sizes}"

    def _data_words(self) -> str:
        rows = f"{self.config.task.name}, rows of {self.slots} slots"
        if self.task is None:
            return f"{rows}; {self.missing} is not there"
        packing = self.task.packs.packing
        return f"{rows}; {packing.sequences:,} sequences in {packing.packs:,} rows of up to {packing.largest_depth}"

    def _depth_words(self) -> str:
        return f"up to {self.depth} sequences"

    def _divided_words(self) -> str:
        return ""

    def _run_words(self) -> str:
        epochs = f"{self.config.run.epochs} epoch{'' if self.config.run.epochs == 1 else 's'}"
        if self.task is None or self.task.training_packs is None:
            return epochs + ("" if self.config.data.training is not None else "; no training, only evaluation")
        return f"{epochs} of {self.updates_per_epoch:,} updates"

    def _ipu_lines(self) -> List[str]:
        assert self.bytes_per_update is not None
        traffic = f"  traffic   {self.bytes_per_update / MIB:,.2f} MiB an update from host to device"
        return [*_cycles(self), traffic]

    def _speed_lines(self) -> List[str]:
        return []  # the cycles are above

    def _shared_micro_batches(self) -> Optional[int]:
        return None

    def _with_smaller_words(self, smaller: int) -> str:
        return f"--set batch.micro_batch={smaller} fits; an update stays as large"


def plan_fine_tuning(
    config: FinetuneConfig, *, data_dir: Optional[Path] = None, packing_factor: Optional[float] = None
) -> _FinetunePlan:
    """Raises ConfigError where the placement does not fit the network, or an update does not fill the pipeline."""
    task, start, missing = None, None, ""
    try:
        config = located(config, data_dir)
    except ValueError as error:
        missing = str(error).partition(":")[0]
    if config.model.checkpoint is not None and not is_there(config.model.checkpoint):
        missing = missing or config.model.checkpoint
    elif config.model.checkpoint is not None or not missing:
        start = find_start(config)
    host = config.engine.kind == "host"
    model = _sizes(config) if start is None else start.model
    config = config.for_model(model, ipus=not host)
    if start is not None and not missing:
        task = _task(config, start)
    factor = _factor(config, task, packing_factor)
    update = None
    if factor is not None:
        config = config.with_micro_batch(factor.value)
        if not host:
            config.check_for_ipus(factor.value)
        rows = config.packs_per_update(factor.value)
        update = Update(factor, config.accumulation(factor.value), rows, rows * factor.value)
    cycles = None
    if task is not None and factor is not None and not host:
        planner = Planner(TARGETS[config.placement.machine], cache_folder())
        cycles = task_cycles(config, task, planner, packing_factor=factor.value)
        planner.save()
    sizes = "the configuration's" if start is None else start.description
    slots = config.data.max_sequence_length
    depth = config.data.max_sequences_per_pack or _GUESSED_DEPTH
    fields = 4 * slots + 4 * depth + 1
    if task is not None:
        depth = task.max_sequences_per_pack or depth
        batch = task.packs.batch(task.packs.order(0)[:1], 0)
        fields = sum(batch[name].size for name in task.fields if name in batch) + len(task.scales)
    return _FinetunePlan(
        config=config,
        model=model,
        update=update,
        placement=place(config.placement, task_class(config.task.name).heads),
        depth=depth,
        predictions=0,  # a head has a few outputs, and no masked tokens
        bytes_per_pack=4 * fields,
        training_packs=None if task is None else len(task.packs),
        task=task,
        missing=missing,
        sizes=sizes,
        cycles=cycles,
    )


def _sizes(config: FinetuneConfig) -> ModelConfig:
    """Those that the configuration states, for a checkpoint that is not there."""
    stated = config.model
    return ModelConfig(
        vocabulary_size=stated.vocabulary_size,
        hidden_size=stated.hidden_size,
        num_layers=stated.num_layers,
        num_heads=stated.num_heads,
        intermediate_size=stated.intermediate_size,
        attention_dropout=ModelConfig.attention_dropout
        if stated.attention_dropout is None
        else stated.attention_dropout,
    )


def _task(config: FinetuneConfig, start: Start) -> ExampleTask:
    return task_class(config.task.name)(config, Tokenizer(start.vocabulary), start.model, start.labels)


def _factor(config: FinetuneConfig, task: Optional[ExampleTask], given: Optional[float]) -> Optional[PackingFactor]:
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


def _cycles(made: _FinetunePlan) -> List[str]:
    cycles, update = made.cycles, made.update
    if cycles is None or update is None:
        return ["  cycles    unknown: the files decide how many sequences and labels a row has"]
    target = TARGETS[made.config.placement.machine]
    text = [
        f"  cycles    {cycles.pipeline_cycle / 1e6:,.2f} million a micro-batch, {cycles.update / 1e6:,.2f} million an"
        f" update: {cycles.seconds * 1e3:,.1f} ms at {target.clock_hz / 1e9:.2f} GHz, about"
        f" {update.sequences / cycles.seconds:,.0f} sequences a second",
        "            computed by the cycle model, whose parameters were fitted to pre-training; nothing of fine-tuning"
        " was measured",
    ]
    if cycles.unknown:
        names = ", ".join(sorted(name.split(".")[1] for name in cycles.unknown))
        text.append(f"            not counted, since the model does not know them: {names}")
    return text
