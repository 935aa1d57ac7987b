"""Verdicts that depend on model and data alone: faults that were missed, and right models that were refused."""

import itertools
import random
import time

import numpy as np
import pytest
import torch
from torch import nn

from padding_free import check_no_leak, use_padding_free
from padding_free.leaks import layers, rows
from padding_free.leaks.metadata import MOST_TOKENS
from padding_free.losses import IGNORED
from padding_free.models import Leak
from tests.padding_free_faults import (
    FAULTS,
    LONGEST,
    ROW,
    TinyModel,
    Wrong,
    _joining,
    _nth,
    _place,
    joined,
    token_loss,
)
from tests.padding_free_models import SIZE, a_model, transformers
from tests.refusals import refused
from tests.tiers import slow

# Seeds of a model and its fault.
DRAWS = pytest.mark.parametrize("seeds", [range(1), slow(range(1, 4))], ids=["one", "more"])


def probe(wrong, **settings):
    kept = {name: value for name, value in wrong._asdict().items() if name != "model" and value is not None}
    return check_no_leak(wrong.model, **{"longest": LONGEST, "row": ROW, **kept, **settings})


def mixed(hidden):
    return hidden + 0.3 * hidden.mean(1, keepdim=True)


def in_float32_only(draw):
    """Gone in float64, however large."""
    first = int(draw.integers(100, ROW - 4))

    def edit(hidden, row, model):
        return mixed(hidden) if row.packed and row.tokens > first and hidden.dtype == torch.float32 else hidden

    return Wrong(TinyModel(draw, edit=edit))


def boundaries_of_the_batch_before(draw):
    """The second look at a row is right."""
    kept = []

    def forward(model, inputs):
        kept.append(inputs["cu_seq_lens_q"])
        tokens = inputs["input_ids"].shape[1]
        before = [bounds for bounds in kept[:-1] if int(bounds[-1]) == tokens][-1:]
        return model(**{**inputs, "cu_seq_lens_q": (before or kept)[-1]}).logits

    return Wrong(TinyModel(draw), forward=forward)


def noise_hides_training(draw):
    first = _place(draw)

    def edit(hidden, row, model):
        if not model.training:
            return hidden
        noisy = hidden + 0.1 * torch.randn_like(hidden)
        return mixed(noisy) if row.packed and row.tokens > first else noisy

    return Wrong(TinyModel(draw, edit=edit))


def the_compiled_graph_leaks(draw):
    first = _place(draw)

    def edit(hidden, row, model):
        return mixed(hidden) if torch.compiler.is_compiling() and row.tokens > first else hidden

    return Wrong(torch.compile(TinyModel(draw, edit=edit), backend="eager"))


def a_common_prefix_is_shared(draw):
    """Groups of completions: examples that begin with the same tokens see each other."""
    tokens = int(draw.integers(2, 9))

    def forward(model, inputs):
        bounds, ids = inputs["cu_seq_lens_q"].tolist(), inputs["input_ids"][0]
        kept = [0]
        for begin, end in zip(bounds[1:-1], bounds[2:]):
            if not torch.equal(ids[kept[-1] :][:tokens], ids[begin:end][:tokens]):
                kept.append(begin)
        return model(**{**inputs, "cu_seq_lens_q": torch.tensor([*kept, bounds[-1]])}).logits

    return Wrong(TinyModel(draw), forward=forward)


MISSED = [
    in_float32_only,
    boundaries_of_the_batch_before,
    noise_hides_training,
    the_compiled_graph_leaks,
    a_common_prefix_is_shared,
]


@DRAWS
@pytest.mark.parametrize("make", MISSED, ids=lambda make: make.__name__)
def test_a_fault_that_was_missed_is_caught(make, seeds):
    for seed in seeds:
        with refused("TinyModel", kind=Leak):
            probe(make(np.random.default_rng(seed)))


def test_a_fault_after_500_examples_is_caught():
    model = TinyModel(np.random.default_rng(0), attention=_joining(501))
    with refused("TinyModel", "example", kind=Leak):
        probe(Wrong(model), row=1024)


def test_noise_of_the_right_size_passes_and_noise_of_the_row_does_not():
    """NEFTune's noise shrinks with the tokens of the row."""
    for of_row in (False, True):

        def edit(hidden, row, model, of_row=of_row):
            size = row.tokens**-0.5 if of_row else 0.1
            return hidden + size * torch.zeros_like(hidden).uniform_(-1, 1) * model.training

        wrong = Wrong(TinyModel(np.random.default_rng(0), edit=edit))
        if of_row:
            with refused("noise", kind=Leak):
                probe(wrong)
        else:
            probe(wrong)


@DRAWS
@pytest.mark.parametrize("name", ["mean_of_the_means_of_two_parts", "rows_behind_the_last_whole_block_are_zero"])
def test_no_clock_chooses_the_rows(name, seeds, monkeypatch):
    """Every look at the clock takes ten seconds, as on a busy machine."""
    ticks = itertools.count(0, 10)
    monkeypatch.setattr(time, "perf_counter", lambda: float(next(ticks)))
    assert "320 tokens in 213 examples" in str(probe(Wrong(TinyModel(np.random.default_rng(0)))))
    fault = next(each for each in FAULTS if each.name == name)
    for seed in seeds:
        with refused("TinyModel"):
            probe(fault.make(np.random.default_rng(seed)))
    assert "quick" in str(probe(Wrong(TinyModel(np.random.default_rng(0))), quick=True))


MIXTURES = {
    "64 experts": ("Qwen3MoeConfig", {"num_experts": 64, "num_experts_per_tok": 8, "moe_intermediate_size": 16}),
    "gpt-oss": ("GptOssConfig", {"num_local_experts": 16, "head_dim": 8, "sliding_window": 16}),
    "mixtral": ("MixtralConfig", {"num_local_experts": 8}),
}


@DRAWS
@pytest.mark.parametrize("dtype", [slow(torch.float32), torch.bfloat16], ids=str)
@pytest.mark.parametrize("kind", MIXTURES)
def test_mixtures_of_many_experts_pass(kind, dtype, seeds):
    name, settings = MIXTURES[kind]
    for seed in seeds:
        torch.manual_seed(seed)
        config = getattr(transformers, name)(**{**SIZE, **settings}, num_key_value_heads=1)
        model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager")
        use_padding_free(model.to(dtype), row=256, longest=64)


# ---- subjects


class Plain(nn.Module):
    """A model without a configuration; its positions are embedded before its words."""

    def __init__(self, leaks=False):
        super().__init__()
        torch.manual_seed(0)
        self.positions, self.words = nn.Embedding(ROW, 16), nn.Embedding(50, 16)
        self.attention = nn.MultiheadAttention(16, 1, batch_first=True)
        self.head, self.leaks = nn.Linear(16, 50), leaks

    def forward(self, ids, positions=None, documents=None):
        tokens = torch.arange(ids.shape[1])
        hidden = self.words(ids) + self.positions(tokens[None] if positions is None else positions)
        hidden_tokens = tokens[:, None] < tokens
        if documents is not None and not self.leaks:
            hidden_tokens = hidden_tokens | (documents[0, :, None] != documents[0])
        logits = self.head(hidden + self.attention(hidden, hidden, hidden, attn_mask=hidden_tokens)[0])
        return (logits if documents is not None else logits[:, -1:]), None  # the last token alone, as in nanoGPT


def by_documents(model, inputs):
    return model(inputs["input_ids"], inputs["position_ids"], (inputs["position_ids"] == 0).cumsum(1))[0]


def test_any_module_is_judged_by_its_forward():
    sizes = {"longest": 32, "row": 64}
    assert "position_ids" in str(check_no_leak(Plain(), forward=by_documents, **sizes))
    with refused("Plain", "first in attention", "ignores cu_seq_lens_q", kind=Leak):
        check_no_leak(Plain(leaks=True), forward=by_documents, **sizes)
    with refused("Plain", "forward="):
        check_no_leak(Plain(), **sizes)


@pytest.mark.parametrize("attention", ["sdpa", "eager", "padding_free"])
def test_models_are_judged_as_loaded(attention):
    model = a_model(attention=attention, dtype=torch.float32)
    assert "boundaries in position_ids" in str(check_no_leak(model))
    with refused("Llama", "position_ids"):  # with a cache, the library looks for no boundaries
        check_no_leak(
            model, forward=lambda model, inputs: model(inputs["input_ids"], position_ids=inputs["position_ids"]).logits
        )
    with refused("BertSelfAttention", "position_ids", kind=Leak):
        check_no_leak(transformers.BertForMaskedLM(transformers.BertConfig(**SIZE)))


def sorting(examples):
    return joined(sorted(examples, key=lambda example: len(example["input_ids"])))


def masking(examples):
    """Hide and predict a third of the tokens, drawn anew in each call."""
    inputs = joined(examples)
    drawn = torch.from_numpy(np.random.random(inputs["input_ids"].shape) < 0.3)
    drawn &= torch.rand(drawn.shape) < 0.9
    inputs["labels"] = torch.where(drawn, inputs["input_ids"], IGNORED)
    inputs["input_ids"] = torch.where(drawn, random.randrange(3, 9), inputs["input_ids"])
    inputs["labels"][inputs["position_ids"] == 0] = IGNORED
    return inputs


@pytest.mark.parametrize("collator", [sorting, masking])
def test_collators_that_sort_or_draw_are_judged_by_their_batch(collator):
    draw = np.random.default_rng(0)
    states = random.getstate(), np.random.get_state()[1].tolist()
    probe(Wrong(TinyModel(draw), collator=collator, loss=token_loss))
    assert states == (random.getstate(), np.random.get_state()[1].tolist())
    with refused("TinyModel", kind=Leak):
        probe(Wrong(TinyModel(draw, attention=_joining(_nth(draw))), collator=collator, loss=token_loss))


# ---- boundaries that are broken on purpose


def renamed(examples):
    inputs = joined(examples)
    inputs["cu_seqlens"] = inputs.pop("cu_seq_lens_q")
    return inputs


def test_a_key_that_no_layer_reads_is_named_with_the_layer():
    model = a_model(dtype=torch.float32)
    with refused("self_attn", "ignores .*cu_seqlens", kind=Leak):
        check_no_leak(model, collator=renamed, forward=lambda model, inputs: model(**inputs).logits)


def test_remembered_boundaries_are_refused():
    kept = {}

    def forward(model, inputs):
        kept["bounds"] = inputs.get("cu_seq_lens_q", kept.get("bounds"))
        kept["positions"] = inputs.get("position_ids", kept.get("positions"))
        return model(inputs["input_ids"], kept["positions"], kept["bounds"]).logits

    with refused("cu_seq_lens_q", "dropped", kind=Leak):
        probe(Wrong(TinyModel(np.random.default_rng(0)), forward=forward))


# ---- memory


def test_few_words_of_a_large_vocabulary_have_the_same_verdict(monkeypatch):
    """Only calls with a handful of tokens compute the logits of all words."""
    monkeypatch.setattr(rows, "_MOST_LOGITS", 500)

    def judged(model):
        shapes = []
        model.register_forward_hook(lambda module, inputs, output: shapes.append(output.logits.shape))
        try:
            return check_no_leak(model, longest=40)
        finally:
            whole = [shape[1] for shape in shapes if shape[-1] == model.config.vocab_size]
            assert len(whole) < len(shapes) and max(whole) <= 2 * MOST_TOKENS
            assert "forward" not in vars(model.lm_head) and model.lm_head.weight.requires_grad

    for dtype in (torch.float32, torch.bfloat16):
        judged(a_model(attention="padding_free", dtype=dtype))
        model = a_model(attention="padding_free", dtype=dtype)
        model.model.layers[1].mlp.register_forward_hook(lambda module, given, output: mixed(output))
        with refused("model.layers.1.mlp", kind=Leak):
            judged(model)


def test_all_words_of_a_usual_vocabulary_are_compared():
    model = a_model(attention="padding_free")
    words = set()
    model.register_forward_hook(lambda module, inputs, output: words.add(output.logits.shape[-1]))
    check_no_leak(model, longest=40)
    assert words == {model.config.vocab_size}


def test_differences_are_the_same_in_blocks(monkeypatch):
    draw = torch.Generator().manual_seed(0)
    actual, expected = (torch.randn(3, 7, 11, generator=draw) for _ in range(2))
    whole = rows._token_errors(actual, expected, 2.0)
    assert torch.equal(whole, (actual - expected).abs().amax(-1).double() / 2)
    monkeypatch.setattr(rows, "_MOST_LOGITS", 25)
    assert torch.equal(rows._token_errors(actual, expected, 2.0), whole)
    actual[1, 2, 3] = float("nan")
    assert rows._token_errors(actual, expected, 2.0)[1, 2] == float("inf")


def test_a_large_model_is_judged_at_usual_lengths_unless_one_is_given(monkeypatch):
    def usual(row=None, **config):
        sizes = {**SIZE, "max_position_embeddings": 32_768, **config}
        with torch.device("meta"):
            model = transformers.AutoModelForCausalLM.from_config(transformers.Qwen2Config(**sizes))
        return layers.usual_longest(model, row)

    assert usual() is None  # a small model is judged at all lengths
    monkeypatch.setattr(layers, "_LEAST_PARAMETERS", 0)
    assert usual() == 2048 and usual(row=5000) == 5000
    assert usual(max_position_embeddings=2048) is None
    windows = {"use_sliding_window": True, "max_window_layers": 1}
    assert usual(sliding_window=4096, **windows) == 8192
    assert usual(sliding_window=16_384, **windows) is None
    monkeypatch.setattr(layers, "_USUAL_LONGEST", 24)
    model = a_model(attention="padding_free", dtype=torch.float32)
    assert "examples of at most 24 tokens; pass longest=N" in str(check_no_leak(model))
    assert "longest=N" not in str(check_no_leak(model, longest=24))


# ---- one layer of each kind


def test_layers_of_one_kind_are_represented_unless_all_are_asked_for(monkeypatch):
    """A layer with a hook, a window or a settings of its own is judged; the weights keep their requires_grad."""
    monkeypatch.setattr(layers, "_LEAST_PARAMETERS", 0)
    sizes = {**SIZE, "num_hidden_layers": 6, "num_key_value_heads": 1}
    windows = {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 2}
    model = transformers.AutoModelForCausalLM.from_config(transformers.Qwen2Config(**sizes, **windows))
    assert "; 4 layers have the kind" in str(check_no_leak(model, longest=16))  # 2 without a window, 4 with one
    assert "layers" not in str(check_no_leak(model, longest=16, all_layers=True))
    assert all(weight.requires_grad for weight in model.parameters())
    assert not any("forward" in vars(layer) for layer in model.model.layers)
    for number in (1, 5):
        handle = model.model.layers[number].mlp.register_forward_hook(lambda module, given, output: mixed(output))
        with refused(f"first in model.layers.{number}.mlp", kind=Leak):
            check_no_leak(model, longest=16)
        handle.remove()
    check_no_leak(Plain(), forward=by_documents, longest=32, row=64)  # it has no list of layers
    monkeypatch.undo()
    assert "layers" not in str(check_no_leak(model, longest=16))
