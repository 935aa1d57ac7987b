"""Verdicts that depend on model and data alone: faults that were missed, and right models that were refused."""

import random

import numpy as np
import pytest
import torch
from torch import nn

from padding_free import PaddingCollator, attention, check_no_leak, use_padding_free
from padding_free.leaks import layers
from padding_free.leaks.metadata import MOST_TOKENS
from padding_free.losses import IGNORED
from padding_free.models import Leak
from tests.padding_free_faults import ROW, TinyModel, Wrong, _joining, _place, joined, probe, token_loss
from tests.padding_free_models import SIZE, a_model, transformers, with_large_weights
from tests.refusals import refused
from tests.tiers import slow

# Seeds of a model and its fault.
DRAWS = pytest.mark.parametrize("seeds", [range(1), slow(range(1, 4))], ids=["one", "more"])


def mixed(hidden):
    return hidden + 0.3 * hidden.mean(1, keepdim=True)


def mixing(module, given, output):
    return mixed(output)


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


def noise_of_the_row(draw):
    """NEFTune's noise shrinks with the tokens of the row."""

    def edit(hidden, row, model):
        noise = torch.zeros_like(hidden).uniform_(-1, 1)
        return hidden + row.tokens**-0.5 * noise * model.training

    return Wrong(TinyModel(draw, edit=edit))


def remembered_boundaries(draw):
    kept = {}

    def forward(model, inputs):
        kept["bounds"] = inputs.get("cu_seq_lens_q", kept.get("bounds"))
        kept["positions"] = inputs.get("position_ids", kept.get("positions"))
        return model(inputs["input_ids"], kept["positions"], kept["bounds"]).logits

    return Wrong(TinyModel(draw), forward=forward)


# Fault -> what the message names.
MISSED = {
    in_float32_only: "example",
    boundaries_of_the_batch_before: "TinyModel",
    noise_hides_training: "TinyModel",
    the_compiled_graph_leaks: "compiled model",
    a_common_prefix_is_shared: "example",
    noise_of_the_row: "noise",
    remembered_boundaries: "cu_seq_lens_q.*dropped",
}


@DRAWS
@pytest.mark.parametrize("make", MISSED, ids=lambda make: make.__name__)
def test_a_fault_that_was_missed_is_caught(make, seeds):
    for seed in seeds:
        with refused("TinyModel", MISSED[make], kind=Leak):
            probe(make(np.random.default_rng(seed)))


def test_a_fault_after_500_examples_is_caught():
    model = TinyModel(np.random.default_rng(0), attention=_joining(501))
    with refused("TinyModel", "example", kind=Leak):
        probe(Wrong(model), row=1024)


# ---- right models that are random, or whose calls are unusual


def edited(edit, **options):
    """A right model in whose layers `edit` changes the hidden states in training mode."""

    def in_training(hidden, row, model):
        return edit(hidden, model) if model.training else hidden

    return Wrong(TinyModel(np.random.default_rng(0), edit=in_training), **options)


def stochastic_depth():
    """One coin for a batch, which falls alike with two of three seeds."""
    return edited(lambda hidden, model: hidden * (1.1 if torch.rand(()) < 0.7 else 1.0))


def gumbel_noise():
    return edited(lambda hidden, model: hidden - 0.1 * torch.empty_like(hidden).exponential_().log())


def dropout_of_its_own_generator():
    generator = torch.Generator().manual_seed(0)

    def drop(hidden, model):
        kept = torch.empty_like(hidden).bernoulli_(0.9, generator=generator)
        return hidden * kept / 0.9

    return edited(drop, collator=joined, loss=token_loss)


def buffer_that_each_forward_moves():
    def move(hidden, model):
        model.moved += 0.1
        return hidden * model.moved.clone()

    wrong = edited(move)
    wrong.model.register_buffer("moved", torch.ones(()))
    return wrong


def rows_in_a_loop():
    """A padded batch, whose rows are called one by one without their padding."""

    def forward(model, inputs):
        logits = torch.zeros(*inputs["input_ids"].shape, model.config.vocab_size)
        for number, length in enumerate(inputs["attention_mask"].sum(1).tolist()):
            logits[number, :length] = model(inputs["input_ids"][number, :length][None]).logits[0]
        return logits

    return Wrong(TinyModel(np.random.default_rng(0)), forward=forward, collator=PaddingCollator())


def reentrant_checkpoints():
    model = a_model(attention="padding_free", dtype=torch.float32)
    model.gradient_checkpointing_enable({"use_reentrant": True})
    return Wrong(model.train())


UNUSUAL = [stochastic_depth, gumbel_noise, dropout_of_its_own_generator, buffer_that_each_forward_moves]
UNUSUAL += [rows_in_a_loop, reentrant_checkpoints]


@pytest.mark.parametrize("make", UNUSUAL, ids=lambda make: make.__name__)
def test_a_right_model_that_is_random_or_called_otherwise_passes(make):
    assert "training" in str(probe(make(), longest=24, row=48))


def test_noise_of_the_right_size_passes_and_a_quick_probe_is_told():
    def edit(hidden, row, model):
        return hidden + 0.1 * torch.zeros_like(hidden).uniform_(-1, 1) * model.training

    assert "quick" in str(probe(Wrong(TinyModel(np.random.default_rng(0), edit=edit)), quick=True))


MIXTURES = {
    "64 experts": ("Qwen3MoeConfig", {"num_experts": 64, "num_experts_per_tok": 8, "moe_intermediate_size": 16}),
    "gpt-oss": ("GptOssConfig", {"num_local_experts": 16, "head_dim": 8, "sliding_window": 16}),
    "mixtral": ("MixtralConfig", {"num_local_experts": 8}),
}


@DRAWS
@pytest.mark.parametrize("dtype", [slow(torch.float32), torch.bfloat16], ids=str)
@pytest.mark.parametrize("kind", [slow("mixtral"), "64 experts", slow("gpt-oss")])
def test_mixtures_of_many_experts_pass(kind, dtype, seeds):
    """Other tokens in front send others to the same expert, whose sums then round anew: not equal bits, and no leak."""
    name, settings = MIXTURES[kind]
    for seed in seeds:
        torch.manual_seed(seed)
        config = getattr(transformers, name)(**{**SIZE, **settings}, num_key_value_heads=1)
        model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager")
        use_padding_free(model.to(dtype), row=128, longest=32)


# ---- subjects


class Plain(nn.Module):
    """A model without a configuration; its positions are embedded before its words."""

    def __init__(self, leaks=False):
        super().__init__()
        torch.manual_seed(0)
        self.positions = nn.Embedding(ROW, 16)
        self.words = nn.Embedding(50, 16)
        self.attention = nn.MultiheadAttention(16, 1, batch_first=True)
        self.head = nn.Linear(16, 50)
        self.leaks = leaks

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


@pytest.mark.parametrize("attention", [slow("sdpa"), "eager", slow("padding_free")])
def test_models_are_judged_as_loaded(attention):
    model = a_model(attention=attention, dtype=torch.float32)
    assert "boundaries in position_ids" in str(check_no_leak(model, longest=16))
    with refused("BertSelfAttention", "position_ids", kind=Leak):
        check_no_leak(transformers.BertForMaskedLM(transformers.BertConfig(**SIZE)), longest=16)


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
    probe(Wrong(TinyModel(draw), collator=collator, loss=token_loss), longest=40, row=80)
    assert states == (random.getstate(), np.random.get_state()[1].tolist())
    with refused("TinyModel", kind=Leak):
        wrong = Wrong(TinyModel(draw, attention=_joining(5)), collator=collator, loss=token_loss)
        probe(wrong, longest=40, row=80)


def padded(examples):
    """A row for each example, the longest first."""
    longest_first = sorted(examples, key=lambda example: -len(example["input_ids"]))
    return PaddingCollator()(longest_first)


def test_a_collator_that_pads_and_sorts_is_judged_by_its_rows():
    draw = np.random.default_rng(0)
    sizes = {"longest": 24, "row": 48, "collator": padded}
    assert "48 tokens in" in str(probe(Wrong(TinyModel(draw)), **sizes))

    def edit(hidden, row, model):
        return hidden + 0.1 * hidden.mean(0, keepdim=True)

    with refused("TinyModel", "example", kind=Leak):
        probe(Wrong(TinyModel(draw, edit=edit)), **sizes)


def renamed(examples):
    inputs = joined(examples)
    inputs["cu_seqlens"] = inputs.pop("cu_seq_lens_q")
    return inputs


def test_a_key_that_no_layer_reads_is_named_with_the_layer():
    model = a_model(dtype=torch.float32)
    with refused("self_attn", "ignores .*cu_seqlens", kind=Leak):
        check_no_leak(model, collator=renamed, forward=lambda model, inputs: model(**inputs).logits)


# ---- memory


@pytest.mark.parametrize("dtype", [slow(torch.float32), torch.bfloat16], ids=str)
def test_few_words_of_a_large_vocabulary_have_the_same_verdict(dtype, monkeypatch):
    """Only calls with a handful of tokens compute the logits of all words."""
    for module in ("subject", "probe"):
        monkeypatch.setattr(f"padding_free.leaks.{module}.MOST_LOGITS", 500)

    def judged(model):
        shapes = []
        model.register_forward_hook(lambda module, inputs, output: shapes.append(output.logits.shape))
        try:
            return check_no_leak(model, longest=40)
        finally:
            whole = [shape[1] for shape in shapes if shape[-1] == model.config.vocab_size]
            assert len(whole) < len(shapes) and max(whole) <= 2 * MOST_TOKENS
            assert "forward" not in vars(model.lm_head) and model.lm_head.weight.requires_grad

    judged(a_model(attention="padding_free", dtype=dtype))
    model = a_model(attention="padding_free", dtype=dtype)
    model.model.layers[1].mlp.register_forward_hook(mixing)
    with refused("model.layers.1.mlp", kind=Leak):
        judged(model)


# ---- large models


def test_a_large_model_is_judged_at_usual_lengths_unless_one_is_given(monkeypatch):
    """2,048 tokens, or a longer row, or twice the window; a model that supports no more is judged at all lengths."""
    windows = {"use_sliding_window": True, "max_window_layers": 1}
    cases = [
        (2048, {}, {}),
        (5000, {"row": 5000}, {}),
        (8192, {}, {"sliding_window": 4096, **windows}),
        (None, {}, {"sliding_window": 16_384, **windows}),
        (None, {}, {"max_position_embeddings": 2048}),
    ]
    for expected, options, changes in cases:
        with torch.device("meta"):
            config = transformers.Qwen2Config(**{**SIZE, "max_position_embeddings": 32_768, **changes})
            model = transformers.AutoModelForCausalLM.from_config(config)
        monkeypatch.setattr(layers, "_LEAST_PARAMETERS", 0)
        assert layers.usual_longest(model, options.get("row")) == expected
        monkeypatch.undo()
        assert layers.usual_longest(model, None) is None  # a small model
    monkeypatch.setattr(layers, "_LEAST_PARAMETERS", 0)
    monkeypatch.setattr(layers, "_USUAL_LONGEST", 24)
    model = a_model(attention="padding_free", dtype=torch.float32)
    assert "at most 24 tokens" in str(check_no_leak(model))


def a_model_of_six_layers(attention):
    config = transformers.LlamaConfig(**{**SIZE, "num_hidden_layers": 6})
    return with_large_weights(transformers.AutoModelForCausalLM.from_config(config, attn_implementation=attention))


def test_layers_of_one_kind_are_represented_unless_all_are_asked_for(monkeypatch):
    """A layer with a hook, a window or a settings of its own is judged; the weights keep their requires_grad."""
    monkeypatch.setattr(layers, "_LEAST_PARAMETERS", 0)
    sizes = {**SIZE, "num_hidden_layers": 6, "num_key_value_heads": 1}
    windows = {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 2}
    model = transformers.AutoModelForCausalLM.from_config(transformers.Qwen2Config(**sizes, **windows))
    quick = {"longest": 16, "quick": True}
    assert "4 layers have the kind" in str(check_no_leak(model, **quick))  # 2 without a window, 4 with one
    assert "layers" not in str(check_no_leak(model, **quick, all_layers=True))
    assert all(weight.requires_grad for weight in model.parameters())
    assert not any("forward" in vars(layer) for layer in model.model.layers)
    model.model.layers[5].mlp.register_forward_hook(mixing)
    with refused("first in model.layers.5.mlp", kind=Leak):
        check_no_leak(model, **quick)
    model.model.layers[5].mlp._forward_hooks.clear()

    def attend(module, *args, **named):
        """Join the examples in the last layer, which its index chooses."""
        context, _ = attention._padding_free_attention(module, *args, **named)
        return mixed(context) if module.layer_idx == 5 and "cu_seq_lens_q" in named else context, None

    interface = transformers.AttentionInterface
    model = a_model_of_six_layers("padding_free")
    interface.register("padding_free", attend)
    try:
        with refused("LlamaForCausalLM", "example", kind=Leak):
            check_no_leak(model, **quick)
    finally:
        interface.register("padding_free", attention._padding_free_attention)
    check_no_leak(Plain(), forward=by_documents, **quick)  # it has no list of layers
