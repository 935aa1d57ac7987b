"""torch's varlen_attn on CPUs: each sequence has the attention that it has alone, and so have its gradients."""

import subprocess
import sys

import pytest
import torch

varlen = pytest.importorskip("torch.nn.attention.varlen", reason="needs torch 2.13")

import padding_free.varlen_on_cpu  # noqa: F401
from tests.refusals import refused

QUERY_HEADS, WIDTH = 4, 8
WINDOWS = [(-1, -1), (-1, 0), (0, 0), (2, 0), (3, 1), (-1, 2), (150, 0)]
ROWS = [([3, 1, 0, 5, 3, 0], None), ([1], None), ([70, 2, 300], None), ([3, 2, 0, 4], [5, 2, 3, 1]), ([2, 3], [0, 4])]


def boundaries(lengths):
    return torch.tensor([0, *torch.tensor(lengths).cumsum(0)], dtype=torch.int32)


def heads(lengths, key_lengths, key_heads, dtype=torch.float64):
    generator = torch.Generator().manual_seed(len(lengths))
    shapes = [(sum(lengths), QUERY_HEADS), (sum(key_lengths), key_heads), (sum(key_lengths), key_heads)]
    return [torch.randn(*shape, WIDTH, generator=generator, dtype=dtype).requires_grad_() for shape in shapes]


def by_definition(query, key, value, lengths, key_lengths, window, scale=None):
    """Softmax of the visible scores of each sequence alone; queries and keys are aligned at their ends."""
    groups = query.shape[1] // key.shape[1]
    contexts, sums = [], []
    for q, k, v in zip(query.split(lengths), key.split(key_lengths), value.split(key_lengths)):
        k, v = k.repeat_interleave(groups, 1), v.repeat_interleave(groups, 1)
        scores = torch.einsum("qna,kna->nqk", q, k) * (WIDTH**-0.5 if scale is None else scale)
        distance = torch.arange(len(q))[:, None] + len(k) - len(q) - torch.arange(len(k))
        before, after = (10**6 if reach < 0 else reach for reach in window)
        scores = scores.masked_fill((distance > before) | (-distance > after), float("-inf"))
        sums.append(scores.logsumexp(2))
        contexts.append(torch.einsum("nqk,kna->qna", scores.softmax(2).nan_to_num(0), v))
    return torch.cat(contexts), torch.cat(sums, 1)


@pytest.mark.parametrize("window", WINDOWS)
@pytest.mark.parametrize("key_heads", [4, 2, 1])
@pytest.mark.parametrize("lengths, key_lengths", ROWS)
def test_each_sequence_has_the_attention_and_gradients_it_has_alone(lengths, key_lengths, key_heads, window):
    key_lengths = key_lengths or lengths
    tensors = heads(lengths, key_lengths, key_heads)
    cu_q, cu_k = boundaries(lengths), boundaries(key_lengths)
    options = {
        "window_size": window,
        "enable_gqa": key_heads < 4,
        "return_aux": varlen.AuxRequest(lse=True),
        "scale": 0.3,
    }
    context, sums = varlen.varlen_attn(*tensors, cu_q, cu_k, max(lengths), max(key_lengths), **options)
    expected, expected_sums = by_definition(*tensors, lengths, key_lengths, window, 0.3)
    assert torch.allclose(context, expected, atol=1e-12) and torch.allclose(sums, expected_sums, atol=1e-12)
    weights = torch.randn(context.shape, dtype=torch.float64)
    gradients = torch.autograd.grad((context * weights).sum(), tensors)
    # The derivative of an empty softmax is NaN in the definition, and zero.
    by_hand = torch.autograd.grad((expected * weights).sum(), tensors)
    for gradient, right in zip(gradients, by_hand):
        assert torch.allclose(gradient, right.nan_to_num(0), atol=1e-12)


@pytest.mark.parametrize("window", [(-1, -1), (-1, 0), (2, 0), (1, 2)])
@pytest.mark.parametrize("lengths, key_lengths", [([2, 0, 1, 0, 0], None), ([1], None), ([0, 2, 1], [3, 4, 1])])
def test_gradcheck(lengths, key_lengths, window):
    """Empty sequences repeat a boundary, within the row, at its end and at its begin."""
    key_lengths = key_lengths or lengths
    tensors = heads(lengths, key_lengths, 2)
    cu_q, cu_k = boundaries(lengths), boundaries(key_lengths)
    longest = max(lengths), max(key_lengths)
    assert torch.autograd.gradcheck(
        lambda q, k, v: varlen.varlen_attn(q, k, v, cu_q, cu_k, *longest, window_size=window, enable_gqa=True), tensors
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_opcheck_and_strided_inputs(dtype):
    """Query, key and value are slices of one product; the operator is what torch expects of one."""
    fused = torch.randn(9, 3, QUERY_HEADS, WIDTH, dtype=dtype)
    slices = [fused[:, number].requires_grad_() for number in range(3)]
    cu = boundaries([4, 5])
    for window in ([-1, -1], [-1, 0], [2, 0]):
        arguments = (*slices, cu, cu, 5, 5, False, None, window)
        torch.library.opcheck(torch.ops.torch_attn._varlen_attn, arguments)
    copies = [part.detach().clone().requires_grad_() for part in slices]
    results = [varlen.varlen_attn(*inputs, cu, cu, 5, 5) for inputs in (slices, copies)]
    assert torch.equal(*results)
    gradients = [torch.autograd.grad(result.square().sum(), own) for result, own in zip(results, (slices, copies))]
    assert all(map(torch.equal, *gradients))
    exact, _ = by_definition(*(part.double() for part in copies), [4, 5], [4, 5], (-1, -1))
    assert torch.allclose(results[0].double(), exact, atol=1e-5 if dtype == torch.float32 else 2e-2)


@pytest.mark.parametrize(
    "change, names",
    [
        ({"cu_seq_q": [1, 5]}, ["cu_seq_q", "0"]),
        ({"cu_seq_q": [0, 4, 3, 5]}, ["cu_seq_q", "rise"]),
        ({"cu_seq_q": [0, 4]}, ["cu_seq_q", "5 tokens"]),
        ({"cu_seq_k": [0, 2, 5]}, ["cu_seq_k", "1 sequences"]),
        ({"cu_seq_q": [[0, 5]]}, ["cu_seq_q", "one dimension"]),
        ({"key": torch.zeros(5, 3, WIDTH)}, ["4", "3", "heads"]),
        ({"value": torch.zeros(5, 4, WIDTH, dtype=torch.float64)}, ["value", "torch.float64"]),
        ({"query": torch.zeros(5, 4, WIDTH, dtype=torch.int64)}, ["query", "torch.int64"]),
        ({"seqused_k": torch.ones(1, dtype=torch.int32)}, ["seqused_k"]),
    ],
)
def test_what_does_not_fit_is_refused(change, names):
    arguments = {name: torch.zeros(5, 4, WIDTH) for name in ("query", "key", "value")}
    arguments.update(cu_seq_q=[0, 5], cu_seq_k=[0, 5], max_q=5, max_k=5)
    arguments.update(change)
    for name in ("cu_seq_q", "cu_seq_k"):
        arguments[name] = torch.tensor(arguments[name], dtype=torch.int32)
    with refused(*names):
        torch.ops.torch_attn._varlen_attn(**arguments)


def test_beside_another_kernel_it_steps_aside():
    program = (
        "import torch; from torch.nn.attention import varlen\n"
        "torch.library.register_kernel(varlen._varlen_attn, 'cpu', lambda *a, **k: 'theirs')\n"
        "import padding_free.varlen_on_cpu"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == 0 and done.stderr.count("\n") == 1 and "has a kernel for CPUs already" in done.stderr
