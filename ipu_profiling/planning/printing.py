"""The facts of a plan, with its verdict on memory."""

from __future__ import annotations

from typing import Dict, List, Sequence, Tuple

from ipu_packed_bert.settings.launch_lines import start_lines
from ipu_packed_bert.settings.placement import Block
from ipu_packed_bert.settings.schema import FINETUNE, mask_columns
from ipu_profiling.cycles.target import MK2, TARGETS
from ipu_profiling.planning.ipu_memory import IPU_BYTES, memory_words
from ipu_profiling.planning.plan import RunPlan
from pack_data.display.facts import COMPUTED, Fact, Facts, number, printed, with_unit
from pack_data.reading.words import counted

# Field of an IPU's memory -> the name of the part.
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
_PRODUCT_MASK = (
    "to each IPU; in the query/key product: heads of {head} + {columns} columns keep {sequences} "
    "and padding apart"
)
_ADDITIVE_MASK = (
    "to each IPU; additive: {slots:,} x {slots:,} for each pack, added to every head's scores"
)


def print_plan(run: RunPlan, options: Sequence[str] = ()) -> int:
    """Print a plan and its verdict.

    Args:
        run: the plan.
        options: options of the command that starts the run, see :func:`launch_lines.start_lines`.

    Returns:
        The exit status, 1 if the memory does not fit.
    """
    parts = [facts(run)]
    if not run.on_host:
        parts += [_memory(run), _verdict(run)]
    print("\n\n".join(map(printed, parts)))
    if run.fits is False:
        return 1
    micro_batches = None
    if run.update is not None and run.config.command != FINETUNE:
        micro_batches = run.update.rows // run.config.batch.micro_batch
    print("", *start_lines(run.config, options, micro_batches=micro_batches), sep="\n")
    return 0


def facts(run: RunPlan) -> Facts:
    """Return what would run and where, without the memory of each IPU."""
    model = run.model
    sizes = (
        f"BERT, {model.num_layers} layers of {model.hidden_size:,}, {model.num_heads} heads, "
        f"vocabulary {model.vocabulary_size:,}"
    )
    dtype = "float32" if run.on_host or not run.config.engine.half_weights else "float16"
    rows = {
        "model": Fact("model", sizes),
        "parameters": Fact("parameters", run.parameters, source=COMPUTED, note=f"in {dtype}"),
        **run.about,
        **(_on_host(run) if run.on_host else _on_ipus(run)),
        **_of_updates(run),
    }
    return Facts(str(run.config.path), rows)


def _of_updates(run: RunPlan) -> Dict[str, Fact]:
    """Return the size of a weight update, its packing factor, and its traffic to IPUs."""
    update = run.update
    if update is None:
        unknown = (
            "unknown without data and without a published packing factor; give --packing-factor, sequences in a "
            f"{run.row}"
        )
        return {"update": Fact("update", unknown)}
    factor = update.factor
    source = f"from {factor.source}"
    if run.config.optimizer.packing_adjustment == "betas":
        betas = " and ".join(map(number, run.config.betas(factor.value)))
        source += f"; betas {betas} (section 3.3 of packedBERT)"
    rows = {
        "update": Fact("update", run.config.update_words(factor.value, run.row)),
        "packing": Fact("packing", factor.value, "sequences per pack", note=source),
    }
    if not run.on_host:
        sent = f"from host to device in an update: {update.rows:,} {run.row}s of {run.bytes_per_pack:,} bytes"
        traffic = update.rows * run.bytes_per_pack
        rows["traffic"] = Fact("traffic", traffic, "bytes", COMPUTED, sent)
    return rows


def _on_host(run: RunPlan) -> Dict[str, Fact]:
    """Return the device, the precision and the memory of the host engine."""
    engine = run.config.engine
    threads = "torch's number of threads"
    if engine.threads is not None:
        threads = counted(engine.threads, "thread")
    device = _DEVICES[engine.device].format(threads=threads)
    computed = f"{engine.precision}, attention {engine.attention}"
    if engine.recomputes(ipus=False):
        computed += ", layers recomputed"
    if engine.compile:
        computed += ", compiled"

    memory = run.host_memory
    rows = {
        "devices": Fact("devices", f"the host: {device}; no IPU"),
        "engine": Fact("engine", computed),
    }
    micro_batch = counted(run.config.batch.micro_batch, "pack")
    sizes = [
        ("held", memory.held, "of weights, gradients and optimiser state"),
        ("activations", memory.activations, f"of {micro_batch}"),
        ("step", memory.most, "at most in a step"),
    ]
    if engine.device != "cuda":
        sizes.append(("process", memory.process, "of a process on a CPU"))
    for name, size, note in sizes:
        rows[name] = Fact(name, size, "bytes", COMPUTED, note)
    return rows


def _on_ipus(run: RunPlan) -> Dict[str, Fact]:
    """Return the mask, the IPUs and the pipeline."""
    config = run.config
    mask = _ADDITIVE_MASK if config.engine.mask == "additive" else _PRODUCT_MASK
    depth_known = run.training_packs is not None or config.data.max_sequences_per_pack
    mask_words = mask.format(
        slots=config.data.max_sequence_length,
        head=run.model.hidden_size // run.model.num_heads,
        columns=mask_columns(run.model, run.depth),
        sequences=f"up to {run.depth} sequences"
        if depth_known
        else f"the sequences of a {run.row}",
    )
    target = TARGETS[config.placement.machine]
    replicas = counted(config.placement.replicas, "replica")
    devices = (
        f"{replicas} of {counted(run.placement.ipus, 'IPU')} = {counted(config.ipus, 'IPU')}, "
        f"{target.name.capitalize()}, {with_unit(target.clock_hz, 'GHz')}"
    )
    rows = {
        "mask": Fact("mask", run.mask_bytes, "bytes", COMPUTED, mask_words),
        "devices": Fact("devices", devices),
        "pipeline": Fact("pipeline", "1 forward stage, no pipeline"),
    }
    stages = run.placement.stages
    if len(stages) > 1:
        ipus = ", ".join(str(stage.ipu) for stage in stages)
        words = f"{len(stages)} forward stages on IPUs {ipus}; {run.training_stages} in training"
        rows["pipeline"] = Fact("pipeline", words)
        if run.update is not None:
            waiting = run.training_stages - 1
            share = waiting / (run.update.accumulation + waiting)
            waits = "of the time, while the pipeline fills and drains"
            rows["waiting"] = Fact("waiting", share, "%", COMPUTED, waits)
    return rows


def _memory(run: RunPlan) -> Facts:
    """Return the memory of each IPU by part."""
    rows = []
    for memory in run.memory:
        row = {
            "ipu": Fact("IPU", str(memory.ipu)),
            "parameters": Fact("parameters", memory.parameters, source=COMPUTED),
        }
        for part, name in _PARTS.items():
            row[part] = Fact(name, getattr(memory, part), "bytes", COMPUTED)
        row["used"] = Fact("used", memory.share, "%", COMPUTED)
        row["blocks"] = Fact("blocks", _blocks(memory.blocks), source=COMPUTED)
        rows.append(row)

    placement = run.config.placement
    state = "off the chip" if placement.optimizer_state_off_chip else "on the chip"
    if placement.replicated_tensor_sharding:
        state += ", shared out among the replicas"
    recomputes = run.config.engine.recomputes(ipus=True)
    layers = "recomputed from their checkpoints" if recomputes else "kept whole"
    whole = with_unit(IPU_BYTES, "bytes")
    tile = MK2.memory_per_tile // 1024
    notes = (
        f"An IPU has {whole} ({tile} KiB x {MK2.tiles:,} tiles). Code and exchange are not counted.",
        f"Optimiser state is {state}; layers are {layers}.",
    )
    return Facts("Memory of each IPU", rows, notes)


def _verdict(run: RunPlan) -> Facts:
    """Return whether the counted memory fits and, if that is not certain, what to change."""
    smaller = None if run.fits else run.micro_batch_that_fits()
    factor = None if run.update is None else run.update.factor.value
    words = memory_words(run, smaller, packing_factor=factor, row=run.row)
    rows = {name: Fact(name, sentence) for name, sentence in zip(("verdict", "change"), words)}
    return Facts("", rows)


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
