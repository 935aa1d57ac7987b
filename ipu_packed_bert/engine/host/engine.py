"""The host engine: tasks on packs in plain PyTorch, on a CPU or a CUDA device.

An update is a loop over micro-batches whose gradients add up, so that memory depends on the micro-batch only. Each
micro-batch's loss is divided by their number: with the task's scales the sum is the mean over the update.
"""

from __future__ import annotations

import contextlib
import functools
import time
from typing import Any, Callable, ContextManager, Dict, Iterator, List, Optional, Tuple, TypeVar

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

from ipu_packed_bert.data.global_batches import Batch
from ipu_packed_bert.engine.base import Engine, Gradients, StepResult, build_network, micro_batches
from ipu_packed_bert.engine.host.attention import block_rule, pick_attention
from ipu_packed_bert.engine.host.devices import (
    arithmetic,
    autocast,
    device_name,
    find_device,
    numerics_of,
    refuse_precision,
)
from ipu_packed_bert.engine.host.feed import cut, feed_for
from ipu_packed_bert.model.loss import PretrainingLoss
from ipu_packed_bert.model.optimizer import (
    build_optimizer,
    clip,
    gradient_norm,
    load_neutral_state,
    neutral_state,
    refuse_other_shapes,
)
from ipu_packed_bert.model.packed import AttentionMask, PaddingMask, hidden_score
from ipu_packed_bert.model.varlen import SDPA_BLOCKS, attend_within_sequences
from ipu_packed_bert.processes.ranks import ONE, Processes
from ipu_packed_bert.settings.config import Config
from ipu_packed_bert.tasks.task import Task
from pack_data.reading.fields import one_line

# The stream of random numbers drawn from run.seed that dropout draws from.
_DROPOUT = 2


_BACKEND: Any = "inductor"  # of torch.compile

_Result = TypeVar("_Result")


def _compiled(call: Callable[..., Any]) -> Callable[..., Any]:
    """Compile a call to static graphs, one for each mode."""
    with _naming_compiler():
        # dynamic=False: other shapes make another graph instead of a slower general one.
        program = torch.compile(call, fullgraph=True, dynamic=False, backend=_BACKEND)

    def run(*fields: torch.Tensor) -> Any:
        with _naming_compiler():  # torch compiles at the first call
            return program(*fields)

    return run


@contextlib.contextmanager
def _naming_compiler() -> Iterator[None]:
    """Raise ValueError if torch cannot compile here: this Python is too new, or there is no C++ compiler."""
    try:
        yield
    except RuntimeError as error:
        problem = one_line(error, 200)
        of_compiler = type(error).__module__.startswith(("torch._dynamo", "torch._inductor"))
        if not of_compiler and "torch.compile" not in problem:
            raise
    else:
        return
    raise ValueError(
        f"engine.compile is true, and torch does not compile here ({problem}): --set engine.compile=false"
    )


def _naming_memory(method: Callable[..., _Result]) -> Callable[..., _Result]:
    """Have a method of the engine raise ValueError with the settings to lower if the device has not enough memory."""

    @functools.wraps(method)
    def checked(self: HostEngine, *arguments: Any, **options: Any) -> _Result:
        try:
            return method(self, *arguments, **options)
        except torch.cuda.OutOfMemoryError as error:
            problem = one_line(error, 200)
        # Raised here, because the error above keeps the tensors of its frames alive.
        recompute = "" if self._recomputes else ", or --set engine.recompute_layers=true"
        raise ValueError(
            f"{device_name(self._device)} has not enough memory ({problem}); lower batch.micro_batch, which is "
            f"{self._config.batch.micro_batch}{recompute}"
        )

    return checked


class HostEngine(Engine):
    """One replica on one device; replicas of the configuration become further micro-batches of the same update.

    config: of any task; what is read of it are the sections `engine`, `batch`, `optimizer` and `run`, and its betas.
    processes: that share the micro-batches of each update, a device each. A batch is then this process's rows, what is
    returned is of all, and each has the same weights.
    """

    def __init__(
        self,
        config: Config,
        task: Task,
        *,
        packing_factor: float,
        device: Optional[str] = None,
        processes: Processes = ONE,
    ):
        if config.engine.threads is not None:
            torch.set_num_threads(config.engine.threads)
        self.task = task
        self._config = config
        self.processes = processes
        self._device = torch.device(device) if device else find_device(config.engine, processes)
        refuse_precision(config.engine.precision, self._device)
        self.attention = pick_attention(config, task, self._device)
        self._recomputes = config.engine.recomputes(ipus=False)
        if self._recomputes and config.engine.compile:
            _refuse_compiled()
        self.model = self._build().to(self._device)
        # One object, so that a compiled program knows it again.
        self._padding_mask = PaddingMask(hidden_score(self.attention.kind))
        self._feed = feed_for(self._device)
        betas = config.betas(packing_factor)
        self.optimizer = build_optimizer(self.model, config.optimizer, betas=betas)
        self._program: Callable[..., Any] = self.model
        self._predictions: Any = getattr(self.model, "predictions", None)
        if config.engine.compile:
            self._program = _compiled(self.model)
            self._predictions = self._predictions and _compiled(self._predictions)
        self._update = config.micro_batches_per_update(packing_factor)
        self._reduction = None
        if processes.size > 1:
            self._reduction = _Reduction(
                self.model, self._program, self._device, compiled=config.engine.compile
            )
        self._updates = 0  # made so far

    def _build(self) -> torch.nn.Module:
        config, task, attention = self._config, self.task, self.attention
        network = build_network(
            task,
            config.run.seed,
            attention="sdpa" if attention.kind == "varlen" else attention.kind,
        )
        if attention.kind == "varlen":
            rule = block_rule(
                arithmetic(config.engine.precision, self._device), task.model, self._device
            )
            attend_within_sequences(
                network,
                sequences=task.max_sequences_per_pack or 0,  # which the kernel has
                kernel=attention.kernel,
                rule=rule if attention.mask else rule._replace(pays=SDPA_BLOCKS.pays),
            )
        if config.engine.precision == "bfloat16" and isinstance(
            network.attention_mask, AttentionMask
        ):
            network.attention_mask.products = arithmetic(config.engine.precision, self._device)
        loss = getattr(network, "loss", None)
        if isinstance(loss, PretrainingLoss):
            loss.in_blocks = self._device.type == "cpu"
        if self._recomputes:
            _recompute_layers(network)
        return network

    @property
    def description(self) -> str:
        name, engine, attention = device_name(self._device), self._config.engine, self.attention
        if self._device.type == "cpu":
            if torch.backends.mps.is_available():
                name += " (MPS, the Mac's GPU, is not used)"
            name += f", torch threads: {torch.get_num_threads()}"
        if self.processes.size > 1:
            name = f"{self.processes.size} ranks, each {name}"
        parts = [f"host engine: {name}", engine.precision, f"{attention.kind} attention"]
        parts[2] += f" ({attention.note})" if attention.note else ""
        parts += ["layers recomputed"] * self._recomputes + ["compiled"] * engine.compile
        parts += ["deterministic"] * (engine.deterministic and self._device.type == "cuda")
        return ", ".join(parts)

    @_naming_memory
    def compile(self, batch: Batch) -> None:
        first = {name: batch[name][: self._config.batch.micro_batch] for name in self.task.fields}
        self._accumulate(first)
        self._forget_gradients()

    @_naming_memory
    def step(self, batch: Batch, learning_rate: float) -> StepResult:
        """Make one weight update, or change no weight and no moment if the loss or gradients are not finite.

        The gradients' norm is read together with the totals, so a device is waited for once an update. It is read
        before the update and not after: whether the update is made, and how far it is clipped, is then decided here.
        Deciding on the device would need copies of weights and moments to go back to.
        """
        start = time.perf_counter()
        totals = self._accumulate(batch)
        gradients = [
            parameter.grad for parameter in self.model.parameters() if parameter.grad is not None
        ]
        *sums, norm = torch.cat([totals, gradient_norm(gradients).to(totals).reshape(1)]).tolist()
        result = self._result(sums, batch, start)._replace(gradient_norm=norm)
        if result.finite:
            if self._config.optimizer.max_gradient_norm is not None:
                clip(gradients, norm, self._config.optimizer.max_gradient_norm)
            for group in self.optimizer.param_groups:
                group["lr"] = learning_rate
            self.optimizer.step()
            self._updates += 1
        self._forget_gradients()
        return result._replace(seconds=time.perf_counter() - start)

    @_naming_memory
    def gradients(self, batch: Batch, *, alone: bool = False, dropout: bool = False) -> Gradients:
        mask, update = self.model.attention_mask, self._update
        # The batch may have other micro-batches than an update has, as many in each process.
        self._update = self.processes.size * micro_batches(
            self.task, batch, self._config.batch.micro_batch
        )
        if alone and isinstance(mask, AttentionMask):
            self.model.attention_mask = self._padding_mask
        try:
            result = self.accumulate(batch, dropout=dropout)
            parameters = self.model.named_parameters()
            found = {name: each.grad.clone() for name, each in parameters if each.grad is not None}
        finally:
            self.model.attention_mask, self._update = mask, update
            self._forget_gradients()
        return Gradients(result, found)

    def accumulate(self, batch: Batch, *, dropout: bool = True) -> StepResult:
        """Make a step without its update: add the gradients of the batch to those of the parameters."""
        start = time.perf_counter()
        return self._result(self._accumulate(batch, dropout).tolist(), batch, start)

    def _accumulate(self, batch: Batch, dropout: bool = True) -> torch.Tensor:
        self.model.train(dropout)
        number = micro_batches(self.task, batch, self._config.batch.micro_batch)
        # Several processes: what makes the mean over them the mean over the update, empty micro-batches left out.
        divisor = number if self._reduction is None else self._update / self.processes.size
        program = self._reduction or self._program
        totals = self._zeros()
        own = [self._device] if self._device.type == "cuda" else []
        with torch.random.fork_rng(devices=own), self._numerics():
            for index, fields in enumerate(self._micro_batches(batch, self.task.fields), start=1):
                self._seed_dropout(self.processes.rank * number + index)
                with self._reduced(last=index == number):
                    with self._arithmetic():
                        output = program(*fields)
                    (output.loss / divisor).backward()
                totals += torch.stack(output).detach()
        return totals

    def _reduced(self, *, last: bool) -> ContextManager:
        return (
            contextlib.nullcontext()
            if self._reduction is None
            else self._reduction.after(last=last)
        )

    def _forget_gradients(self) -> None:
        # Several processes keep them, as they are the memory in which they are added up.
        self.optimizer.zero_grad(set_to_none=self._reduction is None)

    @_naming_memory
    def evaluate(self, batch: Batch) -> StepResult:
        start = time.perf_counter()
        micro_batches(self.task, batch, self._config.batch.micro_batch)
        self.model.eval()
        totals = self._zeros()
        with torch.no_grad(), self._numerics():
            for fields in self._micro_batches(batch, self.task.fields):
                with self._arithmetic():
                    output = self._program(*fields)
                totals += torch.stack(output)
        return self._result(totals.tolist(), batch, start)

    @_naming_memory
    def predict(self, batch: Batch) -> np.ndarray:
        micro_batches(self.task, batch, self._config.batch.micro_batch, self.task.prediction_fields)
        self.model.eval()
        found = []
        with torch.no_grad(), self._numerics():
            for fields in self._micro_batches(batch, self.task.prediction_fields):
                with self._arithmetic():
                    found.append(self._predictions(*fields))
        self.processes.summed(())  # whether to stop
        return torch.cat(found).cpu().numpy()

    def _zeros(self) -> torch.Tensor:
        """Where the outputs of the micro-batches are summed up, in float64: there may be thousands."""
        return torch.zeros(len(self.task.outputs), dtype=torch.float64, device=self._device)

    def _micro_batches(self, batch: Batch, fields: Tuple[str, ...]) -> Iterator[List[torch.Tensor]]:
        return self._feed(
            cut([torch.from_numpy(batch[name]) for name in fields], self._config.batch.micro_batch)
        )

    def _result(self, totals: List[float], batch: Batch, start: float) -> StepResult:
        sums, counts = self._summed(totals, batch)
        number = (
            len(batch["input_ids"]) // self._config.batch.micro_batch
            if self._reduction is None
            else self._update
        )
        means = self.task.means(sums, counts, dict.fromkeys(self.task.scales, number))
        # The mean of the losses that the gradients come from; rounded apart, its parts need not add up to it.
        return StepResult(
            {**means, "loss": sums["loss"] / number}, time.perf_counter() - start, counts=counts
        )

    def _arithmetic(self) -> Any:
        return autocast(self._config.engine.precision, self._device)

    def _numerics(self) -> Any:
        return numerics_of(self._config.engine, self._device)

    def _seed_dropout(self, micro_batch: int) -> None:
        """Seed dropout by run.seed, the updates made, and the number of the micro-batch over all processes.

        So nothing of it need be saved, and a run is the same in any number of processes.
        """
        sequence = np.random.SeedSequence(
            [self._config.run.seed, _DROPOUT, self._updates, micro_batch]
        )
        seed = int(sequence.generate_state(1, np.uint64)[0])
        torch.default_generator.manual_seed(
            seed
        )  # torch.manual_seed would change the generators of all GPUs
        if self._device.type == "cuda":
            with torch.cuda.device(self._device):
                torch.cuda.manual_seed(seed)

    def close(self) -> None:
        self._feed.close()

    def state(self) -> Dict[str, Any]:
        return {"model": self.weights(), "optimizer": neutral_state(self.optimizer, self.model)}

    def weights(self) -> Dict[str, torch.Tensor]:
        weights = self.model.state_dict()
        return {
            name: tensor.detach().to(device="cpu", copy=True) for name, tensor in weights.items()
        }

    def load_state(self, state: Dict[str, Any]) -> None:
        refuse_other_shapes("model state", state["model"], self.model.state_dict())
        self.model.load_state_dict(state["model"])
        load_neutral_state(self.optimizer, self.model, state["optimizer"])
        self._updates = int(state["optimizer"]["step"])


def _recompute_layers(network: Any) -> None:
    """Keep only each layer's input for the backward pass, in place: memory for a third of a forward and backward pass.

    Values and gradients stay the same, bit for bit: dropout draws again what it drew.
    """
    layer: Any
    for layer in network.bert.encoder.layer:
        layer.forward = functools.partial(_recomputed, layer.forward)


def _refuse_compiled() -> None:
    """Raise ValueError where this torch cannot compile recomputed layers."""
    if not hasattr(torch, "compiler"):  # before torch 2.1
        raise ValueError(
            f"engine.recompute_layers: true does not go with engine.compile: true in torch {torch.__version__}; switch "
            "one off"
        )


def _recomputed(forward: Any, *inputs: Any) -> torch.Tensor:
    if not torch.is_grad_enabled():
        return forward(*inputs)
    return checkpoint(forward, *inputs, use_reentrant=False, preserve_rng_state=True)


class _Reduction:
    """The training program of a network; after the last micro-batch its gradients are means over the processes.

    It uses torch's DistributedDataParallel. One all-reduce of a flat gradient after the last backward pass would have
    the same sums and send the same bytes, but DistributedDataParallel sends a bucket while the backward pass computes
    the next one, and its buckets are the gradients, which saves memory (`_forget_gradients`). Its usual pitfalls do not
    apply here: all shapes are constant, each process has the same number of micro-batches, and every parameter has a
    gradient in each of them, even if all packs are empty. In float64 the sums differ from those of one process only by
    the order of summation.
    """

    def __init__(
        self,
        network: nn.Module,
        program: Callable[..., Any],
        device: torch.device,
        *,
        compiled: bool,
    ):
        if device.type == "cuda":
            torch.cuda.set_device(device)
        if compiled:
            # A compiled program is one graph, which DistributedDataParallel's buckets must not cut.
            from torch._dynamo import config as dynamo

            dynamo.optimize_ddp = False
        # Numbers and objects travel by the default group, gloo: it needs no device, and notices at once who has ended.
        group = dist.new_group(backend="nccl") if device.type == "cuda" else None
        self._reduced = DistributedDataParallel(
            _Called(network, program), gradient_as_bucket_view=True, process_group=group
        )

    def __call__(self, *fields: torch.Tensor) -> Any:
        return self._reduced(*fields)

    def after(self, *, last: bool) -> ContextManager:
        """While entered, gradients stay in this process, unless these are the last of the update."""
        return contextlib.nullcontext() if last else self._reduced.no_sync()


class _Called(nn.Module):
    """A network that is run by its program, which may be compiled."""

    def __init__(self, network: nn.Module, program: Callable[..., Any]):
        super().__init__()
        self.network = network
        self._program = program

    def forward(self, *fields: torch.Tensor) -> Any:
        return self._program(*fields)
