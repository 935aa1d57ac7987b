"""Attention within each example of a padding-free row, for any model that takes its attention from Transformers.

    model = AutoModelForCausalLM.from_pretrained(name, attn_implementation="padding_free")

Import this module, or any public name of `ipu_packed_bert.padding_free`, before: the name is registered then.  The
boundaries of the examples are among the model's inputs, as for flash attention: cu_seq_lens_q and cu_seq_lens_k, int32
[examples + 1].  No mask is made.  Time and memory grow with the squared length of each example, not of the row.

A batch without boundaries, padded or with a cache, is computed as with "sdpa".

Letters: N heads, K heads of keys and values, A width of a head, T tokens of the row, L of one example, n examples.
"""

from __future__ import annotations

import importlib
import weakref
from typing import Any, Callable, Dict, List, NamedTuple, Optional, Sequence, Tuple

import torch
from torch.nn import functional as F

from ipu_packed_bert.model.blocks import AttentionBlocks, attend_in_blocks, blocks_of

NAME = "padding_free"

# Arguments that reach an attention function and do not change what it computes, besides those that are named below.
_WITHOUT_EFFECT = set(
    "cache_position deterministic logits_to_keep max_length_k max_length_q num_items_in_batch output_attentions "
    "output_hidden_states output_router_logits position_embeddings position_ids return_dict seq_idx use_cache".split()
)


class _Settings(NamedTuple):
    """How one layer attends."""

    scale: Optional[float] = None  # None: one over the root of the width
    dropout: float = 0.0
    causal: bool = True
    window: Optional[int] = None  # a token sees others less than so far before it and, if not causal, behind it
    softcap: Optional[float] = None
    sinks: Optional[torch.Tensor] = None  # [N], a score that takes a share of each softmax and gives nothing

    @property
    def scored(self) -> bool:
        """Whether the scores are needed, which fused kernels do not give."""
        return self.softcap is not None or self.sinks is not None


# ---- one block: examples of the same length


def _attend_block(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, settings: _Settings) -> torch.Tensor:
    """query [n, N, L, A], key and value [n, K, L, A] -> [n, N, L, A], each example by itself."""
    length, window = query.shape[2], settings.window
    if window is None or window >= length:
        return _attend(query, key, value, _causal(query, key, settings), settings)
    # Cut the queries, and give each piece the keys that it reaches.
    step, contexts = max(window, 128), []
    for begin in range(0, length, step):
        end, first = min(begin + step, length), max(0, begin - window + 1)
        last = end if settings.causal else min(length, end + window - 1)
        behind = torch.arange(begin, end, device=query.device)[:, None] - torch.arange(first, last, device=query.device)
        seen = (behind >= 0) & (behind < window) if settings.causal else behind.abs() < window
        contexts.append(_attend(query[:, :, begin:end], key[:, :, first:last], value[:, :, first:last], seen, settings))
    return torch.cat(contexts, dim=2)


def _causal(query: torch.Tensor, key: torch.Tensor, settings: _Settings) -> Optional[torch.Tensor]:
    """The mask of a whole block; None where the kernel needs none."""
    if not settings.scored:
        return None
    seen = torch.ones(query.shape[2], key.shape[2], dtype=torch.bool, device=query.device)
    return seen.tril() if settings.causal else seen


def _attend(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: Optional[torch.Tensor], settings: _Settings
) -> torch.Tensor:
    """mask: boolean or added; None: all, or all earlier keys, as the settings say."""
    groups = query.shape[1] // key.shape[1]
    if groups > 1:
        key, value = (each.repeat_interleave(groups, dim=1) for each in (key, value))
    if settings.scored:
        return _scored(query, key, value, mask, settings)
    causal = settings.causal and mask is None and query.shape[2] > 1
    return F.scaled_dot_product_attention(
        query, key, value, attn_mask=mask, dropout_p=settings.dropout, is_causal=causal, scale=settings.scale
    )


def _scored(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: Optional[torch.Tensor], settings: _Settings
) -> torch.Tensor:
    """The same, where scores are capped or a sink takes part in the softmax, which is in float32 at least."""
    scale = query.shape[-1] ** -0.5 if settings.scale is None else settings.scale
    scores = (query @ key.transpose(2, 3)) * scale
    if settings.softcap is not None:
        scores = settings.softcap * torch.tanh(scores / settings.softcap)
    if mask is not None:
        scores = scores.masked_fill(~mask, float("-inf")) if mask.dtype == torch.bool else scores + mask
    if settings.sinks is not None:
        sinks = settings.sinks.to(scores.dtype).view(1, -1, 1, 1).expand(len(scores), -1, scores.shape[2], 1)
        scores = torch.cat([scores, sinks], dim=3)
    accurate = torch.promote_types(scores.dtype, torch.float32)
    shares = torch.softmax(scores, dim=3, dtype=accurate).to(query.dtype)[..., : key.shape[2]]
    return F.dropout(shares, settings.dropout) @ value


# ---- a row: its boundaries, and the kernel or the blocks

# Functions, arguments (of tensors references), versions of the arguments, and what was found: the last first.
_found: List[Tuple[Any, ...]] = []


def _once(find: Callable[..., Any], *given: Any) -> Any:
    """find(*given), worked out once for all layers of a call: they get the same tensors."""
    global _found
    versions = [_version(each) for each in given]
    for function, arguments, before, result in _found:
        if function is find and before == versions and all(map(_is_same, arguments, given)):
            return result
    result = find(*given)
    if min(versions) >= 0:
        arguments = [weakref.ref(each) if torch.is_tensor(each) else each for each in given]
        _found = [(find, arguments, versions, result), *_found[:15]]
    return result


def _is_same(argument: Any, each: Any) -> bool:
    """A tensor that is gone is no tensor that was not given."""
    if torch.is_tensor(each):
        return isinstance(argument, weakref.ref) and argument() is each
    return bool(argument == each)


def _version(value: Any) -> int:
    """Rises where a tensor changes in place; -1 where that is not told."""
    return 0 if not torch.is_tensor(value) else -1 if value.is_inference() else value._version


if hasattr(torch, "compiler") and hasattr(torch.compiler, "disable"):
    _once = torch.compiler.disable(_once)  # it reads numbers


def _starts(boundaries: torch.Tensor) -> torch.Tensor:
    """[examples + 1], also of those that `_padding_free_mask` gives."""
    return boundaries if boundaries.dim() == 1 else boundaries[0, 0, 0]


def _lengths(boundaries: torch.Tensor, chunk: Optional[int]) -> List[int]:
    """Tokens of each example, or of each of its chunks, whose tokens do not see another chunk."""
    if chunk is None:
        numbers = _starts(boundaries).tolist()
        return [end - begin for begin, end in zip(numbers, numbers[1:])]
    lengths = _once(_lengths, boundaries, None)
    return [min(chunk, length - begin) for length in lengths for begin in range(0, length, chunk)]


def _blocks(boundaries: torch.Tensor, chunk: Optional[int]) -> AttentionBlocks:
    return blocks_of(_once(_lengths, boundaries, chunk), boundaries.device)


def _starts_of_chunks(boundaries: torch.Tensor, tokens: int, chunk: int) -> torch.Tensor:
    """The boundaries of all chunks, and empty ones behind them: no device is asked how many chunks there are."""
    starts = _starts(boundaries)
    at = torch.arange(tokens, device=starts.device)
    places = at - starts[torch.searchsorted(starts, at, right=True) - 1]
    cuts = torch.where(places % chunk == 0, at, tokens).sort().values
    return F.pad(cuts[: tokens // chunk + len(starts) - 1], (0, 1), value=tokens).int()


def _kernel(query: torch.Tensor, value: torch.Tensor, settings: _Settings) -> Optional[Any]:
    """The variable-length kernel of torch, where it computes what this layer needs.  It has no dropout."""
    if query.device.type != "cuda" or query.dtype not in (torch.float16, torch.bfloat16):
        return None
    if settings.scored or settings.dropout or max(query.shape[-1], value.shape[-1]) > 256:
        return None
    try:
        return importlib.import_module("torch.nn.attention.varlen").varlen_attn
    except (ImportError, AttributeError):
        return None


def _attend_row(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    boundaries: torch.Tensor,
    settings: _Settings,
    *,
    longest: Optional[int] = None,
    chunk: Optional[int] = None,
) -> torch.Tensor:
    """query [1, N, T, A], key and value [1, K, T, A] -> [1, T, N, A], each example by itself.

    boundaries: int32 [examples + 1] from 0 to T, or as `_padding_free_mask` gives them.  longest: tokens of the
    longest example, if known.  chunk: an example is cut into chunks of so many tokens.
    """
    rows = tuple(each[0].transpose(0, 1) for each in (query, key, value))
    kernel = _kernel(query, value, settings)
    if kernel is not None:
        starts, most = _starts(boundaries).int(), query.shape[2] if longest is None else longest
        if chunk is not None:
            starts, most = _once(_starts_of_chunks, boundaries, query.shape[2], chunk), min(most, chunk)
        return _by_kernel(kernel, rows, starts, most, settings).unsqueeze(0)
    blocks = _once(_blocks, boundaries, chunk)
    return attend_in_blocks(rows, blocks, lambda q, k, v: _attend_block(q, k, v, settings)).unsqueeze(0)


def _by_kernel(
    kernel: Any, rows: Sequence[torch.Tensor], starts: torch.Tensor, longest: int, settings: _Settings
) -> torch.Tensor:
    """query [T, N, A], key and value [T, K, A] -> [T, N, A].  Values may have another width than keys (MLA)."""
    query, key, value = rows
    reach = -1 if settings.window is None else settings.window - 1
    scale = query.shape[-1] ** -0.5 if settings.scale is None else settings.scale
    # The kernel has one width, a multiple of 8: zeros behind queries, keys and values change nothing in front of them.
    width = -(-max(query.shape[-1], value.shape[-1]) // 8) * 8
    wide = [each if each.shape[-1] == width else F.pad(each, (0, width - each.shape[-1])) for each in rows]
    grouped = {"enable_gqa": True} if query.shape[1] != key.shape[1] else {}
    window = (reach, 0 if settings.causal else reach)
    context = kernel(*wide, starts, starts, longest, longest, scale=scale, window_size=window, **grouped)
    found: torch.Tensor = context[..., : value.shape[-1]]
    return found


# ---- what Transformers calls


def _padding_free_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: Optional[torch.Tensor] = None,
    scaling: Optional[float] = None,
    dropout: float = 0.0,
    is_causal: Optional[bool] = None,
    sliding_window: Optional[int] = None,
    softcap: Optional[float] = None,
    s_aux: Optional[torch.Tensor] = None,
    cu_seq_lens_q: Optional[torch.Tensor] = None,
    cu_seq_lens_k: Optional[torch.Tensor] = None,
    **others: Any,
) -> Tuple[torch.Tensor, None]:
    """query [B, N, T, A], key and value [B, K, T, A] -> context [B, T, N, A] and no weights.

    Raises ValueError for an argument that it does not know, and where boundaries are of another row than this.
    """
    name = type(module).__name__
    unknown = sorted(each for each, given in others.items() if given is not None and each not in _WITHOUT_EFFECT)
    if unknown:
        raise ValueError(
            f'{name} gives its attention {", ".join(unknown)}, which attn_implementation="{NAME}" does not know; '
            'use another, such as "sdpa"'
        )
    carried = _is_carried(attention_mask)
    # Some code says is_causal=False where it gives a mask, which is then causal.  So are boundaries in its place.
    causal = carried or bool(getattr(module, "is_causal", True) if is_causal is None else is_causal)
    window, chunk = _reach_of(module, sliding_window)
    # Masks of Transformers reach config.sliding_window to both sides, and its layers hand over one more.
    if window is not None and not causal and window == setting_of(getattr(module, "config", None), "sliding_window"):
        raise ValueError(f'{name} has a window on both sides that attn_implementation="{NAME}" does not know')
    settings = _Settings(scaling, dropout, causal, window, softcap, s_aux)
    if carried and cu_seq_lens_q is None:
        if chunk is not None:  # chunks are counted from the begin of the row in some versions of Transformers
            raise ValueError(f"{name} attends in chunks; give the model cu_seq_lens_q, as PaddingFreeCollator does")
        cu_seq_lens_q = attention_mask
    positions = others.get("position_ids")
    if not (torch.is_tensor(positions) and positions.dim() == 2 and 1 < positions.shape[1] == query.shape[2]):
        positions = None
    mask = attention_mask if cu_seq_lens_q is None else None  # else layers of two kinds have two
    wrong, longest = _once(_seen_in, positions, mask, cu_seq_lens_q, cu_seq_lens_k, query.shape[2])
    if wrong:
        raise ValueError(
            f"{name}: {wrong}; give the model what padding_free.inputs_for gives, without an attention_mask, and "
            "use_cache=False"
        )
    if cu_seq_lens_q is None:
        return _without_boundaries(query, key, value, attention_mask, settings, chunk), None
    # Older versions of Transformers make a mask for a row of one example too; it says what the boundaries say.
    if attention_mask is not None and not carried and cu_seq_lens_q.numel() > 2:
        raise ValueError(
            f"{name} gets boundaries of examples and an attention_mask of shape {tuple(attention_mask.shape)}; give "
            "the model no attention_mask with cu_seq_lens_q, and call it with use_cache=False"
        )
    if len(query) != 1 or query.shape[2] != key.shape[2]:
        raise ValueError(
            f"{name} gets boundaries with queries of shape {tuple(query.shape)} and keys of {tuple(key.shape)}; "
            "must be one row, without a cache"
        )
    return _attend_row(query, key, value, cu_seq_lens_q, settings, longest=longest, chunk=chunk), None


def _seen_in(
    positions: Optional[torch.Tensor],
    mask: Optional[torch.Tensor],
    boundaries: Optional[torch.Tensor],
    of_keys: Optional[torch.Tensor],
    tokens: int,
) -> Tuple[str, int]:
    """What contradicts what, and the tokens of the longest example.  A device is waited for once.

    positions: [B, T].
    """
    if boundaries is None:
        if positions is None or not bool(_joined(positions, mask).any()):
            return "", tokens
        return "position_ids begin again, and the attention_mask or the cache lets examples see each other", tokens
    starts = _starts(boundaries)
    if len(starts) < 2 or (of_keys is not None and of_keys.shape != boundaries.shape):
        return "cu_seq_lens_q and cu_seq_lens_k must be the same boundaries of one or more examples", tokens
    lengths = starts.diff()
    wrong = {
        f"cu_seq_lens_q must rise from 0 to {tokens}, the tokens of the row": (
            (starts[0] != 0) | (starts[-1] != tokens) | (lengths < 0).any()
        )
    }
    if of_keys is not None and of_keys is not boundaries:
        wrong["cu_seq_lens_k must be the same boundaries as cu_seq_lens_q"] = (of_keys != boundaries).any()
    if positions is not None:
        begins = positions[0, 1:] != positions[0, :-1] + 1
        apart = torch.zeros(tokens + 1, dtype=torch.bool, device=begins.device)
        apart[starts.long().clamp(0, tokens)] = True
        wrong["cu_seq_lens_q has other examples than position_ids"] = begins.any() & (begins != apart[1:-1]).any()
    longest, *values = torch.stack([lengths.max(), *wrong.values()]).tolist()
    return next((text for text, value in zip(wrong, values) if value), ""), longest


def _joined(positions: torch.Tensor, mask: Optional[torch.Tensor]) -> torch.Tensor:
    """[B, T - 1]: where a position is not behind the one before it, and its token sees itself and the one before it.

    A token of padding does not see itself.
    """
    again = positions[:, 1:] <= positions[:, :-1]
    if mask is None:
        return again
    seen = mask if mask.dtype == torch.bool else mask > torch.finfo(mask.dtype).min / 4
    before = seen.shape[3] - seen.shape[2]  # tokens in the cache
    itself, other = (seen.diagonal(before - back, 2, 3)[:, 0, -again.shape[1] :] for back in (0, 1))
    return again & itself & other


def _reach_of(module: torch.nn.Module, window: Optional[int]) -> Tuple[Optional[int], Optional[int]]:
    """Window and chunk of a layer: the window that it hands over, else what its configuration says of its kind."""
    kind, chunk = _layer_kind(module), None
    if kind is not None and "sliding" in kind and window is None:
        window = setting_of(module.config, "sliding_window")
    if kind is not None and "chunk" in kind:
        chunk = setting_of(module.config, "attention_chunk_size")
    return window, chunk


def layer_configs(config: Any) -> List[Any]:
    """Of each layer, where Transformers has one a layer: the whole one then raises an error for what varies."""
    return list(config.per_layer_config) if getattr(config, "is_heterogeneous", False) else [config]


def setting_of(config: Any, name: str) -> Any:
    """None where the configuration has none; the least where its layers have different ones."""
    each = [getattr(layer, name, None) for layer in layer_configs(config)]
    return min((value for value in each if value is not None), default=None)


def _layer_kind(module: torch.nn.Module) -> Optional[str]:
    """What the configuration calls this layer, such as "sliding_attention"; None where it has no such list."""
    kinds = getattr(getattr(module, "config", None), "layer_types", None)
    number = getattr(module, "layer_idx", None)
    return kinds[number] if kinds is not None and isinstance(number, int) and number < len(kinds) else None


def _without_boundaries(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: Optional[torch.Tensor],
    settings: _Settings,
    chunk: Optional[int],
) -> torch.Tensor:
    """A plain batch: each row is one example, or has the mask that Transformers makes for "sdpa", windows and all."""
    tokens, keys = query.shape[2], key.shape[2]
    if mask is None and tokens == keys:
        step = chunk or tokens
        contexts = []
        for begin in range(0, tokens, step):
            here = slice(begin, begin + step)
            contexts.append(_attend_block(query[:, :, here], key[:, :, here], value[:, :, here], settings))
        return torch.cat(contexts, dim=2).transpose(1, 2).contiguous()
    if mask is None and settings.causal and tokens > 1:
        key, value = key[:, :, :tokens], value[:, :, :tokens]  # a cache with room that is not in use yet
    elif mask is None:
        settings = settings._replace(causal=False)  # one new token sees all that are kept
    mask = _causal(query, key, settings) if mask is None else mask[..., :keys]
    return _attend(query, key, value, mask, settings).transpose(1, 2).contiguous()


# ---- the mask that is none


def _padding_free_mask(*args: Any, **keywords: Any) -> Optional[torch.Tensor]:
    """In place of the mask of a row of several examples: their boundaries, int32 [1, 1, 2, examples + 1], twice.

    Code other than ours cannot take that for a mask: it fits no scores.  Without padding and cache there is no mask:
    the attention itself applies windows.  Any other batch gets the mask of "sdpa".
    """
    function, tokens = keywords.get("mask_function"), _length_of(keywords, "q")
    offset = keywords.get("q_offset", 0)
    whole = tokens == _length_of(keywords, "kv") and isinstance(offset, int) and not offset
    if tokens is not None and whole and function is not None and keywords.get("attention_mask") is None:
        if keywords.get("allow_is_causal_skip") or keywords.get("allow_is_bidirectional_skip"):
            return None
        boundaries = _boundaries_of(function, tokens, keywords) if keywords.get("batch_size") == 1 else None
        if boundaries is not None:
            return boundaries.expand(1, 1, 2, -1)
    from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS

    return ALL_MASK_ATTENTION_FUNCTIONS["sdpa"](*args, **keywords)


def _boundaries_of(function: Any, tokens: int, keywords: Dict[str, Any]) -> Optional[torch.Tensor]:
    """Where a token does not see the one before it; None where each does, or some see the one behind them.

    function: which query sees which key.
    """
    positions = keywords.get("cache_position")
    at = torch.arange(1, tokens, device=keywords.get("device") if positions is None else positions.device)
    zero = torch.zeros_like(at)
    # A device is waited for once, here.
    before, behind = torch.stack([function(zero, zero, at, at - 1), function(zero, zero, at - 1, at)]).cpu()
    if before.all() or behind.any():
        return None
    starts = F.pad(torch.nonzero(~before)[:, 0] + 1, (1, 0))
    return F.pad(starts, (0, 1), value=tokens).int().to(at.device, non_blocking=True)


def _length_of(keywords: Dict[str, Any], which: str) -> Optional[int]:
    """Newer versions of Transformers give lengths, older ones positions in a cache."""
    length = keywords.get(f"{which}_length")
    positions = keywords.get("cache_position")
    if length is None and which == "q" and positions is not None:
        return int(positions.shape[0])
    return length


def _is_carried(mask: Any) -> bool:
    """Whether this is no mask but boundaries, as `_padding_free_mask` gives them."""
    return torch.is_tensor(mask) and mask.dim() == 4 and mask.dtype == torch.int32 and mask.shape[2] == 2


def _register() -> bool:
    """Make the name known to Transformers.  Whether there is one that takes it."""
    try:
        from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
    except ImportError:  # before 4.53 each model made its own dense mask and gave it to any attention
        return False
    if not hasattr(PreTrainedModel, "set_attn_implementation"):
        return False
    AttentionInterface.register(NAME, _padding_free_attention)
    AttentionMaskInterface.register(NAME, _padding_free_mask)
    return True


REGISTERED = _register()
