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
from typing import Any, Callable, Dict, Iterator, List, NamedTuple, Optional, Sequence, Tuple

import numpy as np
import torch
from torch.nn import functional as F

from ipu_packed_bert.padding_free.collators import Inputs, attends_both_ways
from ipu_packed_bert.padding_free.losses import IGNORED, cross_entropy_sum, supervised
from ipu_packed_bert.padding_free.models import FirstDifference, lengths_of_config, text_config
from ipu_packed_bert.padding_free.update import to_device

_MOST_EXAMPLES = 500  # of a row of short examples
_KERNEL_BLOCKS = (16, 32, 64, 128, 256)  # tokens that attention kernels process at once
_MOST_ROWS_OF_EDGES = 4  # rows, the first two included
_SHORT_ROW = 4096  # tokens; a row up to here is probed a second time, with other boundaries
_LAST_LENGTHS = (1, 2)  # of the last examples of each row, so that a boundary is late in the row
# The time of all rows is limited to the larger of these two.
_UPDATES_ALLOWED = 3.0  # updates of the largest row
_SECONDS_ALLOWED = 5.0
_AUXILIARY_LIMIT = 1e-4  # relative error of an auxiliary loss; the counts in it are whole numbers
_GRADIENT_FACTOR = 5.0  # limit of gradients over the limit of logits

Example = Dict[str, np.ndarray]
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
    left_out: str = ""

    def __str__(self) -> str:
        rows = [f"{tokens:,} tokens in {examples:,} examples" for tokens, examples in self.rows]
        shapes = ", ".join(rows)
        types = " and ".join(self.types)
        text = f"probed rows of {shapes or 'two short examples'}, {types}: {self.seconds:.1f} s"
        if self.update:
            updates = self.seconds / self.update
            mebibytes = self.peak / 2**20
            text += f", {updates:.1f} updates, {mebibytes:,.0f} MiB"
        if self.left_out:
            text += f"; {self.left_out}"
        return text


class _LayerStep(NamedTuple):
    """One comparison, which can be repeated in another dtype."""

    method: str  # of RowProbe; its arguments are the lengths and a random generator
    lengths: Sequence[int]  # of the examples
    seed: int
    examples: Optional[List[Example]] = None  # of an existing batch, instead of random ones


class Fault(NamedTuple):
    """A difference above its limit."""

    what: str
    error: float
    number: int = -1  # of the example
    # Of all examples of the row; empty if the row cannot be drawn again.
    lengths: Tuple[int, ...] = ()
    step: Optional[_LayerStep] = None
    first: Optional[FirstDifference] = None


# ---- lengths


def row_lengths(
    row: int,
    longest: int,
    config: Any,
    draw: np.random.Generator,
) -> List[List[int]]:
    """Choose the lengths of the examples of each row to probe, the most important row first.

    Args:
        row: Most tokens of a row.
        longest: Most tokens of an example.
        config: The model's configuration, whose numbers may be lengths.
        draw: Random generator.
    """
    longest = min(longest, row)
    near = set(_KERNEL_BLOCKS)
    for number in (*_KERNEL_BLOCKS, *lengths_of_config(config, longest)):
        near.update((number - 1, number, number + 1))
    possible = sorted(length for length in near if 1 < length <= longest)
    edges = draw.permutation(possible).astype(int).tolist()
    most = row - sum(_LAST_LENGTHS)  # tokens before the last examples

    # The longest example, not at the begin of the row.
    far = min(longest, max(row - 1, 1))
    first = [far]
    if row > far:
        first.insert(0, min(3, row - far))
    rows = [_filled(first, row, longest, edges, draw)]

    # Many short examples.
    short = np.resize([1, 1, 3, 1, 2, 1, 1, 2], _MOST_EXAMPLES)
    fitting = short[short.cumsum() <= most]
    lengths = np.minimum(fitting, longest).tolist()
    rows.append(_ended(lengths or [1], longest))

    # The edges that fit.
    remaining = [length for length in edges if length < most]
    while remaining and len(rows) < _MOST_ROWS_OF_EDGES:
        taken: List[int] = []
        for length in list(remaining):
            if sum(taken) + length <= most:
                taken.append(length)
                remaining.remove(length)
        rows.append(_ended(taken, longest))

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


def _ended(lengths: List[int], longest: int) -> List[int]:
    """Add the last examples of a row."""
    return [*lengths, *(min(length, longest) for length in _LAST_LENGTHS)]


# ---- a row and its examples


class _TrainedRow(NamedTuple):
    """Examples, their inputs from the collator, and the places of their tokens in these inputs."""

    examples: List[Example]
    inputs: Inputs
    places: List[torch.Tensor]  # of each example: int64 [its tokens], in the flattened input_ids

    @property
    def lengths(self) -> List[int]:
        return [len(place) for place in self.places]


def _locate(lengths: Sequence[int], index: int) -> Tuple[int, int]:
    """Return the example that has token `index` of all examples, and the place of the token in it."""
    ends = np.cumsum(lengths)
    number = int(np.searchsorted(ends, index, side="right"))
    begin = ends[number] - lengths[number]
    return number, int(index - begin)


def _row_name(lengths: Sequence[int]) -> str:
    return f"in a row of {sum(lengths):,} tokens and {len(lengths):,} examples"


def places_of(examples: Sequence[Example], inputs: Inputs) -> List[torch.Tensor]:
    """Find the tokens of each example in a batch.

    Args:
        examples: The examples, in the order of the batch.
        inputs: The batch.

    Returns:
        For each example the places of its tokens in the flattened input_ids, int64 [its tokens].

    Raises:
        ValueError: An example is not in the batch, or in another order.
    """
    flat = torch.as_tensor(inputs["input_ids"]).flatten().cpu()
    places = []
    begin = 0
    for number, example in enumerate(examples):
        ids = torch.as_tensor(example["input_ids"])
        tokens = len(ids)
        last = len(flat) - tokens
        while begin <= last and not torch.equal(flat[begin : begin + tokens], ids):
            begin += 1
        if begin > last:
            raise ValueError(
                f"example {number} of {tokens} tokens is not in the collator's batch in this order; let the collator "
                "keep all tokens and the order of the examples"
            )
        places.append(torch.arange(begin, begin + tokens))
        begin += tokens
    return places


def _targets(example: Example) -> torch.Tensor:
    """Return the label that each token predicts, int64 [tokens]; the last token predicts none."""
    labels = np.asarray(example.get("labels", example["input_ids"]))
    return F.pad(torch.as_tensor(labels)[1:].long(), (0, 1), value=IGNORED)


def _predictions(example: Example) -> int:
    return int((_targets(example) != IGNORED).sum())


def _summed_loss(logits: torch.Tensor, examples: Sequence[Example]) -> torch.Tensor:
    """Sum the cross-entropies of examples; logits: [tokens of all examples, vocabulary]."""
    targets = torch.cat([_targets(example) for example in examples])
    return F.cross_entropy(logits, targets.to(logits.device), ignore_index=IGNORED, reduction="sum")


# ---- differences


def accurate(values: torch.Tensor) -> torch.Tensor:
    """Convert values to float32, unless they are float64."""
    return values if values.dtype == torch.float64 else values.float()


def _largest(values: torch.Tensor) -> float:
    return float(values.abs().max()) if values.numel() else 0.0


def _scale(values: torch.Tensor) -> float:
    return max(_largest(values), 1e-30)


def _token_errors(
    actual: torch.Tensor,
    expected: torch.Tensor,
    scale: float,
) -> torch.Tensor:
    """Return the largest difference of each token over `scale`, float64 [...] of [..., width]; inf if not a number."""
    differences = (actual - accurate(expected)).abs().amax(-1)
    errors = differences.double() / scale
    return errors.nan_to_num(nan=math.inf).cpu()


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
    """Results for some examples; their tokens are the leading axes."""

    logits: torch.Tensor  # [..., vocabulary]
    gradients: torch.Tensor  # at the embeddings, [..., width]
    weights: List[torch.Tensor]  # gradients of the parameters


class RowProbe:
    """The comparison of rows of one model, in its current dtype.

    Args:
        probe: The model with its plain calls, its calls by rows, and the limit of a difference of logits (`probe.py`).
    """

    def __init__(self, probe: Any) -> None:
        self.probe = probe
        self.model = probe.model
        self.training = probe.training
        self.limit = float(probe.limit)
        self.causal = not attends_both_ways(self.model)
        self.parameters = []  # trained ones that are not sharded
        for parameter in self.model.parameters():
            if parameter.requires_grad and type(parameter.data) is torch.Tensor:
                self.parameters.append(parameter)
        self.update = 0.0  # seconds of a forward and backward pass of the largest row
        self.has_auxiliary_loss = False

    # ---- steps

    def run(self, row: int, longest: int) -> Tuple[List[Fault], Probed]:
        """Probe rows of at most `row` tokens; return the faults of the first wrong row, and the probed rows."""
        start = time.perf_counter()
        shapes: List[Tuple[int, int]] = []
        left_out = ""
        for step in self._steps(row, longest):
            if step.method == "_auxiliary" and not self.has_auxiliary_loss:
                continue
            tokens = sum(step.lengths)
            spent = time.perf_counter() - start
            needed = 2 * self.update * tokens / row
            allowed = max(_SECONDS_ALLOWED, _UPDATES_ALLOWED * self.update)
            if len(shapes) > 1 and spent + needed > allowed:
                if not left_out:
                    left_out = (
                        f"left out to save time: a row of {tokens:,} tokens and all later rows"
                    )
                continue
            faults = self._faults_of(step)
            if faults:
                return faults, Probed()
            shape = (tokens, len(step.lengths))
            if shape not in shapes:
                shapes.append(shape)
        seconds = time.perf_counter() - start
        return [], Probed(tuple(shapes), seconds=seconds, update=self.update, left_out=left_out)

    def audit(self, examples: List[Example]) -> Tuple[List[Fault], Probed]:
        """Probe the examples of an existing batch; return its faults, and the probed row."""
        start = time.perf_counter()
        lengths = [len(example["input_ids"]) for example in examples]
        faults = self._faults_of(_LayerStep("_compare", lengths, 0, examples))
        shape = (sum(lengths), len(lengths))
        seconds = time.perf_counter() - start
        return faults, Probed((shape,), seconds=seconds, update=self.update)

    def repeat(self, fault: Fault) -> List[Fault]:
        """Repeat the step that showed a fault."""
        assert fault.step is not None
        return self._faults_of(fault.step)

    def _steps(self, row: int, longest: int) -> List[_LayerStep]:
        """List the steps, the most important first."""
        rows = row_lengths(row, longest, text_config(self.model), np.random.default_rng(0))
        methods = ["_logits_and_gradients"]
        if self.training.collator is not None or self.training.loss is not None:
            methods.append("_loss")
        steps = list(itertools.product(rows, methods))

        # Equal lengths, for which a plain batch has no padding.
        single_tokens = [1] * min(_MOST_EXAMPLES, row)
        longer = [min(16, longest)] * max(1, row // 16)
        steps += [(single_tokens, "_auxiliary"), (longer, "_auxiliary")]
        return [_LayerStep(method, lengths, seed) for seed, (lengths, method) in enumerate(steps)]

    def _faults_of(self, step: _LayerStep) -> List[Fault]:
        """Return the faults of one step, each with the step that repeats it."""
        if step.examples is not None:
            faults = self._compare(step.examples)
        else:
            draw = np.random.default_rng(step.seed)
            faults = getattr(self, step.method)(step.lengths, draw)
        can_be_drawn = step.method in ("_logits_and_gradients", "_loss")
        lengths = tuple(step.lengths) if can_be_drawn else ()
        return [fault._replace(step=step, lengths=lengths) for fault in faults]

    # ---- examples

    def _examples(
        self,
        lengths: Sequence[int],
        draw: np.random.Generator,
        share: bool = False,
    ) -> List[Example]:
        """Draw examples of random tokens; a third of them have a prompt, which is not predicted.

        share: use the same object for all examples of one length and kind.
        """
        shared: Dict[Tuple[int, bool], Example] = {}
        examples = []
        for number, length in enumerate(lengths):
            has_prompt = number % 3 == 1 and length > 3
            kind = (length, has_prompt)
            if kind not in shared or not share:
                shared[kind] = self._example(length, has_prompt, draw)
            examples.append(shared[kind])
        return examples

    def _example(
        self,
        length: int,
        has_prompt: bool,
        draw: np.random.Generator,
    ) -> Example:
        ids = self.probe.tokens(length, draw)
        labels = ids.copy()
        # Some collators of masked models keep the label of a first token; causal ones and others leave it out.
        first_predicted = length // 2 if has_prompt else int(not self.causal)
        labels[:first_predicted] = IGNORED
        return {"input_ids": ids, "labels": labels}

    def _inputs(self, examples: Sequence[Example]) -> Inputs:
        return to_device(self.probe.collated(examples), self.probe.device)

    # ---- logits and gradients

    def _logits_and_gradients(
        self,
        lengths: Sequence[int],
        draw: np.random.Generator,
    ) -> List[Fault]:
        return self._compare(self._examples(lengths, draw))

    def _compare(self, examples: List[Example]) -> List[Fault]:
        """Compare a row, in training and in evaluation mode, with each example alone in evaluation mode."""
        inputs = self._inputs(examples)
        row = _TrainedRow(examples, inputs, places_of(examples, inputs))
        self.model.eval()
        with torch.no_grad(), self._auxiliary_losses() as losses:
            evaluated = self._logits(row)
        self.has_auxiliary_loss = any(map(torch.is_tensor, losses))
        trained = self._train(row, evaluated)
        faults = self._compare_alone(row, trained, evaluated)
        name = _row_name(row.lengths)
        return [fault._replace(what=f"{name}, {fault.what}") for fault in faults]

    def _train(self, row: _TrainedRow, evaluated: torch.Tensor) -> _Result:
        """Compute a row in training mode; in evaluation mode if training is random even without dropout."""
        with _without_dropout(self.model):
            start = time.perf_counter()
            trained = self._result(row)
            self.update = max(self.update, time.perf_counter() - start)
            scale = _scale(evaluated)
            if not _largest(trained.logits - evaluated) > self.limit * scale:
                return trained
            torch.manual_seed(1)
            with torch.no_grad():
                again = self._logits(row)
        is_random = _largest(again - trained.logits) > 1e-6 * scale
        return self._result(row) if is_random else trained

    def _logits(self, row: _TrainedRow) -> torch.Tensor:
        """Compute the logits of all examples of a row, [tokens, vocabulary]."""
        self.probe.prepare()
        inputs = {name: value for name, value in row.inputs.items() if name != "labels"}
        return _of_examples(self.training.forward(self.model, inputs), row.places)

    def _result(self, row: _TrainedRow) -> _Result:
        """Compute a row with gradients."""
        result = self._with_gradients(partial(self._logits, row), row.examples)
        return result._replace(gradients=_of_examples(result.gradients, row.places))

    def _alone(self, examples: Sequence[Example]) -> _Result:
        """Compute examples of one length in a plain batch: [examples, tokens, ...]."""
        ids = [torch.as_tensor(example["input_ids"]) for example in examples]
        return self._with_gradients(partial(self.probe.plain, *ids), examples)

    def _with_gradients(
        self,
        call: Callable[[], torch.Tensor],
        examples: Sequence[Example],
    ) -> _Result:
        with torch.enable_grad(), _embeddings_of(self.probe.base) as embeddings:
            logits = call()
            flat = logits.reshape(-1, logits.shape[-1])
            loss = _summed_loss(flat, examples)
            sources = [embeddings[0], *self.parameters]
            gradients, *weights = _gradients_of(loss, sources)
        return _Result(logits.detach(), gradients, weights)

    def _auxiliary_losses(self) -> Any:
        return _kept(self.probe.base, lambda output: getattr(output, "aux_loss", None))

    def _compare_alone(
        self,
        row: _TrainedRow,
        trained: _Result,
        evaluated: torch.Tensor,
    ) -> List[Fault]:
        """Compare a row with its examples; those of one length are computed in one plain batch."""
        logit_scale = _scale(evaluated)
        gradient_scale = _scale(trained.gradients)
        logit_errors = torch.zeros(len(evaluated), dtype=torch.float64)
        gradient_errors = torch.zeros(len(evaluated), dtype=torch.float64)
        weights = [torch.zeros_like(parameter) for parameter in self.parameters]

        by_length: Dict[int, List[int]] = {}
        for number, length in enumerate(row.lengths):
            by_length.setdefault(length, []).append(number)
        begins = np.cumsum(row.lengths) - row.lengths
        for length, numbers in by_length.items():
            alone = self._alone([row.examples[number] for number in numbers])
            # [examples, tokens]
            tokens = torch.as_tensor(begins[numbers, None] + np.arange(length))
            on_device = tokens.to(evaluated.device)
            logits = evaluated[on_device]
            gradients = trained.gradients[on_device]
            logit_errors[tokens] = _token_errors(logits, alone.logits, logit_scale)
            gradient_errors[tokens] = _token_errors(gradients, alone.gradients, gradient_scale)
            for total, gradient in zip(weights, alone.weights):
                total += gradient

        logit_fault = self._worst_example(row, logit_errors, "scores otherwise than alone")
        first = self._first_difference(row, logit_errors)
        training_error = _largest(trained.logits - evaluated) / logit_scale
        training_fault = Fault("evaluation differs from training", training_error)
        gradient_fault = self._worst_example(row, gradient_errors, "has other gradients than alone")
        weight_error = _weight_error(trained.weights, weights)
        weight_fault = Fault(
            "the gradients of the weights are not those of its examples", weight_error
        )
        return self._above_limit(
            [logit_fault._replace(first=first), training_fault],
            [gradient_fault, weight_fault],
        )

    def _above_limit(
        self,
        faults: Sequence[Fault],
        gradient_faults: Sequence[Fault],
    ) -> List[Fault]:
        """Return the faults above their limits, and those whose error is not a number."""
        gradient_limit = self.limit * _GRADIENT_FACTOR
        above = [fault for fault in faults if not fault.error <= self.limit]
        return above + [fault for fault in gradient_faults if not fault.error <= gradient_limit]

    def _worst_example(self, row: _TrainedRow, errors: torch.Tensor, what: str) -> Fault:
        """Describe the example with the largest error; `errors` are those of the tokens of all examples."""
        worst = int(errors.argmax())
        number, token = _locate(row.lengths, worst)
        length = row.lengths[number]
        example_errors = errors[worst - token :][:length]
        first = int((example_errors > self.limit).float().argmax())
        text = f"example {number} of {length:,} tokens {what} from its token {first} on"
        return Fault(text, float(errors[worst]), number)

    def _first_difference(
        self,
        row: _TrainedRow,
        errors: torch.Tensor,
    ) -> Optional[FirstDifference]:
        different = (errors > self.limit).nonzero().flatten().tolist()
        if not different:
            return None
        index = different[0]
        number, token = _locate(row.lengths, index)
        place = int(row.places[number][token])
        return FirstDifference(number, token, place, float(errors[index]))

    # ---- the trained loss

    def _loss(self, lengths: Sequence[int], draw: np.random.Generator) -> List[Fault]:
        """Compare the loss of a row with the mean of the losses of its examples, each in a separate batch."""
        examples = self._examples(lengths, draw, share=True)
        counts = [_predictions(example) for example in examples]
        if not sum(counts):
            return []
        weights = counts
        if self.training.mean == "example":
            weights = [int(count > 0) for count in counts]

        value, gradient = self._loss_of(examples)
        expected = 0.0
        gradients = []
        alone: Dict[int, Tuple[float, torch.Tensor]] = {}  # by the identity of an example
        for example, weight in zip(examples, weights):
            if not weight:
                tokens = len(example["input_ids"])
                gradients.append(gradient.new_zeros(tokens, gradient.shape[-1]))
                continue
            if id(example) not in alone:
                alone[id(example)] = self._loss_of([example])
            example_loss, example_gradient = alone[id(example)]
            share = weight / sum(weights)
            expected += share * example_loss
            gradients.append(share * example_gradient)

        errors = _token_errors(gradient, torch.cat(gradients), _scale(gradient))
        number, _ = _locate(lengths, int(errors.argmax()))
        name = f"{_row_name(lengths)}, the loss"
        loss_text = f"{name} is {value:.6g}, and the mean of its examples is {expected:.6g}"
        length = lengths[number]
        gradient_text = (
            f"{name} has another gradient at example {number} of {length:,} tokens than alone"
        )
        loss_fault = Fault(loss_text, _relative(value, expected))
        gradient_fault = Fault(gradient_text, float(errors.max()))
        return self._above_limit([loss_fault], [gradient_fault])

    def _loss_of(self, examples: List[Example]) -> Tuple[float, torch.Tensor]:
        """Compute the trained loss, and its gradient at the tokens of the examples, [tokens, width]."""
        inputs = self._inputs(examples)
        places = places_of(examples, inputs)
        compute = self.training.loss or self._label_loss
        with contextlib.ExitStack() as stack:
            stack.enter_context(_without_dropout(self.model))
            stack.enter_context(torch.enable_grad())
            embeddings = stack.enter_context(_embeddings_of(self.probe.base))
            loss = compute(self.model, inputs)
            # A loss may call the model on other tokens too, as `loss_sum` does when it tests the output layer.
            tokens = inputs["input_ids"].numel()
            row_embeddings = [
                values for values in embeddings if values.shape[:-1].numel() == tokens
            ]
            gradients = _gradients_of(loss, row_embeddings)
        return float(loss.detach()), _of_examples(sum(gradients[1:], gradients[0]), places)

    def _label_loss(self, model: Any, inputs: Inputs) -> torch.Tensor:
        labels = inputs["labels"]
        logits = self.training.forward(model, inputs)
        total = cross_entropy_sum(logits, labels, causal=self.causal)
        return total / supervised(model, labels).clamp(min=1)

    def _auxiliary(
        self,
        lengths: Sequence[int],
        draw: np.random.Generator,
    ) -> List[Fault]:
        """Compare the auxiliary loss of a row of equal lengths with that of a plain batch."""
        examples = self._examples(lengths, draw)
        ids = [torch.as_tensor(example["input_ids"]) for example in examples]
        with torch.no_grad(), _without_dropout(self.model), self._auxiliary_losses() as losses:
            self.training.forward(self.model, self._inputs(examples))
            self.probe.plain(*ids)
        values = [float(loss) for loss in losses if torch.is_tensor(loss) and loss.numel() == 1]
        if len(values) != 2 or not any(values):
            return []
        row_loss, batch_loss = values
        error = _relative(row_loss, batch_loss)
        if error <= _AUXILIARY_LIMIT:
            return []
        text = (
            f"in a row of {len(lengths):,} examples of {lengths[0]:,} tokens, the auxiliary loss is {row_loss:.6g}, "
            f"in a plain batch {batch_loss:.6g}"
        )
        return [Fault(text, error)]


# ---- hooks and modes


@contextlib.contextmanager
def _kept(module: Any, keep: Callable[[Any], Any]) -> Iterator[List[Any]]:
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


def _embeddings_of(base: Any) -> Any:
    """Collect the outputs of the model's embeddings in the block, with a gradient."""
    module = base.get_input_embeddings()
    return _kept(module, lambda output: output if output.requires_grad else output.requires_grad_())


def _of_examples(values: torch.Tensor, places: List[torch.Tensor]) -> torch.Tensor:
    """Select the tokens of the examples, [rows, slots, width] -> [tokens, width]; without padding, copy nothing."""
    flat = values.reshape(-1, values.shape[-1])
    if len(flat) != sum(map(len, places)):
        flat = flat[torch.cat(places).to(flat.device)]
    return accurate(flat)


@contextlib.contextmanager
def _without_dropout(model: Any) -> Iterator[None]:
    """Set training mode in the block, with every dropout and noise rate of 0."""
    modes = {module: module.training for module in model.modules()}
    changed: List[Tuple[Any, str, float]] = []
    model.train()
    for module in modes:
        names = [name for name in vars(module) if "drop" in name or "jitter" in name]
        if isinstance(module, torch.nn.modules.dropout._DropoutNd):
            names.append("p")
        for name in names:
            rate = getattr(module, name)
            if isinstance(rate, float) and rate:
                changed.append((module, name, rate))
                setattr(module, name, 0.0)
    try:
        yield
    finally:
        for module, name, rate in changed:
            setattr(module, name, rate)
        for module, training in modes.items():
            module.training = training


without_dropout = _without_dropout
