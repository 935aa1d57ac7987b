"""A plan as text, with its verdict on memory."""

from __future__ import annotations

from typing import List, Optional, Sequence, Tuple

from ipu_packed_bert.cycles.target import MK2, TARGETS
from ipu_packed_bert.planning.host_memory import TORCH
from ipu_packed_bert.planning.ipu_memory import IPU_BYTES
from ipu_packed_bert.planning.plan import FULLEST_THAT_RAN, RunPlan
from ipu_packed_bert.settings.launch_lines import start_lines
from ipu_packed_bert.settings.placement import Block
from ipu_packed_bert.settings.schema import FINETUNE, mask_columns
from pack_data.display.table import text_table

_MIB = 1024.0 * 1024.0
_NOTHING_FITS = "no micro-batch fits: more IPUs a replica, or other placement.layers_per_ipu"


def print_plan(run: RunPlan, options: Sequence[str] = ()) -> int:
    """Print a plan and its verdict.

    Args:
        run: the plan.
        options: of the command that starts the run, see :func:`launch_lines.start_lines`.

    Returns:
        The exit status, 1 if the memory does not fit.
    """
    text = _lines(run)
    if run.config.engine.kind != "host":
        first, *rest = memory_words(run, None if run.fits else run.micro_batch_that_fits())
        text += [f"  verdict   {first}", *(f"            {line}" for line in rest)]
    if run.fits is not False:
        micro_batches = None
        if run.update is not None and run.config.command != FINETUNE:
            micro_batches = run.update.packs // run.config.batch.micro_batch
        text += start_lines(run.config, options, micro_batches=micro_batches)
    print("\n".join(text))
    return 1 if run.fits is False else 0


def memory_words(run: RunPlan, smaller: Optional[int]) -> List[str]:
    """Say whether the counted memory fits and, if that is not sure, what to change.

    Args:
        run: the plan.
        smaller: a micro-batch that fits, if there is one.
    """
    if run.fits:
        return [
            f"fits: at most {run.fullest:.0%} of a tile is counted, no more than in the published run that counts "
            f"most ({FULLEST_THAT_RAN:.0%})"
        ]
    fullest = max(run.memory, key=lambda memory: memory.share)
    counted = f"{fullest.share:.1%} of IPU {fullest.ipu} is counted"
    if run.fits is False:
        verdict = f"does not fit: {counted}, {fullest.total / IPU_BYTES:.0%} without temporary values of products"
    else:
        verdict = (
            f"tight, unknown: {counted}; the published run that counts most has {FULLEST_THAT_RAN:.1%}; code and "
            "exchange are not counted"
        )
    return [verdict, _NOTHING_FITS if smaller is None else run.config.on_micro_batch(smaller)]


def _lines(run: RunPlan) -> List[str]:
    """Return the plan without the verdict: of the host if the configuration names it, else of the IPUs."""
    config, model, words = run.config, run.model, run.words
    host = config.engine.kind == "host"
    kept = "float32" if host or not config.engine.half_weights else "float16"
    text = [
        f"{config.path}",
        f"  model     BERT, {model.num_layers} layers of {model.hidden_size:,}, {model.num_heads} heads,"
        f" vocabulary {model.vocabulary_size:,}: {run.parameters / 1e6:,.1f} M parameters in {kept}{words.sizes}",
        f"  data      {words.data}",
    ]
    if host:
        text += _host_lines(run)
    else:
        text += [*_device_lines(run), "", *_memory_lines(run)]
    text += ["", *_update_lines(run)]
    if words.run:
        text.append(f"  run       {words.run}")
    if not host and run.update is not None:
        sent = run.update.packs * run.bytes_per_pack / _MIB
        text.append(
            f"  traffic   {sent:{',.1f' if sent >= 1 else ',.2f'}} MiB an update from host to device"
            f" ({run.update.packs:,} {words.row}s of {run.bytes_per_pack:,} bytes)"
        )
    return text


def _update_lines(run: RunPlan) -> List[str]:
    update, config, row = run.update, run.config, run.words.row
    if update is None:
        return [f"  update    {run.words.unknown}"]
    divided = ""
    if update.unpacked not in (None, update.accumulation):
        divided = f" ({update.unpacked:,} / {update.factor.value:.3f}, rounded up)"
    return [
        f"  update    {update.packs:,} {row}s, about {update.packs * update.factor.value:,.0f} sequences"
        f" = micro-batch {config.batch.micro_batch} x accumulation {update.accumulation:,}{divided}"
        f" x replicas {config.placement.replicas}",
        f"  packing   {update.factor.value:.3f} sequences in a {row}, from {update.factor.source}",
    ]


def _host_lines(run: RunPlan) -> List[str]:
    engine = run.config.engine
    threads = (
        "as many threads as torch chooses"
        if engine.threads is None
        else _count(engine.threads, "thread")
    )
    device = {
        "auto": f"a CUDA device if there is one, else the CPU with {threads}",
        "cpu": f"the CPU with {threads}",
        "cuda": "a CUDA device",
    }[engine.device]
    recomputed = ", layers recomputed" if engine.recomputes(ipus=False) else ""
    compiled = ", compiled" if engine.compile else ""
    memory = run.host_memory
    process = (
        "" if engine.device == "cuda" else f"; a process on a CPU {_mib(memory.most + TORCH)} MiB"
    )
    return [
        f"  devices   the host: {device}; no IPU",
        f"  engine    {engine.precision}, attention {engine.attention}{recomputed}{compiled}",
        f"  memory    {_mib(memory.held)} MiB of weights, gradients and optimiser state; {_mib(memory.activations)} MiB"
        f" kept of {_count(run.config.batch.micro_batch, 'pack')} at a time; {_mib(memory.most)} MiB in a step,"
        f" computed{process}",
    ]


def _device_lines(run: RunPlan) -> List[str]:
    """Return the mask, the IPUs and the pipeline."""
    config, stages = run.config, run.placement.stages
    pipeline = "no pipeline"
    if len(stages) > 1:
        ipus = ", ".join(str(stage.ipu) for stage in stages)
        pipeline = f"on IPUs {ipus}; {run.training_stages} in training{_waiting(run)}"
    between = " " if len(stages) > 1 else ", "
    target = TARGETS[config.placement.machine]
    return [
        f"  mask      {_mask_words(run)}",
        f"  devices   {_count(config.placement.replicas, 'replica')} of {_count(run.placement.ipus, 'IPU')}"
        f" = {_count(config.ipus, 'IPU')}, {target.name.capitalize()}, {target.clock_hz / 1e9:.2f} GHz",
        f"  pipeline  {_count(len(stages), 'forward stage')}{between}{pipeline}",
    ]


def _waiting(run: RunPlan) -> str:
    """Say how long a stage waits while the pipeline fills and drains; the stages are taken as equally long."""
    if run.update is None:
        return ""
    waiting = run.training_stages - 1
    share = waiting / (run.update.accumulation + waiting)
    return f", waiting {share:.1%} of the time while it fills and drains"


def _memory_lines(run: RunPlan) -> List[str]:
    """Return the table of what each IPU holds."""
    config = run.config
    parts = ("weights", "gradients", "state", "kept", "at work", "products", "together")
    rows = [["IPU", "blocks", "parameters", *parts, "KiB/tile", "of it"]]
    for memory in run.memory:
        held = (
            memory.weights,
            memory.gradients,
            memory.optimizer,
            memory.kept,
            memory.at_work,
            memory.products,
        )
        rows.append(
            [
                str(memory.ipu),
                _blocks(memory.blocks),
                f"{memory.parameters / 1e6:,.1f} M",
                *map(_mib, (*held, memory.together)),
                f"{memory.share * MK2.memory_per_tile / 1024:,.0f}",
                f"{memory.share:.0%} {_bar(memory.share)}",
            ]
        )
    beside = config.placement.optimizer_state_off_chip
    state = "in the memory beside the chip" if beside else "on the chip"
    shared = (
        ", shared out among the replicas" if config.placement.replicated_tensor_sharding else ""
    )
    recomputes = config.engine.recomputes(ipus=True)
    layers = "recomputed from their checkpoints" if recomputes else "kept whole"
    return text_table(rows, left=(1, len(rows[0]) - 1), indent="  ") + [
        f"  MiB of {IPU_BYTES / _MIB:,.0f} ({MK2.memory_per_tile // 1024} KiB x {MK2.tiles:,} tiles); computed."
        " Code and exchange come on top.",
        f"  Optimiser state is {state}{shared}; layers are {layers}.",
    ]


def _mask_words(run: RunPlan) -> str:
    slots = run.config.data.max_sequence_length
    travels = f"{_mib(run.mask_bytes)} MiB to each IPU"
    if run.config.engine.mask == "additive":
        return f"additive: {slots:,} x {slots:,} for each pack, added to every head's scores; {travels}"
    head = run.model.hidden_size // run.model.num_heads
    columns = mask_columns(run.model, run.depth)
    return (
        f"in the query/key product: heads of {head} + {columns} columns keep {run.words.apart} and padding apart; "
        f"{travels}"
    )


def _blocks(blocks: Tuple[Block, ...]) -> str:
    """Name the blocks of an IPU: embeddings, layers 0-2, MLM head."""
    layers = [int(block.module.rsplit(".", 1)[1]) for block in blocks if ".layer." in block.module]
    names: List[str] = []
    for block in blocks:
        if ".layer." not in block.module:
            names.append(block.name)
        elif block.module.endswith(f".{layers[0]}"):
            names.append(
                f"layer {layers[0]}" if len(layers) == 1 else f"layers {layers[0]}-{layers[-1]}"
            )
    return ", ".join(names) or "nothing"


def _bar(share: float) -> str:
    """Draw ten characters, one for each tenth that is used; an exclamation mark if it is more than there is."""
    tenths = min(10, int(round(10 * share)))
    return "#" * tenths + "." * (10 - tenths) + ("!" if share > 1 else "")


def _mib(value: float) -> str:
    if value >= 10 * _MIB or not value:
        return f"{value / _MIB:,.0f}"
    return f"{value / _MIB:.1f}" if value >= _MIB / 10 else f"{value / _MIB:.2f}"


def _count(number: int, name: str) -> str:
    return f"{number} {name}" if number == 1 else f"{number} {name}s"
