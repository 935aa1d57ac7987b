"""Attention within each example of a padding-free row, for any model that takes its attention from Transformers.

    model = AutoModelForCausalLM.from_pretrained(name, attn_implementation="padding_free")

Importing this module, or any public name of `padding_free`, registers the name.  The boundaries of the examples are
inputs of the model, as for flash attention: cu_seq_lens_q and cu_seq_lens_k, int32 [examples + 1].  There is no mask.
Time and memory grow with the squared length of each example, not of the row.

A batch without boundaries, padded or with a cache, has the result of "sdpa".

Letters: N heads, K heads of keys and values, A width of a head, T tokens of the row, L of one example, n examples.
"""

from __future__ import annotations

import functools
import importlib
import inspect
import threading
import weakref
from typing import Any, Callable, Dict, FrozenSet, List, NamedTuple, Optional, Sequence, Tuple

import torch
from torch.nn import functional as F

from pack_data.store.attention_blocks import AttentionBlocks
from padding_free.blocks import attend_in_blocks, blocks_on, window_pieces

NAME = "padding_free"

# Arguments of an attention function that do not change its result, in addition to its named arguments.
_WITHOUT_EFFECT = set(
    "cache_position deterministic logits_to_keep max_length_k max_length_q num_items_in_batch output_attentions "
    "output_hidden_states output_router_logits position_embeddings position_ids return_dict seq_idx use_cache".split()
)


_KERNEL_MODULE = "torch.nn.attention.varlen"
_MOST_KERNEL_WIDTH = 256  # of a head in torch's variable-length kernel


class _Settings(NamedTuple):
    """The attention of one layer."""

    scale: Optional[float] = None  # None: one over the root of the width
    dropout: float = 0.0
    causal: bool = True
    # A token attends to tokens less than this far before it and, if not causal, after it.
    window: Optional[int] = None
    softcap: Optional[float] = None
    # [N], a score per head that takes a share of each softmax and adds nothing.
    sinks: Optional[torch.Tensor] = None

    @property
    def scored(self) -> bool:
        """True if the scores are needed, which fused kernels do not return."""
        return self.softcap is not None or self.sinks is not None


# ---- one block: examples of the same length


def _attend_block(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    settings: _Settings,
) -> torch.Tensor:
    """Attend within each example: query [n, N, L, A], key and value [n, K, L, A] -> [n, N, L, A]."""
    length = query.shape[2]
    window = settings.window
    if window is None or window >= length:
        mask = _whole_mask(query, key, settings)
        return _attend(query, key, value, mask, settings)

    reach = window - 1
    after = 0 if settings.causal else reach
    contexts = []
    for piece in window_pieces(length, length, reach, after, query.device):
        keys = key[:, :, piece.keys]
        values = value[:, :, piece.keys]
        contexts.append(_attend(query[:, :, piece.queries], keys, values, piece.seen, settings))
    return torch.cat(contexts, dim=2)


def _whole_mask(
    query: torch.Tensor,
    key: torch.Tensor,
    settings: _Settings,
) -> Optional[torch.Tensor]:
    """Return the mask of a whole block; None for fused kernels, which need none."""
    if not settings.scored:
        return None
    seen = torch.ones(query.shape[2], key.shape[2], dtype=torch.bool, device=query.device)
    return seen.tril() if settings.causal else seen


def _attend(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: Optional[torch.Tensor],
    settings: _Settings,
) -> torch.Tensor:
    """Attend under a mask, boolean or added; None: to all keys or all earlier ones, by the settings."""
    groups = query.shape[1] // key.shape[1]
    if groups > 1:
        key = key.repeat_interleave(groups, dim=1)
        value = value.repeat_interleave(groups, dim=1)
    if settings.scored:
        return _attend_by_scores(query, key, value, mask, settings)
    causal = settings.causal and mask is None and query.shape[2] > 1
    return F.scaled_dot_product_attention(
        query,
        key,
        value,
        attn_mask=mask,
        dropout_p=settings.dropout,
        is_causal=causal,
        scale=settings.scale,
    )


def _attend_by_scores(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: Optional[torch.Tensor],
    settings: _Settings,
) -> torch.Tensor:
    """Attend with capped scores or with a sink in the softmax, which is computed in float32 at least."""
    scores = (query @ key.transpose(2, 3)) * _scale_of(query, settings)
    if settings.softcap is not None:
        scores = settings.softcap * torch.tanh(scores / settings.softcap)
    if mask is not None and mask.dtype == torch.bool:
        # Not -inf: a token of padding sees no key, and NaN in its value would reach the other tokens.
        scores = scores.masked_fill(~mask, torch.finfo(scores.dtype).min)
    elif mask is not None:
        scores = scores + mask
    if settings.sinks is not None:
        sinks = settings.sinks.to(scores.dtype).view(1, -1, 1, 1)
        sinks = sinks.expand(len(scores), -1, scores.shape[2], 1)
        scores = torch.cat([scores, sinks], dim=3)
    accurate = torch.promote_types(scores.dtype, torch.float32)
    shares = torch.softmax(scores, dim=3, dtype=accurate).to(query.dtype)
    of_keys = shares[..., : key.shape[2]]
    return F.dropout(of_keys, settings.dropout) @ value


def _scale_of(query: torch.Tensor, settings: _Settings) -> float:
    return query.shape[-1] ** -0.5 if settings.scale is None else settings.scale


# ---- a row: its boundaries, and the kernel or the blocks

_CACHED_CALLS = 16  # a few functions, for layers of several kinds


class _Call(NamedTuple):
    """A call of a function, with references to its tensors."""

    function: Callable[..., Any]
    arguments: Sequence[Any]
    versions: Sequence[int]
    result: Any


_calls: List[_Call] = []  # the last first


def _for_compiler(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """Apply a decorator of torch.compiler, if this torch has it."""
    decorate = getattr(getattr(torch, "compiler", None), name, None)
    return decorate(function) if decorate else function


# Keep torch.compile out of a function that reads numbers: it would compile again for each row.
_uncompiled = functools.partial(_for_compiler, "disable")
# Let torch.compile call a function once and keep its result.
_constant = functools.partial(_for_compiler, "assume_constant_result")


@_uncompiled
def _once(function: Callable[..., Any], *arguments: Any) -> Any:
    """Return function(*arguments), computed once for all layers of a model call, which get the same tensors."""
    global _calls
    versions = [_version(argument) for argument in arguments]
    for call in _calls:
        is_same = call.function is function and call.versions == versions
        if is_same and all(map(_is_same, call.arguments, arguments)):
            return call.result
    result = function(*arguments)
    if min(versions) >= 0:
        references = [weakref.ref(each) if torch.is_tensor(each) else each for each in arguments]
        call = _Call(function, references, versions, result)
        _calls = [call, *_calls[: _CACHED_CALLS - 1]]
    return result


def _is_same(kept: Any, argument: Any) -> bool:
    """Compare a kept argument with a new one; a tensor that no longer exists equals none."""
    if torch.is_tensor(argument):
        return isinstance(kept, weakref.ref) and kept() is argument
    return bool(kept == argument)


def _version(value: Any) -> int:
    """Return a number that rises when a tensor changes in place; -1 for a tensor that does not count changes."""
    if not torch.is_tensor(value):
        return 0
    return -1 if value.is_inference() else value._version


def _starts(boundaries: torch.Tensor) -> torch.Tensor:
    """Return boundaries as [examples + 1], also if they come from `_padding_free_mask`."""
    return boundaries if boundaries.dim() == 1 else boundaries[0, 0, 0]


def _lengths(boundaries: torch.Tensor, chunk: Optional[int]) -> List[int]:
    """Return the tokens of each example, or of each chunk; tokens do not attend to other chunks."""
    if chunk is None:
        numbers = _starts(boundaries).tolist()
        return [end - begin for begin, end in zip(numbers, numbers[1:])]
    lengths: List[int] = []
    for length in _once(_lengths, boundaries, None):
        whole_chunks, rest = divmod(length, chunk)
        lengths += [chunk] * whole_chunks + [rest] * bool(rest)
    return lengths


def _blocks(boundaries: torch.Tensor, chunk: Optional[int]) -> AttentionBlocks:
    return blocks_on(_once(_lengths, boundaries, chunk), boundaries.device)


def _starts_of_chunks(boundaries: torch.Tensor, tokens: int, chunk: int) -> torch.Tensor:
    """Return the boundaries of all chunks, and of empty chunks after them, so that the number needs no sync."""
    starts = _starts(boundaries)
    tokens_of_row = torch.arange(tokens, device=starts.device)
    examples = torch.searchsorted(starts, tokens_of_row, right=True) - 1
    places = tokens_of_row - starts[examples]
    cuts = torch.where(places % chunk == 0, tokens_of_row, tokens).sort().values
    most_chunks = tokens // chunk + len(starts) - 1
    return F.pad(cuts[:most_chunks], (0, 1), value=tokens).int()


def _kernel(query: torch.Tensor, value: torch.Tensor, settings: _Settings) -> Optional[Any]:
    """Return torch's variable-length kernel if it supports this layer.  It has no dropout."""
    if query.device.type != "cuda" or query.dtype not in (torch.float16, torch.bfloat16):
        return None
    width = max(query.shape[-1], value.shape[-1])
    if settings.scored or settings.dropout or width > _MOST_KERNEL_WIDTH:
        return None
    if not _kernel_accepts("scale", "window_size"):
        return None
    return importlib.import_module(_KERNEL_MODULE).varlen_attn


@_constant
def _kernel_accepts(*options: str) -> bool:
    """Return whether torch's variable-length kernel exists and has these options, which differ between versions."""
    return _kernel_options(_KERNEL_MODULE).issuperset(options)


@functools.lru_cache(maxsize=None)
def _kernel_options(module: str) -> FrozenSet[str]:
    try:
        kernel = importlib.import_module(module).varlen_attn
    except (ImportError, AttributeError):
        return frozenset()
    return frozenset(inspect.signature(kernel).parameters)


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
    """Attend within each example of a row: query [1, N, T, A], key and value [1, K, T, A] -> [1, T, N, A].

    boundaries: int32 [examples + 1] from 0 to T, or as `_padding_free_mask` returns them.  longest: tokens of the
    longest example, if known.  chunk: tokens of the chunks into which examples are cut.
    """
    rows = [heads[0].transpose(0, 1) for heads in (query, key, value)]
    kernel = _kernel(query, value, settings)
    if kernel is None:
        return _attend_in_blocks(rows, _once(_blocks, boundaries, chunk), settings).unsqueeze(0)

    tokens = query.shape[2]
    longest = tokens if longest is None else longest
    if chunk is None:
        starts = _starts(boundaries).int()
    else:
        starts = _once(_starts_of_chunks, boundaries, tokens, chunk)
        longest = min(longest, chunk)
    return _by_kernel(kernel, rows, starts, longest, settings).unsqueeze(0)


@_uncompiled
def _attend_in_blocks(
    rows: Sequence[torch.Tensor], blocks: AttentionBlocks, settings: _Settings
) -> torch.Tensor:
    """Attend block by block: query [T, N, A], key and value [T, K, A] -> [T, N, A]."""
    return attend_in_blocks(rows, blocks, lambda q, k, v: _attend_block(q, k, v, settings))


def _by_kernel(
    kernel: Any,
    rows: Sequence[torch.Tensor],
    starts: torch.Tensor,
    longest: int,
    settings: _Settings,
) -> torch.Tensor:
    """Call the kernel: query [T, N, A], key and value [T, K, A] -> [T, N, A]; values may have another width (MLA)."""
    query, key, value = rows
    # The kernel has one width, a multiple of 8: zeros after queries, keys and values do not change the result.
    width = -(-max(query.shape[-1], value.shape[-1]) // 8) * 8
    padded = []
    for heads in rows:
        missing = width - heads.shape[-1]
        padded.append(F.pad(heads, (0, missing)) if missing else heads)
    reach = -1 if settings.window is None else settings.window - 1
    options = {}
    queries_per_key = query.shape[1] // key.shape[1]
    if queries_per_key > 1:
        if _kernel_accepts("enable_gqa"):
            options["enable_gqa"] = True
        else:  # such as that of torch 2.11
            padded[1:] = [_repeated(heads, queries_per_key) for heads in padded[1:]]
    context: torch.Tensor = kernel(
        *padded,
        starts,
        starts,
        longest,
        longest,
        scale=_scale_of(query, settings),
        window_size=(reach, 0 if settings.causal else reach),
        **options,
    )
    return context[..., : value.shape[-1]]


def _repeated(heads: torch.Tensor, times: int) -> torch.Tensor:
    """Repeat each head: [T, K, A] -> [T, K times, A]."""
    return heads.unsqueeze(2).expand(-1, -1, times, -1).flatten(1, 2)


# ---- the function for Transformers


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
    """Compute attention for Transformers: query [B, N, T, A], key and value [B, K, T, A] -> context [B, T, N, A].

    Raise ValueError for an unknown argument, and for boundaries of another row.  It returns no attention weights.
    """
    name = type(module).__name__
    use_another = 'use another implementation, such as "sdpa"'
    unknown = sorted(set(others) - _WITHOUT_EFFECT)
    unknown = [argument for argument in unknown if others[argument] is not None]
    if unknown:
        arguments = ", ".join(unknown)
        raise ValueError(
            f'{name} passes {arguments}, which attn_implementation="{NAME}" does not support; {use_another}'
        )

    carried = _is_carried(attention_mask)
    # Some models pass is_causal=False with a causal mask.  Boundaries in place of the mask are causal too.
    if is_causal is None:
        is_causal = getattr(module, "is_causal", True)
    causal = carried or bool(is_causal)
    window, chunk = _reach_of(module, sliding_window)
    # Masks of Transformers reach config.sliding_window to both sides, and its layers pass one more.
    has_both_sides = window is not None and not causal
    if has_both_sides and window == setting_of(getattr(module, "config", None), "sliding_window"):
        raise ValueError(
            f'{name} has a window on both sides, which attn_implementation="{NAME}" does not support; {use_another}'
        )
    settings = _Settings(scaling, dropout, causal, window, softcap, s_aux)
    if carried and cu_seq_lens_q is None:
        # Some versions of Transformers count chunks from the beginning of the row.
        if chunk is not None:
            raise ValueError(
                f"{name} attends in chunks; pass cu_seq_lens_q to the model, as PaddingFreeCollator does"
            )
        cu_seq_lens_q = attention_mask

    tokens = query.shape[2]
    refuse_axes(name, others.get("position_ids"), cu_seq_lens_q)
    # With boundaries, layers of two kinds have two masks, and neither matters.
    mask = attention_mask if cu_seq_lens_q is None else None
    positions = _positions_in(others, tokens)
    problem, longest = _once(_check_row, positions, mask, cu_seq_lens_q, cu_seq_lens_k, tokens)
    if problem:
        raise ValueError(
            f"{name}: {problem}; pass the inputs of padding_free.inputs_for, without an attention_mask, and "
            "use_cache=False"
        )
    if cu_seq_lens_q is None:
        return _without_boundaries(query, key, value, attention_mask, settings, chunk), None

    # Older versions of Transformers also build a mask for a row of one example, which agrees with the boundaries.
    if attention_mask is not None and not carried and cu_seq_lens_q.numel() > 2:
        raise ValueError(
            f"{name} gets boundaries of examples and an attention_mask of shape {tuple(attention_mask.shape)}; pass "
            "no attention_mask with cu_seq_lens_q, and use_cache=False"
        )
    if len(query) != 1 or tokens != key.shape[2]:
        raise ValueError(
            f"{name} gets boundaries with queries of shape {tuple(query.shape)} and keys of {tuple(key.shape)}; "
            "pass one row, without a cache"
        )
    return _attend_row(
        query, key, value, cu_seq_lens_q, settings, longest=longest, chunk=chunk
    ), None


def refuse_axes(
    name: str, positions: Any, boundaries: Any, mask: Optional[torch.Tensor] = None
) -> None:
    """Raise ValueError for positions of several axes (M-RoPE) that begin anew, from which no code derives boundaries.

    positions: [axes, B, T]; others are accepted.  mask: [B, T], 0 for padding.
    """
    if boundaries is not None or not torch.is_tensor(positions) or positions.dim() != 3:
        return
    # In an image the first axis stays and another one changes.
    falls = positions[0, :, 1:] < positions[0, :, :-1]
    restarts = falls | (positions[..., 1:] == positions[..., :-1]).all(0)
    if mask is not None and mask.dim() == 2:
        restarts = restarts & (mask[:, 1:] != 0)
    if restarts.any():
        raise ValueError(
            f"{name} gets position_ids of shape {tuple(positions.shape)} that begin anew, without boundaries of the "
            "examples; pass cu_seq_lens_q and cu_seq_lens_k"
        )


def _positions_in(arguments: Dict[str, Any], tokens: int) -> Optional[torch.Tensor]:
    """Return the positions of these queries, [B, T]: those that the layer gets, or else those of the model's call."""
    of_call = _reached(tokens)
    positions = arguments.get("position_ids")
    if not torch.is_tensor(positions) or positions.dim() != 2:
        return of_call
    return positions if 1 < positions.shape[1] == tokens else of_call


def _check_row(
    positions: Optional[torch.Tensor],
    mask: Optional[torch.Tensor],
    boundaries: Optional[torch.Tensor],
    boundaries_of_keys: Optional[torch.Tensor],
    tokens: int,
) -> Tuple[str, int]:
    """Return a contradiction among the inputs, or "", and the tokens of the longest example, with a single sync.

    positions: [B, T].
    """
    if boundaries is None:
        if positions is None or not bool(_joined(positions, mask).any()):
            return "", tokens
        return (
            "position_ids restart, but the attention_mask or the cache joins the examples",
            tokens,
        )

    starts = _starts(boundaries)
    differs = boundaries_of_keys is not None and boundaries_of_keys.shape != boundaries.shape
    if len(starts) < 2 or differs:
        problem = (
            "cu_seq_lens_q and cu_seq_lens_k must be the same boundaries of one or more examples"
        )
        return problem, tokens
    lengths = starts.diff()
    is_wrong = (starts[0] != 0) | (starts[-1] != tokens) | (lengths < 0).any()
    problems = {f"cu_seq_lens_q must rise from 0 to {tokens}, the tokens of the row": is_wrong}
    if boundaries_of_keys is not None and boundaries_of_keys is not boundaries:
        differ = (boundaries_of_keys != boundaries).any()
        problems["cu_seq_lens_k must be the same boundaries as cu_seq_lens_q"] = differ
    if positions is not None:
        restarts = positions[0, 1:] != positions[0, :-1] + 1
        apart = torch.zeros(tokens + 1, dtype=torch.bool, device=restarts.device)
        apart[starts.long().clamp(0, tokens)] = True
        differ = restarts.any() & (restarts != apart[1:-1]).any()
        problems["cu_seq_lens_q has other examples than position_ids"] = differ

    longest, *flags = torch.stack([lengths.max(), *problems.values()]).tolist()
    for problem, flag in zip(problems, flags):
        if flag:
            return problem, longest
    return "", longest


def _joined(positions: torch.Tensor, mask: Optional[torch.Tensor]) -> torch.Tensor:
    """Mark tokens that attend to the previous token, although their position does not follow it: bool [B, T - 1].

    A token of padding does not attend to itself.
    """
    restarts = restarts_of(positions)
    if mask is None:
        return restarts
    seen = mask if mask.dtype == torch.bool else mask > torch.finfo(mask.dtype).min / 4
    cached = seen.shape[3] - seen.shape[2]  # tokens in the cache
    count = restarts.shape[1]
    sees_itself = seen.diagonal(cached, 2, 3)[:, 0, -count:]
    sees_previous = seen.diagonal(cached - 1, 2, 3)[:, 0, -count:]
    return restarts & sees_itself & sees_previous


def _reach_of(
    module: torch.nn.Module, window: Optional[int]
) -> Tuple[Optional[int], Optional[int]]:
    """Return the window and the chunk of a layer, from its argument or from the configuration of its kind."""
    kind = _layer_kind(module) or ""
    if "sliding" in kind and window is None:
        window = setting_of(module.config, "sliding_window")
    chunk = None
    if "chunk" in kind:
        chunk = setting_of(module.config, "attention_chunk_size")
    return window, chunk


def layer_configs(config: Any) -> List[Any]:
    """Return the configuration of each layer if they differ; the model's then refuses to return such settings."""
    if getattr(config, "is_heterogeneous", False):
        return list(config.per_layer_config)
    return [config]


def setting_of(config: Any, name: str) -> Any:
    """Return a setting, the smallest if the layers differ; None if the configuration does not have it."""
    values = [getattr(layer, name, None) for layer in layer_configs(config)]
    return min((value for value in values if value is not None), default=None)


def _layer_kind(module: torch.nn.Module) -> Optional[str]:
    """Return the kind of a layer in the configuration, such as "sliding_attention"; None without a list of kinds."""
    kinds = getattr(getattr(module, "config", None), "layer_types", None)
    number = getattr(module, "layer_idx", None)
    if kinds is None or not isinstance(number, int) or number >= len(kinds):
        return None
    return kinds[number]


def _without_boundaries(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: Optional[torch.Tensor],
    settings: _Settings,
    chunk: Optional[int],
) -> torch.Tensor:
    """Attend in a plain batch: each row is one example, or has the mask of Transformers for "sdpa"."""
    tokens = query.shape[2]
    keys = key.shape[2]
    if mask is None and tokens == keys:
        step = chunk or tokens
        contexts = []
        for begin in range(0, tokens, step):
            piece = slice(begin, begin + step)
            contexts.append(
                _attend_block(query[:, :, piece], key[:, :, piece], value[:, :, piece], settings)
            )
        return torch.cat(contexts, dim=2).transpose(1, 2).contiguous()

    if mask is not None:
        mask = mask[..., :keys]
    else:
        if settings.causal and tokens > 1:  # the rest of the cache is not in use yet
            key = key[:, :, :tokens]
            value = value[:, :, :tokens]
        else:
            settings = settings._replace(causal=False)  # a new token attends to all cached ones
        mask = _whole_mask(query, key, settings)
    return _attend(query, key, value, mask, settings).transpose(1, 2).contiguous()


# ---- boundaries in place of a mask


def _padding_free_mask(*args: Any, **keywords: Any) -> Optional[torch.Tensor]:
    """Return boundaries in place of the mask of a row of several examples: twice, int32 [1, 1, 2, examples + 1].

    Other code cannot mistake them for a mask, because no scores have this shape.  Without padding and cache there is no
    mask: the attention applies windows itself.  Any other batch gets the mask of "sdpa".
    """
    function = keywords.get("mask_function")
    tokens = _length_of(keywords, "q")
    offset = keywords.get("q_offset", 0)
    is_whole = tokens == _length_of(keywords, "kv") and isinstance(offset, int) and not offset
    has_no_mask = function is not None and keywords.get("attention_mask") is None
    if tokens is not None and is_whole and has_no_mask:
        if keywords.get("allow_is_causal_skip") or keywords.get("allow_is_bidirectional_skip"):
            _needed()
            return None
        boundaries = None
        if keywords.get("batch_size") == 1:
            boundaries = _boundaries_of(function, tokens, keywords)
        if boundaries is not None:
            _needed()
            return boundaries.expand(1, 1, 2, -1)
    from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS

    return ALL_MASK_ATTENTION_FUNCTIONS["sdpa"](*args, **keywords)


def _boundaries_of(function: Any, tokens: int, keywords: Dict[str, Any]) -> Optional[torch.Tensor]:
    """Find the tokens that do not attend to the previous one; None if all do, or if some attend to the next one.

    function: returns True if a query attends to a key, by their places.
    """
    positions = keywords.get("cache_position")
    device = keywords.get("device") if positions is None else positions.device
    places = torch.arange(1, tokens, device=device)
    zero = torch.zeros_like(places)
    sees_previous = function(zero, zero, places, places - 1)
    sees_next = function(zero, zero, places - 1, places)
    sees_previous, sees_next = torch.stack([sees_previous, sees_next]).cpu()  # the only sync
    if sees_previous.all() or sees_next.any():
        return None
    starts = torch.nonzero(~sees_previous)[:, 0] + 1
    boundaries = F.pad(F.pad(starts, (1, 0)), (0, 1), value=tokens)
    return boundaries.int().to(places.device, non_blocking=True)


def _length_of(keywords: Dict[str, Any], which: str) -> Optional[int]:
    """Return the number of queries or keys; older versions of Transformers pass positions in a cache instead."""
    length = keywords.get(f"{which}_length")
    positions = keywords.get("cache_position")
    if length is None and which == "q" and positions is not None:
        return int(positions.shape[0])
    return length


def _is_carried(mask: Any) -> bool:
    """Return True for boundaries as `_padding_free_mask` returns them in place of a mask."""
    if not torch.is_tensor(mask) or mask.dim() != 4:
        return False
    return mask.dtype == torch.int32 and mask.shape[2] == 2


# ---- the entrance of a model


class _OpenCall:
    """A call of a model that is under way: what its attention layers must get, and whether they are called."""

    def __init__(self) -> None:
        self.positions: Optional[torch.Tensor] = None  # [B, T], of rows of several examples only
        self.needs_us = False  # to keep examples apart, or to be causal without a mask
        self.has_reached_us = False


class _OpenCalls(threading.local):
    """The calls of nested models in a thread, the outermost first."""

    def __init__(self) -> None:
        self.calls: List[_OpenCall] = []


_open = _OpenCalls()


def _watch(model: torch.nn.Module) -> None:
    """Let each call of a model compare the examples that it gets with those that its attention layers get."""
    if _enter not in model._forward_pre_hooks.values():
        model.register_forward_pre_hook(_enter, with_kwargs=True)
        model.register_forward_hook(_leave, always_call=True)


@_uncompiled
def _enter(model: Any, inputs: Any, named: Dict[str, Any]) -> None:
    call = _OpenCall()
    _open.calls.append(call)
    if getattr(model.config, "_attn_implementation", None) == NAME:
        ids = named.get("input_ids", inputs[0] if inputs else named.get("inputs_embeds"))
        call.positions = _positions_of_examples(type(model).__name__, ids, named)
        call.needs_us = call.positions is not None


@_uncompiled
def _leave(model: Any, inputs: Any, output: Any) -> None:
    call = _open.calls.pop()
    has_failed = output is None
    if call.needs_us and not call.has_reached_us and not has_failed:
        raise ValueError(
            f'{type(model).__name__} accepts attn_implementation="{NAME}", but its layers do not call it, so they mix '
            'tokens that must be kept apart; load it with attn_implementation="eager", and pass one example per row'
        )


@_uncompiled
def _needed() -> None:
    """Note that a mask is left to our attention."""
    for call in _open.calls:
        call.needs_us = True


@_uncompiled
def _reached(tokens: int) -> Optional[torch.Tensor]:
    """Note that our attention is called, and return the positions of these tokens, [B, T], if the call is packed."""
    positions = None
    for call in _open.calls:
        call.has_reached_us = True
        if call.positions is not None and call.positions.shape[1] == tokens:
            positions = call.positions
    return positions


def _positions_of_examples(name: str, ids: Any, named: Dict[str, Any]) -> Optional[torch.Tensor]:
    """Return the positions of rows of several examples, [B, T], from boundaries or restarts; None for a plain batch."""
    arguments = ("position_ids", "cu_seq_lens_q", "attention_mask")
    positions, boundaries, mask = map(named.get, arguments)
    refuse_axes(name, positions, boundaries, mask)
    if torch.is_tensor(ids) and torch.is_tensor(boundaries) and boundaries.dim() == 1:
        if len(boundaries) <= 2:
            return None
        places = torch.arange(ids.shape[1], device=boundaries.device)
        begins = torch.searchsorted(boundaries.contiguous(), places, right=True) - 1
        return (places - boundaries[begins.clamp(min=0)])[None]
    if not torch.is_tensor(positions) or positions.dim() != 2 or positions.shape[1] < 2:
        return None
    return positions if restarts_of(positions, mask).any() else None


def restarts_of(positions: torch.Tensor, mask: Optional[torch.Tensor] = None) -> torch.Tensor:
    """Mark tokens whose position does not follow that of the token before, bool [B, T - 1].

    positions: [B, T].  mask: [B, T], 0 for padding, which never restarts; masks of other shapes are ignored.
    """
    restarts = positions[:, 1:] <= positions[:, :-1]
    if torch.is_tensor(mask) and mask.shape == positions.shape:
        is_real = mask != 0
        restarts = restarts & is_real[:, 1:] & is_real[:, :-1]
    return restarts


def _register() -> bool:
    """Register the name with Transformers; return False if this version does not support it."""
    try:
        from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
    except ImportError:  # before 4.53 each model built a dense mask for any attention
        return False
    select: Any = getattr(PreTrainedModel, "_check_and_adjust_attn_implementation", None)
    if select is None or not hasattr(PreTrainedModel, "set_attn_implementation"):
        return False

    @functools.wraps(select)
    def select_and_watch(model: Any, *args: Any, **options: Any) -> Any:
        selected = select(model, *args, **options)
        if selected == NAME:
            _watch(model)
        return selected

    # Models call it when they are loaded by name and when they are switched.
    setattr(PreTrainedModel, select.__name__, select_and_watch)
    AttentionInterface.register(NAME, _padding_free_attention)
    AttentionMaskInterface.register(NAME, _padding_free_mask)
    return True


REGISTERED = _register()
