"""Causal models on padding-free batches: every token's loss is the padded one's; what leaks is refused; updates by their tokens."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections import Counter
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import multiprocessing
from torch.nn import functional as F

transformers = pytest.importorskip("transformers", minversion="4.48", reason="causal models are Hugging Face's: pip install 'transformers>=4.48'")

from ipu_packed_bert.padding_free import collators, probe  # noqa: E402
from ipu_packed_bert.padding_free.collators import Batches, PaddingCollator, PaddingFreeCollator, examples_of, inputs_for, same_example  # noqa: E402
from ipu_packed_bert.padding_free.probe import check_no_leak  # noqa: E402
from ipu_packed_bert.padding_free.update import accumulate, loss_sum, mean_loss, supervised  # noqa: E402
from ipu_packed_bert.padding_free.windows import Reach, attention_reach  # noqa: E402
from pack_data.batching.plans import WAYS, BatchOptions  # noqa: E402
from tests.tolerances import assert_same, relative_error  # noqa: E402

SIZE = {"vocab_size": 50, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32, "max_position_embeddings": 64}
CONFIGS = {
    "llama": lambda: transformers.LlamaConfig(**SIZE),
    "gpt_neox": lambda: transformers.GPTNeoXConfig(**SIZE),
    "qwen2": lambda: transformers.Qwen2Config(**SIZE, num_key_value_heads=1),
    "gpt2": lambda: transformers.GPT2Config(vocab_size=50, n_embd=16, n_layer=2, n_head=2, n_positions=64, attn_pdrop=0.0, resid_pdrop=0.0,
                                            embd_pdrop=0.0, bos_token_id=1, eos_token_id=1),
}


def a_model(kind="llama", attention="sdpa", dtype=torch.float64):
    """Weights so large that what a token attends to matters to its logits."""
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(CONFIGS[kind](), attn_implementation=attention).to(dtype)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn(parameter.shape, dtype=dtype) * 0.3)
    return model


def alone(model, example):
    """Losses of one example's tokens by a plain call of the model, without anything of ours."""
    ids = torch.as_tensor(example["input_ids"])
    with torch.no_grad():
        return F.cross_entropy(model(ids[None]).logits[0, :-1], ids[1:], reduction="none")


def some_examples(seed, lengths):
    rng = np.random.default_rng(seed)
    return examples_of([rng.integers(1, 50, length) for length in lengths])


def token_losses(model, inputs):
    """By example in order: float64 [supervised tokens]."""
    logits = model(**{name: value for name, value in inputs.items() if name != "labels"}, use_cache=False).logits[:, :-1]
    labels = inputs["labels"][:, 1:]
    losses = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=-100, reduction="none")
    return losses[labels.flatten() != -100]


@pytest.mark.parametrize("kind", CONFIGS)
@settings(max_examples=8)
@given(seed=st.integers(0, 2**32 - 1), lengths=st.lists(st.integers(1, 12), min_size=1, max_size=5))
def test_every_token_has_the_loss_of_the_padded_batch(kind, seed, lengths):
    model, examples = a_model(kind), some_examples(seed, lengths + [3])
    with torch.no_grad():
        free, padded = token_losses(model, PaddingFreeCollator(model)(examples)), token_losses(model, PaddingCollator()(examples))
    assert len(free) == len(padded) == sum(lengths) + 3 - len(lengths) - 1
    assert float((free - padded).abs().max()) <= 1e-9 * float(padded.abs().max())


@pytest.mark.parametrize("kind", ["llama", "gpt_neox"])
def test_gradients_are_those_of_the_padded_batch(kind):
    found = []
    for collator in (PaddingFreeCollator(a_model(kind)), PaddingCollator()):
        model = a_model(kind)
        accumulate(model, [collator(some_examples(3, [9, 2, 12, 5]))])
        # The gradient of a bias of the keys is zero but for rounding.
        found.append([parameter.grad for parameter in model.parameters() if float(parameter.grad.norm()) > 1e-9])
    assert relative_error(*found) <= 1e-9


def test_in_eager_code_up_to_its_float32_softmax():
    model, examples = a_model(attention="eager"), some_examples(4, [9, 2, 12, 5])
    with torch.no_grad():
        free, padded = token_losses(model, PaddingFreeCollator(model)(examples)), token_losses(model, PaddingCollator()(examples))
    assert float((free - padded).abs().max()) <= 1e-5 * float(padded.abs().max())


def test_flash_kernels_get_the_boundaries_and_no_mask():
    model = a_model()
    model.config._attn_implementation = "flash_attention_2"
    inputs = PaddingFreeCollator(model)(some_examples(1, [4, 2, 3]))
    assert set(inputs) == {"input_ids", "labels", "position_ids", "cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k"}
    assert inputs["cu_seq_lens_q"].tolist() == [0, 4, 6, 9] and inputs["cu_seq_lens_q"].dtype == torch.int32
    assert inputs["max_length_q"] == inputs["max_length_k"] == 4


def test_the_mask_by_hand():
    """Examples of two, one and two tokens."""
    mask = same_example(torch.tensor([[0, 1, 0, 0, 1]]))
    assert mask.int().tolist() == [[[[1, 0, 0, 0, 0], [1, 1, 0, 0, 0], [0, 0, 1, 0, 0], [0, 0, 0, 1, 0], [0, 0, 0, 1, 1]]]]


@pytest.mark.parametrize("way", WAYS)
def test_an_epoch_has_the_same_loss_by_every_way_that_keeps_examples_whole(way):
    """Over an epoch every example is seen once, whatever it shares a batch with; broken or mixed ones are something else."""
    model, dataset = a_model(), some_examples(7, [9, 4, 12, 5, 2, 7, 11, 3, 6])
    alone = mean_loss(model, [PaddingCollator()([example]) for example in dataset])
    batches = Batches(way, dataset, BatchOptions(2, 12, seed=3), model)
    found = mean_loss(model, list(batches))
    if way.startswith("FixedLengthPacking"):
        assert abs(found - alone) > 1e-3 * alone
    else:
        assert found == pytest.approx(alone, rel=1e-12)


def test_batches_go_on_where_they_were():
    dataset, model = some_examples(7, [9, 4, 12, 5, 2, 7, 11, 3, 6]), a_model()
    options = BatchOptions(2, 12, seed=3)
    first = Batches("Multipack+PosID", dataset, options, model)
    seen = iter(first)
    next(seen)
    state, rest = first.state(), [inputs["input_ids"] for inputs in seen]
    second = Batches("Multipack+PosID", dataset, options, model)
    second.load_state(state)
    again = [inputs["input_ids"] for inputs in second]
    assert len(rest) == len(again) > 0 and all(torch.equal(a, b) for a, b in zip(rest, again))


@pytest.mark.parametrize("ranks", [1, 2, 3])
@pytest.mark.parametrize("way", [way for way in WAYS if not way.startswith("FixedLengthPacking")])
def test_every_rank_and_epoch_counts_every_example_once(way, ranks):
    """Each token says whose it is; two epochs, in an order of their own."""
    lengths = np.random.default_rng(5).integers(2, 13, 29)
    dataset, model = examples_of([np.full(length, 1 + number) for number, length in enumerate(lengths)]), a_model()
    of_ranks = [Batches(way, dataset, BatchOptions(2, 12, ranks, seed=3), model, rank=rank) for rank in range(ranks)]
    orders = []
    for _ in range(2):
        found = [[inputs["input_ids"].flatten().tolist() for inputs in batches] for batches in of_ranks]
        tokens = Counter(token for batches in found for ids in batches for token in ids if token)
        assert tokens == {1 + number: length for number, length in enumerate(lengths)}
        assert len({len(batches) for batches in found}) == 1
        orders.append(found)
    assert orders[0] != orders[1]


@pytest.mark.parametrize("workers", [0, 1])
def test_a_data_loader_is_refused(workers):
    """Two workers gave every batch twice, one the same order in every epoch, Accelerate on two ranks half of each rank's batches."""
    batches = Batches("RandomPacking+PosID", some_examples(7, [9, 4, 12]), BatchOptions(1, 12), a_model())
    with pytest.raises(ValueError, match="iterate over them directly"):
        next(iter(torch.utils.data.DataLoader(batches, batch_size=None, num_workers=workers)))


def test_the_workers_of_an_iterable_around_them_are_refused(monkeypatch):
    batches = Batches("RandomPacking+PosID", some_examples(7, [9, 4, 12]), BatchOptions(1, 12), a_model())
    assert len(list(batches)) == 3
    monkeypatch.setattr(collators, "get_worker_info", lambda: SimpleNamespace(id=0, num_workers=1))
    with pytest.raises(ValueError, match="iterate over them directly"):
        list(batches)


# ---- windows and chunks --------------------------------------------------------------------------------------------------------

WINDOW = 5
WINDOWED = {  # family: its configuration with a window or chunks of five tokens, and the attention that it runs with
    "mistral": ("MistralConfig", {"num_key_value_heads": 1, "sliding_window": WINDOW}, "sdpa"),
    "qwen2": ("Qwen2Config", {"num_key_value_heads": 1, "sliding_window": WINDOW, "use_sliding_window": True, "max_window_layers": 1}, "sdpa"),
    "gemma2": ("Gemma2Config", {"num_key_value_heads": 1, "head_dim": 8, "sliding_window": WINDOW}, "eager"),
    "gemma3": ("Gemma3TextConfig", {"num_key_value_heads": 1, "head_dim": 8, "sliding_window": WINDOW}, "sdpa"),
    "olmo3": ("Olmo3Config", {"sliding_window": WINDOW}, "sdpa"),
    "llama4": ("Llama4TextConfig", {"num_key_value_heads": 1, "head_dim": 8, "attention_chunk_size": WINDOW, "num_local_experts": 2,
                                    "intermediate_size_mlp": 32}, "sdpa"),
}


def a_windowed_model(kind, **changes):
    name, settings_, attention = WINDOWED[kind]
    if not hasattr(transformers, name):
        pytest.skip(f"this Transformers has no {name}")
    config = getattr(transformers, name)(**{**SIZE, **settings_, "pad_token_id": 0, **changes})
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation=attention).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn(parameter.shape) * 0.3)
    return model


def packed_error(model, examples):
    """Largest difference of a token's loss in one row from the loss of its example alone."""
    with torch.no_grad():
        found = token_losses(model, PaddingFreeCollator(model)(examples))
    return float((found - torch.cat([alone(model, example) for example in examples])).abs().max())


@pytest.mark.parametrize("kind", WINDOWED)
def test_examples_up_to_the_window_are_right_and_longer_ones_refused(kind, monkeypatch):
    model = a_windowed_model(kind)
    short, long = some_examples(4, [5, 3, 5, 2]), some_examples(4, [3, 12, 5])
    assert packed_error(model, short) < 1e-4
    with pytest.raises(ValueError, match=f"an example has 12 tokens, .* is {WINDOW}.*padding way") as caught:
        PaddingFreeCollator(model)(long)
    assert "\n" not in str(caught.value)
    # What the refusal prevents: the one mask of all layers has no window.
    monkeypatch.setattr(collators, "attention_reach", lambda config: None)
    assert packed_error(model, long) > 1e-2


@pytest.mark.parametrize("kind", WINDOWED)
def test_the_probe_refuses_what_exceeds_the_window(kind):
    model = a_windowed_model(kind)
    for longest in (None, WINDOW + 1):
        with pytest.raises(ValueError, match=f"is {WINDOW}, and the mask .*longest=N") as caught:
            check_no_leak(model, longest=longest)
        assert "\n" not in str(caught.value)
    check_no_leak(model, longest=WINDOW)
    check_no_leak(model, longest=2)


def test_a_window_as_long_as_the_model_is_none():
    check_no_leak(a_windowed_model("mistral", sliding_window=SIZE["max_position_embeddings"]))


def test_flash_kernels_know_the_window():
    model = a_windowed_model("mistral")
    model.config._attn_implementation = "flash_attention_2"
    assert PaddingFreeCollator(model)(some_examples(1, [12, 2]))["max_length_q"] == 12
    probe.check_window(model)


@pytest.mark.parametrize("config, expected", [
    ({}, None),
    ({"sliding_window": None}, None),
    ({"sliding_window": 8}, Reach(8, "sliding_window")),
    ({"sliding_window": 8, "use_sliding_window": False}, None),
    ({"sliding_window": 8, "use_sliding_window": True, "max_window_layers": 2, "num_hidden_layers": 3}, Reach(8, "sliding_window")),
    ({"sliding_window": 8, "use_sliding_window": True, "max_window_layers": 3, "num_hidden_layers": 3}, None),
    ({"sliding_window": 8, "layer_types": ["full_attention"]}, None),
    ({"sliding_window": 8, "layer_types": ["full_attention", "sliding_attention"]}, Reach(8, "sliding_window")),
    ({"sliding_window": 8, "attention_chunk_size": 6}, Reach(6, "attention_chunk_size")),
    ({"attention_chunk_size": 6, "layer_types": ["full_attention", "full_attention"]}, None),
    ({"attention_chunk_size": 6, "layer_types": ["chunked_attention", "full_attention"]}, Reach(6, "attention_chunk_size")),
])
def test_which_settings_shorten_the_attention(config, expected):
    assert attention_reach(SimpleNamespace(**config)) == expected


def test_the_probe_has_a_reference_of_its_own(monkeypatch):
    """A mask that is wrong for an example alone as well, as that without a window is."""
    def one_token_is_all_you_see(model, batch):
        inputs = inputs_for(model, batch)
        return {**inputs, "attention_mask": torch.eye(inputs["input_ids"].shape[1], dtype=torch.bool)[None, None]}

    monkeypatch.setattr(probe, "inputs_for", one_token_is_all_you_see)
    with pytest.raises(ValueError, match="otherwise than alone"):
        check_no_leak(a_model())


MIXTURES = {
    "mixtral": ("MixtralConfig", {"num_key_value_heads": 1, "num_local_experts": 4}),
    "qwen2_moe": ("Qwen2MoeConfig", {"num_key_value_heads": 1, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16,
                                     "shared_expert_intermediate_size": 16}),
    "qwen3_moe": ("Qwen3MoeConfig", {"num_key_value_heads": 1, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "head_dim": 8}),
}


@pytest.mark.parametrize("kind", MIXTURES)
def test_mixtures_of_experts_pass_whatever_their_weights(kind):
    """Other tokens in front send others to the same expert, whose sums then round anew: not equal bits, and no leak."""
    name, settings_ = MIXTURES[kind]
    if not hasattr(transformers, name):
        pytest.skip(f"this Transformers has no {name}")
    for seed in range(4):
        for dtype in (torch.float32, torch.bfloat16):
            torch.manual_seed(seed)
            model = transformers.AutoModelForCausalLM.from_config(getattr(transformers, name)(**SIZE, **settings_)).to(dtype)
            check_no_leak(model)
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.add_(torch.randn(parameter.shape, dtype=dtype) * 0.3)
            check_no_leak(model)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_small_leak_is_refused_in_any_type(dtype):
    """A new LFM2's convolution changes the next example's logits by about a hundredth: less than bfloat16's tolerance."""
    if not hasattr(transformers, "Lfm2Config"):
        pytest.skip("this Transformers has no Lfm2Config")
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(transformers.Lfm2Config(**{**SIZE, "hidden_size": 64}, num_key_value_heads=1, layer_types=["conv", "full_attention"]))
    with pytest.raises(ValueError, match="change with the example before it"):
        check_no_leak(model.to(dtype))


# ---- the probe -----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("kind", CONFIGS)
def test_models_that_keep_examples_apart_pass(kind, dtype):
    model = a_model(kind, dtype=dtype)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    random = torch.get_rng_state()
    check_no_leak(model)
    assert model.training and torch.equal(random, torch.get_rng_state())
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def test_public_names_are_loaded_on_use():
    """The import that README shows; the package alone loads no torch."""
    from ipu_packed_bert.padding_free import PaddingFreeCollator as collator
    from ipu_packed_bert.padding_free import check_no_leak as found

    assert found is check_no_leak and collator is PaddingFreeCollator
    alone_ = "import sys, ipu_packed_bert.padding_free as package; assert 'torch' not in sys.modules; assert all(getattr(package, name) for name in package.__all__)"
    done = subprocess.run([sys.executable, "-c", alone_], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_eager_models_pass():
    check_no_leak(a_model(attention="eager"))


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=str)
def test_attention_across_examples_is_refused(dtype):
    def without_mask(model, inputs):
        return model(input_ids=inputs["input_ids"], position_ids=inputs["position_ids"]).logits  # with a cache: no boundaries

    with pytest.raises(ValueError, match="change with the example before it.*use_cache=False") as caught:
        check_no_leak(a_model(dtype=dtype), forward=without_mask)
    assert "\n" not in str(caught.value)


def test_ignored_position_ids_are_refused():
    def without_positions(model, inputs):
        return model(input_ids=inputs["input_ids"], attention_mask=inputs["attention_mask"], use_cache=False).logits

    model = a_model("gpt2")  # absolute positions: what is not reset is wrong
    with pytest.raises(ValueError, match="position_ids are ignored.*padding way"):
        check_no_leak(model, forward=without_positions)
    # Rotary positions are relative, and the mask keeps the examples apart: nothing is wrong then.
    check_no_leak(a_model("llama"), forward=without_positions)


def test_positions_made_elsewhere_are_refused():
    def shifted(model, inputs):
        stretched = inputs["position_ids"] + (inputs["position_ids"] > 2) * inputs["input_ids"].shape[1]
        return model(input_ids=inputs["input_ids"], position_ids=stretched, attention_mask=inputs["attention_mask"], use_cache=False).logits

    with pytest.raises(ValueError, match="do not follow from position_ids alone"):
        check_no_leak(a_model(), forward=shifted)


def test_a_model_without_position_ids_is_refused_in_one_line():
    config = transformers.BloomConfig(vocab_size=50, hidden_size=16, n_layer=1, n_head=2)
    model = transformers.AutoModelForCausalLM.from_config(config)
    with pytest.raises(ValueError, match="BloomForCausalLM: .*padding way") as caught:
        check_no_leak(model)
    assert "\n" not in str(caught.value)


# ---- updates -------------------------------------------------------------------------------------------------------------------

LENGTHS = [9, 2, 12, 5, 3, 11]


def gradients(model):
    return [parameter.grad for parameter in model.parameters()]


def micro_batches(model, cuts):
    examples = some_examples(3, LENGTHS)
    return [PaddingFreeCollator(model)(examples[begin:end]) for begin, end in zip([0] + cuts, cuts + [len(examples)])]


def test_an_update_is_the_same_however_it_is_cut():
    whole, cut, means = a_model(), a_model(), a_model()
    result = accumulate(whole, micro_batches(whole, []))
    again = accumulate(cut, micro_batches(cut, [1, 4]))
    assert result.supervised_tokens == again.supervised_tokens == sum(LENGTHS) - len(LENGTHS)
    assert again.loss == pytest.approx(result.loss, rel=1e-12)
    assert_same(found=gradients(cut), expected=gradients(whole), dtype=torch.float64)
    for inputs in micro_batches(means, [1, 4]):  # the usual mean of means is another update
        (loss_sum(means, inputs) / supervised(inputs["labels"]) / 3).backward()
    assert relative_error(gradients(means), gradients(whole)) > 0.05


def test_an_update_without_a_supervised_token_adds_nothing():
    model = a_model()
    assert accumulate(model, [PaddingFreeCollator(model)([]), PaddingCollator()(some_examples(1, [1]))]) == (0.0, 0)
    assert all(gradient is None for gradient in gradients(model))


def one_rank(rank, port, folder):
    """Both ways to train on several devices, in one process group: its start is what takes time."""
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo", rank=rank, world_size=2)
    for wrapped in (True, False):
        model = a_model()
        shares = micro_batches(model, [1, 4])  # 8, 1 + 11 + 4 and 2 + 10 tokens: unequal, and so is their number without DDP
        mine = [shares[:2], shares[2:] + [PaddingFreeCollator(model)([])]] if wrapped else [shares[:1], shares[1:]]
        result = accumulate(torch.nn.parallel.DistributedDataParallel(model) if wrapped else model, mine[rank])
        torch.save({"loss": result.loss, "tokens": result.supervised_tokens, "gradients": gradients(model)}, folder / f"{rank}-{wrapped}.pt")
    torch.distributed.destroy_process_group()


def test_two_ranks_make_the_update_of_one(tmp_path):
    alone = a_model()
    expected = accumulate(alone, micro_batches(alone, []))
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    multiprocessing.spawn(one_rank, (port, tmp_path), nprocs=2)
    files = sorted(tmp_path.glob("*.pt"))
    assert len(files) == 4
    for path in files:
        found = torch.load(path, weights_only=True)
        assert found["loss"] == pytest.approx(expected.loss, rel=1e-12) and found["tokens"] == expected.supervised_tokens
        assert_same(found=found["gradients"], expected=gradients(alone), dtype=torch.float64)
