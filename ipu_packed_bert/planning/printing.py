"""The text of a plan, with its verdict on memory."""

from __future__ import annotations

from typing import List, Optional, Sequence, Tuple

from ipu_packed_bert.cycles.target import MK2, TARGETS
from ipu_packed_bert.planning.host_memory import TORCH
from ipu_packed_bert.planning.ipu_memory import IPU_BYTES
from ipu_packed_bert.planning.plan import FULLEST_THAT_RAN, RunPlan
from ipu_packed_bert.settings.launch_lines import start_lines
from ipu_packed_bert.settings.placement import Block
from ipu_packed_bert.settings.schema import FINETUNE, mask_columns
from pack_data.cli.command import counted
from pack_data.display.table import text_table

_MIB = 1024.0 * 1024.0
_NOTHING_FITS = "no micro-batch fits: use more IPUs a replica, or change placement.layers_per_ipu"


def print_plan(run: RunPlan, options: Sequence[str] = ()) -> int:
    """Print a plan and its verdict.

    Args:
        run: the plan.
        options: options of the command that starts the run, see :func:`launch_lines.start_lines`.

    Returns:
        The exit status, 1 if the memory does not fit.
    """
    text = _lines(run)
    if run.config.engine.kind != "host":
        smaller = None if run.fits else run.micro_batch_that_fits()
        verdict = "\n            ".join(memory_words(run, smaller))
        text.append(f"  verdict   {verdict}")
    if run.fits is not False:
        micro_batches = None
        if run.update is not None and run.config.command != FINETUNE:
            micro_batches = run.update.packs // run.config.batch.micro_batch
        text += start_lines(run.config, options, micro_batches=micro_batches)
    print("\n".join(text))
    return 1 if run.fits is False else 0


def memory_words(run: RunPlan, smaller: Optional[int]) -> List[str]:
    """Return lines that state whether the counted memory fits and, if that is not certain, what to change.

    Args:
        run: the plan.
        smaller: a micro-batch that fits, if there is one.
    """
    if run.fits:
        return [
            f"fits: at most {run.fullest:.0%} of a tile is counted; the fullest published run has "
            f"{FULLEST_THAT_RAN:.0%}"
        ]
    fullest = max(run.memory, key=lambda memory: memory.share)
    share = f"{fullest.share:.1%} of IPU {fullest.ipu} is counted"
    if run.fits is False:
        verdict = f"does not fit: {share}, {fullest.total / IPU_BYTES:.0%} without temporary values of products"
    else:
        verdict = (
            f"tight, unknown: {share}, without code and exchange; the fullest published run has "
            f"{FULLEST_THAT_RAN:.1%}"
        )
    way_out = _NOTHING_FITS if smaller is None else run.config.on_micro_batch(smaller)
    return [verdict, way_out]


def _lines(run: RunPlan) -> List[str]:
    """Return the plan without the verdict, for the engine of the configuration."""
    config = run.config
    model = run.model
    host = config.engine.kind == "host"
    dtype = "float32" if host or not config.engine.half_weights else "float16"
    text = [
        f"{config.path}",
        f"  model     BERT, {model.num_layers} layers of {model.hidden_size:,}, {model.num_heads} heads,"
        f" vocabulary {model.vocabulary_size:,}: {run.parameters / 1e6:,.1f} M parameters in {dtype}{run.words.sizes}",
        f"  data      {run.words.data}",
    ]
    if host:
        text += _host_lines(run)
    else:
        text += [*_device_lines(run), "", *_memory_lines(run)]
    text += ["", *_update_lines(run)]
    if run.words.run:
        text.append(f"  run       {run.words.run}")
    if not host and run.update is not None:
        sent = run.update.packs * run.bytes_per_pack
        digits = 1 if sent >= _MIB else 2
        text.append(
            f"  traffic   {sent / _MIB:,.{digits}f} MiB an update from host to device"
            f" ({run.update.packs:,} {run.words.row}s of {run.bytes_per_pack:,} bytes)"
        )
    return text


def _update_lines(run: RunPlan) -> List[str]:
    """Return the size of a weight update and its packing factor."""
    update = run.update
    if update is None:
        return [f"  update    {run.words.unknown}"]
    row = run.words.row
    factor = update.factor
    divided = ""
    if update.unpacked not in (None, update.accumulation):
        divided = f" ({update.unpacked:,} / {factor.value:.3f}, rounded up)"
    betas = ""
    if run.config.optimizer.packing_adjustment == "betas":
        beta1, beta2 = run.config.betas(factor.value)
        betas = f"; betas {beta1:.3g} and {beta2:.3g} (section 3.3 of packedBERT)"
    return [
        f"  update    {update.packs:,} {row}s, about {update.packs * factor.value:,.0f} sequences"
        f" = micro-batch {run.config.batch.micro_batch} x accumulation {update.accumulation:,}{divided}"
        f" x replicas {run.config.placement.replicas}",
        f"  packing   {factor.value:.3f} sequences in a {row}, from {factor.source}{betas}",
    ]


def _host_lines(run: RunPlan) -> List[str]:
    """Return the device, the precision and the memory of the host engine."""
    engine = run.config.engine
    threads = "torch's number of threads"
    if engine.threads is not None:
        threads = counted(engine.threads, "thread")
    device = {
        "auto": f"a CUDA device if there is one, else the CPU with {threads}",
        "cpu": f"the CPU with {threads}",
        "cuda": "a CUDA device",
    }[engine.device]
    recomputed = ", layers recomputed" if engine.recomputes(ipus=False) else ""
    compiled = ", compiled" if engine.compile else ""
    memory = run.host_memory
    process = ""
    if engine.device != "cuda":
        process = f"; a process on a CPU {_mib(memory.most + TORCH)} MiB"
    micro_batch = counted(run.config.batch.micro_batch, "pack")
    return [
        f"  devices   the host: {device}; no IPU",
        f"  engine    {engine.precision}, attention {engine.attention}{recomputed}{compiled}",
        f"  memory    {_mib(memory.held)} MiB of weights, gradients and optimiser state; {_mib(memory.activations)} MiB"
        f" of activations of {micro_batch}; {_mib(memory.most)} MiB in a step (computed){process}",
    ]


def _device_lines(run: RunPlan) -> List[str]:
    """Return the mask, the IPUs and the pipeline."""
    placement = run.config.placement
    stages = run.placement.stages
    pipeline = "1 forward stage, no pipeline"
    if len(stages) > 1:
        ipus = ", ".join(str(stage.ipu) for stage in stages)
        pipeline = (
            f"{len(stages)} forward stages on IPUs {ipus}; {run.training_stages} in training"
            f"{_waiting(run)}"
        )
    target = TARGETS[placement.machine]
    return [
        f"  mask      {_mask_words(run)}",
        f"  devices   {counted(placement.replicas, 'replica')} of {counted(run.placement.ipus, 'IPU')}"
        f" = {counted(run.config.ipus, 'IPU')}, {target.name.capitalize()}, {target.clock_hz / 1e9:.2f} GHz",
        f"  pipeline  {pipeline}",
    ]


def _waiting(run: RunPlan) -> str:
    """Describe the share of time that a stage waits while the pipeline fills and drains, for equally long stages."""
    if run.update is None:
        return ""
    waiting = run.training_stages - 1
    share = waiting / (run.update.accumulation + waiting)
    return f", waiting {share:.1%} of the time while it fills and drains"


def _memory_lines(run: RunPlan) -> List[str]:
    """Return the table of the memory of each IPU, in MiB."""
    parts = ("weights", "gradients", "optimizer", "kept", "at_work", "products", "together")
    titles = ("weights", "gradients", "state", "kept", "at work", "products", "together")
    rows = [["IPU", "blocks", "parameters", *titles, "KiB/tile", "used"]]
    for memory in run.memory:
        row = [
            str(memory.ipu),
            _blocks(memory.blocks),
            f"{memory.parameters / 1e6:,.1f} M",
            *(_mib(getattr(memory, part)) for part in parts),
            f"{memory.share * MK2.memory_per_tile / 1024:,.0f}",
            f"{memory.share:.0%} {_bar(memory.share)}",
        ]
        rows.append(row)

    placement = run.config.placement
    state = "off the chip" if placement.optimizer_state_off_chip else "on the chip"
    if placement.replicated_tensor_sharding:
        state += ", shared out among the replicas"
    recomputes = run.config.engine.recomputes(ipus=True)
    layers = "recomputed from their checkpoints" if recomputes else "kept whole"
    return [
        *text_table(rows, left=(1, len(rows[0]) - 1), indent="  "),
        f"  MiB of {IPU_BYTES / _MIB:,.0f} ({MK2.memory_per_tile // 1024} KiB x {MK2.tiles:,} tiles); computed,"
        " without code and exchange.",
        f"  Optimiser state is {state}; layers are {layers}.",
    ]


def _mask_words(run: RunPlan) -> str:
    """Describe the mask and its bytes."""
    slots = run.config.data.max_sequence_length
    copied = f"{_mib(run.mask_bytes)} MiB to each IPU"
    if run.config.engine.mask == "additive":
        return (
            f"additive: {slots:,} x {slots:,} for each pack, added to every head's scores; {copied}"
        )
    head = run.model.hidden_size // run.model.num_heads
    columns = mask_columns(run.model, run.depth)
    return (
        f"in the query/key product: heads of {head} + {columns} columns keep {run.words.apart} and padding apart; "
        f"{copied}"
    )


def _blocks(blocks: Tuple[Block, ...]) -> str:
    """Name the blocks of an IPU: embeddings, layers 0-2, MLM head."""
    names: List[str] = []
    layers: List[str] = []
    for block in blocks:
        if ".layer." not in block.module:
            names.append(block.name)
            continue
        layers.append(block.module.rsplit(".", 1)[1])
        if len(layers) == 1:
            names.append(f"layer {layers[0]}")
        else:
            names[-1] = f"layers {layers[0]}-{layers[-1]}"
    return ", ".join(names) or "nothing"


def _bar(share: float) -> str:
    """Draw ten characters, one for each tenth that is used, and an exclamation mark above 100 %."""
    tenths = min(10, round(10 * share))
    excess = "!" if share > 1 else ""
    return "#" * tenths + "." * (10 - tenths) + excess


def _mib(num_bytes: float) -> str:
    """Format bytes in MiB, with more digits for small numbers."""
    if num_bytes >= 10 * _MIB or not num_bytes:
        return f"{num_bytes / _MIB:,.0f}"
    digits = 1 if num_bytes >= _MIB / 10 else 2
    return f"{num_bytes / _MIB:.{digits}f}"
