"""Check before training that a model keeps the examples of a padding-free row apart.

The reference is a plain call of the model with one example alone, using the attention of Transformers.  Differences are
compared with the rounding of the model, measured between plain calls that differ only in the order of their sums.
"""

from __future__ import annotations

import contextlib
import math
import time
from functools import partial
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

from pack_data.batching.collators import padding_free_batch
from pack_data.cli.memory import PeakMemory
from pack_data.reading.fields import one_line
from pack_data.store.boundaries import sequences_in
from padding_free.attention import NAME
from padding_free.collators import Inputs, first_position, inputs_for, to_device
from padding_free.leaks.layers import one_of_each_kind, usual_longest
from padding_free.leaks.metadata import (
    MOST_TOKENS,
    broken_inputs,
    collate_cuts,
)
from padding_free.leaks.placing import Example, place
from padding_free.leaks.randomness import seeded
from padding_free.leaks.rows import (
    GRADIENT_FACTOR,
    QUICK_ROWS,
    Collator,
    Fault,
    LayerStep,
    Loss,
    Probed,
    RowProbe,
    TrainingCalls,
    largest_error,
    row_lengths,
    row_name,
    stance,
)
from padding_free.losses import at_least_float32, logits_of
from padding_free.models import (
    WAY_OUT,
    Choice,
    Leak,
    attention_of,
    base_of,
    choice_of,
    choose,
    far_settings,
    is_compiled,
    is_sharded,
    kept_modes,
    lengths_of_model,
    logits_in,
    most_positions,
    refuse_unfit,
    text_config,
    unwrapped,
)

_Forward = Callable[[Any, Inputs], torch.Tensor]  # model, inputs -> logits [1, tokens, vocabulary]

# Differences are relative to the largest expected value.  The limit of a model is the larger of two numbers:
# - the resolution of its dtype: a few steps; 170 steps of float32, because of long sums.  float64 has the limit of
#   float32, because eager code computes its softmax in float32;
# - _ROUNDING_FACTOR times the measured rounding of the model.
# Above the largest limit a dtype is too coarse to distinguish a fault from rounding.
#
# A difference above the limit is examined in float64, or in float32 if the model is in half precision.  In float32 it
# can be rounding only up to _BOUND_FACTOR * sqrt(n) * d * u: n is the length of the longest sum, d the number of
# products in the model, u the unit roundoff.  (Errors of long sums grow with sqrt(n): Higham and Mary, SIAM J. Sci.
# Comput. 41, 2019; those of a sequence of products add up.)  A larger one is a leak, unless an example alone changes as
# much when its embeddings are perturbed by rounding, as at a tie between two experts.
_RESOLUTION = {torch.float64: 2e-5, torch.float32: 2e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}
_ROUNDING_FACTOR = 4.0
_LARGEST_HALF_LIMIT = 0.15
_LARGEST_FULL_LIMIT = 1e-3  # in float32 and float64
_BOUND_FACTOR = 16.0
_LARGEST_BOUND = 0.02
# In half precision, a row differs from float32 by at most twice the error of its examples alone.
HALF_FACTOR = 2.0
_HALF_DRAWS = 8  # of the tokens of a row; a leak is in all of them
_MOST_MESSAGE = 300  # characters
_HALF_TYPES = (torch.float16, torch.bfloat16)

_EXAMPLE_TOKENS = 11  # most tokens of the examples that measure the rounding
_DEFAULT_ROW_TOKENS = 1024  # used if neither the caller nor the model states a length
_LONGEST_DENSE_ROW = 2048  # tokens; a longer row would need too much memory for a T x T mask
# Exceptions that a model may raise for inputs that it does not support.
_MODEL_ERRORS = (
    AssertionError,
    AttributeError,
    ImportError,
    LookupError,
    RuntimeError,
    TypeError,
    ValueError,
)


def check_no_leak(
    model: Any,
    *,
    longest: Optional[int] = None,
    row: Optional[int] = None,
    forward: _Forward = logits_of,
    collator: Optional[Collator] = None,
    loss: Optional[Loss] = None,
    mean: str = "token",
    quick: bool = False,
    all_layers: bool = False,
) -> Probed:
    """Check that each example of a row gets the same logits, loss and gradients as alone.

    The probe builds rows of the training's length.  Their examples have one token, `longest` tokens, and lengths
    just below and above every number of the configuration (windows, chunks, ...).  Logits, losses and gradients are
    compared in training and evaluation mode, and with the model's own dropout, whose noise is fixed.  A model in
    half precision is probed in float32, in which rounding hides less, and also in half precision.  A difference
    that may be rounding is examined again in float64.  Then the inputs that carry the boundaries are broken on
    purpose, which must change the result.
    Weights, gradients, random state and mode of the model are unchanged afterwards.

    Args:
        model: The model to train; also in DistributedDataParallel, FSDP2, PEFT or compiled.  A module that is not of
            Transformers needs `forward`.
        longest: Tokens of the longest example in training, which determines the windows and chunks that matter.
            Default: the most tokens that the model supports; with more than 67 million parameters, 2,048 or twice the
            largest window.
        row: Tokens of a training row.  Default: `longest`.
        forward: Maps model and inputs to logits [1, tokens, vocabulary], if the training does not call the model as
            `take_step` does.
        collator: Maps examples (mappings with input_ids and labels) to inputs, in any order.  One that changes tokens
            at random is judged by its result with a fixed seed.  Default: `PaddingFreeCollator`.
        loss: Maps model and inputs to the trained mean loss.
        mean: "token" or "example": `loss` is the mean over tokens or over examples.
        quick: Probe only the row of the longest example and the row of the shortest ones.
        all_layers: In a model of more than 67 million parameters, also probe the layers that repeat the kind and the
            settings of another one.

    Returns:
        The rows, dtypes and time of the probe; `str()` returns one line.

    Raises:
        ValueError: The model does not keep examples apart (`Leak`).  The message names the first layer that differs,
            the inputs that it ignores, and the settings that may be the cause.  Or the model cannot be judged.
    """
    refuse_unfit(model)
    if mean not in ("token", "example"):
        raise ValueError(f'mean is {mean!r}; must be "token" or "example"')
    usual = usual_longest(model, row) if longest is None else None
    with contextlib.ExitStack() as stack:
        stack.enter_context(undisturbed(model))
        repeated = 0 if all_layers else stack.enter_context(one_of_each_kind(model))
        choose(model, _choice_for(model))
        probe = _Probe(model, longest or usual, TrainingCalls(collator, forward, loss, mean))
        probed = probe.check(row, quick)
    notes = list(probed.notes)
    if repeated:
        notes.append(f"{repeated} layers have the kind and the settings of a probed one")
    if usual:
        notes.append(f"examples of at most {usual:,} tokens; pass longest=N for longer ones")
    return probed._replace(notes=tuple(notes))


def _choice_for(model: Any) -> Choice:
    """Return the choice of a model; a module that is not of Transformers gets all boundaries."""
    if hasattr(base_of(model), "set_attn_implementation"):
        return choice_of(model)
    return Choice(attention_of(model), "cu_seq_lens")


def audit_batch(model: Any, inputs: Inputs) -> Probed:
    """Check that the examples of one batch get the same logits and gradients as alone.

    Args:
        model: As for `check_no_leak`.  A sharded model is not audited, because its ranks have different numbers of
            examples and would wait for one another.
        inputs: One row with labels and with position_ids that restart in each example.

    Returns:
        The row, the dtype and the time of the audit.

    Raises:
        ValueError: The examples are not kept apart, or the batch is not one row with position_ids.
    """
    refuse_unfit(model)
    if is_sharded(model):
        return Probed(notes=("the first batch is not audited, because the weights are sharded",))
    model_inputs = {name: value for name, value in inputs.items() if name != "num_items_in_batch"}
    examples = _split_row(model_inputs)
    with undisturbed(model):
        probe = _Probe(model, None, TrainingCalls(lambda _: model_inputs, logits_of))
        with probe.in_full_precision() as exact:
            return exact.check_batch(examples)


def _split_row(inputs: Inputs) -> List[Example]:
    """Split a row into its examples, at the restarts of position_ids."""
    if inputs["input_ids"].shape[0] != 1 or inputs.get("position_ids") is None:
        raise ValueError(
            "the batch is not one row with position_ids, which separate its examples; pass the inputs of inputs_for"
        )
    names = ("input_ids", "labels", "position_ids")
    row = {name: inputs[name][0].cpu().numpy() for name in names}
    _, lengths = sequences_in(row, "the batch")
    ends = np.cumsum(lengths)[:-1]
    pairs = zip(np.split(row["input_ids"], ends), np.split(row["labels"], ends))
    return [{"input_ids": ids, "labels": labels} for ids, labels in pairs]


@contextlib.contextmanager
def undisturbed(model: Any) -> Iterator[None]:
    """Restore modes, buffers, random states, attention and choice of the model after the block."""
    buffers = [(buffer, buffer.clone()) for buffer in model.buffers()]
    loaded = attention_of(model)
    choice = choose(model, None)
    choose(model, choice)
    gpus = {parameter.device.index or 0 for parameter in model.parameters() if parameter.is_cuda}
    with contextlib.ExitStack() as stack:
        stack.enter_context(kept_modes(model))
        stack.enter_context(torch.random.fork_rng(devices=sorted(gpus)))
        stack.enter_context(seeded())
        # Compiling for each probed shape would take minutes.
        stack.enter_context(stance("force_eager"))
        try:
            yield
        finally:
            with torch.no_grad():
                for buffer, before in buffers:
                    buffer.copy_(before)
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


class _TracedCall(NamedTuple):
    """A call of the model and the place of one example in its row."""

    call: Callable[[], Any]
    begin: int  # first token of the example
    length: int  # tokens of the example
    tokens: int  # tokens of the row


class _Probe:
    """A test of one model in its current dtype."""

    def __init__(self, model: Any, longest: Optional[int], training: TrainingCalls) -> None:
        self.compiled = model if is_compiled(model) else None
        self.model = unwrapped(model)
        self.training = training
        self.base = base_of(model)
        self.choice = choice_of(model)
        self.name = type(self.base).__name__
        config = text_config(model)
        padding = getattr(config, "pad_token_id", None)
        self.padding = padding if isinstance(padding, int) else None
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
        self.limit = 0.0  # set by `measure`

        # Rounding is measured with examples that are shorter than all windows.
        nearest = min((reach.tokens for reach in far if reach.tokens > 1), default=None)
        limits = [limit for limit in (longest, positions, nearest) if isinstance(limit, int)]
        self.length = min([_EXAMPLE_TOKENS, *limits])

        parameters = list(self.model.parameters())
        self.device = parameters[0].device
        self.draw = np.random.default_rng(0)
        # The reference: the library's attention; for ours and for sdpa it is sdpa or eager code, if the model has them.
        replaced = self.choice.attention in (NAME, "sdpa")
        self.references = ["sdpa", "eager"] if replaced else [self.choice.attention]
        types = self._first_call()
        for parameter in parameters:
            if parameter is not self.embedding.weight:  # `in_dtype` may convert only its outputs
                types.add(parameter.dtype)
        self.dtype = max(
            types & set(_RESOLUTION),
            key=lambda dtype: torch.finfo(dtype).eps,
            default=torch.float32,
        )

    @contextlib.contextmanager
    def converted(self, dtype: torch.dtype, embedding: Any = None) -> Iterator[_Probe]:
        """Convert the model in the block, as `in_dtype` does; yield its probe, with measured rounding."""
        with in_dtype(self.model, dtype, embedding):
            self.prepare()
            model = self.model if self.compiled is None else self.compiled
            probe = _Probe(model, self.longest, self.training)
            probe.measure()
            yield probe

    def in_full_precision(self) -> ContextManager[_Probe]:
        """Measure the rounding; then yield this probe, or that of a half-precision model in float32.

        It stays in half precision if there is an autocast inside `forward`.
        """
        self.measure()
        if self.dtype in _HALF_TYPES:
            return self.converted(torch.float32, self.embedding)
        return contextlib.nullcontext(self)

    # ---- calls of the model

    def tokens(self, length: int, draw: np.random.Generator) -> np.ndarray:
        """Draw the token ids of an example, int64 [length], without padding ids, which some models skip."""
        ids = draw.integers(1, self.vocabulary, length)
        ids[ids == self.padding] = 0 if self.padding else 1
        return ids

    def example(self, length: int) -> torch.Tensor:
        """Draw the token ids of the next example, int64 [length]."""
        return torch.from_numpy(self.tokens(length, self.draw))

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

        leaves = [module for module in self.model.modules() if not list(module.children())]
        handles = [module.register_forward_hook(note) for module in leaves]
        try:
            with torch.no_grad():
                logits = self._first_logits(ids)
        finally:
            for handle in handles:
                handle.remove()

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
        forward = self.training.forward
        self.has_plain_call = True
        is_own = forward is not logits_of
        what = "model(input_ids) fails even for one example"
        try:
            logits = self._try(lambda: logits_in(self.model(ids)), what)
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
        return self.plain(ids[0])

    def _try(self, call: Callable[[], Any], what: str) -> Any:
        """Return `call()`; raise its errors as a ValueError of one line."""
        try:
            return call()
        except Leak:
            raise
        except _MODEL_ERRORS as error:
            reason = one_line(error, 120) or type(error).__name__
            raise ValueError(f"{self.name}: {what}: {reason}") from None

    def _set_attention(self, attention: str) -> None:
        if attention_of(self.base) != attention:
            self.base.set_attn_implementation(attention)

    def prepare(self) -> None:
        """Set the attention of rows."""
        self._set_attention(self.choice.attention)

    def plain(self, *examples: torch.Tensor, attention: Optional[str] = None) -> torch.Tensor:
        """Compute the logits [examples, tokens, vocabulary] of examples of one length, without other examples."""
        if not self.has_plain_call:
            return torch.cat([self._logits_of_row(ids) for ids in examples])

        def call() -> torch.Tensor:
            self._set_attention(attention or self.references[0])
            logits = logits_in(self.model(torch.stack(examples).to(self.device)))
            if logits is None:
                raise ValueError("it returns no logits [examples, tokens, vocabulary]")
            return at_least_float32(logits)

        return self._try(call, "model(input_ids) fails even for one example")

    def collated(self, examples: Sequence[Example]) -> Inputs:
        """Return the inputs of a row, from the training's collator or from ours."""
        self.prepare()
        if self.training.collator is None:
            return inputs_for(self.model, padding_free_batch(examples))
        with seeded():
            return self.training.collator(examples)

    def _logits_of_row(self, ids: torch.Tensor) -> torch.Tensor:
        """Compute the logits of a row of one example, [1, tokens, vocabulary]."""
        example = {"input_ids": ids.cpu().numpy(), "labels": ids.cpu().numpy()}
        inputs = self.collated([example])
        (places,) = place([example], inputs).places
        logits = self._forward(inputs)
        return logits.reshape(1, -1, logits.shape[-1])[:, places.to(logits.device)]

    def _forward(self, inputs: Inputs) -> torch.Tensor:
        """Compute the logits of a row as the training does."""
        inputs = {name: value for name, value in inputs.items() if name != "labels"}
        what = f"does not accept {self.choice.boundaries} of a padding-free batch, {WAY_OUT}"
        return self._try(
            lambda: self.training.forward(self.model, to_device(inputs, self.device)), what
        )

    # ---- rounding

    def measure(self) -> None:
        """Set `limit`, the largest relative difference of logits that can be rounding in this dtype."""
        self.model.eval()
        first = self.example(self.length)
        last = self.example(self.length)
        with torch.no_grad():
            alone = torch.cat(self._alone(first, last))
            batches = [self.plain(first, last), self.plain(last, first).flip(0)]
        # In half precision, rounding may route single tokens to other experts.
        typical = self.dtype in _HALF_TYPES
        between_batches = max(largest_error(batch, alone, typical) for batch in batches)
        rounding = max(between_batches, self.implementations)
        largest = _LARGEST_HALF_LIMIT if self.dtype in _HALF_TYPES else _LARGEST_FULL_LIMIT
        self.limit = min(max(_RESOLUTION[self.dtype], _ROUNDING_FACTOR * rounding), largest)

    def rounding_bound(self, row: int) -> float:
        """Return the largest relative difference that can be rounding in float32, in a row of `row` tokens."""
        products = [parameter for parameter in self.model.parameters() if parameter.dim() > 1]
        longest_sum = max([row, *(parameter.shape[-1] for parameter in products)])
        unit = torch.finfo(torch.float32).eps / 2
        bound = _BOUND_FACTOR * math.sqrt(longest_sum) * len(products) * unit
        return min(max(bound, 4 * self.limit), _LARGEST_BOUND)

    def _alone(self, *examples: torch.Tensor) -> List[torch.Tensor]:
        """Compute the logits of each example alone, and choose the reference attention.

        eager code is the library's definition.  sdpa needs less memory and is used if its result is that of eager code:
        in some models it silently drops soft caps and sinks.
        """
        logits_by: Dict[str, List[torch.Tensor]] = {}
        refusal: Optional[ValueError] = None
        for attention in self.references:
            try:
                logits_by[attention] = [
                    self.plain(example, attention=attention) for example in examples
                ]
            except ValueError as error:
                refusal = refusal or error
        if not logits_by:
            assert refusal is not None
            raise refusal

        self.references = list(logits_by)
        self.implementations = 0.0
        if len(logits_by) > 1:
            pairs = zip(logits_by["sdpa"], logits_by["eager"])
            typical = self.dtype in _HALF_TYPES
            difference = max(largest_error(*pair, typical=typical) for pair in pairs)
            if difference > _RESOLUTION[self.dtype]:
                self.references = ["eager"]
            else:
                self.implementations = difference
        return logits_by[self.references[0]]

    # ---- rows of a training

    def check(self, row: Optional[int], quick: bool) -> Probed:
        """Probe rows of `row` tokens.  Raise Leak for the first fault that is not rounding."""
        limits = [limit for limit in (self.longest, self.positions) if limit]
        row_tokens = row or self.longest or min([_DEFAULT_ROW_TOKENS, *limits])
        is_dense = self.choice.boundaries != "cu_seq_lens"
        tokens = min(row_tokens, _LONGEST_DENSE_ROW) if is_dense else row_tokens
        longest = min([tokens, *limits])

        start = time.perf_counter()
        peak = PeakMemory()
        with self.in_full_precision() as exact:
            probed = exact._check_rows(tokens, longest, quick)
        if self.dtype in _HALF_TYPES:
            what = f"fails in {self.dtype}, {WAY_OUT}"
            self._try(lambda: self._check_own_type(tokens, longest, quick), what)
        types = tuple(dict.fromkeys([str(self.dtype), *probed.types]))
        notes = list(probed.notes)
        if quick:
            notes.append(f"quick: {QUICK_ROWS} rows only")
        if tokens < row_tokens:
            notes.append("not longer, because of the mask of all tokens by all tokens")
        seconds = time.perf_counter() - start
        return Probed(probed.rows, types, seconds, probed.update, peak.added() or 0, tuple(notes))

    def _check_rows(self, tokens: int, longest: int, quick: bool) -> Probed:
        """Compare rows with their examples alone, in the current dtype; then break their boundaries."""
        what = f"fails in a row of {tokens:,} tokens, {WAY_OUT}"
        if not hasattr(self.base, "set_attn_implementation") and self.training.forward is logits_of:
            what = "needs forward=, which maps model and inputs to logits"
        rows = RowProbe(self, tokens)
        probed: Probed = self._try(lambda: rows.run(rows.steps(longest, quick)), what)
        carriers = self._break_boundaries(longest)
        if not carriers:
            return probed
        return probed._replace(notes=(f"boundaries in {', '.join(carriers)}", *probed.notes))

    def check_batch(self, examples: List[Example]) -> Probed:
        """Compare the examples of an existing batch, with its tokens and labels, with each of them alone."""
        lengths = [len(example["input_ids"]) for example in examples]
        step = LayerStep("_compare", lengths, 0, examples=examples)
        rows = RowProbe(self, sum(lengths))
        probed: Probed = self._try(lambda: rows.run([step]), f"fails in the batch, {WAY_OUT}")
        return probed

    # ---- half precision

    def _check_own_type(self, tokens: int, longest: int, quick: bool) -> None:
        """Compare logits and gradients of rows in half precision, which may use other kernels.

        A wrong mask or position changes most tokens, rounding only some of them, so the typical difference decides.
        If it is above the limit, the error of the same example alone decides: its difference from float32.
        """
        numbers = lengths_of_model(self.model, longest)
        lengths_of_rows = row_lengths(tokens, longest, numbers, np.random.default_rng(0))
        rows = RowProbe(self, tokens)
        rows.parameters = []  # their gradients follow from those of the tokens
        self.model.eval()
        for lengths in lengths_of_rows[:QUICK_ROWS] if quick else lengths_of_rows:
            name = row_name(lengths)
            for verb, of_gradients in (("scores otherwise", False), ("has other gradients", True)):
                errors = dict.fromkeys(range(len(lengths)), 0.0)
                for _ in range(_HALF_DRAWS):
                    with rows.few_words():
                        errors = self._beyond_rounding(rows, lengths, list(errors), of_gradients)
                    if not errors:
                        break
                if errors:
                    worst = next(iter(errors))
                    what = f"{name}, example {worst} of {lengths[worst]:,} tokens {verb} than alone in {self.dtype}"
                    step = LayerStep("_compare", lengths, 0)
                    raise self._leak(Fault(what, errors[worst], worst, step))

    def _beyond_rounding(
        self, rows: RowProbe, lengths: List[int], suspects: List[int], of_gradients: bool
    ) -> Dict[int, float]:
        """Return the errors of the suspects that differ from float32 more in a row of new tokens than alone."""
        limit = self.limit * (GRADIENT_FACTOR if of_gradients else 1)
        drawn = [self.tokens(length, self.draw) for length in lengths]
        examples = [{"input_ids": ids, "labels": ids} for ids in drawn]
        examples, in_row = rows.values_in_row(examples, of_gradients)
        alone = rows.values_alone(examples, suspects, of_gradients)
        errors = {}
        for number, values in alone.items():
            error = largest_error(in_row[number], values, typical=True)
            if not error <= limit:
                errors[number] = error
        if not errors:
            return {}
        errors_in_row = {}
        errors_alone = {}
        with in_dtype(self.model, torch.float32, self.embedding):
            for number, exact in rows.values_alone(examples, list(errors), of_gradients).items():
                errors_in_row[number] = largest_error(in_row[number], exact, typical=True)
                errors_alone[number] = largest_error(alone[number], exact, typical=True)
        usual = float(np.quantile(list(errors_alone.values()), 0.75))
        beyond = {}
        for number, error in errors.items():
            expected = max(errors_alone[number], usual, limit / 2)
            if not errors_in_row[number] <= HALF_FACTOR * expected:
                beyond[number] = error
        return beyond

    # ---- verdicts

    def refuse_leak(self, faults: List[Fault]) -> None:
        """Raise Leak for the faults of one step, unless they are rounding: below its bound, and gone in float64."""
        is_certain = any(fault.is_certain or fault.error == math.inf for fault in faults)
        if is_certain or self.dtype == torch.float64:
            raise self._leak(faults[0])
        repeated = self._in_float64(faults[0])
        if repeated is not None:
            raise self._leak(repeated)

    def _in_float64(self, fault: Fault) -> Optional[Fault]:
        """Repeat a fault in float64, where rounding is smaller; return None if there is no fault."""
        assert fault.step is not None
        try:
            with self.converted(torch.float64) as probe:
                repeated = RowProbe(probe, sum(fault.step.lengths)).faults_of(fault.step)
        except _MODEL_ERRORS:
            return fault  # this device or this code does not support float64
        return repeated[0] if repeated else None

    def _break_boundaries(self, longest: int) -> Tuple[str, ...]:
        """Break the boundaries of a small row in each way; return the names of the inputs that carry them.

        Raise Leak if the result stays the same, bit by bit.
        """
        correct, others, names = self._cuts(longest)
        if not names or not self._mixes_tokens(longest):
            return ()
        self.model.eval()
        with torch.no_grad():
            expected = self._forward(correct)
            for kind, inputs in broken_inputs(correct, others, names):
                try:
                    # A model may remember the boundaries of the batch before.
                    self._forward(correct)
                    actual = self._forward(inputs)
                except ValueError:
                    continue
                if torch.equal(actual, expected):
                    keys = ", ".join(names)
                    text = f"{self.name}: no logit changes if {keys} are {kind}"
                    layer = self._mixing_layer()
                    raise Leak(
                        f"{text}; {layer} ignores them, so pass it the boundaries of the batch"
                    )
        return tuple(names)

    def _mixing_layer(self) -> str:
        """Name the first layer in which a token depends on an earlier one."""
        ids = self.example(MOST_TOKENS)
        whole = _TracedCall(lambda: self.plain(ids), 1, len(ids) - 1, len(ids))
        rest = _TracedCall(lambda: self.plain(ids[1:]), 0, len(ids) - 1, len(ids) - 1)
        return self._first_layer(whole, rest) or "the model"

    def _cuts(self, longest: int) -> Tuple[Inputs, Dict[str, Inputs], List[str]]:
        """Collate one stream with several cuts; also return the names of the inputs that carry the boundaries."""
        stream = self.tokens(2 * MOST_TOKENS, np.random.default_rng(0))

        def collate(lengths: List[int]) -> Inputs:
            ends = np.cumsum(lengths)
            parts = np.split(stream[: ends[-1]], ends[:-1])
            return self.collated([{"input_ids": ids, "labels": ids} for ids in parts])

        return collate_cuts(collate, longest)

    def _mixes_tokens(self, longest: int) -> bool:
        """Return True if the first token of an example affects the others."""
        if longest < 2:
            return False
        first = self.example(min(longest, _EXAMPLE_TOKENS))
        second = first.clone()
        second[0] = first[0] % 2 + 1
        if second[0] == first[0]:
            second[0] = 0
        with torch.no_grad():
            return not torch.equal(self.plain(first)[:, 1:], self.plain(second)[:, 1:])

    def _leak(self, fault: Fault) -> Leak:
        """Describe a fault: the first layer that differs, and the settings that may be the cause."""
        layer = ""
        advice = [f"; {WAY_OUT}"]
        if hasattr(self.base, "set_attn_implementation"):
            advice.insert(0, "; call use_padding_free(model)")
        step = fault.step
        if step is not None and step.examples is None and step.method != "_auxiliary":
            number = max(fault.number, 0)
            lengths = step.lengths
            rows = RowProbe(self, sum(lengths))
            examples = rows.examples_of(step)
            ids = torch.as_tensor(examples[number]["input_ids"])
            length = lengths[number]
            begin = sum(lengths[:number])
            in_row = _TracedCall(
                lambda: rows.values_in_row(examples, False), begin, length, sum(lengths)
            )
            alone = _TracedCall(lambda: self.plain(ids), 0, length, length)
            with rows.few_words():
                cause = self._first_layer(in_row, alone)
            layer = f", first in {cause}" if cause else ""
            # Stretched positions change the whole row, so the longest example decides.
            passed = [reach for reach in self.far if reach.tokens < max(lengths)]
            if passed:
                settings = ", ".join(f"{reach.setting} is {reach.tokens}" for reach in passed)
                layer += f" ({settings})"
                most = passed[0].tokens
                advice.insert(0, f"; pass longest=N if your examples have at most {most} tokens")
            elif layer:
                with contextlib.suppress(ValueError):
                    advice.insert(0, self._ignored_inputs())
        size = "not a number" if fault.error == math.inf else f"{fault.error:.1e} of the largest"
        text = f"{self.name}: {fault.what} ({size}){layer}"
        for words in advice:
            if len(text) + len(words) <= _MOST_MESSAGE:
                text += words
        return Leak(one_line(text, _MOST_MESSAGE), fault.first)

    # ---- the layer at fault

    def _first_layer(self, in_row: _TracedCall, alone: _TracedCall) -> str:
        """Name the module at which an example of a row begins to differ from the example alone: "NAME (CLASS)".

        It is the first finished module with a different output and the same input.
        """
        try:
            row_values = _trace(self.model, in_row)
            alone_values = _trace(self.model, alone)
        except _MODEL_ERRORS:
            return ""

        def differs(name: str, which: int) -> bool:
            actual = row_values[name][which]
            expected = alone_values[name][which]
            if actual is None or expected is None or actual.shape != expected.shape:
                return which == 0  # an unknown input counts as different
            return largest_error(actual, expected) > self.limit

        different = [name for name in row_values if name in alone_values and differs(name, 1)]
        causes = [name for name in different if not differs(name, 0)] or different
        if not causes:
            return ""
        return f"{causes[0]} ({type(self.model.get_submodule(causes[0])).__name__})"

    def _ignored_inputs(self) -> str:
        """Name the inputs with boundaries that change no logit if they are broken, or else all of them."""
        correct, others, names = self._cuts(self.longest or MOST_TOKENS)
        if not others:
            return ""
        if not names:
            return ", and the batch carries no boundaries"
        ignored = []
        with torch.no_grad():
            expected = self._forward(correct)
            for name in names:
                with contextlib.suppress(ValueError):
                    changed = {**correct, name: next(iter(others.values())).get(name)}
                    if torch.equal(self._forward(changed), expected):
                        ignored.append(name)
        if not ignored:
            return f", despite {', '.join(names)}"
        return f", which ignores {', '.join(ignored)}"


_Traced = Dict[str, Tuple[Optional[torch.Tensor], Optional[torch.Tensor]]]


def _trace(model: Any, traced: _TracedCall) -> _Traced:
    """Record the input and the output of each module for one example, [1, tokens, ...], in the order of finishing."""
    values: _Traced = {}

    def keep(name: str, module: Any, arguments: Any, named: Dict[str, Any], output: Any) -> None:
        if name not in values:
            hidden = named.get("hidden_states", named.get("inputs_embeds", named.get("input_ids")))
            values[name] = _part(arguments or hidden, traced), _part(output, traced)

    handles = []
    for name, module in model.named_modules():
        if name:
            handles.append(module.register_forward_hook(partial(keep, name), with_kwargs=True))
    try:
        with torch.no_grad():
            traced.call()
    finally:
        for handle in handles:
            handle.remove()
    return values


def _part(value: Any, traced: _TracedCall) -> Optional[torch.Tensor]:
    """Cut the example out of a value of the whole row, if it has an axis of tokens."""
    while isinstance(value, (tuple, list)) and value:
        value = value[0]
    if not torch.is_tensor(value):
        return None
    tokens = traced.tokens
    span = slice(traced.begin, traced.begin + traced.length)
    if value.dim() >= 2 and value.shape[:2] == (1, tokens):
        return value[:, span].double().reshape(1, traced.length, -1)
    if value.dim() >= 3 and len(value) == 1 and value.shape[-1] == tokens:
        return value.movedim(-1, 1)[:, span].double().flatten(2)
    if value.dim() == 2 and len(value) == tokens:
        return value[None, span].double()
    return None
