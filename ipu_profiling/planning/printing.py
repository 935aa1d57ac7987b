"""The text of a plan, with its verdict on memory."""

from __future__ import annotations

from typing import List, Sequence, Tuple

from ipu_packed_bert.settings.launch_lines import start_lines
from ipu_packed_bert.settings.placement import Block
from ipu_packed_bert.settings.schema import FINETUNE, mask_columns
from ipu_profiling.cycles.target import MK2, TARGETS
from ipu_profiling.planning.ipu_memory import IPU_BYTES, memory_words
from ipu_profiling.planning.plan import RunPlan
from pack_data.display.table import text_table
from pack_data.reading.words import counted

_MIB = 1024.0 * 1024.0
# Heading of each part of an IPU's memory.
_PARTS = {
    "weights": "weights",
    "gradients": "gradients",
    "optimizer": "state",
    "kept": "kept",
    "at_work": "at work",
    "products": "products",
    "together": "together",
}
_DEVICES = {
    "auto": "a CUDA device if there is one, else the CPU with {threads}",
    "cpu": "the CPU with {threads}",
    "cuda": "a CUDA device",
}

# ---- lines of the plan; {run} is the plan ----------------------------------------------------------------------------

_MODEL = """\
{run.config.path}
  model     BERT, {run.model.num_layers} layers of {run.model.hidden_size:,}, {run.model.num_heads} heads, vocabulary \
{run.model.vocabulary_size:,}: {millions:,.1f} M parameters in {dtype}{run.words.sizes}
  data      {run.words.data}"""
_ON_HOST = """\
  devices   the host: {device}; no IPU
  engine    {engine.precision}, attention {engine.attention}{recomputed}{compiled}
  memory    {held} MiB of weights, gradients and optimiser state; {activations} MiB of activations of {micro_batch}; \
{most} MiB in a step (computed){process}"""
_ON_IPUS = """\
  mask      {mask}; {copied} MiB to each IPU
  devices   {replicas} of {ipus} = {all_ipus}, {target}, {gigahertz:.2f} GHz
  pipeline  {pipeline}
"""
_PRODUCT_MASK = (
    "in the query/key product: heads of {head} + {columns} columns keep {apart} and padding apart"
)
_ADDITIVE_MASK = "additive: {slots:,} x {slots:,} for each pack, added to every head's scores"
_MEMORY = """\
  MiB of {ipu:,.0f} ({tile} KiB x {tiles:,} tiles); computed, without code and exchange.
  Optimiser state is {state}; layers are {layers}."""
_UPDATE = """\
  update    {words}
  packing   {update.factor.value:.3f} sequences in a {row}, from {update.factor.source}{betas}"""
_TRAFFIC = """\
  traffic   {sent:,.{digits}f} MiB an update from host to device ({update.rows:,} {row}s of {num_bytes:,} bytes)"""


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
        factor = None if run.update is None else run.update.factor.value
        words = memory_words(run, smaller, packing_factor=factor, row=run.words.row)
        verdict = "\n            ".join(words)
        text.append(f"  verdict   {verdict}")
    if run.fits is not False:
        micro_batches = None
        if run.update is not None and run.config.command != FINETUNE:
            micro_batches = run.update.rows // run.config.batch.micro_batch
        text += start_lines(run.config, options, micro_batches=micro_batches)
    print("\n".join(text))
    return 1 if run.fits is False else 0


def _lines(run: RunPlan) -> List[str]:
    """Return the plan without the verdict, for the engine of the configuration."""
    host = run.config.engine.kind == "host"
    dtype = "float32" if host or not run.config.engine.half_weights else "float16"
    text = [_MODEL.format(run=run, millions=run.parameters / 1e6, dtype=dtype)]
    text += [_on_host(run)] if host else [_on_ipus(run), *_memory_lines(run)]
    text += ["", _update_lines(run)]
    if run.words.run:
        text.append(f"  run       {run.words.run}")
    if not host and run.update is not None:
        sent = run.update.rows * run.bytes_per_pack
        traffic = _TRAFFIC.format(
            sent=sent / _MIB,
            digits=1 if sent >= _MIB else 2,
            update=run.update,
            row=run.words.row,
            num_bytes=run.bytes_per_pack,
        )
        text.append(traffic)
    return "\n".join(text).split("\n")


def _update_lines(run: RunPlan) -> str:
    """Return the size of a weight update and its packing factor."""
    update = run.update
    if update is None:
        return f"  update    {run.words.unknown}"
    factor = update.factor.value
    betas = ""
    if run.config.optimizer.packing_adjustment == "betas":
        adjusted = run.config.betas(factor)
        betas = "; betas {:.3g} and {:.3g} (section 3.3 of packedBERT)".format(*adjusted)
    return _UPDATE.format(
        update=update,
        row=run.words.row,
        words=run.config.update_words(factor, run.words.row),
        betas=betas,
    )


def _on_host(run: RunPlan) -> str:
    """Return the device, the precision and the memory of the host engine."""
    engine = run.config.engine
    threads = "torch's number of threads"
    if engine.threads is not None:
        threads = counted(engine.threads, "thread")
    memory = run.host_memory
    process = ""
    if engine.device != "cuda":
        process = f"; a process on a CPU {_mib(memory.process)} MiB"
    return _ON_HOST.format(
        device=_DEVICES[engine.device].format(threads=threads),
        engine=engine,
        recomputed=", layers recomputed" if engine.recomputes(ipus=False) else "",
        compiled=", compiled" if engine.compile else "",
        held=_mib(memory.held),
        activations=_mib(memory.activations),
        micro_batch=counted(run.config.batch.micro_batch, "pack"),
        most=_mib(memory.most),
        process=process,
    )


def _on_ipus(run: RunPlan) -> str:
    """Return the mask, the IPUs and the pipeline."""
    config = run.config
    stages = run.placement.stages
    pipeline = "1 forward stage, no pipeline"
    if len(stages) > 1:
        ipus = ", ".join(str(stage.ipu) for stage in stages)
        pipeline = (
            f"{len(stages)} forward stages on IPUs {ipus}; {run.training_stages} in training"
            f"{_waiting(run)}"
        )
    target = TARGETS[config.placement.machine]
    mask = _ADDITIVE_MASK if config.engine.mask == "additive" else _PRODUCT_MASK
    mask_text = mask.format(
        slots=config.data.max_sequence_length,
        head=run.model.hidden_size // run.model.num_heads,
        columns=mask_columns(run.model, run.depth),
        apart=run.words.apart,
    )
    return _ON_IPUS.format(
        mask=mask_text,
        copied=_mib(run.mask_bytes),
        replicas=counted(config.placement.replicas, "replica"),
        ipus=counted(run.placement.ipus, "IPU"),
        all_ipus=counted(config.ipus, "IPU"),
        target=target.name.capitalize(),
        gigahertz=target.clock_hz / 1e9,
        pipeline=pipeline,
    )


def _waiting(run: RunPlan) -> str:
    """Describe the share of time that a stage waits while the pipeline fills and drains, for equally long stages."""
    if run.update is None:
        return ""
    waiting = run.training_stages - 1
    share = waiting / (run.update.accumulation + waiting)
    return f", waiting {share:.1%} of the time while it fills and drains"


def _memory_lines(run: RunPlan) -> List[str]:
    """Return the table of the memory of each IPU, in MiB."""
    rows = [["IPU", "blocks", "parameters", *_PARTS.values(), "KiB/tile", "used"]]
    for memory in run.memory:
        row = [
            str(memory.ipu),
            _blocks(memory.blocks),
            f"{memory.parameters / 1e6:,.1f} M",
            *(_mib(getattr(memory, part)) for part in _PARTS),
            f"{memory.share * MK2.memory_per_tile / 1024:,.0f}",
            f"{memory.share:.0%} {_bar(memory.share)}",
        ]
        rows.append(row)

    placement = run.config.placement
    state = "off the chip" if placement.optimizer_state_off_chip else "on the chip"
    if placement.replicated_tensor_sharding:
        state += ", shared out among the replicas"
    recomputes = run.config.engine.recomputes(ipus=True)
    below = _MEMORY.format(
        ipu=IPU_BYTES / _MIB,
        tile=MK2.memory_per_tile // 1024,
        tiles=MK2.tiles,
        state=state,
        layers="recomputed from their checkpoints" if recomputes else "kept whole",
    )
    return [*text_table(rows, left=(1, len(rows[0]) - 1), indent="  "), below]


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
