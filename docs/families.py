"""Test the model families of Transformers in padding-free batches, with a tiny random model of each.

    python docs/families.py                        # prints what padding_free_families.md has of one Transformers
    python docs/families.py --out older.json       # in the environment of another version, and then here:
    python docs/families.py --with older.json      # of both

Families are all causal and masked ones of the installed Transformers, and variants of some.  Each is tried with eager,
sdpa and our attention, as `use_padding_free` does.  A model is right if the loss of every token in a row is the one of
its example alone, by eager code of a model that nothing here has touched, to 1e-5 of the largest; otherwise it must be
refused.  The same holds for a row with an all-ones attention_mask, with which the library looks for no boundaries:
`use_padding_free` removes it.  The status is 1 if anything else is wrong.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import json
import logging
import re
import sys
import warnings
from functools import lru_cache
from pathlib import Path
from typing import Any, Dict, List, NamedTuple, Optional, Sequence, Tuple

import numpy as np
import torch
from torch.nn import functional as F

from evidence.writer import markdown
from pack_data.cli.terminal import progress_bar
from pack_data.reading.fields import one_line
from padding_free.attention import NAME
from padding_free.choice import use_padding_free
from padding_free.collators import PaddingFreeCollator
from padding_free.losses import logits_of

_ATTENTIONS = ("eager", "sdpa", NAME)
# Beyond every window of the tiny models, and within their positions in all.
_LENGTHS = (3, 12, 2, 2, 2, 12, 5, 20)
_POSITIONS = 64  # of the tiny models
_TOLERANCE = 1e-5  # of the loss of a token, over the largest


class _Verdict(NamedTuple):
    """The verdict of a family with one attention: "right", "refused" or "wrong"."""

    plain: str
    ones: str  # with an all-ones attention_mask
    # Largest difference of a token's loss from that of its example alone, over the largest.
    error: float = 0.0
    why: str = ""  # it is refused; else what keeps examples apart

    def wrong(self, attention: str) -> bool:
        """Return the verdict with an all-ones mask, which only our attention can refuse."""
        return self.plain == "wrong" or (attention == NAME and self.ones == "wrong")

    def cell(self) -> str:
        return self.plain if self.plain == "refused" else f"{self.plain}, {self.ones}"


class LeftOut(ValueError):
    """A family that cannot be tested, with the reason."""


def _words(error: Exception) -> str:
    return f"{type(error).__name__}: {one_line(error, 90)}"


def _losses_of(logits: torch.Tensor, labels: torch.Tensor, masked: bool) -> torch.Tensor:
    """Return the losses of the predicted tokens of a row: logits [1, tokens, vocabulary], labels [1, tokens]."""
    if masked:
        return F.cross_entropy(logits[0].float(), labels[0], reduction="none")
    return F.cross_entropy(logits[0, :-1].float(), labels[0, 1:], reduction="none")[
        labels[0, 1:] != -100
    ]


def _judged(found: torch.Tensor, expected: torch.Tensor) -> Tuple[str, float]:
    error = float((found - expected).abs().max() / expected.abs().max())
    return "right" if error <= _TOLERANCE else "wrong", error


def measure(
    name: str, attentions: Sequence[str] = _ATTENTIONS, seed: int = 0
) -> Dict[str, _Verdict]:
    """Return the verdicts by attention; raise LeftOut if there is no such model, or it needs more than token ids."""
    masked = families()[name].masked
    reference = build(name, seed=seed)
    draw = np.random.default_rng(seed)
    # 0 or 1 may be padding.
    examples = [{"input_ids": draw.integers(2, VOCABULARY, length)} for length in _LENGTHS]
    for example in examples if masked else ():
        example["labels"] = example["input_ids"]
    ids = np.concatenate([example["input_ids"] for example in examples])
    rows = [torch.from_numpy(example["input_ids"])[None] for example in examples]
    kept = copy.deepcopy(reference)
    try:
        with torch.no_grad():
            expected = torch.cat(
                [_losses_of(reference(each).logits, each, masked) for each in rows]
            )
            again = torch.cat([_losses_of(reference(each).logits, each, masked) for each in rows])
    except Exception as error:  # any code of any family
        raise LeftOut(f"model(input_ids) fails: {_words(error)}") from None
    if not bool((again - expected).abs().max() <= _TOLERANCE):
        raise LeftOut("model(input_ids) is random, or not a number")
    found = {}
    for attention in attentions:
        model = copy.deepcopy(kept)
        try:
            choice = use_padding_free(model, longest=_POSITIONS, attention=attention)
            inputs = PaddingFreeCollator(model)(examples)
            labels = torch.from_numpy(ids)[None] if masked else inputs["labels"]
            with torch.no_grad():
                plain, difference = _judged(
                    _losses_of(logits_of(model, inputs), labels, masked), expected
                )
        except ValueError as error:
            found[attention] = _Verdict("refused", "refused", why=one_line(error, 1000))
            continue
        except Exception as error:  # a mistake of ours
            found[attention] = _Verdict("wrong", "wrong", why=_words(error))
            continue
        given = {**inputs, "attention_mask": torch.ones_like(inputs["input_ids"])}
        try:
            with torch.no_grad():
                ones = _judged(_losses_of(logits_of(model, given), labels, masked), expected)[0]
        except Exception:  # an error is no silence
            ones = "refused"
        found[attention] = _Verdict(
            plain, ones, difference, choice.boundaries + " and seq_idx" * choice.seq_idx
        )
    return found


# ---- the table


class _Run(NamedTuple):
    """The verdicts of one version of Transformers."""

    version: str
    verdicts: Dict[str, Dict[str, _Verdict]]  # family -> attention -> verdict
    left_out: Dict[str, str]  # family -> why

    def wrong(self) -> int:
        return sum(
            each.wrong(attention)
            for found in self.verdicts.values()
            for attention, each in found.items()
        )

    def counts(self) -> List[str]:
        """Return the numbers of families, variants and verdicts, without and with an all-ones mask."""
        known = [name for name in (*self.verdicts, *self.left_out) if name not in _VARIANTS]
        built = sum(name in self.verdicts for name in known)
        row = [self.version, f"{built} of {len(known)}", str(len(self.verdicts) - built)]
        for which in (0, 1):
            for attention in _ATTENTIONS:
                words = [each[attention][which] for each in self.verdicts.values()]
                row.append(
                    ", ".join(str(words.count(word)) for word in ("right", "refused", "wrong"))
                )
        return row


def _reason(verdict: _Verdict) -> str:
    """Return the reason of a refusal in a few words: the layer, the missing package or the setting."""
    for pattern, words in (
        (r"nstall `?([\w-]+)", "needs {}"),
        (r"attends by the place of a token in the row \((\w+)", "{}"),
        (r"AttentionInterface|through torch\.nn", "its code takes no attention from Transformers"),
        (r"gives its attention ([\w, ]+), which", "gives its attention {}"),
        (r"a window on both sides", "a window on both sides"),
        (r"first in ([\w.]+ \(\w+\))", "{}"),
        (r"unexpected keyword argument", "its forward takes no boundaries"),
        (r"an attention_mask of shape|must match the size", "makes a mask of its own"),
    ):
        found = re.search(pattern, verdict.why)
        if found:
            return words.format(*found.groups())
    return verdict.why.split(": ", 2)[-1][:100]


def _page(runs: Sequence[_Run]) -> str:
    """Return the page in Markdown: the counts, one line per family, and the families left out."""
    titles = ["ours" if attention == NAME else attention for attention in _ATTENTIONS]
    heads = [
        "Transformers",
        "families",
        "variants",
        *titles,
        *(f"{title}, all-ones mask" for title in titles),
    ]
    parts = ["Right, refused, wrong:", markdown(heads, [run.counts() for run in runs])]
    parts.append("Each family, without and with an all-ones mask:")
    heads = [
        "family",
        *(f"{title}, {run.version}" for run in runs for title in titles),
        "ours is refused because of",
    ]
    rows = []
    for name in dict.fromkeys(name for run in runs for name in run.verdicts):
        found = [
            run.verdicts[name][a] if name in run.verdicts else None
            for run in runs
            for a in _ATTENTIONS
        ]
        reasons = [
            _reason(each)
            for each in found[len(titles) - 1 :: len(titles)]
            if each and each.plain != "right"
        ]
        rows.append(
            [name, *("-" if each is None else each.cell() for each in found), "".join(reasons[-1:])]
        )
    parts.append(markdown(heads, rows))
    for run in runs:
        names: Dict[str, List[str]] = {}
        for name, reason in run.left_out.items():
            names.setdefault(reason, []).append(name)
        parts += [f"Left out with {run.version}:"] * bool(names)
        parts.append("\n".join(f"- {'; '.join(each)}: {reason}" for reason, each in names.items()))
    return "\n\n".join(part.strip() for part in parts if part)


def main(arguments: Optional[Sequence[str]] = None) -> int:
    parser = argparse.ArgumentParser(
        description="Which families are right in padding-free rows, as Markdown."
    )
    parser.add_argument(
        "families",
        nargs="*",
        metavar="FAMILY",
        help="such as llama or 'bert, masked'; default: all",
    )
    parser.add_argument(
        "--out", type=Path, metavar="FILE", help="write the verdicts here as well, as JSON"
    )
    parser.add_argument(
        "--with", dest="other", type=Path, metavar="FILE", help="what --out wrote elsewhere"
    )
    options = parser.parse_args(arguments)
    # Warnings of Transformers about tiny models are no news here.
    transformers: Any = __import__("transformers")
    transformers.logging.set_verbosity_error()
    logging.getLogger("ipu_packed_bert").setLevel(logging.ERROR)
    warnings.simplefilter("ignore")
    run = _Run(transformers.__version__, {}, {})
    names = options.families or list(families())
    with progress_bar(len(names), "families") as bar:
        for name in names:
            bar.set_postfix_str(name)
            try:
                run.verdicts[name] = measure(name)
            except LeftOut as error:
                run.left_out[name] = str(error)
            bar.update()
    if options.out:
        options.out.write_text(json.dumps(run._asdict()) + "\n", encoding="utf-8")
    runs = [run]
    if options.other:
        version, verdicts, left_out = json.loads(options.other.read_text(encoding="utf-8")).values()
        made = {
            name: {a: _Verdict(*each) for a, each in found.items()}
            for name, found in verdicts.items()
        }
        runs = [_Run(version, made, left_out), run]
    print(_page(runs))
    errors = [each.error for one in runs for by in one.verdicts.values() for each in by.values()]
    right, wrong = (
        max((each for each in errors if each <= _TOLERANCE), default=0.0),
        sum(map(_Run.wrong, runs)),
    )
    print(f"\nRight up to {right:.0e} of the largest loss; wrong without an error: {wrong}")
    return 1 if wrong else 0


# ---- tiny models

VOCABULARY = 50
_WINDOW = 5  # tokens of every window and chunk here
_MOST = 5_000_000  # parameters

# What a field of a configuration is in a tiny model, at most: the first that fits its name.  None: as it is.
_SIZES: List[Tuple[Any, Optional[int]]] = [
    (re.compile(pattern), size)
    for size, pattern in (
        (None, r"_index$|_ids?$|patch_size|image_size|^num_channels$|^head_ratio$"),
        (VOCABULARY, r"vocab"),
        # The number of layers kept.
        (-1, r"^(num_)?((en|de)coder_|hidden_)?layers(_per_stack)?$|^n_layers?$|^depth$"),
        (
            1,
            r"max_window_layers|first_k_dense|dense_layers|layer_start|n?_groups?$|shared_(layer|expert)s|^zero_exp",
        ),
        (16, r"^qk_head_dim$"),
        (
            8,
            r"_d_head|head_?dim|head_size|^d_(head|kv)$|kv_channels|dim_head|^qk_\w+_dim|_rank$|state(_size)?$|lowra",
        ),
        (1, r"(kv|key_value)_heads$|kv_n_heads"),
        (4, r"rotary_dim|index_topk|mamba\w*_heads|experts$"),
        (2, r"heads?$|heads_per_layer|query_groups|experts_per_tok|top_?k(_experts)?$|moe_k$"),
        (_WINDOW, r"window|attention_chunk_size|local_attention$|rel_extent"),
        (8, r"chunk_size$|chunk_length$|block_size$"),
        (
            32,
            r"intermediate_size|ffn_(dim|hidden)|n_inner|d_(ff|inner|ssm)$|^dff|dim_ff|feed_forward|^hidden_dim|mlp_",
        ),
        (
            16,
            r"hidden_size|d_model|n_embd|emb\w*_size|^dim$|lru_width|prediction_head|bottleneck|_dims?$|put_size$",
        ),
        (_POSITIONS, r"positions?(_embeddings)?$|max_seq_len|context_length|image_seq"),
    )
]


# What is not left to its default, where that is none.
_NEEDED = (
    "vocab_size",
    "head_dim",
    "num_key_value_heads",
    "num_experts_per_tok",
    "n_shared_experts",
)


class _Family(NamedTuple):
    """A configuration of Transformers, by its model_type, with settings beyond those of `_tiny`."""

    kind: str
    masked: bool
    settings: Dict[str, Any]


@lru_cache(None)
def families() -> Dict[str, _Family]:
    """Return the causal and masked families of the installed Transformers, and variants, by name."""
    from transformers import CONFIG_MAPPING
    from transformers.models.auto import modeling_auto

    found = {}
    for masked, kinds in enumerate(
        (
            modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
            modeling_auto.MODEL_FOR_MASKED_LM_MAPPING_NAMES,
        )
    ):
        for kind in kinds:
            found[kind + ", masked" * masked] = _Family(kind, bool(masked), {})
    for name, settings in _VARIANTS.items():
        kind = name.split(",")[0]
        if kind in CONFIG_MAPPING:
            found[name] = _Family(kind, False, settings)
    return found


def _tiny(config: Any, causal: bool) -> Any:
    """Return settings that make this configuration, and the configurations inside it, tiny."""
    fields = {
        name: value
        for name, value in vars(config).items()
        if name[0] != "_" and not name.endswith("2label")
    }
    layers = next(
        (fields[name] for name in ("num_hidden_layers", "num_layers", "n_layer") if name in fields),
        0,
    )
    per_layer = {}
    for name, value in fields.items():
        if isinstance(value, (list, tuple)) and len(value) == layers > 1 and "idx" not in name:
            per_layer[name] = value
    # One layer of each kind, in their order, and at least two.
    kinds = [str(kind) for kind in zip(*per_layer.values())]
    kept = sorted({kinds.index(kind) for kind in kinds[:64]} | {0, 1})[:6] if kinds else [0, 1]

    settings: Dict[str, Any] = {}
    for name, value in fields.items():
        if hasattr(value, "to_dict"):
            settings[name] = _tiny(value, causal)
        elif name in ("is_decoder", "use_cache"):
            settings[name] = causal and name == "is_decoder"
        elif name in per_layer:
            size = _size_of(name)
            values = [value[layer] for layer in kept]
            settings[name] = [
                min(each, size) if size and type(each) is int else each for each in values
            ]
        else:
            settings[name] = _tiny_value(name, value, len(kept))
    settings.update(_SPECIAL.get(config.model_type, {}))
    if type(settings.get("kv_lora_rank")) is int:
        # The keys of all heads come from one.
        settings["num_key_value_heads"] = settings["num_attention_heads"]
    return {
        name: value
        for name, value in settings.items()
        if name not in fields or value is not fields[name]
    }


def _size_of(name: str) -> Optional[int]:
    return next((size for pattern, size in _SIZES if pattern.search(name)), None)


def _tiny_value(name: str, value: Any, layers: int) -> Any:
    """Return the tiny value of a setting, or the same value if it does not matter."""
    size = _size_of(name)
    if name.endswith("token_id"):
        if name.startswith("pad") and value is not None:
            return min(value, 1)
        return (
            1
            if value is not None and (not isinstance(value, int) or value >= VOCABULARY)
            else value
        )
    if type(value) is float and re.search("drop|jitter", name):
        return 0.0
    if type(value) is float and "softcap" in name:
        return 1.0
    if value is None and name in _NEEDED:
        return size
    if type(value) is int and value > 0 and size is not None:
        return layers if size < 0 else min(value, size)
    return value


def _made(config: Any, settings: Dict[str, Any]) -> Any:
    """Return a configuration of the same class with these settings."""
    inner = vars(config)
    given = {
        name: _made(inner[name], value).to_dict() if hasattr(inner.get(name), "to_dict") else value
        for name, value in settings.items()
    }
    return type(config)(**given)


def build(
    name: str, *, attention: str = "eager", dtype: torch.dtype = torch.float32, seed: int = 0
) -> Any:
    """Build a model of the family, with weights so large that attention changes the logits.

    Raises LeftOut if the installed Transformers cannot build it.
    """
    import transformers

    family = families()[name]
    auto = transformers.AutoModelForMaskedLM if family.masked else transformers.AutoModelForCausalLM
    state = torch.get_rng_state()
    torch.manual_seed(seed)
    try:
        config, count = transformers.CONFIG_MAPPING[family.kind](), 0
        config = _made(config, {**_tiny(config, not family.masked), **family.settings})
        if family.masked and config.is_encoder_decoder:
            raise LeftOut("encoder and decoder")
        # Models that read values raise it.
        with torch.device("meta"), contextlib.suppress(NotImplementedError):
            count = sum(
                each.numel()
                for each in auto.from_config(config, attn_implementation=attention).parameters()
            )
        if count > _MOST:
            raise LeftOut(f"not tiny: {count:,} parameters")
        model = auto.from_config(config, attn_implementation=attention).to(dtype).eval()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(
                    torch.randn(parameter.shape, dtype=torch.float64).to(parameter.dtype) * 0.3
                )
    except LeftOut:
        raise
    except Exception as error:  # any code of any family
        raise LeftOut(_words(error)) from None
    finally:
        torch.set_rng_state(state)
    return model


_LONGROPE = {
    "rope_type": "longrope",
    "short_factor": [1.0] * 4,
    "long_factor": [4.0] * 4,
    "factor": 4.0,
    "original_max_position_embeddings": 12,
}

# Settings of families that `_tiny` does not handle.
_SPECIAL: Dict[str, Dict[str, Any]] = {
    "codegen": {"n_embd": 32, "n_head": 4},
    "cohere_compass_text": {
        "layer_types": ["full_attention", "sliding_attention"],
        "rope_parameters": dict.fromkeys(
            ("full_attention", "sliding_attention"), {"rope_type": "default", "rope_theta": 1e4}
        ),
    },
    "dbrx": {"attn_config": {"rope_theta": 1e4, "kv_n_heads": 1, "clip_qkv": 8.0}},
    "diffllama": {"num_key_value_heads": 2},
    "dots1": {"n_routed_experts": 4},
    "dots3_note_text": {"per_layer_config": {}, "head_dim": 16},
    "esm": {"pad_token_id": 1},
    "esmc": {"num_key_value_heads": 2},
    "funnel": {"block_sizes": [2], "block_repeats": None},
    "granitemoehybrid": {"layer_types": ["mamba", "attention"]},
    "gpt_neo": {"attention_types": [[["global", "local"], 1]]},
    "jamba": {
        "attn_layer_period": 2, "attn_layer_offset": 1, "num_experts": 2, "mamba_dt_rank": 4, "use_mamba_kernels": False
    },
    "lfm2": {"layer_types": ["conv", "full_attention"]},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"]},
    "longformer": {"attention_window": [4, 4]},
    "mamba2": {"num_heads": 4},
    "neomme": {"head_dim": 16},
    "qwen4_exp_text": {
        "indexer_compress_ratio": 4, "indexer_budget": 8, "indexer_n_heads": 2, "indexer_kv_heads": 1,
        "indexer_head_dim": 8,
    },
    "recurrent_gemma": {"block_types": ["recurrent", "attention"]},
    "reformer": {"axial_pos_embds": False, "hash_seed": 0},
    "xmod": {"default_language": "en_XX"},
    "zamba": {
        "layers_block_type": ["linear_attention", "hybrid", "hybrid"], "num_hidden_layers": 3,
        "attention_hidden_size": 32, "attention_head_dim": 16,
    },
    "zamba2": {
        "hybrid_layer_ids": [1], "layers_block_type": ["mamba", "hybrid"], "num_hidden_layers": 2, "adapter_rank": 4,
        "use_mem_rope": True, "use_mem_eff_path": False, "n_mamba_heads": 4, "attention_hidden_size": 32,
        "attention_head_dim": 16,
    },
}  # fmt: skip
# Variants: the family before the comma, and the settings that differ.
_VARIANTS: Dict[str, Dict[str, Any]] = {
    "llama, dynamic positions": {
        "rope_scaling": {"rope_type": "dynamic", "factor": 2.0}, "max_position_embeddings": 12
    },
    "llama4_text, chunks": {"attn_temperature_tuning": False},
    "mistral, no window": {"sliding_window": None},
    "qwen2, window": {"sliding_window": _WINDOW, "use_sliding_window": True, "max_window_layers": 1},
    "phi3, long positions": {
        "rope_parameters": _LONGROPE, "rope_scaling": _LONGROPE, "original_max_position_embeddings": 12
    },
    "starcoder2, window": {"sliding_window": _WINDOW},
    "falcon, ALiBi": {"alibi": True, "multi_query": False, "parallel_attn": False, "num_kv_heads": 2},
}  # fmt: skip


if __name__ == "__main__":
    sys.exit(main())
