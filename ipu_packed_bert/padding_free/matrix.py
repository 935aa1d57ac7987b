"""Which families of causal models are right in padding-free batches: a tiny random model of each, measured.

    python -m ipu_packed_bert.padding_free.matrix

Every family is tried with eager, sdpa and our attention, as `use_padding_free` does.  A model is right if the loss of
every token in a row is the one of its example alone, by eager code of a model that nothing here has touched, to 1e-5;
otherwise it must be refused.  So must a row that also has an all-ones attention_mask, with which the library looks for
no boundaries; eager and sdpa are the library's own code then, and nothing of ours sees it.  The status is 1 if ours is
neither.
"""

from __future__ import annotations

import difflib
import logging
import sys
import warnings
from typing import Any, Dict, List, NamedTuple, Optional, Sequence

import numpy as np
import torch
from torch.nn import functional as F

from ipu_packed_bert.padding_free.attention import NAME
from ipu_packed_bert.padding_free.choice import use_padding_free
from ipu_packed_bert.padding_free.collators import PaddingFreeCollator
from ipu_packed_bert.padding_free.models import Choice
from ipu_packed_bert.padding_free.update import logits_of
from pack_data.cli.command import ArgumentParser, run_main
from pack_data.display.table import Column, Table

_ATTENTIONS = ("eager", "sdpa", NAME)
_LENGTHS = (3, 12, 2, 2, 2, 12, 5, 20)  # beyond every window of the tiny models, and within their positions in all
_TOLERANCE = 1e-5  # of the loss of a token, natural logarithm


class _Verdict(NamedTuple):
    """A family with one attention."""

    family: str
    attention: str
    choice: Optional[Choice]  # None where refused
    error: float  # largest difference of a token's loss from that of its example alone
    refusal: str  # why, in one line
    ones: float = float("nan")  # the error with an all-ones attention_mask; not a number where refused

    @property
    def right(self) -> bool:
        """Right or refused; with an all-ones mask only ours can refuse."""
        ours = self.attention == NAME and self.ones > _TOLERANCE
        return self.choice is None or (self.error <= _TOLERANCE and not ours)

    @property
    def cell(self) -> str:
        if self.choice is None:
            return "refused"
        text = f"{self.error:.0e}" + (" and seq_idx" if self.choice.seq_idx else "")
        text += ", mask" if self.choice.boundaries == "attention_mask" else ""
        text += "; ones refused" if self.ones != self.ones else "" if self.ones <= _TOLERANCE else "; ones wrong"
        return text if self.right else f"**WRONG** {text}"


def _losses_of(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Of the predicted tokens of one row: logits [1, tokens, vocabulary], labels [1, tokens] -> [predicted]."""
    return F.cross_entropy(logits[0, :-1].float(), labels[0, 1:], reduction="none")[labels[0, 1:] != -100]


def measure(family: str, attention: str, seed: int = 0) -> _Verdict:
    """Raises ValueError where the installed Transformers does not have the family."""
    model, reference = build(family, seed=seed), build(family, seed=seed)
    draw = np.random.default_rng(seed)
    examples = [{"input_ids": draw.integers(1, VOCABULARY, length)} for length in _LENGTHS]
    try:
        choice = use_padding_free(model, attention=attention)
    except ValueError as error:
        return _Verdict(family, attention, None, float("nan"), str(error))
    inputs = PaddingFreeCollator(model)(examples)
    with torch.no_grad():
        rows = [torch.from_numpy(example["input_ids"])[None] for example in examples]
        expected = torch.cat([_losses_of(reference(ids).logits, ids) for ids in rows])
        found = _losses_of(logits_of(model, inputs), inputs["labels"])
        try:
            given = {**inputs, "attention_mask": inputs.get("attention_mask", torch.ones_like(inputs["input_ids"]))}
            ones = float((_losses_of(logits_of(model, given), inputs["labels"]) - expected).abs().max())
        except ValueError:
            ones = float("nan")
    return _Verdict(family, attention, choice, float((found - expected).abs().max()), "", ones)


def _reason_of(verdicts: Sequence[_Verdict]) -> str:
    """Why a family is refused, in a few words: the layer at fault, the missing package, the setting."""
    text = next((each.refusal for each in reversed(verdicts) if each.choice is None), "")
    for word in ("nstall ", "AttentionInterface", "first in "):
        if word not in text:
            continue
        if word == "AttentionInterface":
            return "its code takes no attention from Transformers"
        after = text.split(word, 1)[1]
        return f"needs {after.split()[0]}" if word == "nstall " else after.split(";")[0].split(":")[0].rstrip(",")
    return ""


def _table(verdicts: Sequence[_Verdict]) -> str:
    """Markdown, a line a family."""
    rows: List[Dict[str, str]] = []
    for family in dict.fromkeys(each.family for each in verdicts):
        mine = [each for each in verdicts if each.family == family]
        refused = all(each.choice is None for each in mine)
        last = mine[-1].choice is None
        cells = {each.attention: each.cell for each in mine}
        rows.append({"family": family, **cells, "reason": _reason_of(mine) if refused or last else ""})
    tried = dict.fromkeys(each.attention for each in verdicts)
    heads = [Column(name, "ours" if name == NAME else name) for name in tried]
    columns = (Column("family", "family"), *heads, Column("reason", "refused because of"))
    return Table("matrix", "", columns, rows).markdown()


def main(arguments: Optional[Sequence[str]] = None) -> int:
    parser = ArgumentParser(prog="python -m ipu_packed_bert.padding_free.matrix", description=__doc__)
    parser.add_argument("families", nargs="*", metavar="FAMILY", help=f"some of: {'; '.join(FAMILIES)}")
    options = parser.parse_args(arguments)
    unknown = [name for name in options.families if name not in FAMILIES]
    if unknown:
        near = difflib.get_close_matches(unknown[0], FAMILIES, n=1)
        meant = f", did you mean {near[0]!r}?" if near else ""
        parser.error(f"{unknown[0]!r} is no family{meant}; a name with a comma or a space is one argument in quotes")
    # Warnings of Transformers about tiny models are no news here.
    theirs: Any = __import__("transformers").logging
    theirs.set_verbosity_error()
    logging.getLogger("ipu_packed_bert").setLevel(logging.ERROR)
    warnings.simplefilter("ignore")
    verdicts, absent = [], []
    for family in options.families or FAMILIES:
        try:
            verdicts += [measure(family, attention) for attention in _ATTENTIONS]
        except ValueError as error:
            absent.append(f"{family}: {error}")
    print(_table(verdicts))
    for each in absent:
        print(f"left out: {each}")
    wrong = [each for each in verdicts if not each.right]
    counts = [sum(each.choice is not None for each in verdicts if each.attention == name) for name in _ATTENTIONS]
    families = len(verdicts) // len(_ATTENTIONS)
    print(
        f"{families} families; right: {', '.join(f'{n} with {a}' for a, n in zip(_ATTENTIONS, counts))}; "
        f"wrong without an error: {len(wrong)}"
    )
    return 1 if wrong else 0


VOCABULARY = 50
_WINDOW = 5  # tokens of every window and chunk here
_SIZE = {
    "vocab_size": VOCABULARY,
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 32,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 1,
}
_GROUPED = {"num_key_value_heads": 1}
_EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
_NO_DROPOUT = {"attn_pdrop": 0.0, "resid_pdrop": 0.0, "embd_pdrop": 0.0}
_GPT = {"n_embd": 16, "n_layer": 2, "n_head": 2, "n_positions": 64, "n_inner": 32, **_NO_DROPOUT}
_LATENT = {"q_lora_rank": 8, "kv_lora_rank": 8, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 8}
_MAMBA = {"mamba_d_state": 8, "mamba_d_conv": 4, "mamba_expand": 2}
_MAMBA2 = {**_MAMBA, "mamba_n_heads": 4, "mamba_d_head": 8, "mamba_n_groups": 1, "mamba_chunk_size": 8}


class _Family(NamedTuple):
    """A configuration class of Transformers and its settings for a tiny model."""

    configuration: str
    settings: Dict[str, Any]


def _family(name: str, **settings: Any) -> _Family:
    return _Family(name, settings)


_LONGROPE = {
    "rope_type": "longrope",
    "short_factor": [1.0] * 4,
    "long_factor": [4.0] * 4,
    "factor": 4.0,
    "original_max_position_embeddings": 12,
}

FAMILIES: Dict[str, _Family] = {
    "Llama": _family("LlamaConfig"),
    "Llama, dynamic positions": _family(
        "LlamaConfig", rope_scaling={"rope_type": "dynamic", "factor": 2.0}, max_position_embeddings=12
    ),
    "Llama 4, chunks": _family(
        "Llama4TextConfig",
        **_GROUPED,
        head_dim=8,
        attention_chunk_size=_WINDOW,
        num_local_experts=2,
        intermediate_size_mlp=32,
    ),
    "Mistral": _family("MistralConfig", **_GROUPED, sliding_window=None),
    "Mistral, window": _family("MistralConfig", **_GROUPED, sliding_window=_WINDOW),
    "Mixtral": _family("MixtralConfig", **_GROUPED, num_local_experts=4),
    "Qwen2": _family("Qwen2Config", **_GROUPED),
    "Qwen2, window": _family(
        "Qwen2Config", **_GROUPED, sliding_window=_WINDOW, use_sliding_window=True, max_window_layers=1
    ),
    "Qwen2-MoE": _family("Qwen2MoeConfig", **_GROUPED, **_EXPERTS, shared_expert_intermediate_size=16),
    "Qwen3": _family("Qwen3Config", **_GROUPED, head_dim=8),
    "Qwen3-MoE": _family("Qwen3MoeConfig", **_GROUPED, **_EXPERTS, head_dim=8),
    "Qwen3-Next": _family(
        "Qwen3NextConfig",
        **_GROUPED,
        **_EXPERTS,
        head_dim=8,
        shared_expert_intermediate_size=16,
        linear_num_key_heads=2,
        linear_num_value_heads=2,
        linear_key_head_dim=8,
        linear_value_head_dim=8,
        layer_types=["linear_attention", "full_attention"],
    ),
    "Gemma": _family("GemmaConfig", **_GROUPED, head_dim=8),
    "Gemma 2, window and soft cap": _family(
        "Gemma2Config", **_GROUPED, head_dim=8, sliding_window=_WINDOW, attn_logit_softcapping=1.0
    ),
    "Gemma 3, window": _family("Gemma3TextConfig", **_GROUPED, head_dim=8, sliding_window=_WINDOW),
    "Phi": _family("PhiConfig"),
    "Phi-3": _family("Phi3Config", **_GROUPED),
    "Phi-3, long positions": _family(
        "Phi3Config", rope_parameters=_LONGROPE, rope_scaling=_LONGROPE, original_max_position_embeddings=12
    ),
    "OLMo": _family("OlmoConfig"),
    "OLMo 2": _family("Olmo2Config"),
    "OLMo 3, window": _family("Olmo3Config", sliding_window=_WINDOW),
    "OLMoE": _family("OlmoeConfig", num_experts=4, num_experts_per_tok=2),
    "StableLM": _family("StableLmConfig", num_key_value_heads=2),
    "Starcoder2": _family("Starcoder2Config", **_GROUPED, sliding_window=None),
    "Starcoder2, window": _family("Starcoder2Config", **_GROUPED, sliding_window=_WINDOW),
    "Granite": _family("GraniteConfig"),
    "Granite MoE": _family("GraniteMoeConfig", num_local_experts=4, num_experts_per_tok=2),
    "Granite 4 hybrid": _family(
        "GraniteMoeHybridConfig",
        **_MAMBA2,
        num_local_experts=4,
        num_experts_per_tok=2,
        shared_intermediate_size=16,
        layer_types=["mamba", "attention"],
    ),
    "Cohere": _family("CohereConfig"),
    "Cohere 2, window": _family("Cohere2Config", **_GROUPED, sliding_window=_WINDOW, sliding_window_pattern=2),
    "DeepSeek-V2": _family(
        "DeepseekV2Config", **_LATENT, n_routed_experts=4, num_experts_per_tok=2, moe_intermediate_size=16, n_group=1,
        topk_group=1, first_k_dense_replace=1, n_shared_experts=1, head_dim=8, topk_method="greedy",
    ),
    "DeepSeek-V3": _family(
        "DeepseekV3Config", **_LATENT, n_routed_experts=4, num_experts_per_tok=2, moe_intermediate_size=16, n_group=1,
        topk_group=1, first_k_dense_replace=1, n_shared_experts=1, num_key_value_heads=2,
    ),
    "GPT-2": _family("GPT2Config", **_GPT),
    "GPT-Neo, window": _family(
        "GPTNeoConfig", hidden_size=16, num_layers=2, num_heads=2, attention_types=[[["global", "local"], 1]],
        window_size=_WINDOW, attention_dropout=0.0, resid_dropout=0.0, embed_dropout=0.0,
    ),
    "GPT-J": _family("GPTJConfig", **_GPT, rotary_dim=4),
    "GPT-NeoX": _family("GPTNeoXConfig"),
    "GPT-BigCode": _family("GPTBigCodeConfig", **_GPT),
    "gpt-oss, window and sinks": _family(
        "GptOssConfig", **_GROUPED, head_dim=8, sliding_window=_WINDOW, num_local_experts=4, num_experts_per_tok=2
    ),
    "CodeGen": _family("CodeGenConfig", **_GPT, num_attention_heads=4, hidden_size=32, rotary_dim=4),
    "Falcon, rotary": _family(
        "FalconConfig", alibi=False, bias=True, multi_query=True, parallel_attn=True, new_decoder_architecture=False
    ),
    "Falcon, ALiBi": _family(
        "FalconConfig", alibi=True, bias=True, multi_query=False, parallel_attn=False, new_decoder_architecture=False
    ),
    "OPT": _family("OPTConfig", ffn_dim=32, word_embed_proj_dim=16, dropout=0.0, attention_dropout=0.0),
    "MPT": _family("MptConfig", d_model=16, n_heads=2, n_layers=2, expansion_ratio=2, max_seq_len=64),
    "BLOOM": _family("BloomConfig", n_layer=2, n_head=2),
    "BioGPT": _family(
        "BioGptConfig", hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0, activation_dropout=0.0
    ),
    "XGLM": _family(
        "XGLMConfig", d_model=16, ffn_dim=32, num_layers=2, attention_heads=2, dropout=0.0, attention_dropout=0.0
    ),
    "Persimmon": _family("PersimmonConfig"),
    "Nemotron": _family("NemotronConfig", **_GROUPED, head_dim=8),
    "SmolLM3": _family("SmolLM3Config", **_GROUPED),
    "GLM": _family("GlmConfig", **_GROUPED, head_dim=8),
    "GLM-4": _family("Glm4Config", **_GROUPED, head_dim=8),
    "ERNIE 4.5": _family("Ernie4_5Config", **_GROUPED, head_dim=8),
    "EXAONE 4, window": _family(
        "Exaone4Config", **_GROUPED, sliding_window=_WINDOW, layer_types=["sliding_attention", "full_attention"]
    ),
    "Helium": _family("HeliumConfig", **_GROUPED, head_dim=8),
    "Seed-OSS": _family("SeedOssConfig", **_GROUPED, head_dim=8),
    "Jamba": _family(
        "JambaConfig", **_GROUPED, **_MAMBA, attn_layer_period=2, attn_layer_offset=1, expert_layer_period=2,
        expert_layer_offset=1, num_experts=2, num_experts_per_tok=1, use_mamba_kernels=False, mamba_dt_rank=4,
    ),
    "Bamba": _family("BambaConfig", **_GROUPED, **_MAMBA2, attn_layer_indices=[1]),
    "Falcon-H1": _family("FalconH1Config", **_GROUPED, **_MAMBA2, mamba_d_ssm=32, head_dim=8),
    "Zamba 2": _family(
        "Zamba2Config", mamba_d_state=8, n_mamba_heads=4, mamba_ngroups=1, chunk_size=8, num_mem_blocks=1,
        hybrid_layer_ids=[1], layers_block_type=["mamba", "hybrid"], use_mem_rope=True, adapter_rank=4,
        use_mem_eff_path=False,
    ),
    "LFM2": _family("Lfm2Config", **_GROUPED, layer_types=["conv", "full_attention"]),
    "Mamba": _family("MambaConfig", state_size=8),
    "Mamba-2": _family("Mamba2Config", state_size=8, num_heads=4, head_dim=8, n_groups=1, chunk_size=8, expand=2),
    "RecurrentGemma": _family(
        "RecurrentGemmaConfig", **_GROUPED, lru_width=16, attention_window_size=_WINDOW, head_dim=8,
        block_types=["recurrent", "attention"],
    ),
    "RWKV": _family("RwkvConfig", attention_hidden_size=16, context_length=64),
}  # fmt: skip


def build(name: str, *, attention: str = "eager", dtype: torch.dtype = torch.float32, seed: int = 0) -> Any:
    """A model of the family.  Its weights are so large that what a token attends to matters to its logits.

    Raises ValueError where the installed Transformers does not have the family or makes no such model.
    """
    import transformers

    family = FAMILIES[name]
    if not hasattr(transformers, family.configuration):
        raise ValueError(f"Transformers {transformers.__version__} has no {family.configuration}")
    state = torch.get_rng_state()
    torch.manual_seed(seed)
    try:
        config = getattr(transformers, family.configuration)(**{**_SIZE, **family.settings})
        model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation=attention).to(dtype).eval()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(torch.randn(parameter.shape, dtype=torch.float64).to(parameter.dtype) * 0.3)
    finally:
        torch.set_rng_state(state)
    return model


if __name__ == "__main__":
    sys.exit(run_main(main))
