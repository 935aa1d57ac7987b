"""A model that is judged: its calls by rows as in training, and its plain calls with one example alone.

The reference is a plain call of the model with one example alone, using the attention of Transformers.  Differences are
compared with the rounding of the model, measured between plain calls that differ only in the order of their sums.
"""

from __future__ import annotations

import contextlib
from typing import (
    Any,
    Callable,
    ContextManager,
    Dict,
    Iterator,
    List,
    NamedTuple,
    Optional,
    Sequence,
    Set,
    Tuple,
)

import numpy as np
import torch
from torch.utils import checkpoint

from pack_data.batching.collators import padding_free_batch
from pack_data.reading.fields import one_line
from padding_free.attention import NAME, first_position
from padding_free.collators import (
    Inputs,
    attends_both_ways,
    inputs_for,
    to_device,
)
from padding_free.leaks.compare import largest_error
from padding_free.leaks.placing import Example, PlacedRow, place
from padding_free.leaks.randomness import KeptBuffers, seeded
from padding_free.losses import at_least_float32, logits_of
from padding_free.models import (
    WAY_OUT,
    Leak,
    attention_of,
    base_of,
    changed,
    choice_of,
    choose,
    far_settings,
    is_compiled,
    kept_modes,
    most_positions,
    text_config,
    unwrapped,
)

# Differences are relative to the largest expected value.  The limit of a model is the larger of two numbers:
# - the resolution of its dtype: a few steps; 170 steps of float32, because of long sums.  float64 has the limit of
#   float32, because eager code computes its softmax in float32;
# - _ROUNDING_FACTOR times the measured rounding of the model.
# Above the largest limit a dtype is too coarse to distinguish a fault from rounding.
_RESOLUTION = {torch.float64: 2e-5, torch.float32: 2e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}
_ROUNDING_FACTOR = 4.0
_LARGEST_HALF_LIMIT = 0.15
_LARGEST_FULL_LIMIT = 1e-3  # in float32 and float64
_HALF_TYPES = (torch.float16, torch.bfloat16)
_MOST_GRAPHS = 256  # of a compiled model, for the shapes of all rows
_EXAMPLE_TOKENS = 11  # most tokens of the examples that measure the rounding

# Most logits of a row: 16 MiB in float32.  A larger vocabulary is represented by evenly spread words.  The output layer
# works on each token by itself, so a leak is in its inputs.
MOST_LOGITS = 2**22

# Exceptions that a model may raise for inputs that it does not support.
MODEL_ERRORS = (
    AssertionError,
    AttributeError,
    ImportError,
    LookupError,
    RuntimeError,
    TypeError,
    ValueError,
)

Collator = Callable[[Sequence[Example]], Inputs]
Loss = Callable[[Any, Inputs], torch.Tensor]


class TrainingCalls(NamedTuple):
    """The calls by which a training feeds its model."""

    collator: Optional[Collator] = None  # None: ours
    forward: Callable[[Any, Inputs], torch.Tensor] = logits_of  # logits [rows, tokens, vocabulary]
    loss: Optional[Loss] = None  # the trained mean; None: the mean over the labels
    mean: str = "token"  # `loss` is a mean over each "token" or each "example"


class Subject:
    """One model in its current dtype.

    Args:
        model: The model, also in its wrappers.
        longest: Tokens of the longest example; None: the limit of the model.
        training: The calls of the training.
    """

    def __init__(self, model: Any, longest: Optional[int], training: TrainingCalls) -> None:
        self.compiled = model if is_compiled(model) else None
        self.model = unwrapped(model)
        self.training = training
        self.base = base_of(model)
        self.choice = choice_of(model)
        self.name = type(self.base).__name__
        self.causal = not attends_both_ways(self.model)
        config = text_config(model)
        positions = most_positions(config)
        far = far_settings(config)
        # Stretched positions have no limit.
        unlimited = any("rope" in reach.setting for reach in far)
        if longest is None and not unlimited:
            longest = positions
        self.longest = longest
        self.positions = None
        if positions is not None and not unlimited:
            self.positions = positions - first_position(model)
        self.far = [reach for reach in far if longest is None or reach.tokens < longest]
        self.limit = 0.0  # set by `_measure`
        self.has_noise = False  # a call drew random numbers

        # Rounding is measured with examples that are shorter than all windows.
        nearest = min((reach.tokens for reach in far if reach.tokens > 1), default=None)
        limits = [limit for limit in (longest, positions, nearest) if isinstance(limit, int)]
        self._length = min([_EXAMPLE_TOKENS, *limits])

        parameters = list(self.model.parameters())
        self.device = parameters[0].device
        self._buffers = KeptBuffers(self.model)
        # The reference: the library's attention; for ours and for sdpa it is sdpa or eager code, if the model has them.
        replaced = self.choice.attention in (NAME, "sdpa")
        self._references = ["sdpa", "eager"] if replaced else [self.choice.attention]
        types = self._first_call()
        for parameter in parameters:
            if parameter is not self.embedding.weight:  # `in_dtype` may convert only its outputs
                types.add(parameter.dtype)
        self.dtype = max(
            types & set(_RESOLUTION),
            key=lambda dtype: torch.finfo(dtype).eps,
            default=torch.float32,
        )
        self.is_half = self.dtype in _HALF_TYPES
        self.width = int(self.embedding.weight.shape[-1])  # features of a token

    @contextlib.contextmanager
    def converted(self, dtype: torch.dtype, embedding: Any = None) -> Iterator[Subject]:
        """Convert the model in the block, as `in_dtype` does; yield its subject, with measured rounding."""
        with in_dtype(self.model, dtype, embedding):
            self._set_attention(self.choice.attention)
            model = self.model if self.compiled is None else self.compiled
            subject = Subject(model, self.longest, self.training)
            subject._measure()
            yield subject

    def in_full_precision(self) -> ContextManager[Subject]:
        """Yield this subject, or in half precision the subject in float32, with measured rounding.

        It stays in half precision if there is an autocast inside `forward`.
        """
        self._measure()
        if self.is_half:
            return self.converted(torch.float32, self.embedding)
        return contextlib.nullcontext(self)

    # ---- plain calls

    def _first_call(self) -> Set[torch.dtype]:
        """Call the model with one example; find its embeddings, and return the dtypes in which its layers compute.

        They include those of an autocast around the call or inside `forward`.
        """
        types: Set[torch.dtype] = set()
        embeddings: List[Any] = []
        ids = torch.ones(1, 2, dtype=torch.long, device=self.device)

        def note(module: torch.nn.Module, inputs: Any, output: Any) -> None:
            if torch.is_tensor(output):
                types.add(output.dtype)
            if isinstance(module, torch.nn.Embedding) and torch.equal(inputs[0], ids):
                embeddings.append(module)

        with contextlib.ExitStack() as stack:
            stack.enter_context(torch.no_grad())
            for module in self.model.modules():
                if not list(module.children()):
                    stack.callback(module.register_forward_hook(note).remove)
            logits = self._first_logits(ids)

        if hasattr(self.base, "get_input_embeddings"):
            embeddings.insert(0, self.base.get_input_embeddings())
        if not embeddings:
            raise ValueError(f"{self.name}: no embedding gets input_ids; give it an nn.Embedding")
        self.embedding: Any = embeddings[0]
        config = text_config(self.model)
        self.vocabulary = getattr(config, "vocab_size", None) or self.embedding.num_embeddings
        words = logits.shape[-1]
        if words < self.vocabulary:
            raise ValueError(
                f"{self.name} returns {words} logits per token for {self.vocabulary:,} words; use a model with a logit "
                "for each word"
            )
        return types

    def _first_logits(self, ids: torch.Tensor) -> torch.Tensor:
        """Return the logits of one example, by a plain call of the model or else by the training's `forward`."""
        is_own = self.training.forward is not logits_of
        self.has_plain_call = True
        try:
            logits = self.attempt(lambda: _logits_in(self.model(ids)), _FAILS_ALONE)
            if logits is not None and logits.shape[:2] == ids.shape:
                return logits
            if not is_own:
                raise ValueError(
                    f"{self.name} returns no logits [1, tokens, vocabulary]; pass forward="
                )
        except ValueError:
            if not is_own:
                raise
        self.has_plain_call = False
        return self.plain(ids)

    def attempt(self, call: Callable[[], Any], what: str) -> Any:
        """Return `call()`; raise its errors as a ValueError of one line."""
        try:
            return call()
        except Leak:
            raise
        except MODEL_ERRORS as error:
            reason = one_line(error, 120) or type(error).__name__
            raise ValueError(f"{self.name}: {what}: {reason}") from None

    def _set_attention(self, attention: str) -> None:
        if attention_of(self.base) != attention:
            self.base.set_attn_implementation(attention)

    def plain(self, ids: torch.Tensor, attention: Optional[str] = None) -> torch.Tensor:
        """Compute the logits of examples of one length without other examples: [examples, tokens] -> [..., words]."""
        if not self.has_plain_call:
            logits = []
            for example_ids in ids.cpu().numpy():
                row = self.row([{"input_ids": example_ids, "labels": example_ids}])
                logits.append(row.select(self.logits_of(row)))
            return torch.stack(logits)

        def call() -> torch.Tensor:
            with self.steady(attention or self._references[0]):
                logits = _logits_in(self.model(ids.to(self.device)))
            if logits is None:
                raise ValueError("it returns no logits [examples, tokens, vocabulary]")
            return at_least_float32(logits)

        return self.attempt(call, _FAILS_ALONE)

    # ---- calls by rows

    def row(self, examples: Sequence[Example]) -> PlacedRow:
        """Collate examples as the training does; a collator that draws at random gets the same seed each time."""
        self._set_attention(self.choice.attention)
        if self.training.collator is None:
            inputs = inputs_for(self.model, padding_free_batch(examples, causal=self.causal))
        else:
            with seeded():
                inputs = self.training.collator(examples)
        return place(examples, to_device(inputs, self.device))

    @contextlib.contextmanager
    def steady(self, attention: Optional[str] = None) -> Iterator[None]:
        """Let a call in the block have the same buffers and random numbers as each other call.

        attention: the attention of plain calls; None: that of rows.
        """
        self._buffers()
        self._set_attention(attention or self.choice.attention)
        with seeded():
            before = torch.get_rng_state()
            yield
            self.has_noise |= not torch.equal(before, torch.get_rng_state())

    def logits_of(self, row: PlacedRow, model: Any = None) -> torch.Tensor:
        """Compute the logits of a row as the training does, [rows, slots, words]."""
        inputs = {name: value for name, value in row.inputs.items() if name != "labels"}
        what = f"does not accept {self.choice.boundaries} of a padding-free batch, {WAY_OUT}"
        model = self.model if model is None else model
        with self.steady():
            return self.attempt(lambda: self.training.forward(model, inputs), what)

    # ---- rounding

    def _measure(self) -> None:
        """Set `limit`, the largest relative difference of logits that can be rounding in this dtype.

        eager code is the library's definition.  sdpa needs less memory and is used if its result is that of eager code:
        in some models it silently drops soft caps and sinks.
        """
        self.model.eval()
        draw = np.random.default_rng(0)
        ids = torch.from_numpy(draw.integers(1, self.vocabulary, (2, self._length)))
        alone_by: Dict[str, torch.Tensor] = {}
        refusal: Optional[ValueError] = None
        with torch.no_grad():
            for attention in self._references:
                try:
                    alone = [self.plain(ids[[number]], attention) for number in (0, 1)]
                    alone_by[attention] = torch.cat(alone)
                except ValueError as error:
                    refusal = refusal or error
            if refusal is not None and not alone_by:
                raise refusal
            rounding = self._choose_reference(alone_by)
            expected = alone_by[self._references[0]]
            for batch in (self.plain(ids), self.plain(ids.flip(0)).flip(0)):
                # In half precision, rounding may route single tokens to other experts.
                rounding = max(rounding, largest_error(batch, expected, typical=self.is_half))
        largest = _LARGEST_HALF_LIMIT if self.is_half else _LARGEST_FULL_LIMIT
        self.limit = min(max(_RESOLUTION[self.dtype], _ROUNDING_FACTOR * rounding), largest)

    def _choose_reference(self, alone_by: Dict[str, torch.Tensor]) -> float:
        """Choose the reference attention by its results; return the rounding between two right ones."""
        self._references = list(alone_by)
        if len(alone_by) < 2:
            return 0.0
        difference = largest_error(alone_by["sdpa"], alone_by["eager"], typical=self.is_half)
        if difference <= _RESOLUTION[self.dtype]:
            return difference
        self._references = ["eager"]
        return 0.0


def _logits_in(output: Any) -> Optional[torch.Tensor]:
    """Return the logits [rows, tokens, vocabulary] in the output of a model; None if there are none."""
    candidates = [getattr(output, name, None) for name in ("logits", "prediction_logits")]
    if isinstance(output, dict):
        candidates.append(output.get("logits"))
    elif isinstance(output, (tuple, list)):
        candidates += output
    for value in (*candidates, output):
        if torch.is_tensor(value) and value.dim() == 3 and value.is_floating_point():
            return value
    return None


_FAILS_ALONE = "model(input_ids) fails even for one example"


# ---- states of a model


def _stance(kind: str) -> ContextManager:
    """Set the stance of torch.compile in the block, if this torch has stances."""
    set_stance = getattr(getattr(torch, "compiler", None), "set_stance", None)
    return contextlib.nullcontext() if set_stance is None else set_stance(kind)


@contextlib.contextmanager
def compiling() -> Iterator[None]:
    """Let compiled models run compiled in the block, for all shapes."""
    with contextlib.ExitStack() as stack:
        stack.enter_context(_stance("default"))
        dynamo: Any = getattr(torch, "_dynamo", None)
        if hasattr(dynamo, "config") and hasattr(dynamo.config, "recompile_limit"):
            # Above the limit, calls would run eagerly without a word.
            stack.enter_context(dynamo.config.patch(recompile_limit=_MOST_GRAPHS))
        yield


@contextlib.contextmanager
def kept_outputs(module: Any, keep: Callable[[Any], Any]) -> Iterator[List[Any]]:
    """Collect `keep(output)` of each output of a module in the block; a tensor replaces the output."""
    kept: List[Any] = []

    def hook(module: Any, inputs: Any, output: Any) -> Any:
        kept.append(keep(output))
        return kept[-1] if torch.is_tensor(output) else output

    handle = module.register_forward_hook(hook)
    try:
        yield kept
    finally:
        handle.remove()


class _Unchecked:
    """A reentrant checkpoint that keeps its activations."""

    @staticmethod
    def apply(function: Any, preserve: bool, *args: Any) -> Any:
        return function(*args)


@contextlib.contextmanager
def undisturbed(model: Any) -> Iterator[None]:
    """Restore modes, buffers, random states, attention and choice of the model after the block."""
    buffers = KeptBuffers(model)
    loaded = attention_of(model)
    choice = choose(model, None)
    choose(model, choice)
    gpus = {parameter.device.index or 0 for parameter in model.parameters() if parameter.is_cuda}
    with contextlib.ExitStack() as stack:
        stack.callback(buffers)
        stack.enter_context(kept_modes(model))
        stack.enter_context(torch.random.fork_rng(devices=sorted(gpus)))
        stack.enter_context(seeded())
        # Reentrant checkpoints allow no gradients at the embeddings.
        stack.enter_context(changed([(checkpoint, "CheckpointFunction")], _Unchecked))
        # Compiling for each probed shape would take minutes.
        stack.enter_context(_stance("force_eager"))
        try:
            yield
        finally:
            if attention_of(model) != loaded:
                base_of(model).set_attn_implementation(loaded)
            choose(model, choice)


@contextlib.contextmanager
def in_dtype(model: Any, dtype: torch.dtype, embedding: Any = None) -> Iterator[None]:
    """Replace weights and buffers by copies of another dtype, and switch autocast off, in the block.

    embedding: convert its outputs rather than its weights, which may be the largest of the model.
    """
    stores = _stores_of_other_dtypes(model, dtype)
    # Tied weights are converted, for the output layer.
    own = [entry for entry in stores if embedding is not None and entry[2] is embedding.weight]
    if len(own) == 1 and type(embedding) is torch.nn.Embedding:
        stores.remove(own[0])
    else:
        own = []

    copies: Dict[int, torch.Tensor] = {}  # tied weights stay tied
    with contextlib.ExitStack() as stack:
        if own:
            hook = embedding.register_forward_hook(lambda module, inputs, output: output.to(dtype))
            stack.callback(hook.remove)
        for store, name, tensor in stores:
            if id(tensor) not in copies:
                copy = tensor.detach().to(dtype)
                if isinstance(tensor, torch.nn.Parameter):
                    copy = torch.nn.Parameter(copy, tensor.requires_grad)
                copies[id(tensor)] = copy
            stack.callback(store.__setitem__, name, tensor)
            store[name] = copies[id(tensor)]
        # Accelerate replaces `forward` by a call under autocast, and keeps the original.
        for part in {unwrapped(model), base_of(model)}:
            if {"_original_forward", "forward"} <= part.__dict__.keys():
                stack.callback(setattr, part, "forward", part.forward)
                part.forward = part._original_forward
        for kind in {"cpu", next(model.parameters()).device.type}:
            stack.enter_context(torch.autocast(kind, dtype=torch.bfloat16, enabled=False))
        yield


def _stores_of_other_dtypes(model: Any, dtype: torch.dtype) -> List[Tuple[Any, str, torch.Tensor]]:
    """List the floating-point weights and buffers of other dtypes, with their dictionaries and names."""
    stores = []
    for module in model.modules():
        for store in (module._parameters, module._buffers):
            for name, tensor in store.items():
                is_plain = type(tensor) in (torch.Tensor, torch.nn.Parameter)
                if is_plain and tensor.is_floating_point() and tensor.dtype != dtype:
                    stores.append((store, name, tensor))
    return stores
