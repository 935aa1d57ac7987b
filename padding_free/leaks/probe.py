"""Check before training that a model keeps the examples of a padding-free row apart.

Rows of a training are compared with each of their examples alone, in each way of calling the model.
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
from pack_data.reading.fields import one_line
from padding_free.collators import Inputs, inputs_for, to_device
from padding_free.leaks.compare import (
    Errors,
    Fault,
    Scales,
    Values,
    compare,
    errors_of,
    largest_error,
)
from padding_free.leaks.layers import one_of_each_kind, usual_longest
from padding_free.leaks.layouts import MOST_EXAMPLES, ProbeTexts, row_lengths
from padding_free.leaks.metadata import MOST_TOKENS, BrokenBatches
from padding_free.leaks.placing import Example, PlacedRow, examples_in
from padding_free.leaks.randomness import in_training, seeded
from padding_free.leaks.subject import (
    MODEL_ERRORS,
    MOST_LOGITS,
    Collator,
    Loss,
    Subject,
    TrainingCalls,
    compiling,
    kept_outputs,
    undisturbed,
)
from padding_free.losses import (
    IGNORED,
    cross_entropy_sum,
    logits_of,
    output_layer,
    supervised,
)
from padding_free.models import (
    WAY_OUT,
    Choice,
    Leak,
    attention_of,
    base_of,
    choice_of,
    choose,
    is_sharded,
    lengths_of_model,
    refuse_unfit,
    text_config,
)

_Forward = Callable[[Any, Inputs], torch.Tensor]  # model, inputs -> logits [1, tokens, vocabulary]

_DEFAULT_ROW_TOKENS = 1024  # used if neither the caller nor the model states a length
_LONGEST_DENSE_ROW = 2048  # tokens; a longer row would need too much memory for a T x T mask


_QUICK_ROWS = 3  # rows of a quick probe
_EVALUATED_ROWS = 2  # rows that are also evaluated
_PERTURBATIONS = 8  # of an example, from one step of float32 to 2**7
_HALF_PERTURBATIONS = 3  # of one step of a half type
_HALF_DRAWS = 4  # of the tokens of a row in half precision; a leak is in all of them

# The ways of calling a model.
_EVALUATION = "evaluation"
_TRAINING = "training"
_LOSS = "the trained loss"
_COMPILED = "the compiled model"
_AUXILIARY = "the auxiliary loss"
# What a message says of a way.
_NAMES = {
    _EVALUATION: "",
    _TRAINING: "in training with fixed noise, ",
    _LOSS: "in the trained loss, ",
    _COMPILED: "in the compiled model, ",
    _AUXILIARY: "in the auxiliary loss, ",
}


_MOST_MESSAGE = 300  # characters


class Probed(NamedTuple):
    """A verdict: the rows, the modes and the dtypes that were compared, their cost, and what was not judged."""

    rows: Tuple[Tuple[int, int], ...] = ()  # tokens and examples of each
    types: Tuple[str, ...] = ()
    seconds: float = 0.0
    update: float = 0.0  # seconds of one forward and backward pass of the largest row
    notes: Tuple[str, ...] = ()
    modes: Tuple[str, ...] = ()
    unjudged: Tuple[str, ...] = ()  # what could not be judged

    def __str__(self) -> str:
        rows = [f"{tokens:,} tokens in {examples:,} examples" for tokens, examples in self.rows]
        shapes = ", ".join(rows)
        types = " and ".join(self.types)
        modes = " and ".join(self.modes)
        judged = ", ".join(part for part in (modes, types) if part)
        text = f"probed rows of {shapes or 'two short examples'}, {judged}: {self.seconds:.1f} s"
        if self.update:
            updates = self.seconds / self.update
            text += f", {updates:.1f} updates"
        unjudged = [f"not judged: {part}" for part in self.unjudged]
        return "; ".join([text, *self.notes, *unjudged])


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
    just below and above every number of the configuration (windows, chunks, ...); the longest one is first, in the
    middle and last, and the tokens include special ones.  Logits, losses and gradients are compared in evaluation mode
    and in training mode with the model's own dropout, whose noise is fixed, and in the compiled model.  A model in half
    precision is probed in float32, in which rounding hides less, and also in half precision.  A difference that may be
    rounding is examined again in float64.  Then the inputs that carry the boundaries are broken on purpose, which must
    change the result.
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
        quick: Probe only three rows: the longest example in the middle, the shortest ones, the longest example last.
        all_layers: In a model of more than 67 million parameters, also compare the gradients of layers that repeat the
            kind and the settings of another one.

    Returns:
        The rows, modes, dtypes and time of the probe, and what could not be judged; `str()` returns one line.

    Raises:
        ValueError: The model does not keep examples apart (`Leak`).  The message names the first layer that differs,
            the inputs that it ignores, and the settings that may be the cause.  Or the model cannot be judged.
    """
    refuse_unfit(model)
    if mean not in ("token", "example"):
        raise ValueError(f'mean is {mean!r}; must be "token" or "example"')
    usual = usual_longest(model, row) if longest is None else None
    training = TrainingCalls(collator, forward, loss, mean)
    notes: List[str] = []
    with undisturbed(model):
        choose(model, _choice_for(model))
        with one_of_each_kind(model, all_layers) as repeated:
            subject = Subject(model, longest or usual, training)
            probed = _check(subject, row, quick)
        if repeated:
            whole = Subject(model, longest or usual, training)
            _check_all_layers(whole, probed.rows[0][0])
            notes.append(
                f"{repeated} layers have the kind and the settings of one whose gradients were compared"
            )
    if usual:
        notes.append(f"examples of at most {usual:,} tokens; pass longest=N for longer ones")
    unjudged = ["gradients of sharded weights"] if is_sharded(model) else []
    return probed._replace(notes=(*probed.notes, *notes), unjudged=tuple(unjudged))


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
        return Probed(unjudged=("the first batch, because the weights are sharded",))
    model_inputs = {name: value for name, value in inputs.items() if name != "num_items_in_batch"}
    if inputs["input_ids"].shape[0] != 1 or inputs.get("position_ids") is None:
        raise ValueError(
            "the batch is not one row with position_ids, which separate its examples; pass the inputs of inputs_for"
        )
    examples = examples_in(model_inputs)
    lengths = [len(example["input_ids"]) for example in examples]
    trials = [_Trial(mode, lengths, examples=examples) for mode in (_EVALUATION, _TRAINING)]
    with undisturbed(model):
        subject = Subject(model, None, TrainingCalls(lambda _: model_inputs))
        with subject.in_full_precision() as exact:
            return _run(exact, _Judge(exact, sum(lengths)), trials)


def _check(subject: Subject, row: Optional[int], quick: bool) -> Probed:
    """Probe rows of `row` tokens, in full and in half precision; then break their boundaries."""
    limits = [limit for limit in (subject.longest, subject.positions) if limit]
    row_tokens = row or subject.longest or min([_DEFAULT_ROW_TOKENS, *limits])
    is_dense = subject.choice.boundaries != "cu_seq_lens"
    tokens = min(row_tokens, _LONGEST_DENSE_ROW) if is_dense else row_tokens
    longest = min([tokens, *limits])
    start = time.perf_counter()
    with subject.in_full_precision() as exact:
        judge = _Judge(exact, tokens)
        probed = _run(exact, judge, judge.trials(longest, quick))
        notes = [*_broken(exact, longest), *probed.notes]
    if subject.is_half:
        judge = _Judge(subject, tokens)
        half = _run(subject, judge, judge.trials(longest, quick))
        probed = probed._replace(types=(*half.types, *probed.types))
    if quick:
        notes.append(f"quick: {_QUICK_ROWS} rows only")
    if tokens < row_tokens:
        notes.append("not longer, because of the mask of all tokens by all tokens")
    seconds = time.perf_counter() - start
    return probed._replace(seconds=seconds, notes=tuple(notes))


def _check_all_layers(subject: Subject, tokens: int) -> None:
    """Compare the logits of one row with all layers, of which only one of each kind was probed."""
    with subject.in_full_precision() as exact:
        judge = _Judge(exact, tokens)
        limits = [limit for limit in (exact.longest, exact.positions) if limit]
        trials = judge.trials(min([tokens, *limits]), quick=True)
        _run(exact, judge, trials[:1])


def _run(subject: Subject, judge: _Judge, trials: Sequence[_Trial]) -> Probed:
    """Run trials; return their rows and modes.  Raise Leak for the first fault that is not rounding."""
    start = time.perf_counter()
    shapes: Dict[Tuple[int, int], None] = {}  # in their order
    modes: Dict[str, None] = {}
    rounding = 0.0
    for trial in trials:
        tokens = sum(trial.lengths)
        what = f"fails in a row of {tokens:,} tokens, {WAY_OUT}"
        is_module = not hasattr(subject.base, "set_attn_implementation")
        if is_module and subject.training.forward is logits_of:
            what = "needs forward=, which maps model and inputs to logits"
        rounding = max(rounding, subject.attempt(lambda: _judged(subject, judge, trial), what))  # noqa: B023
        shapes[tokens, len(trial.lengths)] = None
        if trial.mode != _AUXILIARY:
            modes[trial.mode] = None
    notes = []
    if rounding:
        notes.append(f"differences up to {rounding:.1e} were examined in torch.float64")
    seconds = time.perf_counter() - start
    types = (str(subject.dtype),)
    return Probed(
        tuple(shapes), types, seconds, judge.update, notes=tuple(notes), modes=tuple(modes)
    )


def _judged(subject: Subject, judge: _Judge, trial: _Trial) -> float:
    """Judge one trial; return the largest difference that is rounding, or raise Leak."""
    faults = judge.faults_of(trial)
    if not faults:
        return 0.0
    first = faults[0]
    is_certain = any(fault.is_certain for fault in faults) or subject.is_half
    if not is_certain and subject.dtype != torch.float64:
        repeated = judge.in_float64(trial, first)
        if repeated is None:
            return max(fault.error for fault in faults)
        first = repeated
    raise _leak(subject, trial, first)


def _broken(subject: Subject, longest: int) -> List[str]:
    """Break the boundaries of a small row in each way; return a note of the inputs that carry them.

    Raise Leak if the result stays the same, bit by bit.
    """
    batches = BrokenBatches(subject, longest)
    if not batches.names or not _mixes_tokens(subject, longest):
        return []
    keys = ", ".join(batches.names)
    kind = batches.without_effect()
    if kind:
        raise Leak(
            f"{subject.name}: no logit changes if {keys} are {kind}; pass the boundaries of the batch to each layer"
        )
    return [f"boundaries in {keys}"]


def _mixes_tokens(subject: Subject, longest: int) -> bool:
    """Return True if the first token of an example affects the others."""
    length = min(longest, 11)
    if length < 2:
        return False
    draw = np.random.default_rng(0)
    first = torch.from_numpy(draw.integers(1, subject.vocabulary, (1, length)))
    second = first.clone()
    second[0, 0] = int(first[0, 0]) % 2 + 1
    if second[0, 0] == first[0, 0]:
        second[0, 0] = 0
    with torch.no_grad():
        return not torch.equal(subject.plain(first)[:, 1:], subject.plain(second)[:, 1:])


# ---- a row and its examples alone


class _Trial(NamedTuple):
    """One comparison, which can be repeated in another dtype."""

    mode: str
    lengths: Sequence[int]  # of the examples
    seed: int = 0
    shares_prefix: bool = False  # the examples begin with the same tokens
    examples: Optional[List[Example]] = None  # of an existing batch, instead of random ones


_Alone = Callable[[Sequence[int]], Values]  # numbers of examples -> their values without the others


def _row_name(lengths: Sequence[int]) -> str:
    """Describe a row with examples of these lengths."""
    return f"in a row of {sum(lengths):,} tokens and {len(lengths):,} examples"


def _by_length(lengths: Sequence[int], numbers: Iterable[int]) -> Iterator[List[int]]:
    """Group the numbers of examples by the tokens of these examples."""
    groups: Dict[int, List[int]] = {}
    for number in numbers:
        groups.setdefault(lengths[number], []).append(number)
    yield from groups.values()


def _targets(examples: Sequence[Example], words: int, device: torch.device) -> torch.Tensor:
    """Return the label that each token predicts, int64 [tokens]; the last token predicts none.

    With only a few words, each stands for several labels.
    """
    targets = []
    for example in examples:
        labels = np.asarray(example.get("labels", example["input_ids"]))
        targets.append(F.pad(torch.as_tensor(labels)[1:].long(), (0, 1), value=IGNORED))
    joined = torch.cat(targets).to(device)
    return torch.where(joined == IGNORED, joined, joined % words)


def _selected(values: torch.Tensor, lengths: Sequence[int], numbers: Iterable[int]) -> torch.Tensor:
    """Return the tokens of some examples, in the order of their numbers."""
    parts = values.split(list(lengths))
    return torch.cat([parts[number] for number in numbers])


class _Sum:
    """The values of groups of examples, joined in the order of the numbers of the examples.

    Gradients of weights are summed as they come, because all of them would need the memory of many models.
    """

    def __init__(self, lengths: Sequence[int]) -> None:
        self._lengths = lengths
        self._numbers: List[int] = []
        self._parts: List[Values] = []
        self._weights: List[torch.Tensor] = []
        self._loss: Optional[float] = None

    def add(self, numbers: Sequence[int], values: Values) -> None:
        """Add the values of the examples `numbers`."""
        self._numbers += numbers
        self._parts.append(values._replace(weights=()))
        if not self._weights:
            self._weights = list(values.weights)
        else:
            for total, gradient in zip(self._weights, values.weights):
                total += gradient
        if values.loss is not None:
            self._loss = (self._loss or 0.0) + values.loss

    def values(self) -> Values:
        """Return the values of all examples."""
        order = np.argsort(self._numbers, kind="stable").tolist()
        sizes = [self._lengths[number] for number in self._numbers]
        tensors = []
        for parts in zip(*((values.logits, values.gradients) for values in self._parts)):
            joined = None if parts[0] is None else torch.cat(parts)
            tensors.append(None if joined is None else _selected(joined, sizes, order))
        return Values(tensors[0], tensors[1], self._weights, self._loss)


class _Judge:
    """The comparison of rows of one subject, in its current dtype.

    Args:
        subject: The model and its calls.
        row: Tokens of the largest row.
    """

    def __init__(self, subject: Subject, row: int) -> None:
        self.subject = subject
        self._row = row
        # The gradients of the output layer and of the embeddings follow from those of the tokens.
        left_out: Set[int] = set()
        weight = subject.embedding.weight
        # Too many logits are represented by those of a few words, if the output layer can compute a part of them.
        self._output = None
        is_large = row * subject.vocabulary > MOST_LOGITS
        if is_large and subject.training.forward is logits_of:
            self._output = output_layer(subject.model)
        if self._output is not None:
            left_out = {id(self._output.layer.weight), id(weight)}
        if weight.dtype != subject.dtype:
            left_out.add(id(weight))
        self._parameters: List[Any] = []  # trained ones that are not sharded
        for parameter in subject.model.parameters():
            is_plain = parameter.requires_grad and type(parameter.data) is torch.Tensor
            # In half precision a single token moves the gradients of an expert.
            if is_plain and id(parameter) not in left_out and not subject.is_half:
                self._parameters.append(parameter)
        self.update = 0.0  # seconds of a forward and backward pass of the largest row
        self._has_auxiliary_loss = False
        self._draws = False  # the collator changes tokens at random
        self._fixes_noise = False  # once a difference or a random number was seen: it takes time
        config = text_config(subject.model)
        self._texts = ProbeTexts(config, subject.vocabulary, subject.causal)

    def _few_words(self) -> ContextManager:
        """Let the model return the logits of only a few words in the block, if those of all words are too many."""
        if self._output is None:
            return contextlib.nullcontext()
        return self._output._of_few_words(max(2, MOST_LOGITS // self._row))

    def trials(self, longest: int, quick: bool) -> List[_Trial]:
        """List the trials, the most important first; quick: only those of the first rows."""
        numbers = lengths_of_model(self.subject.model, min(longest, self._row))
        rows = row_lengths(self._row, longest, numbers, np.random.default_rng(0))
        training = self.subject.training
        modes = [_EVALUATION, _TRAINING]
        if training.collator is not None or training.loss is not None:
            modes.append(_LOSS)
        if self.subject.compiled is not None:
            modes.append(_COMPILED)
        if self.subject.is_half:
            modes = modes[:2]
        trials: List[_Trial] = []
        for number, lengths in enumerate(rows[:_QUICK_ROWS] if quick else rows):
            for mode in modes:
                if mode != _EVALUATION or number < _EVALUATED_ROWS:
                    trials.append(_Trial(mode, lengths, len(trials), number % 3 != 0))
        if self.subject.is_half:
            return trials
        # Equal lengths, for which a plain batch has no padding.
        single_tokens = [1] * min(MOST_EXAMPLES, self._row)
        longer = [min(16, longest)] * max(1, self._row // 16)
        for lengths in (single_tokens, longer):
            trials.append(_Trial(_AUXILIARY, lengths, len(trials)))
        return trials

    def examples_of(self, trial: _Trial) -> List[Example]:
        """Return the examples of a trial."""
        if trial.examples is not None:
            return trial.examples
        # The loss of equal examples is computed only once.
        is_shared = trial.mode == _LOSS
        return self._texts(trial.lengths, trial.seed, trial.shares_prefix, is_shared)

    def faults_of(self, trial: _Trial) -> List[Fault]:
        """Return the differences of one trial that are above the limit.

        In half precision they are drawn again: a leak is in all draws.
        """
        if trial.mode == _AUXILIARY and not self._has_auxiliary_loss:
            return []
        is_drawn = self.subject.is_half and trial.examples is None
        faults: List[Fault] = []
        for again in range(_HALF_DRAWS if is_drawn else 1):
            faults = self._compare(trial._replace(seed=trial.seed + 100 * again))
            if not faults:
                break
        return faults

    def _compare(self, trial: _Trial) -> List[Fault]:
        subject = self.subject
        row = subject.row(self.examples_of(trial))
        self._draws |= row.is_changed
        ways = {
            _EVALUATION: self._evaluation,
            _TRAINING: self._training,
            _LOSS: self._trained_loss,
            _COMPILED: self._compiled,
            _AUXILIARY: self._auxiliary,
        }
        is_noisy = trial.mode in (_TRAINING, _LOSS) and not self._fixes_noise
        with self._state_of(trial.mode):
            start = time.perf_counter()
            values, alone = ways[trial.mode](row)
            if trial.mode == _TRAINING:
                self.update = max(self.update, time.perf_counter() - start)
            if is_noisy and subject.has_noise:
                self._fixes_noise = True
                return self._compare(trial)
            yardstick = partial(self._yardstick, row.lengths, alone)
            everything = alone(range(len(row.examples)))
            found = compare(
                values, everything, row.lengths, subject.limit, yardstick, typical=subject.is_half
            )
        if found and is_noisy:
            self._fixes_noise = True
            return self._compare(trial)
        faults = []
        for fault in found:
            first = fault.first
            if first is not None:
                place = int(row.places[first.example][first.token])
                first = first._replace(place=place) if trial.mode == _EVALUATION else None
            what = f"{_row_name(row.lengths)}, {_NAMES[trial.mode]}{fault.what}"
            if subject.is_half:
                what += f" in {subject.dtype}"
            faults.append(fault._replace(what=what, first=first))
        return faults

    @contextlib.contextmanager
    def _state_of(self, mode: str) -> Iterator[None]:
        """Set the mode of the model in the block."""
        with contextlib.ExitStack() as stack:
            if mode != _LOSS:  # the caller's loss needs the logits of all words
                stack.enter_context(self._few_words())
            if mode in (_EVALUATION, _AUXILIARY):
                self.subject.model.eval()
                stack.enter_context(torch.no_grad())
                stack.enter_context(seeded())
            elif mode == _COMPILED:
                stack.enter_context(in_training(self.subject.model, None, has_dropout=False))
            else:
                width = self.subject.width if self._fixes_noise else None
                stack.enter_context(in_training(self.subject.model, width))
            yield

    def _yardstick(
        self, lengths: Sequence[int], alone: _Alone, numbers: List[int], scales: Scales
    ) -> List[Errors]:
        """Compute the errors of examples alone when their embeddings are perturbed by rounding."""
        subject = self.subject
        of_examples = [lengths[number] for number in numbers]
        expected = alone(numbers)
        step = torch.finfo(subject.dtype if subject.is_half else torch.float32).eps
        errors = []
        for number in range(_HALF_PERTURBATIONS if subject.is_half else _PERTURBATIONS):
            draw = np.random.default_rng(number)
            size = step * (1 if subject.is_half else 2**number)

            def perturb(output: torch.Tensor, draw: Any = draw, size: float = size) -> torch.Tensor:
                # NumPy's numbers, because torch's are constants under fixed noise.
                noise = torch.from_numpy(draw.standard_normal(output.shape, np.float32))
                return output * (1 + size * noise.to(output.device)).to(output.dtype)

            with kept_outputs(subject.embedding, perturb):
                changed = alone(numbers)
            errors.append(errors_of(changed, expected, of_examples, scales, subject.is_half))
        return errors

    # ---- the ways of calling a model: the values of the row, and a function for those of examples alone

    def _evaluation(self, row: PlacedRow) -> Tuple[Values, _Alone]:
        losses: List[Any]
        with self._auxiliary_losses() as losses:
            values = Values(row.select(self.subject.logits_of(row)))
        self._has_auxiliary_loss = any(map(torch.is_tensor, losses))

        def alone(numbers: Sequence[int]) -> Values:
            total = _Sum(row.lengths)
            for same in _by_length(row.lengths, numbers):
                total.add(same, Values(self._plain(row, same)))
            return total.values()

        return values, alone

    def _training(self, row: PlacedRow) -> Tuple[Values, _Alone]:
        def alone(numbers: Sequence[int]) -> Values:
            total = _Sum(row.lengths)
            for same in _by_length(row.lengths, numbers):
                if self.subject.has_plain_call:
                    examples = [row.examples[number] for number in same]
                    call = partial(self._label_loss, partial(self._plain, row, same), examples)
                    total.add(same, self._gradients(call, _flat))
                    continue
                for number in same:
                    single = self._row_of_one(row.examples[number])
                    total.add([number], self._row_gradients(single))
            return total.values()

        return self._row_gradients(row), alone

    def _trained_loss(self, row: PlacedRow) -> Tuple[Values, _Alone]:
        """Compare the loss with the mean of the losses of the examples, each in a separate batch."""
        shares = [self._predictions(example) for example in row.examples]
        if self.subject.training.mean == "example":
            shares = [int(count > 0) for count in shares]
        whole = max(1, sum(shares))

        def alone(numbers: Sequence[int]) -> Values:
            total = _Sum(row.lengths)
            for same in _equal(row.examples, numbers):
                share = shares[same[0]] / whole
                if share:
                    values = self._loss_values(self._row_of_one(row.examples[same[0]]))
                else:
                    tokens = row.lengths[same[0]]
                    values = Values(gradients=torch.zeros(tokens, self.subject.width))
                total.add(same, _repeated(values, share, len(same)))
            return total.values()

        return self._loss_values(row) if sum(shares) else Values(), alone

    def _compiled(self, row: PlacedRow) -> Tuple[Values, _Alone]:
        """Compare the compiled model with the model itself, which is compared with each example alone."""

        def computed(model: Any) -> Values:
            call = partial(self._row_logits, row, model)
            return self._gradients(partial(self._label_loss, call, row.examples), None)

        def alone(numbers: Sequence[int]) -> Values:
            values = computed(self.subject.model)
            if values.logits is None or len(numbers) == len(row.examples):
                return values
            return Values(_selected(values.logits, row.lengths, numbers))

        with compiling():
            return computed(self.subject.compiled), alone

    def _auxiliary(self, row: PlacedRow) -> Tuple[Values, _Alone]:
        """Compare the auxiliary loss of a row of equal lengths with that of a plain batch."""
        with self._auxiliary_losses() as losses:
            self.subject.logits_of(row)
            self._plain(row, range(len(row.examples)))
        numbers = [float(loss) for loss in losses if torch.is_tensor(loss) and loss.numel() == 1]
        if len(numbers) != 2 or not any(numbers):
            numbers = [0.0, 0.0]
        return Values(loss=numbers[0]), lambda _: Values(loss=numbers[1])

    # ---- parts of the calls

    def _row_of_one(self, example: Example) -> PlacedRow:
        """Collate one example; if the collator draws at random, use ours, which keeps the tokens."""
        if not self._draws:
            row = self.subject.row([example])
            if not row.is_changed:
                return row
        batch = padding_free_batch([example], causal=self.subject.causal)
        inputs = to_device(inputs_for(self.subject.model, batch), self.subject.device)
        return PlacedRow(inputs, [example], [torch.arange(len(example["input_ids"]))])

    def _plain(self, row: PlacedRow, numbers: Sequence[int]) -> torch.Tensor:
        """Compute the logits of a plain batch of examples of one length, [tokens, words]."""
        ids = [torch.as_tensor(row.examples[number]["input_ids"]) for number in numbers]
        return self.subject.plain(torch.stack(ids)).flatten(0, 1)

    def _row_logits(self, row: PlacedRow, model: Any = None) -> torch.Tensor:
        return row.select(self.subject.logits_of(row, model))

    def _row_gradients(self, row: PlacedRow) -> Values:
        call = partial(self._label_loss, partial(self._row_logits, row), row.examples)
        return self._gradients(call, row.select)

    def _loss_values(self, row: PlacedRow) -> Values:
        def computed() -> Tuple[torch.Tensor, None]:
            loss = self.subject.training.loss or self._mean_loss
            with self.subject.steady():
                return loss(self.subject.model, row.inputs), None

        return self._gradients(computed, row.select)

    def _label_loss(
        self, call: Callable[[], torch.Tensor], examples: Sequence[Example]
    ) -> Tuple[torch.Tensor, torch.Tensor]:
        """Sum the cross-entropies of examples; call: returns their logits, [tokens of all examples, words]."""
        logits = call()
        targets = _targets(examples, logits.shape[-1], logits.device)
        return F.cross_entropy(logits, targets, ignore_index=IGNORED, reduction="sum"), logits

    def _mean_loss(self, model: Any, inputs: Inputs) -> torch.Tensor:
        labels = inputs["labels"]
        logits = self.subject.training.forward(model, inputs)
        total = cross_entropy_sum(logits, labels, causal=self.subject.causal)
        return total / supervised(model, labels).clamp(min=1)

    def _gradients(
        self,
        compute: Callable[[], Tuple[torch.Tensor, Optional[torch.Tensor]]],
        select: Optional[Callable[..., torch.Tensor]],
    ) -> Values:
        """Compute a loss and logits, and the gradients at the embeddings and of the parameters.

        select: picks the tokens of the examples out of the gradients; None leaves the gradients at the embeddings out.
        """
        collecting: Any = contextlib.nullcontext([])
        if select is not None:
            collecting = kept_outputs(self.subject.embedding, _with_gradient)
        with torch.enable_grad(), collecting as embeddings:
            loss, logits = compute()
            sources = [*embeddings, *self._parameters]
            gradients = list(torch.autograd.grad(loss, sources, allow_unused=True))
        for number, gradient in enumerate(gradients):
            if gradient is None:
                gradients[number] = torch.zeros_like(sources[number])
        of_tokens = None if select is None else select(*gradients[: len(embeddings)])
        of_weights = gradients[len(embeddings) :]
        values = None if logits is None else logits.detach()
        return Values(values, of_tokens, of_weights, float(loss.detach()))

    def _predictions(self, example: Example) -> int:
        labels = np.asarray(example.get("labels", example["input_ids"]))
        return int((labels[int(self.subject.causal) :] != IGNORED).sum())

    def _auxiliary_losses(self) -> ContextManager[List[Any]]:
        return kept_outputs(self.subject.base, lambda output: getattr(output, "aux_loss", None))

    # ---- decisions

    def in_float64(self, trial: _Trial, fault: Fault) -> Optional[Fault]:
        """Repeat a trial in float64, where rounding is smaller; return its fault, or None if there is none."""
        try:
            with self.subject.converted(torch.float64) as subject:
                repeated = _Judge(subject, sum(trial.lengths))
                repeated._has_auxiliary_loss = self._has_auxiliary_loss
                faults = repeated.faults_of(trial)
        except MODEL_ERRORS:
            return fault  # this device or this code does not support float64
        return faults[0] if faults else None


def _with_gradient(output: torch.Tensor) -> torch.Tensor:
    return output if output.requires_grad else output.requires_grad_()


def _flat(*parts: torch.Tensor) -> torch.Tensor:
    """Return the gradients at the embeddings of a plain batch, [tokens, width]."""
    return sum(parts[1:], parts[0]).flatten(0, -2)


def _equal(examples: Sequence[Example], numbers: Iterable[int]) -> Iterator[List[int]]:
    """Group the numbers of examples that are one object."""
    groups: Dict[int, List[int]] = {}
    for number in numbers:
        groups.setdefault(id(examples[number]), []).append(number)
    yield from groups.values()


def _repeated(values: Values, share: float, times: int) -> Values:
    """Return the gradients and the loss of so many equal examples, each with a share of the mean."""
    assert values.gradients is not None
    gradients = (values.gradients * share).repeat(times, 1)
    weights = [gradient.mul_(share * times) for gradient in values.weights]
    return Values(None, gradients, weights, share * times * float(values.loss or 0.0))


# ---- the cause of a leak


class _TracedCall(NamedTuple):
    """A call of the model and the place of one example in its row."""

    call: Callable[[], Any]
    begin: int  # first token of the example
    length: int  # tokens of the example
    tokens: int  # tokens of the row


def _leak(subject: Subject, trial: _Trial, fault: Fault) -> Leak:
    """Describe a fault: the first layer that differs, and the settings that may be the cause."""
    layer = ""
    advice = [f"; {WAY_OUT}"]
    if hasattr(subject.base, "set_attn_implementation"):
        advice.insert(0, "; call use_padding_free(model)")
    if trial.examples is None and trial.mode in (_EVALUATION, _TRAINING):
        cause = _cause(subject, trial, max(fault.number, 0))
        layer = f", first in {cause}" if cause else ""
        # Stretched positions change the whole row, so the longest example decides.
        passed = [reach for reach in subject.far if reach.tokens < max(trial.lengths)]
        if passed:
            settings = ", ".join(f"{reach.setting} is {reach.tokens}" for reach in passed)
            layer += f" ({settings})"
            most = passed[0].tokens
            advice.insert(0, f"; pass longest=N if your examples have at most {most} tokens")
        elif layer:
            with contextlib.suppress(ValueError):
                longest = subject.longest or MOST_TOKENS
                advice.insert(0, BrokenBatches(subject, longest).ignored_inputs())
    size = "not a number" if fault.error == math.inf else f"{fault.error:.1e} of the largest"
    text = f"{subject.name}: {fault.what} ({size}){layer}"
    for words in advice:
        if len(text) + len(words) <= _MOST_MESSAGE:
            text += words
    return Leak(one_line(text, _MOST_MESSAGE), fault.first)


def _cause(subject: Subject, trial: _Trial, number: int) -> str:
    """Name the layer in which an example of a trial begins to differ."""
    judge = _Judge(subject, sum(trial.lengths))
    examples = judge.examples_of(trial)
    ids = torch.as_tensor(examples[number]["input_ids"])
    lengths = trial.lengths
    length = lengths[number]
    row = subject.row(examples)
    in_row = _TracedCall(
        partial(subject.logits_of, row), sum(lengths[:number]), length, sum(lengths)
    )
    alone = _TracedCall(lambda: subject.plain(ids[None]), 0, length, length)
    with judge._few_words():
        return _first_layer(subject, in_row, alone)


def _first_layer(subject: Subject, in_row: _TracedCall, alone: _TracedCall) -> str:
    """Name the module at which an example of a row begins to differ from the example alone: "NAME (CLASS)".

    It is the first finished module with a different output and the same input.
    """
    try:
        row_values = _trace(subject.model, in_row)
        alone_values = _trace(subject.model, alone)
    except MODEL_ERRORS:
        return ""

    def differs(name: str, which: int) -> bool:
        actual = row_values[name][which]
        expected = alone_values[name][which]
        if actual is None or expected is None or actual.shape != expected.shape:
            return which == 0  # an unknown input counts as different
        return largest_error(actual, expected) > subject.limit

    different = [name for name in row_values if name in alone_values and differs(name, 1)]
    causes = [name for name in different if not differs(name, 0)] or different
    if not causes:
        return ""
    return f"{causes[0]} ({type(subject.model.get_submodule(causes[0])).__name__})"


_Traced = Dict[str, Tuple[Optional[torch.Tensor], Optional[torch.Tensor]]]


def _trace(model: Any, traced: _TracedCall) -> _Traced:
    """Record the input and the output of each module for one example, [1, tokens, ...], in the order of finishing."""
    values: _Traced = {}

    def keep(name: str, module: Any, arguments: Any, named: Dict[str, Any], output: Any) -> None:
        if name not in values:
            hidden = named.get("hidden_states", named.get("inputs_embeds", named.get("input_ids")))
            values[name] = _part(arguments or hidden, traced), _part(output, traced)

    with contextlib.ExitStack() as stack:
        stack.enter_context(torch.no_grad())
        for name, module in model.named_modules():
            if name:
                hook = module.register_forward_hook(partial(keep, name), with_kwargs=True)
                stack.callback(hook.remove)
        traced.call()
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
