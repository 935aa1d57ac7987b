"""Training steps on the same sequences in several layouts, ours and Hugging Face's: how fast, and in how much memory.

All sides have the same weights and the same loss: the sum over masked tokens and sequences, divided by their numbers.
Hugging Face's model computes the vocabulary projection for masked tokens only here, as ours does, so that layouts are
compared and not heads. The weight update is left out: it is the same on all sides, and comes once in an update.
"""

from __future__ import annotations

import abc
import contextlib
import importlib.util
from dataclasses import replace
from typing import Any, Callable, Dict, List, NamedTuple, Optional, Sequence, Tuple

import numpy as np
import torch
from torch.nn import functional as F

from ipu_packed_bert.benchmarks.work import BenchmarkWork
from ipu_packed_bert.data.global_batches import Batch
from ipu_packed_bert.engine.host import HostEngine
from ipu_packed_bert.engine.host.devices import autocast, clock_of, numerics_of
from ipu_packed_bert.model.hugging_face import bert_settings
from ipu_packed_bert.model.packed import PaddingMask, hidden_score
from ipu_packed_bert.planning.host_memory import host_memory
from ipu_packed_bert.settings.pretraining import Config
from ipu_packed_bert.tasks.pretraining import Pretraining
from pack_data.cli.timing import quartiles, seconds_in_turn
from pack_data.display.table import Column

PACKED, DENSE, UNPACKED = "packed", "packed, dense mask", "unpacked, padded"
SORTED, FLASH = "Hugging Face, sorted by length", "Hugging Face, FlashAttention, no padding"


class _Unavailable(Exception):
    """Why a side cannot be measured here, in one line."""


class _Side(abc.ABC):
    """One layout of the work, ready to be run any number of times."""

    what: str  # one line: engine, attention
    rows: int  # forwards go through this many at a time

    @abc.abstractmethod
    def run(self) -> float:
        """Forward and backward passes over all the work, gradients cleared; the mean loss. Waits for the device."""

    def close(self) -> None:
        pass


class EngineSide(_Side):
    """Rows of the host engine."""

    def __init__(self, config: Config, batch: Batch, device: torch.device, *, alone: bool):
        """alone: a sequence a row, with the mask of the padding that BERT has without packs."""
        depth = batch["next_sentence_positions"].shape[1]
        config = replace(config, data=replace(config.data, max_sequences_per_pack=depth))
        if alone:
            config = replace(config, engine=replace(config.engine, attention="sdpa"))
        self._engine = HostEngine(config, Pretraining(config), packing_factor=1.0, device=device.type)
        self._batch, self.what, self.rows = batch, self._engine.description, config.batch.micro_batch
        network: Any = self._engine.model
        if alone:
            network.attention_mask = PaddingMask(hidden_score("sdpa"))

    @property
    def weights(self) -> Dict[str, torch.Tensor]:
        return self._engine.model.state_dict()

    def run(self) -> float:
        loss = self._engine.accumulate(self._batch).loss
        self._engine.optimizer.zero_grad(set_to_none=True)
        return loss

    def close(self) -> None:
        self._engine.close()


class _Forward(NamedTuple):
    """One forward pass of Hugging Face's model; K: masked tokens of all its sequences, Q: sequences."""

    inputs: Dict[str, torch.Tensor]  # of the encoder
    masked: torch.Tensor  # int64 [K], slots counted over all rows
    first: torch.Tensor  # int64 [Q], the slots of [CLS]
    ids: torch.Tensor  # int64 [K]
    labels: torch.Tensor  # int64 [Q]


class HuggingFaceSide(_Side):
    """transformers' BertForPreTraining on forward passes that were laid out before."""

    def __init__(
        self, config: Config, weights: Any, forwards: Sequence[_Forward], device: torch.device, attention: str
    ):
        import transformers

        try:
            self._model = transformers.BertForPreTraining._from_config(
                transformers.BertConfig(**bert_settings(config.model)),
                attn_implementation=attention,
            )
        except (ImportError, TypeError, ValueError) as error:
            raise _Unavailable(f"transformers {transformers.__version__}: {' '.join(str(error).split())}") from error
        self._model.load_state_dict(weights, strict=False)
        self._model.to(device).train()
        self._forwards, self._device, self._engine = forwards, device, config.engine
        self._tokens = sum(len(each.masked) for each in forwards)
        self._sequences = sum(len(each.first) for each in forwards)
        self.what, self.rows = f"transformers {transformers.__version__}, {attention}", config.batch.micro_batch

    def run(self) -> float:
        total = torch.zeros((), dtype=torch.float64, device=self._device)
        with numerics_of(self._engine, self._device):
            for each in self._forwards:
                # As the host engine's feed: pinned, on its way while the host goes on.
                moved = [self._moved(value) for value in each[1:]]
                inputs = {name: self._moved(value) for name, value in each.inputs.items()}
                with autocast(self._engine.precision, self._device):
                    loss = self._loss(inputs, *moved)
                loss.backward()
                total += loss.detach()
        self._model.zero_grad(set_to_none=True)
        return float(total)

    def _moved(self, value: Any) -> Any:
        if not torch.is_tensor(value):
            return value
        pinned = value.pin_memory() if self._device.type == "cuda" else value
        return pinned.to(self._device, non_blocking=True)

    def _loss(self, inputs, masked, first, ids, labels) -> torch.Tensor:
        model = self._model
        hidden_TH = model.bert(**inputs)[0].flatten(0, 1)
        mlm = _at_least_float32(model.cls.predictions(hidden_TH[masked]))
        # The pooler takes the first slot of each row.
        nsp = _at_least_float32(model.cls.seq_relationship(model.bert.pooler(hidden_TH[first].unsqueeze(1))))
        return (
            F.cross_entropy(mlm, ids, reduction="sum") / self._tokens
            + F.cross_entropy(nsp, labels, reduction="sum") / self._sequences
        )


def _at_least_float32(logits: torch.Tensor) -> torch.Tensor:
    return logits.to(torch.promote_types(logits.dtype, torch.float32))


def sorted_by_length(unpacked: Batch, rows: int) -> List[_Forward]:
    """Sequences in order of their length, `rows` at a time, padded to the longest, to a multiple of 8."""
    _, order = _in_order(unpacked)
    return [_padded(unpacked, order[start : start + rows], 8) for start in range(0, len(order), rows)]


def sorted_by_budget(unpacked: Batch, slots: int) -> List[_Forward]:
    """Sequences in order of their length, padded to the longest, as many at a time as stay within `slots`."""
    lengths, order = _in_order(unpacked)
    groups: List[List[int]] = [[]]
    for row in order:
        if (len(groups[-1]) + 1) * lengths[row] > slots:
            groups.append([])
        groups[-1].append(row)
    return [_padded(unpacked, np.array(group), 1) for group in groups]


def _in_order(unpacked: Batch) -> Tuple[np.ndarray, np.ndarray]:
    """Lengths, and the rows from the shortest to the longest."""
    lengths = (unpacked["input_mask"] > 0).sum(axis=1)
    return lengths, np.argsort(lengths, kind="stable")


def _padded(unpacked: Batch, chosen: np.ndarray, multiple: int) -> _Forward:
    """These rows, cut to their longest, or to the next multiple."""
    longest = int((unpacked["input_mask"][chosen] > 0).sum(axis=1).max())
    slots = min(-multiple * (-longest // multiple), unpacked["input_ids"].shape[1])
    inputs = {
        "input_ids": unpacked["input_ids"][chosen, :slots],
        "attention_mask": unpacked["input_mask"][chosen, :slots],
        "token_type_ids": unpacked["segment_ids"][chosen, :slots],
    }
    return _forward(unpacked, chosen, inputs, np.arange(len(chosen)) * slots)


def without_padding(unpacked: Batch, slots: int) -> List[_Forward]:
    """Sequences end to end in one row, as they come, up to about `slots` in a forward pass, boundaries beside them."""
    lengths = (unpacked["input_mask"] > 0).sum(axis=1)
    forwards, start = [], 0
    while start < len(lengths):
        end = start + max(1, int(np.searchsorted(np.cumsum(lengths[start:]), slots, side="right")))
        chosen = np.arange(start, end)
        bounds = np.concatenate([[0], np.cumsum(lengths[chosen])])
        real = unpacked["input_mask"][chosen] > 0
        inputs: Dict[str, Any] = {
            "input_ids": unpacked["input_ids"][chosen][real][None],
            "token_type_ids": unpacked["segment_ids"][chosen][real][None],
            "position_ids": unpacked["positions"][chosen][real][None],
            "cu_seq_lens_q": bounds.astype(np.int32),
            "cu_seq_lens_k": bounds.astype(np.int32),
            "max_length_q": int(lengths[chosen].max()),
            "max_length_k": int(lengths[chosen].max()),
        }
        forwards.append(_forward(unpacked, chosen, inputs, bounds[:-1]))
        start = end
    return forwards


def _forward(unpacked: Batch, chosen: np.ndarray, inputs: Dict[str, Any], first: np.ndarray) -> _Forward:
    used = unpacked["masked_lm_weights"][chosen] > 0
    slots = unpacked["masked_lm_positions"][chosen] + first[:, None]

    def tensor(name: str, values: Any) -> Any:
        if isinstance(values, int):
            return values
        return torch.from_numpy(np.ascontiguousarray(values, dtype=np.int32 if "cu_seq" in name else np.int64))

    return _Forward(
        {name: tensor(name, values) for name, values in inputs.items()},
        tensor("", slots[used]),
        tensor("", first),
        tensor("", unpacked["masked_lm_ids"][chosen][used]),
        tensor("", unpacked["next_sentence_labels"][chosen][:, 0]),
    )


class LayoutMeasured(NamedTuple):
    """One side in one precision."""

    name: str
    what: str
    precision: str
    seconds: np.ndarray  # one value a round
    loss: float
    peak_bytes: Optional[int]  # of the device, weights and gradients and optimiser state included; None on a CPU
    computed_bytes: Optional[float]  # the same as `--plan` computes it, for sides of the host engine


class LayoutOutcome(NamedTuple):
    measured: List[LayoutMeasured]
    missing: List[Tuple[str, str]]  # (side, why it was not measured)


def measure_layouts(
    config: Config,
    work: BenchmarkWork,
    device: torch.device,
    *,
    rounds: int,
    seconds: float,
    say: Callable[[str], None],
) -> LayoutOutcome:
    """Each side in turn, one at a time on the device; two rounds warm it up. A side ends after `seconds`, or `rounds`.

    Raises AssertionError where two sides have other losses: they would not have done the same work.
    """
    measured: List[LayoutMeasured] = []
    missing: List[Tuple[str, str]] = []
    weights: Dict[str, torch.Tensor] = {}
    for name, build in _sides(config, work, device, weights):
        with contextlib.ExitStack() as opened:
            side, why = None, ""
            try:
                side = build()
                opened.callback(side.close)
                if not weights and isinstance(side, EngineSide):
                    weights.update({key: value.detach().cpu().clone() for key, value in side.weights.items()})
                found = _measure(name, side, config, work, device, rounds=rounds, seconds=seconds)
            except _Unavailable as error:
                why = str(error)
            except torch.cuda.OutOfMemoryError:
                why = "the device has not enough memory"
            del side  # the next one needs its memory
        if why:
            missing.append((name, why))
            say(f"{name}: not measured, {why}")
            continue
        expected = measured[0].loss if measured else found.loss
        # Dropout draws other numbers on each side; without it the sides differ by rounding.
        limit = 0.05 if config.model.hidden_dropout or config.engine.precision == "bfloat16" else 1e-3
        if not abs(found.loss - expected) <= limit * expected:
            raise AssertionError(f"{name} does other work: its loss is {found.loss}, that of the others {expected}")
        measured.append(found)
        say(f"{name}: {work.sequences / np.median(found.seconds):,.1f} sequences/s")
    return LayoutOutcome(measured, missing)


def _sides(config: Config, work: BenchmarkWork, device: torch.device, weights: Dict[str, torch.Tensor]) -> Any:
    rows, slots = config.batch.micro_batch, config.data.max_sequence_length
    dense = replace(config, engine=replace(config.engine, attention="sdpa"))

    def hugging_face(forwards: Callable[[], List[_Forward]], attention: str) -> _Side:
        if importlib.util.find_spec("transformers") is None:
            raise _Unavailable("transformers is not installed")
        return HuggingFaceSide(config, weights, forwards(), device, attention)

    def flash() -> _Side:
        if device.type != "cuda" or importlib.util.find_spec("flash_attn") is None:
            raise _Unavailable("flash_attn is not installed" if device.type == "cuda" else "flash_attn needs CUDA")
        if config.engine.precision != "bfloat16":
            raise _Unavailable("flash_attn has half types only")
        return hugging_face(lambda: without_padding(work.unpacked, rows * slots), "flash_attention_2")

    yield PACKED, lambda: EngineSide(config, work.packed, device, alone=False)
    yield DENSE, lambda: EngineSide(dense, work.packed, device, alone=False)
    yield UNPACKED, lambda: EngineSide(config, work.unpacked, device, alone=True)
    yield SORTED, lambda: hugging_face(lambda: sorted_by_length(work.unpacked, rows), "sdpa")
    yield FLASH, flash


def _measure(
    name: str, side: _Side, config: Config, work: BenchmarkWork, device: torch.device, *, rounds: int, seconds: float
) -> LayoutMeasured:
    cuda = torch.cuda if device.type == "cuda" else None
    loss = side.run()
    if cuda:
        cuda.synchronize(device)
        cuda.reset_peak_memory_stats(device)
    # One side at a time: several would not leave each other the device's memory, which is measured too.
    times = seconds_in_turn({name: side.run}, rounds, clock_of(device), at_most=seconds)[name]
    computed = None
    if isinstance(side, EngineSide):
        parameters = sum(value.numel() for value in side.weights.values())
        predictions = (work.packed if name != UNPACKED else work.unpacked)["masked_lm_ids"].shape[1]
        slots = config.data.max_sequence_length
        computed = host_memory(config, config.model, parameters=parameters, slots=slots, predictions=predictions).most
    peak = cuda.max_memory_allocated(device) if cuda else None
    return LayoutMeasured(name, side.what, config.engine.precision, times, loss, peak, computed)


def to_json(outcome: LayoutOutcome, work: BenchmarkWork) -> List[Dict[str, Any]]:
    """One object a side. Speed-ups are over unpacked rows in the same precision; a share is that of packs."""
    baseline = {each.precision: each.seconds for each in outcome.measured if each.name == UNPACKED}
    found = []
    for each in outcome.measured:
        low, middle, high = quartiles(work.sequences / each.seconds)
        speed_up = None
        if each.precision in baseline:
            speed_up = float(np.median(baseline[each.precision]) / np.median(each.seconds))
        packed = each.name in (PACKED, DENSE) and speed_up is not None
        found.append(
            {
                "name": each.name,
                "what": each.what,
                "precision": each.precision,
                "rounds": len(each.seconds),
                "sequences_per_second": middle,
                "sequences_per_second_quartiles": [low, high],
                "tokens_per_second": middle * work.tokens / work.sequences,
                "speed_up": speed_up,
                "share_of_packing_factor": speed_up / work.packing_factor if packed and speed_up else None,
                "peak_memory_bytes": each.peak_bytes,
                "computed_memory_bytes": each.computed_bytes,
                "loss": each.loss,
            }
        )
    return found


# Of a table of the rows of `to_json`.
COLUMNS = (
    Column("name", "layout"),
    Column("precision", "precision"),
    Column("sequences_per_second", "seq/s", form=",.1f"),
    Column("tokens_per_second", "tokens/s", form=",.0f"),
    Column("speed_up", "over unpacked", form=".3f"),
    Column("share_of_packing_factor", "of the factor", form=".3f"),
    Column("peak_memory_bytes", "peak GiB", form=".2f", scale=2**30),
    Column("computed_memory_bytes", "computed", form=".2f", scale=2**30),
)
