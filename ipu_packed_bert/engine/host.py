"""The host engine: packed pre-training in plain PyTorch, on a CPU or a CUDA device.

An update is a loop over micro-batches whose gradients add up, so that memory depends on the micro-batch only. Each
micro-batch's loss is divided by their number: with the scales of `model/loss.py` the sum is the mean over the update.
"""

from __future__ import annotations

import contextlib
import time
from typing import Any, Dict, Iterator, List, Optional, Set, Tuple

import torch

from ipu_packed_bert.config import Config
from ipu_packed_bert.engine.base import Batch, Engine, StepResult, build_model, count, micro_batches
from ipu_packed_bert.model.packed import BATCH_FIELDS
from ipu_packed_bert.model.loss import PretrainingOutput
from ipu_packed_bert.model.varlen import attend_within_sequences, has_kernel
from ipu_packed_bert.optim import build_optimizer, load_neutral_state, neutral_state


# On a CPU, slots of a row from which attention within each sequence is faster than a dense mask over the row:
# `python -m ipu_packed_bert.benchmark --lengths 512,2048,8192`.
VARLEN_FROM = 1024


def pick_attention(config: Config, device: torch.device) -> str:
    """The attention that is fastest and exact on this device; `engine.attention` decides where it isn't "auto".

    Measured on a CPU with AVX-512 and AMX, torch 2.13: in float32 scaled_dot_product_attention is 2.5 times as fast as
    eager attention; in bfloat16 its backward pass is slower, and with dropout it falls back to eager code anyway.
    Raises ValueError for varlen with engine.compile: the blocks have other shapes in every batch.
    """
    if config.engine.attention == "varlen" and config.engine.compile:
        raise ValueError("engine.attention: varlen does not go with engine.compile: true, as its blocks have other shapes in every batch; switch one off")
    if config.engine.attention != "auto":
        return config.engine.attention
    if device.type == "cpu" and config.data.max_sequence_length >= VARLEN_FROM and not config.engine.compile:
        return "varlen"
    eager = config.engine.precision == "bfloat16" or config.model.attention_dropout > 0.0
    return "eager" if device.type == "cpu" and eager else "sdpa"


class _Program:
    """Forward and loss of one mode, training or evaluation, and how many static graphs it has needed so far."""

    backend = "inductor"  # of torch.compile

    def __init__(self, model: torch.nn.Module, compiled: bool):
        self.graphs = 0
        self._shapes: Set[Tuple] = set()
        self._compiled = compiled
        # dynamic=False: another shape would be another graph, and be counted, instead of a slower general one.
        self._call = torch.compile(model, fullgraph=True, dynamic=False, backend=self._build) if compiled else model

    def _build(self, graph, example_inputs):
        from torch._dynamo.backends.registry import lookup_backend

        self.graphs += 1
        return lookup_backend(self.backend)(graph, example_inputs)

    def __call__(self, fields: List[torch.Tensor]) -> PretrainingOutput:
        if not self._compiled:
            # Nothing is compiled, but what a static engine would have to compile anew is counted the same way.
            self._shapes.add(tuple(field.shape for field in fields))
            self.graphs = len(self._shapes)
        return self._call(*fields)


class HostEngine(Engine):
    """One replica on one device; replicas of the configuration become further micro-batches of the same update."""

    def __init__(self, config: Config, schema=None, *, packing_factor: float, device: Optional[str] = None):
        if config.engine.threads is not None:
            torch.set_num_threads(config.engine.threads)
        self._config = config
        self._device = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
        self._attention = pick_attention(config, self._device)
        self.model = self._build(schema).to(self._device)
        betas = config.betas(packing_factor)
        self.optimizer = build_optimizer(self.model, config.optimizer, betas=betas)
        self._programs = {
            mode: _Program(self.model, config.engine.compile) for mode in ("training", "evaluation")
        }
        # Dropout draws from a stream of the engine's own, so that a resumed run continues it, whoever else draws.
        with self._outer_random_stream_kept():
            torch.manual_seed(config.run.seed)
            self._random = self._read_random_stream()

    def _build(self, schema) -> torch.nn.Module:
        config = self._config
        if self._attention != "varlen":
            return build_model(config, attention=self._attention)
        sequences = schema.max_sequences_per_pack if schema is not None else config.data.max_sequences_per_pack
        if sequences is None:
            raise ValueError("engine.attention: varlen needs the number of sequences in a pack: from the data set, or data.max_sequences_per_pack")
        precision = torch.bfloat16 if config.engine.precision == "bfloat16" else torch.float32
        model = build_model(config, attention="sdpa")
        kernel = has_kernel(self._device, precision, config.model.attention_dropout)
        attend_within_sequences(model, sequences=sequences, kernel=kernel)
        return model

    @property
    def description(self) -> str:
        compiled = ", compiled" if self._config.engine.compile else ""
        name = torch.cuda.get_device_name(self._device) if self._device.type == "cuda" else "CPU"
        if self._device.type == "cpu" and torch.backends.mps.is_available():
            name += " (MPS, the Mac's GPU, is not used)"
        threads = f", torch threads: {torch.get_num_threads()}" if self._device.type == "cpu" else ""
        return f"host engine: {name}{threads}, {self._config.engine.precision}, {self._attention} attention{compiled}"

    @property
    def compilations(self) -> Dict[str, int]:
        return {mode: program.graphs for mode, program in self._programs.items()}

    def compile(self, batch: Batch) -> None:
        first = {name: batch[name][: self._config.batch.micro_batch] for name in BATCH_FIELDS}
        random = self._random
        self.accumulate(first)
        self._random = random
        self.optimizer.zero_grad(set_to_none=True)

    def step(self, batch: Batch, learning_rate: float) -> StepResult:
        start = time.perf_counter()
        result = self.accumulate(batch)
        for group in self.optimizer.param_groups:
            group["lr"] = learning_rate
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        self._wait()
        return result._replace(seconds=time.perf_counter() - start)

    def accumulate(self, batch: Batch) -> StepResult:
        """A step without its update: the gradients of the batch are added to those of the parameters."""
        start = time.perf_counter()
        self.model.train()
        number = micro_batches(batch, self._config.batch.micro_batch)
        totals = self._zeros()
        with self._random_stream():
            for fields in self._micro_batches(batch):
                with self._autocast():
                    output = self._programs["training"](fields)
                (output.loss / number).backward()
                totals += torch.stack(output).detach()
        return self._result(totals, batch, start)

    def evaluate(self, batch: Batch) -> StepResult:
        start = time.perf_counter()
        self.model.eval()
        totals = self._zeros()
        with torch.no_grad():
            for fields in self._micro_batches(batch):
                with self._autocast():
                    output = self._programs["evaluation"](fields)
                totals += torch.stack(output)
        return self._result(totals, batch, start)

    def _zeros(self) -> torch.Tensor:
        """Where the outputs of the micro-batches are summed up, in float64: there may be thousands."""
        return torch.zeros(len(PretrainingOutput._fields), dtype=torch.float64, device=self._device)

    def _micro_batches(self, batch: Batch) -> Iterator[List[torch.Tensor]]:
        size = self._config.batch.micro_batch
        fields = [torch.from_numpy(batch[name]) for name in BATCH_FIELDS]
        for index in range(micro_batches(batch, size)):
            rows = slice(index * size, (index + 1) * size)
            yield [field[rows].to(self._device) for field in fields]

    def _result(self, totals: torch.Tensor, batch: Batch, start: float) -> StepResult:
        number = micro_batches(batch, self._config.batch.micro_batch)
        counts = count(batch)
        sums = PretrainingOutput(*totals.tolist())
        self._wait()
        return StepResult(
            loss=sums.loss / number,
            mlm_loss=sums.mlm_loss / number,
            nsp_loss=sums.nsp_loss / number,
            mlm_accuracy=sums.mlm_correct / max(1, counts.masked_tokens),
            nsp_accuracy=sums.nsp_correct / max(1, counts.sequences),
            seconds=time.perf_counter() - start,
            cycles=None,
        )

    def _wait(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)

    def _autocast(self):
        if self._config.engine.precision == "bfloat16":
            return torch.autocast(self._device.type, dtype=torch.bfloat16)
        return contextlib.nullcontext()

    def _read_random_stream(self) -> Dict[str, torch.Tensor]:
        stream = {"cpu": torch.get_rng_state()}
        if self._device.type == "cuda":
            stream["cuda"] = torch.cuda.get_rng_state(self._device)
        return stream

    def _write_random_stream(self, stream: Dict[str, torch.Tensor]) -> None:
        torch.set_rng_state(stream["cpu"])
        if self._device.type == "cuda" and "cuda" in stream:
            torch.cuda.set_rng_state(stream["cuda"], self._device)

    @contextlib.contextmanager
    def _outer_random_stream_kept(self):
        outer = self._read_random_stream()
        try:
            yield
        finally:
            self._write_random_stream(outer)

    @contextlib.contextmanager
    def _random_stream(self):
        """The engine's own stream inside, the caller's outside."""
        with self._outer_random_stream_kept():
            self._write_random_stream(self._random)
            yield
            self._random = self._read_random_stream()

    def state(self) -> Dict[str, Any]:
        weights = self.model.state_dict()
        return {
            "model": {name: tensor.detach().to(device="cpu", copy=True) for name, tensor in weights.items()},
            "optimizer": neutral_state(self.optimizer, self.model),
            "random": {device: stream.clone() for device, stream in self._random.items()},
        }

    def load_state(self, state: Dict[str, Any]) -> None:
        try:
            self.model.load_state_dict(state["model"])
        except RuntimeError as error:
            raise ValueError(f"model state: {' '.join(str(error).split())}") from None
        load_neutral_state(self.optimizer, self.model, state["optimizer"])
        # Another engine's state has no stream of this kind; dropout then goes on with this engine's own.
        self._random = {**self._random, **state.get("random", {})}
