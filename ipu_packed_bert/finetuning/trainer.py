"""Updates on packs: gradients of the micro-batches added up, clipped as a whole, one step of the optimiser."""
from __future__ import annotations

import contextlib
import time
from typing import Any, Callable, Dict, Iterable, Iterator, List, NamedTuple, Optional, Tuple

import numpy as np
import torch

from ipu_packed_bert.finetuning.config import FinetuneConfig
from ipu_packed_bert.finetuning.packing import Batch, PackedInputs
from ipu_packed_bert.optim import build_optimizer, load_neutral_state, neutral_state, scheduled_rate


class Sums(NamedTuple):
    """What an update's micro-batches add up to."""

    loss: float  # mean over its sequences
    right: float  # sequences
    rows: int
    sequences: int
    tokens: int


class Update(NamedTuple):
    """What one update tells."""

    loss: float  # mean over its sequences
    accuracy: float  # fraction of its sequences that were right
    rows: int
    sequences: int
    tokens: int
    seconds: float


def pick_device() -> torch.device:
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def pick_attention(config: FinetuneConfig, attention_dropout: float, device: torch.device) -> str:
    """As the pre-training engine: on a CPU in float32 without attention dropout scaled_dot_product_attention is the faster."""
    if config.engine.attention != "auto":
        return config.engine.attention
    eager = config.engine.precision == "bfloat16" or attention_dropout > 0.0
    return "eager" if device.type == "cpu" and eager else "sdpa"


def sequence_logits(logits: np.ndarray, batch: Batch, *, of_slots: bool) -> Iterator[Tuple[int, np.ndarray]]:
    """The number (from 0) and the logits of each sequence of a batch: its slots of [B, S, 2], or its place of [B, D, C]."""
    for row, place in zip(*np.nonzero(batch["sequence_numbers"])):
        own = batch["input_mask"][row] == place + 1 if of_slots else place
        yield int(batch["sequence_numbers"][row, place]) - 1, logits[row, own]


class FineTuner:
    """A network, its optimiser and its stream of random numbers."""

    def __init__(self, network: torch.nn.Module, config: FinetuneConfig, *, steps: int, device: Optional[torch.device] = None):
        self._config, self._steps = config, steps
        self._device = device or pick_device()
        self.network = network.to(self._device)
        self._dtype = next(network.parameters()).dtype
        self.optimizer = build_optimizer(self.network, config.optimizer, betas=(config.optimizer.beta1, config.optimizer.beta2))
        # Dropout draws from a stream of its own, so that a resumed run continues it.
        with torch.random.fork_rng(devices=[self._device] if self._device.type == "cuda" else []):
            torch.manual_seed(config.run.seed)
            self._random = self._streams()

    def learning_rate(self, step: int) -> float:
        """Of update `step`, the first is 0."""
        return scheduled_rate(step, self._config.optimizer, steps=self._steps)

    def step(self, batches: Iterable[Batch], learning_rate: float) -> Update:
        """One weight update on the micro-batches of one update."""
        start = time.perf_counter()
        sums = self.accumulate(batches)
        clip = self._config.optimizer.max_gradient_norm
        if clip is not None:
            torch.nn.utils.clip_grad_norm_(self.network.parameters(), clip)
        for group in self.optimizer.param_groups:
            group["lr"] = learning_rate
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        self._wait()
        return Update(sums.loss, sums.right / sums.sequences, sums.rows, sums.sequences, sums.tokens, time.perf_counter() - start)

    def accumulate(self, batches: Iterable[Batch]) -> Sums:
        """Adds the gradients of an update to those of the parameters."""
        self.network.train()
        totals = torch.zeros(2, dtype=torch.float64, device=self._device)
        rows = sequences = tokens = 0
        with self._own_stream():
            for batch in batches:
                with self._autocast():
                    output = self.network(self._fields(batch))
                output.loss.backward()
                totals += torch.stack(output).detach()
                rows += len(batch["input_ids"])
                sequences += int((batch["sequence_numbers"] > 0).sum())
                tokens += int((batch["input_mask"] > 0).sum())
        loss, right = totals.tolist()
        return Sums(loss, right, rows, sequences, tokens)

    def predict(self, packed: PackedInputs, *, seen: Callable[[int], Any] = lambda rows: None) -> List[np.ndarray]:
        """The logits of every sequence, in the order of the sequences: [length, 2] where the head is for slots, else [C].

        `seen` is told of the rows that are done.
        """
        self.network.eval()
        rows = packed.rows(0)
        outputs: List[Optional[np.ndarray]] = [None] * len(packed.inputs)
        with torch.no_grad():
            for first in range(0, len(rows.records), self._config.batch.micro_batch):
                batch = packed.batch(rows, first, min(first + self._config.batch.micro_batch, len(rows.records)))
                with self._autocast():
                    logits = self.network.logits(self._fields(batch))
                for number, values in sequence_logits(logits.cpu().numpy(), batch, of_slots=self.network.of_slots):
                    outputs[number] = values
                seen(len(batch["input_ids"]))
        assert all(each is not None for each in outputs), "a sequence has no output"
        return outputs

    def _fields(self, batch: Batch) -> Dict[str, torch.Tensor]:
        fields = {name: torch.from_numpy(values).to(self._device) for name, values in batch.items()}
        if "scale" in fields:
            fields["scale"] = fields["scale"].to(self._dtype)
        return fields

    def _autocast(self):
        if self._config.engine.precision == "bfloat16":
            return torch.autocast(self._device.type, dtype=torch.bfloat16)
        return contextlib.nullcontext()

    def _wait(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)

    def _streams(self) -> Dict[str, torch.Tensor]:
        streams = {"cpu": torch.get_rng_state()}
        if self._device.type == "cuda":
            streams["cuda"] = torch.cuda.get_rng_state(self._device)
        return streams

    @contextlib.contextmanager
    def _own_stream(self):
        with torch.random.fork_rng(devices=[self._device] if self._device.type == "cuda" else []):
            torch.set_rng_state(self._random["cpu"])
            if "cuda" in self._random and self._device.type == "cuda":
                torch.cuda.set_rng_state(self._random["cuda"], self._device)
            yield
            self._random = self._streams()

    def state(self) -> Dict[str, Any]:
        """Copies of all that training changes, in the form of the pre-training engines."""
        weights = self.network.state_dict()
        return {"model": {name: tensor.detach().to("cpu", copy=True) for name, tensor in weights.items()},
                "optimizer": neutral_state(self.optimizer, self.network),
                "random": {device: stream.clone() for device, stream in self._random.items()}}

    def load_state(self, state: Dict[str, Any]) -> None:
        try:
            self.network.load_state_dict(state["model"])
        except RuntimeError as error:
            raise ValueError(f"model state: {' '.join(str(error).split())[:200]}") from None
        load_neutral_state(self.optimizer, self.network, state["optimizer"])
        self._random = {**self._random, **state["random"]}
