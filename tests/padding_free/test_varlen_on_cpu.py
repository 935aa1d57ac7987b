"""torch's varlen_attn on CPUs: each sequence has the attention that it has alone, and so have its gradients."""

import pytest
import torch

varlen = pytest.importorskip("torch.nn.attention.varlen", reason="needs torch 2.13")

from padding_free import varlen_on_cpu
from tests.refusals import faults_of_refusals

QUERY_HEADS, WIDTH = 4, 8
WINDOWS = [
    (-1, -1),
    (-1, 0),
    (0, 0),
    (2, 0),
    (3, 1),
    (-1, 2),
    (150, 0),
]
ROWS = [  # tokens of queries, tokens of keys; an empty sequence repeats a boundary
    ([3, 1, 0, 5, 3, 0], [3, 1, 0, 5, 3, 0]),
    ([1], [1]),
    ([70, 2, 300], [70, 2, 300]),
    ([3, 2, 0, 4], [5, 2, 3, 1]),
    ([2, 3], [0, 4]),
]


def boundaries(lengths):
    return torch.tensor([0, *lengths]).cumsum(0).int()


def heads_of(lengths, key_lengths, key_heads):
    generator = torch.Generator().manual_seed(len(lengths))
    queries = (sum(lengths), QUERY_HEADS, WIDTH)
    keys = (sum(key_lengths), key_heads, WIDTH)
    heads = []
    for shape in (queries, keys, keys):
        head = torch.randn(*shape, generator=generator, dtype=torch.float64)
        heads.append(head.requires_grad_())
    return heads


def visible(queries, keys, window):
    """bool [queries, keys]; they are aligned at their ends."""
    before, after = (10**6 if reach < 0 else reach for reach in window)
    shift = keys - queries
    places = torch.arange(queries)[:, None] + shift
    distance = places - torch.arange(keys)
    return (distance <= before) & (-distance <= after)


def by_definition(heads, lengths, key_lengths, window, scale=WIDTH**-0.5):
    """Softmax of the visible scores of each sequence alone."""
    query, key, value = heads
    groups = query.shape[1] // key.shape[1]
    key = key.repeat_interleave(groups, 1)
    value = value.repeat_interleave(groups, 1)
    contexts = []
    sums = []
    for q, k, v in zip(
        query.split(lengths),
        key.split(key_lengths),
        value.split(key_lengths),
    ):
        scores = torch.einsum("qna,kna->nqk", q, k) * scale
        seen = visible(len(q), len(k), window)
        scores = scores.masked_fill(~seen, float("-inf"))
        shares = scores.softmax(2).nan_to_num(0)
        sums.append(scores.logsumexp(2))
        contexts.append(torch.einsum("nqk,kna->qna", shares, v))
    return torch.cat(contexts), torch.cat(sums, 1)


@pytest.mark.parametrize("window", WINDOWS)
@pytest.mark.parametrize("key_heads", [4, 2, 1])
@pytest.mark.parametrize("lengths, key_lengths", ROWS)
def test_each_sequence_has_the_attention_and_gradients_it_has_alone(lengths, key_lengths, key_heads, window):
    heads = heads_of(lengths, key_lengths, key_heads)
    ends = boundaries(lengths), boundaries(key_lengths)
    longest = max(lengths), max(key_lengths)
    options = {
        "window_size": window,
        "scale": 0.3,
        "enable_gqa": key_heads < 4,
    }
    context, sums = varlen.varlen_attn(
        *heads,
        *ends,
        *longest,
        return_aux=varlen.AuxRequest(lse=True),
        **options,
    )
    expected, expected_sums = by_definition(heads, lengths, key_lengths, window, 0.3)
    assert torch.allclose(context, expected, atol=1e-12)
    assert torch.allclose(sums, expected_sums, atol=1e-12)
    weights = torch.randn(context.shape, dtype=torch.float64)
    gradients = torch.autograd.grad((context * weights).sum(), heads)
    # The derivative of an empty softmax is NaN in the definition, and zero.
    by_hand = torch.autograd.grad((expected * weights).sum(), heads)
    for gradient, right in zip(gradients, by_hand):
        assert torch.allclose(gradient, right.nan_to_num(0), atol=1e-12)


EMPTY = [  # within the row, at its end and at its begin
    ([2, 0, 1, 0, 0], [2, 0, 1, 0, 0]),
    ([1], [1]),
    ([0, 2, 1], [3, 4, 1]),
]


@pytest.mark.parametrize("window", [(-1, -1), (-1, 0), (2, 0), (1, 2)])
@pytest.mark.parametrize("lengths, key_lengths", EMPTY)
def test_gradcheck(lengths, key_lengths, window):
    """The gradients are those of finite differences, with empty sequences."""
    ends = boundaries(lengths), boundaries(key_lengths)
    longest = max(lengths), max(key_lengths)

    def attend(query, key, value):
        return varlen.varlen_attn(
            query,
            key,
            value,
            *ends,
            *longest,
            window_size=window,
            enable_gqa=True,
        )

    assert torch.autograd.gradcheck(attend, heads_of(lengths, key_lengths, 2))


@pytest.mark.parametrize("dtype, allowed", [(torch.float32, 1e-5), (torch.bfloat16, 2e-2)])
def test_opcheck_and_strided_inputs(dtype, allowed):
    """Query, key and value are slices of one product; the operator is what torch expects of one."""
    fused = torch.randn(9, 3, QUERY_HEADS, WIDTH, dtype=dtype)
    slices = [part.requires_grad_() for part in fused.unbind(1)]
    ends = boundaries([4, 5])
    arguments = (*slices, ends, ends, 5, 5, False, None, [2, 0])
    torch.library.opcheck(torch.ops.torch_attn._varlen_attn, arguments)
    copies = [part.detach().clone().requires_grad_() for part in slices]
    results = []
    for heads in (slices, copies):
        context = varlen.varlen_attn(*heads, ends, ends, 5, 5)
        gradients = torch.autograd.grad(context.square().sum(), heads)
        results.append([context, *gradients])
    assert all(map(torch.equal, *results))
    doubled = [part.double() for part in copies]
    exact, _ = by_definition(doubled, [4, 5], [4, 5], (-1, -1))
    assert torch.allclose(context.double(), exact, atol=allowed)


def attended(**changes):
    """Call the operator on one sequence of five tokens, with changed arguments."""
    arguments = {name: torch.zeros(5, 4, WIDTH) for name in ("query", "key", "value")}
    arguments.update(cu_seq_q=[0, 5], cu_seq_k=[0, 5], max_q=5, max_k=5)
    arguments.update(changes)
    for name in ("cu_seq_q", "cu_seq_k"):
        arguments[name] = torch.tensor(arguments[name], dtype=torch.int32)
    torch.ops.torch_attn._varlen_attn(**arguments)


REFUSED = [
    ("attended(cu_seq_q=[1, 5])", ["cu_seq_q", "0"]),
    ("attended(cu_seq_q=[0, 4, 3, 5])", ["cu_seq_q", "rise"]),
    ("attended(cu_seq_q=[0, 4])", ["cu_seq_q", "5 tokens"]),
    ("attended(cu_seq_k=[0, 2, 5])", ["cu_seq_k", "1 sequences"]),
    ("attended(cu_seq_q=[[0, 5]])", ["cu_seq_q", "one dimension"]),
    ("attended(key=torch.zeros(5, 3, WIDTH))", ["4", "3", "heads"]),
    (
        "attended(value=torch.zeros(5, 4, WIDTH).double())",
        ["value", "torch.float64"],
    ),
    (
        "attended(query=torch.zeros(5, 4, WIDTH).long())",
        ["query", "torch.int64"],
    ),
    ("attended(seqused_k=torch.ones(1).int())", ["seqused_k"]),
]


def test_what_does_not_fit_is_refused():
    assert not faults_of_refusals(REFUSED, globals())


def test_beside_another_kernel_it_steps_aside_with_one_line(capsys):
    varlen_on_cpu._register()
    printed = capsys.readouterr().err
    assert "has a kernel for CPUs already" in printed and printed.count("\n") == 1
