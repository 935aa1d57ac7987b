"""PopTorch's options of the training and the evaluation program, and its optimiser."""

from __future__ import annotations

from typing import Tuple

import torch

from ipu_packed_bert.engine.ipu import poprun
from ipu_packed_bert.engine.ipu.devices import Device, poptorch
from ipu_packed_bert.engine.ipu.poprun import Instance
from ipu_packed_bert.engine.ipu.program import Program
from ipu_packed_bert.model.optimizer import parameter_groups
from ipu_packed_bert.settings.config import Config
from ipu_packed_bert.settings.schema import EPSILON, MAX_WEIGHT_NORM

_TYPES = {"float16": torch.float16, "float32": torch.float32}


def _common_options(
    config: Config, device: Device, instance: Instance, *, name: str
) -> poptorch.Options:
    """Return the options that training and evaluation share."""
    engine, placement = config.engine, config.placement
    if instance.distributed:
        options = poprun.options(placement.ipus_per_replica)
        options.showCompilationProgressBar(instance.rank == 0)
    else:
        options = poptorch.Options()
        options.replicationFactor(placement.replicas)
    options.modelName(name)
    options.randomSeed(config.run.seed)
    # One value for each replica, summed over the micro-batches of the call.
    options.outputMode(poptorch.OutputMode.Sum)
    options.setExecutionStrategy(poptorch.PipelinedExecution(poptorch.AutoStage.AutoIncrement))
    options.setAvailableMemoryProportion(
        {f"IPU{ipu}": share for ipu, share in enumerate(placement.available_memory_proportion)}
    )
    options.Precision.setPartialsType(torch.float16 if engine.half_partials else torch.float32)
    options.enableSyntheticData(engine.synthetic_data)
    if device.offline:
        options.useOfflineIpuTarget(ipu_version=2)
    if device.kind == "ipu_model":
        options.useIpuModel(True)
    elif engine.executable_cache is not None:
        options.enableExecutableCaching(engine.executable_cache)
    if device.kind == "ipu":
        options._Popart.setEngineOptions(
            {"opt.useAutoloader": "true", "target.syncReplicasIndependently": "true"}
        )
    if engine.profile_directory is not None:
        # After the engine options: these are set as a whole, and profiling adds its own to them.
        options.enableProfiling(instance.own(engine.profile_directory))
    return options


def training_options(
    config: Config, device: Device, instance: Instance, *, accumulation: int
) -> poptorch.Options:
    """Options of the training program: one update a call."""
    engine, placement = config.engine, config.placement
    options = _common_options(config, device, instance, name="training")
    options.deviceIterations(1)
    options.Training.gradientAccumulation(accumulation)
    options.Training.accumulationAndReplicationReductionType(poptorch.ReductionType.Mean)
    options.Training.setAutomaticLossScaling(engine.automatic_loss_scaling)
    options.Precision.enableStochasticRounding(engine.stochastic_rounding)
    options.logCycleCount(engine.log_cycles and device.kind == "ipu" and not device.offline)
    options.TensorLocations.setOptimizerLocation(
        poptorch.TensorLocationSettings()
        .useOnChipStorage(not placement.optimizer_state_off_chip)
        .useReplicatedTensorSharding(placement.replicated_tensor_sharding)
    )
    # PopTorch recomputes by itself on several IPUs, a stage from its input, and never on one.
    if not engine.recomputes(ipus=True):
        options._Popart.set("autoRecomputation", 0)  # None
    elif placement.ipus_per_replica == 1:
        options._Popart.set("autoRecomputation", 4)  # RecomputeAll, but for the checkpoints
    if placement.ipus_per_replica > 1:
        _tune_backend(options)
    return options


def _tune_backend(options: poptorch.Options) -> None:
    """Backend settings of Graphcore's published BERT pre-training (graphcore/examples, nlp/bert/pytorch)."""
    # Gradient accumulators never leave the device.
    options._Popart.set("disableGradAccumulationTensorStreams", True)
    # Load and store of the optimiser state overlap with other updates as far as memory allows; the first IPU holds the
    # embedding table and has no memory for it.
    options._Popart.set("accumulateOuterFragmentSettings.schedule", 3)  # OverlapMemoryOptimized
    options._Popart.set("accumulateOuterFragmentSettings.excludedVirtualGraphs", ["0"])
    options._Popart.set("subgraphCopyingStrategy", 1)  # JustInTime
    options._Popart.set("scheduleNonWeightUpdateGradientConsumersEarly", True)
    # One gradient accumulator for the table that both the embedding and the vocabulary projection use.
    options._Popart.setPatterns(
        {"TiedGather": True, "TiedGatherAccumulate": True, "UpdateInplacePrioritiesForIpu": True}
    )


def evaluation_options(
    config: Config, device: Device, instance: Instance, *, iterations: int, name: str = "evaluation"
) -> poptorch.Options:
    """Return the options of an inference program, in which micro-batches are device iterations: nothing accumulates.

    name: evaluation, whose outputs are sums, or prediction, whose outputs are those of every row, in their order.
    """
    options = _common_options(config, device, instance, name=name)
    if name == "prediction":
        options.outputMode(poptorch.OutputMode.All)
    options.deviceIterations(iterations)
    options.Precision.enableStochasticRounding(False)
    return options


def build_optimizer(
    program: Program, config: Config, *, betas: Tuple[float, float]
) -> torch.optim.Optimizer:
    """Build PopTorch's LAMB or AdamW with the common parameter groups; all constants but the rate are compiled in."""
    settings, engine = config.optimizer, config.engine
    groups = parameter_groups(
        program.network.named_parameters(), weight_decay=settings.weight_decay
    )
    shared = dict(
        lr=settings.learning_rate,
        betas=betas,
        eps=EPSILON,
        weight_decay=settings.weight_decay,
        bias_correction=settings.bias_correction,
        # Automatic scaling starts from 1 and finds its own factor.
        loss_scaling=1.0 if engine.automatic_loss_scaling else engine.loss_scaling,
        accum_type=_TYPES[engine.gradient_accumulator_type],
        first_order_momentum_accum_type=_TYPES[engine.first_moment_type],
        second_order_momentum_accum_type=torch.float32,
    )
    if settings.name == "adamw":
        groups = [
            {name: value for name, value in group.items() if name != "max_weight_norm"}
            for group in groups
        ]
        optimizer = poptorch.optim.AdamW(groups, max_grad_norm=settings.max_gradient_norm, **shared)
    else:
        optimizer = poptorch.optim.LAMB(groups, max_weight_norm=MAX_WEIGHT_NORM, **shared)
        optimizer.variable_attrs.markAsConstant("max_weight_norm")
    optimizer.variable_attrs.markAsConstant("weight_decay")
    return optimizer
