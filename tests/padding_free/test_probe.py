"""The probe: models that keep examples apart pass, whatever leaks or stands at a wrong position is refused."""

from types import SimpleNamespace

import pytest
import torch

from padding_free import PaddingFreeCollator, attention, use_padding_free
from padding_free.leaks.probe import check_no_leak
from padding_free.losses import logits_of
from padding_free.models import far_settings
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
from tests.tiers import sample, slow


def joined(examples):
    """One row, of which only the positions tell the examples."""
    ids, labels = (torch.cat([torch.as_tensor(each[name]) for each in examples]) for name in ("input_ids", "labels"))
    positions = torch.cat([torch.arange(len(each["input_ids"])) for each in examples])
    labels[positions == 0] = -100
    return {"input_ids": ids[None], "labels": labels[None], "position_ids": positions[None]}


def masked(examples):
    """The same, with a mask of the row."""
    inputs = joined(examples)
    example = (inputs["position_ids"] == 0).cumsum(1)
    same = (example[:, :, None] == example[:, None]).tril()
    return {**inputs, "attention_mask": same[:, None]}


@pytest.mark.parametrize("dtype", [slow(torch.float64), torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("kind", CONFIGS)
def test_models_that_keep_examples_apart_pass(kind, dtype):
    model = a_model(kind, "padding_free", dtype)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    random = torch.get_rng_state()
    check_no_leak(model)
    assert model.training and torch.equal(random, torch.get_rng_state())
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def test_a_loss_may_call_the_model_on_other_tokens_too():
    """`loss_sum` does so once, to try the output layer."""
    model = a_model("llama", "padding_free", torch.float64)

    def loss(model, inputs):
        model(input_ids=torch.tensor([[3, 4, 5]]), use_cache=False)
        return token_losses(model, inputs).mean()

    use_padding_free(model)
    check_no_leak(model, collator=PaddingFreeCollator(model), loss=loss)


def test_the_probe_has_a_reference_of_its_own():
    """A mask that is wrong for an example alone as well."""

    def one_token_is_all_you_see(examples):
        inputs = joined(examples)
        return {**inputs, "attention_mask": torch.eye(inputs["input_ids"].shape[1], dtype=torch.bool)[None, None]}

    with refused("LlamaForCausalLM", "example 1"):
        check_no_leak(a_model(), collator=one_token_is_all_you_see)


EXPERTS = {"num_key_value_heads": 1, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
MIXTURES = {
    "mixtral": ("MixtralConfig", {"num_key_value_heads": 1, "num_local_experts": 4}),
    "qwen2_moe": ("Qwen2MoeConfig", {**EXPERTS, "shared_expert_intermediate_size": 16}),
    "qwen3_moe": ("Qwen3MoeConfig", {**EXPERTS, "head_dim": 8}),
}


@pytest.mark.parametrize("kind", sample(MIXTURES, 1))
def test_mixtures_of_experts_pass_whatever_their_weights(kind):
    """Other tokens in front send others to the same expert, whose sums then round anew: not equal bits, and no leak."""
    name, settings_ = MIXTURES[kind]
    if not hasattr(transformers, name):
        pytest.skip(f"this Transformers has no {name}")
    for seed in range(2):
        for dtype in (torch.float32, torch.bfloat16):
            torch.manual_seed(seed)
            model = transformers.AutoModelForCausalLM.from_config(getattr(transformers, name)(**SIZE, **settings_)).to(
                dtype
            )
            if seed:  # larger ones than new models have
                with torch.no_grad():
                    for parameter in model.parameters():
                        parameter.add_(torch.randn(parameter.shape, dtype=dtype) * 0.3)
            use_padding_free(model)


@pytest.mark.parametrize("dtype", [slow(torch.float32), torch.bfloat16], ids=str)
def test_a_small_leak_is_refused_in_any_type(dtype):
    """A new LFM2's convolution changes the next example's logits by a hundredth: less than bfloat16's tolerance."""
    if not hasattr(transformers, "Lfm2Config"):
        pytest.skip("this Transformers has no Lfm2Config")
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(
        transformers.Lfm2Config(
            **{**SIZE, "hidden_size": 64}, num_key_value_heads=1, layer_types=["conv", "full_attention"]
        )
    )
    with refused("Lfm2ForCausalLM", "first in model.layers.0.conv "):
        use_padding_free(model.to(dtype))


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=str)
def test_attention_across_examples_is_refused(dtype):
    def without_mask(model, inputs):
        return model(
            input_ids=inputs["input_ids"], position_ids=inputs["position_ids"]
        ).logits  # with a cache: no boundaries

    with refused("example 1", "first in model.layers.0.self_attn ", "use_padding_free"):
        check_no_leak(a_model(dtype=dtype), forward=without_mask, collator=joined)


def without_positions(model, inputs):
    return model(input_ids=inputs["input_ids"], attention_mask=inputs["attention_mask"], use_cache=False).logits


def test_ignored_position_ids_are_refused():
    model = a_model("gpt2")  # absolute positions: what is not reset is wrong
    with refused("first in transformer.wpe ", "RandomSampling+Padding"):
        check_no_leak(model, forward=without_positions, collator=masked)
    # Rotary positions are relative, and the mask keeps the examples apart: nothing is wrong then.
    check_no_leak(a_model("llama"), forward=without_positions, collator=masked)


def test_positions_made_elsewhere_are_refused():
    def shifted(model, inputs):
        stretched = inputs["position_ids"] + (inputs["position_ids"] > 2) * inputs["input_ids"].shape[1]
        return logits_of(model, {**inputs, "position_ids": stretched})

    with refused("token 3 ", "first in model.rotary_emb "):
        check_no_leak(a_model(), forward=shifted, collator=masked)


def test_a_model_without_position_ids_is_refused_in_one_line():
    config = transformers.BloomConfig(vocab_size=50, hidden_size=16, n_layer=1, n_head=2)
    model = transformers.AutoModelForCausalLM.from_config(config)
    with refused("BloomForCausalLM", "ignores position_ids", "use_padding_free"):
        check_no_leak(model, collator=joined)


def test_a_leak_of_training_mode_alone_is_refused():
    """Dropout, which makes all logits random, is switched off for the comparison."""
    model = a_model("llama")
    model.config.attention_dropout = 0.5
    for layer in model.model.layers:
        layer.self_attn.attention_dropout = 0.5
    assert use_padding_free(model.train()).attention == "padding_free" and model.training
    whole = model.model.layers[1].mlp

    def mixing(module, given, output):
        return output + 0.1 * output.mean(dim=1, keepdim=True) if module.training else output

    whole.register_forward_hook(mixing)
    with refused("LlamaForCausalLM", "evaluation differs from training"):
        check_no_leak(model)
    assert model.training and all(module.training for module in model.modules())
    with refused("LlamaForCausalLM", "evaluation differs from training"):  # models are loaded in evaluation mode
        check_no_leak(model.eval())


@pytest.mark.parametrize(
    "changed",
    [
        lambda logits: logits + logits.mean(dim=1, keepdim=True) - logits.mean(dim=1, keepdim=True).detach(),
        lambda logits: (logits + logits.detach()) / 2,
    ],
    ids=["across examples", "by half"],
)
def test_wrong_gradients_are_refused_though_the_logits_are_right(changed):
    with refused("example 1", "gradients"):
        check_no_leak(
            a_model(attention="padding_free"), forward=lambda model, inputs: changed(logits_of(model, inputs))
        )


@pytest.mark.parametrize("kind", ["llama", "gpt2"])
def test_gradients_of_the_model_stay_as_they_are(kind):
    model = a_model(kind, "padding_free")
    parameter = next(model.parameters())
    parameter.grad = torch.ones_like(parameter)
    check_no_leak(model)
    others = [each.grad for each in model.parameters() if each is not parameter]
    assert torch.equal(parameter.grad, torch.ones_like(parameter)) and all(each is None for each in others)


@pytest.mark.parametrize("positions", [2, slow(3), slow(7), 12])
def test_few_positions_are_enough(positions):
    config = transformers.GPT2Config(vocab_size=50, n_embd=16, n_layer=1, n_head=2, n_positions=positions)
    model = transformers.AutoModelForCausalLM.from_config(config)
    use_padding_free(model)
    with refused("GPT2LMHeadModel", "example"):
        check_no_leak(model, forward=without_positions, collator=masked)


def test_a_window_that_the_attention_ignores_is_refused_unless_no_example_is_so_long(monkeypatch):
    model = a_windowed_model("mistral")
    use_padding_free(model)
    monkeypatch.setattr(attention, "_reach_of", lambda module, window: (None, None))
    for longest in (None, 2 * WINDOW):
        with refused(f"sliding_window is {WINDOW}", "first in model.layers.0.self_attn ", f"at most {WINDOW} tokens"):
            check_no_leak(model, longest=longest)
    check_no_leak(model, longest=WINDOW)


@pytest.mark.parametrize("family", ["phi3, long positions", "llama, dynamic positions"])
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
    assert [each.tokens for each in far_settings(config)] == [5, 7, 9]
    assert far_settings(SimpleNamespace(rope_parameters={"rope_type": "llama3"}, max_position_embeddings=8)) == []


class Adapted(torch.nn.Module):
    """Wrap a model as PEFT does."""

    def __init__(self, model):
        super().__init__()
        self.inside, self.config = model, model.config

    def get_base_model(self):
        return self.inside

    def forward(self, *arguments, **named):
        return self.inside(*arguments, **named)


@pytest.fixture
def one_process():
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()


def _sharded(model):
    fully_shard = pytest.importorskip("torch.distributed.fsdp", reason="no FSDP").fully_shard
    for layer in model.model.layers:
        fully_shard(layer)
    return fully_shard(model)


WRAPPERS = {
    "DDP": torch.nn.parallel.DistributedDataParallel,
    "compiled": lambda model: torch.compile(model, backend="eager"),
    "PEFT": Adapted,
    "PEFT in DDP": lambda model: torch.nn.parallel.DistributedDataParallel(Adapted(model)),
    "FSDP2": _sharded,
}


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # torch's own, where it loads what it compiles with
@pytest.mark.parametrize("wrapper", [slow(each) if each == "compiled" else each for each in WRAPPERS])
def test_wrapped_models_are_switched_and_probed(wrapper, one_process):
    model = a_model(dtype=torch.float32)
    wrapped = WRAPPERS[wrapper](model)
    assert use_padding_free(wrapped) == ("padding_free", "cu_seq_lens", False)
    assert model.config._attn_implementation == "padding_free"
    inputs = PaddingFreeCollator(wrapped)(some_examples(1, [3, 4]))
    assert inputs["cu_seq_lens_q"].tolist() == [0, 3, 7]
    model.model.layers[1].mlp.register_forward_hook(lambda module, given, output: output + output.mean(1, keepdim=True))
    with refused("model.layers.1.mlp (LlamaMLP)", "example"):
        check_no_leak(wrapped)


def test_a_model_in_fsdp1_is_refused_and_one_that_was_switched_before_gets_its_boundaries():
    class FullyShardedDataParallel(torch.nn.Module):
        """By the name of torch's class, which wants another device than a CPU."""

        def __init__(self, module):
            super().__init__()
            self.module = module

    model = FullyShardedDataParallel(a_model(dtype=torch.float32))
    for call in (use_padding_free, check_no_leak):
        with refused("FullyShardedDataParallel", "fully_shard"):
            call(model)
    use_padding_free(model.module)
    assert PaddingFreeCollator(model)(some_examples(1, [3, 4]))["cu_seq_lens_q"].tolist() == [0, 3, 7]


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
    model, reference = families.build("lfm2"), families.build("lfm2")
    assert use_padding_free(model) == ("padding_free", "cu_seq_lens", True)
    examples = some_examples(3, [5, 2, 9])
    with torch.no_grad():
        found = token_losses(model, PaddingFreeCollator(model)(examples))
    expected = torch.cat([alone(reference, example) for example in examples])
    assert float((found - expected).abs().max()) < 1e-5
