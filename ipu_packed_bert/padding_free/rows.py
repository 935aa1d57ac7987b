"""Rows as they are trained, beside each of their examples alone: logits, losses, gradients, auxiliary losses.

A row has as many tokens as a batch joins.  Its examples have one token, as many as the longest, and lengths on both
sides of every number that may matter.  Whatever starts late is in one of these rows: late in the row, late in an
example, behind many examples.
"""

from __future__ import annotations

import contextlib
import itertools
import time
from typing import Any, Callable, Dict, Iterable, Iterator, List, NamedTuple, Optional, Sequence, Tuple

import numpy as np
import torch
from torch.nn import functional as F

from ipu_packed_bert.padding_free.collators import Inputs, attends_both_ways
from ipu_packed_bert.padding_free.losses import IGNORED, cross_entropy_sum, supervised
from ipu_packed_bert.padding_free.models import FirstDifference
from ipu_packed_bert.padding_free.update import to_device

MOST_EXAMPLES = 500
_BLOCKS = (16, 32, 64, 128, 256)  # of kernels, in tokens
_SHORT = 4096  # tokens of a row of which there is a second one
_END = (1, 2)  # each row ends with these, so that a boundary is late in it
_UPDATES = 3.0  # the time that all rows may take
_FREE = 5.0  # seconds that they may take in any case
_AUXILIARY = 1e-4  # of an auxiliary loss, relative; its counts are whole numbers
_GRADIENTS = 5.0  # limits of gradients over those of logits

Example = Dict[str, np.ndarray]
Collator = Callable[[Sequence[Example]], Inputs]
Loss = Callable[[Any, Inputs], torch.Tensor]


class TrainingCalls(NamedTuple):
    """How a training feeds and calls its model."""

    collator: Optional[Collator]  # None: ours
    forward: Callable[[Any, Inputs], torch.Tensor]  # logits [rows, tokens, vocabulary]
    loss: Optional[Loss] = None  # the mean that is trained; None: that of the labels
    mean: str = "token"  # what it is a mean over: "token" or "example"


class Probed(NamedTuple):
    """What was probed, and what it took."""

    rows: Tuple[Tuple[int, int], ...] = ()  # tokens and examples of each
    types: Tuple[str, ...] = ()
    seconds: float = 0.0
    update: float = 0.0  # seconds of one forward and backward pass of the largest row
    peak: int = 0  # bytes, what the process or the GPU took more than before
    left_out: str = ""

    def __str__(self) -> str:
        shapes = ", ".join(f"{tokens:,} tokens in {examples:,} examples" for tokens, examples in self.rows)
        text = f"probed rows of {shapes or 'two short examples'}, {' and '.join(self.types)}: {self.seconds:.1f} s"
        text += f", {self.seconds / self.update:.1f} updates, {self.peak / 2**20:,.0f} MiB" if self.update else ""
        return text + (f"; {self.left_out}" if self.left_out else "")


class Fault(NamedTuple):
    """A difference that is too large."""

    what: str
    error: float
    number: int = -1  # of the example
    lengths: Tuple[int, ...] = ()  # of all examples of the row
    step: Optional[Tuple[Any, ...]] = None  # what found it
    first: Optional[FirstDifference] = None


# ---- lengths


def row_lengths(row: int, longest: int, numbers: Iterable[int], draw: np.random.Generator) -> List[List[int]]:
    """The lengths of the examples of each row to probe, the most important first.

    row: tokens of a row at most.  longest: tokens of an example at most.  numbers: lengths that may matter.
    """
    longest = min(longest, row)
    near = {number + step for number in (*_BLOCKS, *numbers) for step in (-1, 0, 1)}
    edges = draw.permutation(sorted(each for each in near if 1 < each <= longest)).astype(int).tolist()
    far = min(longest, max(row - 1, 1))
    head = [min(3, max(1, row - far))] if row > far else []
    rows = [_filled([*head, far], row, longest, edges, draw)]
    many = np.tile([1, 1, 3, 1, 2, 1, 1, 2], MOST_EXAMPLES // 8 + 1)[:MOST_EXAMPLES]
    fitting = int(np.searchsorted(many.cumsum(), row - sum(_END), side="right"))
    rows.append(_ended([int(min(each, longest)) for each in many[:fitting]] or [1], longest))
    left = [each for each in edges if each + sum(_END) < row]
    while left and len(rows) < 4:
        taken: List[int] = []
        for each in list(left):
            if sum(taken) + each + sum(_END) <= row:
                taken.append(each)
                left.remove(each)
        rows.append(_ended(taken, longest))
    if row <= _SHORT:  # other boundaries, as the first row is blind to what begins at one of its own
        rows.append(_filled([min(2, row)], row, longest, draw.permutation(longest)[:3] + 1, draw)[::-1])
    return rows


def _filled(lengths: List[int], row: int, longest: int, edges: Iterable[int], draw: np.random.Generator) -> List[int]:
    """Filled to exactly `row` tokens: one-token examples, lengths at edges, others."""
    found, end = list(lengths), [min(each, longest) for each in _END]
    for length in itertools.chain(edges, iter(lambda: int(draw.integers(1, longest + 1)), 0)):
        left = row - sum(found) - sum(end)
        if left <= 0:
            break
        found += [1] * (left > 1 and len(found) % 3 == 0)
        found.append(max(1, min(int(length), row - sum(found) - sum(end))))
    return found + (end if sum(found) + sum(end) <= row else [1] * (row - sum(found)))


def _ended(lengths: List[int], longest: int) -> List[int]:
    return [*lengths, *(min(each, longest) for each in _END)]


# ---- a row and its examples


class _Row(NamedTuple):
    """Examples, the inputs that the collator makes of them, and where their tokens are in it."""

    examples: List[Example]
    inputs: Inputs
    places: List[torch.Tensor]  # of each example: int64 [its tokens], in the flattened input_ids

    def name(self) -> str:
        return f"in a row of {sum(map(len, self.places)):,} tokens and {len(self.examples):,} examples"


def places_of(examples: Sequence[np.ndarray], inputs: Inputs) -> List[torch.Tensor]:
    """Where the collator puts each example.  Raises ValueError where one is not in its batch, in their order."""
    flat = torch.as_tensor(inputs["input_ids"]).flatten().cpu()
    places, begin = [], 0
    for number, each in enumerate(examples):
        ids = torch.as_tensor(each)
        while begin + len(ids) <= len(flat) and not torch.equal(flat[begin : begin + len(ids)], ids):
            begin += 1
        if begin + len(ids) > len(flat):
            raise ValueError(f"example {number} of {len(ids)} tokens is not in the collator's batch, in this order")
        places.append(torch.arange(begin, begin + len(ids)))
        begin += len(ids)
    return places


def _found(examples: Sequence[Example], inputs: Inputs) -> List[torch.Tensor]:
    return places_of([each["input_ids"] for each in examples], inputs)


def _predicted(example: Example) -> torch.Tensor:
    """Labels of the tokens behind the first, IGNORED where nothing is predicted."""
    return torch.as_tensor(np.asarray(example.get("labels", example["input_ids"])))[1:].long()


class _Result(NamedTuple):
    """Of one row."""

    logits: torch.Tensor  # [tokens, vocabulary], in the order of the examples
    gradients: torch.Tensor  # at the embeddings, [tokens, width]
    weights: List[Optional[torch.Tensor]]  # gradients of the parameters


class RowProbe:
    """Rows of one model, in the types and modes in which it stands now.

    probe: knows the model, calls it plainly and by rows, and says which difference of logits, over the largest, is too
    large (`probe.py`).
    """

    def __init__(self, probe: Any) -> None:
        self.probe, self.model, self.training, self.limit = probe, probe.model, probe.training, float(probe.limit)
        own_ones = (each for each in self.model.parameters() if type(each.data) is torch.Tensor)  # not shards
        self.parameters = [each for each in own_ones if each.requires_grad]
        self.causal = not attends_both_ways(self.model)
        self.update, self.levelled = 0.0, False  # levelled: whether the model gives an auxiliary loss

    def _examples(self, lengths: Sequence[int], draw: np.random.Generator, kinds: bool = False) -> List[Example]:
        """Random tokens; a third of the examples have a prompt, which is not predicted.

        kinds: examples of one length and kind are equal.
        """
        made: Dict[Tuple[int, bool], Example] = {}
        found = []
        for number, length in enumerate(lengths):
            kind = length, number % 3 == 1 and length > 3
            if kind not in made or not kinds:
                ids = self.probe.tokens(length, draw)
                labels = ids.copy()
                # A masked model's own collators keep the label of a first token, others leave it out as causal ones do.
                labels[: length // 2 if kind[1] else int(not self.causal)] = IGNORED
                made[kind] = {"input_ids": ids, "labels": labels}
            found.append(made[kind])
        return found

    # ---- logits and gradients

    def _logits_and_gradients(self, lengths: Sequence[int], draw: np.random.Generator) -> List[Fault]:
        """Of a row in training and in evaluation mode, beside each example alone in evaluation mode."""
        return self._compared(self._examples(lengths, draw))

    def audit(self, examples: List[Example]) -> Tuple[List[Fault], Probed]:
        """Of these examples."""
        begun = time.perf_counter()
        faults = self._compared(examples)
        shape = sum(len(each["input_ids"]) for each in examples), len(examples)
        probed = Probed((shape,), (), time.perf_counter() - begun, self.update)
        return [each._replace(step=("_compared", examples, None)) for each in faults], probed

    def _compared(self, examples: List[Example]) -> List[Fault]:
        inputs = self._inputs(examples)
        row = _Row(examples, inputs, _found(examples, inputs))
        self.model.eval()
        with torch.no_grad(), self._auxiliary_losses() as kept:
            evaluated = self._logits(row)
        self.levelled = any(map(torch.is_tensor, kept))
        result = self._trained(row, evaluated)
        faults = self._beside_alone(row, result, evaluated)
        return [each._replace(what=f"{row.name()}, {each.what}") for each in faults]

    def _inputs(self, examples: Sequence[Example]) -> Inputs:
        return to_device(self.probe.collated(examples), self.probe.device)

    def _trained(self, row: _Row, evaluated: torch.Tensor) -> _Result:
        """In training mode; in evaluation mode where training is random also without dropout."""
        with _without_dropout(self.model):
            begun = time.perf_counter()
            result = self._of_row(row)
            self.update = max(self.update, time.perf_counter() - begun)
            most = float(evaluated.abs().max().clamp(min=1e-30))
            if not _largest(result.logits - evaluated) > self.limit * most:
                return result
            torch.manual_seed(1)
            with torch.no_grad():
                again = self._logits(row)
        if not _largest(again - result.logits) > 1e-6 * most:
            return result
        return self._of_row(row)

    def _logits(self, row: _Row) -> torch.Tensor:
        self.probe.prepare()
        logits = self.training.forward(self.model, {k: v for k, v in row.inputs.items() if k != "labels"})
        return _of_examples(logits, row.places)

    def _of_row(self, row: _Row) -> _Result:
        with torch.enable_grad(), _embeddings_of(self.probe.base) as kept:
            logits = self._logits(row)
            losses = [
                F.cross_entropy(part[:-1], _predicted(each).to(part.device), ignore_index=IGNORED, reduction="sum")
                for part, each in zip(logits.split([len(each) for each in row.places]), row.examples)
                if len(part) > 1
            ]
            total = torch.stack(losses).sum() if losses else logits.sum() * 0.0
            tokens, *weights = torch.autograd.grad(total, [kept[0], *self.parameters], allow_unused=True)
        return _Result(logits.detach(), _of_examples(tokens, row.places), list(weights))

    def _auxiliary_losses(self) -> Any:
        return _kept(self.probe.base, lambda output: getattr(output, "aux_loss", None))

    def _beside_alone(self, row: _Row, result: _Result, evaluated: torch.Tensor) -> List[Fault]:
        """Examples of one length are computed together, in a plain batch of so many rows."""
        spans = np.cumsum([0, *(len(each) for each in row.places)])
        scale = float(evaluated.abs().max().clamp(min=1e-30))
        slope = float(result.gradients.abs().max().clamp(min=1e-30))
        sums: List[Optional[torch.Tensor]] = [None] * len(self.parameters)
        faults = [Fault("evaluation differs from training", _largest(result.logits - evaluated) / scale)]
        worst: Dict[str, Fault] = {}
        begins: List[FirstDifference] = []
        by_length: Dict[int, List[int]] = {}
        for number, place in enumerate(row.places):
            by_length.setdefault(len(place), []).append(number)
        for length, numbers in by_length.items():
            ids = torch.stack([torch.as_tensor(row.examples[number]["input_ids"]) for number in numbers])
            labels = torch.stack([_predicted(row.examples[number]) for number in numbers]).to(self.probe.device)
            with torch.enable_grad(), _embeddings_of(self.probe.base) as kept:
                logits = self.probe.plain(*ids)
                loss = F.cross_entropy(
                    logits[:, :-1].flatten(0, 1), labels.flatten(), ignore_index=IGNORED, reduction="sum"
                )
                tokens, *weights = torch.autograd.grad(loss, [kept[0], *self.parameters], allow_unused=True)
            for index, each in enumerate(weights):
                if each is not None:
                    before = sums[index]
                    sums[index] = each if before is None else before + each
            where = torch.as_tensor(np.stack([np.arange(spans[number], spans[number + 1]) for number in numbers]))
            for what, found, expected, most in (
                ("scores otherwise than alone", evaluated, logits.detach(), scale),
                ("has other gradients than alone", result.gradients, tokens, slope),
            ):
                errors = (found[where.to(found.device)] - accurate(expected)).abs().amax(-1).double() / most
                errors = errors.nan_to_num(nan=float("inf"))
                error, at = float(errors.max()), divmod(int(errors.argmax()), length)
                if what not in worst or error > worst[what].error:
                    first = int((errors[at[0]] > self.limit).float().argmax())
                    text = f"example {numbers[at[0]]} of {length:,} tokens {what} from its token {first} on"
                    worst[what] = Fault(text, error, numbers[at[0]])
                for index, token in (errors > self.limit).nonzero().tolist() if found is evaluated else ():
                    which, size = numbers[index], float(errors[index, token])
                    begins.append(FirstDifference(which, token, int(row.places[which][token]), size))
        scores, slopes = worst.values()
        scores = scores._replace(first=min(begins, key=lambda each: each.place, default=None))
        faults = [scores, *faults, slopes]
        faults.append(Fault("the gradients of the weights are not those of its examples", self._weights(result, sums)))
        limits = [self.limit, self.limit, self.limit * _GRADIENTS, self.limit * _GRADIENTS]
        return [each for each, limit in zip(faults, limits) if not each.error <= limit]

    def _weights(self, result: _Result, sums: List[Optional[torch.Tensor]]) -> float:
        """The largest difference of a gradient of a parameter; a parameter with small ones counts by all others'."""
        pairs = [(found, expected) for found, expected in zip(result.weights, sums)]
        most = max((_largest(each) for pair in pairs for each in pair if each is not None), default=0.0)
        worst = 0.0
        for found, expected in pairs:
            if found is None and expected is None:
                continue
            known: Any = found if expected is None else expected
            left, right = (torch.zeros_like(known) if each is None else each for each in (found, expected))
            error = _largest(left - right) / max(_largest(right), 0.05 * most, 1e-30)
            worst = max(worst, error if error == error else float("inf"))
        return worst

    # ---- what is trained

    def _loss(self, lengths: Sequence[int], draw: np.random.Generator) -> List[Fault]:
        """The loss of a row is the mean of those of its examples, each in a batch of its own."""
        examples = self._examples(lengths, draw, kinds=True)
        counts = [int((_predicted(each) != IGNORED).sum()) for each in examples]
        if not sum(counts):
            return []
        weights = counts if self.training.mean == "token" else [int(count > 0) for count in counts]
        made: Dict[int, Tuple[float, torch.Tensor]] = {}
        expected, slopes = 0.0, []
        for example, weight in zip(examples, weights):
            if weight and id(example) not in made:
                made[id(example)] = self._loss_of([example])
        value, slope = self._loss_of(examples)
        for example, weight in zip(examples, weights):
            share = weight / sum(weights)
            alone = made.get(id(example), (0.0, slope.new_zeros(len(example["input_ids"]), slope.shape[-1])))
            expected += share * alone[0]
            slopes.append(share * alone[1])
        errors = (slope - torch.cat(slopes)).abs().amax(-1).double() / float(slope.abs().max().clamp(min=1e-30))
        errors = errors.nan_to_num(nan=float("inf"))
        number = int(np.searchsorted(np.cumsum(lengths), int(errors.argmax()), side="right"))
        text = f"in a row of {sum(lengths):,} tokens and {len(lengths):,} examples, the loss"
        faults = [
            Fault(
                f"{text} is {value:.6g}, and the mean of its examples is {expected:.6g}",
                abs(value - expected) / max(abs(expected), 1e-30) if value == value else float("inf"),
            ),
            Fault(
                f"{text} has another gradient at example {number} of {lengths[number]:,} tokens than alone",
                float(errors.max()),
            ),
        ]
        return [each for each, times in zip(faults, (1.0, _GRADIENTS)) if not each.error <= times * self.limit]

    def _loss_of(self, examples: List[Example]) -> Tuple[float, torch.Tensor]:
        """The trained loss, and its gradient at the tokens of the examples [tokens, width]."""
        inputs = self._inputs(examples)
        places = _found(examples, inputs)
        with _without_dropout(self.model), torch.enable_grad(), _embeddings_of(self.probe.base) as kept:
            loss = self.training.loss(self.model, inputs) if self.training.loss else self._label_loss(inputs)
            (tokens,) = torch.autograd.grad(loss, kept[:1], allow_unused=True)
        if tokens is None:
            tokens = torch.zeros_like(kept[0])
        return float(loss.detach()), _of_examples(tokens, places)

    def _label_loss(self, inputs: Inputs) -> torch.Tensor:
        logits = self.training.forward(self.model, inputs)
        labels = inputs["labels"]
        return cross_entropy_sum(logits, labels, causal=self.causal) / supervised(self.model, labels).clamp(min=1)

    def _auxiliary(self, lengths: Sequence[int], draw: np.random.Generator) -> List[Fault]:
        """The auxiliary loss of a row of equal lengths is that of a plain batch."""
        examples, count, length = self._examples(lengths, draw), len(lengths), lengths[0]
        with torch.no_grad(), _without_dropout(self.model), self._auxiliary_losses() as kept:
            self.training.forward(self.model, self._inputs(examples))
            self.probe.plain(*(torch.as_tensor(each["input_ids"]) for each in examples))
        pair = [float(each) for each in kept if torch.is_tensor(each) and each.numel() == 1]
        if len(pair) != 2 or not any(pair):
            return []
        error = abs(pair[0] - pair[1]) / max(abs(pair[1]), 1e-30)
        what = f"in a row of {count:,} examples of {length:,} tokens, the auxiliary loss is {pair[0]:.6g}"
        return [Fault(f"{what}, in a plain batch {pair[1]:.6g}", error)] * (not error <= _AUXILIARY)

    # ---- all rows

    def _steps(self, row: int, longest: int, numbers: Iterable[int]) -> List[Tuple[str, List[int]]]:
        """What to do with which lengths, the most important first."""
        found: List[Tuple[str, List[int]]] = []
        own = self.training.collator is None and self.training.loss is None
        for lengths in row_lengths(row, longest, numbers, np.random.default_rng(0)):
            found.append(("_logits_and_gradients", lengths))
            found += [] if own else [("_loss", lengths)]
        for length, count in ((1, min(MOST_EXAMPLES, row)), (min(16, longest), max(1, row // 16))):
            found.append(("_auxiliary", [length] * count))
        return found

    def repeat(self, fault: Fault) -> List[Fault]:
        """The step that found the fault."""
        assert fault.step is not None
        name, what, seed = fault.step
        faults = self._compared(what) if seed is None else getattr(self, name)(what, np.random.default_rng(seed))
        return [each._replace(lengths=fault.lengths) for each in faults]

    def run(self, row: int, longest: int, numbers: Iterable[int]) -> Tuple[List[Fault], Probed]:
        """The first faults, and what was probed."""
        begun = time.perf_counter()
        rows: List[Tuple[int, int]] = []
        left_out = ""
        for number, (name, lengths) in enumerate(self._steps(row, longest, numbers)):
            spent = time.perf_counter() - begun
            if name == "_auxiliary" and not self.levelled:
                continue
            if len(rows) > 1 and spent + 2 * self.update * sum(lengths) / row > max(_FREE, _UPDATES * self.update):
                left_out = (
                    left_out or f"left out, as they take too long: a row of {sum(lengths):,} tokens and those after"
                )
                continue
            faults = getattr(self, name)(lengths, np.random.default_rng(number))
            if faults:
                step = name, lengths, number
                shape = () if name == "_auxiliary" else tuple(lengths)
                return [each._replace(step=step, lengths=shape) for each in faults], Probed()
            rows += [(sum(lengths), len(lengths))] * ((sum(lengths), len(lengths)) not in rows)
        return [], Probed(tuple(rows), (), time.perf_counter() - begun, self.update, 0, left_out)


@contextlib.contextmanager
def _kept(module: Any, keep: Callable[[Any], Any]) -> Iterator[List[Any]]:
    """What `keep` makes of each output of a module, which takes its place where it is a tensor."""
    kept: List[Any] = []

    def hook(module: Any, given: Any, output: Any) -> Any:
        kept.append(keep(output))
        return kept[-1] if torch.is_tensor(output) else output

    handle = module.register_forward_hook(hook)
    try:
        yield kept
    finally:
        handle.remove()


def _embeddings_of(base: Any) -> Any:
    """In this block: a list of what the model's embeddings give, with a gradient."""
    module = base.get_input_embeddings()
    return _kept(module, lambda output: output if output.requires_grad else output.requires_grad_())


def _of_examples(values: torch.Tensor, places: List[torch.Tensor]) -> torch.Tensor:
    """[rows, slots, width] -> [tokens of the examples, width]; a copy only where there is padding."""
    flat = values.reshape(-1, values.shape[-1])
    whole = len(flat) == sum(map(len, places))
    return accurate(flat if whole else flat[torch.cat(places).to(flat.device)])


def accurate(values: torch.Tensor) -> torch.Tensor:
    """In float32 at least."""
    return values if values.dtype == torch.float64 else values.float()


def _largest(values: torch.Tensor) -> float:
    return float(values.abs().max()) if values.numel() else 0.0


@contextlib.contextmanager
def _without_dropout(model: Any) -> Iterator[None]:
    """Training mode, in which nothing is left out and no noise is added."""
    modes = {module: module.training for module in model.modules()}
    changed: List[Tuple[Any, str, float]] = []
    model.train()
    for module in modes:
        random = ["p"] if isinstance(module, torch.nn.modules.dropout._DropoutNd) else []
        random += [name for name in vars(module) if "drop" in name or "jitter" in name]
        for name in random:
            value = getattr(module, name)
            if isinstance(value, float) and value:
                changed.append((module, name, value))
                setattr(module, name, 0.0)
    try:
        yield
    finally:
        for module, name, value in changed:
            setattr(module, name, value)
        for module, training in modes.items():
            module.training = training
