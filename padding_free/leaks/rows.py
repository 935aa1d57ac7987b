"""Rows of a training, compared with each of their examples alone: logits, losses, gradients, auxiliary losses.

A row has the length of a training batch.  Its examples have one token, the length of the longest example, and lengths
on both sides of every number that may matter.  So a fault that begins late is in one of these rows: late in the row,
late in an example, or after many examples.
"""

from __future__ import annotations

import contextlib
import itertools
import math
import time
from functools import partial
from typing import (
    Any,
    Callable,
    ContextManager,
    Dict,
    Iterable,
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
from torch.nn import functional as F

from pack_data.batching.collators import padding_free_batch
from padding_free.collators import Inputs, attends_both_ways, inputs_for, to_device
from padding_free.leaks.placing import Example, PlacedRow, place
from padding_free.leaks.randomness import (
    has_dropout,
    seeded,
    with_fixed_noise,
    without_dropout,
)
from padding_free.losses import (
    IGNORED,
    OutputLayer,
    at_least_float32,
    cross_entropy_sum,
    logits_of,
    output_layer,
    supervised,
)
from padding_free.models import FirstDifference, lengths_of_model

_MOST_EXAMPLES = 4096  # of a row of short examples, or one for each 16 tokens of the row
_KERNEL_BLOCKS = (16, 32, 64, 128, 256)  # tokens that attention kernels process at once
_MOST_ROWS_OF_EDGES = 4  # rows, the first two included
_SHORT_ROW = 4096  # tokens; a row up to here is probed a second time, with other boundaries
_LAST_LENGTHS = (1, 2)  # of the last examples of each row, so that a boundary is late in the row
QUICK_ROWS = 2  # rows of a quick probe
_MOST_GRAPHS = 256  # of a compiled model, for the shapes of all rows
_PERTURBATIONS = 8  # of an example, from one step of float32 to 2**7
_EXPLAINED = 2.0  # largest difference over the effect of a perturbation that explains it
_AUXILIARY_LIMIT = 1e-4  # relative error of an auxiliary loss; the counts in it are whole numbers
_CERTAIN_LOSS = 0.01  # relative error of a loss, which rounding does not reach
GRADIENT_FACTOR = 5.0  # limit of gradients over the limit of logits

# Most logits of a row: 16 MiB in float32.  A larger vocabulary is represented by evenly spread words.  The output layer
# works on each token by itself, so a leak is in its inputs.
_MOST_LOGITS = 2**22

Collator = Callable[[Sequence[Example]], Inputs]
Loss = Callable[[Any, Inputs], torch.Tensor]


class TrainingCalls(NamedTuple):
    """The calls by which a training feeds its model."""

    collator: Optional[Collator]  # None: ours
    forward: Callable[[Any, Inputs], torch.Tensor]  # logits [rows, tokens, vocabulary]
    loss: Optional[Loss] = None  # the trained mean; None: the mean over the labels
    mean: str = "token"  # `loss` is a mean over each "token" or each "example"


class Probed(NamedTuple):
    """The probed rows and their cost."""

    rows: Tuple[Tuple[int, int], ...] = ()  # tokens and examples of each
    types: Tuple[str, ...] = ()
    seconds: float = 0.0
    update: float = 0.0  # seconds of one forward and backward pass of the largest row
    peak: int = 0  # bytes of additional memory of the process or the GPU
    notes: Tuple[str, ...] = ()

    def __str__(self) -> str:
        rows = [f"{tokens:,} tokens in {examples:,} examples" for tokens, examples in self.rows]
        shapes = ", ".join(rows)
        types = " and ".join(self.types)
        text = f"probed rows of {shapes or 'two short examples'}, {types}: {self.seconds:.1f} s"
        if self.update:
            updates = self.seconds / self.update
            mebibytes = self.peak / 2**20
            text += f", {updates:.1f} updates, {mebibytes:,.0f} MiB"
        return "; ".join([text, *self.notes])


class LayerStep(NamedTuple):
    """One comparison, which can be repeated in another dtype."""

    method: str  # of RowProbe; its arguments are the examples
    lengths: Sequence[int]  # of the examples
    seed: int
    shares_prefix: bool = False  # the examples begin with the same tokens
    examples: Optional[List[Example]] = None  # of an existing batch, instead of random ones


class Fault(NamedTuple):
    """A difference above its limit."""

    what: str
    error: float
    number: int = -1  # of the example
    step: Optional[LayerStep] = None
    first: Optional[FirstDifference] = None
    is_certain: bool = False  # too large for rounding


# ---- lengths


def row_lengths(
    row: int,
    longest: int,
    numbers: Sequence[int],
    draw: np.random.Generator,
) -> List[List[int]]:
    """Choose the lengths of the examples of each row to probe, the most important row first.

    Args:
        row: Most tokens of a row.
        longest: Most tokens of an example.
        numbers: Numbers of the model that may be lengths.
        draw: Random generator.
    """
    longest = min(longest, row)
    last = [min(length, longest) for length in _LAST_LENGTHS]
    near = set(_KERNEL_BLOCKS)
    for number in (*_KERNEL_BLOCKS, *numbers):
        near.update((number - 1, number, number + 1))
    possible = sorted(length for length in near if 1 < length <= longest)
    edges = draw.permutation(possible).astype(int).tolist()
    most = row - sum(_LAST_LENGTHS)  # tokens before the last examples

    # The longest example, not at the beginning of the row.
    far = min(longest, max(row - 1, 1))
    first = [far]
    if row > far:
        first.insert(0, min(3, row - far))
    rows = [_filled(first, row, longest, edges, draw)]

    # Many short examples.
    short = np.resize([1, 1, 3, 1, 2, 1, 1, 2], max(_MOST_EXAMPLES, row // 16))
    fitting = short[short.cumsum() <= most]
    lengths = np.minimum(fitting, longest).tolist()
    rows.append((lengths or [1]) + last)

    # The edges that fit.
    remaining = [length for length in edges if length < most]
    while remaining and len(rows) < _MOST_ROWS_OF_EDGES:
        taken: List[int] = []
        for length in list(remaining):
            if sum(taken) + length <= most:
                taken.append(length)
                remaining.remove(length)
        rows.append(taken + last)

    # Other boundaries: the first row cannot show a fault that begins at one of its boundaries.
    if row <= _SHORT_ROW:
        few = draw.permutation(longest)[:3] + 1
        second = _filled([min(2, row)], row, longest, few.tolist(), draw)
        rows.append(second[::-1])
    return rows


def _filled(
    lengths: List[int],
    row: int,
    longest: int,
    edges: List[int],
    draw: np.random.Generator,
) -> List[int]:
    """Fill a row to exactly `row` tokens with examples of one token, of the lengths `edges` and of random lengths."""
    filled = list(lengths)
    last = [min(length, longest) for length in _LAST_LENGTHS]
    free = row - sum(filled) - sum(last)
    random_lengths = (int(draw.integers(1, longest + 1)) for _ in itertools.count())
    for length in itertools.chain(edges, random_lengths):
        if free <= 0:
            break
        if free > 1 and len(filled) % 3 == 0:
            filled.append(1)
            free -= 1
        filled.append(max(1, min(length, free)))
        free -= filled[-1]
    if free < 0:
        last = [1] * (free + sum(last))
    return filled + last


# ---- a row and its examples


def _lengths(examples: Sequence[Example]) -> List[int]:
    return [len(example["input_ids"]) for example in examples]


def _locate(lengths: Sequence[int], index: int) -> Tuple[int, int]:
    """Return the example that has token `index` of all examples, and the place of the token in it."""
    ends = np.cumsum(lengths)
    number = int(np.searchsorted(ends, index, side="right"))
    begin = ends[number] - lengths[number]
    return number, int(index - begin)


def _by_length(examples: Sequence[Example], numbers: Iterable[int]) -> Dict[int, List[int]]:
    """Group the numbers of examples by the tokens of these examples."""
    groups: Dict[int, List[int]] = {}
    for number in numbers:
        groups.setdefault(len(examples[number]["input_ids"]), []).append(number)
    return groups


def row_name(lengths: Sequence[int]) -> str:
    """Describe a row with examples of these lengths."""
    return f"in a row of {sum(lengths):,} tokens and {len(lengths):,} examples"


def _targets(example: Example) -> torch.Tensor:
    """Return the label that each token predicts, int64 [tokens]; the last token predicts none."""
    labels = np.asarray(example.get("labels", example["input_ids"]))
    return F.pad(torch.as_tensor(labels)[1:].long(), (0, 1), value=IGNORED)


# ---- differences


def _largest(values: torch.Tensor) -> float:
    if not values.numel():
        return 0.0
    lowest, highest = values.aminmax()  # without a copy of the values
    return max(float(highest), -float(lowest))


def _scale_of(values: torch.Tensor) -> float:
    """Return the largest magnitude, which differences are relative to."""
    return max(_largest(values), 1e-30)


def _token_errors(
    actual: torch.Tensor,
    expected: torch.Tensor,
    scale: float,
) -> torch.Tensor:
    """Return the largest difference of each token over `scale`, float64 [...] of [..., width]; inf if not a number."""
    errors = []
    most_tokens = max(1, _MOST_LOGITS // max(1, actual.shape[-1]))
    flat = [values.flatten(0, -2).split(most_tokens) for values in (actual, expected)]
    for actual_block, expected_block in zip(*flat):
        difference = (at_least_float32(actual_block) - at_least_float32(expected_block)).abs_()
        errors.append(difference.amax(-1).double())
    relative = torch.cat(errors).view(actual.shape[:-1]) / scale
    return relative.nan_to_num(nan=math.inf).cpu()


def largest_error(actual: torch.Tensor, expected: torch.Tensor, typical: bool = False) -> float:
    """Return the largest difference of two tensors [..., tokens, width], relative to the largest expected value.

    The result is infinite if a value is not finite.  typical: ignore the worst quarter of the tokens of each example.
    """
    errors = _token_errors(actual, expected, _scale_of(expected))
    if typical:
        errors = torch.quantile(errors, 0.75, dim=-1)
    return float(errors.nan_to_num(nan=math.inf).max())


def _weight_error(actual: Sequence[torch.Tensor], expected: Sequence[torch.Tensor]) -> float:
    """Return the largest relative difference of the gradient of a parameter.

    A parameter with small gradients is compared with a twentieth of the largest gradient of all parameters.
    """
    largest = max(map(_largest, [*actual, *expected]), default=0.0)
    worst = 0.0
    for row_gradient, alone_gradient in zip(actual, expected):
        scale = max(_largest(alone_gradient), 0.05 * largest, 1e-30)
        error = _largest(row_gradient - alone_gradient) / scale
        worst = max(worst, math.inf if math.isnan(error) else error)
    return worst


def _gradients_of(loss: torch.Tensor, inputs: Sequence[torch.Tensor]) -> List[torch.Tensor]:
    """Compute the gradient at each input, zeros at inputs that are not used."""
    gradients = list(torch.autograd.grad(loss, inputs, allow_unused=True))
    for number, gradient in enumerate(gradients):
        if gradient is None:
            gradients[number] = torch.zeros_like(inputs[number])
    return gradients


def _relative(value: float, expected: float) -> float:
    scale = max(abs(expected), 1e-30)
    error = abs(value - expected) / scale
    return math.inf if math.isnan(error) else error


class _Result(NamedTuple):
    """Results of some examples."""

    values: torch.Tensor  # logits [tokens, words]
    gradients: torch.Tensor  # at the embeddings, [tokens, width]
    weights: List[torch.Tensor]  # gradients of the parameters


class _Errors(NamedTuple):
    """Differences of a row from its examples alone, relative to the largest value."""

    logits: torch.Tensor  # float64 [tokens of all examples]
    gradients: torch.Tensor  # at the embeddings, the same
    weights: float  # of the gradients of the parameters


class RowProbe:
    """The comparison of rows of one model, in its current dtype.

    Args:
        probe: The model with its plain calls, its calls by rows, and the limit of a difference of logits.
        row: Tokens of the largest row.
    """

    def __init__(self, probe: Any, row: int) -> None:
        self.probe = probe
        self.model = probe.model
        self.training = probe.training
        self.limit = float(probe.limit)
        self.causal = not attends_both_ways(self.model)
        self.row = row
        self.output: Optional[OutputLayer] = None
        if row * probe.vocabulary > _MOST_LOGITS and self.training.forward is logits_of:
            self.output = output_layer(self.model)
        # The gradients of the output layer and of the embeddings follow from those of the tokens.
        left_out: Set[int] = set()
        weight = probe.embedding.weight
        if self.output is not None:
            left_out = {id(self.output.layer.weight), id(weight)}
        if weight.dtype != probe.dtype:
            left_out.add(id(weight))
        self.parameters = []  # trained ones that are not sharded
        for parameter in self.model.parameters():
            is_plain = parameter.requires_grad and type(parameter.data) is torch.Tensor
            if is_plain and id(parameter) not in left_out:
                self.parameters.append(parameter)
        self.update = 0.0  # seconds of a forward and backward pass of the largest row
        self.has_auxiliary_loss = False
        self.draws = False  # the collator changes tokens at random

    # ---- steps

    def run(self, steps: Sequence[LayerStep]) -> Probed:
        """Probe rows; return their shapes."""
        start = time.perf_counter()
        shapes: Dict[Tuple[int, int], None] = {}  # in their order
        rounding = 0.0
        for step in steps:
            if step.method == "_auxiliary" and not self.has_auxiliary_loss:
                continue
            faults = self.faults_of(step)
            if faults:
                self.probe.refuse_leak(faults)
                rounding = max(rounding, *(fault.error for fault in faults))
            shapes[sum(step.lengths), len(step.lengths)] = None
        notes = []
        if rounding:
            notes.append(f"differences up to {rounding:.1e} were examined in torch.float64")
        seconds = time.perf_counter() - start
        types = (str(self.probe.dtype),)
        return Probed(tuple(shapes), types, seconds, self.update, notes=tuple(notes))

    def steps(self, longest: int, quick: bool) -> List[LayerStep]:
        """List the steps, the most important first.

        quick: only those of the row of the longest example and of the row of short examples.
        """
        numbers = lengths_of_model(self.model, min(longest, self.row))
        rows = row_lengths(self.row, longest, numbers, np.random.default_rng(0))
        if quick:
            rows = rows[:QUICK_ROWS]
        methods = ["_compare"]
        if self.training.collator is not None or self.training.loss is not None:
            methods.append("_loss")
        if self.probe.compiled is not None:
            methods.append("_compare_compiled")
        steps: List[LayerStep] = []
        for number, lengths in enumerate(rows):
            for method in methods:
                steps.append(LayerStep(method, lengths, len(steps), shares_prefix=number % 3 != 0))

        # Equal lengths, for which a plain batch has no padding.
        single_tokens = [1] * min(_MOST_EXAMPLES, self.row)
        longer = [min(16, longest)] * max(1, self.row // 16)
        for lengths in (single_tokens, longer):
            steps.append(LayerStep("_auxiliary", lengths, len(steps)))
        return steps

    def faults_of(self, step: LayerStep) -> List[Fault]:
        """Return the faults of one step, each with the step that repeats it."""
        examples = step.examples or self.examples_of(step)
        # The caller's loss needs the logits of all words.
        words = contextlib.nullcontext() if step.method == "_loss" else self.few_words()
        with words:
            faults: List[Fault] = getattr(self, step.method)(examples)
        return [fault._replace(step=step) for fault in faults]

    def few_words(self) -> ContextManager:
        """Let the model return the logits of only a few words in the block, if those of all words are too many."""
        if self.output is None:
            return contextlib.nullcontext()
        return self.output._of_few_words(max(2, _MOST_LOGITS // self.row))

    # ---- examples

    def examples_of(self, step: LayerStep) -> List[Example]:
        """Draw examples of random tokens; a third of them have a prompt, which is not predicted."""
        draw = np.random.default_rng(step.seed)
        prefix = self.probe.tokens(max(step.lengths), draw)
        shared: Dict[Tuple[int, bool], Example] = {}
        examples = []
        for number, length in enumerate(step.lengths):
            has_prompt = number % 3 == 1 and length > 3
            kind = (length, has_prompt)
            # The loss of equal examples is computed only once.
            if kind not in shared or step.method != "_loss":
                ids = self.probe.tokens(length, draw)
                if step.shares_prefix:
                    ids[: length * 3 // 4] = prefix[: length * 3 // 4]
                shared[kind] = self._labelled(ids, has_prompt)
            examples.append(shared[kind])
        return examples

    def _labelled(self, ids: np.ndarray, has_prompt: bool) -> Example:
        labels = ids.copy()
        # Some collators of masked models keep the label of a first token; causal ones and others leave it out.
        first_predicted = len(ids) // 2 if has_prompt else int(not self.causal)
        labels[:first_predicted] = IGNORED
        return {"input_ids": ids, "labels": labels}

    def _row(self, examples: Sequence[Example]) -> PlacedRow:
        """Collate examples; a collator that draws at random gets the same seed each time."""
        row = place(examples, to_device(self.probe.collated(examples), self.probe.device))
        self.draws |= row.is_changed
        return row

    def _row_of_one(self, example: Example) -> PlacedRow:
        """Collate one example; if the collator draws at random, use ours, which keeps the tokens."""
        if not self.draws:
            row = self._row([example])
            if not row.is_changed:
                return row
        batch = padding_free_batch([example], causal=self.causal)
        inputs = to_device(inputs_for(self.model, batch), self.probe.device)
        return PlacedRow(inputs, [example], [torch.arange(len(example["input_ids"]))])

    def _predictions(self, example: Example) -> int:
        labels = np.asarray(example.get("labels", example["input_ids"]))
        return int((labels[int(self.causal) :] != IGNORED).sum())

    # ---- logits and gradients

    def _compare(self, examples: List[Example]) -> List[Fault]:
        """Compare a row, in training and in evaluation mode, with each example alone."""
        row = self._row(examples)
        self.model.eval()
        with torch.no_grad(), self._auxiliary_losses() as losses:
            evaluated = self._row_values(row)
        self.has_auxiliary_loss = any(map(torch.is_tensor, losses))
        with without_dropout(self.model):
            start = time.perf_counter()
            trained = self._result(row)
            self.update = max(self.update, time.perf_counter() - start)
            is_random = self._is_random(row, trained, evaluated)

        # The gradients of random training are those of evaluation here, and then those with fixed noise.
        judged = self._result(row) if is_random else trained
        faults = self._compare_alone(row, judged, evaluated)
        if is_random or has_dropout(self.model):
            with with_fixed_noise(self.model, trained.gradients.shape[-1]):
                noisy = self._result(row)
                for fault in self._compare_alone(row, noisy, noisy.values):
                    text = f"in training with fixed noise, {fault.what}"
                    faults.append(fault._replace(what=text))
        name = row_name(_lengths(row.examples))
        return [fault._replace(what=f"{name}, {fault.what}") for fault in faults]

    def _is_random(self, row: PlacedRow, trained: _Result, evaluated: torch.Tensor) -> bool:
        """Return True if training differs from evaluation, and from itself with another seed."""
        if largest_error(trained.values, evaluated) <= self.limit:
            return False
        with seeded(1), torch.no_grad():
            again = self._row_values(row)
        return largest_error(again, trained.values) > 1e-6

    def _plain(self, examples: Sequence[Example]) -> torch.Tensor:
        """Compute the logits of a plain batch of examples of one length, [tokens, words]."""
        ids = [torch.as_tensor(example["input_ids"]) for example in examples]
        logits: torch.Tensor = self.probe.plain(*ids)
        return logits.flatten(0, 1)

    def _row_values(self, row: PlacedRow, model: Any = None) -> torch.Tensor:
        """Compute the logits of all examples of a row, [tokens, words]."""
        self.probe.prepare()
        inputs = {name: value for name, value in row.inputs.items() if name != "labels"}
        model = self.model if model is None else model
        call = partial(self.training.forward, model, inputs)
        return _of_examples(call(), row.places)

    def _result(self, row: PlacedRow) -> _Result:
        """Compute a row with gradients."""
        result = self._with_gradients(partial(self._row_values, row), row.examples)
        return result._replace(gradients=_of_examples(result.gradients, row.places))

    def _alone(self, examples: Sequence[Example]) -> _Result:
        """Compute examples of one length: in a plain batch, or each as a row if the model has no plain call."""
        if self.probe.has_plain_call:
            return self._with_gradients(partial(self._plain, examples), examples)
        results = [self._result(self._row_of_one(example)) for example in examples]
        weights = [sum(gradients) for gradients in zip(*(result.weights for result in results))]
        values = torch.cat([result.values for result in results])
        return _Result(values, torch.cat([result.gradients for result in results]), weights)

    def _with_gradients(
        self, call: Callable[[], torch.Tensor], examples: Sequence[Example]
    ) -> _Result:
        """Compute logits by a call, the gradients at the embeddings in it, and those of the parameters."""
        with torch.enable_grad(), _embeddings_of(self.probe.embedding) as embeddings:
            values = call()
            loss = self._summed_loss(values, examples)
            sources = [embeddings[0], *self.parameters]
            gradients, *weights = _gradients_of(loss, sources)
        return _Result(values.detach(), gradients.flatten(0, -2), weights)

    def _summed_loss(self, logits: torch.Tensor, examples: Sequence[Example]) -> torch.Tensor:
        """Sum the cross-entropies of examples; logits: [tokens of all examples, words]."""
        targets = torch.cat([_targets(example) for example in examples]).to(logits.device)
        # With only a few words, each stands for several labels.
        targets = torch.where(targets == IGNORED, targets, targets % logits.shape[-1])
        return F.cross_entropy(logits, targets, ignore_index=IGNORED, reduction="sum")

    def _auxiliary_losses(self) -> Any:
        return kept_outputs(self.probe.base, lambda output: getattr(output, "aux_loss", None))

    # ---- logits or gradients of each example, in half precision

    def values_in_row(
        self, examples: Sequence[Example], of_gradients: bool
    ) -> Tuple[List[Example], List[torch.Tensor]]:
        """Compute the logits of each example, or its gradient at the embeddings, [1, its tokens, width].

        Also return the examples: those of the batch, if the collator changes them.
        """
        row = self._row(examples)
        with self._mode_of(of_gradients):
            values = self._result(row).gradients if of_gradients else self._row_values(row)
        return row.examples, list(values[None].split(_lengths(row.examples), dim=1))

    def values_alone(
        self, examples: Sequence[Example], numbers: Sequence[int], of_gradients: bool
    ) -> Dict[int, torch.Tensor]:
        """Compute the same of some examples, each alone."""
        alone: Dict[int, torch.Tensor] = {}
        for length, same in _by_length(examples, numbers).items():
            batch = [examples[number] for number in same]
            with self._mode_of(of_gradients):
                values = self._alone(batch).gradients if of_gradients else self._plain(batch)
            alone.update(zip(same, values[None].split(length, dim=1)))
        return alone

    def _mode_of(self, of_gradients: bool) -> ContextManager:
        if of_gradients:
            return with_fixed_noise(self.model, self.probe.embedding.weight.shape[-1])
        return torch.no_grad()

    # ---- a row and its examples alone

    def _compare_alone(
        self,
        row: PlacedRow,
        trained: _Result,
        evaluated: torch.Tensor,
    ) -> List[Fault]:
        """Compare a row with its examples alone, in the current mode."""
        scales = (_scale_of(evaluated), _scale_of(trained.gradients))
        errors = self._errors_of_examples(row, trained, evaluated, scales)
        training_error = largest_error(trained.values, evaluated)

        bound = self.probe.rounding_bound(self.row)
        is_above = (errors.logits > bound) | (errors.gradients > GRADIENT_FACTOR * bound)
        is_any_above = bool(is_above.any())
        is_certain = is_any_above and not self._is_tie(row, errors, is_above, scales)
        weights_are_certain = errors.weights > GRADIENT_FACTOR * bound and not is_any_above

        logit_fault = self._worst_example(row, errors.logits, "scores otherwise than alone")
        first = self._first_difference(row, errors.logits)
        training_text = "evaluation differs from training"
        gradient_fault = self._worst_example(
            row, errors.gradients, "has other gradients than alone"
        )
        weight_text = "the gradients of the weights are not those of its examples"
        return [
            *self._above_limit(
                logit_fault._replace(first=first, is_certain=is_certain),
                Fault(training_text, training_error, is_certain=training_error > bound),
            ),
            *self._above_limit(
                gradient_fault._replace(is_certain=is_certain),
                Fault(weight_text, errors.weights, is_certain=weights_are_certain),
                factor=GRADIENT_FACTOR,
            ),
        ]

    def _errors_of_examples(
        self,
        row: PlacedRow,
        trained: _Result,
        evaluated: torch.Tensor,
        scales: Tuple[float, float],
    ) -> _Errors:
        """Compute the errors of a row; its examples of one length are computed in one plain batch."""
        logits = torch.zeros(len(evaluated), dtype=torch.float64)
        gradients = torch.zeros(len(evaluated), dtype=torch.float64)
        weights = [torch.zeros_like(parameter) for parameter in self.parameters]
        begins = np.cumsum(_lengths(row.examples)) - _lengths(row.examples)
        for length, numbers in _by_length(row.examples, range(len(row.examples))).items():
            alone = self._alone([row.examples[number] for number in numbers])
            tokens = torch.as_tensor(begins[numbers, None] + np.arange(length)).flatten()
            on_device = tokens.to(evaluated.device)
            logits[tokens] = _token_errors(evaluated[on_device], alone.values, scales[0])
            in_row = trained.gradients[on_device]
            gradients[tokens] = _token_errors(in_row, alone.gradients, scales[1])
            for total, gradient in zip(weights, alone.weights):
                total += gradient
        return _Errors(logits, gradients, _weight_error(trained.weights, weights))

    def _is_tie(
        self,
        row: PlacedRow,
        errors: _Errors,
        is_above: torch.Tensor,
        scales: Tuple[float, float],
    ) -> bool:
        """Return True if rounding alone explains all errors above its bound.

        It may send a token to another expert.  A perturbation of the example alone then has the same effect.
        """
        begin = 0
        for example in row.examples:
            tokens = slice(begin, begin + len(example["input_ids"]))
            begin = tokens.stop
            if not bool(is_above[tokens].any()):
                continue
            logits, gradients = self._effect_of_rounding(example, scales)
            is_explained = errors.logits[tokens] <= _EXPLAINED * logits
            is_explained &= errors.gradients[tokens] <= _EXPLAINED * gradients
            if bool((is_above[tokens] & ~is_explained).any()):
                return False
        return True

    def _effect_of_rounding(
        self, example: Example, scales: Tuple[float, float]
    ) -> Tuple[torch.Tensor, torch.Tensor]:
        """Return the largest changes of an example alone by perturbed embeddings, float64 [tokens] each."""
        alone = self._alone([example])
        tokens = len(example["input_ids"])
        # Below the limits, no error needs an explanation.
        logits = torch.full((tokens,), self.limit, dtype=torch.float64)
        gradients = torch.full((tokens,), self.limit * GRADIENT_FACTOR, dtype=torch.float64)
        for exponent in range(_PERTURBATIONS):
            size = torch.finfo(torch.float32).eps * 2**exponent

            def perturb(output: torch.Tensor, size: float = size) -> torch.Tensor:
                return output * (1 + size * torch.randn_like(output))

            with seeded(exponent), kept_outputs(self.probe.embedding, perturb):
                other = self._alone([example])
            changed = _token_errors(other.values, alone.values, scales[0])
            logits = torch.maximum(logits, changed)
            changed = _token_errors(other.gradients, alone.gradients, scales[1])
            gradients = torch.maximum(gradients, changed)
        return logits, gradients

    def _compare_compiled(self, examples: List[Example]) -> List[Fault]:
        """Compare the compiled model with the model itself, which `_compare` compares with each example alone."""
        row = self._row(examples)
        with without_dropout(self.model), seeded():
            eager = self._row_values(row).detach()
        with without_dropout(self.model), seeded(), _compiling():
            compiled = self._row_values(row, self.probe.compiled).detach()
        error = largest_error(compiled, eager)
        text = f"{row_name(_lengths(row.examples))}, the compiled model scores otherwise"
        is_certain = error > self.probe.rounding_bound(self.row)
        return self._above_limit(Fault(text, error, is_certain=is_certain))

    def _above_limit(self, *faults: Fault, factor: float = 1.0) -> List[Fault]:
        """Return the faults above `factor` times the limit, and those whose error is not a number."""
        return [fault for fault in faults if not fault.error <= self.limit * factor]

    def _worst_example(self, row: PlacedRow, errors: torch.Tensor, what: str) -> Fault:
        """Describe the example with the largest error; `errors` are those of the tokens of all examples."""
        worst = int(errors.argmax())
        number, token = _locate(_lengths(row.examples), worst)
        length = _lengths(row.examples)[number]
        example_errors = errors[worst - token :][:length]
        first = int((example_errors > self.limit).float().argmax())
        text = f"example {number} of {length:,} tokens {what} from its token {first} on"
        return Fault(text, float(errors[worst]), number)

    def _first_difference(
        self,
        row: PlacedRow,
        errors: torch.Tensor,
    ) -> Optional[FirstDifference]:
        different = (errors > self.limit).nonzero().flatten().tolist()
        if not different:
            return None
        index = different[0]
        number, token = _locate(_lengths(row.examples), index)
        place = int(row.places[number][token])
        return FirstDifference(number, token, place, float(errors[index]))

    # ---- the trained loss

    def _loss(self, examples: List[Example]) -> List[Fault]:
        """Compare the loss of a row with the mean of the losses of its examples, each in a separate batch."""
        row = self._row(examples)
        counts = [self._predictions(example) for example in row.examples]
        if not sum(counts):
            return []
        weights = counts
        if self.training.mean == "example":
            weights = [int(count > 0) for count in counts]

        value, gradient = self._loss_of(row)
        expected = 0.0
        gradients = []
        alone: Dict[int, Tuple[float, torch.Tensor]] = {}  # by the identity of an example
        for example, weight in zip(row.examples, weights):
            if not weight:
                tokens = len(example["input_ids"])
                gradients.append(gradient.new_zeros(tokens, gradient.shape[-1]))
                continue
            if id(example) not in alone:
                alone[id(example)] = self._loss_of(self._row_of_one(example))
            example_loss, example_gradient = alone[id(example)]
            share = weight / sum(weights)
            expected += share * example_loss
            gradients.append(share * example_gradient)

        lengths = _lengths(row.examples)
        errors = _token_errors(gradient, torch.cat(gradients), _scale_of(gradient))
        number, _ = _locate(lengths, int(errors.argmax()))
        name = f"{row_name(lengths)}, the loss"
        loss_text = f"{name} is {value:.6g}, and the mean of its examples is {expected:.6g}"
        length = lengths[number]
        gradient_text = (
            f"{name} has another gradient at example {number} of {length:,} tokens than alone"
        )
        error = _relative(value, expected)
        loss_fault = Fault(loss_text, error, is_certain=error > _CERTAIN_LOSS)
        gradient_fault = Fault(gradient_text, float(errors.max()))
        return [
            *self._above_limit(loss_fault),
            *self._above_limit(gradient_fault, factor=GRADIENT_FACTOR),
        ]

    def _loss_of(self, row: PlacedRow) -> Tuple[float, torch.Tensor]:
        """Compute the trained loss, and its gradient at the tokens of the examples, [tokens, width]."""
        compute = self.training.loss or self._label_loss
        with contextlib.ExitStack() as stack:
            stack.enter_context(without_dropout(self.model))
            stack.enter_context(torch.enable_grad())
            embeddings = stack.enter_context(_embeddings_of(self.probe.embedding))
            loss = compute(self.model, row.inputs)
            # A loss may call the model on other tokens too, as `loss_sum` does when it tests the output layer.
            tokens = row.inputs["input_ids"].numel()
            row_embeddings = [
                values for values in embeddings if values.shape[:-1].numel() == tokens
            ]
            gradients = _gradients_of(loss, row_embeddings)
        total = sum(gradients[1:], gradients[0])
        return float(loss.detach()), _of_examples(total, row.places)

    def _label_loss(self, model: Any, inputs: Inputs) -> torch.Tensor:
        labels = inputs["labels"]
        logits = self.training.forward(model, inputs)
        total = cross_entropy_sum(logits, labels, causal=self.causal)
        return total / supervised(model, labels).clamp(min=1)

    def _auxiliary(self, examples: List[Example]) -> List[Fault]:
        """Compare the auxiliary loss of a row of equal lengths with that of a plain batch."""
        with torch.no_grad(), without_dropout(self.model), self._auxiliary_losses() as losses:
            self.training.forward(self.model, self._row(examples).inputs)
            self._plain(examples)
        values = [float(loss) for loss in losses if torch.is_tensor(loss) and loss.numel() == 1]
        if len(values) != 2 or not any(values):
            return []
        row_loss, batch_loss = values
        error = _relative(row_loss, batch_loss)
        if error <= _AUXILIARY_LIMIT:
            return []
        tokens = len(examples[0]["input_ids"])
        text = (
            f"in a row of {len(examples):,} examples of {tokens:,} tokens, the auxiliary loss is {row_loss:.6g}, "
            f"in a plain batch {batch_loss:.6g}"
        )
        return [Fault(text, error)]


# ---- hooks and modes


def stance(kind: str) -> ContextManager:
    """Set the stance of torch.compile in the block, if this torch has stances."""
    set_stance = getattr(getattr(torch, "compiler", None), "set_stance", None)
    return contextlib.nullcontext() if set_stance is None else set_stance(kind)


@contextlib.contextmanager
def _compiling() -> Iterator[None]:
    """Let compiled models run compiled in the block, for all shapes."""
    with contextlib.ExitStack() as stack:
        stack.enter_context(stance("default"))
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


def _embeddings_of(module: Any) -> Any:
    """Collect the outputs of the model's embeddings in the block, with a gradient."""
    return kept_outputs(
        module, lambda output: output if output.requires_grad else output.requires_grad_()
    )


def _of_examples(values: torch.Tensor, places: List[torch.Tensor]) -> torch.Tensor:
    """Select the tokens of the examples, [rows, slots, width] -> [tokens, width]; without padding, copy nothing."""
    flat = values.reshape(-1, values.shape[-1])
    of_examples = torch.cat(places)
    if not torch.equal(of_examples, torch.arange(len(flat))):
        flat = flat[of_examples.to(flat.device)]
    return at_least_float32(flat)
