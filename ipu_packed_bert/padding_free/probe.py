"""A test of a model before its training: does it keep the examples of a padding-free batch apart?

The reference is a plain call of the model with one example alone, by the attention of the library.  Differences are
compared with the model's own rounding, measured in plain calls that differ in nothing but the order of sums.
"""

from __future__ import annotations

import contextlib
import math
import time
from functools import partial
from typing import Any, Callable, Dict, Iterator, List, NamedTuple, Optional, Sequence, Set, Tuple

import numpy as np
import torch
from torch.nn import functional as F

from ipu_packed_bert.padding_free.attention import NAME
from ipu_packed_bert.padding_free.collators import Inputs, first_position, inputs_for
from ipu_packed_bert.padding_free.losses import logits_of
from ipu_packed_bert.padding_free.models import (
    WAY_OUT,
    FirstDifference,
    Leak,
    Reach,
    attention_of,
    base_of,
    choice_of,
    far_settings,
    lengths_of_config,
    refuse_unfit,
    text_config,
    unwrapped,
)
from ipu_packed_bert.padding_free.rows import (
    Collator,
    Example,
    Fault,
    Loss,
    Probed,
    RowProbe,
    TrainingCalls,
    accurate,
    embeddings_of,
    places_of,
    row_lengths,
)
from ipu_packed_bert.padding_free.update import to_device
from pack_data.batching.collators import padding_free_batch
from pack_data.cli.memory import PeakMemory

_Forward = Callable[[Any, Inputs], torch.Tensor]  # model, inputs -> logits [1, tokens, vocabulary]

# Differences are over the largest value expected.  Each limit is the larger of two: what the type cannot resolve (a few
# steps of it; 170 of float32, whose sums are long; float64 as float32, in which eager code takes its softmax), and a
# multiple of the rounding that this model shows.  Beyond the greatest limit a type is too coarse to tell.
_LEAST = {torch.float64: 2e-5, torch.float32: 2e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}
_ROUNDINGS = 4.0
_GREATEST = 0.15
_GRADIENTS = 5.0  # gradients pass through the model twice, and their limits are so many times as large
_HALF = (torch.float16, torch.bfloat16)
# Other tokens in the example before leave all shapes as they are, so that a dense model computes the same bits.  A
# mixture of experts gives each expert other tokens, and its sums round differently.
_SAME = 1e-6
_LENGTH = 11  # tokens of a test example, at most
_ROW = 1024  # tokens of a row where nobody says
_DENSE = 2048  # the longest row that is probed with a mask of all tokens by all tokens
_DRAWS = 3  # other examples to try
# What a model may raise for inputs that it does not take.
_ERRORS = (AssertionError, AttributeError, ImportError, LookupError, RuntimeError, TypeError, ValueError)


def _difference(found: torch.Tensor, expected: torch.Tensor, typical: bool = False) -> float:
    """The largest difference of values [examples, tokens, ...], over the largest expected one.

    typical: leave out the worst quarter of the tokens of each example.  Infinite where a value is not finite.
    """
    errors = (found - expected).abs().amax(-1).double() / expected.abs().max().clamp(min=1e-30)
    error = float((torch.quantile(errors, 0.75, dim=-1) if typical else errors).max())
    return error if error == error else float("inf")


def check_no_leak(
    model: Any,
    *,
    longest: Optional[int] = None,
    row: Optional[int] = None,
    forward: _Forward = logits_of,
    collator: Optional[Collator] = None,
    loss: Optional[Loss] = None,
    mean: str = "token",
) -> Probed:
    """Raise ValueError unless each example of a row gets the logits, loss and gradients that it gets alone.

    model: as it will be trained; in DistributedDataParallel, FSDP2, PEFT, or compiled, which is not used here.
    longest: tokens of the longest example in training; decides which windows and chunks matter.  By default the most
    that the model takes.  The test examples are longer than these windows, by as much again where they may be.
    row: tokens that a batch joins; by default `longest`.
    forward: how the training calls the model, if not as `padding_free.update` does: model, inputs -> logits.
    collator: examples, mappings with input_ids and labels -> inputs; by default ours.
    loss: model, inputs -> the mean that is trained.  mean: what it is a mean over, "token" or "example".

    Weights, gradients, random state and mode of the model stay as they are.  In turn:
    1. Do the logits of an example, and in training mode those with dropout, change with the example before it?
    2. Does its loss have a gradient at the tokens of the example before it?
    3. Are its logits those of `model(input_ids)` for this example alone?
    4. And with examples longer than each window, chunk or trained length below `longest`?
    5. Are logits, losses and gradients in rows as they are trained (`padding_free.rows`) those of each example alone?
    In training and evaluation mode, in the model's type and in float32, where rounding hides less; what is beyond
    rounding there is looked at again in float64.
    Where not, the error names the first layer at fault, or the setting, and what to do.
    """
    refuse_unfit(model)
    if mean not in ("token", "example"):
        raise ValueError(f'mean is {mean!r}; must be "token" or "example"')
    with _undisturbed(model):
        loaded = attention_of(model)

        def made() -> _Probe:
            if attention_of(model) != loaded:  # that of a plain call
                base_of(model).set_attn_implementation(loaded)
            return _Probe(model, longest, TrainingCalls(collator, forward, loss, mean))

        return made().run(row, made)


def keeps_apart_with_mask(model: Any) -> bool:
    """Whether a row with boundaries and an all-ones attention_mask scores as without the mask, or is refused."""
    with _undisturbed(model), torch.no_grad():
        model.eval()
        probe = _Probe(model, None, TrainingCalls(None, logits_of))
        ids = [probe.example(min(probe.length, 3)).numpy() for _ in range(2)]
        inputs = probe.collated([{"input_ids": each, "labels": each} for each in ids])
        inputs = to_device({name: value for name, value in inputs.items() if name != "labels"}, probe.device)
        try:
            found = logits_of(probe.model, {**inputs, "attention_mask": torch.ones_like(inputs["input_ids"])})
        except _ERRORS:
            return True
        return _difference(found, logits_of(probe.model, inputs)) <= min(10 * _LEAST[probe.dtype], _GREATEST)


def audit_batch(model: Any, inputs: Inputs, forward: _Forward = logits_of) -> Probed:
    """Raise ValueError unless the examples of this row have the logits and gradients that they have alone.

    inputs: of one row, with position_ids, which begin again in each example, and labels.
    """
    refuse_unfit(model)
    sharded = any(hasattr(each, "placements") or not each.numel() for each in model.parameters())
    if sharded:  # ranks have different numbers of examples, and would wait for each other
        return Probed(left_out="the first batch is not audited, as the weights are sharded")
    given = {name: value for name, value in inputs.items() if name != "num_items_in_batch"}
    examples = _examples_of(given)
    loaded = attention_of(model)

    def made() -> _Probe:
        if attention_of(model) != loaded:
            base_of(model).set_attn_implementation(loaded)
        return _Probe(model, None, TrainingCalls(lambda each: given, forward))

    with _undisturbed(model), contextlib.ExitStack() as stack:
        probe = made()
        if probe.dtype in _HALF:
            stack.enter_context(_in_type(model, torch.float32))
            probe = made()
        probe.measure()
        return probe.audit(examples, made)._replace(types=(str(probe.dtype),))


def _examples_of(inputs: Inputs) -> List[Example]:
    """Those of a row, by its positions."""
    if inputs["input_ids"].shape[0] != 1 or inputs.get("position_ids") is None:
        raise ValueError("the batch is not one row with position_ids, so that its examples are not known")
    positions = inputs["position_ids"][0].cpu()
    begins = torch.nonzero(positions[1:] != positions[:-1] + 1)[:, 0] + 1
    lengths = torch.diff(torch.cat([torch.tensor([0]), begins, torch.tensor([len(positions)])])).tolist()
    columns = [inputs[name][0].cpu().split(lengths) for name in ("input_ids", "labels")]
    return [{"input_ids": ids.numpy(), "labels": labels.numpy()} for ids, labels in zip(*columns)]


@contextlib.contextmanager
def _undisturbed(model: Any) -> Iterator[None]:
    """Modes, random states and the attention implementation are afterwards what they were."""
    modes = {module: module.training for module in model.modules()}
    buffers = [(each, each.clone()) for each in model.buffers()]
    loaded = attention_of(model)
    devices = {parameter.device for parameter in model.parameters() if parameter.device.type == "cuda"}
    stance = getattr(torch.compiler, "set_stance", None) if hasattr(torch, "compiler") else None
    with contextlib.ExitStack() as stack:
        stack.enter_context(torch.random.fork_rng(devices=[device.index or 0 for device in devices]))
        if stance is not None:
            stack.enter_context(stance("force_eager"))  # a compilation for each of our shapes would take minutes
        try:
            yield
        finally:
            for module, training in modes.items():
                module.training = training
            with torch.no_grad():
                for buffer, before in buffers:
                    buffer.copy_(before)
            if attention_of(model) != loaded:
                base_of(model).set_attn_implementation(loaded)


@contextlib.contextmanager
def _in_type(model: Any, dtype: torch.dtype) -> Iterator[None]:
    """Weights and buffers in another type, without autocast; the model's own tensors stay untouched."""
    base, stores = base_of(model), []
    made: Dict[int, torch.Tensor] = {}
    # Where Accelerate has put autocast into `forward`.
    wrapped = [each for each in {unwrapped(model), base} if {"_original_forward", "forward"} <= each.__dict__.keys()]
    outer = [each.forward for each in wrapped]
    for module in model.modules():
        for store in (module._parameters, module._buffers):
            for name, each in store.items():
                if (
                    type(each) in (torch.Tensor, torch.nn.Parameter)
                    and each.is_floating_point()
                    and each.dtype != dtype
                ):
                    stores.append((store, name, each))
    try:
        for store, name, each in stores:
            if id(each) not in made:
                changed = each.detach().to(dtype)
                made[id(each)] = (
                    torch.nn.Parameter(changed, each.requires_grad) if isinstance(each, torch.nn.Parameter) else changed
                )
            store[name] = made[id(each)]
        for each in wrapped:
            each.forward = each._original_forward
        with contextlib.ExitStack() as stack:
            for kind in {"cpu", next(model.parameters()).device.type}:
                stack.enter_context(torch.autocast(kind, dtype=torch.bfloat16, enabled=False))
            yield
    finally:
        for store, name, each in stores:
            store[name] = each
        for each, forward in zip(wrapped, outer):
            each.forward = forward


class _Traced(NamedTuple):
    """A call of the model, and where the example is in its row."""

    call: Callable[[], Any]
    begin: int  # first token of the example
    length: int  # its tokens
    tokens: int  # those of the row


class _Probe:
    """One test of one model."""

    def __init__(self, model: Any, longest: Optional[int], training: TrainingCalls) -> None:
        self.model, self.training = unwrapped(model), training
        self.base, self.choice = base_of(model), choice_of(model)
        self.name, self.was_training = type(self.base).__name__, bool(model.training)
        config = text_config(model)
        self.vocabulary = config.vocab_size
        padding = getattr(config, "pad_token_id", None)
        self.padding = padding if isinstance(padding, int) else None
        positions = getattr(config, "max_position_embeddings", None)
        positions = None if positions == -1 else positions  # XLNet takes any number
        far = far_settings(config)
        stretched = any("rope" in each.setting for each in far)  # then positions have no end
        self.longest = longest if longest is not None or stretched else positions
        self.positions = None if stretched or positions is None else positions - first_position(model)
        near = min((each.tokens for each in far if each.tokens > 1), default=None)  # a window is tested by itself
        limits = (self.longest, positions, near)
        self.length = min([_LENGTH] + [limit for limit in limits if isinstance(limit, int)])
        self.far = [each for each in far if self.longest is None or each.tokens < self.longest]
        parameters = list(self.model.parameters())
        self.device = parameters[0].device
        self.draw = np.random.default_rng(0)
        self.references = self._references()
        types = {parameter.dtype for parameter in parameters} | self._computed_types()
        self.dtype = max(types & set(_LEAST), key=lambda dtype: torch.finfo(dtype).eps, default=torch.float32)

    # ---- calls

    def tokens(self, length: int, draw: np.random.Generator) -> np.ndarray:
        """Of a random example, int64."""
        ids = draw.integers(1, self.vocabulary, length)
        ids[ids == self.padding] = 0 if self.padding else 1  # some models skip padding
        return ids

    def example(self, length: int) -> torch.Tensor:
        return torch.from_numpy(self.tokens(length, self.draw))

    def _computed_types(self) -> Set[torch.dtype]:
        """Types that the layers compute in: of the weights, or of an autocast around the call or inside `forward`."""
        found: Set[torch.dtype] = set()

        def note(module: torch.nn.Module, inputs: Any, output: Any) -> None:
            if torch.is_tensor(output):
                found.add(output.dtype)

        leaves = [module for module in self.model.modules() if not list(module.children())]
        handles = [module.register_forward_hook(note) for module in leaves]
        try:
            with torch.no_grad():
                words = self._tried(
                    lambda: self.model(torch.ones(1, 2, dtype=torch.long, device=self.device)).logits.shape[-1],
                    "model(input_ids) of one example fails already",
                )
        finally:
            for handle in handles:
                handle.remove()
        if words < self.vocabulary:
            raise ValueError(f"{self.name} gives each token {words} logits, and {self.vocabulary:,} words need as many")
        return found

    def _tried(self, call: Callable[[], Any], what: str) -> Any:
        try:
            return call()
        except _ERRORS as error:
            words = " ".join(str(error).split())[:300] or type(error).__name__
            raise ValueError(f"{self.name}: {what}: {words}") from None

    def _references(self) -> List[str]:
        """Attention implementations of the library to compare with.

        The model's own; for ours and for sdpa both sdpa and eager, as far as the model has them.
        """
        return ["sdpa", "eager"] if self.choice.attention in (NAME, "sdpa") else [self.choice.attention]

    def _set(self, attention: str) -> None:
        if attention_of(self.base) != attention:
            self.base.set_attn_implementation(attention)

    def prepare(self) -> None:
        """For a row."""
        self._set(self.choice.attention)

    def plain(self, *examples: torch.Tensor, attention: Optional[str] = None) -> torch.Tensor:
        """Logits [examples, tokens, vocabulary] of a plain call, one example a row."""

        def call() -> torch.Tensor:
            self._set(attention or self.references[0])
            return accurate(self.model(torch.stack(examples).to(self.device)).logits)

        return self._tried(call, "model(input_ids) of one example fails already")

    def collated(self, examples: Sequence[Example]) -> Inputs:
        """The collator's inputs; ours where there is no other."""
        self.prepare()
        if self.training.collator is not None:
            return self.training.collator(examples)
        return inputs_for(self.model, padding_free_batch(examples))

    def row(self, *examples: torch.Tensor, restart: bool = True) -> List[torch.Tensor]:
        """Logits of each example of one row [1, its tokens, vocabulary].  restart: positions begin at 0 in each."""
        inputs = self.collated([{"input_ids": ids.numpy(), "labels": ids.numpy()} for ids in examples])
        places = places_of([ids.numpy() for ids in examples], inputs)
        self.where, self.lengths = torch.cat(places), list(map(len, places))
        inputs = {name: value for name, value in inputs.items() if name != "labels"}
        if not restart and "position_ids" in inputs:
            inputs["position_ids"] = torch.arange(inputs["position_ids"].shape[1]).unsqueeze(0)
        what = f"does not take {self.choice.boundaries} of a padding-free batch, {WAY_OUT}"
        torch.manual_seed(0)  # dropout leaves out the same in rows of the same shape
        found = accurate(self._tried(lambda: self.training.forward(self.model, to_device(inputs, self.device)), what))
        flat = found.reshape(1, -1, found.shape[-1])
        return [flat[:, place[0] : place[0] + len(place)] for place in places]

    # ---- short rows

    def run(self, row: Optional[int], made: Callable[[], _Probe]) -> Probed:
        """row: as for `check_no_leak`.  made: this probe again, where the weights have another type."""
        self.measure()
        short = [self.example(self.length) for _ in range(2)]
        with torch.no_grad():
            self._isolated(short, _DRAWS)
            self._as_alone(short, self.limit)
        if self.length > 1:
            self._no_gradient(*short)
        with torch.no_grad():
            if self.was_training and self.mixed <= _SAME:  # experts get other shapes
                self.model.train()
                if _difference(self.row(*short)[1], self.row(*short)[1]) <= _SAME:  # no random numbers of its own
                    self._isolated(short, _DRAWS, "in training mode ")
                self.model.eval()
            self._far_as_alone()
        return self._rows(row, made)

    def _far_as_alone(self) -> None:
        """Examples longer than what matters, by as much again if they may be, between short ones."""
        for number, far in enumerate(self.far):
            length = 2 * far.tokens if self.longest is None else min(2 * far.tokens, self.longest)
            if number + 1 < len(self.far) and self.far[number + 1].tokens < length:
                continue  # the next test is long enough for this one
            # The first is no multiple of a chunk, or chunks of the whole row would begin where those of the example do.
            first = self.example(min(self.length, 3 if far.tokens > 3 else 1))
            self._as_alone([first, self.example(length), self.example(self.length)], self.limit, far)

    def measure(self) -> None:
        """The limits of this type: how much the logits of an example differ between plain calls."""
        self.model.eval()
        first, last, *others = (self.example(self.length) for _ in range(2 + _DRAWS))
        with torch.no_grad():
            alone = self._alone(first, last)
            batches = [self.plain(first, last), self.plain(last, first).flip(0)]
            self.mixed = max(_difference(self.plain(other, last)[1:], batches[0][1:]) for other in others)
        # In half precision, rounding may send single tokens to other experts.  A wrong position affects all tokens.
        self.typical = self.dtype in _HALF
        own = max(_difference(batch, torch.cat(alone), self.typical) for batch in batches)
        self.limit = min(max(_LEAST[self.dtype], _ROUNDINGS * max(own, self.implementations)), _GREATEST)

    def _alone(self, *examples: torch.Tensor) -> List[torch.Tensor]:
        """Logits of each, and which attention gives them: sdpa drops soft caps and sinks in silence in some models."""
        by_kind: Dict[str, List[torch.Tensor]] = {}
        refusal: Optional[ValueError] = None
        for kind in self.references:
            try:
                by_kind[kind] = [self.plain(each, attention=kind) for each in examples]
            except ValueError as error:
                refusal = refusal or error
        if not by_kind:
            assert refusal is not None
            raise refusal
        # eager code is the library's own definition; sdpa is used where it agrees, since it needs less memory.
        self.references = list(by_kind)
        found = by_kind[self.references[-1]]
        self.implementations = 0.0
        if len(by_kind) > 1:
            self.implementations = max(
                _difference(*pair, typical=self.dtype in _HALF) for pair in zip(by_kind["sdpa"], found)
            )
            if self.implementations > _LEAST[self.dtype]:
                self.references, self.implementations = ["eager"], 0.0
            else:
                found = by_kind["sdpa"]
        return found

    def _isolated(self, examples: List[torch.Tensor], draws: int, mode: str = "") -> None:
        """Examples of odd numbers score the same whatever those before them are."""
        row = self.row(*examples)
        for _ in range(draws):
            changed = [ids if number % 2 else self.example(len(ids)) for number, ids in enumerate(examples)]
            other = self.row(*changed)
            errors = [_difference(*pair) if number % 2 else 0.0 for number, pair in enumerate(zip(other, row))]
            leak, worst = max(errors), errors.index(max(errors))
            if leak <= _SAME or leak <= (self.limit if mode else min(self.limit, _ROUNDINGS * self.mixed)):
                continue
            begin = self._begin([each if n % 2 else row[n] for n, each in enumerate(other)], row, _SAME)
            place = sum(self.lengths[:worst]), self.lengths[worst], sum(self.lengths)
            before, after = (_Traced(partial(self.row, *each), *place) for each in (examples, changed))
            what = f"{mode}the logits of an example change ({leak:.1e} of the largest)"
            raise Leak(self._leak(what, self._first_fault(before, after, _SAME)), begin)

    def _no_gradient(self, first: torch.Tensor, last: torch.Tensor) -> None:
        """The loss of the last example has no gradient at the tokens of the first."""
        with torch.enable_grad(), embeddings_of(self.base) as kept:
            loss = F.cross_entropy(self.row(first, last)[1][0, :-1], last[1:].to(self.device), reduction="sum")
            what = f"has no gradients in a row, {WAY_OUT}"
            found = self._tried(lambda: torch.autograd.grad(loss, kept)[0], what)
        sizes = accurate(found).reshape(-1, found.shape[-1])[self.where].abs().amax(-1)
        size = float(sizes[: len(first)].max() / sizes.max().clamp(min=1e-30))
        if size > _SAME:
            raise ValueError(self._leak(f"the loss of an example has a gradient ({size:.1e} of the largest)"))

    def _begin(
        self, found: List[torch.Tensor], expected: List[torch.Tensor], limit: float
    ) -> Optional[FirstDifference]:
        """Where the logits of the examples of the last row, [1, tokens, vocabulary] each, differ first."""
        begin = 0
        for number, (logits, other) in enumerate(zip(found, expected)):
            errors = (logits - other).abs().amax(-1)[0].double() / other.abs().max().clamp(min=1e-30)
            errors = errors.nan_to_num(nan=float("inf"))
            for token in (errors > limit).nonzero()[:1, 0].tolist():
                return FirstDifference(number, token, int(self.where[begin + token]), float(errors[token]))
            begin += len(errors)
        return None

    def _leak(self, what: str, where: str = "") -> str:
        return (
            f"{self.name}: {what} with the example before it in the row{where}; call the model with use_cache=False "
            f"and what padding_free.inputs_for gives, let use_padding_free(model) choose its attention, or {WAY_OUT}"
        )

    def _as_alone(self, examples: List[torch.Tensor], limit: float, far: Optional[Reach] = None) -> None:
        """The logits of each example are those of a plain call.  far: what the second one is longer than."""
        row = self.row(*examples)
        alone = [self.plain(ids) for ids in examples]
        begin, pairs = self._begin(row, alone, limit), list(zip(row, alone))
        if far and self.typical:  # tokens that the window concerns: among all they could be too few to count
            pairs[1] = pairs[1][0][:, far.tokens :], pairs[1][1][:, far.tokens :]
        errors = [_difference(*pair, typical=self.typical) for pair in pairs]
        error, worst = max(errors), errors.index(max(errors))
        if error <= limit:
            return
        where, advice = self._unlike_alone(examples, worst), ""
        if far:
            passed = [each for each in self.far if each.tokens <= far.tokens]
            why = f"and shorter ones not: {', '.join(f'{each.setting} is {each.tokens}' for each in passed)}"
            advice = f", or, if your examples have at most {passed[0].tokens} tokens, say so with longest=N"
        else:
            try:
                stretched = max(_difference(*pair) for pair in zip(self.row(*examples, restart=False), row))
            except ValueError:  # positions beyond those of the model: it reads them
                stretched = float("inf")
            unmoved = stretched <= min(limit, error / 2)
            why = "position_ids are ignored" if unmoved else "its positions do not follow from position_ids alone"
        raise Leak(
            f"{self.name}: in a row of {sum(self.lengths):,} tokens, example {worst} of {len(examples[worst]):,} "
            f"tokens scores otherwise than alone ({error:.1e} of the largest logit), {why}{where}; let "
            f"use_padding_free(model) choose its attention{advice}, or {WAY_OUT}",
            begin,
        )

    # ---- rows as they are trained

    def _rows(self, row: Optional[int], made: Callable[[], _Probe]) -> Probed:
        known = [each for each in (self.longest, self.positions) if each]
        asked = row or self.longest or min([_ROW, *known])
        tokens = min(asked, _DENSE) if self.choice.boundaries != "cu_seq_lens" else asked
        longest = min([tokens, *known])
        peak = PeakMemory() if tokens >= _ROW else None
        types, total = [str(self.dtype)], Probed()
        if self.dtype in _HALF:
            total = self._as_given(tokens, longest)
            with _in_type(self.model, torch.float32):
                exact = made()
                if exact.dtype == torch.float32:
                    exact.measure()
                    found = exact.exact_rows(tokens, longest, made)
                    total = found._replace(rows=total.rows + found.rows, seconds=total.seconds + found.seconds)
                    types.append("torch.float32")
        else:
            total = self.exact_rows(tokens, longest, made)
        if tokens < asked:
            total = total._replace(left_out=f"not longer, as the mask is of all tokens by all tokens; {total.left_out}")
        return total._replace(types=tuple(types), peak=(peak.added() or 0) if peak else 0)

    def exact_rows(self, tokens: int, longest: int, made: Callable[[], _Probe]) -> Probed:
        numbers = lengths_of_config(text_config(self.model), longest)
        what = f"fails in a row of {tokens:,} tokens, {WAY_OUT}"
        faults, probed = self._tried(lambda: RowProbe(self).run(tokens, longest, numbers), what)
        return self._judged(faults, probed, made)

    def audit(self, examples: List[Example], made: Callable[[], _Probe]) -> Probed:
        """A batch that is there, with its own tokens and labels."""
        faults, probed = self._tried(lambda: RowProbe(self).audit(examples), f"fails in the batch, {WAY_OUT}")
        return self._judged(faults, probed, made)

    def _judged(self, faults: List[Fault], probed: Probed, made: Callable[[], _Probe]) -> Probed:
        """Raises ValueError for the first fault, unless it is rounding."""
        if not faults:
            return probed
        fault: Optional[Fault] = faults[0]
        if fault is not None and fault.error < math.inf and self.dtype != torch.float64:
            fault = self._again(fault, made)
        if fault is None:
            return probed._replace(left_out=f"rounding in {self.dtype} was looked at in torch.float64")
        where = ""
        if fault.lengths:
            examples = [self.example(length) for length in fault.lengths]
            with contextlib.suppress(ValueError):
                where = self._unlike_alone(examples, max(fault.number, 0))
        size = f"{fault.error:.1e} of the largest" if fault.error < math.inf else "not a number"
        raise Leak(
            f"{self.name}: {fault.what} ({size}){where}; let use_padding_free(model) choose its attention, look at "
            f"what collator and loss do there, or {WAY_OUT}",
            fault.first,
        )

    def _again(self, fault: Fault, made: Callable[[], _Probe]) -> Optional[Fault]:
        """The fault in float64, where rounding is smaller; None where it is gone."""
        with _in_type(self.model, torch.float64):
            try:
                probe = made()
                probe.measure()
                found = RowProbe(probe).repeat(fault)
            except _ERRORS:
                return fault  # there is no float64 on this device, or in this code
        return found[0] if found else None

    def _as_given(self, tokens: int, longest: int) -> Probed:
        """In half precision: do the logits of an example change with others?  And the typical ones, with the row?"""
        begun, numbers = time.perf_counter(), lengths_of_config(text_config(self.model), longest)
        lengths = row_lengths(tokens, longest, numbers, np.random.default_rng(0))[0]
        examples = [self.example(length) for length in lengths]
        self.model.eval()
        with torch.no_grad():
            self._isolated(examples, 1)
            self._as_alone(examples, 2 * self.limit)
        return Probed(rows=((tokens, len(lengths)),), seconds=time.perf_counter() - begun)

    # ---- which layer

    def _unlike_alone(self, examples: List[torch.Tensor], number: int) -> str:
        """The first module that gives this example of a row something else than alone."""
        lengths = [len(ids) for ids in examples]
        length = lengths[number]
        row = _Traced(lambda: self.row(*examples), sum(lengths[:number]), length, sum(lengths))
        return self._first_fault(row, _Traced(lambda: self.plain(examples[number]), 0, length, length), self.limit)

    def _first_fault(self, row: _Traced, other: _Traced, limit: float) -> str:
        """Which module makes an example differ between two calls, as ", first in NAME".

        The first to finish whose output differs and whose input does not.
        """
        try:
            found, expected = _outputs(self.model, row), _outputs(self.model, other)
        except (IndexError, RuntimeError, TypeError, ValueError):
            return ""

        def differs(name: str, which: int) -> bool:
            pair = found[name][which], expected[name][which]
            if pair[0] is None or pair[1] is None or pair[0].shape != pair[1].shape:
                return which == 0  # an input that is not known may differ
            return _difference(pair[0].flatten(2), pair[1].flatten(2)) > limit

        faults = [name for name in found if name in expected and differs(name, 1)]
        at_fault = [name for name in faults if not differs(name, 0)] + faults
        return f", first in {at_fault[0]} ({type(self.model.get_submodule(at_fault[0])).__name__})" if at_fault else ""


def _outputs(model: Any, traced: _Traced) -> Dict[str, Tuple[Optional[torch.Tensor], Optional[torch.Tensor]]]:
    """What each module gets and gives for one example, [1, tokens, ...], in the order in which they finish."""
    found: Dict[str, Tuple[Optional[torch.Tensor], Optional[torch.Tensor]]] = {}
    span, tokens = slice(traced.begin, traced.begin + traced.length), traced.tokens

    def part(value: Any) -> Optional[torch.Tensor]:
        while isinstance(value, (tuple, list)) and value:
            value = value[0]
        if not torch.is_tensor(value):
            return None
        if value.dim() >= 2 and value.shape[:2] == (1, tokens):
            return value[:, span].double().reshape(1, traced.length, -1)
        if value.dim() >= 3 and len(value) == 1 and value.shape[-1] == tokens:
            return value.movedim(-1, 1)[:, span].double().flatten(2)
        return value[None, span].double() if value.dim() == 2 and len(value) == tokens else None

    def keep(name: str, given: Any, named: Dict[str, Any], output: Any) -> None:
        if name not in found:
            hidden = named.get("hidden_states", named.get("inputs_embeds", named.get("input_ids")))
            found[name] = part(given or hidden), part(output)

    handles = [
        module.register_forward_hook(
            lambda module, given, named, output, name=name: keep(name, given, named, output), with_kwargs=True
        )
        for name, module in model.named_modules()
        if name
    ]
    try:
        with torch.no_grad():
            traced.call()
    finally:
        for handle in handles:
            handle.remove()
    return found
