"""Tiny causal models of many families, examples, and the losses of their tokens."""

import importlib.util
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.nn import functional as F

transformers = pytest.importorskip(
    "transformers", minversion="4.57", reason="tested with 4.57 and newer: pip install 'transformers>=4.57'"
)

# docs/families.py makes a tiny model of every family, for a page; here for tests.
_spec = importlib.util.spec_from_file_location("families", Path(__file__).parents[1] / "docs" / "families.py")
families = sys.modules["families"] = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(families)

SIZE = {
    "vocab_size": 50,
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 32,
    "max_position_embeddings": 64,
}


GPT2_SIZE = {"vocab_size": 50, "n_embd": 16, "n_layer": 2, "n_head": 2, "n_positions": 64, "bos_token_id": 1}
NO_DROPOUT = {"attn_pdrop": 0.0, "resid_pdrop": 0.0, "embd_pdrop": 0.0}
CONFIGS = {
    "llama": lambda: transformers.LlamaConfig(**SIZE),
    "gpt_neox": lambda: transformers.GPTNeoXConfig(**SIZE),
    "qwen2": lambda: transformers.Qwen2Config(**SIZE, num_key_value_heads=1),
    "gpt2": lambda: transformers.GPT2Config(**GPT2_SIZE, **NO_DROPOUT, eos_token_id=1),
}


def with_large_weights(model, size=0.3):
    """Add noise to new weights, so that what a token attends to matters to its logits."""
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn(parameter.shape, dtype=parameter.dtype) * size)
    return model


def a_model(kind="llama", attention="sdpa", dtype=torch.float64):
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(CONFIGS[kind](), attn_implementation=attention)
    return with_large_weights(model.to(dtype))


def examples_of(ids):
    """Token ids of each example, all of which are predicted, as the mappings that collators take."""
    return [{"input_ids": np.asarray(tokens, np.int64)} for tokens in ids]


def some_examples(seed, lengths):
    rng = np.random.default_rng(seed)
    return examples_of([rng.integers(1, 50, length) for length in lengths])


def token_losses(model, inputs):
    """By example in order: float64 [supervised tokens]."""
    inputs = dict(inputs)
    labels = inputs.pop("labels")[:, 1:]
    logits = model(**inputs, use_cache=False).logits[:, :-1]
    losses = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=-100, reduction="none")
    return losses[labels.flatten() != -100]


def alone(model, example):
    """Losses of one example's tokens by a plain call of the model, without anything of ours."""
    ids = torch.as_tensor(example["input_ids"])
    with torch.no_grad():
        return F.cross_entropy(model(ids[None]).logits[0, :-1], ids[1:], reduction="none")


WINDOW = 5


WINDOWED = {  # family: its configuration with a window or chunks of five tokens, and the attention that it runs with
    "mistral": ("MistralConfig", {"num_key_value_heads": 1, "sliding_window": WINDOW}, "sdpa"),
    "qwen2": (
        "Qwen2Config",
        {"num_key_value_heads": 1, "sliding_window": WINDOW, "use_sliding_window": True, "max_window_layers": 1},
        "sdpa",
    ),
    "gemma2": ("Gemma2Config", {"num_key_value_heads": 1, "head_dim": 8, "sliding_window": WINDOW}, "eager"),
    "gemma3": ("Gemma3TextConfig", {"num_key_value_heads": 1, "head_dim": 8, "sliding_window": WINDOW}, "sdpa"),
    "olmo3": ("Olmo3Config", {"sliding_window": WINDOW}, "sdpa"),
    "llama4": (
        "Llama4TextConfig",
        {
            "num_key_value_heads": 1,
            "head_dim": 8,
            "attention_chunk_size": WINDOW,
            "num_local_experts": 2,
            "intermediate_size_mlp": 32,
        },
        "sdpa",
    ),
}


def a_windowed_model(kind, **changes):
    name, settings_, attention = WINDOWED[kind]
    if not hasattr(transformers, name):
        pytest.skip(f"this Transformers has no {name}")
    config = getattr(transformers, name)(**{**SIZE, **settings_, "pad_token_id": 0, **changes})
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation=attention)
    return with_large_weights(model.eval())
