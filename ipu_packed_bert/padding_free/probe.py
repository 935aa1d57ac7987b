"""A test of a model before its training: does it keep the examples of a padding-free batch apart?"""

from __future__ import annotations

from typing import Any, Callable, Optional

import torch

from ipu_packed_bert.padding_free.collators import Inputs, inputs_for
from ipu_packed_bert.padding_free.update import without_labels
from ipu_packed_bert.padding_free.windows import ignored_reach, text_config, too_long
from pack_data.batching.collators import padding_free_batch

Forward = Callable[[Any, Inputs], torch.Tensor]  # model, inputs -> logits [1, tokens, vocabulary]

# The largest difference between packed logits and those of an example alone, over the largest logit.  Only rounding
# may differ, since other shapes give another order of every sum: a few steps of the type (1e-7, 1e-3, 8e-3) times the
# root of the number of layers.  A wrong position changes the logits far more.  float64 counts as float32, in which
# eager code takes its softmax.
_TOLERANCES = {torch.float64: 1e-4, torch.float32: 1e-4, torch.float16: 0.02, torch.bfloat16: 0.05}
_HALF = (torch.float16, torch.bfloat16)
# Other tokens in the example before leave all shapes as they are, so that a dense model computes the same bits.  A
# mixture of experts gives each expert other tokens, and its sums round differently.  This rounding is measured on a
# plain batch of the same examples, with one example a row.
_LENGTH = 11  # tokens of a test example, at most
_DRAWS = 3  # other examples to try
_ROUNDINGS = 4.0  # a larger multiple of the measured rounding is a leak
_LEAST = 1e-6  # a smaller change is rounding in any case


def plain_forward(model: Any, inputs: Inputs) -> torch.Tensor:
    """Logits as `padding_free.update` computes them."""
    return model(**without_labels(inputs), use_cache=False).logits


def difference(found: torch.Tensor, expected: torch.Tensor, typical: bool = False) -> float:
    """The largest difference of logits [examples, tokens, vocabulary], over the largest expected logit.

    typical: take the median over the tokens of each example, not the maximum.  Infinite where a value is not finite.
    """
    errors = (found - expected).abs().amax(-1).double() / expected.abs().max()
    error = float((errors.median(-1).values if typical else errors).max())
    return error if error == error else float("inf")


def check_window(model: Any, longest: Optional[int] = None) -> None:
    """Raise ValueError where an example may be longer than a window or chunk of the model's attention.

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
    model: Any,
    *,
    longest: Optional[int] = None,
    forward: Forward = plain_forward,
    vocabulary_size: int = 0,
    seed: int = 0,
) -> None:
    """Raise ValueError unless each example of a row gets the logits that it gets alone.

    longest: tokens of the longest example in training; decides whether a window or chunk of the attention matters.
    By default the most that the model takes.
    forward: how the training calls the model, if not as `padding_free.update` does.
    vocabulary_size: that of the configuration by default.

    It runs some short forward passes on random tokens.  Weights, random state and mode of the model stay as they are.
    It asks, up to rounding: do the logits of an example change with the tokens of the example before it?  Are they
    those of `model(input_ids)` for this example alone?  If not, does the model use position_ids?
    """
    check_window(model, longest)
    name = type(model).__name__
    way_out = "use a padding way for it, such as RandomSampling+Padding"
    config = text_config(model)
    reach = ignored_reach(model)
    limits = (longest, reach and reach.tokens, getattr(config, "max_position_embeddings", None))
    length = min([_LENGTH] + [limit for limit in limits if limit])
    draw = torch.Generator().manual_seed(seed)
    last, first, *others = torch.randint(1, vocabulary_size or config.vocab_size, (2 + _DRAWS, length), generator=draw)
    device, training = next(model.parameters()).device, model.training

    def tried(call: Callable[[], torch.Tensor], what: str) -> torch.Tensor:
        try:
            return call().detach()
        except (IndexError, RuntimeError, TypeError, ValueError) as error:
            raise ValueError(f"{name}: {what}: {' '.join(str(error).split())}") from None

    def plain(*examples: torch.Tensor) -> torch.Tensor:
        """Logits [examples, tokens, vocabulary] of a plain call, one example a row."""
        return tried(
            lambda: model(torch.stack(examples).to(device)).logits, "model(input_ids) of one example fails already"
        )

    def packed(*examples: torch.Tensor, restart: bool = True) -> torch.Tensor:
        """The same, all examples in one row.  restart: positions begin at 0 in each example."""
        inputs = inputs_for(model, padding_free_batch([{"input_ids": ids.numpy()} for ids in examples]))
        inputs.pop("labels")
        if not restart:
            inputs["position_ids"] = torch.arange(inputs["position_ids"].shape[1]).unsqueeze(0)
        moved = {key: value.to(device) if torch.is_tensor(value) else value for key, value in inputs.items()}
        refused = f"does not take position_ids or the mask of a padding-free batch, {way_out}"
        return tried(lambda: forward(model, moved)[0], refused).unflatten(0, (len(examples), -1))

    def change(logits: Callable[..., torch.Tensor]) -> float:
        """How much the logits of `last` change with the example before it."""
        expected = logits(first, last)[1:]
        return max(difference(logits(other, last)[1:], expected) for other in others)

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
                    f"{name}: the logits of an example change with the example before it in the row ({leak:.1e} of "
                    "the largest); call the model with use_cache=False and what padding_free.inputs_for gives, load it "
                    f'with attn_implementation="sdpa" or "flash_attention_2", or {way_out}'
                )
            # In half precision, rounding may send single tokens to other experts.  A wrong position affects all.
            error = difference(row, alone, typical=row.dtype in _HALF)
            if error > tolerance:
                unmoved = difference(packed(first, last, restart=False), row) <= min(tolerance, error / 2)
                why = "position_ids are ignored" if unmoved else "its positions do not follow from position_ids alone"
                raise ValueError(
                    f"{name}: an example behind another one scores otherwise than alone ({error:.1e} of the largest "
                    f"logit), {why}; {way_out}"
                )
    finally:
        model.train(training)
        torch.set_rng_state(random)
