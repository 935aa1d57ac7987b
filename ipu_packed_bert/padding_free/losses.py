"""The loss of a model: by the output layer in blocks of tokens, else of whole logits.

In blocks the logits of a row are never there as a whole: the gradients are computed beside the loss, block by block, so
no logits are kept for the backward pass or computed twice.  Tokens that are not predicted have no logits at all.

In causal models a token predicts the one behind it; in those that attend to both sides, as BERT, itself.
"""

from __future__ import annotations

import contextlib
import math
from typing import Any, Dict, Iterator, List, NamedTuple, Optional, Tuple

import torch
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from ipu_packed_bert.padding_free.collators import Inputs, attends_both_ways
from ipu_packed_bert.padding_free.models import base_of, text_config

IGNORED = -100  # the label of a token that is not predicted
# Logits of which the loss is computed at once: those that stay in the cache of a CPU; enough to do for a GPU.
NUMBERS_AT_ONCE = {"cpu": 2**18, "others": 2**25}
BLOCK = 2**23  # logits of one product with the output layer, 32 MiB in float32


class _Change(NamedTuple):
    """What a model does to the logits that its output layer gives: cap * tanh(factor * logits / cap)."""

    factor: float = 1.0
    cap: Optional[float] = None

    def of(self, logits: torch.Tensor) -> Tuple[torch.Tensor, Optional[torch.Tensor]]:
        """The changed logits, and the derivative by the given ones where that is not 1."""
        if self.cap is None:
            return (logits, None) if self.factor == 1 else (logits * self.factor, logits.new_tensor(self.factor))
        bent = torch.tanh(logits * (self.factor / self.cap))
        return bent * self.cap, self.factor * (1 - bent * bent)


class OutputLayer(NamedTuple):
    """The last layer of a model whose loss can be computed in blocks."""

    layer: torch.nn.Linear
    change: _Change
    asked: bool  # whether `forward` takes its loss from the model's `loss_function`

    def _loss_sum(self, hidden: torch.Tensor, dtype: torch.dtype, labels: torch.Tensor) -> torch.Tensor:
        """Sum of the cross-entropies of the predicted tokens, in float32 or float64.

        hidden: [rows, tokens, hidden size]; dtype: of the logits; labels: [rows, tokens], of the tokens themselves.
        """
        kept = (labels.flatten() != IGNORED).nonzero().squeeze(1)
        weight, bias = self.layer.weight, self.layer.bias
        total: torch.Tensor = _LinearCrossEntropySum.apply(
            hidden.flatten(0, -2)[kept].to(dtype),
            weight.to(dtype),
            None if bias is None else bias.to(dtype),
            labels.flatten()[kept],
            self.change,
        )
        return total

    def _loss_of(self, model: Any, inputs: Dict[str, Any], labels: torch.Tensor) -> torch.Tensor:
        """`_loss_sum` of one forward pass without labels; labels: of the tokens behind."""
        with self._taken_out() as found:
            model(**{**inputs, "use_cache": False})
        return self._loss_sum(*found.pop(), labels)

    @contextlib.contextmanager
    def _taken_out(self) -> Iterator[List[Tuple[torch.Tensor, torch.dtype]]]:
        """In this block the layer gives no logits; the list has its inputs and the type that its logits would have."""
        found: List[Tuple[torch.Tensor, torch.dtype]] = []

        def forward(hidden: torch.Tensor) -> torch.Tensor:
            one = F.linear(hidden.detach().flatten(0, -2)[:1], self.layer.weight.detach()[:1])  # autocast decides
            found.append((hidden, one.dtype))
            return hidden.new_empty(*hidden.shape[:-1], 0)

        with _forward_of(self.layer, forward):
            yield found

    @contextlib.contextmanager
    def for_loss(self, model: Any) -> Iterator[None]:
        """In this block the loss that `model` gives with labels is computed in blocks."""
        with self._taken_out() as found:

            def loss_function(
                logits: Any,
                labels: torch.Tensor,
                vocab_size: Optional[int] = None,
                num_items_in_batch: Any = None,
                shift_labels: Optional[torch.Tensor] = None,
                **_: Any,
            ) -> torch.Tensor:
                behind = _labels_behind(labels) if shift_labels is None else shift_labels
                total = self._loss_sum(*found.pop(), behind)
                return total / ((behind != IGNORED).sum() if num_items_in_batch is None else num_items_in_batch)

            with _loss_function_of(base_of(model), loss_function):
                yield


def _labels_behind(labels: torch.Tensor) -> torch.Tensor:
    """The label that each token predicts.  Labels are moved, since moved logits would be a copy."""
    return F.pad(labels[:, 1:], (0, 1), value=IGNORED)


@contextlib.contextmanager
def _forward_of(layer: Any, forward: Any) -> Iterator[None]:
    layer.forward = forward
    try:
        yield
    finally:
        del layer.forward


@contextlib.contextmanager
def _loss_function_of(base: Any, function: Any) -> Iterator[None]:
    had = "_loss_function" in vars(base)
    before = vars(base).get("_loss_function")
    base._loss_function = function
    try:
        yield
    finally:
        if had:
            base._loss_function = before
        else:
            del base._loss_function


class _LinearCrossEntropySum(torch.autograd.Function):
    """The gradients are computed in the forward pass, for a factor of 1; the backward pass multiplies them."""

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
        gradients: List[Optional[torch.Tensor]] = [
            torch.zeros_like(each, dtype=accurate if each is not hidden else None)
            if each is not None and wanted
            else None
            for each, wanted in zip((hidden, weight, bias), ctx.needs_input_grad)
        ]
        of_hidden, of_weight, of_bias = gradients
        step = max(1, BLOCK // len(weight))
        for here in (slice(at, at + step) for at in range(0, len(words), step)):
            block = F.linear(hidden[here], weight, bias)
            for piece in _pieces(block):
                logits, slope = change.of(block[piece].to(accurate))
                word = words[here][piece].unsqueeze(1)
                summed = logits.logsumexp(1, keepdim=True)
                total += (summed - logits.gather(1, word)).sum()
                if any(ctx.needs_input_grad):
                    logits = logits.sub_(summed).exp_()
                    logits.scatter_add_(1, word, logits.new_full(word.shape, -1.0))
                    block[piece] = logits if slope is None else logits * slope
            if of_hidden is not None:
                torch.mm(block, weight, out=of_hidden[here])
            if of_weight is not None and of_weight.dtype == block.dtype:
                of_weight.addmm_(block.t(), hidden[here])
            elif of_weight is not None:
                of_weight += block.t() @ hidden[here]
            if of_bias is not None:
                of_bias += block.sum(0, dtype=accurate)
        ctx.gradients, ctx.types = gradients, [None if each is None else each.dtype for each in (hidden, weight, bias)]
        return total

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, factor: torch.Tensor) -> Any:
        gradients, ctx.gradients = ctx.gradients, [None] * 3  # free them as soon as their sums are made
        return (
            *(None if each is None else each.mul_(factor).to(kind) for each, kind in zip(gradients, ctx.types)),
            None,
            None,
        )


def _pieces(logits: torch.Tensor) -> List[slice]:
    """Some tokens at a time of logits [tokens, vocabulary]."""
    numbers = NUMBERS_AT_ONCE["cpu" if logits.device.type == "cpu" else "others"]
    step = max(1, numbers // max(1, logits.shape[1]))
    return [slice(begin, begin + step) for begin in range(0, len(logits), step)]


# ---- whole logits


class _CrossEntropySum(torch.autograd.Function):
    """Some tokens at a time, so that the gradient of the logits is the only other array of their size."""

    @staticmethod
    def forward(ctx: Any, logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(logits, labels)
        accurate = torch.promote_types(logits.dtype, torch.float32)
        total = torch.zeros((), dtype=accurate, device=logits.device)
        for here in _pieces(logits):
            total += F.cross_entropy(logits[here].to(accurate), labels[here], ignore_index=IGNORED, reduction="sum")
        return total

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, factor: torch.Tensor) -> Any:
        logits, labels = ctx.saved_tensors
        gradient = torch.empty_like(logits)
        weights = torch.where(labels == IGNORED, 0.0, factor).unsqueeze(1)
        words = labels.clamp(min=0).unsqueeze(1)  # of an ignored token any, as its weight is 0
        for here in _pieces(logits):
            part = torch.softmax(logits[here], dim=1, dtype=factor.dtype)
            part.scatter_add_(1, words[here], part.new_full((len(part), 1), -1.0))
            torch.mul(part, weights[here], out=part)
            gradient[here] = part
        return gradient, None


def cross_entropy_sum(logits: torch.Tensor, labels: torch.Tensor, *, causal: bool = True) -> torch.Tensor:
    """Sum of the cross-entropies of the predicted tokens: a scalar, in float32 or float64.

    logits: [rows, tokens, vocabulary], of the token behind each, or with causal=False of each itself; labels: [rows,
    tokens], -100 where nothing is predicted.
    """
    words = _labels_behind(labels) if causal else labels
    total: torch.Tensor = _CrossEntropySum.apply(logits.flatten(0, 1), words.flatten())
    return total


# ---- which output layer

_PLACE = "_padding_free_output_layer"  # an attribute of the model, as that of models.py


def output_layer(model: Any, *, inside: bool = False) -> Optional[OutputLayer]:
    """The output layer of a model whose loss can be computed in blocks; None for another one.

    inside: the loss is computed in `forward`, where DistributedDataParallel finds the layer among what is used.
    Tried out once a model: it is called with a few tokens, and what it does to known logits is compared.
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
    found: Optional[OutputLayer] = known[1]
    return found


def _is_wrapped(model: Any, inside: bool) -> bool:
    """Whether the layer cannot be taken out: a compiled model, or DistributedDataParallel that looks for it."""
    while model is not None:
        if hasattr(model, "_orig_mod") or (not inside and getattr(model, "find_unused_parameters", False)):
            return True
        model = getattr(model, "module", None)
    return False


def _is_plain(layer: Any) -> bool:
    """Whether it only multiplies by a weight that is here as a whole."""
    if type(layer) is not torch.nn.Linear or "forward" in vars(layer):
        return False
    hooked = layer._forward_hooks or layer._forward_pre_hooks or layer._backward_hooks or layer._backward_pre_hooks
    return not hooked and not any(hasattr(each, "placements") or each.is_meta for each in layer.parameters())


def _tried(base: Any, layer: torch.nn.Linear) -> Optional[OutputLayer]:
    config = text_config(base)
    factor = getattr(config, "logit_scale", None) or 1 / (getattr(config, "logits_scaling", None) or 1)
    change = _Change(float(factor), getattr(config, "final_logit_softcapping", None))
    device, words = layer.weight.device, layer.out_features
    # Such large logits show a cap too.
    given = torch.linspace(-90, 90, 3 * words, device=device).reshape(1, 3, words).to(layer.weight.dtype)
    calls: List[torch.Tensor] = []
    asked: List[torch.Tensor] = []

    def forward(hidden: torch.Tensor) -> torch.Tensor:
        calls.append(hidden)
        return given.clone()

    def loss_function(logits: torch.Tensor, labels: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor:
        asked.append(logits)
        return logits.sum() * 0

    training = [module for module in base.modules() if module.training]
    usual = getattr(getattr(base, "loss_function", None), "__name__", "") == "ForCausalLMLoss"
    ids = torch.zeros(1, 3, dtype=torch.int64, device=device)
    base.eval()
    try:
        with torch.no_grad(), _forward_of(layer, forward), _loss_function_of(base, loss_function):
            plain = base(input_ids=ids, use_cache=False).logits
            if usual:
                base(input_ids=ids, labels=ids, use_cache=False)
    except (AttributeError, IndexError, RuntimeError, TypeError, ValueError):
        return None
    finally:
        for module in training:
            module.training = True
    expected, _ = change.of(given.to(torch.promote_types(given.dtype, torch.float32)))
    allowed = 100 * torch.finfo(given.dtype).eps
    same = [each.shape == expected.shape and _near(each, expected, allowed) for each in (plain, *asked)]
    right_input = calls and all(hidden.shape == (1, 3, layer.in_features) for hidden in calls)
    if not (all(same) and right_input and len(calls) == 1 + usual and math.isfinite(change.factor)):
        return None
    return OutputLayer(layer, change, usual and len(asked) == 1)


def _near(found: torch.Tensor, expected: torch.Tensor, allowed: float) -> bool:
    return bool((found.to(expected.dtype) - expected).abs().max() <= allowed * expected.abs().max())


# ---- of a model


def logits_of(model: Any, inputs: Inputs) -> torch.Tensor:
    """[rows, tokens, vocabulary], by a forward pass that computes no loss of its own and keeps no cache."""
    return model(**{**{name: value for name, value in inputs.items() if name != "labels"}, "use_cache": False}).logits


def loss_sum(model: Any, inputs: Inputs) -> torch.Tensor:
    """Sum of the cross-entropies of the predicted tokens of one micro-batch: a scalar, in float32 or float64.

    In blocks of tokens where the output layer allows it, so that there are never logits of all tokens.
    """
    layer, causal, labels = output_layer(model), not attends_both_ways(model), inputs["labels"]
    if layer is None:
        return cross_entropy_sum(logits_of(model, inputs), labels, causal=causal)
    others = {name: value for name, value in inputs.items() if name != "labels"}
    return layer._loss_of(model, others, _labels_behind(labels) if causal else labels)


def supervised(model: Any, labels: torch.Tensor) -> torch.Tensor:
    """Number of predicted tokens, a scalar where the labels are, so that a device is not waited for.

    labels: [rows, tokens].  In a causal model the first token of a row is never predicted: none stands before it.
    """
    return (labels[:, 0 if attends_both_ways(model) else 1 :] != IGNORED).sum()
