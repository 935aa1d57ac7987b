"""The IPU engine: one PopTorch program for training, and at most one for evaluation and one for prediction."""

from __future__ import annotations

import contextlib
import copy
import sys
import time
from typing import Any, Dict, Iterator, List, Optional, Tuple

import numpy as np
import torch

from ipu_packed_bert.data.global_batches import Batch, GlobalBatches
from ipu_packed_bert.engine.base import Engine, StepResult, micro_batches, saved_by
from ipu_packed_bert.engine.ipu.devices import Device, poptorch, refuse_too_many
from ipu_packed_bert.engine.ipu.executable import (
    Facts,
    input_facts,
    note_of,
    program_facts,
    refuse_another,
    write_note,
)
from ipu_packed_bert.engine.ipu.feed import BatchesAhead, Reader
from ipu_packed_bert.engine.ipu.options import build_optimizer, evaluation_options, training_options
from ipu_packed_bert.engine.ipu.poprun import find_instance
from ipu_packed_bert.engine.ipu.program import Predictions, build_program
from ipu_packed_bert.engine.ipu.state import fill, moments, plain
from ipu_packed_bert.engine.sdk_errors import SdkError, classify
from ipu_packed_bert.model.optimizer import MOMENTS, refuse_other_state
from ipu_packed_bert.processes.ranks import ONE, Processes
from ipu_packed_bert.settings.config import Config
from ipu_packed_bert.settings.placement import place
from ipu_packed_bert.settings.rules import check_for_ipus
from ipu_packed_bert.tasks.task import Task
from pack_data.reading.words import counted


@contextlib.contextmanager
def _classified_errors() -> Iterator[None]:
    """Raise SdkError for errors of the SDK."""
    try:
        yield
    except (poptorch.Error, RuntimeError, MemoryError) as error:
        problem = classify(error)
        if problem.kind == "other" and not isinstance(error, poptorch.Error):
            raise
        raise SdkError(problem) from error


def _is_attached(executor: poptorch.PoplarExecutor) -> bool:
    return executor.isCompiled() and executor.isAttachedToDevice()


class _Inference:
    """A program without updates. It shares the IPUs with the training program; one program is attached at a time."""

    def __init__(self, model: torch.nn.Module, options: poptorch.Options, iterations: int):
        self.iterations = iterations
        self.executor = poptorch.inferenceModel(model, options=options)
        self.stale = False  # True: its weights on the device are outdated

    def __call__(self, tensors: Tuple[torch.Tensor, ...]) -> Any:
        if self.stale and _is_attached(self.executor):
            self.executor.copyWeightsToDevice()
        self.stale = False  # attaching copies the weights
        return self.executor(*tensors)

    def detach(self) -> None:
        """Detach from the IPUs."""
        if _is_attached(self.executor):
            self.executor.detachFromDevice()


class IpuEngine(Engine):
    """PopTorch programs for training, evaluation and prediction, at most one of each.

    Args:
        config: settings of the run.
        task: the task to train.
        device: result of `find_device`.
        packing_factor: sequences per pack.
        processes: the instances of poprun, with equal numbers of replicas. Each reads its share of every batch; methods
            return results of all. The programs exchange gradients on the device, which waits forever for a missing
            instance: all instances must run, attach, detach and read back the same programs in the same order.

    Raises:
        ValueError: the device cannot run the configuration, or the processes are not those of poprun.
    """

    def __init__(
        self,
        config: Config,
        task: Task,
        device: Device,
        *,
        packing_factor: float,
        processes: Processes = ONE,
    ):
        check_for_ipus(config, packing_factor)
        if device.kind == "ipu_model" and config.placement.replicas > 1:
            raise ValueError(
                f"the Poplar IPU Model runs one replica, but placement.replicas is {config.placement.replicas}; use"
                " --set placement.replicas=1 --set placement.replicated_tensor_sharding=false"
            )
        self.task = task
        self.placement = place(config.placement, task.heads)
        self.config = config
        self.device = device
        self.instance = find_instance(config)
        self.processes = processes
        self.streams = [
            processes.size,
            self.instance.replicas,
            config.placement.ipus_per_replica,
            int(device.kind == "ipu_model"),
        ]
        if processes.size != self.instance.instances:
            raise ValueError(
                f"poprun started {self.instance.instances} instances, but the engine has {processes.size}; enter"
                " `processes.joined` and pass its result to the engine"
            )
        refuse_too_many(config, self.instance.replicas)
        self.accumulation = config.accumulation(packing_factor)
        betas = config.betas(packing_factor)
        self._facts: Facts = program_facts(
            config,
            task,
            accumulation=self.accumulation,
            betas=betas,
            instance=self.instance,
            # An executable loads only with the same versions.
            versions={"poptorch": poptorch.__version__, "torch": torch.__version__},
        )
        if config.engine.executable is not None:
            refuse_another(self.instance.own_path(config.engine.executable), self._facts)
        self._program = build_program(config, task, self.placement)
        self._network = self._program.network
        self._optimizer = build_optimizer(self._program, config, betas=betas)
        self._training = poptorch.trainingModel(
            self._program,
            options=training_options(config, device, self.instance, accumulation=self.accumulation),
            optimizer=self._optimizer,
        )
        # By name, "evaluation" and "prediction"; compiled when first used.
        self._inference: Dict[str, _Inference] = {}
        self._updates = 0
        # States to restore once the training program is compiled.
        self._pending_optimizer: Optional[Dict[str, Any]] = None
        self._pending_random: Optional[List[int]] = None
        self._host_is_behind = False  # True: the device has newer weights than the host

    @property
    def description(self) -> str:
        weights = "half" if self.config.engine.half_weights else "float32"
        stages = counted(len(self.placement.stages), "forward stage")
        return f"{self.device.reason}; {weights} weights, {stages}"

    @_classified_errors()
    def compile(self, batch: Batch) -> None:
        if self._training.isCompiled():
            return
        tensors = self._of_an_update(batch)
        self._free_for(None)
        self._program.train()
        if self.device.offline:
            self._export(
                self.instance.own_path(str(self.config.engine.offline_export)), batch, tensors
            )
            return
        if self.config.engine.executable is not None:
            self._load(self.instance.own_path(self.config.engine.executable), batch)
        else:
            self._training.compile(*tensors)
        self._restore()

    def _export(self, path: str, batch: Batch, tensors: Tuple[torch.Tensor, ...]) -> None:
        """Write the training program to a file, and the facts that determine it to another."""
        with contextlib.suppress(FileNotFoundError):
            note_of(path).unlink()  # belongs to the program that is replaced
        self._training.compileAndExport(path, *tensors, export_model=False)
        write_note(path, {**self._facts, **input_facts(batch)})

    def _load(self, path: str, batch: Batch) -> None:
        """Load the training program from a file; the weights stay those of this process."""
        refuse_another(path, {**self._facts, **input_facts(batch)})
        try:
            self._training.loadExecutable(path)
        except poptorch.Error as error:
            problem = classify(error)
            if problem.kind not in ("wrong version", "other"):  # not a fault of the file
                raise
            raise ValueError(
                f"engine.executable {path}: PopTorch cannot load it ({problem.text[:200]}); compile it again with "
                "engine.offline_export"
            ) from error

    @_classified_errors()
    def step(self, batch: Batch, learning_rate: float) -> StepResult:
        if self.device.offline:
            raise ValueError(
                f"engine.offline_export is {self.config.engine.offline_export}, which only compiles the program; unset"
                " it to train"
            )
        self.compile(batch)
        tensors = self._of_an_update(batch)
        for group in self._optimizer.param_groups:
            group["lr"] = learning_rate
        self._training.setOptimizer(self._optimizer)
        self.processes.summed(())  # fails if another instance has; the device would wait for it
        self._free_for(None)
        started = time.perf_counter()
        outputs = self._training(*tensors)
        seconds = time.perf_counter() - started
        self._updates += 1
        self._host_is_behind = True
        self._weights_changed()
        cycles = None
        if self.config.engine.log_cycles and self.device.kind == "ipu":
            cycles = int(self._training.cycleCount())
        return self._result(outputs, batch, seconds, cycles)

    def evaluate(self, batch: Batch) -> StepResult:
        outputs, seconds = self._infer("evaluation", batch, self.task.fields)
        return self._result(outputs, batch, seconds, None)

    def predict(self, batch: Batch) -> np.ndarray:
        if not self.task.prediction_fields:
            return super().predict(batch)
        outputs, _ = self._infer("prediction", batch, self.task.prediction_fields)
        return outputs.numpy()

    @_classified_errors()
    def _infer(self, name: str, batch: Batch, fields: Tuple[str, ...]) -> Tuple[Any, float]:
        """Run an inference program without dropout; return its outputs and the seconds of the call."""
        iterations = self._iterations(name, batch, fields)
        tensors = self._tensors(batch, fields)
        self.processes.summed(())  # see `step`
        if _is_attached(self._training):
            self._training.copyWeightsToHost()
            self._host_is_behind = False
            if self.device.kind == "ipu":
                # Both programs need the same IPUs. Detaching saves the optimiser's and the random state; the next step
                # attaches again and restores them.
                self._training.detachFromDevice()
        self._program.eval()
        try:
            program = self._inference.get(name)
            if program is None:
                options = evaluation_options(
                    self.config, self.device, self.instance, iterations=iterations, name=name
                )
                model: Any = self._program
                if name == "prediction":
                    model = Predictions(self._network).eval()
                program = _Inference(model, options, iterations)
                self._inference[name] = program
            self._free_for(program)
            started = time.perf_counter()
            outputs = program(tensors)
            seconds = time.perf_counter() - started
        finally:
            self._program.train()
        return outputs, seconds

    def _free_for(self, program: Optional[_Inference]) -> None:
        """Detach all inference programs but ``program`` from the IPUs."""
        if self.device.kind == "ipu":
            for other in self._inference.values():
                if other is not program:
                    other.detach()

    def _weights_changed(self) -> None:
        for program in self._inference.values():
            program.stale = True

    def close(self) -> None:
        # An instance that fails alone must not wait for the others on the device; its end frees its IPUs.
        if self.processes.size > 1 and sys.exc_info()[0] is not None:
            return
        executors = [program.executor for program in self._inference.values()]
        for executor in [*executors, self._training]:
            if executor.isCompiled():
                executor.destroy()

    # -- batches ------------------------------------------------------------------------------------------------------

    def feed(self, batches: GlobalBatches):
        """Return the same batches, read ahead by another process if `engine.asynchronous_loading` is true."""
        if not self.config.engine.asynchronous_loading:
            return batches
        return BatchesAhead(batches, read_ahead=_read_ahead)

    def _tensors(self, batch: Batch, fields: Tuple[str, ...]) -> Tuple[torch.Tensor, ...]:
        """Return the rows of this process in a global batch in PopTorch's order: replica first, then time.

        Replica r gets at time t the micro-batch r x accumulation + t, which is the order of the batch. An update sums
        over all rows, so their order does not matter.
        """
        return tuple(torch.from_numpy(np.ascontiguousarray(batch[name])) for name in fields)

    def _of_an_update(self, batch: Batch) -> Tuple[torch.Tensor, ...]:
        """Return the tensors of a batch; raise ValueError if it is not as large as an update."""
        number = micro_batches(self.task, batch, self.config.batch.micro_batch)
        self._refuse_other_than(number, self.accumulation)
        return self._tensors(batch, self.task.fields)

    def _refuse_other_than(self, number: int, iterations: int) -> None:
        """Raise ValueError if a number of micro-batches is not that of a program with these iterations."""
        needed = iterations * self.instance.replicas
        if number != needed:
            raise ValueError(
                f"the batch has {number} micro-batches, but the program needs {needed}"
                f" ({iterations} x {self.instance.replicas} replicas); fill it with empty packs"
            )

    def _iterations(self, name: str, batch: Batch, fields: Tuple[str, ...]) -> int:
        """Return the micro-batches of a batch per replica; raise ValueError if they do not fit the program."""
        number = micro_batches(self.task, batch, self.config.batch.micro_batch, fields)
        replicas = self.instance.replicas
        stages = len(self.placement.stages)
        if number % replicas or number < stages * replicas:
            raise ValueError(
                f"the evaluation batch has {number} micro-batches, but needs a multiple of {replicas}, the number of"
                f" replicas, and at least {stages} per replica, the number of stages; fill it with empty packs"
            )
        iterations = number // replicas
        if name in self._inference:
            self._refuse_other_than(number, self._inference[name].iterations)
        return iterations

    def _result(self, outputs, batch: Batch, seconds: float, cycles: Optional[int]) -> StepResult:
        """Return the metrics of a call, averaged over the sequences of all instances."""
        # Each output is a sum over micro-batches, with one value per replica.
        totals = [float(output.to(torch.float64).sum()) for output in outputs]
        sums, counts = self._summed(totals, batch)
        scaled = {}
        for scale, count in self.task.scales.items():
            scaled[scale] = float(batch[scale][0]) * counts[count]
        return StepResult(self.task.means(sums, counts, scaled), seconds, cycles, counts=counts)

    # -- state --------------------------------------------------------------------------------------------------------

    @_classified_errors()
    def state(self) -> Dict[str, Any]:
        random = self._read_back()
        parameters = self._parameters()
        optimizer_state: Dict[str, Any] = {"step": self._updates}
        state: Dict[str, Any] = {"model": parameters, "optimizer": optimizer_state}
        if random is not None:
            optimizer_state.update(moments(self._optimizer.state_dict()["ipu_state"], parameters))
            state["ipu_random"] = random
            state["ipu_random_of"] = torch.tensor(self.streams)
            return state

        # No program has run: the moments are those of a loaded state, or zero.
        for moment in MOMENTS:
            zeros = {name: torch.zeros_like(parameter) for name, parameter in parameters.items()}
            loaded = (self._pending_optimizer or {}).get(moment, zeros)
            optimizer_state[moment] = copy.deepcopy(loaded)
        return state

    def weights(self) -> Dict[str, torch.Tensor]:
        if self.processes.size == 1:
            return super().weights()
        assert not self._host_is_behind, "reading weights back takes all instances"
        return self._parameters()

    def join_state(self) -> None:
        if self._read_back() is not None:
            self._optimizer.state_dict()

    def _parameters(self) -> Dict[str, torch.Tensor]:
        """Return the host's copy of the parameters."""
        return {name: plain(tensor) for name, tensor in self._network.named_parameters()}

    def _read_back(self) -> Optional[torch.Tensor]:
        """Copy the weights from the device to the host, in all instances; return the random state.

        With several instances it has a row for each; it is None if no program is compiled.
        """
        if not self._training.isCompiled() or self.device.offline:
            return None
        self.processes.summed(())  # see `step`
        if self._training.isAttachedToDevice():
            self._training.copyWeightsToHost()
        self._host_is_behind = False
        random = np.array(self._training.rng_state, dtype=np.uint64).view(np.int64)
        if self.processes.size == 1:
            return torch.from_numpy(random)
        return torch.from_numpy(np.stack(self.processes.gathered(random)))

    @_classified_errors()
    def load_state(self, state: Dict[str, Any]) -> None:
        parameters = dict(self._network.named_parameters())
        refuse_other_state(state, parameters)
        with torch.no_grad():
            for name, parameter in parameters.items():
                parameter.copy_(state["model"][name])
        self._weights_changed()
        self._updates = int(state["optimizer"]["step"])
        self._pending_optimizer = state["optimizer"]
        self._pending_random = None
        # PopART refuses random states of another layout, because they differ in size.
        if "ipu_random" in state and saved_by(state) == self.streams:
            rows = state["ipu_random"].reshape(self.processes.size, -1)
            self._pending_random = rows[self.processes.rank].numpy().view(np.uint64).tolist()
        self._host_is_behind = False
        if self._training.isCompiled() and not self.device.offline:
            if self._training.isAttachedToDevice():
                self._training.copyWeightsToDevice()
            self._restore()

    def _restore(self) -> None:
        """Load the pending optimiser and random state into the compiled program."""
        if self._pending_optimizer is not None:
            state = self._optimizer.state_dict()
            fill(state["ipu_state"], self._pending_optimizer)
            self._optimizer.load_state_dict(state)
            self._pending_optimizer = None
        if self._pending_random is not None:
            self._training.rng_state = self._pending_random
            self._pending_random = None


def _read_ahead(reader: Reader) -> Iterator[Tuple[torch.Tensor, ...]]:
    """Yield the reader's batches from a process of PopTorch, which keeps three ready."""
    return iter(poptorch.AsynchronousDataAccessor(reader, buffer_size=3, load_indefinitely=True))
