"""Does this model keep the examples of a padding-free batch apart?  Asked of the model itself, before it is trained."""
from __future__ import annotations

from typing import Any, Callable, Optional

import torch

from ipu_packed_bert.padding_free.collators import Inputs, attention_of, inputs_for
from ipu_packed_bert.padding_free.windows import attention_reach, text_config
from pack_data.batching.collators import PaddingFreeCollator

Forward = Callable[[Any, Inputs], torch.Tensor]  # model, inputs -> logits [1, tokens, vocabulary]

# Packed logits against those of an example alone, over the largest logit: what rounding makes of other shapes, and so of another
# order of every sum.  A few of the type's steps (1e-7, 1e-3, 8e-3), times the root of the number of layers; a wrong position
# changes the logits themselves.  float64 counts as float32, in which eager code takes its softmax.
_TOLERANCES = {torch.float64: 1e-4, torch.float32: 1e-4, torch.float16: 0.02, torch.bfloat16: 0.05}
_HALF = (torch.float16, torch.bfloat16)
# Other tokens in front leave all shapes as they are, so that a dense model gives the same bits.  A mixture of experts sums
# over the tokens of each expert, which become others: how much that rounds is measured on a plain batch of the same examples.
_LENGTH = 11  # tokens of an example, at most
_DRAWS = 3  # examples in front that are tried
_ROUNDINGS = 4.0  # a leak is more than so many times that rounding
_LEAST = 1e-6  # and more than a few steps of float32


def plain_forward(model: Any, inputs: Inputs) -> torch.Tensor:
    """The forward pass of `padding_free.update`, without its loss."""
    return model(**{name: value for name, value in inputs.items() if name != "labels"}, use_cache=False).logits


def difference(found: torch.Tensor, expected: torch.Tensor, typical: bool = False) -> float:
    """Logits [examples, tokens, vocabulary]: largest difference of a token over the largest expected value.

    typical: of each example's median token.  Infinite where something is not finite.
    """
    errors = (found - expected).abs().amax(-1).double() / expected.abs().max()
    error = float((errors.median(-1).values if typical else errors).max())
    return error if error == error else float("inf")


def check_window(model: Any, longest: Optional[int] = None) -> None:
    """ValueError where examples of `longest` tokens (default: as many as the model takes) exceed a window or chunk that the mask lacks."""
    config = text_config(model)
    reach = attention_reach(config)
    if reach is None or "flash" in attention_of(model):
        return
    most = longest if longest is not None else getattr(config, "max_position_embeddings", None)
    if most is None or most > reach.tokens:
        raise ValueError(
            f"{type(model).__name__}: examples may have {'any number of' if most is None else most} tokens, {reach.setting} is {reach.tokens}, and the "
            f"mask of a padding-free batch knows no window; if yours have at most {reach.tokens}, say how many with longest=N, else load the model "
            f"with attn_implementation=\"flash_attention_2\" or use a padding way, such as RandomSampling+Padding")


def check_no_leak(model: Any, *, longest: Optional[int] = None, forward: Forward = plain_forward, vocabulary_size: int = 0, seed: int = 0) -> None:
    """Raise ValueError, in one line that says what to do, unless examples in one row score as each does alone.

    longest: tokens of the longest example of the training, by default the most that the model takes; decides whether a
    window or chunks of the attention matter.  forward: how training calls the model, where it does so in another way.
    vocabulary_size: default that of the config.  Some short forward passes of random tokens; weights, random state and
    mode of the model stay as they are.  Three questions, each up to rounding: do the logits of an example change with the
    tokens of the example before it (attention across examples)?  Are they those of `model(input_ids)` of the example
    alone?  And if not, do they heed position_ids at all?
    """
    check_window(model, longest)
    config = text_config(model)
    size = vocabulary_size or config.vocab_size
    reach = attention_reach(config)
    length = min([_LENGTH] + [most for most in (longest, reach and reach.tokens, getattr(config, "max_position_embeddings", None)) if most])
    draw = torch.Generator().manual_seed(seed)
    last, first, *others = torch.randint(1, size, (2 + _DRAWS, length), generator=draw)
    device, training = next(model.parameters()).device, model.training

    def tried(call: Callable[[], torch.Tensor], what: str) -> torch.Tensor:
        try:
            return call().detach()
        except (IndexError, RuntimeError, TypeError, ValueError) as error:
            raise ValueError(f"{name}: {what}: {' '.join(str(error).split())}") from None

    def plain(*examples: torch.Tensor) -> torch.Tensor:
        """Logits [examples, tokens, vocabulary] as the library itself computes them, an example a row."""
        return tried(lambda: model(torch.stack(examples).to(device)).logits, "model(input_ids) of one example fails already")

    def packed(*examples: torch.Tensor, restart: bool = True) -> torch.Tensor:
        """The same for the examples in one row."""
        inputs = inputs_for(model, PaddingFreeCollator()([{"input_ids": ids.numpy()} for ids in examples]))
        inputs.pop("labels")
        if not restart:
            inputs["position_ids"] = torch.arange(inputs["position_ids"].shape[1]).unsqueeze(0)
        moved = {name: value.to(device) if torch.is_tensor(value) else value for name, value in inputs.items()}
        row = tried(lambda: forward(model, moved)[0], f"does not take position_ids or the mask of a padding-free batch, {way_out}")
        return row.unflatten(0, (len(examples), -1))

    def change(logits: Callable[..., torch.Tensor]) -> float:
        """By how much the logits of `last` change with the example before it."""
        expected = logits(first, last)[1:]
        return max(difference(logits(other, last)[1:], expected) for other in others)

    name = type(model).__name__
    way_out = "use a padding way for it, such as RandomSampling+Padding"
    random = torch.get_rng_state()
    model.eval()
    try:
        with torch.no_grad():
            alone = torch.cat([plain(first), plain(last)])
            row = packed(first, last)
            tolerance = _TOLERANCES.get(row.dtype, 0.05)
            leak = change(packed)
            if leak > _LEAST and leak > min(tolerance, _ROUNDINGS * change(plain)):
                raise ValueError(
                    f"{name}: the logits of an example change with the example before it in the row ({leak:.1e} of the largest); call it with "
                    f"use_cache=False and what inputs_for gives, load it with attn_implementation=\"sdpa\" or \"flash_attention_2\", or {way_out}")
            # In half precision rounding may send single tokens to other experts; a wrong position concerns all tokens of an example.
            error = difference(row, alone, typical=row.dtype in _HALF)
            if error > tolerance:
                ignores = difference(packed(first, last, restart=False), row) <= min(tolerance, error / 2)
                why = "position_ids are ignored" if ignores else "its positions do not follow from position_ids alone"
                raise ValueError(f"{name}: an example behind another one scores otherwise than alone ({error:.1e} of the largest logit), {why}; {way_out}")
    finally:
        model.train(training)
        torch.set_rng_state(random)
