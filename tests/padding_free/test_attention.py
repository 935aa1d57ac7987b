"""Our attention: each example of a row by itself, whatever the layer asks for, equal to the formula; else refused."""

import contextlib
import sys
from functools import partial
from types import ModuleType, SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

pytest.importorskip("transformers", minversion="4.57", reason="for models of Transformers 4.57 and newer")

from padding_free import attention, use_padding_free
from padding_free.attention import _attend_row, _padding_free_attention, _Settings  # noqa: E402
from padding_free.collators import PaddingFreeCollator  # noqa: E402
from tests.padding_free_models import a_windowed_model, some_examples  # noqa: E402

HEADS, WIDTH = 4, 8


def heads_of(tokens, key_heads=HEADS, seed=0, values=WIDTH):
    draw = torch.Generator().manual_seed(seed)
    sizes = ((HEADS, WIDTH), (key_heads, WIDTH), (key_heads, values))
    return [torch.randn(1, heads, tokens, width, generator=draw, dtype=torch.float64) for heads, width in sizes]


def boundaries_of(lengths):
    return torch.tensor([0, *lengths]).cumsum(0).int()


def by_the_formula(query, key, value, lengths, wanted, chunk=None):
    """The softmax over a dense mask of the whole row."""
    tokens = query.shape[2]
    number = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))
    place = torch.cat([torch.arange(length) for length in lengths])
    seen = number[:, None] == number
    behind = place[:, None] - place
    seen &= behind >= 0 if wanted.causal else behind < tokens
    if wanted.window is not None:
        seen &= behind.abs() < wanted.window
    if chunk is not None:
        seen &= (place // chunk)[:, None] == place // chunk
    key, value = (each.repeat_interleave(HEADS // each.shape[1], dim=1) for each in (key, value))
    scores = query @ key.transpose(2, 3) * (WIDTH**-0.5 if wanted.scale is None else wanted.scale)
    if wanted.softcap is not None:
        scores = wanted.softcap * torch.tanh(scores / wanted.softcap)
    scores = scores.masked_fill(~seen, -torch.inf)
    if wanted.sinks is not None:
        scores = torch.cat([scores, wanted.sinks.view(1, -1, 1, 1).expand(1, -1, tokens, 1)], dim=3)
    return (torch.softmax(scores, dim=3)[..., :tokens] @ value).transpose(1, 2)


SINKS = torch.linspace(-1, 2, HEADS, dtype=torch.float64)
LAYERS = {
    "plain": (_Settings(), {}),
    "scale": (_Settings(scale=0.7), {}),
    "both ways": (_Settings(causal=False), {}),
    "window": (_Settings(window=3), {}),
    "window on both sides": (_Settings(causal=False, window=3), {}),
    "soft cap": (_Settings(softcap=0.5), {}),
    "sinks": (_Settings(sinks=SINKS), {}),
    "window, soft cap and sinks": (_Settings(window=2, softcap=1.5, sinks=SINKS), {}),
    "chunk": (_Settings(), {"chunk": 4}),
}


@pytest.mark.parametrize("layer", LAYERS)
@pytest.mark.parametrize("key_heads", [HEADS, 2, 1])
@settings(max_examples=8)
@given(lengths=st.lists(st.integers(1, 9), min_size=1, max_size=9), seed=st.integers(0, 99))
def test_each_example_by_itself(layer, key_heads, lengths, seed):
    wanted, more = LAYERS[layer]
    heads = heads_of(sum(lengths), key_heads, seed)
    found = _attend_row(*heads, boundaries_of(lengths), wanted, **more)
    assert torch.allclose(found, by_the_formula(*heads, lengths, wanted, **more), rtol=0, atol=1e-12)


@pytest.mark.parametrize("layer", ["plain", "window, soft cap and sinks", "chunk"])
def test_gradients_are_those_of_the_formula(layer):
    wanted, more = LAYERS[layer]
    lengths = [5, 2, 2, 9, 1, 5]
    weights = torch.arange(24, dtype=torch.float64)[:, None, None]
    gradients = []
    for call in (
        lambda *heads: _attend_row(*heads, boundaries_of(lengths), wanted, **more),
        lambda *heads: by_the_formula(*heads, lengths, wanted, **more),
    ):
        heads = [each.requires_grad_() for each in heads_of(24, 2)]
        gradients.append(torch.autograd.grad((call(*heads) * weights).square().sum(), heads))
    for one, other in zip(*gradients):
        assert torch.allclose(one, other, rtol=1e-10, atol=1e-10 * float(other.abs().max()))


@pytest.mark.parametrize("window", [None, 100, 128, 200])
@pytest.mark.parametrize("causal", [True, False])
def test_long_examples_are_cut_into_pieces_of_a_window(window, causal):
    lengths, wanted = [300, 7, 129, 300], _Settings(causal=causal, window=window)
    heads = heads_of(sum(lengths), 2)
    expected = by_the_formula(*heads, lengths, wanted)
    assert torch.allclose(_attend_row(*heads, boundaries_of(lengths), wanted), expected, rtol=0, atol=1e-12)


def test_dropout_is_applied_within_each_example():
    """Its mean over draws is the context without it."""
    lengths, heads = [6, 3, 6], heads_of(15)
    torch.manual_seed(0)
    for wanted in (_Settings(dropout=0.4), _Settings(dropout=0.4, softcap=2.0)):
        draws = torch.stack([_attend_row(*heads, boundaries_of(lengths), wanted) for _ in range(600)])
        expected = _attend_row(*heads, boundaries_of(lengths), wanted._replace(dropout=0.0))
        assert float((draws.mean(0) - expected).abs().max()) < 0.3 and float(draws.std(0).mean()) > 0.1


LAYER = SimpleNamespace(is_causal=True)


def test_boundaries_that_change_in_place_are_read_again():
    heads, boundaries = heads_of(10), boundaries_of([3, 7])
    for lengths in ([3, 7], [6, 4]):
        boundaries.copy_(boundaries_of(lengths))
        found, _ = _padding_free_attention(LAYER, *heads, cu_seq_lens_q=boundaries)
        assert torch.allclose(found, by_the_formula(*heads, lengths, _Settings()), rtol=0, atol=1e-12)


_numbers = torch.Tensor.tolist  # not counted below


class Kernel:
    """Computes by its arguments, as torch.nn.attention.varlen.varlen_attn says, and keeps them."""

    def __init__(self):
        self.calls = []

    def __call__(
        self, query, key, value, starts, of_keys, most, most_keys, *, scale, window_size=(-1, -1), enable_gqa=False
    ):
        self.calls.append((starts, most, window_size))
        assert starts is of_keys and starts.dtype == torch.int32 and starts.is_contiguous() and most == most_keys
        assert query.shape[-1] == key.shape[-1] == value.shape[-1] and query.shape[-1] % 8 == 0
        assert enable_gqa or query.shape[1] == key.shape[1]
        numbers, (left, right) = _numbers(starts), window_size
        assert numbers[0] == 0 and numbers[-1] == len(query) and numbers == sorted(numbers)
        contexts = []
        for begin, end in zip(numbers, numbers[1:]):
            assert end - begin <= most
            place = torch.arange(end - begin)
            behind = place[:, None] - place
            seen = (behind <= left if left >= 0 else behind < len(place)) & (-behind <= right if right >= 0 else True)
            keys, values = (
                each[begin:end].repeat_interleave(query.shape[1] // key.shape[1], 1) for each in (key, value)
            )
            scores = torch.einsum("qhd,khd->hqk", query[begin:end], keys) * scale
            shares = scores.masked_fill(~seen, -torch.inf).softmax(2)
            contexts.append(torch.einsum("hqk,khd->qhd", shares, values))
        return torch.cat(contexts)


@pytest.fixture
def kernel(monkeypatch):
    kernel = Kernel()
    monkeypatch.setattr(attention, "_kernel", lambda query, value, wanted: None if wanted.scored else kernel)
    return kernel


@pytest.mark.parametrize("layer", [name for name, (wanted, _) in LAYERS.items() if not wanted.scored])
@pytest.mark.parametrize("values", [WIDTH, 5, 12])
@pytest.mark.parametrize("lengths", [[5, 2, 2, 9, 1, 5], [8], [4, 12], [1, 1, 16, 3, 4]])
def test_the_kernel_gives_what_the_blocks_give(kernel, layer, values, lengths):
    """Chunks become boundaries of shorter examples; values of another width than keys (MLA) are padded."""
    wanted, more = LAYERS[layer]
    longest = {"longest": max(lengths)}
    results = []
    for call in (longest, {}):
        heads = [each.requires_grad_() for each in heads_of(sum(lengths), 2, values=values)]
        found = _attend_row(*heads, boundaries_of(lengths), wanted, **more, **call)
        assert found.shape == (1, sum(lengths), HEADS, values)
        results.append((found, *torch.autograd.grad(found.square().sum(), heads)))
    heads = [each.requires_grad_() for each in heads_of(sum(lengths), 2, values=values)]
    expected = by_the_formula(*heads, lengths, wanted, **more)
    expected = expected, *torch.autograd.grad(expected.square().sum(), heads)
    for result in results:
        assert all(torch.allclose(*pair, rtol=0, atol=1e-12) for pair in zip(result, expected))
    assert len(kernel.calls) == 2 and kernel.calls[0][1] == min(max(lengths), more.get("chunk", 99))


@pytest.fixture
def older_torch(monkeypatch):
    """Call it with a function: the kernel of an older torch."""

    def install(varlen_attn):
        module = ModuleType("varlen_of_older_torch")
        module.varlen_attn = varlen_attn
        monkeypatch.setitem(sys.modules, module.__name__, module)
        monkeypatch.setattr(attention, "_KERNEL_MODULE", module.__name__)
        attention._kernel_options.cache_clear()
        return module

    return install


@pytest.mark.parametrize("compiled", [False, True])
def test_a_kernel_without_grouped_queries_gets_repeated_keys(compiled, older_torch, monkeypatch):
    """The signature of torch 2.11, for which this was a TypeError on an H100."""
    kernel, lengths = Kernel(), [5, 2, 9]

    def varlen_attn(query, key, value, starts, of_keys, most, most_keys, *, scale, window_size=(-1, -1)):
        return kernel(query, key, value, starts, of_keys, most, most_keys, scale=scale, window_size=window_size)

    older_torch(varlen_attn)
    monkeypatch.setattr(attention, "_kernel", lambda *_: varlen_attn)
    heads = [each.requires_grad_() for each in heads_of(sum(lengths), 2)]
    call = partial(_attend_row, boundaries=boundaries_of(lengths), settings=_Settings(), longest=9)
    found = (torch.compile(call, backend="eager") if compiled else call)(*heads)[0]
    expected = by_the_formula(*heads, lengths, _Settings())
    gradients = [torch.autograd.grad(each.square().sum(), heads) for each in (found, expected)]
    assert kernel.calls and torch.allclose(found, expected, rtol=0, atol=1e-12)
    assert all(torch.allclose(*pair, rtol=0, atol=1e-12) for pair in zip(*gradients))


def test_a_kernel_without_scale_and_window_is_not_used(older_torch):
    assert attention._kernel_accepts("scale", "window_size", "enable_gqa")
    older_torch(lambda query, key, value, starts, of_keys, most, most_keys, is_causal=False: None)
    assert not attention._kernel_accepts("scale", "window_size")
    del older_torch(None).varlen_attn
    assert not attention._kernel_accepts("scale")


def test_empty_examples_are_no_matter_to_chunks(kernel):
    heads, boundaries = heads_of(10), torch.tensor([0, 0, 3, 3, 10, 10]).int()
    expected = by_the_formula(*heads, [3, 7], _Settings(), chunk=4)
    assert torch.allclose(_attend_row(*heads, boundaries, _Settings(), chunk=4), expected, rtol=0, atol=1e-12)
    assert sorted(set(kernel.calls[0][0].tolist())) == [0, 3, 7, 10]


class Waits(TorchDispatchMode):
    """Counts the calls for which the host waits for a CUDA device, here on a CPU."""

    def __init__(self):
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        name = function.overloadpacket.__name__
        indices = args[1] if name in ("index", "index_put_") else ()
        if name in ("_local_scalar_dense", "equal", "nonzero", "masked_select", "_unique2", "repeat_interleave") or any(
            each is not None and each.dtype == torch.bool for each in indices
        ):
            self.count += 1
        return function(*args, **(kwargs or {}))


@contextlib.contextmanager
def waits_counted(monkeypatch):
    with monkeypatch.context() as patch, Waits() as waits:
        for name in ("tolist", "cpu", "numpy"):  # which call no operator on a CPU
            theirs = getattr(torch.Tensor, name)

            def counted(tensor, theirs=theirs):
                waits.count += 1
                return theirs(tensor)

            patch.setattr(torch.Tensor, name, counted)
        yield waits


def waits_of(model, inputs, monkeypatch):
    """In the whole forward pass, and behind its first layer."""
    after = []
    with waits_counted(monkeypatch) as waits:
        handle = model.model.layers[0].register_forward_hook(lambda *given: after.append(waits.count))
        model(**inputs, use_cache=False).logits.sum().backward()
    handle.remove()
    return waits.count, waits.count - after[0]


def test_waits_are_counted(monkeypatch):
    values = torch.arange(3)
    with waits_counted(monkeypatch) as waits:
        for step in (values.tolist, values.any().item, lambda: values[values > 1], lambda: torch.equal(values, values)):
            before = waits.count
            step()
            assert waits.count == before + 1
        values.to(torch.float32).sum()
        assert waits.count == 4


@pytest.mark.parametrize("by", ["kernel", "blocks"])
@pytest.mark.parametrize(
    "kind, given_",
    [
        ("mistral", "boundaries"),
        ("mistral", "boundaries twice"),
        ("mistral", "positions"),
        ("gemma3", "boundaries twice"),
        ("llama4", "boundaries twice"),
    ],
)
def test_the_device_is_waited_for_in_the_first_layer_only(kind, given_, by, monkeypatch, request):
    """The first layer checks the inputs, for all: also in the next batch, and in 2 layers as often as in 6."""
    stand_in = request.getfixturevalue("kernel") if by == "kernel" else None
    found = {}
    for layers in (2, 6):
        model = a_windowed_model(kind, num_hidden_layers=layers).train()
        model.set_attn_implementation("padding_free")
        for seed in (1, 2):
            inputs = PaddingFreeCollator(model)(some_examples(seed, [9, 2, 12]))
            if given_ == "boundaries twice":  # as a collator's batch on the device
                inputs["cu_seq_lens_k"] = inputs["cu_seq_lens_q"].clone()
            if given_ == "positions":
                inputs = {name: inputs[name] for name in ("input_ids", "position_ids")}
            inputs.pop("labels", None)
            found[layers, seed] = waits_of(model, inputs, monkeypatch)
    assert len(set(found.values())) == 1, found
    assert found[2, 1][1] == 0
    assert stand_in is None or stand_in.calls


def test_views_of_a_fused_projection_are_read_by_their_strides():
    """cudnn-frontend #538: query, key and value are slices of one product, moved to the order of heads."""
    lengths = [5, 1, 9]
    fused = torch.randn(1, 15, 3, HEADS, WIDTH, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    heads = fused.permute(2, 0, 3, 1, 4).unbind()
    assert not any(each.is_contiguous() for each in heads)
    found = _attend_row(*heads, boundaries_of(lengths), _Settings())
    assert torch.allclose(found, by_the_formula(*heads, lengths, _Settings()), rtol=0, atol=1e-12)


def test_empty_examples_change_nothing():
    heads = heads_of(15, 2)
    rows = [_attend_row(*heads, boundaries_of(lengths), _Settings()) for lengths in ([5, 10], [0, 5, 0, 0, 10, 0])]
    assert torch.equal(*rows)


def test_a_compiled_model_is_not_compiled_again_for_other_examples():
    """The second row makes the number of examples a symbol; the others need no further graph."""
    graphs = []
    model = a_windowed_model("mistral").train()
    use_padding_free(model)
    compiled = torch.compile(model, backend=lambda graph, inputs: graphs.append(graph) or graph.forward)
    counts = []
    for seed in range(20):
        cuts = np.random.default_rng(seed).choice(range(1, 44), size=2 + seed % 7, replace=False)
        lengths = np.diff([0, *sorted(cuts), 44])
        compiled(**PaddingFreeCollator(model)(some_examples(seed, lengths))).loss.backward()
        counts.append(len(graphs))
    assert counts[1:] == counts[1:2] * 19 and counts[0]
