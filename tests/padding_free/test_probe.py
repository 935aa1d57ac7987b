"""The probe: models that keep examples apart pass, whatever leaks or stands at a wrong position is refused."""

from types import SimpleNamespace

import pytest
import torch

from padding_free import PaddingFreeCollator, attention, use_padding_free
from padding_free.leaks.probe import check_no_leak
from padding_free.models import far_settings
from tests.padding_free.test_refused import FullyShardedDataParallel
from tests.padding_free_models import (
    CONFIGS,
    SIZE,
    WINDOW,
    a_model,
    a_windowed_model,
    alone,
    families,
    some_examples,
    token_losses,
    transformers,
)
from tests.refusals import refused
from tests.tiers import slow


@pytest.mark.parametrize("dtype", [slow(torch.float64), torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("kind", CONFIGS)
def test_models_that_keep_examples_apart_pass(kind, dtype):
    """Weights, gradients, mode and random state stay as they were."""
    model = a_model(kind, "padding_free", dtype)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    random_state = torch.get_rng_state()
    first, *others = model.parameters()
    first.grad = torch.ones_like(first)
    check_no_leak(model)
    assert model.training and torch.equal(random_state, torch.get_rng_state())
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert torch.equal(first.grad, torch.ones_like(first))
    assert not [weight for weight in others if weight.grad is not None]


def test_a_loss_may_call_the_model_on_other_tokens_too():
    """`loss_sum` does so once, to try the output layer."""
    model = a_model("llama", "padding_free", torch.float64)

    def loss(model, inputs):
        model(input_ids=torch.tensor([[3, 4, 5]]), use_cache=False)
        return token_losses(model, inputs).mean()

    check_no_leak(model, longest=16, collator=PaddingFreeCollator(model), loss=loss)


@pytest.mark.parametrize("dtype", [slow(torch.float32), torch.bfloat16], ids=str)
def test_a_small_leak_is_refused_in_any_type(dtype):
    """A new LFM2's convolution changes the next example's logits by a hundredth: less than bfloat16's tolerance."""
    if not hasattr(transformers, "Lfm2Config"):
        pytest.skip("this Transformers has no Lfm2Config")
    torch.manual_seed(0)
    sizes = {**SIZE, "hidden_size": 64, "num_key_value_heads": 1, "layer_types": ["conv", "full_attention"]}
    model = transformers.AutoModelForCausalLM.from_config(transformers.Lfm2Config(**sizes))
    with refused("Lfm2ForCausalLM", "first in model.layers.0.conv "):
        use_padding_free(model.to(dtype), longest=32, attention="padding_free")


def test_a_leak_of_training_mode_alone_is_refused():
    """Dropout, which makes all logits random, is switched off for the comparison."""
    model = a_model("llama")
    model.config.attention_dropout = 0.5
    for layer in model.model.layers:
        layer.self_attn.attention_dropout = 0.5
    assert use_padding_free(model.train(), longest=16).attention == "padding_free"

    def mixing(module, given, output):
        return output + 0.1 * output.mean(dim=1, keepdim=True) if module.training else output

    model.model.layers[1].mlp.register_forward_hook(mixing)
    for is_training in (True, False):
        model.train(is_training)  # models are loaded in evaluation mode
        with refused("LlamaForCausalLM", "in training"):
            check_no_leak(model, longest=16, quick=True)
        assert all(module.training == is_training for module in model.modules())


def test_a_window_that_the_attention_ignores_is_refused_unless_no_example_is_so_long(monkeypatch):
    model = a_windowed_model("mistral")
    use_padding_free(model, longest=16)
    monkeypatch.setattr(attention, "_reach_of", lambda module, window: (None, None))
    with refused(f"sliding_window is {WINDOW}", "first in model.layers.0.self_attn ", f"at most {WINDOW} tokens"):
        check_no_leak(model, longest=2 * WINDOW)
    check_no_leak(model, longest=WINDOW)


@pytest.mark.parametrize("family", ["phi3, long positions", slow("llama, dynamic positions")])
def test_positions_that_stretch_with_the_longest_example_of_the_row_are_refused(family):
    """A short example beside a long one gets other angles than alone."""
    model = families.build(family, attention="sdpa", dtype=torch.bfloat16)
    with refused("original_max_position_embeddings is 12", "rotary_emb"):
        use_padding_free(model, longest=40, attention="padding_free")
    use_padding_free(model, longest=12)


def test_what_goes_far_is_found_by_any_name():
    config = SimpleNamespace(
        sliding_window=7,
        attention_window_size=9,
        max_window_layers=2,
        use_sliding_window=True,
        chunk_size_feed_forward=0,
        rope_parameters={"full_attention": {"rope_type": "longrope", "original_max_position_embeddings": 5}},
        max_position_embeddings=64,
    )
    assert [reach.tokens for reach in far_settings(config)] == [5, 7, 9]


@pytest.mark.parametrize(
    "kind, settings, expected",
    [
        ("llama3", {}, []),
        ("dynamic", {}, [8]),  # the positions of the model
        ("longrope", {"original_max_position_embeddings": 4}, [4]),  # of its training
    ],
)
def test_positions_that_stretch_go_far(kind, settings, expected):
    config = SimpleNamespace(rope_scaling={"type": kind}, max_position_embeddings=8, **settings)
    assert [reach.tokens for reach in far_settings(config)] == expected


# ---- wrapped models


class Adapted(torch.nn.Module):
    """Wrap a model as PEFT does."""

    def __init__(self, model):
        super().__init__()
        self.inside = model
        self.config = model.config

    def get_base_model(self):
        return self.inside

    def forward(self, *arguments, **named):
        return self.inside(*arguments, **named)


@pytest.fixture
def one_process():
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()


def sharded(model):
    fully_shard = pytest.importorskip("torch.distributed.fsdp", reason="no FSDP").fully_shard
    for layer in model.model.layers:
        fully_shard(layer)
    return fully_shard(model)


WRAPPERS = {
    "compiled": lambda model: torch.compile(model, backend="eager"),
    "PEFT in DDP": lambda model: torch.nn.parallel.DistributedDataParallel(Adapted(model)),
    "FSDP2": sharded,
}


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # torch's own, where it loads what it compiles with
@pytest.mark.parametrize("wrapper", [slow("compiled"), "PEFT in DDP", "FSDP2"])
def test_wrapped_models_are_switched_and_probed(wrapper, one_process):
    model = a_model(dtype=torch.float32)
    wrapped = WRAPPERS[wrapper](model)
    assert use_padding_free(wrapped, longest=16) == ("padding_free", "cu_seq_lens", False)
    assert model.config._attn_implementation == "padding_free"
    assert PaddingFreeCollator(wrapped)(some_examples(1, [3, 4]))["cu_seq_lens_q"].tolist() == [0, 3, 7]
    model.model.layers[1].mlp.register_forward_hook(lambda module, given, output: output + output.mean(1, keepdim=True))
    with refused("model.layers.1.mlp (LlamaMLP)", "example"):
        check_no_leak(wrapped, longest=16, quick=True)


def test_a_model_that_was_switched_before_fsdp1_gets_its_boundaries():
    wrapped = FullyShardedDataParallel(a_model(attention="padding_free"))
    assert PaddingFreeCollator(wrapped)(some_examples(1, [3, 4]))["cu_seq_lens_q"].tolist() == [0, 3, 7]


def test_layers_that_need_the_number_of_the_example_get_it(monkeypatch):
    """A convolution of LFM2 that keeps examples apart by seq_idx, as the package causal_conv1d does on CUDA."""
    modeling = pytest.importorskip("transformers.models.lfm2.modeling_lfm2", reason="this Transformers has no LFM2")
    if int(transformers.__version__.split(".")[0]) < 5:
        pytest.skip("LFM2 of Transformers before 5 does not take seq_idx")
    plain = modeling.causal_conv1d_fn

    def convolution(hidden, weight, bias=None, seq_idx=None, **others):
        if seq_idx is None:
            return plain(hidden, weight, bias)
        assert seq_idx.dtype == torch.int32 and seq_idx.shape == (1, hidden.shape[2])
        parts = hidden.split(torch.bincount(seq_idx[0]).tolist(), dim=2)
        return torch.cat([plain(part, weight, bias) for part in parts], dim=2)

    monkeypatch.setattr(modeling, "causal_conv1d_fn", convolution)
    model = families.build("lfm2")
    reference = families.build("lfm2")
    assert use_padding_free(model, longest=16) == ("padding_free", "cu_seq_lens", True)
    examples = some_examples(3, [5, 2, 9])
    with torch.no_grad():
        losses = token_losses(model, PaddingFreeCollator(model)(examples))
    expected = torch.cat([alone(reference, example) for example in examples])
    assert float((losses - expected).abs().max()) < 1e-5
