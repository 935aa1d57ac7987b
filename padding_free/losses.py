"""The loss of a model: with the output layer in blocks of tokens, or from whole logits.

In blocks, the logits of a row never exist as a whole: the gradients are computed with the loss, block by block, so no
logits are kept for the backward pass or computed twice.  Tokens that are not predicted have no logits at all.

In causal models a token predicts the next token; in models that attend to both sides, such as BERT, it predicts itself.
"""

from __future__ import annotations

import contextlib
import math
from typing import Any, Dict, Iterator, List, NamedTuple, Optional, Tuple

import torch
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from padding_free.collators import Inputs, attends_both_ways
from padding_free.models import base_of, kept_modes, text_config

IGNORED = -100  # the label of a token that is not predicted
# Number of logits of which the loss is computed at once: they stay in the cache of a CPU, and occupy a GPU.
NUMBERS_AT_ONCE = {"cpu": 2**18, "others": 2**25}
BLOCK = 2**23  # logits of one product with the output layer, 32 MiB in float32


class _Change(NamedTuple):
    """A change of the logits of the output layer: cap * tanh(factor * logits / cap)."""

    factor: float = 1.0
    cap: Optional[float] = None

    def of(self, logits: torch.Tensor) -> Tuple[torch.Tensor, Optional[torch.Tensor]]:
        """Return the changed logits, and the derivative of the change; None if it is 1."""
        if self.cap is not None:
            bent = torch.tanh(logits * (self.factor / self.cap))
            return bent * self.cap, self.factor * (1 - bent * bent)
        if self.factor == 1:
            return logits, None
        return logits * self.factor, logits.new_tensor(self.factor)


class OutputLayer(NamedTuple):
    """The last layer of a model whose loss can be computed in blocks."""

    layer: torch.nn.Linear
    change: _Change
    asked: bool  # `forward` calls the model's `loss_function`

    def _loss_sum(
        self, hidden: torch.Tensor, dtype: torch.dtype, labels: torch.Tensor
    ) -> torch.Tensor:
        """Sum the cross-entropies of the predicted tokens, in float32 or float64.

        hidden: [rows, tokens, hidden size]; dtype: of the logits; labels: [rows, tokens], of the tokens themselves.
        """
        words = labels.flatten()
        kept = (words != IGNORED).nonzero().squeeze(1)
        bias = self.layer.bias
        total: torch.Tensor = _LinearCrossEntropySum.apply(
            hidden.flatten(0, -2)[kept].to(dtype),
            self.layer.weight.to(dtype),
            None if bias is None else bias.to(dtype),
            words[kept],
            self.change,
        )
        return total

    def _loss_of(self, model: Any, inputs: Dict[str, Any], labels: torch.Tensor) -> torch.Tensor:
        """Compute `_loss_sum` of one forward pass without labels; `labels` are those that each token predicts."""
        with self._taken_out() as calls:
            model(**{**inputs, "use_cache": False})
        return self._loss_sum(*calls.pop(), labels)

    @contextlib.contextmanager
    def _taken_out(self) -> Iterator[List[Tuple[torch.Tensor, torch.dtype]]]:
        """Let the layer return no logits in the block; list its inputs and the dtype of its logits."""
        calls: List[Tuple[torch.Tensor, torch.dtype]] = []

        def forward(hidden: torch.Tensor) -> torch.Tensor:
            token = hidden.detach().flatten(0, -2)[:1]
            logit = F.linear(token, self.layer.weight.detach()[:1])  # in the dtype of autocast
            calls.append((hidden, logit.dtype))
            return hidden.new_empty(*hidden.shape[:-1], 0)

        with _replaced(self.layer, "forward", forward):
            yield calls

    @contextlib.contextmanager
    def _of_few_words(self, most: int) -> Iterator[None]:
        """Compute the logits of at most `most` evenly spread words in the block, without gradients of the weight."""
        step = -(-self.layer.out_features // most)

        def forward(hidden: torch.Tensor) -> torch.Tensor:
            weight, bias = (
                None if parameter is None else parameter.detach()[::step]
                for parameter in (self.layer.weight, self.layer.bias)
            )
            return F.linear(hidden, weight, bias)

        with _replaced(self.layer, "forward", forward):
            yield

    @contextlib.contextmanager
    def for_loss(self, model: Any) -> Iterator[None]:
        """Compute the loss that `model` returns with labels in blocks."""
        with self._taken_out() as calls:

            def loss_function(
                logits: Any,
                labels: torch.Tensor,
                vocab_size: Optional[int] = None,
                num_items_in_batch: Any = None,
                shift_labels: Optional[torch.Tensor] = None,
                **_: Any,
            ) -> torch.Tensor:
                if shift_labels is None:
                    shift_labels = _next_labels(labels)
                if num_items_in_batch is None:
                    num_items_in_batch = (shift_labels != IGNORED).sum()
                return self._loss_sum(*calls.pop(), shift_labels) / num_items_in_batch

            with _replaced(base_of(model), "_loss_function", loss_function):
                yield


def _next_labels(labels: torch.Tensor) -> torch.Tensor:
    """Return the label that each token predicts.  Labels are moved, since moved logits would be a copy."""
    return F.pad(labels[:, 1:], (0, 1), value=IGNORED)


@contextlib.contextmanager
def _replaced(module: Any, name: str, function: Any) -> Iterator[None]:
    """Replace a method of a module in the block."""
    before = dict(vars(module))
    setattr(module, name, function)
    try:
        yield
    finally:
        delattr(module, name)
        if name in before:
            setattr(module, name, before[name])


class _LinearCrossEntropySum(torch.autograd.Function):
    """The loss of a linear layer; its gradients are computed in the forward pass, and scaled in the backward pass."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: torch.Tensor,
        weight: torch.Tensor,
        bias: Optional[torch.Tensor],
        words: torch.Tensor,
        change: _Change,
    ) -> torch.Tensor:
        accurate = torch.promote_types(hidden.dtype, torch.float32)
        total = torch.zeros((), dtype=accurate, device=hidden.device)
        of_hidden, of_weight, of_bias = gradients = _zeros_for(ctx, accurate, hidden, weight, bias)
        step = max(1, BLOCK // len(weight))
        for begin in range(0, len(words), step):
            here = slice(begin, begin + step)
            block = F.linear(hidden[here], weight, bias)
            _add_loss(total, block, words[here], change, any(ctx.needs_input_grad))
            if of_hidden is not None:
                torch.mm(block, weight, out=of_hidden[here])
            if of_weight is not None and of_weight.dtype == block.dtype:
                of_weight.addmm_(block.t(), hidden[here])
            elif of_weight is not None:
                of_weight += block.t() @ hidden[here]
            if of_bias is not None:
                of_bias += block.sum(0, dtype=accurate)
        ctx.gradients = gradients
        ctx.types = [None if value is None else value.dtype for value in (hidden, weight, bias)]
        return total

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, factor: torch.Tensor) -> Any:
        scaled: List[Optional[torch.Tensor]] = []
        for place, dtype in enumerate(ctx.types):
            gradient = ctx.gradients[place]
            ctx.gradients[place] = None  # freed as soon as it is converted
            scaled.append(None if gradient is None else gradient.mul_(factor).to(dtype))
        return (*scaled, None, None)


def _zeros_for(
    ctx: Any, accurate: torch.dtype, *inputs: Optional[torch.Tensor]
) -> List[Optional[torch.Tensor]]:
    """Return zeros for the gradient of each input that needs one, in `accurate` if the gradient is a sum."""
    zeros: List[Optional[torch.Tensor]] = []
    for place, value in enumerate(inputs):
        gradient = None
        if value is not None and ctx.needs_input_grad[place]:
            gradient = torch.zeros_like(value, dtype=accurate if place else None)
        zeros.append(gradient)
    return zeros


def _add_loss(
    total: torch.Tensor,
    block: torch.Tensor,
    words: torch.Tensor,
    change: _Change,
    with_slopes: bool,
) -> None:
    """Add the cross-entropy of the logits `block` to the total, and overwrite the logits by its derivative."""
    for piece in _pieces(block):
        logits, slope = change.of(block[piece].to(total.dtype))
        word = words[piece].unsqueeze(1)
        summed = logits.logsumexp(1, keepdim=True)
        total += (summed - logits.gather(1, word)).sum()
        if with_slopes:
            logits = logits.sub_(summed).exp_()
            logits.scatter_add_(1, word, logits.new_full(word.shape, -1.0))
            block[piece] = logits if slope is None else logits * slope


def _pieces(logits: torch.Tensor) -> List[slice]:
    """Cut logits [tokens, vocabulary] into pieces of consecutive tokens."""
    numbers = NUMBERS_AT_ONCE["cpu" if logits.device.type == "cpu" else "others"]
    step = max(1, numbers // max(1, logits.shape[1]))
    return [slice(begin, begin + step) for begin in range(0, len(logits), step)]


# ---- whole logits


class _CrossEntropySum(torch.autograd.Function):
    """The loss of whole logits, piece by piece, so that only their gradient is another array of their size."""

    @staticmethod
    def forward(ctx: Any, logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(logits, labels)
        accurate = torch.promote_types(logits.dtype, torch.float32)
        total = torch.zeros((), dtype=accurate, device=logits.device)
        for here in _pieces(logits):
            total += F.cross_entropy(
                logits[here].to(accurate), labels[here], ignore_index=IGNORED, reduction="sum"
            )
        return total

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, factor: torch.Tensor) -> Any:
        logits, labels = ctx.saved_tensors
        gradient = torch.empty_like(logits)
        weights = torch.where(labels == IGNORED, 0.0, factor).unsqueeze(1)
        # An ignored token has weight 0, so its word does not matter.
        words = labels.clamp(min=0).unsqueeze(1)
        for here in _pieces(logits):
            part = torch.softmax(logits[here], dim=1, dtype=factor.dtype)
            part.scatter_add_(1, words[here], part.new_full((len(part), 1), -1.0))
            torch.mul(part, weights[here], out=part)
            gradient[here] = part
        return gradient, None


def cross_entropy_sum(
    logits: torch.Tensor, labels: torch.Tensor, *, causal: bool = True
) -> torch.Tensor:
    """Sum the cross-entropies of the predicted tokens.

    Args:
        logits: [rows, tokens, vocabulary].
        labels: [rows, tokens], -100 for a token that is not predicted.
        causal: The logits of a token are those of the next token; False: of the token itself.

    Returns:
        A scalar in float32 or float64.
    """
    words = _next_labels(labels) if causal else labels
    total: torch.Tensor = _CrossEntropySum.apply(logits.flatten(0, 1), words.flatten())
    return total


# ---- the output layer

_PLACE = "_padding_free_output_layer"  # an attribute of the model, like that of models.py


def output_layer(model: Any, *, inside: bool = False) -> Optional[OutputLayer]:
    """Return the output layer of a model if its loss can be computed in blocks, else None.

    The model is tested once: it is called with a few tokens, and its changes of known logits are compared.

    Args:
        model: The model.
        inside: The loss is computed in `forward`, so that DistributedDataParallel detects the use of the layer.
    """
    if _is_wrapped(model, inside):
        return None
    base = base_of(model)
    try:
        layer = base.get_output_embeddings()
    except (AttributeError, NotImplementedError):
        return None
    if not _is_plain(layer):
        return None
    known = vars(base).get(_PLACE)
    if known is None or known[0] is not layer:
        known = vars(base)[_PLACE] = (layer, _tried(base, layer))
    output: Optional[OutputLayer] = known[1]
    return output


def _is_wrapped(model: Any, inside: bool) -> bool:
    """Return True if the layer cannot be taken out of the model, because of a compiler or DistributedDataParallel."""
    while model is not None:
        searches_unused = not inside and getattr(model, "find_unused_parameters", False)
        if hasattr(model, "_orig_mod") or searches_unused:
            return True
        model = getattr(model, "module", None)
    return False


def _is_plain(layer: Any) -> bool:
    """Return True if the layer only multiplies by a weight that is not sharded."""
    if type(layer) is not torch.nn.Linear or "forward" in vars(layer):
        return False
    hooked = (
        layer._forward_hooks
        or layer._forward_pre_hooks
        or layer._backward_hooks
        or layer._backward_pre_hooks
    )
    sharded = any(
        hasattr(parameter, "placements") or parameter.is_meta for parameter in layer.parameters()
    )
    return not hooked and not sharded


def _tried(base: Any, layer: torch.nn.Linear) -> Optional[OutputLayer]:
    """Call a model with known logits; return its output layer if they change according to the configuration."""
    config = text_config(base)
    divisor = getattr(config, "logits_scaling", None) or 1
    factor = getattr(config, "logit_scale", None) or 1 / divisor
    change = _Change(float(factor), getattr(config, "final_logit_softcapping", None))
    device = layer.weight.device
    words = layer.out_features
    # These logits are large enough to show a cap too.
    known = torch.linspace(-90, 90, 3 * words, device=device).reshape(1, 3, words)
    known = known.to(layer.weight.dtype)
    inputs: List[torch.Tensor] = []  # of the layer
    outputs: List[torch.Tensor] = []  # logits that the loss function gets

    def forward(hidden: torch.Tensor) -> torch.Tensor:
        inputs.append(hidden)
        return known.clone()

    def loss_function(
        logits: torch.Tensor, labels: torch.Tensor, *_: Any, **__: Any
    ) -> torch.Tensor:
        outputs.append(logits)
        return logits.sum() * 0

    is_usual = getattr(getattr(base, "loss_function", None), "__name__", "") == "ForCausalLMLoss"
    ids = torch.zeros(1, 3, dtype=torch.int64, device=device)
    replaced_layer = _replaced(layer, "forward", forward)
    replaced_loss = _replaced(base, "_loss_function", loss_function)
    try:
        with kept_modes(base), torch.no_grad(), replaced_layer, replaced_loss:
            base.eval()
            plain = base(input_ids=ids, use_cache=False).logits
            if is_usual:
                base(input_ids=ids, labels=ids, use_cache=False)
    except (AttributeError, IndexError, RuntimeError, TypeError, ValueError):
        return None

    expected, _ = change.of(known.to(torch.promote_types(known.dtype, torch.float32)))
    allowed = 100 * torch.finfo(known.dtype).eps
    is_same = all(_is_near(logits, expected, allowed) for logits in (plain, *outputs))
    is_right_input = all(hidden.shape == (1, 3, layer.in_features) for hidden in inputs)
    is_called = len(inputs) == 1 + is_usual
    if not (is_same and is_right_input and is_called and math.isfinite(change.factor)):
        return None
    return OutputLayer(layer, change, is_usual and len(outputs) == 1)


def _is_near(actual: torch.Tensor, expected: torch.Tensor, allowed: float) -> bool:
    if actual.shape != expected.shape:
        return False
    difference = (actual.to(expected.dtype) - expected).abs().max()
    return bool(difference <= allowed * expected.abs().max())


# ---- of a model


def at_least_float32(values: torch.Tensor) -> torch.Tensor:
    """Convert half-precision values to float32."""
    return values if values.dtype == torch.float64 else values.float()


def logits_of(model: Any, inputs: Inputs) -> torch.Tensor:
    """Compute the logits, [rows, tokens, vocabulary], without a loss and without a cache."""
    return model(**{**_without_labels(inputs), "use_cache": False}).logits


def _without_labels(inputs: Inputs) -> Inputs:
    return {name: value for name, value in inputs.items() if name != "labels"}


def loss_sum(model: Any, inputs: Inputs) -> torch.Tensor:
    """Sum the cross-entropies of the predicted tokens of one micro-batch.

    The sum is computed in blocks of tokens if the output layer allows it, without the logits of all tokens.

    Args:
        model: The model.
        inputs: Its inputs, with labels.

    Returns:
        A scalar in float32 or float64.
    """
    layer = output_layer(model)
    is_causal = not attends_both_ways(model)
    labels = inputs["labels"]
    if layer is None:
        return cross_entropy_sum(logits_of(model, inputs), labels, causal=is_causal)
    if is_causal:
        labels = _next_labels(labels)
    return layer._loss_of(model, _without_labels(inputs), labels)


def supervised(model: Any, labels: torch.Tensor) -> torch.Tensor:
    """Count the predicted tokens: a scalar on the device of the labels, without a sync.

    Args:
        model: The model; if it is causal, the first token of a row is never predicted.
        labels: [rows, tokens].
    """
    first = 0 if attends_both_ways(model) else 1
    return (labels[:, first:] != IGNORED).sum()
