"""A stand-in for PopTorch 3.4 that trains on the CPU what PopTorch would train on IPUs.

It is an implementation, not a recording: a combined batch is cut into replicas, iterations and micro-batches, gradients
are accumulated in the type asked for and reduced, an optimiser updates weights that live on the device (the host's copy
is stale until it is copied back), and the rules of PopTorch that an application meets are errors here.  Names and
signatures are those of the published interface (tests/data/poptorch_api.json); a test compares them.

What it cannot show: memory, speed, the compiler's own limits, half precision as the IPU rounds it, and gelu, which the
IPU computes by the tanh form.  Where it and PopTorch differ, PopTorch is right.
"""

import contextlib as _contextlib
import copy as _copy
import enum as _enum
import inspect as _inspect
import math as _math
import os as _os
import pickle as _pickle
import queue as _queue
import re as _re
import threading as _threading
import time as _time
import weakref as _weakref
from pathlib import Path as _Path

import torch as _torch
from torch.func import functional_call as _functional_call

from tests.fakes import poptorch_optim as optim
from tests.fakes.half import half_on_the_cpu as _half_on_the_cpu
from tests.fakes.lowering import API as _API
from tests.fakes.lowering import Recorder as _Recorder
from tests.fakes.machine import CompiledProgram as _CompiledProgram
from tests.fakes.machine import machine as _machine
from tests.fakes.profiles import TILE_BYTES as _TILE_BYTES
from tests.fakes.profiles import Profile as _Profile
from tests.fakes.profiles import engine_option as _engine_option

__version__ = _API["poptorch_version"]


class Error(Exception):
    pass


class OutputMode(_enum.IntEnum):
    Final = 0
    EveryN = 1
    All = 2
    Sum = 3
    Default = 4


class ReductionType(_enum.IntEnum):
    Sum = 0
    Mean = 1
    NoReduction = 2


class MeanReductionStrategy(_enum.IntEnum):
    Running = 0
    Post = 1
    PostAndLoss = 2


class AutoStage(_enum.IntEnum):
    SameAsIpu = 0
    AutoIncrement = 1


class ConnectionType(_enum.IntEnum):
    Always = 0
    OnDemand = 1
    Never = 2


class MatMulSerializationMode(_enum.Enum):
    InputChannels = "input_channels"
    ReducingDim = "reducing_dim"
    OutputChannels = "output_channels"
    Disabled = "none"


class SharingStrategy(_enum.IntEnum):
    SharedMemory = 0
    FileSystem = 1
    Fork = 2
    ForkServer = 3


def _after_init(what):
    if _machine.poprun is not None and not _machine.poprun.ready:
        raise Error(f"{what}: poprun started this process, and popdist.init() was not called")


def _positive(value, name):
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ValueError(f"{name} must be a whole number above 0, not {value!r}")
    return value


def _of(kind, value, name):
    if not isinstance(value, kind):
        raise ValueError("{} must be {}, not {!r}".format(name, getattr(kind, "__name__", kind), value))
    return value


class _Settings:
    """A set of options; frozen with the Options object it belongs to."""

    def __init__(self):
        self.__dict__["_owner"] = self
        self.__dict__["_values"] = {}
        self.__dict__["_frozen"] = False

    def _set(self, **values):
        if self._owner._frozen:
            raise AttributeError("Can't modify frozen Options: a model or a DataLoader has taken them")
        self._values.update(values)
        return self

    def __setattr__(self, name, value):
        raise AttributeError(f"{type(self).__name__} has no option {name}")


class TensorLocationSettings(_Settings):
    def __init__(self):
        super().__init__()

    def useOnChipStorage(self, use=True):
        return self._set(on_chip=_of(bool, use, "use"))

    def useReplicatedTensorSharding(self, use=True):
        return self._set(sharding=_of(bool, use, "use"))


class _TensorLocationOptions(_Settings):
    def setOptimizerLocation(self, location):
        return self._set(optimizer=dict(_of(TensorLocationSettings, location, "location")._values))


class _DistributedOptions(_Settings):
    def configureProcessId(self, process_id, num_processes):
        return self._set(process=process_id, processes=num_processes)

    @property
    def processId(self):
        return self._values.get("process", 0)

    @property
    def numProcesses(self):
        return self._values.get("processes", 1)


class _PopartOptions(_Settings):
    """Settings of the backend by name; a name it does not know, or a value of another type, is an error."""

    def set(self, key, value):
        known = _API["backend_options"]
        kinds = {"bool": bool, "uint64": int, "double": float, "string": str, "container": (list, dict)}
        for kind, names in known.items():
            if key in names:
                expected = kinds.get(kind, int)
                if not isinstance(value, expected) or (expected is int and isinstance(value, bool)):
                    raise RuntimeError(f"backend option {key} takes {kind}, not {value!r}")
                return self._set(**{key: value})
        raise RuntimeError(f"unknown backend option {key}")

    def setEngineOptions(self, engine_options):
        for key, value in engine_options.items():
            _of(str, key, "engine option"), _of(str, value, key)
        return self._set(engineOptions=dict(engine_options))

    def setPatterns(self, patterns, level=2):
        for key, value in patterns.items():
            _of(str, key, "pattern"), _of(bool, value, key)
        return self._set(patterns=dict(patterns), patterns_level=level)


class _PrecisionOptions(_Settings):
    def __init__(self, popart_options):
        super().__init__()

    def enableStochasticRounding(self, enabled):
        return self._set(stochastic_rounding=_of(bool, enabled, "enabled"))

    def setPartialsType(self, dtype):
        if dtype not in (_torch.float16, _torch.float32):
            raise ValueError(f"partials are float16 or float32, not {dtype}")
        return self._set(partials=dtype)


class _TrainingOptions(_Settings):
    def __init__(self, popart_options):
        super().__init__()
        self._values.update(accumulation=1, reduction=ReductionType.Mean, mean_strategy=MeanReductionStrategy.Post)

    def gradientAccumulation(self, gradient_accumulation):
        return self._set(accumulation=_positive(gradient_accumulation, "gradientAccumulation"))

    def accumulationAndReplicationReductionType(self, reduction_type):
        return self._set(reduction=_of(ReductionType, reduction_type, "reduction_type"))

    def setAutomaticLossScaling(self, enabled):
        return self._set(automatic_loss_scaling=_of(bool, enabled, "enabled"))


class Options(_Settings):
    def __init__(self):
        super().__init__()
        _after_init("Options")
        self._values.update(
            device_iterations=1,
            replication_factor=1,
            output_mode=OutputMode.Default,
            connection=ConnectionType.Always,
            strategy=None,
            memory={},
        )
        popart = _PopartOptions()
        parts = dict(
            _popart=popart,
            _precision=_PrecisionOptions(popart),
            _training=_TrainingOptions(popart),
            _locations=_TensorLocationOptions(),
            _distributed=_DistributedOptions(),
        )
        for part in parts.values():
            part.__dict__["_owner"] = self
        self.__dict__.update(parts)

    TensorLocations = property(lambda self: self._locations)
    Distributed = property(lambda self: self._distributed)
    Precision = property(lambda self: self._precision)
    Training = property(lambda self: self._training)
    _Popart = property(lambda self: self._popart)

    def deviceIterations(self, device_iterations):
        return self._set(device_iterations=_positive(device_iterations, "deviceIterations"))

    def replicationFactor(self, replication_factor):
        return self._set(replication_factor=_positive(replication_factor, "replicationFactor"))

    def setExecutionStrategy(self, strategy):
        if isinstance(strategy, AutoStage):
            strategy = PipelinedExecution(strategy)
        return self._set(strategy=_of(PipelinedExecution, strategy, "strategy"))

    def setAvailableMemoryProportion(self, available_memory_proportion):
        for key, value in available_memory_proportion.items():
            if not _re.fullmatch(r"IPU\d+", key):
                raise ValueError(f"keys are IPU0, IPU1, ..., not {key!r}")
            if not 0.0 <= value <= 1.0:
                raise ValueError(f"{key}: {value} is not in 0..1")
        return self._set(memory=dict(available_memory_proportion))

    def outputMode(self, output_mode, output_return_period=None):
        if output_return_period is not None:
            raise ValueError("the stand-in has no return period")
        return self._set(output_mode=_of(OutputMode, output_mode, "output_mode"))

    def defaultOutputMode(self):
        return self._values["output_mode"] == OutputMode.Default

    def randomSeed(self, random_seed):
        return self._set(random_seed=_of(int, random_seed, "random_seed"))

    def enableSyntheticData(self, enabled):
        return self._set(synthetic_data=_of(bool, enabled, "enabled"))

    def logCycleCount(self, log_cycle_count):
        return self._set(cycles=_of(bool, log_cycle_count, "log_cycle_count"))

    def enableProfiling(self, profile_dir=None):
        self._popart.setEngineOptions(
            {
                **self._popart._values.get("engineOptions", {}),
                "debug.allowOutOfMemory": "true",
                "autoReport.all": "true",
                "autoReport.directory": profile_dir or ".",
            }
        )
        return self._set(profile_dir=profile_dir)

    def enableExecutableCaching(self, path):
        return self._set(cache=_of(str, path, "path"))

    def modelName(self, name):
        return self._set(name=_of(str, name, "name"))

    def showCompilationProgressBar(self, show=True):
        return self._set(progress=_of(bool, show, "show"))

    def useIpuModel(self, use_model):
        if use_model and "offline" in self._values:
            raise Error("the IPU Model and an offline target exclude each other")
        return self._set(ipu_model=_of(bool, use_model, "use_model"))

    def useOfflineIpuTarget(self, ipu_version=2):
        if self._values.get("ipu_model") or not _no_model_asked_for():
            raise Error("the IPU Model and an offline target exclude each other")
        return self._set(offline=ipu_version, connection=ConnectionType.Never)

    def toDict(self):
        """Return the options for the backend under PopTorch's names (its options.py), without defaults."""
        assert not self.defaultOutputMode(), "An output mode must be picked before serialisation"
        settings = self._values
        training = self._training._values
        precision = self._precision._values
        merged = {
            "execution_mode": 0,  # pipelined
            "replication_factor": settings["replication_factor"],
            "input_group_size": 1,
            "input_cgt": 1,  # consecutive
            "broadcast_buffers": True,
            "device_iterations": settings["device_iterations"],
            "log_dir": ".",
            "max_repeat_logs": 4,
            "auto_round_num_ipus": False,
            "anchored_tensors": {},
            "output_mode": int(settings["output_mode"]),
            "output_return_period": 1,
            "connection_type": int(settings["connection"]),
            "sync_pattern": 0,  # full
            "available_memory_proportion": {int(name[3:]): share for name, share in settings["memory"].items()},
            "gradient_accumulation": training["accumulation"],
            "accumulation_and_replication_reduction_type": training["reduction"],
            "meanAccumulationAndReplicationReductionStrategy": training["mean_strategy"],
            "num_distributed_processes": self._distributed.numProcesses,
            "distributed_process_id": self._distributed.processId,
            "ipuof_configs": {},
            "instrumentWithHardwareCycleCounter": settings.get("cycles", False),
            "rearrangeAnchorsOnHost": False,
            **{
                f"location_{kind}": {_LOCATION_NAMES[name]: int(value) for name, value in location.items()}
                for kind, location in self._locations._values.items()
            },
            **self._popart._values,
        }
        if settings.get("progress", True):
            merged["compilation_progress_bar_fn"] = print
        for ours, name in (
            ("ipu_model", "use_model"),
            ("name", "model_name"),
            ("random_seed", "random_seed"),
            ("offline", "ipu_version"),
        ):
            if ours in settings:
                merged[name] = settings[ours]
        if "cache" in settings:
            merged.update(cachePath=settings["cache"], enableEngineCaching=True)
        if "synthetic_data" in settings:
            merged["syntheticDataMode"] = 2 if settings["synthetic_data"] else 0  # random normal, off
        if "automatic_loss_scaling" in training:
            merged["automaticLossScalingSettings.enabled"] = training["automatic_loss_scaling"]
        if "stochastic_rounding" in precision:
            merged["enableStochasticRounding"] = precision["stochastic_rounding"]
        if "partials" in precision:
            kind = "half" if precision["partials"] == _torch.float16 else "float"
            merged.update(partialsTypeMatMuls=kind, convolutionOptions={"partialsType": kind})
        return merged

    def _freeze(self):
        self.__dict__["_frozen"] = True


_LOCATION_NAMES = {
    "on_chip": "onChip",
    "sharding": "useReplicatedTensorSharding",
}


class PipelinedExecution:
    def __init__(self, *args):
        if len(args) != 1 or not isinstance(args[0], AutoStage):
            raise ValueError("the stand-in numbers stages by AutoStage only")
        self._auto_stage = args[0]


class _Graph:
    """State of a trace: blocks in the order they begin, losses, checkpoints."""

    def __init__(self, first_ipu=0):
        self.blocks = []
        self.losses = []
        self.checkpoints = 0
        self.serialised = []

    @property
    def ipu(self):
        return self.blocks[-1][1] if self.blocks else 0

    def stages(self, strategy):
        """IPU of each forward stage: a stage is a run of blocks on one IPU."""
        runs = []
        for _, ipu in self.blocks or [(None, 0)]:
            if not runs or runs[-1] != ipu:
                runs.append(ipu)
        if strategy is not None and strategy._auto_stage == AutoStage.SameAsIpu and len(set(runs)) < len(runs):
            raise Error(f"AutoStage.SameAsIpu: stage {len(runs)} returns to an IPU that an earlier stage left")
        return runs


_graph = None


class Block(_torch.nn.Module):
    @staticmethod
    def start(user_id=None, ipu_id=None):
        if _graph is not None:
            _graph.blocks.append((user_id, _graph.ipu if ipu_id is None else ipu_id))


def BeginBlock(layer_to_call, user_id=None, ipu_id=None):
    _of(_torch.nn.Module, layer_to_call, "layer_to_call")
    kind = type(layer_to_call)
    if getattr(kind, "_begins_block", False):
        raise Error(f"{kind.__name__} already begins a block")

    class _BlockModule(kind):
        _begins_block = True

        def __call__(self, *args, **kwargs):
            Block.start(user_id, ipu_id)
            return super().__call__(*args, **kwargs)

    _BlockModule.__name__ = kind.__name__
    layer_to_call.__class__ = _BlockModule
    return layer_to_call


def identity_loss(x, reduction):
    if reduction == "mean":
        result = x.mean()
    elif reduction == "sum":
        result = x.sum()
    elif reduction == "none":
        if x.dim() and x.numel() != 1:
            raise Error(f"a loss that is not reduced must be a scalar, not {list(x.shape)}")
        result = x * 1
    else:
        raise ValueError(f"reduction is mean, sum or none, not {reduction!r}")
    if _graph is not None:
        _graph.losses.append(result)
    return result


def recomputationCheckpoint(*tensors):
    if _graph is not None:
        _graph.checkpoints += len(tensors)
    return tensors[0] if len(tensors) == 1 else tuple(tensors)


def serializedMatMul(lhs, rhs, mode, factor=0, keep_precision=False):
    _of(MatMulSerializationMode, mode, "mode"), _of(bool, keep_precision, "keep_precision")
    if lhs.dim() != 2 or rhs.dim() != 2:
        raise Error(f"the stand-in serialises products of matrices; flatten {list(lhs.shape)} x {list(rhs.shape)}")
    if mode != MatMulSerializationMode.OutputChannels:
        raise Error(f"the stand-in serialises by output channels only, not by {mode}")
    columns = rhs.shape[1]
    if factor < 1 or columns % factor:
        raise Error(f"a factor of {factor} does not divide {columns}")
    if _graph is not None:
        _graph.serialised.append((mode, factor))
    return _torch.cat([_torch.matmul(lhs, part) for part in rhs.split(columns // factor, 1)], 1)


def _no_model_asked_for():
    return all(_os.environ.get(f"POPTORCH_{size}IPU_MODEL", "0") == "0" for size in ("", "SMALL_"))


def ipuHardwareIsAvailable(num_ipus=1):
    if not _no_model_asked_for():
        return False  # with a simulated device asked for, hardware is not looked for
    _after_init("ipuHardwareIsAvailable")
    if num_ipus & (num_ipus - 1):
        return False  # devices are of powers of two
    return _machine.ipus >= num_ipus


def ipuHardwareVersion():
    return 2 if _machine.ipus else -1


_GLOBAL_CONSTANTS = (
    "bias_correction",
    "accum_type",
    "first_order_momentum_accum_type",
    "second_order_momentum_accum_type",
)
_GROUP_ATTRIBUTES = ("lr", "betas", "eps", "weight_decay", "max_weight_norm")


def _snapshot(optimizer):
    """Values of an optimiser on the device, copied when it is set and never read from the host again."""
    if not isinstance(optimizer, optim.Optimizer):
        raise Error(f"the stand-in takes optimisers of poptorch.optim, not {type(optimizer).__name__}")
    groups = [{name: group[name] for name in _GROUP_ATTRIBUTES if name in group} for group in optimizer.param_groups]
    shared = {name: getattr(optimizer, name) for name in _GLOBAL_CONSTANTS + ("loss_scaling",)}
    constants = {
        (number, name): value
        for number, group in enumerate(groups)
        for name, value in group.items()
        if name != "lr" and optimizer.variable_attrs.isConstant(name)
    }
    constants.update({name: shared[name] for name in _GLOBAL_CONSTANTS})
    if optimizer.variable_attrs.isConstant("loss_scaling"):
        constants["loss_scaling"] = shared["loss_scaling"]
    return {
        "groups": groups,
        "shared": shared,
        "constants": constants,
        "type": type(optimizer),
        "max_grad_norm": getattr(optimizer, "max_grad_norm", float("inf")),  # LAMB has none
    }


def trainingModel(model, options=None, optimizer=None):
    if optimizer is None:
        raise Error("the stand-in wants an optimiser; PopTorch would take SGD at 0.01")
    return PoplarExecutor(model, options, True, __version__, optimizer)


def inferenceModel(model, options=None):
    return PoplarExecutor(model.model if isinstance(model, PoplarExecutor) else model, options, False, __version__)


_wrapped = _weakref.WeakSet()  # models that are being trained
_NARROWED = {_torch.int64: _torch.int32, _torch.float64: _torch.float32}


def _narrow(tensor):
    """int64 and float64 do not exist on the device."""
    if _machine.float64 and tensor.is_floating_point():
        return tensor
    return tensor.to(_NARROWED.get(tensor.dtype, tensor.dtype))


def _precise(dtype=_torch.float32):
    """The type in which the device keeps what is asked for in this one."""
    return _torch.float64 if _machine.float64 else dtype


def _scalars(outputs):
    return [outputs] if isinstance(outputs, _torch.Tensor) else list(outputs)


class PoplarExecutor:
    def __init__(self, model, options, training, poptorch_version, optimizer=None, user_model=None):
        _of(_torch.nn.Module, model, "model")
        options = options if options is not None else Options()
        if options.defaultOutputMode():
            options.outputMode(OutputMode.Final if training else OutputMode.All)
        if training:
            if model in _wrapped:
                raise RuntimeError("Model has already been wrapped in 'poptorch.trainingModel'; call destroy() first")
            _wrapped.add(model)
        if not training and options.Training._values["accumulation"] != 1:
            raise AssertionError("Gradient accumulation should be left to its default value (1) for inference")
        for name, buffer in model.named_buffers():
            if type(buffer) is not _torch.Tensor:
                raise Error(f"buffer {name} must be a plain torch.Tensor")
        options._freeze()
        self._exchange = None  # with the other instances
        if _machine.poprun is not None:
            if options.Distributed.numProcesses != _machine.poprun.instances:
                raise Error("poprun started several instances: take popdist.poptorch.Options")
            self._exchange = _machine.poprun.device
        # A shallow copy, as PopTorch makes one: it shares parameters and submodules, not the attributes of its own.
        self._user_model = model
        self._model = _copy.copy(model)
        self._options = options
        self._training = training
        self._values = {**options._values, **options.Training._values}
        self._compiled = self._attached = False
        self._device = None  # parameters and buffers on the device
        self._moments = {}
        self._optimizer = self._device_optimizer = None
        self._cycles = None
        if optimizer is not None:
            self.setOptimizer(optimizer)

    model = property(lambda self: self._user_model)
    options = property(lambda self: self._options)

    @property
    def rng_state(self):
        if not self._compiled:
            raise Error("Model has not been compiled or has been destroyed.")
        replicas = self._values.get("replication_factor", 1)  # each has a state of its own
        return [self._values.get("random_seed", 0)] + [0] * replicas + self._rng.tolist()

    @rng_state.setter
    def rng_state(self, state):
        if not self._compiled:
            raise Error("Model has not been compiled or has been destroyed.")
        if len(state) != len(self.rng_state):
            raise Error(f"Devicex::setRngStateValue received rngState of size {len(state)}")
        self._rng = _torch.tensor(state[-len(self._rng) :], dtype=_torch.uint8)

    # -- optimiser ----------------------------------------------------------------------------------------------

    def setOptimizer(self, optimizer):
        snapshot = _snapshot(optimizer)
        if self._compiled and snapshot["constants"] != self._device_optimizer["constants"]:
            changed = [
                name
                for name, value in snapshot["constants"].items()
                if self._device_optimizer["constants"].get(name) != value
            ]
            raise Error(f"constant optimiser attributes changed after compilation: {changed}")
        if optimizer is not self._optimizer and self._compiled:
            optimizer._to_device = True
        self._optimizer = optimizer
        self._device_optimizer = snapshot
        optimizer._executor = self

    def _read_optimizer_state(self, optimizer):
        if not self._compiled or self._values["connection"] == ConnectionType.Never or optimizer._to_device:
            return
        self._together("read the optimiser's state")
        state = {}
        for name, moments in self._moments.items():
            # "model." is the wrapper in which PopTorch puts model and optimiser.
            state["Accl1___model." + name] = moments["first"].clone()
            state["Accl2___model." + name] = moments["second"].clone()
            if self._device_optimizer["shared"]["bias_correction"]:
                state["Step___model." + name] = _torch.tensor([float(moments["step"])])
        rates = self._device_optimizer["groups"]
        optimizer._state_dict = {
            "ipu_state": state,
            "ipu_param": {
                "lossScaling_FLOAT": _torch.tensor(self._device_optimizer["shared"]["loss_scaling"]),
                **{f"learningRate___group{n}": _torch.tensor(g["lr"]) for n, g in enumerate(rates)},
            },
        }

    def _write_optimizer_state(self):
        if self._optimizer is None or not self._optimizer._to_device:
            return
        state = self._optimizer._state_dict["ipu_state"]
        if state is not None:
            for name, moments in self._moments.items():
                for prefix, key in (("Accl1___model.", "first"), ("Accl2___model.", "second")):
                    if prefix + name in state:  # a missing one is ignored, with a warning
                        moment = state[prefix + name]
                        if moment.shape != moments[key].shape or moment.dtype != moments[key].dtype:
                            raise Error(f"{prefix}{name}: {moment.dtype} {list(moment.shape)} does not fit")
                        moments[key] = moment.clone()
                if "Step___model." + name in state:
                    moments["step"] = int(state["Step___model." + name])
        self._optimizer._to_device = False

    # -- compilation --------------------------------------------------------------------------------------------

    def compile(self, *args, **kwargs):
        if not self._compiled:
            self._compile(self._bind(args, kwargs))

    def compileAndExport(self, filename, *args, export_model=True, **kwargs):
        self.compile(*args, **kwargs)
        _Path(filename).parent.mkdir(parents=True, exist_ok=True)
        with open(filename, "wb") as file:
            _pickle.dump({"poptorch": __version__, "inputs": self._sample, **self._program()}, file)

    def _program(self):
        """Return the identity of a compiled program: its options, weights and operators.

        Settings of the backend are in it; where a device comes from is not, nor the random seed, which is sent there.
        """
        elsewhere = {"use_model", "connection_type", "ipu_version", "random_seed", "cachePath", "enableEngineCaching"}
        elsewhere.add("compilation_progress_bar_fn")
        options = {name: value for name, value in self._options.toDict().items() if name not in elsewhere}
        options["engineOptions"] = sorted(options.get("engineOptions", {}))  # a profile may go to another folder
        return {
            "options": options,
            "weights": [(name, tuple(tensor.shape), str(tensor.dtype)) for name, tensor in self._named()],
            "operators": [(operator.name, operator.ipu) for operator in self._graph_.operators],
            "constants": self._device_optimizer and str(self._device_optimizer["constants"]),
        }

    def loadExecutable(self, filename):
        if self._compiled:
            raise Error("an executable is there already")
        try:
            with open(filename, "rb") as file:
                stored = _pickle.load(file)
        except (OSError, EOFError, _pickle.UnpicklingError) as error:
            raise Error(f"Invalid file {filename}: {error}") from None
        if stored["poptorch"] != __version__:
            raise Error(f"Invalid file {filename}: Version mismatch: {stored['poptorch']} is not {__version__}")
        # PopTorch traces the model again, with the inputs that it was exported with.
        self._compile(_loaded_from=stored, inputs=stored["inputs"])

    def _bind(self, args, kwargs):
        bound = _inspect.signature(self._model.forward).bind(*args, **kwargs)
        tensors = list(bound.args)
        if bound.kwargs:
            raise Error("keyword-only arguments do not reach the device")
        for number, tensor in enumerate(tensors):
            if not isinstance(tensor, _torch.Tensor):
                raise TypeError(f"argument {number} is {type(tensor).__name__}; inputs are tensors")
            if tensor.dtype == _torch.bfloat16 or tensor.dtype.is_complex:
                raise Error(f"argument {number}: {tensor.dtype} does not exist on the device")
        return [_narrow(tensor.detach()) for tensor in tensors]

    @property
    def _combined(self):
        values = self._values
        return values["device_iterations"] * values["replication_factor"] * values["accumulation"]

    def _compile(self, inputs, _loaded_from=None):
        values = self._values
        for tensor in inputs:
            rows = tensor.shape[0] if tensor.dim() else 1
            if rows % self._combined:
                raise AssertionError(
                    "Invalid batch dimension: {} rows are not a multiple of deviceIterations({}) * "
                    "replicationFactor({}) * "
                    "gradientAccumulation({}) = {}".format(
                        rows,
                        values["device_iterations"],
                        values["replication_factor"],
                        values["accumulation"],
                        self._combined,
                    )
                )
        offline = values["connection"] == ConnectionType.Never
        self._parts = list(self._model.modules())
        self._mode = [part.training for part in self._parts]  # a graph has dropout, or hasn't
        self._device = {name: tensor.detach().clone() for name, tensor in self._named()}
        graph, outputs = self._trace([t.narrow(0, 0, t.shape[0] // self._combined) for t in inputs])
        self._check_graph(graph, outputs)
        self._shapes = [(tuple(t.shape), t.dtype) for t in inputs]
        self._sample = inputs
        self._graph_ = graph
        self._profile_ = self._new_profile(graph)
        # Each replica draws for itself; here each instance does.
        seed = values.get("random_seed", 0) + self._options.Distributed.processId
        self._rng = _torch.Generator().manual_seed(seed).get_state()
        self._compiled = True
        if self._training:
            shared = self._device_optimizer["shared"]
            self._groups = {}
            names = {id(parameter): name for name, parameter in self._model.named_parameters()}
            for number, group in enumerate(self._optimizer.param_groups):
                for parameter in group["params"]:
                    name = names[id(parameter)]
                    if name in self._groups:
                        raise Error(f"{name} is in two parameter groups")
                    self._groups[name] = number
                    self._moments[name] = {
                        "first": _torch.zeros(
                            parameter.shape, dtype=_precise(shared["first_order_momentum_accum_type"])
                        ),
                        "second": _torch.zeros(
                            parameter.shape, dtype=_precise(shared["second_order_momentum_accum_type"])
                        ),
                        "step": 0,
                    }
        if _loaded_from is None:
            _machine.programs.append(
                _CompiledProgram("training" if self._training else "inference", graph, self._stages, self._homes)
            )
        else:
            program = self._program()
            different = [part for part, value in program.items() if _loaded_from[part] != value]
            if different:
                self._compiled = False
                raise Error(f"the executable is of another program: {', '.join(different)} differ")
        if not offline:
            self.attachToDevice()

    def _new_profile(self, graph):
        """Poplar's, after it has seen whether the program fits."""
        profile = _Profile(
            self._options._popart._values,
            name=self._values.get("name", "training" if self._training else "inference"),
            homes=self._homes,
            weights=self._device,
            operators=graph.operators,
            stages=self._stages,
            ipus=self._ipus // self._values["replication_factor"],
        )
        used = profile.fullest_tile()
        available = _machine.tile_bytes or _TILE_BYTES
        profile.write()
        if used > available and _engine_option(self._options._popart._values, "debug.allowOutOfMemory") != "true":
            raise Error(f"Out of memory on tile 1: {used} bytes used but tiles only have {available} bytes of memory")
        return profile

    def _named(self):
        yield from self._model.named_parameters()
        yield from self._model.named_buffers()

    def _trace(self, micro_batch):
        """Run the model once under the rules of a graph; weights and random state are left as they were."""
        after = {}
        watch = self._model.register_forward_hook(
            lambda model, *_: after.update(
                {name: id(tensor) for name, tensor in [*model.named_parameters(), *model.named_buffers()]}
            )
        )
        graph = _Graph()
        recorder = _Recorder([*micro_batch, *self._device.values()], current_ipu=lambda: graph.ipu)
        try:
            with _torch.random.fork_rng(devices=[]):
                outputs = self._run(micro_batch, graph, recorder)
        finally:
            watch.remove()
        graph.operators = recorder.operators
        for name, tensor in self._device.items():
            if after.get(name) != id(tensor):
                raise Error(f"{name} is reassigned in forward; buffers are updated in place")
        return graph, outputs

    def _run(self, micro_batch, graph, recorder=None, weights=None):
        global _graph
        previous = _graph
        _graph = graph
        modes = [part.training for part in self._parts]
        held = dict(weights or self._device)  # functional_call writes what the model reassigns into it
        try:
            self._set_modes(self._mode)
            with _half_on_the_cpu(), recorder or _contextlib.nullcontext():
                return _functional_call(self._model, held, tuple(micro_batch))
        finally:
            _graph = previous
            self._set_modes(modes)

    def _set_modes(self, modes):
        for part, training in zip(self._parts, modes):
            part.training = training

    def _check_graph(self, graph, outputs):
        values = self._values
        for output in _scalars(outputs):
            if not isinstance(output, _torch.Tensor):
                raise TypeError(f"outputs are tensors, not {type(output).__name__}")
        if self._training and len(graph.losses) != 1:
            raise Error(
                f"a training model has exactly one final loss, this one has {len(graph.losses)}; see identity_loss"
            )
        stages = graph.stages(values["strategy"])
        self._stages = stages
        if len(stages) > 1:
            if self._training:
                needed = 2 * len(stages) - 1
                have = values["accumulation"]
                what = "gradientAccumulation"
            else:
                needed = len(stages)
                have = values["device_iterations"]
                what = "deviceIterations"
            if have < needed:
                raise Error(f"{what} is {have}; a pipeline of {len(stages)} stages needs at least {needed}")
        used = (max(stages) + 1) * values["replication_factor"]
        if used & (used - 1):
            raise Error(f"{used} IPUs are no power of two; see autoRoundNumIPUs")
        if used > 64:
            raise Error(f"a program has at most 64 IPUs, not {used}")
        self._ipus = used
        homes = {}
        parameters = {id(tensor): name for name, tensor in self._device.items()}
        for operator in graph.operators:
            for tensor in operator.inputs:
                name = parameters.get(id(tensor))
                if name is not None and homes.setdefault(name, operator.ipu) != operator.ipu:
                    raise Error(
                        f"{name} is used on IPU {homes[name]} and on IPU {operator.ipu}; tied weights share one"
                    )
        self._homes = homes

    # -- device -------------------------------------------------------------------------------------------------

    def _together(self, what):
        """All instances do this now: the device of one that does it alone would wait for the others."""
        if self._exchange is not None:
            self._exchange.together(f"{'training' if self._training else 'inference'}: {what}")

    def isCompiled(self):
        return self._compiled

    def isAttachedToDevice(self):
        return self._attached

    def attachToDevice(self):
        if self._attached:
            return
        self._together("attach")
        if not self._values.get("ipu_model"):
            if _machine.attached + self._ipus > _machine.ipus:
                raise Error(f"no device: {self._ipus} IPUs wanted, {_machine.attached} of {_machine.ipus} in use")
            _machine.attached += self._ipus
        _machine.attachments.append("training" if self._training else "inference")
        self._attached = True
        self.copyWeightsToDevice()
        if self._optimizer is not None and self._optimizer.has_state():
            self._optimizer._to_device = True

    def detachFromDevice(self):
        if not self._attached:
            raise Error("Cannot detach: not attached to a device")
        self._together("detach")
        if self._training:
            self.copyWeightsToHost()
            self._read_optimizer_state(self._optimizer)
        if not self._values.get("ipu_model"):
            _machine.attached -= self._ipus
        self._attached = False

    def copyWeightsToHost(self):
        if not self._compiled:
            raise Error("Model has not been compiled or has been destroyed.")
        self._together("read the weights")
        with _torch.no_grad():
            for name, tensor in self._named():
                tensor.copy_(self._device[name])

    def copyWeightsToDevice(self):
        if not self._compiled:
            raise Error("Model has not been compiled or has been destroyed.")
        _machine.uploads += 1
        self._device = {name: tensor.detach().clone() for name, tensor in self._named()}

    def destroy(self):
        if self._attached:
            self.detachFromDevice()
        self._compiled = False
        _wrapped.discard(self._user_model)

    # -- execution ----------------------------------------------------------------------------------------------

    def cycleCount(self):
        if not self._values.get("cycles"):
            raise Error("Cycle count logging is disabled. Please set option logCycleCount to True to enable.")
        if self._values.get("ipu_model") or self._values["connection"] == ConnectionType.Never:
            raise Error("cycles are counted on hardware only")
        if self._cycles is None:
            raise Error("Please run the model at least once before obtaining cycle count.")
        return self._cycles

    def __call__(self, *args, **kwargs):
        if self._values["connection"] == ConnectionType.Never:
            raise AssertionError("Trying to run a model on an offline device (ConnectionType.Never)")
        inputs = self._bind(args, kwargs)
        if not self._compiled:
            self._compile(inputs)
        actual = [(tuple(t.shape), t.dtype) for t in inputs]
        if actual != self._shapes:
            raise Error(f"compiled for {self._shapes}, called with {actual}")
        if not self._attached:
            self.attachToDevice()
        self._write_optimizer_state()
        self._together("run")
        if self._values.get("synthetic_data"):
            inputs = [
                _torch.randn(t.shape).to(t.dtype) if t.is_floating_point() else _torch.zeros_like(t) for t in inputs
            ]

        started = _time.perf_counter()
        with _torch.random.fork_rng(devices=[]):
            _torch.set_rng_state(self._rng)
            produced = [
                self._iteration(self._rows(inputs, number)) for number in range(self._values["device_iterations"])
            ]
            self._rng = _torch.get_rng_state()
        self._cycles = _machine.cycles or int((_time.perf_counter() - started) * 1.33e9)
        self._profile_.ran(self._values["accumulation"])
        return self._collect(produced)

    def _rows(self, inputs, iteration):
        """[replica][time] -> micro-batch.  Rows lie replica first, then time."""
        values = self._values
        replicas = values["replication_factor"]
        accumulation = values["accumulation"]
        shaped = [t.reshape(replicas, values["device_iterations"], accumulation, -1, *t.shape[1:]) for t in inputs]
        return [
            [[t[replica, iteration, time] for t in shaped] for time in range(accumulation)]
            for replica in range(replicas)
        ]

    def _iteration(self, rows):
        outputs = [[None] * len(times) for times in rows]
        if not self._training:
            with _torch.no_grad():
                for replica, times in enumerate(rows):
                    for time, micro_batch in enumerate(times):
                        outputs[replica][time] = self._keep(self._run(micro_batch, _Graph()))
            return outputs

        shared = self._device_optimizer["shared"]
        values = self._values
        weights = {name: tensor.detach().requires_grad_(name in self._moments) for name, tensor in self._device.items()}
        reduced = dict.fromkeys(self._moments, 0.0)
        for replica, times in enumerate(rows):
            kind = _precise(shared["accum_type"])
            sums = {name: _torch.zeros(weights[name].shape, dtype=kind) for name in self._moments}
            for time, micro_batch in enumerate(times):
                graph = _Graph()
                result = self._run(micro_batch, graph, weights=weights)
                outputs[replica][time] = self._keep(result)
                wanted = list(self._moments)
                with _half_on_the_cpu():
                    gradients = _torch.autograd.grad(
                        graph.losses[0] * shared["loss_scaling"], [weights[name] for name in wanted], allow_unused=True
                    )
                for name, gradient in zip(wanted, gradients):
                    if gradient is not None:
                        sums[name] += gradient.to(kind)
            for name in self._moments:
                reduced[name] = reduced[name] + sums[name].to(_precise())
        divisor = shared["loss_scaling"]
        if values["reduction"] == ReductionType.Mean:
            divisor *= values["accumulation"] * values["replication_factor"] * self._options.Distributed.numProcesses
        if self._exchange is not None:
            reduced = self._exchange.summed(reduced)
        with _torch.no_grad():
            gradients = {name: gradient / divisor for name, gradient in reduced.items()}
            norm = float(_torch.stack([gradient.norm() for gradient in gradients.values()]).norm())
            clipped = min(1.0, self._device_optimizer["max_grad_norm"] / norm) if norm else 1.0
            for name, gradient in gradients.items():
                self._update(name, gradient * clipped)
        return outputs

    def _update(self, name, gradient):
        """LAMB and AdamW as PopTorch's reference gives them, on one tensor."""
        group = self._device_optimizer["groups"][self._groups[name]]
        moments = self._moments[name]
        weight = self._device[name]
        moments["step"] += 1
        beta1, beta2 = group["betas"]
        first = moments["first"].to(_precise()).mul(beta1).add(gradient, alpha=1.0 - beta1)
        second = moments["second"].to(_precise()).mul(beta2).addcmul(gradient, gradient, value=1.0 - beta2)
        moments["first"], moments["second"] = first.to(moments["first"].dtype), second.to(moments["second"].dtype)
        corrected = self._device_optimizer["shared"]["bias_correction"]
        c1 = 1.0 - beta1 ** moments["step"] if corrected else 1.0
        c2 = 1.0 - beta2 ** moments["step"] if corrected else 1.0
        precise = weight.to(_precise())
        update = (first / c1) / (second.sqrt() / _math.sqrt(c2) + group["eps"]) + group["weight_decay"] * precise
        trust = 1.0
        if issubclass(self._device_optimizer["type"], optim.LAMB):
            norm, length = min(float(precise.norm()), group["max_weight_norm"]), float(update.norm())
            trust = norm / length if norm > 0 and length > 0 else 1.0
        self._device[name] = (precise - group["lr"] * trust * update).to(weight.dtype)

    def _keep(self, outputs):
        return [_narrow(output.detach()) for output in _scalars(outputs)]

    def _collect(self, produced):
        """Outputs by the output mode: [iteration][replica][time] -> one tensor for each output."""
        mode = self._values["output_mode"]
        replicas = self._values["replication_factor"]
        collected = []
        for index in range(len(produced[0][0][0])):
            series = [
                [
                    times[time][index]
                    for iteration in produced
                    for times in [iteration[replica]]
                    for time in range(len(times))
                ]
                for replica in range(replicas)
            ]
            if mode == OutputMode.All:
                kept = [tensor for replica in series for tensor in replica]
            elif mode == OutputMode.Sum:
                kept = [_torch.stack(replica).sum(0) for replica in series]
            else:
                kept = [replica[-1] for replica in series]
            if kept[0].dim():
                collected.append(_torch.cat(kept))
            else:
                collected.append(_torch.stack(kept) if len(kept) > 1 else kept[0])
        return tuple(collected) if len(collected) > 1 else collected[0]


class AsynchronousDataAccessor:
    """Reads ahead; here in a thread, PopTorch's in a process of its own with shared memory."""

    def __init__(
        self,
        dataset,
        buffer_size=3,
        miss_sleep_time_in_ms=0.1,
        load_indefinitely=True,
        early_preload=False,
        sharing_strategy=SharingStrategy.ForkServer,
        rebatched_size=None,
    ):
        if sharing_strategy in (SharingStrategy.ForkServer, SharingStrategy.SharedMemory):
            _pickle.dumps(dataset)  # it travels to the other process
        self._dataset = dataset
        self._stop = _threading.Event()
        self._ready = _queue.Queue(buffer_size)
        self._indefinitely = load_indefinitely
        self._thread = None
        # The other process begins with the first element, which tells the shapes; if it dies, this one says no more.
        self._iterator = iter(dataset)
        try:
            self._first = next(self._iterator)
        except BaseException:
            raise Error("AsynchronousDataAccessor worker thread failed to start (Check above for details)") from None

    def _put(self, item):
        while not self._stop.is_set():
            try:
                self._ready.put(item, timeout=0.05)
                return True
            except _queue.Full:
                continue
        return False

    def _read(self):
        try:
            self._read_all()
        except BaseException:  # the end of a process that nobody asked to end
            self._put(AssertionError("An error occurred in the data fetcher"))

    def _elements(self):
        if self._first is not None:
            first = self._first
            self._first = None
            yield first
            yield from self._iterator
        else:
            yield from self._dataset

    def _read_all(self):
        while not self._stop.is_set():
            shapes = None
            for item in self._elements():
                if not isinstance(item, (tuple, list)) or not all(isinstance(t, _torch.Tensor) for t in item):
                    self._put(TypeError("the accessor moves tuples of tensors"))
                    return
                if shapes is None:
                    shapes = [t.shape for t in item]
                if [t.shape for t in item] != shapes:
                    self._put(Error("batches must keep their shapes"))
                    return
                if not self._put([t.clone() for t in item]):
                    return
            if not self._put(StopIteration()) or not self._indefinitely:
                return

    def terminate(self):
        self._stop.set()
        if self._thread is not None:
            self._thread.join()

    def __len__(self):
        return len(self._dataset)

    def __iter__(self):
        if self._thread is None:
            self._thread = _threading.Thread(target=self._read, daemon=True)
            self._thread.start()
        return self

    def __next__(self):
        if self._thread is None:
            raise Error("iterate over the accessor before taking its next batch")
        item = self._ready.get()
        if isinstance(item, Exception):
            raise item
        return item
