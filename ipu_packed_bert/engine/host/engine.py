"""The host engine: tasks on packs in plain PyTorch, on a CPU or a CUDA device.

An update loops over micro-batches and accumulates their gradients, so memory depends on the size of a micro-batch only.
Each loss is divided by the number of micro-batches; with the task's scales their sum is the mean over the update.
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
from ipu_packed_bert.engine.host.dropout import PackNoise
from ipu_packed_bert.engine.host.feed import cut, feed_for
from ipu_packed_bert.engine.host.in_place import accumulate_in_place
from ipu_packed_bert.model.loss import PretrainingLoss
from ipu_packed_bert.model.optimizer import (
    build_optimizer,
    clip,
    gradient_norm,
    load_neutral_state,
    neutral_state,
    refuse_other_state,
)
from ipu_packed_bert.model.packed import (
    AttentionMask,
    PackedBertForPreTraining,
    PaddingMask,
    hidden_score,
)
from ipu_packed_bert.model.varlen import SDPA_BLOCKS, attend_with_rule, attend_within_sequences
from ipu_packed_bert.processes.ranks import ONE, PATIENCE, Processes
from ipu_packed_bert.settings.config import Config
from ipu_packed_bert.tasks.task import Task
from pack_data.reading.fields import one_line

_DROPOUT = 2  # index of the random stream of dropout among those that run.seed starts

_BACKEND: Any = "inductor"  # backend of torch.compile
# Graphs of one part of the network: one for each mode and each engine of a process. torch's own limit is 8.
_MOST_GRAPHS = 64

_Result = TypeVar("_Result")


def _shares_graphs() -> bool:
    """Return whether torch compiles modules of the same code once, with their weights as inputs (2.6 and newer)."""
    from torch._dynamo import config as dynamo

    return hasattr(dynamo, "recompile_limit")


def _compile_parts(network: Any) -> None:
    """Compile the parts of a network in place: all layers share one graph, so more layers take no more time.

    On an H100 the first batch of BERT-large takes 14 seconds; compiling the network as a whole takes more than 85.
    """
    parts = [network.bert.embeddings, *network.bert.encoder.layer]
    if isinstance(network, PackedBertForPreTraining):
        parts += [network.cls.predictions, network.loss]
    from torch._dynamo import config as dynamo

    dynamo.recompile_limit = max(dynamo.recompile_limit, _MOST_GRAPHS)
    for part in parts:
        part.forward = _compiled(part.forward)


def _compiled(call: Callable[..., Any]) -> Callable[..., Any]:
    """Compile a call to static graphs, one per mode."""
    with _naming_compiler():
        # dynamic=False: new shapes compile another graph instead of a slower general one.
        program = torch.compile(call, fullgraph=True, dynamic=False, backend=_BACKEND)

    def run(*fields: torch.Tensor) -> Any:
        with _naming_compiler():  # torch compiles at the first call
            return program(*fields)

    return run


@contextlib.contextmanager
def _naming_compiler() -> Iterator[None]:
    """Raise ValueError if torch cannot compile here, for lack of a C++ compiler or because Python is too new."""
    try:
        yield
    except RuntimeError as error:
        problem = one_line(error, 200)
        is_compiler_error = type(error).__module__.startswith(("torch._dynamo", "torch._inductor"))
        if not is_compiler_error and "torch.compile" not in problem:
            raise
    else:
        return
    raise ValueError(
        f"engine.compile is true, but torch cannot compile here ({problem}); use --set engine.compile=false"
    )


def _naming_memory(method: Callable[..., _Result]) -> Callable[..., _Result]:
    """Decorate a method of the engine: if memory runs out, raise ValueError with the settings to lower."""

    @functools.wraps(method)
    def checked(self: HostEngine, *arguments: Any, **options: Any) -> _Result:
        try:
            return method(self, *arguments, **options)
        except torch.cuda.OutOfMemoryError as error:
            problem = one_line(error, 200)
        # Raised outside the handler: the error above keeps the tensors of its frames alive.
        recompute = "" if self._recomputes else ", or use --set engine.recompute_layers=true"
        raise ValueError(
            f"{device_name(self._device)} is out of memory ({problem}); lower batch.micro_batch, which is "
            f"{self._config.batch.micro_batch}{recompute}"
        )

    return checked


class HostEngine(Engine):
    """One replica on one device; further replicas of the configuration become micro-batches of the same update.

    Args:
        config: settings of the run.
        task: the task to train.
        packing_factor: sequences per pack.
        device: a device of torch; chosen by `engine.device` if None.
        processes: the processes that share the micro-batches of each update, each with a device and equal weights. The
            methods then take the rows of one process and return results of all.

    Raises:
        ValueError: the device is missing or cannot run the configuration.
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
        if self._recomputes and config.engine.compile and not hasattr(torch, "compiler"):
            raise ValueError(
                f"engine.recompute_layers: true needs engine.compile: false in torch {torch.__version__}, which is"
                " older than 2.1; disable one of them"
            )
        self._noise: Optional[PackNoise] = None  # of a CPU
        self.model = self._build().to(self._device)
        # Always the same object, so that a compiled program is not compiled again.
        self._padding_mask = PaddingMask(hidden_score(self.attention.kind))
        self._feed = feed_for(self._device)
        betas = config.betas(packing_factor)
        on_cpu = self._device.type == "cpu"
        self.optimizer = build_optimizer(
            self.model, config.optimizer, betas=betas, in_pieces=on_cpu
        )
        self._program: Callable[..., Any] = self.model
        self._predictions: Any = getattr(self.model, "predictions", None)
        if config.engine.compile and not _shares_graphs():
            self._program = _compiled(self.model)
            self._predictions = self._predictions and _compiled(self._predictions)
        self._update = config.micro_batches_per_update(packing_factor)
        self._reduction: Optional[DistributedDataParallel] = None
        if processes.size > 1:
            self._reduction = _reduced_over_processes(
                self.model, self._program, self._device, compiled=config.engine.compile
            )
        self._updates = 0  # updates since the first, across resumptions

    def _build(self) -> torch.nn.Module:
        task = self.task
        attention = self.attention
        dtype = arithmetic(self._config.engine.precision, self._device)
        kind = "sdpa" if attention.kind == "varlen" else attention.kind
        network = build_network(task, self._config.run.seed, attention=kind)

        on_cpu = self._device.type == "cpu"
        rule = block_rule(dtype, task.model, self._device)
        if attention.kind == "varlen":
            if not attention.mask:
                rule = rule._replace(pays=SDPA_BLOCKS.pays)
            attend_within_sequences(
                network,
                sequences=task.max_sequences_per_pack or 0,  # not None if the kernel is used
                kernel=attention.kernel,
                rule=rule,
            )
        elif attention.kind == "sdpa" and task.model.attention_dropout > 0.0 and on_cpu:
            attend_with_rule(network, rule)  # torch's operator draws its own masks
        if dtype == torch.bfloat16 and isinstance(network.attention_mask, AttentionMask):
            network.attention_mask.products = dtype
        loss = getattr(network, "loss", None)
        if isinstance(loss, PretrainingLoss):
            loss.in_blocks = self._device.type == "cpu"
        compiled = self._config.engine.compile
        if on_cpu:
            self._noise = PackNoise(network, compiled=compiled)
            if self.processes.size == 1 and not compiled:
                accumulate_in_place(network, products=dtype != torch.bfloat16)
        if compiled and _shares_graphs():
            _compile_parts(network)
        if self._recomputes:
            _recompute_layers(network)
        return network

    @property
    def description(self) -> str:
        engine = self._config.engine
        name = device_name(self._device)
        if self._device.type == "cpu":
            if torch.backends.mps.is_available():
                name += " (MPS, the Mac's GPU, is not used)"
            name += f", torch threads: {torch.get_num_threads()}"
        if self.processes.size > 1:
            name = f"{self.processes.size} ranks, each {name}"
        attention = f"{self.attention.kind} attention"
        if self.attention.note:
            attention += f" ({self.attention.note})"

        parts = [f"host engine: {name}", engine.precision, attention]
        if self._recomputes:
            parts.append("layers recomputed")
        if engine.compile:
            parts.append("compiled")
        if engine.deterministic and self._device.type == "cuda":
            parts.append("deterministic")
        return ", ".join(parts)

    @_naming_memory
    def compile(self, batch: Batch) -> None:
        rows = self._config.batch.micro_batch
        self._accumulate({name: batch[name][:rows] for name in self.task.fields})
        self._forget_gradients()

    @_naming_memory
    def step(self, batch: Batch, learning_rate: float) -> StepResult:
        """Make one weight update; if the loss or gradients are not finite, change neither weights nor moments.

        The gradient norm is read together with the totals, so that the host waits for the device once per update. It is
        read before the update, because the host decides whether to update and how far to clip. Deciding on the device
        would need copies of weights and moments to restore.
        """
        start = time.perf_counter()
        totals = self._accumulate(batch)
        gradients = [
            parameter.grad for parameter in self.model.parameters() if parameter.grad is not None
        ]
        device_norm = gradient_norm(gradients).to(totals).reshape(1)
        *sums, norm = torch.cat([totals, device_norm]).tolist()
        result = self._result(sums, batch, start)._replace(gradient_norm=norm)

        if result.finite:
            max_norm = self._config.optimizer.max_gradient_norm
            if max_norm is not None:
                clip(gradients, norm, max_norm)
            for group in self.optimizer.param_groups:
                group["lr"] = learning_rate
            self.optimizer.step()
            self._updates += 1
        self._forget_gradients()
        return result._replace(seconds=time.perf_counter() - start)

    @_naming_memory
    def gradients(self, batch: Batch, *, alone: bool = False, dropout: bool = False) -> Gradients:
        mask = self.model.attention_mask
        micro_batches_per_update = self._update
        # The batch may have more or fewer micro-batches than an update, but each process has the same number.
        in_this_process = micro_batches(self.task, batch, self._config.batch.micro_batch)
        self._update = self.processes.size * in_this_process
        if alone and isinstance(mask, AttentionMask):
            self.model.attention_mask = self._padding_mask
        try:
            result = self.accumulate(batch, dropout=dropout)
            by_name = {}
            for name, parameter in self.model.named_parameters():
                if parameter.grad is not None:
                    by_name[name] = parameter.grad.clone()
        finally:
            self.model.attention_mask = mask
            self._update = micro_batches_per_update
            self._forget_gradients()
        return Gradients(result, by_name)

    def accumulate(self, batch: Batch, *, dropout: bool = True) -> StepResult:
        """Add the gradients of a batch to those of the parameters, without an update."""
        start = time.perf_counter()
        return self._result(self._accumulate(batch, dropout).tolist(), batch, start)

    def _accumulate(self, batch: Batch, dropout: bool = True) -> torch.Tensor:
        self.model.train(dropout)
        rows = self._config.batch.micro_batch
        number = micro_batches(self.task, batch, rows)
        divisor: float = number
        if self._reduction is not None:
            # The mean over processes is then the mean over the update, without empty micro-batches.
            divisor = self._update / self.processes.size
        program = self._reduction or self._program
        totals = self._zeros()
        cuda_devices = [self._device] if self._device.type == "cuda" else []

        with torch.random.fork_rng(devices=cuda_devices), self._numerics():
            for index, fields in enumerate(self._micro_batches(batch, self.task.fields), start=1):
                numbers_BS = batch["input_mask"][(index - 1) * rows : index * rows]
                self._seed_dropout(self.processes.rank * number + index, numbers_BS)
                # Gradients stay in this process until the last micro-batch.
                in_this_process: ContextManager = contextlib.nullcontext()
                if self._reduction is not None and index < number:
                    in_this_process = self._reduction.no_sync()
                with in_this_process:
                    with self._arithmetic():
                        output = program(*fields)
                    (output.loss / divisor).backward()
                totals += torch.stack(output).detach()
        return totals

    def _forget_gradients(self) -> None:
        # Several processes keep the tensors, which are the buckets of the reduction.
        self.optimizer.zero_grad(set_to_none=self._reduction is None)

    @_naming_memory
    def evaluate(self, batch: Batch) -> StepResult:
        start = time.perf_counter()
        totals = self._zeros()
        for output in self._inferred(self._program, batch, self.task.fields):
            totals += torch.stack(output)
        return self._result(totals.tolist(), batch, start)

    @_naming_memory
    def predict(self, batch: Batch) -> np.ndarray:
        predictions = self._inferred(self._predictions, batch, self.task.prediction_fields)
        self.processes.summed(())  # exchanges the request to stop
        return torch.cat(predictions).cpu().numpy()

    def _inferred(self, program: Any, batch: Batch, fields: Tuple[str, ...]) -> List[Any]:
        """Return the outputs of a program without dropout for each micro-batch."""
        micro_batches(self.task, batch, self._config.batch.micro_batch, fields)
        self.model.eval()
        outputs = []
        with torch.no_grad(), self._numerics():
            for tensors in self._micro_batches(batch, fields):
                with self._arithmetic():
                    outputs.append(program(*tensors))
        return outputs

    def _zeros(self) -> torch.Tensor:
        """Return zeros to sum the outputs of micro-batches in, float64: there may be thousands."""
        return torch.zeros(len(self.task.outputs), dtype=torch.float64, device=self._device)

    def _micro_batches(self, batch: Batch, fields: Tuple[str, ...]) -> Iterator[List[torch.Tensor]]:
        tensors = [torch.from_numpy(batch[name]) for name in fields]
        return self._feed(cut(tensors, self._config.batch.micro_batch))

    def _result(self, totals: List[float], batch: Batch, start: float) -> StepResult:
        sums, counts = self._summed(totals, batch)
        number = self._update
        if self._reduction is None:
            number = len(batch["input_ids"]) // self._config.batch.micro_batch
        metrics = self.task.means(sums, counts, dict.fromkeys(self.task.scales, number))
        # The loss that the gradients come from. Its parts are rounded separately and need not add up to it.
        metrics = {**metrics, "loss": sums["loss"] / number}
        return StepResult(metrics, time.perf_counter() - start, counts=counts)

    def _arithmetic(self) -> Any:
        return autocast(self._config.engine.precision, self._device)

    def _numerics(self) -> Any:
        return numerics_of(self._config.engine, self._device)

    def _seed_dropout(self, micro_batch: int, numbers_BS: np.ndarray) -> None:
        """Seed dropout from run.seed, the update and the packs of a micro-batch, or on CUDA its index.

        No random state has to be saved, and a run is the same with any number of processes.

        Args:
            micro_batch: index over all processes, 1-based.
            numbers_BS: number of each slot's sequence in its pack, the field `input_mask`.
        """
        entropy = [self._config.run.seed, _DROPOUT, self._updates]
        if self._noise is not None:
            first = (micro_batch - 1) * len(numbers_BS)
            self._noise.begin(entropy, first, numbers_BS)
        seeds = np.random.SeedSequence([*entropy, micro_batch])
        seed = int(seeds.generate_state(1, np.uint64)[0])
        # torch.manual_seed would change the generators of all GPUs.
        torch.default_generator.manual_seed(seed)
        if self._device.type == "cuda":
            with torch.cuda.device(self._device):
                torch.cuda.manual_seed(seed)

    def close(self) -> None:
        self._feed.close()

    def state(self) -> Dict[str, Any]:
        return {"model": self.weights(), "optimizer": neutral_state(self.optimizer, self.model)}

    def weights(self) -> Dict[str, torch.Tensor]:
        weights = {}
        for name, tensor in self.model.state_dict().items():
            weights[name] = tensor.detach().to(device="cpu", copy=True)
        return weights

    def load_state(self, state: Dict[str, Any]) -> None:
        refuse_other_state(state, self.model.state_dict())
        self.model.load_state_dict(state["model"])
        load_neutral_state(self.optimizer, self.model, state["optimizer"])
        self._updates = int(state["optimizer"]["step"])


def _recompute_layers(network: Any) -> None:
    """Keep only the input of each layer for the backward pass, in place: saves memory, costs a third more time.

    Values and gradients are identical, bit for bit: dropout repeats its random numbers.
    """
    layer: Any
    for layer in network.bert.encoder.layer:
        layer.forward = functools.partial(_recomputed, layer.forward)


def _recomputed(forward: Any, *inputs: Any) -> torch.Tensor:
    if not torch.is_grad_enabled():
        return forward(*inputs)
    return checkpoint(forward, *inputs, use_reentrant=False, preserve_rng_state=True)


def _reduced_over_processes(
    network: nn.Module,
    program: Callable[..., Any],
    device: torch.device,
    *,
    compiled: bool,
) -> DistributedDataParallel:
    """Return the training program of a network whose gradients are averaged over the processes.

    One all-reduce of a flat gradient after the last backward pass would give
    the same sums and send the same bytes, but DistributedDataParallel sends a bucket while the backward pass computes
    the next one, and its buckets are the gradients, which saves memory. Its usual pitfalls do not apply: shapes are
    constant, each process has the same number of micro-batches, and every parameter has a gradient in each of them,
    even if all packs are empty. In float64 the sums differ from those of one process by the order of summation only.
    """
    if compiled:
        # A compiled program is one graph, which the buckets must not split.
        from torch._dynamo import config as dynamo

        dynamo.optimize_ddp = False
    # Numbers and objects use the default group, gloo: it needs no device and detects a lost process at once.
    group = None
    if device.type == "cuda":
        torch.cuda.set_device(device)
        # The ranks watch each other by heartbeats, so NCCL need not: rank 0 may save for longer than 10 minutes.
        group = dist.new_group(backend="nccl", timeout=PATIENCE)
    return DistributedDataParallel(
        _Called(network, program), gradient_as_bucket_view=True, process_group=group
    )


class _Called(nn.Module):
    """A network that is run through its program, which may be compiled."""

    def __init__(self, network: nn.Module, program: Callable[..., Any]):
        super().__init__()
        self.network = network
        self._program = program

    def forward(self, *fields: torch.Tensor) -> Any:
        return self._program(*fields)
