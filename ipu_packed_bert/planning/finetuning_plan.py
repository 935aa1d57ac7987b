"""The plan of a fine-tuning run, as `plan` for pre-training: what on which IPU, how large an update, how much memory.

What is there is read: the checkpoint's sizes, and the files, which are packed. What is not there is said to be unknown.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import List, NamedTuple, Optional, Sequence

from ipu_packed_bert.cycles.fine_tuning import TaskCycles, task_cycles
from ipu_packed_bert.cycles.matmul import Planner, cache_folder
from ipu_packed_bert.cycles.target import TARGETS
from ipu_packed_bert.planning.plan import (
    MIB,
    NOTHING_FITS,
    RunPlan,
    Update,
    fit_words,
    host_lines,
    ipu_lines,
    ipu_memory,
    largest_that_fits,
)
from ipu_packed_bert.settings.finetuning import SQUAD, FinetuneConfig
from ipu_packed_bert.settings.launch_lines import start_lines
from ipu_packed_bert.settings.placement import place
from ipu_packed_bert.settings.pretraining import BatchConfig, Config, DataConfig, OptimizerConfig
from ipu_packed_bert.settings.schema import ModelConfig
from ipu_packed_bert.tasks import task_class
from ipu_packed_bert.tasks.examples import ExampleTask
from ipu_packed_bert.tasks.files import located
from ipu_packed_bert.tasks.starting_weights import Start, find_start, is_there
from ipu_packed_bert.tasks.tokenizer import Tokenizer
from pack_data.lengths.factors import PackingFactor, checked_factor, planned_factor, published_for

_GUESSED_DEPTH = 8  # sequences in a row, where neither files nor configuration say


class _FinetunePlan(NamedTuple):
    """What a configuration amounts to."""

    config: FinetuneConfig  # with the micro-batch that runs, where the packing factor is known
    run: RunPlan  # of a pre-training configuration of the same sizes, whose arithmetic is the same
    task: Optional[ExampleTask]  # None where a file or the checkpoint is not there
    missing: str  # what is not there, "" where all is
    sizes: str  # where the network's sizes come from
    cycles: Optional[TaskCycles]  # None without a task, and on the host


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
    run = _run(config, model, task, update)
    cycles = None
    if task is not None and factor is not None and not host:
        planner = Planner(TARGETS[config.placement.machine], cache_folder())
        cycles = task_cycles(config, task, planner, packing_factor=factor.value)
        planner.save()
    sizes = "the configuration's" if start is None else start.description
    return _FinetunePlan(config, run, task, missing, sizes, cycles)


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


def _run(config: FinetuneConfig, model: ModelConfig, task: Optional[ExampleTask], update: Optional[Update]) -> RunPlan:
    slots = config.data.max_sequence_length
    depth = config.data.max_sequences_per_pack or _GUESSED_DEPTH
    fields = 4 * slots + 4 * depth + 1
    if task is not None:
        depth = task.max_sequences_per_pack or depth
        batch = task.packs.batch(task.packs.order(0)[:1], 0)
        fields = sum(batch[name].size for name in task.fields if name in batch) + len(task.scales)
    sizes = Config(
        data=DataConfig(max_sequence_length=slots, max_sequences_per_pack=depth),
        model=model,
        optimizer=OptimizerConfig(name=config.optimizer.name, packing_adjustment="none"),
        batch=BatchConfig(
            micro_batch=config.batch.micro_batch, gradient_accumulation=update.accumulation if update else 1
        ),
        engine=config.engine,
        placement=config.placement,
        path=config.path,
    )
    placement = place(config.placement, task_class(config.task.name).heads)
    return RunPlan(
        config=sizes,
        update=update,
        placement=placement,
        # A head has a few outputs, and no masked tokens.
        memory=tuple(ipu_memory(sizes, placement, ipu, 0, depth) for ipu in range(placement.ipus)),
        depth=depth,
        predictions=0,
        bytes_per_pack=4 * fields,
        training_packs=None if task is None else len(task.packs),
    )


def print_plan(
    config: FinetuneConfig,
    *,
    data_dir: Optional[Path] = None,
    packing_factor: Optional[float] = None,
    options: Sequence[str] = (),
) -> int:
    """Print the plan and its verdict; the exit status, 1 where the memory does not fit.

    options: of the command that starts the run, see :func:`launch.start_lines`.
    """
    made = plan_fine_tuning(config, data_dir=data_dir, packing_factor=packing_factor)
    text = _lines(made) + ([] if made.config.engine.kind == "host" else verdict(made))
    if made.run.fits is not False:
        text += start_lines(config, options, command="finetune")
    print("\n".join(text))
    return 1 if made.run.fits is False else 0


def _lines(made: _FinetunePlan) -> List[str]:
    """The plan as text, without the verdict."""
    config, run = made.config, made.run
    model, data, update = run.config.model, config.data, run.update
    host = config.engine.kind == "host"
    total = sum(memory.parameters for memory in run.memory)
    kept = "float32" if host or not config.engine.half_weights else "float16"
    text = [
        f"{config.path}",
        f"  model     BERT, {model.num_layers} layers of {model.hidden_size:,}, {model.num_heads} heads,"
        f" vocabulary {model.vocabulary_size:,}: {total / 1e6:,.1f} M parameters in {kept}; sizes: {made.sizes}",
        f"  data      {config.task.name}, rows of {data.max_sequence_length} slots; {_data(made)}",
    ]
    text += (host_lines(run) if host else ipu_lines(run)) + [""]
    if update is None:
        return text + ["  update    unknown without the files; give --packing-factor, sequences in a row"]
    text += [
        f"  update    {update.packs:,} rows, about {update.sequences:,.0f} sequences = micro-batch"
        f" {config.batch.micro_batch} x accumulation {update.accumulation:,} x replicas {config.placement.replicas}",
        f"  packing   {update.factor.value:.3f} sequences in a row, from {update.factor.source}",
    ]
    epochs = f"{config.run.epochs} epoch{'' if config.run.epochs == 1 else 's'}"
    if made.task is None or made.task.training_packs is None:
        text.append(f"  run       {epochs}" + ("" if data.training is not None else "; no training, only evaluation"))
    else:
        each = -(-len(made.task.training_packs) // update.packs)
        text.append(f"  run       {epochs} of {each:,} updates")
    if not host:
        text += _cycles(made)
        text.append(f"  traffic   {update.packs * run.bytes_per_pack / MIB:,.2f} MiB an update from host to device")
    return text


def _data(made: _FinetunePlan) -> str:
    if made.task is None:
        return f"{made.missing} is not there"
    packing = made.task.packs.packing
    return f"{packing.sequences:,} sequences in {packing.packs:,} rows of up to {packing.largest_depth}"


def _cycles(made: _FinetunePlan) -> List[str]:
    cycles, update = made.cycles, made.run.update
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


def verdict(made: _FinetunePlan) -> List[str]:
    """Whether the counted memory fits; where it does not surely, the way out."""
    text = [f"  verdict   {fit_words(made.run)}"]
    if made.run.fits:
        return text

    def fits(micro_batch: int) -> bool:
        smaller = replace(made.config, batch=replace(made.config.batch, micro_batch=micro_batch))
        return bool(_run(smaller, made.run.config.model, made.task, made.run.update).fits)

    smaller = largest_that_fits(made.config.batch.micro_batch, fits)
    way = NOTHING_FITS if smaller is None else f"--set batch.micro_batch={smaller} fits; an update stays as large"
    return [*text, f"            {way}"]
