"""torch's own variable-length attention (`torch.nn.attention.varlen`) on a CPU, where it has no kernel.

The operator, its shapes for tracing and its derivative stay torch's. What is filled in is what the kernel computes,
forwards and backwards, sequence by sequence.
"""

import math

import torch


def on_cpu(varlen) -> None:
    """varlen: the module. For the rest of the process; on a CPU the operator would fail otherwise."""

    def blocks(starts, longest):
        numbers = starts.tolist()
        for first, last in zip(numbers, numbers[1:]):
            assert 0 <= last - first <= longest
            yield slice(first, last)

    def shares(query_LNA, key_LNA):
        scores_NLL = torch.einsum("qna,kna->nqk", query_LNA, key_LNA) / math.sqrt(query_LNA.shape[-1])
        return torch.softmax(scores_NLL, dim=-1), torch.logsumexp(scores_NLL, dim=-1)

    @varlen._varlen_attn.register_kernel("cpu")
    def forward(query, key, value, starts, key_starts, longest, longest_key, *rest):
        assert starts.dtype == torch.int32 and torch.equal(starts, key_starts) and longest == longest_key
        assert int(starts[0]) == 0 and int(starts[-1]) == len(query)
        context = torch.full_like(query, float("nan"))  # what no sequence covers would be seen
        sums = torch.zeros(query.shape[1], query.shape[0])
        for block in blocks(starts, longest):
            share_NLL, sums[:, block] = shares(query[block], key[block])
            context[block] = torch.einsum("nqk,kna->qna", share_NLL, value[block])
        return context, sums, torch.zeros(2, dtype=torch.uint64)

    @varlen._varlen_attn_backward.register_kernel("cpu")
    def backward(gradient, query, key, value, context, sums, starts, key_starts, longest, *rest):
        gradients = [torch.full_like(each, float("nan")) for each in (query, key, value)]
        for block in blocks(starts, longest):
            share_NLL, _ = shares(query[block], key[block])
            of_shares = torch.einsum("qna,kna->nqk", gradient[block], value[block])
            own = (gradient[block] * context[block]).sum(-1).t().unsqueeze(2)
            of_scores = share_NLL * (of_shares - own) / math.sqrt(query.shape[-1])
            gradients[0][block] = torch.einsum("nqk,kna->qna", of_scores, key[block])
            gradients[1][block] = torch.einsum("nqk,qna->kna", of_scores, query[block])
            gradients[2][block] = torch.einsum("nqk,qna->kna", share_NLL, gradient[block])
        return tuple(gradients)
