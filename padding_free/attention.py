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
from typing import (
    Any,
    Callable,
    Dict,
    FrozenSet,
    List,
    NamedTuple,
    Optional,
    Sequence,
    Tuple,
)

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


def _lengths(boundaries: torch.Tensor, chunk: Optional[int]) -> List[int]:
    """Return the tokens of each example, or of each chunk; tokens do not attend to other chunks."""
    if chunk is None:
        numbers = boundaries.tolist()
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
    tokens_of_row = torch.arange(tokens, device=boundaries.device)
    examples = torch.searchsorted(boundaries, tokens_of_row, right=True) - 1
    places = tokens_of_row - boundaries[examples]
    cuts = torch.where(places % chunk == 0, tokens_of_row, tokens).sort().values
    most_chunks = tokens // chunk + len(boundaries) - 1
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

    boundaries: int32 [examples + 1] from 0 to T.  longest: tokens of the longest example, if known.  chunk: tokens of
    the chunks into which examples are cut.
    """
    rows = [heads[0].transpose(0, 1) for heads in (query, key, value)]
    kernel = _kernel(query, value, settings)
    if kernel is None:
        return _attend_in_blocks(rows, _once(_blocks, boundaries, chunk), settings).unsqueeze(0)

    tokens = query.shape[2]
    longest = tokens if longest is None else longest
    if chunk is None:
        starts = boundaries.int()
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

    rows, _, tokens, _ = query.shape
    is_causal_mask = False
    if attention_mask is not None and attention_mask.dtype == torch.int32:
        is_causal_mask = attention_mask.shape[2] == 2
        if cu_seq_lens_q is None and not _open.calls:
            # A checkpoint calls the layer again, without the model.
            cu_seq_lens_q = attention_mask[0, 0, 0]
        attention_mask = None
    boundaries, longest = _boundaries_for(
        name, (rows, tokens), cu_seq_lens_q, cu_seq_lens_k, others.get("position_ids")
    )
    # Some models pass is_causal=False with a causal mask.
    if is_causal is None:
        is_causal = getattr(module, "is_causal", True)
    causal = is_causal_mask or bool(is_causal)
    window, chunk = _reach_of(module, sliding_window)
    # Masks of Transformers reach config.sliding_window to both sides, and its layers pass one more.
    has_both_sides = window is not None and not causal
    if has_both_sides and window == setting_of(getattr(module, "config", None), "sliding_window"):
        raise ValueError(
            f'{name} has a window on both sides, which attn_implementation="{NAME}" does not support; {use_another}'
        )
    settings = _Settings(scaling, dropout, causal, window, softcap, s_aux)
    if boundaries is None:
        return _without_boundaries(query, key, value, attention_mask, settings, chunk), None

    # Older versions of Transformers also build a mask for a row of one example, which agrees with the boundaries.
    if attention_mask is not None and boundaries.numel() > 2:
        raise ValueError(
            f"{name} gets boundaries of examples and an attention_mask of shape {tuple(attention_mask.shape)}; pass "
            "no attention_mask with cu_seq_lens_q, and use_cache=False"
        )
    if rows != 1 or tokens != key.shape[2]:
        raise ValueError(
            f"{name} gets boundaries with queries of shape {tuple(query.shape)} and keys of {tuple(key.shape)}; "
            "pass one row, without a cache"
        )
    return _attend_row(query, key, value, boundaries, settings, longest=longest, chunk=chunk), None


def _boundaries_for(
    name: str,
    shape: Tuple[int, int],
    stated: Optional[torch.Tensor],
    stated_of_keys: Optional[torch.Tensor],
    positions: Optional[torch.Tensor],
) -> Tuple[Optional[torch.Tensor], Optional[int]]:
    """Return the boundaries that a layer obeys, and the tokens of the longest example: of its model's call, or its own.

    Raise ValueError if they contradict each other or the positions.
    """
    call = _reached(shape)
    tokens = shape[0] * shape[1]
    if call is None:
        problem, longest = _once(_check_row, positions, stated, stated_of_keys, tokens)
    else:
        problem, longest = "", call.longest
        for other in (stated, stated_of_keys):
            is_same = other is None or other is call.boundaries
            if not is_same and not _once(_is_equal, other, call.boundaries):
                problem = "cu_seq_lens_q and cu_seq_lens_k differ from those of the model"
    if problem:
        raise ValueError(f"{name}: {problem}; {_WAY_OUT}")
    return (stated if call is None else call.boundaries), longest


_WAY_OUT = (
    "pass the inputs of padding_free.inputs_for, without an attention_mask, and use_cache=False"
)


def _is_equal(boundaries: torch.Tensor, others: torch.Tensor) -> bool:
    return boundaries.shape == others.shape and bool((boundaries == others).all())


def _check_row(
    positions: Optional[torch.Tensor],
    boundaries: Optional[torch.Tensor],
    boundaries_of_keys: Optional[torch.Tensor],
    tokens: int,
) -> Tuple[str, int]:
    """Return a contradiction among the inputs, or "", and the tokens of the longest example, with a single sync.

    positions: [B, T] or [axes, B, T].
    """
    if positions is not None and not positions.shape[-1] == tokens > 1:
        positions = None
    if boundaries is None:
        if positions is None or not bool(_restarts_of(positions).any()):
            return "", tokens
        return "position_ids restart, but the layer gets no boundaries", tokens

    differs = boundaries_of_keys is not None and boundaries_of_keys.shape != boundaries.shape
    if boundaries.dim() != 1 or len(boundaries) < 2 or differs:
        problem = (
            "cu_seq_lens_q and cu_seq_lens_k must be the same boundaries of one or more examples"
        )
        return problem, tokens
    lengths = boundaries.diff()
    is_wrong = (boundaries[0] != 0) | (boundaries[-1] != tokens) | (lengths < 0).any()
    problems = {f"cu_seq_lens_q must rise from 0 to {tokens}, the tokens of the row": is_wrong}
    if boundaries_of_keys is not None and boundaries_of_keys is not boundaries:
        differ = (boundaries_of_keys != boundaries).any()
        problems["cu_seq_lens_k must be the same boundaries as cu_seq_lens_q"] = differ
    if positions is not None and positions.dim() == 2:
        restarts = positions[0, 1:] != positions[0, :-1] + 1
        apart = torch.zeros(tokens + 1, dtype=torch.bool, device=restarts.device)
        apart[boundaries.long().clamp(0, tokens)] = True
        differ = restarts.any() & (restarts != apart[1:-1]).any()
        problems["cu_seq_lens_q has other examples than position_ids"] = differ

    longest, *flags = torch.stack([lengths.max(), *problems.values()]).tolist()
    for problem, flag in zip(problems, flags):
        if flag:
            return problem, longest
    return "", longest


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
    """Return the boundaries of rows of several examples in place of their mask: int32 [1, 1, 1, examples + 1].

    They are there twice for a causal mask.  Other code cannot mistake them for a mask, because no scores have this
    shape.  Without padding and cache there is no mask: the attention applies windows itself.  Any other batch gets the
    mask of "sdpa".
    """
    _needed()
    function = keywords.get("mask_function")
    tokens = _length_of(keywords, "q")
    offset = keywords.get("q_offset", 0)
    is_whole = tokens == _length_of(keywords, "kv") and isinstance(offset, int) and not offset
    has_no_mask = function is not None and keywords.get("attention_mask") is None
    if tokens is not None and is_whole and has_no_mask:
        call = _packed_call((keywords.get("batch_size", 1), tokens))
        if call is not None and call.boundaries is not None:
            first, second = torch.arange(2, device=call.boundaries.device).split(1)
            sees_next: Any = function
            is_causal = not sees_next(0 * first, 0 * first, first, second)
            return call.boundaries.expand(1, 1, 1 + is_causal, -1)
        if keywords.get("allow_is_causal_skip") or keywords.get("allow_is_bidirectional_skip"):
            return None
    from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS

    return ALL_MASK_ATTENTION_FUNCTIONS["sdpa"](*args, **keywords)


def _length_of(keywords: Dict[str, Any], which: str) -> Optional[int]:
    """Return the number of queries or keys; older versions of Transformers pass positions in a cache instead."""
    length = keywords.get(f"{which}_length")
    positions = keywords.get("cache_position")
    if length is None and which == "q" and positions is not None:
        return int(positions.shape[0])
    return length


# ---- the entrance of a model

_OF_ROWS = ("cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k", "seq_idx")
# Attributes of a model, which neither its configuration nor its weights have.
CHOICE = "_padding_free_choice"  # of `use_padding_free`
_TRIED = "_padding_free_tried"
_WATCHED = "_padding_free_watched"
# Largest differences that rounding may cause, in full and in half precision: with other tokens in front, and alone.
_LARGEST_CHANGES = (2e-5, 3e-2)
_LARGEST_DIFFERENCES = (1e-3, 0.15)


class _OpenCall:
    """A call of a model that is under way: what its attention layers must get, and whether they are called."""

    def __init__(self) -> None:
        self.shape: Optional[Tuple[int, int]] = None  # rows and tokens; None: not of text
        # Of all rows, laid end to end: int32 [examples + 1]; None: each row is one example.
        self.boundaries: Optional[torch.Tensor] = None
        self.longest: Optional[int] = None  # tokens of the longest example
        self.needs_us = False  # to keep examples apart, or to be causal without a mask
        self.has_reached_us = False


class _OpenCalls(threading.local):
    """The calls of nested models in a thread, the outermost first."""

    def __init__(self) -> None:
        self.calls: List[_OpenCall] = []


_open = _OpenCalls()


def watch(model: torch.nn.Module, attention: str = NAME) -> None:
    """Let each call of a model with this attention turn its positions into boundaries, and check that layers get them.

    Args:
        model: A model of Transformers.
        attention: The implementation that keeps its examples apart.
    """
    vars(model)[_WATCHED] = attention
    if _enter not in model._forward_pre_hooks.values():
        model.register_forward_pre_hook(_enter, with_kwargs=True)
        model.register_forward_hook(_leave, always_call=True)


@_uncompiled
def _enter(model: Any, inputs: Any, named: Dict[str, Any]) -> Any:
    call = _OpenCall()
    _open.calls.append(call)
    attention = getattr(model.config, "_attn_implementation", None)
    if attention != vars(model)[_WATCHED]:
        return None
    parameters = list(inspect.signature(model.forward).parameters.values())
    names = [each.name for each in parameters if each.kind is each.POSITIONAL_OR_KEYWORD]
    rest = inputs[len(names) :]
    named = {**dict(zip(names, inputs)), **named}
    ids = named.get("input_ids", rest[0] if rest else named.get("inputs_embeds"))
    if not torch.is_tensor(ids) or ids.dim() < 2:
        return None
    call.shape = (ids.shape[0], ids.shape[1])
    _make_explicit(type(model).__name__, named, call)
    if call.boundaries is not None and attention == NAME:
        call.needs_us = True
        accepts_all = any(each.kind is each.VAR_KEYWORD for each in parameters)
        for name in ("use_cache", "cu_seq_lens_q", "cu_seq_lens_k"):
            if named.get(name) is None and (accepts_all or name in names):
                named[name] = False if name == "use_cache" else call.boundaries
        _try_once(model, ids, named, call.boundaries)
        call.has_reached_us = False
    return rest, named


@_uncompiled
def _leave(model: Any, inputs: Any, output: Any) -> None:
    call = _open.calls.pop()
    has_failed = output is None
    if call.needs_us and not call.has_reached_us and not has_failed:
        raise ValueError(
            f'{type(model).__name__} accepts attn_implementation="{NAME}", but its layers do not call it, so they mix '
            'tokens that must be kept apart; load it with attn_implementation="eager", and pass one example per row'
        )


def _make_explicit(name: str, named: Dict[str, Any], call: _OpenCall) -> None:
    """Find the boundaries of rows of several examples, stated or by their positions; remove their mask of ones.

    With a mask the library looks for no boundaries, and some models pass only the mask to their layers.
    """
    arguments = ("position_ids", "cu_seq_lens_q", "attention_mask")
    positions, stated, mask = map(named.get, arguments)
    assert call.shape is not None
    tokens = call.shape[0] * call.shape[1]
    boundaries = stated
    if torch.is_tensor(stated):
        keys = named.get("cu_seq_lens_k")
        problem, call.longest = _check_row(positions, stated, keys, tokens)
    else:
        boundaries = _boundaries_of(positions, mask, call.shape)
        problem = ""
        if boundaries is not None and call.shape[0] > 1:
            problem = "position_ids restart in a batch of several rows"
        elif boundaries is not None and (named.get("use_cache") or named.get("past_key_values")):
            problem = "position_ids restart, but the cache joins the examples"
    if problem:
        raise ValueError(f"{name}: {problem}; {_WAY_OUT}")
    if boundaries is None:
        return
    if torch.is_tensor(mask) and mask.dim() == 2:
        if not mask.all():
            raise ValueError(
                f"{name} gets a row of several examples and an attention_mask of shape {tuple(mask.shape)} with zeros; "
                "pass no attention_mask, and padding as an example of its own"
            )
        named["attention_mask"] = None
    if len(boundaries) > 2:
        call.boundaries = boundaries


def _boundaries_of(
    positions: Any, mask: Optional[torch.Tensor], shape: Tuple[int, int]
) -> Optional[torch.Tensor]:
    """Return the boundaries of all rows, laid end to end, int32 [examples + 1], if the positions of one restart.

    positions: [B, T] or [axes, B, T].  mask: [B, T], 0 for padding, which never restarts.
    """
    if (
        not torch.is_tensor(positions)
        or positions.shape[-1] != shape[1]
        or positions.dim() not in (2, 3)
    ):
        return None
    restarts = _restarts_of(positions, mask).expand(shape[0], -1)
    begins = F.pad(restarts, (1, 0), value=True).flatten()
    starts = begins.nonzero()[:, 0]
    if len(starts) == shape[0]:
        return None
    return F.pad(starts, (0, 1), value=begins.numel()).int()


def _try_once(
    model: Any, ids: torch.Tensor, named: Dict[str, Any], boundaries: torch.Tensor
) -> None:
    """Raise ValueError if an example changes the next one, as convolutions and recurrent layers let it.

    The first call of a model with several examples is repeated with other tokens in one, and with the next one alone.
    """
    is_sharded = any(hasattr(weight, "placements") for weight in model.parameters())
    is_known = CHOICE in vars(model) or _TRIED in vars(model)
    ends = sorted(set(boundaries.tolist()))[1:]
    if len(_open.calls) > 1 or is_known or is_sharded or len(ends) < 2:
        return
    # Without the output layer, which works on each token by itself and may be taken out.
    body = getattr(model, "base_model", model)
    accepted = {*inspect.signature(body.forward).parameters, *_OF_ROWS}
    shared = {name: value for name, value in named.items() if name in accepted}
    kind = "inputs_embeds" if ids.is_floating_point() else "input_ids"
    example = slice(*ends[:2])
    alone = {kind: ids[:, example]}
    positions = named.get("position_ids")
    if positions is not None and positions.dim() == 3:  # of images too
        alone["position_ids"] = positions[..., example]
    refusal = ValueError(
        f'{type(model).__name__} accepts attn_implementation="{NAME}", but its convolutions, positions or other layers '
        "do not keep examples apart; call use_padding_free(model) or pass one example per row"
    )
    vars(model)[_TRIED] = True
    modes = {module: module.training for module in model.modules()}
    try:
        with torch.no_grad():
            body.eval()
            in_row = body(**{**shared, kind: ids})[0][:, example].double()
            changed = _with_other_tokens(ids, ends[0])
            behind_others = body(**{**shared, kind: changed})[0][:, example]
            by_itself = body(**alone, use_cache=False)[0]
    except RuntimeError:  # such as boundaries in place of a mask, of another shape than scores
        del vars(model)[_TRIED]
        raise refusal from None
    finally:
        for module, is_training in modes.items():
            module.training = is_training
    is_half = torch.finfo(by_itself.dtype).bits < 32
    largest = in_row.abs().max()
    for other, limits in ((behind_others, _LARGEST_CHANGES), (by_itself, _LARGEST_DIFFERENCES)):
        if not (other - in_row).abs().max() <= limits[is_half] * largest:
            del vars(model)[_TRIED]
            raise refusal


def _with_other_tokens(ids: torch.Tensor, number: int) -> torch.Tensor:
    """Change the first tokens of a row of token ids or embeddings."""
    changed = ids.detach().clone()
    begin = changed[:, :number]
    if ids.is_floating_point():
        changed[:, :number] = -begin
    else:
        changed[:, :number] = torch.where(begin > 1, begin - 1, begin + 1)
    return changed


def first_position(model: torch.nn.Module) -> int:
    """Return the position of the first token of an example: padding_idx + 1 in RoBERTa's family, else 0."""
    for module in model.modules():
        padding = getattr(getattr(module, "position_embeddings", None), "padding_idx", None)
        if padding is not None:
            return int(padding) + 1
    return 0


def _first_values(output: Any) -> torch.Tensor:
    """Return the logits or the hidden states of a call, [1, tokens, width]."""
    values = output if torch.is_tensor(output) else output[0]
    assert torch.is_tensor(values)
    return values


@_uncompiled
def _needed() -> None:
    """Note that a mask is left to our attention."""
    for call in _open.calls:
        call.needs_us = True


@_uncompiled
def _reached(shape: Tuple[int, int]) -> Optional[_OpenCall]:
    """Note that our attention is called; return the packed call that these rows and tokens are of, or None."""
    for call in _open.calls:
        call.has_reached_us = True
    return _packed_call(shape)


def _packed_call(shape: Tuple[int, int]) -> Optional[_OpenCall]:
    """Return the innermost call with rows of several examples of this shape; an image is not of a call around it."""
    for call in reversed(_open.calls):
        if call.shape is None:
            return None
        if call.shape == shape and call.boundaries is not None:
            return call
    return None


def _restarts_of(positions: torch.Tensor, mask: Optional[torch.Tensor] = None) -> torch.Tensor:
    """Mark tokens whose position does not follow that of the token before, bool [B, T - 1].

    positions: [B, T], or [axes, B, T], of which the first axis stays and another one changes inside an image.  mask:
    [B, T], 0 for padding, which never restarts; masks of other shapes are ignored.
    """
    before, after = positions[..., :-1], positions[..., 1:]
    restarts = after <= before
    if positions.dim() == 3:
        restarts = (after[0] < before[0]) | (after == before).all(0)
    if torch.is_tensor(mask) and mask.shape == positions.shape[-2:]:
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
            watch(model)
        return selected

    # Models call it when they are loaded by name and when they are switched.
    setattr(PreTrainedModel, select.__name__, select_and_watch)
    AttentionInterface.register(NAME, _padding_free_attention)
    AttentionMaskInterface.register(NAME, _padding_free_mask)
    return True


REGISTERED = _register()
