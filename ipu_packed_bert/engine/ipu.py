"""IPU engine: the packed BERT on Graphcore IPUs through PopTorch 3.4.  The only module that imports the SDK.

The network stays the plain one of `model/`; what the device needs differently is put into an instance of it here
(:func:`adapt`), blocks and stages come from `placement.py`, and PopTorch makes one program of forward pass, backward
pass and update.  A call of that program takes a whole global batch: rows per call = micro-batch x gradient accumulation
x replicas.  Gradients are reduced by their mean over those micro-batches, for which the loss is scaled (`model/loss.py`).
"""
from __future__ import annotations

import contextlib
import os
import re
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Dict, Iterable, Iterator, List, NamedTuple, Optional, Tuple

import numpy as np
import torch
from torch import nn

try:
    import poptorch
except AssertionError as error:  # while it is imported, PopTorch asserts that torch is the version it was built with
    raise ImportError(str(error)) from None

from ipu_packed_bert.config import Config, check_accumulation
from ipu_packed_bert.engine.base import Batch, Engine, StepResult, build_model, count, micro_batches
from ipu_packed_bert.loader import GlobalBatches, Position
from ipu_packed_bert.model.packed import BATCH_FIELDS, PackedBertForPreTraining
from ipu_packed_bert.model.products import OneHotSlots, mask_in_product
from ipu_packed_bert.optim import parameter_groups
from ipu_packed_bert.placement import Placement, place
from pack_data.store import PackStore

OLDEST = (3, 1)  # names used here exist since PopTorch 3.1; 3.4 is what they are checked against

if tuple(int(part) for part in re.findall(r"\d+", poptorch.__version__)[:2]) < OLDEST:
    raise ImportError(f"PopTorch {poptorch.__version__} is too old, 3.4 is wanted")

TYPES = {"float16": torch.float16, "float32": torch.float32}


# ------------------------------------------------------------------------------------------------------------ devices


class Device(NamedTuple):
    kind: str  # "ipu": hardware, or a program compiled for it; "ipu_model": the simulated one
    reason: str  # one line for people
    offline: bool = False


def find_device(config: Config) -> Optional[Device]:
    """The device that `config` can have on this machine, None without one.

    A simulated device that was asked for, by `engine.ipu_model` or POPTORCH_IPU_MODEL=1, wins over hardware; one that
    nobody asked for is taken only where `engine.kind` is auto.
    """
    if config.engine.offline_export is not None:
        return Device("ipu", f"no device: compiles for {_ipus(config)} into {config.engine.offline_export}", offline=True)
    if config.engine.ipu_model or os.environ.get("POPTORCH_IPU_MODEL") == "1":
        return Device("ipu_model", "Poplar IPU Model, as asked for: simulated, slow, without cycle counts")
    if poptorch.ipuHardwareIsAvailable(config.ipus):
        return Device("ipu", f"IPU hardware: {_ipus(config)}")
    if config.engine.kind == "auto":
        return Device("ipu_model", f"Poplar IPU Model, for want of {_ipus(config)}")
    return None


def _ipus(config: Config) -> str:
    placement = config.placement
    plural = "" if config.ipus == 1 else "s"
    return f"{config.ipus} IPU{plural} ({placement.replicas} x {placement.ipus_per_replica})"


class Instance(NamedTuple):
    """This process among those that poprun started; a process has `replicas` of the run's replicas."""

    index: int
    instances: int
    replicas: int
    distributed: bool


def find_instance(config: Config) -> Instance:
    """Raises ValueError where poprun was asked for another number of replicas than the configuration."""
    replicas = config.placement.replicas
    try:
        import popdist
    except ImportError:
        return Instance(0, 1, replicas, False)
    if not popdist.isPopdistEnvSet():
        return Instance(0, 1, replicas, False)
    if popdist.getNumTotalReplicas() != replicas:
        raise ValueError(
            f"poprun has {popdist.getNumTotalReplicas()} replicas, placement.replicas is {replicas}; the loss of an update"
            " is normalised over all of them, so give poprun --num-replicas the configured number"
        )
    return Instance(popdist.getInstanceIndex(), popdist.getNumInstances(), popdist.getNumLocalReplicas(), True)


# -------------------------------------------------------------------------------------------- what the device changes


class SerialisedProduct(nn.Module):
    """As `model.bert.VocabularyProduct`, in `factor` parts of the vocabulary, one after the other in the same memory."""

    def __init__(self, factor: int):
        super().__init__()
        self.factor = factor

    def forward(self, hidden_BPH, table_VH, bias_V) -> torch.Tensor:
        rows, slots, hidden = hidden_BPH.shape
        product = poptorch.serializedMatMul(
            hidden_BPH.reshape(rows * slots, hidden),
            table_VH.t(),
            poptorch.MatMulSerializationMode.OutputChannels,
            self.factor,
        )
        return (product + bias_V).view(rows, slots, table_VH.shape[0])


def checkpoint(module: nn.Module, inputs: Tuple, output: torch.Tensor) -> torch.Tensor:
    """Forward hook: keep this output, recompute what led to it when gradients need it."""
    return poptorch.recomputationCheckpoint(output)


def adapt(network: PackedBertForPreTraining, config: Config, *, depth: int) -> None:
    """Put into a network what the device needs differently, in place; names, shapes and values of its weights stay.

    depth: sequences that a pack of the data set has room for; where the configuration leaves it open, only the data set
    knows it.
    """
    if config.engine.mask == "product":
        mask_in_product(network, sequences=depth, columns=config.mask_columns(depth))
    slots = config.data.max_sequence_length
    network.masked_lm_slots = OneHotSlots(slots)
    network.next_sentence_slots = OneHotSlots(slots)
    if config.placement.embedding_serialization_factor > 1:
        network.cls.predictions.product = SerialisedProduct(config.placement.embedding_serialization_factor)
    if config.engine.recompute_layers:
        for layer in network.bert.encoder.layer:
            layer.register_forward_hook(checkpoint)


def begin_blocks(network: PackedBertForPreTraining, placement: Placement) -> None:
    """Mark in a network where the blocks of `placement` begin, in place."""
    for block in placement.blocks:
        poptorch.BeginBlock(network.get_submodule(block.module), block.name, ipu_id=block.ipu)


class Program(nn.Module):
    """What PopTorch compiles: the network, with its loss named as the one that gradients come from."""

    def __init__(self, network: PackedBertForPreTraining):
        super().__init__()
        self.network = network

    def forward(self, *fields) -> Tuple[torch.Tensor, ...]:
        """The fields of `BATCH_FIELDS` of a micro-batch, in their order."""
        output = self.network(*fields)
        # The loss is a sum of two, so it must be named; it is a scalar already.
        loss = poptorch.identity_loss(output.loss, reduction="none")
        return loss, output.mlm_loss, output.nsp_loss, output.mlm_correct, output.nsp_correct


def build_program(config: Config, *, depth: int) -> Program:
    """The network as PopTorch gets it, with its initial weights; `depth` as in :func:`adapt`."""
    network = build_model(config, attention="eager")
    adapt(network, config, depth=depth)
    begin_blocks(network, place(config))
    if config.engine.half_weights:
        network.half()
    return Program(network)


# ------------------------------------------------------------------------------------------- options and optimiser


def common_options(config: Config, device: Device, instance: Instance, *, name: str) -> "poptorch.Options":
    """What training and evaluation share."""
    engine, placement = config.engine, config.placement
    if instance.distributed:
        import popdist.poptorch

        # Takes the replicas of this process, and which devices they are, from poprun.
        options = popdist.poptorch.Options(ipus_per_replica=placement.ipus_per_replica)
        options.showCompilationProgressBar(instance.index == 0)
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
        options._Popart.setEngineOptions({"opt.useAutoloader": "true", "target.syncReplicasIndependently": "true"})
    if engine.profile_directory is not None:
        # After the engine options: these are set as a whole, and profiling adds its own to them.
        options.enableProfiling(engine.profile_directory)
    return options


def training_options(config: Config, device: Device, instance: Instance, *, accumulation: int) -> "poptorch.Options":
    """Options of the training program: one update a call."""
    engine, placement = config.engine, config.placement
    options = common_options(config, device, instance, name="training")
    options.deviceIterations(config.batch.device_iterations)
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
    if placement.ipus_per_replica > 1:
        _tune_backend(options)
    return options


def _tune_backend(options: "poptorch.Options") -> None:
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
    options._Popart.setPatterns({"TiedGather": True, "TiedGatherAccumulate": True, "UpdateInplacePrioritiesForIpu": True})


def evaluation_options(config: Config, device: Device, instance: Instance, *, iterations: int) -> "poptorch.Options":
    """Options of the evaluation program; the micro-batches of a call are device iterations, since nothing accumulates."""
    options = common_options(config, device, instance, name="evaluation")
    options.deviceIterations(iterations)
    options.Precision.enableStochasticRounding(False)
    return options


def build_optimizer(program: Program, config: Config, *, betas: Tuple[float, float]) -> torch.optim.Optimizer:
    """PopTorch's LAMB or AdamW with the parameter groups of every engine; constants are compiled in, the rate is not."""
    settings, engine = config.optimizer, config.engine
    groups = parameter_groups(program.network.named_parameters(), weight_decay=settings.weight_decay)
    shared = dict(
        lr=settings.learning_rate,
        betas=betas,
        eps=settings.eps,
        weight_decay=settings.weight_decay,
        bias_correction=settings.bias_correction,
        # Automatic scaling starts from 1 and finds its own factor.
        loss_scaling=1.0 if engine.automatic_loss_scaling else engine.loss_scaling,
        accum_type=TYPES[engine.gradient_accumulator_type],
        first_order_momentum_accum_type=TYPES[engine.first_moment_type],
        second_order_momentum_accum_type=torch.float32,
    )
    if settings.name == "adamw":
        groups = [{name: value for name, value in group.items() if name != "max_weight_norm"} for group in groups]
        optimizer = poptorch.optim.AdamW(groups, **shared)
    else:
        optimizer = poptorch.optim.LAMB(groups, max_weight_norm=settings.max_weight_norm, **shared)
        optimizer.variable_attrs.markAsConstant("max_weight_norm")
    optimizer.variable_attrs.markAsConstant("weight_decay")
    return optimizer


# ------------------------------------------------------------------------------------------------------------ loading


@dataclass(frozen=True)
class Reader:
    """The batches of a run from a given place on, as an iterable that can travel to another process."""

    config: Config
    packing_factor: float
    share: Tuple[int, int]
    start: Dict[str, Any]  # GlobalBatches.state()
    updates_per_epoch: int

    def __len__(self) -> int:
        return self.updates_per_epoch

    def __iter__(self) -> Iterator[Tuple[torch.Tensor, ...]]:
        with contextlib.ExitStack() as opened:
            store = opened.enter_context(PackStore.open(Path(self.config.data.directory)))
            batches = opened.enter_context(
                contextlib.closing(
                    GlobalBatches(store, self.config, packing_factor=self.packing_factor, share=self.share)
                )
            )
            batches.load_state(self.start)
            for batch in batches:
                yield tuple(torch.from_numpy(batch[name]) for name in BATCH_FIELDS)


class BatchesAhead:
    """`loader.GlobalBatches`, decoded in a process of its own.

    PopTorch holds Python's lock while a program runs, so that a thread would read nothing meanwhile. The tensors of a
    batch are good until the next one is asked for.
    """

    def __init__(self, batches: GlobalBatches, config: Config, *, packing_factor: float, share: Tuple[int, int]):
        self._batches, self._config, self._packing_factor, self._share = batches, config, packing_factor, share
        self._accessor: Optional["poptorch.AsynchronousDataAccessor"] = None

    def __getattr__(self, name: str) -> Any:
        return getattr(self._batches, name)

    def __iter__(self) -> "BatchesAhead":
        return self

    def __next__(self) -> Batch:
        if self._accessor is None:
            batches = self._batches
            reader = Reader(
                self._config, self._packing_factor, self._share, batches.state(), batches.updates_per_epoch
            )
            self._accessor = iter(poptorch.AsynchronousDataAccessor(reader, buffer_size=3, load_indefinitely=True))
        batch = {name: tensor.numpy() for name, tensor in zip(BATCH_FIELDS, next(self._accessor))}
        self._batches.load_state({**self._batches.state(), **self._after()._asdict()})
        return batch

    def _after(self) -> Position:
        """Where the batch after the current one begins."""
        epoch, packs = self._batches.position
        packs += self._batches.packs_per_update
        return Position(epoch + 1, 0) if packs >= len(self._batches.training_packs) else Position(epoch, packs)

    def load_state(self, state: Dict[str, Any]) -> None:
        self._stop()
        self._batches.load_state(state)

    def close(self) -> None:
        self._stop()
        self._batches.close()

    def _stop(self) -> None:
        if self._accessor is not None:
            self._accessor.terminate()
            self._accessor = None


# ------------------------------------------------------------------------------------------------------------- engine


class IpuEngine(Engine):
    """PopTorch programs for training and evaluation, one of each at most."""

    def __init__(self, config: Config, schema, *, packing_factor: float):
        check(config, schema, packing_factor=packing_factor)
        device = find_device(config)
        if device is None:
            raise ValueError(f"no device for {_ipus(config)}; see gc-info -l for what is attached, or use --engine host")
        if device.kind == "ipu_model" and config.placement.replicas > 1:
            raise ValueError(
                f"the Poplar IPU Model runs one replica, placement.replicas is {config.placement.replicas}; use"
                " --set placement.replicas=1 --set placement.replicated_tensor_sharding=false"
            )
        self.config = config
        self.device = device
        self.instance = find_instance(config)
        self.packing_factor = packing_factor
        self.accumulation = config.accumulation(packing_factor)
        self._program = build_program(config, depth=schema.max_sequences_per_pack)
        self._network = self._program.network
        self._optimizer = build_optimizer(self._program, config, betas=config.betas(packing_factor))
        self._training = poptorch.trainingModel(
            self._program,
            options=training_options(config, device, self.instance, accumulation=self.accumulation),
            optimizer=self._optimizer,
        )
        self._evaluation = None
        self._evaluation_iterations = None
        self._updates = 0
        self._cycles: Optional[int] = None
        self._waiting: Optional[Dict[str, Any]] = None  # optimiser state for a program not yet compiled
        self._waiting_rng: Optional[List[int]] = None

    @property
    def description(self) -> str:
        engine = self.config.engine
        weights = "half" if engine.half_weights else "float32"
        stages = len(place(self.config).stages)
        return f"{self.device.reason}; {weights} weights, {stages} forward stage{'' if stages == 1 else 's'}"

    @property
    def compilations(self) -> Dict[str, int]:
        return {
            "training": int(self._training.isCompiled()),
            "evaluation": int(self._evaluation is not None and self._evaluation.isCompiled()),
        }

    def compile(self, batch: Batch) -> None:
        if self._training.isCompiled():
            return
        tensors = self._tensors(batch, self.accumulation)
        self._program.train()
        if self.device.offline:
            self._training.compileAndExport(self.config.engine.offline_export, *tensors, export_model=False)
            return
        self._training.compile(*tensors)
        self._restore()

    def step(self, batch: Batch, learning_rate: float) -> StepResult:
        if self.device.offline:
            raise ValueError(
                f"nothing runs on an offline target; the program is in {self.config.engine.offline_export},"
                " drop engine.offline_export to train"
            )
        self.compile(batch)
        tensors = self._tensors(batch, self.accumulation)
        for group in self._optimizer.param_groups:
            group["lr"] = learning_rate
        self._training.setOptimizer(self._optimizer)
        started = time.perf_counter()
        outputs = self._training(*tensors)
        seconds = time.perf_counter() - started
        self._updates += 1
        if self.config.engine.log_cycles and self.device.kind == "ipu":
            self._cycles = int(self._training.cycleCount())
        return self._result(outputs, batch, seconds, self._cycles)

    def evaluate(self, batch: Batch) -> StepResult:
        iterations = self._iterations(batch)
        tensors = self._tensors(batch, iterations)
        hardware = self.device.kind == "ipu"
        if self._training.isCompiled() and self._training.isAttachedToDevice():
            self._training.copyWeightsToHost()
            if hardware:
                # Both programs want the same IPUs. Detaching saves the optimiser's and the random state; the next step
                # attaches again and restores them.
                self._training.detachFromDevice()
        self._program.eval()
        try:
            if self._evaluation is None:
                options = evaluation_options(self.config, self.device, self.instance, iterations=iterations)
                self._evaluation = poptorch.inferenceModel(self._program, options=options)
                self._evaluation_iterations = iterations
            elif self._evaluation.isAttachedToDevice():
                self._evaluation.copyWeightsToDevice()
            started = time.perf_counter()
            outputs = self._evaluation(*tensors)
            seconds = time.perf_counter() - started
            if hardware:
                self._evaluation.detachFromDevice()
        finally:
            self._program.train()
        return self._result(outputs, batch, seconds, None)

    def cycles(self) -> Optional[int]:
        return self._cycles

    def close(self) -> None:
        for executor in (self._evaluation, self._training):
            if executor is not None and executor.isCompiled():
                executor.destroy()

    # -- batches ------------------------------------------------------------------------------------------------------

    @property
    def share(self) -> Tuple[int, int]:
        return self.instance.index, self.instance.instances

    def feed(self, batches: GlobalBatches):
        """The same batches, read ahead by another process where the configuration wants it."""
        if not self.config.engine.asynchronous_loading:
            return batches
        return BatchesAhead(batches, self.config, packing_factor=self.packing_factor, share=self.share)

    def _tensors(self, batch: Batch, micro_batches_per_replica: int) -> Tuple[torch.Tensor, ...]:
        """This process's rows of a global batch, as PopTorch takes them: replica first, then time.

        Replica r finds at time t the micro-batch r x accumulation + t, so the batch is passed on as it is. An update
        sums over all its rows: their order decides nothing.
        """
        found = micro_batches(batch, self.config.batch.micro_batch)
        wanted = micro_batches_per_replica * self.instance.replicas
        if found != wanted:
            raise ValueError(
                f"the batch holds {found} micro-batches, the program takes {wanted}"
                f" ({micro_batches_per_replica} x {self.instance.replicas} replicas); fill it with empty packs"
            )
        return tuple(torch.from_numpy(np.ascontiguousarray(batch[name])) for name in BATCH_FIELDS)

    def _iterations(self, batch: Batch) -> int:
        """Micro-batches of an evaluation batch for each replica. Raises ValueError if they cannot be the program's."""
        found = micro_batches(batch, self.config.batch.micro_batch)
        iterations, rest = divmod(found, self.instance.replicas)
        stages = len(place(self.config).stages)
        if rest or iterations < stages:
            raise ValueError(
                f"the evaluation batch holds {found} micro-batches; it needs a multiple of the"
                f" {self.instance.replicas} replicas, and {stages} (the pipeline's stages) or more for each; fill it with"
                " empty packs"
            )
        if self._evaluation_iterations not in (None, iterations):
            raise ValueError(
                f"the evaluation batch holds {found} micro-batches, the compiled program takes"
                f" {self._evaluation_iterations * self.instance.replicas}; fill it with empty packs"
            )
        return iterations

    def _result(self, outputs, batch: Batch, seconds: float, cycles: Optional[int]) -> StepResult:
        """Means over the sequences of this process, which are those of the update unless poprun started several."""
        # One value a replica, or a scalar where there is one: sums over micro-batches either way.
        _, mlm_sum, nsp_sum, mlm_correct, nsp_correct = (float(output.to(torch.float64).sum()) for output in outputs)
        counts = count(batch)
        token = self.config.loss.normalisation == "token"
        mlm_loss = _mean(mlm_sum, batch["mlm_scale"], counts.masked_tokens if token else counts.sequences)
        nsp_loss = _mean(nsp_sum, batch["nsp_scale"], counts.sequences)
        return StepResult(
            loss=mlm_loss + nsp_loss,
            mlm_loss=mlm_loss,
            nsp_loss=nsp_loss,
            mlm_accuracy=mlm_correct / max(1, counts.masked_tokens),
            nsp_accuracy=nsp_correct / max(1, counts.sequences),
            seconds=seconds,
            cycles=cycles,
        )

    # -- state --------------------------------------------------------------------------------------------------------

    def state(self) -> Dict[str, Any]:
        running = self._training.isCompiled() and not self.device.offline
        if running and self._training.isAttachedToDevice():
            self._training.copyWeightsToHost()
        parameters = {name: _plain(tensor) for name, tensor in self._network.named_parameters()}
        state = {"model": parameters}
        if not running:
            held = self._waiting or {"exp_avg": {}, "exp_avg_sq": {}}
            state["optimizer"] = {
                "step": self._updates,
                **{
                    moment: {name: held[moment].get(name, torch.zeros_like(p)).clone() for name, p in parameters.items()}
                    for moment in ("exp_avg", "exp_avg_sq")
                },
            }
            return state
        state["optimizer"] = {"step": self._updates, **moments(self._optimizer.state_dict()["ipu_state"], parameters)}
        state["ipu_random"] = torch.from_numpy(np.array(self._training.rng_state, dtype=np.uint64).view(np.int64))
        return state

    def load_state(self, state: Dict[str, Any]) -> None:
        parameters = dict(self._network.named_parameters())
        for part, tensors in (("model", state["model"]), *((m, state["optimizer"][m]) for m in ("exp_avg", "exp_avg_sq"))):
            _same_shapes(part, tensors, parameters)
        with torch.no_grad():
            for name, parameter in parameters.items():
                parameter.copy_(state["model"][name])
        self._updates = int(state["optimizer"]["step"])
        self._waiting = state["optimizer"]
        self._waiting_rng = state["ipu_random"].numpy().view(np.uint64).tolist() if "ipu_random" in state else None
        if self._training.isCompiled() and not self.device.offline:
            if self._training.isAttachedToDevice():
                self._training.copyWeightsToDevice()
            self._restore()

    def _restore(self) -> None:
        """Hand the optimiser state that waits to the compiled program."""
        if self._waiting is not None:
            held = self._optimizer.state_dict()
            fill(held["ipu_state"], self._waiting)
            self._optimizer.load_state_dict(held)
            self._waiting = None
        if self._waiting_rng is not None:
            self._training.rng_state = self._waiting_rng
            self._waiting_rng = None


def _plain(tensor: torch.Tensor) -> torch.Tensor:
    """A float32 copy that is a torch.Tensor and nothing more: a trained model's parameters are of PopTorch's own class."""
    return torch.from_numpy(tensor.detach().to(torch.float32).numpy().copy())


def _mean(scaled_sum: float, scale: np.ndarray, number: int) -> float:
    """A sum of losses, each multiplied by the batch's scale, over `number` of them -> their mean."""
    return scaled_sum / (float(scale[0]) * number) if number else 0.0


def check(config: Config, schema, *, packing_factor: float) -> None:
    """What only the engine can know before it compiles. Raises ValueError, in one line each."""
    check_accumulation(config, packing_factor)
    data = config.data
    if schema.max_sequence_length != data.max_sequence_length:
        raise ValueError(
            f"{config.path}: data.max_sequence_length is {data.max_sequence_length}, the data set's packs have"
            f" {schema.max_sequence_length} slots; build it again or change the configuration"
        )
    if data.max_sequences_per_pack not in (None, schema.max_sequences_per_pack):
        raise ValueError(
            f"{config.path}: data.max_sequences_per_pack is {data.max_sequences_per_pack}, the data set was packed at depth"
            f" {schema.max_sequences_per_pack}; build it again or change the configuration"
        )
    if schema.max_predictions_per_pack < (data.max_predictions_per_sequence or 1):
        raise ValueError(
            f"{config.path}: data.max_predictions_per_sequence is {data.max_predictions_per_sequence}, the data set's packs"
            f" have room for {schema.max_predictions_per_pack} masked tokens; build it again or change the configuration"
        )
    if config.batch.device_iterations != 1:
        raise ValueError(
            f"{config.path}: batch.device_iterations is {config.batch.device_iterations}; must be 1 on IPUs, where a step"
            " is one call and one weight update"
        )


# PopART's names of an optimiser's tensors: a prefix, three underscores and the weight's name in the compiled model.
_MOMENTS = {"Accl1": "exp_avg", "Accl2": "exp_avg_sq"}


def _weight_of(key: str, names: Iterable[str]) -> Tuple[str, Optional[str]]:
    """"Accl1___model.network.bert.x" -> ("Accl1", "bert.x"); None where the rest ends in no parameter's name."""
    prefix, _, path = key.partition("___")
    parts = path.split(".")
    candidates = (".".join(parts[first:]) for first in range(len(parts)))
    return prefix, next((name for name in candidates if name in names), None)


def moments(device: Dict[str, torch.Tensor], parameters: Dict[str, torch.Tensor]) -> Dict[str, Dict[str, torch.Tensor]]:
    """The device's optimiser tensors -> {"exp_avg": {name: float32}, "exp_avg_sq": {name: float32}}."""
    found: Dict[str, Dict[str, torch.Tensor]] = {moment: {} for moment in _MOMENTS.values()}
    for key, tensor in device.items():
        prefix, name = _weight_of(key, parameters)
        if prefix in _MOMENTS and name is not None:
            found[_MOMENTS[prefix]][name] = _plain(tensor).reshape(parameters[name].shape)
    for moment, tensors in found.items():
        missing = sorted(set(parameters) - set(tensors))
        if missing:
            raise ValueError(
                f"the device returned no {moment} of {missing[0]} and {len(missing) - 1} others, so the optimiser's state"
                f" cannot be saved; it has {sorted(device)[:3]} ..."
            )
    return found


def fill(device: Dict[str, torch.Tensor], state: Dict[str, Any]) -> None:
    """Overwrite the device's optimiser tensors with an engine-neutral state, in place."""
    for key, tensor in list(device.items()):
        prefix, name = _weight_of(key, state["exp_avg"])
        if name is None:
            continue
        if prefix in _MOMENTS:
            device[key] = state[_MOMENTS[prefix]][name].to(tensor.dtype).reshape(tensor.shape).clone()
        elif prefix == "Step":
            device[key] = torch.full_like(tensor, state["step"])


def _same_shapes(part: str, tensors: Dict[str, torch.Tensor], parameters: Dict[str, torch.Tensor]) -> None:
    wanted = {name: tuple(tensor.shape) for name, tensor in parameters.items()}
    found = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    wrong = sorted(name for name in {**wanted, **found} if wanted.get(name) != found.get(name))
    if wrong:
        raise ValueError(
            f"{part} of {wrong[0]} is {found.get(wrong[0])} in the checkpoint, {wanted.get(wrong[0])} in the model"
            f" ({len(wrong)} differ); load it into the model it was saved from"
        )
