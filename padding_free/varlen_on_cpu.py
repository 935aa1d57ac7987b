"""`torch.nn.attention.varlen` on CPUs, forward and backward, for any program; importing this module registers it.

    import padding_free.varlen_on_cpu
    from torch.nn.attention.varlen import varlen_attn

Torch itself has kernels for CUDA only. float32, bfloat16, float16 and float64; causal or not, windows, grouped-query
heads, log-sum-exp. Time and memory grow with the squared length of each sequence, with a window only with its width.

Letters: N heads, K heads of keys and values, A width of a head, T tokens, L of one sequence, n sequences.
"""

from __future__ import annotations

import sys
from functools import lru_cache
from itertools import accumulate
from typing import Iterator, List, NamedTuple, Optional, Sequence, Tuple

import torch

from pack_data.store.attention_blocks import AttentionBlocks
from padding_free.blocks import (
    WindowPiece,
    blocks_on,
    join_blocks,
    split_in_blocks,
    window_pieces,
)

try:
    from torch.nn.attention import varlen
except ImportError:
    raise ImportError(
        f"{__name__} needs torch 2.13, which has torch.nn.attention.varlen; this is torch {torch.__version__}"
    ) from None

_kernel = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_kernel_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward

_OPERATOR = "torch_attn::_varlen_attn"
_TYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)

_Three = Tuple[torch.Tensor, torch.Tensor, torch.Tensor]


class _Reach(NamedTuple):
    """Keys that a query attends to; queries and keys are aligned at their ends, as in flash attention."""

    before: Optional[int]  # keys before it; None: all
    after: Optional[int]


def _is_causal(queries: int, keys: int, reach: _Reach) -> Optional[bool]:
    """Return whether sequences are causal if they need no other mask, or else None."""
    if reach == (None, None):
        return False
    if reach == (None, 0) and queries == keys:
        return queries > 1
    return None


def _mask(piece: WindowPiece, query: torch.Tensor) -> torch.Tensor:
    """Return the mask that is added to the scores, [queries, keys]."""
    mask = torch.zeros(piece.seen.shape, dtype=query.dtype)
    return mask.masked_fill_(~piece.seen, float("-inf"))


# ---- sequences of one length: [n, N, L, A]


def _attend(
    heads: Sequence[torch.Tensor], reach: _Reach, scale: Optional[float]
) -> Tuple[torch.Tensor, torch.Tensor]:
    """Attend within sequences of one length.

    Args:
        heads: query [n, N, L, A], key and value [n, K, L', A].
        reach: keys that a query attends to.
        scale: of the scores; None: one over the root of the width.

    Returns:
        Context [n, N, L, A] and log-sum-exp [n, N, L, 1]; zeros and -inf for a query without keys.
    """
    query, key, value = heads
    queries = query.shape[2]
    keys = key.shape[2]
    is_causal = _is_causal(queries, keys, reach)
    if queries and keys and is_causal is not None:
        whole, sums_of_whole = _kernel(query, key, value, is_causal=is_causal, scale=scale)
        return whole, sums_of_whole.unsqueeze(3)

    context = torch.zeros_like(query)
    sums = query.new_full((*query.shape[:3], 1), float("-inf"), dtype=_type_of_sums(query))
    for piece in window_pieces(queries, keys, *reach):
        part, log_sum = _kernel(
            query[:, :, piece.queries],
            key[:, :, piece.keys],
            value[:, :, piece.keys],
            attn_mask=_mask(piece, query),
            scale=scale,
        )
        context[:, :, piece.queries] = part
        has_no_key = ~piece.seen.any(1)
        sums[:, :, piece.queries, 0] = log_sum.masked_fill(has_no_key, float("-inf"))
    return context, sums


def _gradients(
    grad: torch.Tensor,
    heads: Sequence[torch.Tensor],
    context: torch.Tensor,
    sums: torch.Tensor,
    reach: _Reach,
    scale: Optional[float],
) -> _Three:
    """Return the gradients of query, key and value of sequences of one length, as `_attend` takes them."""
    query, key, value = heads
    queries = query.shape[2]
    keys = key.shape[2]
    is_causal = _is_causal(queries, keys, reach)
    if queries and keys and is_causal is not None:
        return _kernel_backward(
            grad, query, key, value, context, sums[..., 0], 0.0, is_causal, scale=scale
        )

    # A query without keys has no shares: any finite number keeps it from becoming NaN.
    finite_sums = sums.masked_fill(sums == float("-inf"), 0)[..., 0]
    grads = (torch.zeros_like(query), torch.zeros_like(key), torch.zeros_like(value))
    for piece in window_pieces(queries, keys, *reach):
        parts = _kernel_backward(
            grad[:, :, piece.queries],
            query[:, :, piece.queries],
            key[:, :, piece.keys],
            value[:, :, piece.keys],
            context[:, :, piece.queries],
            finite_sums[:, :, piece.queries],
            0.0,
            False,
            attn_mask=_mask(piece, query),
            scale=scale,
        )
        for whole, part, place in zip(grads, parts, (piece.queries, piece.keys, piece.keys)):
            whole[:, :, place] += part
    return grads


def _type_of_sums(query: torch.Tensor) -> torch.dtype:
    return torch.promote_types(query.dtype, torch.float32)


# ---- rows


def _checked_lengths(name: str, boundaries: torch.Tensor, tokens: int) -> List[int]:
    """Return the tokens of each sequence. Raise ValueError unless the boundaries rise from 0 to the tokens."""
    if boundaries.dim() != 1 or not len(boundaries):
        raise ValueError(
            f"{name} has the shape {tuple(boundaries.shape)}; pass one dimension, [sequences + 1]"
        )
    numbers = boundaries.tolist()
    if numbers[0] != 0 or numbers[-1] != tokens or numbers != sorted(numbers):
        raise ValueError(
            f"{name} must rise from 0 to the {tokens} tokens; it is {numbers[:3]} ... {numbers[-1]}"
        )
    return [end - begin for begin, end in zip(numbers, numbers[1:])]


@lru_cache(maxsize=16)
def _blocks(lengths: Tuple[int, ...]) -> AttentionBlocks:
    """Group sequences, once for all layers of a model and their gradients."""
    return blocks_on(lengths)


class _Sequences:
    """The sequences of a row, of queries and of keys."""

    def __init__(
        self,
        heads: Sequence[torch.Tensor],
        cu_seq_q: torch.Tensor,
        cu_seq_k: Optional[torch.Tensor],
    ) -> None:
        query, key, value = heads
        for name, head in zip(("query", "key", "value"), heads):
            if head.dim() != 3 or head.dtype not in _TYPES or head.dtype != query.dtype:
                raise ValueError(
                    f"{name} is {head.dtype} of the shape {tuple(head.shape)}; pass [tokens, heads, width] of one "
                    "floating-point type"
                )
        if key.shape[:2] != value.shape[:2] or query.shape[1] % key.shape[1]:
            raise ValueError(
                f"query, key and value have {query.shape[1]}, {key.shape[1]} and {value.shape[1]} heads for "
                f"{len(key)} keys and {len(value)} values; keys and values must agree and divide the heads of the query"
            )
        self._query_lengths = _checked_lengths("cu_seq_q", cu_seq_q, len(query))
        self._key_lengths = self._query_lengths
        if cu_seq_k is not None and cu_seq_k is not cu_seq_q:
            self._key_lengths = _checked_lengths("cu_seq_k", cu_seq_k, len(key))
        if len(self._key_lengths) != len(self._query_lengths) or sum(self._key_lengths) != len(key):
            raise ValueError(
                f"cu_seq_q has {len(self._query_lengths)} sequences and cu_seq_k {len(self._key_lengths)} for "
                f"{len(key)} keys; each sequence of queries needs one of keys"
            )
        self._blocks: Optional[AttentionBlocks] = None
        if self._key_lengths == self._query_lengths:
            self._blocks = _blocks(tuple(self._query_lengths))

    def split(
        self, queries: Sequence[torch.Tensor], keys: Sequence[torch.Tensor]
    ) -> Iterator[List[torch.Tensor]]:
        """Yield the tensors of each group of sequences, [n, N, L, A]."""
        if self._blocks is not None:
            yield from split_in_blocks([*queries, *keys], self._blocks)
            return
        ends = zip(accumulate(self._query_lengths), accumulate(self._key_lengths))
        for (last_query, last_key), length, count in zip(
            ends, self._query_lengths, self._key_lengths
        ):
            of_queries = [head[last_query - length : last_query] for head in queries]
            of_keys = [head[last_key - count : last_key] for head in keys]
            yield [head.transpose(0, 1).unsqueeze(0) for head in of_queries + of_keys]

    def join(self, pieces: Sequence[torch.Tensor], like: torch.Tensor) -> torch.Tensor:
        """Return results of all groups as [T, N, A]."""
        if not pieces:
            return torch.zeros_like(like)
        blocks = self._blocks or AttentionBlocks((), None, None)
        return join_blocks(pieces, blocks)


def _reach(is_causal: bool, window_size: Optional[Sequence[int]]) -> _Reach:
    before, after = window_size or (-1, -1)
    if is_causal:
        after = 0
    return _Reach(None if before < 0 else before, None if after < 0 else after)


def _forward(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    cu_seq_q: torch.Tensor,
    cu_seq_k: Optional[torch.Tensor],
    max_q: int,
    max_k: int,
    is_causal: bool = False,
    scale: Optional[float] = None,
    window_size: Optional[List[int]] = None,
    enable_gqa: bool = False,
    seqused_k: Optional[torch.Tensor] = None,
    block_table: Optional[torch.Tensor] = None,
    num_splits: Optional[int] = None,
) -> _Three:
    """Compute the operator: context [T, N, A], log-sum-exp [N, T], and the state of the random generator, unused."""
    if seqused_k is not None or block_table is not None:
        raise ValueError(
            "seqused_k and block_table, which are for caches, are not supported on CPUs; omit them"
        )
    row = _Sequences((query, key, value), cu_seq_q, cu_seq_k)
    reach = _reach(is_causal, window_size)
    contexts = []
    sums = []
    for heads in row.split([query], [key, value]):
        context, log_sum = _attend(heads, reach, scale)
        contexts.append(context)
        sums.append(log_sum)
    log_sums = row.join(sums, query[..., :1].to(_type_of_sums(query)))[..., 0].t().contiguous()
    return row.join(contexts, query), log_sums, torch.zeros(2, dtype=torch.uint64)


def _backward(
    grad_out: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    cu_seq_q: torch.Tensor,
    cu_seq_k: torch.Tensor,
    max_q: int,
    max_k: int,
    is_causal: bool,
    rng_state: torch.Tensor,
    scale: Optional[float] = None,
    window_size: Optional[List[int]] = None,
) -> _Three:
    """Compute the gradients of query, key and value."""
    row = _Sequences((query, key, value), cu_seq_q, cu_seq_k)
    reach = _reach(is_causal, window_size)
    grads = []
    sums = lse.t().unsqueeze(2)
    for grad, context, log_sum, *heads in row.split([grad_out, out, sums, query], [key, value]):
        grads.append(_gradients(grad, heads, context, log_sum, reach, scale))
    by_head = list(zip(*grads)) or [(), (), ()]
    joined = [row.join(pieces, head) for pieces, head in zip(by_head, (query, key, value))]
    return joined[0], joined[1], joined[2]


def _register() -> None:
    """Register the kernels, unless this torch or another package has one."""
    if torch._C._dispatch_has_kernel_for_dispatch_key(_OPERATOR, "CPU"):
        print(
            f"note: {_OPERATOR} has a kernel for CPUs already; {__name__} registers none",
            file=sys.stderr,
        )
        return
    torch.library.register_kernel(varlen._varlen_attn, "cpu", _forward)
    torch.library.register_kernel(varlen._varlen_attn_backward, "cpu", _backward)


_register()
