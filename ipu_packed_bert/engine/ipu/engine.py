"""The IPU engine: one PopTorch program for training, and at most one for evaluation and one for prediction."""

from __future__ import annotations

import contextlib
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
from ipu_packed_bert.model.optimizer import MOMENTS, refuse_other_shapes
from ipu_packed_bert.processes.ranks import ONE, Processes
from ipu_packed_bert.settings.config import Config
from ipu_packed_bert.settings.placement import place
from ipu_packed_bert.settings.rules import check_for_ipus
from ipu_packed_bert.tasks.task import Task


class _Inference:
    """A program without updates, which shares the IPUs with the training program: only one is on them at a time."""

    def __init__(self, model: torch.nn.Module, options: poptorch.Options, iterations: int):
        self.iterations = iterations
        self.executor = poptorch.inferenceModel(model, options=options)
        self.stale = False  # the weights are others than those that it has on the device

    def __call__(self, tensors: Tuple[torch.Tensor, ...]) -> Any:
        if self.stale and self._attached:
            self.executor.copyWeightsToDevice()
        self.stale = False  # a program that is not attached gets the weights when it is
        return self.executor(*tensors)

    @property
    def _attached(self) -> bool:
        return self.executor.isCompiled() and self.executor.isAttachedToDevice()

    def leave(self) -> None:
        """Let go of the IPUs."""
        if self._attached:
            self.executor.detachFromDevice()


class IpuEngine(Engine):
    """PopTorch programs for training, evaluation and prediction, one of each at most.

    config: of any task; what is read of it are the sections `engine`, `placement`, `batch`, `optimizer` and `run`, and
    its betas.
    processes: poprun's instances, of which each has as many replicas and reads its share of each batch; what is
    returned is of all.  The programs exchange gradients on the device, which waits without end for an instance that
    does not come: all must run, attach, detach and read back the same programs in the same order.
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
                f"the Poplar IPU Model runs one replica, placement.replicas is {config.placement.replicas}; use"
                " --set placement.replicas=1 --set placement.replicated_tensor_sharding=false"
            )
        self.task = task
        self.placement = place(config.placement, task.heads)
        self.config = config
        self.device = device
        self.instance, self.processes = find_instance(config), processes
        per_replica, in_model = config.placement.ipus_per_replica, int(device.kind == "ipu_model")
        self.streams = [processes.size, self.instance.replicas, per_replica, in_model]
        if processes.size != self.instance.instances:
            raise ValueError(
                f"poprun started {self.instance.instances} instances, and the engine was given {processes.size}; enter "
                "`processes.joined` first, and give it what that yields"
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
            # Executables load only where these are the same.
            versions={"poptorch": poptorch.__version__, "torch": torch.__version__},
        )
        if config.engine.executable is not None:
            refuse_another(self.instance.own(config.engine.executable), self._facts)
        self._program = build_program(config, task, self.placement)
        self._network = self._program.network
        self._optimizer = build_optimizer(self._program, config, betas=betas)
        self._training = poptorch.trainingModel(
            self._program,
            options=training_options(config, device, self.instance, accumulation=self.accumulation),
            optimizer=self._optimizer,
        )
        self._inference: Dict[
            str, _Inference
        ] = {}  # by "evaluation" and "prediction", once they were asked for
        self._updates = 0
        # Optimiser state for a program not yet compiled.
        self._waiting: Optional[Dict[str, Any]] = None
        self._waiting_rng: Optional[List[int]] = None
        self._host_is_behind = False  # the device has weights that were not read back

    @property
    def description(self) -> str:
        engine = self.config.engine
        weights = "half" if engine.half_weights else "float32"
        stages = len(self.placement.stages)
        return f"{self.device.reason}; {weights} weights, {stages} forward stage{'' if stages == 1 else 's'}"

    def compile(self, batch: Batch) -> None:
        if self._training.isCompiled():
            return
        tensors = self._tensors(batch, self.accumulation)
        self._free_for(None)
        self._program.train()
        if self.device.offline:
            self._export(self.instance.own(str(self.config.engine.offline_export)), batch, tensors)
            return
        if self.config.engine.executable is not None:
            self._load(self.instance.own(self.config.engine.executable), batch)
        else:
            self._training.compile(*tensors)
        self._restore()

    def _export(self, path: str, batch: Batch, tensors: Tuple[torch.Tensor, ...]) -> None:
        """Write the training program to a file, and the facts that determine it beside the file."""
        with contextlib.suppress(FileNotFoundError):
            note_of(path).unlink()  # of a former program
        self._training.compileAndExport(path, *tensors, export_model=False)
        write_note(path, {**self._facts, **input_facts(batch)})

    def _load(self, path: str, batch: Batch) -> None:
        """Load the training program from a file; the weights are those of this process."""
        refuse_another(path, {**self._facts, **input_facts(batch)})
        try:
            self._training.loadExecutable(path)
        except poptorch.Error as error:
            problem = " ".join(str(error).split())[:300]
            raise ValueError(
                f"engine.executable {path}: PopTorch does not load it ({problem}); compile it again with "
                "engine.offline_export"
            ) from error

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
        self._all_are_here()
        self._free_for(None)
        started = time.perf_counter()
        outputs = self._training(*tensors)
        seconds = time.perf_counter() - started
        self._updates += 1
        self._host_is_behind = True
        self._weights_changed()
        counted = self.config.engine.log_cycles and self.device.kind == "ipu"
        return self._result(
            outputs, batch, seconds, int(self._training.cycleCount()) if counted else None
        )

    def evaluate(self, batch: Batch) -> StepResult:
        outputs, seconds = self._infer("evaluation", batch)
        return self._result(outputs, batch, seconds, None)

    def predict(self, batch: Batch) -> np.ndarray:
        if not self.task.prediction_fields:
            return super().predict(batch)
        outputs, _ = self._infer("prediction", batch, self.task.prediction_fields)
        return outputs.numpy()

    def _infer(
        self, name: str, batch: Batch, fields: Optional[Tuple[str, ...]] = None
    ) -> Tuple[Any, float]:
        """Return the outputs of the inference program of this name, without dropout, and the seconds of its call."""
        iterations = self._iterations(name, batch, fields)
        tensors = self._tensors(batch, iterations, fields)
        hardware = self.device.kind == "ipu"
        self._all_are_here()
        if self._training.isCompiled() and self._training.isAttachedToDevice():
            self._training.copyWeightsToHost()
            self._host_is_behind = False
            if hardware:
                # Both programs want the same IPUs. Detaching saves the optimiser's and the random state; the next step
                # attaches again and restores them.
                self._training.detachFromDevice()
        self._program.eval()
        try:
            program = self._inference.get(name)
            if program is None:
                options = evaluation_options(
                    self.config, self.device, self.instance, iterations=iterations, name=name
                )
                model = self._program if name == "evaluation" else Predictions(self._network).eval()
                program = self._inference[name] = _Inference(model, options, iterations)
            self._free_for(program)
            started = time.perf_counter()
            outputs = program(tensors)
            seconds = time.perf_counter() - started
        finally:
            self._program.train()
        return outputs, seconds

    def _free_for(self, program: Optional[_Inference]) -> None:
        """Take the other inference programs off the IPUs; None: all of them. One stays for its next batch."""
        if self.device.kind == "ipu":
            for each in self._inference.values():
                if each is not program:
                    each.leave()

    def _weights_changed(self) -> None:
        for program in self._inference.values():
            program.stale = True

    def close(self) -> None:
        # An instance that fails alone must not wait for the others on the device: it ends, which frees its IPUs.
        if self.processes.size > 1 and sys.exc_info()[0] is not None:
            return
        for executor in (
            *(program.executor for program in self._inference.values()),
            self._training,
        ):
            if executor.isCompiled():
                executor.destroy()

    def _all_are_here(self) -> None:
        """Before anything for which the device waits: where another instance has failed, this raises instead."""
        if self.processes.size > 1:
            self.processes.summed(())

    # -- batches ------------------------------------------------------------------------------------------------------

    def feed(self, batches: GlobalBatches):
        """Return the same batches, read ahead by another process if the configuration says so."""
        if not self.config.engine.asynchronous_loading:
            return batches
        return BatchesAhead(batches, read_ahead=_read_ahead)

    def _tensors(
        self, batch: Batch, micro_batches_per_replica: int, fields: Optional[Tuple[str, ...]] = None
    ) -> Tuple[torch.Tensor, ...]:
        """Return the rows of this process in a global batch, as PopTorch takes them: replica first, then time.

        Replica r finds at time t the micro-batch r x accumulation + t, so the batch is passed on as it is. An update
        sums over all its rows: their order decides nothing.
        """
        fields = self.task.fields if fields is None else fields
        found = micro_batches(self.task, batch, self.config.batch.micro_batch, fields)
        wanted = micro_batches_per_replica * self.instance.replicas
        if found != wanted:
            raise ValueError(
                f"the batch holds {found} micro-batches, the program takes {wanted}"
                f" ({micro_batches_per_replica} x {self.instance.replicas} replicas); fill it with empty packs"
            )
        return tuple(torch.from_numpy(np.ascontiguousarray(batch[name])) for name in fields)

    def _iterations(self, name: str, batch: Batch, fields: Optional[Tuple[str, ...]] = None) -> int:
        """Micro-batches of a batch for each replica. Raises ValueError if they cannot be those of this program."""
        found = micro_batches(self.task, batch, self.config.batch.micro_batch, fields)
        iterations, rest = divmod(found, self.instance.replicas)
        stages = len(self.placement.stages)
        if rest or iterations < stages:
            raise ValueError(
                f"the evaluation batch holds {found} micro-batches; it needs a multiple of the"
                f" {self.instance.replicas} replicas, and {stages} (the pipeline's stages) or more for each; fill it "
                f"with"
                " empty packs"
            )
        program = self._inference.get(name)
        if program is not None and program.iterations != iterations:
            raise ValueError(
                f"the evaluation batch holds {found} micro-batches, the compiled program takes"
                f" {program.iterations * self.instance.replicas}; fill it with empty packs"
            )
        return iterations

    def _result(self, outputs, batch: Batch, seconds: float, cycles: Optional[int]) -> StepResult:
        """Means over the sequences of the update, of all instances."""
        # One value a replica, or a scalar where there is one: sums over micro-batches either way.
        totals = [float(output.to(torch.float64).sum()) for output in outputs]
        sums, counts = self._summed(totals, batch)
        scaled = {
            scale: float(batch[scale][0]) * counts[count]
            for scale, count in self.task.scales.items()
        }
        return StepResult(self.task.means(sums, counts, scaled), seconds, cycles, counts=counts)

    # -- state --------------------------------------------------------------------------------------------------------

    def state(self) -> Dict[str, Any]:
        random = self._read_back()
        parameters = self._parameters()
        state: Dict[str, Any] = {"model": parameters}
        if random is None:
            held = self._waiting or {moment: {} for moment in MOMENTS}
            state["optimizer"] = {"step": self._updates}
            for moment in MOMENTS:
                found = {
                    name: held[moment].get(name, torch.zeros_like(each))
                    for name, each in parameters.items()
                }
                state["optimizer"][moment] = {
                    name: tensor.clone() for name, tensor in found.items()
                }
            return state
        state["optimizer"] = {
            "step": self._updates,
            **moments(self._optimizer.state_dict()["ipu_state"], parameters),
        }
        state["ipu_random"], state["ipu_random_of"] = random, torch.tensor(self.streams)
        return state

    def weights(self) -> Dict[str, torch.Tensor]:
        if self.processes.size == 1:
            return super().weights()
        assert not self._host_is_behind, "the other instances are not here to read them back"
        return self._parameters()

    def join_state(self) -> None:
        if self._read_back() is not None:
            self._optimizer.state_dict()

    def _parameters(self) -> Dict[str, torch.Tensor]:
        """Return the host's copy of the parameters."""
        return {name: plain(tensor) for name, tensor in self._network.named_parameters()}

    def _read_back(self) -> Optional[torch.Tensor]:
        """Weights, from the device to the host, by all instances; the random state, a row for each of several.

        None where no program runs.
        """
        if not self._training.isCompiled() or self.device.offline:
            return None
        self._all_are_here()
        if self._training.isAttachedToDevice():
            self._training.copyWeightsToHost()
        self._host_is_behind = False
        random = np.array(self._training.rng_state, dtype=np.uint64).view(np.int64)
        if self.processes.size == 1:
            return torch.from_numpy(random)
        return torch.from_numpy(np.stack(self.processes.gathered(random)))

    def load_state(self, state: Dict[str, Any]) -> None:
        parameters = dict(self._network.named_parameters())
        refuse_other_shapes("model state", state["model"], parameters)
        for moment in MOMENTS:
            refuse_other_shapes(
                f"optimizer state: {moment}", state["optimizer"][moment], parameters
            )
        with torch.no_grad():
            for name, parameter in parameters.items():
                parameter.copy_(state["model"][name])
        self._weights_changed()
        self._updates = int(state["optimizer"]["step"])
        self._waiting = state["optimizer"]
        self._waiting_rng = None
        if (
            "ipu_random" in state and saved_by(state) == self.streams
        ):  # else PopART refuses its size
            rows = state["ipu_random"].reshape(self.processes.size, -1)
            self._waiting_rng = rows[self.processes.rank].numpy().view(np.uint64).tolist()
        self._host_is_behind = False
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


def _read_ahead(reader: Reader) -> Iterator[Tuple[torch.Tensor, ...]]:
    """Yield the reader's batches from a process of PopTorch's, which keeps three ready."""
    return iter(poptorch.AsynchronousDataAccessor(reader, buffer_size=3, load_indefinitely=True))
