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
from tests.tiers import slow  # noqa: E402

HEADS, WIDTH = 4, 8


def heads_of(tokens, key_heads=HEADS, seed=0, values=WIDTH):
    draw = torch.Generator().manual_seed(seed)
    sizes = ((HEADS, WIDTH), (key_heads, WIDTH), (key_heads, values))
    return [torch.randn(1, heads, tokens, width, generator=draw, dtype=torch.float64) for heads, width in sizes]


def boundaries_of(lengths):
    return torch.tensor([0, *lengths]).cumsum(0).int()


def visible(lengths, wanted, chunk):
    """bool [tokens, tokens]: the pairs of a query and a key of the whole row."""
    number = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))
    place = torch.cat([torch.arange(length) for length in lengths])
    seen = number[:, None] == number
    behind = place[:, None] - place
    if wanted.causal:
        seen &= behind >= 0
    if wanted.window is not None:
        seen &= behind.abs() < wanted.window
    if chunk is not None:
        piece = place // chunk
        seen &= piece[:, None] == piece
    return seen


def by_the_formula(query, key, value, lengths, wanted, chunk=None):
    """The softmax over a dense mask of the whole row."""
    tokens = query.shape[2]
    groups = HEADS // key.shape[1]
    key = key.repeat_interleave(groups, dim=1)
    value = value.repeat_interleave(groups, dim=1)
    scale = WIDTH**-0.5 if wanted.scale is None else wanted.scale
    scores = query @ key.transpose(2, 3) * scale
    if wanted.softcap is not None:
        scores = wanted.softcap * torch.tanh(scores / wanted.softcap)
    seen = visible(lengths, wanted, chunk)
    scores = scores.masked_fill(~seen, -torch.inf)
    if wanted.sinks is not None:
        sinks = wanted.sinks.view(1, -1, 1, 1)
        sinks = sinks.expand(1, -1, tokens, 1)
        scores = torch.cat([scores, sinks], dim=3)
    shares = torch.softmax(scores, dim=3)
    context = shares[..., :tokens] @ value
    return context.transpose(1, 2)


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


def assert_formula(call, heads, lengths, wanted, allowed=1e-12, **more):
    """`call(*heads)` is the context of the formula, and its gradients are those of the formula."""
    contexts = []
    gradients = []
    for compute in (call, lambda *given: by_the_formula(*given, lengths, wanted, **more)):
        given = [head.detach().requires_grad_() for head in heads]
        context = compute(*given)
        contexts.append(context)
        gradients.append(torch.autograd.grad(context.square().sum(), given))
    assert contexts[0].shape == contexts[1].shape
    assert torch.allclose(*contexts, rtol=0, atol=allowed)
    for gradient, expected in zip(*gradients):
        assert torch.allclose(gradient, expected, rtol=0, atol=10 * allowed)


ROWS = st.lists(st.integers(0, 9), min_size=1, max_size=9).filter(sum)


@pytest.mark.parametrize("layer", LAYERS)
@pytest.mark.parametrize("key_heads", [HEADS, 2, 1])
@settings(max_examples=8)
@given(lengths=ROWS, seed=st.integers(0, 99))
def test_each_example_by_itself(layer, key_heads, lengths, seed):
    """An empty example changes nothing."""
    wanted, more = LAYERS[layer]
    call = partial(_attend_row, boundaries=boundaries_of(lengths), settings=wanted, **more)
    assert_formula(call, heads_of(sum(lengths), key_heads, seed), lengths, wanted, **more)


@pytest.mark.parametrize("window", [None, 100, 128, 200])
@pytest.mark.parametrize("causal", [True, False])
def test_long_examples_are_cut_into_pieces_of_a_window(window, causal):
    lengths = [300, 7, 129, 300]
    wanted = _Settings(causal=causal, window=window)
    call = partial(_attend_row, boundaries=boundaries_of(lengths), settings=wanted)
    assert_formula(call, heads_of(sum(lengths), 2), lengths, wanted)


def test_dropout_is_applied_within_each_example():
    """Its mean over draws is the context without it."""
    lengths, heads = [6, 3, 6], heads_of(15)
    torch.manual_seed(0)
    for wanted in (_Settings(dropout=0.4), _Settings(dropout=0.4, softcap=2.0)):
        boundaries = boundaries_of(lengths)
        draws = torch.stack([_attend_row(*heads, boundaries, wanted) for _ in range(600)])
        expected = _attend_row(*heads, boundaries, wanted._replace(dropout=0.0))
        error = draws.mean(0) - expected
        assert float(error.abs().max()) < 0.3
        assert float(draws.std(0).mean()) > 0.1


LAYER = SimpleNamespace(is_causal=True)


def test_boundaries_that_change_in_place_are_read_again():
    heads, boundaries = heads_of(10), boundaries_of([3, 7])
    for lengths in ([3, 7], [6, 4]):
        boundaries.copy_(boundaries_of(lengths))
        found, _ = _padding_free_attention(LAYER, *heads, cu_seq_lens_q=boundaries)
        assert torch.allclose(found, by_the_formula(*heads, lengths, _Settings()), rtol=0, atol=1e-12)


_UNCOUNTED = torch.Tensor.tolist  # a kernel does not wait


class Kernel:
    """Computes by its arguments, as torch.nn.attention.varlen.varlen_attn says, and keeps them."""

    def __init__(self):
        self.calls = []

    def __call__(
        self, query, key, value, starts, of_keys, most, most_keys, *, scale, window_size=(-1, -1), enable_gqa=False
    ):
        self.calls.append((starts, most, window_size))
        assert starts is of_keys
        assert starts.dtype == torch.int32
        assert starts.is_contiguous()
        assert most == most_keys
        width = query.shape[-1]
        assert width % 8 == 0
        assert key.shape[-1] == width
        assert value.shape[-1] == width
        groups = query.shape[1] // key.shape[1]
        assert enable_gqa or groups == 1
        numbers = _UNCOUNTED(starts)
        assert numbers[0] == 0
        assert numbers[-1] == len(query)
        left, right = (reach if reach >= 0 else len(query) for reach in window_size)
        contexts = []
        for begin, end in zip(numbers, numbers[1:]):
            assert 0 <= end - begin <= most
            place = torch.arange(end - begin)
            behind = place[:, None] - place
            seen = (behind <= left) & (-behind <= right)
            keys = key[begin:end].repeat_interleave(groups, 1)
            values = value[begin:end].repeat_interleave(groups, 1)
            scores = torch.einsum("qhd,khd->hqk", query[begin:end], keys) * scale
            shares = scores.masked_fill(~seen, -torch.inf).softmax(2)
            contexts.append(torch.einsum("hqk,khd->qhd", shares, values))
        return torch.cat(contexts)


@pytest.fixture
def kernel(monkeypatch):
    kernel = Kernel()
    monkeypatch.setattr(attention, "_kernel", lambda query, value, wanted: None if wanted.scored else kernel)
    return kernel


UNSCORED = [name for name, (wanted, _) in LAYERS.items() if not wanted.scored]


@pytest.mark.parametrize("layer", UNSCORED)
@pytest.mark.parametrize("values", [WIDTH, 5, 12])
@pytest.mark.parametrize(
    "lengths",
    [
        [5, 2, 2, 9, 1, 5],
        [8],
        [4, 0, 12],
        [0, 1, 1, 0, 16, 3, 4, 0],
    ],
)
def test_the_kernel_gives_what_the_blocks_give(kernel, layer, values, lengths):
    """Chunks become boundaries of shorter examples; values of another width than keys (MLA) are padded."""
    wanted, more = LAYERS[layer]
    call = partial(_attend_row, boundaries=boundaries_of(lengths), settings=wanted, **more)
    heads = heads_of(sum(lengths), 2, values=values)
    for options in ({"longest": max(lengths)}, {}):
        assert_formula(partial(call, **options), heads, lengths, wanted, **more)
    assert len(kernel.calls) == 2
    _, longest, _ = kernel.calls[0]
    assert longest == min(max(lengths), more.get("chunk", 99))


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


@pytest.mark.parametrize("compiled", [False, slow(True)])
def test_a_kernel_without_grouped_queries_gets_repeated_keys(compiled, older_torch, monkeypatch):
    """The signature of torch 2.11, for which this was a TypeError on an H100."""
    kernel = Kernel()
    lengths = [5, 2, 9]

    def varlen_attn(query, key, value, starts, of_keys, most, most_keys, *, scale, window_size=(-1, -1)):
        return kernel(query, key, value, starts, of_keys, most, most_keys, scale=scale, window_size=window_size)

    older_torch(varlen_attn)
    monkeypatch.setattr(attention, "_kernel", lambda *_: varlen_attn)
    call = partial(_attend_row, boundaries=boundaries_of(lengths), settings=_Settings(), longest=9)
    if compiled:
        call = torch.compile(call, backend="eager")
    assert_formula(call, heads_of(sum(lengths), 2), lengths, _Settings())
    assert kernel.calls


def test_a_kernel_without_scale_and_window_is_not_used(older_torch):
    assert attention._kernel_accepts("scale", "window_size", "enable_gqa")
    older_torch(lambda query, key, value, starts, of_keys, most, most_keys, is_causal=False: None)
    assert not attention._kernel_accepts("scale", "window_size")
    del older_torch(None).varlen_attn
    assert not attention._kernel_accepts("scale")


class Waits(TorchDispatchMode):
    """Count the calls for which the host waits for a CUDA device; here on a CPU."""

    def __init__(self):
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        name = function.overloadpacket.__name__
        indices = args[1] if name in ("index", "index_put_") else ()
        has_mask = any(index is not None and index.dtype == torch.bool for index in indices)
        self.count += has_mask or name in WAITING
        return function(*args, **(kwargs or {}))


WAITING = {"_local_scalar_dense", "equal", "nonzero", "masked_select", "_unique2", "repeat_interleave"}


@contextlib.contextmanager
def waits_counted(monkeypatch):
    with monkeypatch.context() as patch, Waits() as waits:
        for name in ("tolist", "cpu", "numpy"):  # which call no operator on a CPU
            original = getattr(torch.Tensor, name)

            def counted(tensor, original=original):
                waits.count += 1
                return original(tensor)

            patch.setattr(torch.Tensor, name, counted)
        yield waits


def waits_of(model, inputs, monkeypatch):
    """Return the waits of an update, and those after its first layer."""
    after = []
    with waits_counted(monkeypatch) as waits:
        handle = model.model.layers[0].register_forward_hook(lambda *_: after.append(waits.count))
        model(**inputs, use_cache=False).logits.sum().backward()
    handle.remove()
    return waits.count, waits.count - after[0]


def test_waits_are_counted(monkeypatch):
    values = torch.arange(3)
    steps = (
        lambda: values.tolist(),  # noqa: PLW0108  the patched method
        lambda: values.any().item(),
        lambda: values[values > 1],
        lambda: torch.equal(values, values),
    )
    with waits_counted(monkeypatch) as waits:
        for number, step in enumerate(steps, start=1):
            step()
            assert waits.count == number
        values.to(torch.float32).sum()
        assert waits.count == len(steps)


@pytest.mark.parametrize("by", ["kernel", "blocks"])
@pytest.mark.parametrize(
    "kind, boundaries",
    [
        ("mistral", "once"),
        ("mistral", "twice"),
        ("mistral", "positions"),
        ("gemma3", "twice"),
        ("llama4", "twice"),
    ],
)
def test_the_host_waits_for_the_device_in_the_first_layer_only(kind, boundaries, by, monkeypatch, request):
    """The first layer checks the inputs for all: in each batch, and in 2 layers as often as in 6."""
    stand_in = request.getfixturevalue("kernel") if by == "kernel" else None
    waits = {}
    for layers in (2, 6):
        model = a_windowed_model(kind, num_hidden_layers=layers).train()
        model.set_attn_implementation("padding_free")
        for seed in (0, 1, 2):
            inputs = PaddingFreeCollator(model)(some_examples(seed, [9, 2, 12]))
            if boundaries == "twice":  # as a collator's batch on the device
                inputs["cu_seq_lens_k"] = inputs["cu_seq_lens_q"].clone()
            if boundaries == "positions":
                inputs = {name: inputs[name] for name in ("input_ids", "position_ids")}
            inputs.pop("labels", None)
            waits[layers, seed] = waits_of(model, inputs, monkeypatch)
    later = [count for (_, seed), count in waits.items() if seed]  # the first call also tries the model
    assert len(set(later)) == 1, waits
    assert later[0][1] == 0
    assert stand_in is None or stand_in.calls


def test_views_of_a_fused_projection_are_read_by_their_strides():
    """cudnn-frontend #538: query, key and value are slices of one product, moved to the order of heads."""
    lengths = [5, 1, 9]
    draw = torch.Generator().manual_seed(0)
    fused = torch.randn(1, 15, 3, HEADS, WIDTH, generator=draw, dtype=torch.float64)
    heads = fused.permute(2, 0, 3, 1, 4).unbind()
    assert not any(head.is_contiguous() for head in heads)
    context = _attend_row(*heads, boundaries_of(lengths), _Settings())
    assert torch.allclose(context, by_the_formula(*heads, lengths, _Settings()), rtol=0, atol=1e-12)


def test_a_compiled_model_is_not_compiled_again_for_other_examples():
    """The second row makes the number of examples a symbol; the others need no further graph."""
    graphs = []
    model = a_windowed_model("mistral").train()
    use_padding_free(model, longest=16)
    compiled = torch.compile(model, backend=lambda graph, inputs: graphs.append(graph) or graph.forward)
    counts = []
    for seed in range(7):
        cuts = np.random.default_rng(seed).choice(range(1, 44), size=2 + seed, replace=False)
        lengths = np.diff([0, *sorted(cuts), 44])
        compiled(**PaddingFreeCollator(model)(some_examples(seed, lengths))).loss.backward()
        counts.append(len(graphs))
    assert counts[1:] == counts[1:2] * 6 and counts[0]
