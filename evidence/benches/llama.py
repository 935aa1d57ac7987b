"""A small new Llama, for measurements."""

from __future__ import annotations

from typing import Any


def new_llama(*, hidden_size: int, layers: int, vocabulary_size: int, positions: int) -> Any:
    """Return a new Llama with sdpa attention, whose weights torch's seed decides; ImportError without Transformers."""
    from transformers import AutoModelForCausalLM, LlamaConfig

    config = LlamaConfig(
        vocab_size=vocabulary_size,
        hidden_size=hidden_size,
        num_hidden_layers=layers,
        num_attention_heads=max(1, hidden_size // 64),  # of 64 dimensions, or a single smaller one
        intermediate_size=4 * hidden_size,
        max_position_embeddings=positions,
        use_cache=False,
    )
    return AutoModelForCausalLM.from_config(config, attn_implementation="sdpa")
