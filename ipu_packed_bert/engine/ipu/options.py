"""PopTorch options of the training and inference programs, and PopTorch's optimiser."""

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
    """Return the options that training and inference share."""
    engine = config.engine
    placement = config.placement
    if instance.distributed:
        options = poprun.options(placement.ipus_per_replica)
        options.showCompilationProgressBar(instance.rank == 0)
    else:
        options = poptorch.Options()
        options.replicationFactor(placement.replicas)
    options.modelName(name)
    options.randomSeed(config.run.seed)
    # One value per replica, summed over the micro-batches of the call.
    options.outputMode(poptorch.OutputMode.Sum)
    options.setExecutionStrategy(poptorch.PipelinedExecution(poptorch.AutoStage.AutoIncrement))
    proportions = enumerate(placement.available_memory_proportion)
    options.setAvailableMemoryProportion({f"IPU{ipu}": share for ipu, share in proportions})
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
        # After the engine options, which replace all others: profiling adds to them.
        options.enableProfiling(instance.own_path(engine.profile_directory))
    return options


def training_options(
    config: Config, device: Device, instance: Instance, *, accumulation: int
) -> poptorch.Options:
    """Return the options of the training program: one update per call."""
    engine = config.engine
    placement = config.placement
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
    # By default PopTorch recomputes each stage from its input on several IPUs, and nothing on one.
    if not engine.recomputes(ipus=True):
        options._Popart.set("autoRecomputation", 0)  # None
    elif placement.ipus_per_replica == 1:
        options._Popart.set("autoRecomputation", 4)  # RecomputeAll, except checkpoints
    if placement.ipus_per_replica > 1:
        _tune_backend(options)
    return options


def _tune_backend(options: poptorch.Options) -> None:
    """Apply the backend settings of Graphcore's published BERT pre-training (graphcore/examples, nlp/bert/pytorch)."""
    # Gradient accumulators never leave the device.
    options._Popart.set("disableGradAccumulationTensorStreams", True)
    # Loads and stores of the optimiser state overlap with other updates as far as memory allows; the first IPU has no
    # memory for that, because it holds the embedding table.
    options._Popart.set("accumulateOuterFragmentSettings.schedule", 3)  # OverlapMemoryOptimized
    options._Popart.set("accumulateOuterFragmentSettings.excludedVirtualGraphs", ["0"])
    options._Popart.set("subgraphCopyingStrategy", 1)  # JustInTime
    options._Popart.set("scheduleNonWeightUpdateGradientConsumersEarly", True)
    # The embedding and the vocabulary projection share a table and its gradient accumulator.
    options._Popart.setPatterns(
        {"TiedGather": True, "TiedGatherAccumulate": True, "UpdateInplacePrioritiesForIpu": True}
    )


def evaluation_options(
    config: Config, device: Device, instance: Instance, *, iterations: int, name: str = "evaluation"
) -> poptorch.Options:
    """Return the options of an inference program, with a device iteration per micro-batch.

    Outputs of "evaluation" are sums; outputs of "prediction" are those of every row, in order.
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
    """Build PopTorch's LAMB or AdamW with the common parameter groups; only the learning rate is not compiled in."""
    settings = config.optimizer
    engine = config.engine
    weights = program.network.named_parameters()
    groups = parameter_groups(weights, weight_decay=settings.weight_decay)
    shared = dict(
        lr=settings.learning_rate,
        betas=betas,
        eps=EPSILON,
        weight_decay=settings.weight_decay,
        bias_correction=settings.bias_correction,
        # Automatic scaling starts from 1 and adapts the factor.
        loss_scaling=1.0 if engine.automatic_loss_scaling else engine.loss_scaling,
        accum_type=_TYPES[engine.gradient_accumulator_type],
        first_order_momentum_accum_type=_TYPES[engine.first_moment_type],
        second_order_momentum_accum_type=torch.float32,
    )
    if settings.name == "adamw":
        for group in groups:
            group.pop("max_weight_norm", None)
        optimizer = poptorch.optim.AdamW(groups, max_grad_norm=settings.max_gradient_norm, **shared)
    else:
        optimizer = poptorch.optim.LAMB(groups, max_weight_norm=MAX_WEIGHT_NORM, **shared)
        optimizer.variable_attrs.markAsConstant("max_weight_norm")
    optimizer.variable_attrs.markAsConstant("weight_decay")
    return optimizer
