"""A test of a model before its training: does it keep the examples of a padding-free batch apart?

The reference is a plain call of the model with one example alone, by the attention of the library.  Differences are
compared with the model's own rounding, measured in plain calls that differ in nothing but the order of sums.
"""

from __future__ import annotations

import contextlib
from typing import Any, Callable, Dict, Iterator, List, NamedTuple, Optional, Set, Tuple

import torch
from torch.nn import functional as F

from ipu_packed_bert.padding_free.attention import NAME
from ipu_packed_bert.padding_free.collators import Inputs, inputs_for
from ipu_packed_bert.padding_free.models import (
    WAY_OUT,
    attention_of,
    base_of,
    choice_of,
    far_settings,
    ignored_reach,
    refuse_unfit,
    text_config,
    too_long,
    unwrapped,
)
from ipu_packed_bert.padding_free.update import logits_of, to_device
from pack_data.batching.collators import padding_free_batch

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
_DRAWS = 3  # other examples to try
# What a model may raise for inputs that it does not take.
_ERRORS = (AttributeError, IndexError, KeyError, RuntimeError, TypeError, ValueError)


def _difference(found: torch.Tensor, expected: torch.Tensor, typical: bool = False) -> float:
    """The largest difference of values [examples, tokens, ...], over the largest expected one.

    typical: leave out the worst quarter of the tokens of each example.  Infinite where a value is not finite.
    """
    errors = (found - expected).abs().amax(-1).double() / expected.abs().max().clamp(min=1e-30)
    error = float((torch.quantile(errors, 0.75, dim=-1) if typical else errors).max())
    return error if error == error else float("inf")


def _check_window(model: Any, longest: Optional[int] = None) -> None:
    """Raise ValueError where an example may be longer than a window or chunk that padding-free batches ignore.

    longest: tokens of the longest example; by default the most that the model takes.
    """
    reach = ignored_reach(model)
    if reach is None:
        return
    most = longest if longest is not None else getattr(text_config(model), "max_position_embeddings", None)
    if most is None or most > reach.tokens:
        length = "any number of" if most is None else most
        advice = f"if yours have at most {reach.tokens}, say so with longest=N"
        raise too_long(model, reach, f"examples may have {length} tokens", advice)


def check_no_leak(
    model: Any, *, longest: Optional[int] = None, forward: _Forward = logits_of, vocabulary_size: int = 0, seed: int = 0
) -> None:
    """Raise ValueError unless each example of a row gets the logits and gradients that it gets alone.

    model: as it will be trained; in DistributedDataParallel, FSDP2, PEFT, or compiled, which is not used here.
    longest: tokens of the longest example in training; decides which windows and chunks matter.  By default the most
    that the model takes.  The test examples are longer than these windows, by as much again where they may be.
    forward: how the training calls the model, if not as `padding_free.update` does.
    vocabulary_size: that of the configuration by default.

    It runs some short forward passes on random tokens, and long ones where windows matter.  Weights, gradients, random
    state and mode of the model stay as they are.  In turn:
    1. Do the logits of an example, and in training mode those with dropout, change with the example before it?
    2. Does its loss have a gradient at the tokens of the example before it?
    3. Are logits and gradients those of `model(input_ids)` for this example alone?
    4. And with examples longer than each window, chunk or trained length below `longest`?
    Where not, the error names the first layer at fault, or the setting, and what to do.
    """
    refuse_unfit(model)
    _check_window(model, longest)
    with _undisturbed(model):
        _Probe(model, longest, forward, vocabulary_size, seed).run()


@contextlib.contextmanager
def _undisturbed(model: Any) -> Iterator[None]:
    """Modes, random states and the attention implementation are afterwards what they were."""
    modes = {module: module.training for module in model.modules()}
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
            if attention_of(model) != loaded:
                base_of(model).set_attn_implementation(loaded)


class _Traced(NamedTuple):
    """A call of the model, and where the example is in its row."""

    call: Callable[[], Any]
    begin: int  # first token of the example
    length: int  # its tokens
    tokens: int  # those of the row


class _Probe:
    """One test of one model."""

    def __init__(self, model: Any, longest: Optional[int], forward: _Forward, vocabulary_size: int, seed: int) -> None:
        self.model, self.forward = unwrapped(model), forward
        self.base, self.choice = base_of(model), choice_of(model)
        self.name, self.was_training = type(self.base).__name__, bool(model.training)
        config = text_config(model)
        self.vocabulary = vocabulary_size or config.vocab_size
        positions = getattr(config, "max_position_embeddings", None)
        far, reach = far_settings(config), ignored_reach(model)
        stretched = any("rope" in each.setting for each in far)  # then positions have no end
        self.longest = longest if longest is not None or stretched else positions
        near = min((each.tokens for each in far if each.tokens > 1), default=None)  # a window is tested by itself
        limits = (self.longest, positions, reach and reach.tokens, near)
        self.length = min([_LENGTH] + [limit for limit in limits if isinstance(limit, int)])
        self.far = [each for each in far if self.longest is None or each.tokens < self.longest]
        if reach is not None:
            self.far = []  # `_check_window` has seen that no example is so long
        parameters = list(self.model.parameters())
        self.device = parameters[0].device
        self.draw = torch.Generator().manual_seed(seed)
        self.references = self._references()
        types = {parameter.dtype for parameter in parameters} | self._computed_types()
        self.dtype = max(types & set(_LEAST), key=lambda dtype: torch.finfo(dtype).eps, default=torch.float32)

    # ---- calls

    def example(self, length: int) -> torch.Tensor:
        return torch.randint(1, self.vocabulary, (length,), generator=self.draw)

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
                self._tried(
                    lambda: self.model(torch.ones(1, 2, dtype=torch.long, device=self.device)).logits,
                    "model(input_ids) of one example fails already",
                )
        finally:
            for handle in handles:
                handle.remove()
        return found

    def _tried(self, call: Callable[[], torch.Tensor], what: str) -> torch.Tensor:
        try:
            return call()
        except (AttributeError, LookupError, RuntimeError, TypeError, ValueError) as error:
            raise ValueError(f"{self.name}: {what}: {' '.join(str(error).split())[:300]}") from None

    def _references(self) -> List[str]:
        """Attention implementations of the library to compare with.

        The model's own; for ours and for sdpa both sdpa and eager, as far as the model has them.
        """
        return ["sdpa", "eager"] if self.choice.attention in (NAME, "sdpa") else [self.choice.attention]

    def _set(self, attention: str) -> None:
        if attention_of(self.base) != attention:
            self.base.set_attn_implementation(attention)

    def plain(self, *examples: torch.Tensor, attention: Optional[str] = None) -> torch.Tensor:
        """Logits [examples, tokens, vocabulary] of a plain call, one example a row."""

        def call() -> torch.Tensor:
            self._set(attention or self.references[0])
            return self.model(torch.stack(examples).to(self.device)).logits.float()

        return self._tried(call, "model(input_ids) of one example fails already")

    def row(self, *examples: torch.Tensor, restart: bool = True) -> List[torch.Tensor]:
        """Logits of each example of one row [1, its tokens, vocabulary].  restart: positions begin at 0 in each."""
        self._set(self.choice.attention)
        inputs = inputs_for(self.model, padding_free_batch([{"input_ids": ids.numpy()} for ids in examples]))
        inputs.pop("labels")
        if not restart:
            inputs["position_ids"] = torch.arange(inputs["position_ids"].shape[1]).unsqueeze(0)
        what = f"does not take {self.choice.boundaries} of a padding-free batch, {WAY_OUT}"
        found = self._tried(lambda: self.forward(self.model, to_device(inputs, self.device)), what)
        return list(found.float().split([len(ids) for ids in examples], dim=1))

    # ---- measures

    def run(self) -> None:
        self.model.eval()
        first, last = self.example(self.length), self.example(self.length)
        others = [self.example(self.length) for _ in range(_DRAWS)]
        with torch.no_grad():
            alone = self._alone(first, last)
            self._measure_rounding(alone, first, last, others)
            self._examples_do_not_change(first, last, others)
            self._as_alone(alone, first, last)
        self._gradients_as_alone(first, last)
        if self.was_training:
            self._in_training(first, last, others)
        if self.far:
            with torch.no_grad():
                self._far_as_alone(first, last)

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

    def _measure_rounding(
        self, alone: List[torch.Tensor], first: torch.Tensor, last: torch.Tensor, others: List[torch.Tensor]
    ) -> None:
        """How much the logits of an example differ between plain calls: alone, in a batch, in either order."""
        both = torch.cat(alone)
        batches = [self.plain(first, last), self.plain(last, first).flip(0)]
        self.mixed = max(_difference(self.plain(other, last)[1:], batches[0][1:]) for other in others)
        # In half precision, rounding may send single tokens to other experts.  A wrong position affects all tokens.
        self.typical = self.dtype in _HALF
        own = max(_difference(batch, both, self.typical) for batch in batches)
        self.rounding = max(own, self.implementations)
        self.limit = min(max(_LEAST[self.dtype], _ROUNDINGS * self.rounding), _GREATEST)

    def _examples_do_not_change(self, first: torch.Tensor, last: torch.Tensor, others: List[torch.Tensor]) -> None:
        expected = self.row(first, last)[1]
        changes = [_difference(self.row(other, last)[1], expected) for other in others]
        leak = max(changes)
        if leak > _SAME and leak > min(self.limit, _ROUNDINGS * self.mixed):
            other = others[changes.index(leak)]
            place = (len(first), len(last), len(first) + len(last))
            pair = _Traced(lambda: self.row(first, last), *place), _Traced(lambda: self.row(other, last), *place)
            where = self._first_fault(*pair, _SAME)
            raise ValueError(self._leak(f"the logits of an example change ({leak:.1e} of the largest)", where))

    def _leak(self, what: str, where: str) -> str:
        return (
            f"{self.name}: {what} with the example before it in the row{where}; call the model with use_cache=False "
            f"and what padding_free.inputs_for gives, let use_padding_free(model) choose its attention, or {WAY_OUT}"
        )

    def _as_alone(self, alone: List[torch.Tensor], first: torch.Tensor, last: torch.Tensor) -> None:
        row = self.row(first, last)
        error = max(_difference(*pair, typical=self.typical) for pair in zip(row, alone))
        if error <= self.limit:
            return
        where = self._unlike_alone([first, last], 1)
        try:
            stretched = max(_difference(*pair) for pair in zip(self.row(first, last, restart=False), row))
        except ValueError:  # positions beyond those of the model: it reads them
            stretched = float("inf")
        unmoved = stretched <= min(self.limit, error / 2)
        why = "position_ids are ignored" if unmoved else "its positions do not follow from position_ids alone"
        raise ValueError(
            f"{self.name}: an example behind another one scores otherwise than alone ({error:.1e} of the largest "
            f"logit), {why}{where}; let use_padding_free(model) choose its attention, or {WAY_OUT}"
        )

    # ---- gradients

    def _gradients(self, logits: Callable[[], List[torch.Tensor]], examples: List[torch.Tensor], of: int) -> Any:
        """Gradients of the losses of the examples from number `of` on, at the embeddings of all tokens of the call."""
        kept: List[torch.Tensor] = []

        def keep(module: Any, given: Any, output: torch.Tensor) -> torch.Tensor:
            kept.append(output.detach().requires_grad_())
            return kept[-1]

        handle = self.base.get_input_embeddings().register_forward_hook(keep)
        try:
            with torch.enable_grad():
                found = logits()
                losses = [
                    F.cross_entropy(each[0, :-1], ids[1:].to(self.device), reduction="sum")
                    for each, ids in list(zip(found, examples))[of:]
                ]
                return torch.autograd.grad(torch.stack(losses).sum(), kept)[0].float()
        finally:
            handle.remove()

    def _gradients_as_alone(self, first: torch.Tensor, last: torch.Tensor) -> None:
        """Where the tokens' embeddings can be had: not with one token an example."""
        if self.length < 2:
            return
        both = [first, last]
        try:
            alone = [
                self._gradients(lambda ids=ids: [self.plain(ids)], [ids], 0)  # type: ignore[misc]
                for ids in both
            ]
        except _ERRORS:
            return  # no gradients at the embeddings in a plain call: nothing to compare
        row = self._tried(
            lambda: self._gradients(lambda: self.row(*both), both, 0), f"has no gradients in a row, {WAY_OUT}"
        )
        through = self._gradients(lambda: self.row(*both), both, 1)[:, : len(first)]
        scale = row.abs().max().clamp(min=1e-30)
        if float(through.abs().max() / scale) > _SAME:
            size = float(through.abs().max() / scale)
            raise ValueError(self._leak(f"the loss of an example has a gradient ({size:.1e} of the largest)", ""))
        expected = torch.cat(alone, dim=1)
        error = _difference(row, expected, self.typical)
        if error > min(_GRADIENTS * self.limit, 2 * _GREATEST):
            raise ValueError(
                f"{self.name}: the gradients of an example in a row are not those that it has alone ({error:.1e} of "
                f"the largest); let use_padding_free(model) choose its attention, or {WAY_OUT}"
            )

    # ---- training mode

    def _in_training(self, first: torch.Tensor, last: torch.Tensor, others: List[torch.Tensor]) -> None:
        """With the same random state and shapes, dropout leaves out the same; experts get other shapes."""
        if self.mixed > _SAME:
            return
        self.model.train()

        def last_of(before: torch.Tensor) -> torch.Tensor:
            torch.manual_seed(0)
            return self.row(before, last)[1]

        with torch.no_grad():
            expected = last_of(first)
            if _difference(last_of(first), expected) > _SAME:
                return  # random numbers of its own: nothing can be compared
            leak = max(_difference(last_of(other), expected) for other in others)
        self.model.eval()
        if leak > self.limit:
            raise ValueError(self._leak(f"in training mode the logits of an example change ({leak:.1e})", ""))

    # ---- beyond windows

    def _far_as_alone(self, first: torch.Tensor, last: torch.Tensor) -> None:
        """Examples longer than what matters, by as much again if they may be, between short ones."""
        for number, far in enumerate(self.far):
            length = 2 * far.tokens if self.longest is None else min(2 * far.tokens, self.longest)
            if number + 1 < len(self.far) and self.far[number + 1].tokens < length:
                continue  # the next test is long enough for this one
            # The first is no multiple of a chunk, or chunks of the whole row would begin where those of the example do.
            examples = [first[: 3 if far.tokens > 3 else 1], self.example(length), last]
            row = self.row(*examples)
            pairs = [(found, self.plain(ids)) for found, ids in zip(row, examples)]
            # Of the long example only the tokens that the window concerns: among all they could be too few to count.
            pairs += [(pairs[1][0][:, far.tokens :], pairs[1][1][:, far.tokens :])] if self.typical else []
            errors = [_difference(*pair, typical=self.typical) for pair in pairs]
            error = max(errors)
            if error <= self.limit:
                continue
            worst = errors.index(error) if error in errors[:3] else 1
            where = self._unlike_alone(examples, worst)
            passed = [each for each in self.far if each.tokens <= far.tokens]
            names = ", ".join(f"{each.setting} is {each.tokens}" for each in passed)
            raise ValueError(
                f"{self.name}: in a row with an example of {length} tokens, an example of {len(examples[worst])} "
                f"scores otherwise than alone ({error:.1e} of the largest logit), and with {self.length} tokens not: "
                f"{names}{where}; let use_padding_free(model) choose its attention, or, if your examples have at most "
                f"{passed[0].tokens} tokens, say so with longest=N, or {WAY_OUT}"
            )

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
