"""Does this model keep the examples of a padding-free batch apart?  Asked of the model itself, before it is trained."""
from __future__ import annotations

from typing import Any, Callable

import torch

from ipu_packed_bert.causal.collators import Inputs, inputs_for
from pack_data.batching.collators import PaddingFreeCollator

Forward = Callable[[Any, Inputs], torch.Tensor]  # model, inputs -> logits [1, tokens, vocabulary]

# Of packed logits against those of an example alone, over the largest logit: far above rounding, far below a wrong position.
# In float64 too, since eager code takes its softmax in float32.
_TOLERANCES = {torch.float64: 1e-4, torch.float32: 1e-4, torch.float16: 0.02, torch.bfloat16: 0.05}


def plain_forward(model: Any, inputs: Inputs) -> torch.Tensor:
    """The forward pass of `causal.update`, without its loss."""
    return model(**{name: value for name, value in inputs.items() if name != "labels"}, use_cache=False).logits


def check_no_leak(model: Any, *, forward: Forward = plain_forward, vocabulary_size: int = 0, seed: int = 0) -> None:
    """Raise ValueError, in one line that says what to do, unless examples in one row score as each does alone.

    forward: how training calls the model, where it does so in another way.  vocabulary_size: default that of the config.
    Four short forward passes of random tokens; weights, random state and mode of the model stay as they are.  Three
    questions: do the logits of an example change, in any bit, with the tokens of the example before it (attention across
    examples; works in any precision, as the shapes are the same)?  Are they those of the example alone?  And if not, do
    they heed position_ids at all?
    """
    size = vocabulary_size or model.config.get_text_config().vocab_size
    draw = torch.Generator().manual_seed(seed)
    first, other, second = (torch.randint(1, size, (length,), generator=draw).numpy() for length in (11, 11, 7))
    device, training = next(model.parameters()).device, model.training

    def logits(*examples: Any, restart: bool = True) -> torch.Tensor:
        """Of the last example."""
        inputs = inputs_for(model, PaddingFreeCollator()([{"input_ids": ids} for ids in examples]))
        inputs.pop("labels")
        if not restart:
            inputs["position_ids"] = torch.arange(inputs["position_ids"].shape[1]).unsqueeze(0)
        moved = {name: value.to(device) if torch.is_tensor(value) else value for name, value in inputs.items()}
        try:
            return forward(model, moved)[0, -len(examples[-1]):].detach()
        except (RuntimeError, TypeError, ValueError) as error:
            said = " ".join(str(error).split())
            raise ValueError(f"{name}: does not take position_ids or the mask of a padding-free batch ({said}); {way_out}") from None

    name = type(model).__name__
    way_out = "use a padding way for it, such as RandomSampling+Padding"
    random = torch.get_rng_state()
    model.eval()
    try:
        with torch.no_grad():
            packed, alone = logits(first, second), logits(second)
            if not torch.equal(packed, logits(other, second)):
                raise ValueError(
                    f"{name}: the logits of an example change with the example before it in the row; call it with use_cache=False and what "
                    f"causal.inputs_for gives, load it with attn_implementation=\"sdpa\" or \"flash_attention_2\", or {way_out}")
            error = float((packed - alone).abs().max() / alone.abs().max())
            if error > _TOLERANCES.get(packed.dtype, 0.05):
                ignores = torch.equal(packed, logits(first, second, restart=False))
                why = "position_ids are ignored" if ignores else "its positions do not follow from position_ids alone"
                raise ValueError(f"{name}: an example behind another one scores otherwise than alone ({error:.1e} of the largest logit), {why}; {way_out}")
    finally:
        model.train(training)
        torch.set_rng_state(random)
