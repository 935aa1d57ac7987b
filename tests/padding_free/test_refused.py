"""Models, trainers, collators, batches and calls that are refused, each in one line that names the cause.

Faults of models are in `tests/padding_free_faults.py`; here are those whose message names a layer, an input or a
setting.
"""

# ruff: noqa: F401  names that the tables use

from types import SimpleNamespace

import pytest
import torch

from padding_free import (
    PaddingCollator,
    PaddingFreeCollator,
    accumulate,
    attention,
    check_no_leak,
    choice,
    mean_loss,
    pack_into,
    use_padding_free,
)
from padding_free.check_model_command import _examples
from padding_free.leaks.probe import audit_batch
from padding_free.losses import logits_of
from padding_free.models import Leak, attention_of, choice_of, refuse_unfit
from padding_free.streams import PackedStream
from padding_free.trainers import WAYS_OF_EQUAL_EPOCHS, _EndlessPacks, _JoiningCollator
from tests.padding_free_models import SIZE, a_model, families, some_examples, transformers
from tests.refusals import faults_of_refusals, refused

# ---- trainers


class ATrainer:
    """The attributes that `pack_into` reads before it changes anything."""

    def __init__(self, **changes):
        arguments = {"dataloader_num_workers": 0, "packing": False, "n_gpu": 1, "max_length": None}
        arguments["train_sampling_strategy"] = "random"
        layout = SimpleNamespace(tp_size=1, cp_size=changes.pop("cp_size", 1), sp_size=None)
        self.args = SimpleNamespace(**{name: changes.pop(name, value) for name, value in arguments.items()})
        self.accelerator = SimpleNamespace(parallelism_config=layout, is_main_process=True)
        self.train_dataset = [{"input_ids": [3, 4, 5, 6]}]
        self.model = a_model()
        self.label_smoother = None
        vars(self).update(changes)

    def get_train_dataloader(self):
        return SimpleNamespace(dataset=self.train_dataset)


class Pairs(list):
    column_names = ["prompt_ids", "chosen_ids", "rejected_ids"]


class Stream(torch.utils.data.IterableDataset):
    def __iter__(self):
        """May share its examples out to workers by itself."""


def one_answer():
    return transformers.AutoModelForSequenceClassification.from_config(transformers.LlamaConfig(**SIZE, pad_token_id=0))


def joined_row(most, example=None, **changes):
    """Join two equal examples after a collator whose batches are changed."""
    of_one = {"input_ids": [[3, 4, 5]], "labels": [[3, 4, 5]], "attention_mask": [[1, 1, 1]], **changes}

    def collator(examples):
        return {name: values and values * len(examples) for name, values in of_one.items()}

    joining = _JoiningCollator(collator, a_model(attention="padding_free"), most, masks=["loss_mask"])
    return joining([example or {}] * 2)


TRAINERS = [
    ('pack_into("gpt2")', ["str", "SFTTrainer"]),
    ("pack_into(a_model())", ["LlamaForCausalLM", "SFTTrainer"]),
    ("pack_into(ATrainer(train_dataset=Pairs()))", ["input_ids", "prompt_ids, chosen_ids, rejected_ids"]),
    ("pack_into(ATrainer(model=one_answer()))", ["LlamaForSequenceClassification", "one answer"]),
    ("pack_into(ATrainer(train_dataset=None))", ["train_dataset"]),
    ("pack_into(ATrainer(train_dataset=Stream(), dataloader_num_workers=1))", ["dataloader_num_workers=0"]),
    ("pack_into(ATrainer(_get_train_sampler=one_answer))", ["_get_train_sampler", "train_dataset"]),
    ('pack_into(ATrainer(train_sampling_strategy="sequential"))', ["sequential", "random"]),
    ("pack_into(ATrainer(packing=True))", ["packing=True", "packing=False"]),
    ("pack_into(ATrainer(n_gpu=2))", ["2 GPUs", "torchrun"]),
    ("pack_into(ATrainer(get_train_dataloader=None))", ["pack_into", "already"]),
    ("pack_into(ATrainer(label_smoother=lambda output, labels: None))", ["label_smoothing_factor", "0", "5.15"]),
    ("pack_into(ATrainer(cp_size=2))", ["tensor, context or sequence parallelism"]),
    ('pack_into(ATrainer(), way="FixedLengthPacking+PosID")', ["FixedLengthPacking", *WAYS_OF_EQUAL_EPOCHS]),
    ('pack_into(ATrainer(), way="RandomSampling+Padding")', ["RandomSampling", *WAYS_OF_EQUAL_EPOCHS]),
    ('pack_into(ATrainer(), way="RandomPacking+PosID")', ["RandomPacking", *WAYS_OF_EQUAL_EPOCHS]),
    ("pack_into(ATrainer(), way=WAYS_OF_EQUAL_EPOCHS[0])", ["max_sequence_length", "max_length"]),
    ("pack_into(ATrainer(max_length=8), check=False)", ["sdpa", "use_padding_free"]),
    ("pack_into(ATrainer(train_dataset=[[3, 4]]))", ["train_dataset", "input_ids"]),
    ("joined_row(5)", ["6 tokens", "5 are planned"]),
    ("joined_row(6, pixel_values=[0.0])", ["pixel_values", "data set"]),
    ("joined_row(6, labels=None)", ["labels", "DataCollatorForLanguageModeling"]),
    ('joined_row(6, {"input_ids": [3, 4], "loss_mask": [0, 1]})', ["3 tokens", "2 tokens", "mask of the loss"]),
    ("next(iter(_EndlessPacks(PackedStream([], 8, rank=0, ranks=1), [])))", ["train_dataset", "rank"]),
]


def test_trainers_are_refused():
    assert joined_row(6)["input_ids"].shape == (1, 6)
    assert not faults_of_refusals(TRAINERS, globals())


# ---- calls and batches


class FullyShardedDataParallel(torch.nn.Module):
    """By the name of torch's class, which wants another device than a CPU."""

    def __init__(self, module):
        super().__init__()
        self.module = module


class Shard(torch.nn.Linear):
    def set_requires_gradient_sync(self, on, *, recurse=True):
        """State of a module under FSDP2."""


def accumulated(part):
    accumulate(torch.nn.Sequential(part), [{"labels": torch.zeros(1, 2)}])


def collated_by(attention):
    model = a_model()
    model.config._attn_implementation = attention
    PaddingFreeCollator(model)(some_examples(1, [3, 4]))


def streamed(source, **options):
    list(PackedStream(source, 64, **options))


def resumed_elsewhere():
    """Save a stream on rank 0 and load it on rank 1."""
    source = some_examples(0, [9] * 30)
    first = PackedStream(source, 64, rank=0, ranks=2)
    next(iter(first))
    second = PackedStream(source, 64, rank=1, ranks=2)
    second.load_state_dict(first.state_dict())
    next(iter(second))


IDS = torch.ones(2, 3, dtype=torch.long)
CALLS = [
    ('check_no_leak("bert-base-uncased")', ["str", "loaded torch.nn.Module"]),
    ('use_padding_free("bert-base-uncased")', ["str", "loaded torch.nn.Module"]),
    ("check_no_leak(transformers.LlamaForCausalLM)", ["type", "loaded torch.nn.Module"]),
    ('check_no_leak(a_model(), mean="row")', ["mean", "'row'", "token", "example"]),
    ("check_no_leak(FullyShardedDataParallel(a_model()))", ["FullyShardedDataParallel", "fully_shard"]),
    ("use_padding_free(FullyShardedDataParallel(a_model()))", ["FullyShardedDataParallel", "fully_shard"]),
    ('audit_batch(a_model(), {"input_ids": IDS, "labels": IDS})', ["position_ids", "one row"]),
    ("mean_loss(a_model(), [PaddingCollator()(some_examples(1, [1]))])", ["no token", "-100"]),
    ("accumulated(FullyShardedDataParallel(torch.nn.Linear(2, 2)))", ["FullyShardedDataParallel", "fully_shard"]),
    ("accumulated(Shard(2, 2))", ["weight", "fully_shard"]),
    ('collated_by("sdpa")', ["LlamaForCausalLM", 'attn_implementation="sdpa"', "use_padding_free"]),
    ('collated_by("flex_attention")', ["LlamaForCausalLM", 'attn_implementation="flex_attention"']),
    ('PaddingFreeCollator(a_model(attention="padding_free"), slots=6)(some_examples(4, [3, 4]))', ["7 tokens", "6"]),
    ("PaddingFreeCollator(families.build('bert, masked'), slots=80)", ["attends to both sides", "slots"]),
    ("streamed(iter([]))", ["source", "iterator"]),
    ("streamed([], rank=1)", ["rank is 1", "ranks is None"]),
    ("streamed([], rank=2, ranks=2)", ["rank", "2"]),
    ('streamed([], share="packs")', ["share", "omit it"]),
    ('streamed([], longer="cut")', ["longer", "cut"]),
    ('streamed([{"input_ids": [1]}, {"input_ids": [1] * 65}])', ["example 1", "65"]),
    ("resumed_elsewhere()", ["state", "ranks and workers"]),
]


def test_calls_are_refused():
    assert not faults_of_refusals(CALLS, globals())


# ---- models


def unfit(**settings):
    model = torch.nn.Module()
    model.config = SimpleNamespace(**settings)
    refuse_unfit(model)


def without_mask(model, inputs):
    """With a cache, the library looks for no boundaries."""
    return model(input_ids=inputs["input_ids"], position_ids=inputs["position_ids"]).logits


def without_positions(model, inputs):
    return model(input_ids=inputs["input_ids"], attention_mask=inputs["attention_mask"], use_cache=False).logits


def shifted(model, inputs):
    """Positions behind the third token of an example go on elsewhere."""
    stretched = inputs["position_ids"] + (inputs["position_ids"] > 2) * inputs["input_ids"].shape[1]
    return logits_of(model, {**inputs, "position_ids": stretched})


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


def itself_only(examples):
    """A mask that is wrong for an example alone as well."""
    inputs = joined(examples)
    return {**inputs, "attention_mask": torch.eye(inputs["input_ids"].shape[1], dtype=torch.bool)[None, None]}


def bloom():
    return transformers.AutoModelForCausalLM.from_config(
        transformers.BloomConfig(vocab_size=50, hidden_size=16, n_layer=1, n_head=2)
    )


def few_positions():
    config = transformers.GPT2Config(vocab_size=50, n_embd=16, n_layer=1, n_head=2, n_positions=2)
    return transformers.AutoModelForCausalLM.from_config(config)


def three_labels():
    return transformers.BertForTokenClassification(transformers.BertConfig(**SIZE, num_labels=3))


def without_the_first(examples):
    return PaddingFreeCollator(a_model(attention="padding_free"))(examples[1:])


class OneHot(torch.nn.Linear):
    """A model without an embedding."""

    def forward(self, ids, **others):
        return super().forward(torch.nn.functional.one_hot(ids, 4).float())


def two_tokens_at_most():
    """No plain call tells how examples score alone."""

    def refuse(module, arguments):
        if arguments and arguments[0].shape[1] > 2:
            raise RuntimeError("two tokens at most")

    model = a_model()
    model.register_forward_pre_hook(refuse)
    return model


MODELS = [
    (
        "unfit(attn_temperature_tuning=True, floor_scale=64, no_rope_layers=[1, 0])",
        ["place of a token", "floor_scale = 64"],
    ),
    ('unfit(compress_rates={"heavily_compressed_attention": 128})', ["place of a token", "128"]),
    ("unfit(indexer_compress_ratio=4)", ["place of a token", "indexer_compress_ratio = 4"]),
    ("use_padding_free(bloom())", ["AttentionInterface.*padding way"]),
    ("use_padding_free(a_model(), attention='nonsense')", ["nonsense", "padding way"]),
    ("use_padding_free(three_labels(), longest=16, row=32)", ["3 logits per token for 50 words"]),
    ("check_no_leak(OneHot(4, 4))", ["OneHot", "nn.Embedding"]),
    ("check_no_leak(a_model(), collator=without_the_first, longest=9)", ["example 0 of 3 tokens", "collator"]),
    ("check_no_leak(two_tokens_at_most())", ["LlamaForCausalLM", "two tokens at most"]),
    ("check_no_leak(a_model(), collator=itself_only)", ["LlamaForCausalLM", "example 1"], Leak),
    (
        "check_no_leak(a_model(), forward=without_mask, collator=joined)",
        ["example 1", "first in model.layers.0.self_attn ", "use_padding_free"],
        Leak,
    ),
    (
        "check_no_leak(a_model('gpt2'), forward=without_positions, collator=masked)",
        ["first in transformer.wpe ", "RandomSampling"],
        Leak,
    ),
    (
        "check_no_leak(few_positions(), forward=without_positions, collator=masked)",
        ["GPT2LMHeadModel", "example"],
        Leak,
    ),
    ("check_no_leak(a_model(), forward=shifted, collator=masked)", ["token 3 ", "first in model.rotary_emb "], Leak),
    ("check_no_leak(bloom(), collator=joined)", ["BloomForCausalLM", "ignores position_ids", "use_padding_free"], Leak),
]


def test_models_are_refused():
    assert not faults_of_refusals(MODELS, globals())


@pytest.mark.parametrize("make", [bloom, three_labels])
def test_a_refused_model_stays_as_it_was(make):
    model = make()
    before = attention_of(model), choice_of(model)
    with refused(type(model).__name__):
        use_padding_free(model, longest=16, row=32)
    assert (attention_of(model), choice_of(model)) == before


def test_rotary_positions_are_relative_and_may_be_ignored_beside_a_mask():
    check_no_leak(a_model("llama"), forward=without_positions, collator=masked)


def test_settings_that_do_not_go_by_the_place_in_the_row_are_taken():
    unfit(attn_temperature_tuning=True, floor_scale=64, no_rope_layers=[1, 1])
    unfit(attn_temperature_tuning=False, floor_scale=64, no_rope_layers=[0])
    unfit(compress_rates=None, indexer_compress_ratio=None, compress_rope_theta=160000.0)


def test_an_attention_that_transformers_lacks_is_refused(monkeypatch):
    """Ours in an old version; another one without its package."""
    model = a_model()
    monkeypatch.setattr(choice, "REGISTERED", False)
    with refused("padding_free", "Transformers 4.57"):
        use_padding_free(model, attention="padding_free")

    def without_package(kind):
        raise ImportError("the package flex is missing")

    monkeypatch.setattr(model, "set_attn_implementation", without_package, raising=False)
    with refused("flex_attention", "the package flex is missing"):
        use_padding_free(model, attention="flex_attention")


def test_a_kernel_of_half_precision_that_joins_examples_is_refused(monkeypatch):
    """Rows are compared in float32, which another kernel computes."""

    def joined(query, key, value, *_, **__):
        return value.mean(0, keepdim=True).expand(query.shape)

    def kernel(query, value, settings):
        return joined if query.dtype == torch.bfloat16 else None

    model = a_model(attention="padding_free", dtype=torch.bfloat16)
    check_no_leak(model, longest=16)
    monkeypatch.setattr(attention, "_kernel", kernel)
    with refused("example", "scores otherwise than alone.*torch.bfloat16", "first in model.layers.0"):
        check_no_leak(model, longest=16)


# ---- files of check-model

FILES = [
    ("examples_in('')", ["batch.jsonl", "no examples"]),
    ("""examples_in('{"labels": [3]}')""", ["batch.jsonl, line 1", "input_ids"]),
    ("""examples_in('[3]')""", ["batch.jsonl, line 1", "input_ids"]),
    ("""examples_in('{"input_ids": [3]}', '{"input_ids": []}')""", ["batch.jsonl, line 2", "input_ids"]),
    ("""examples_in('{"input_ids": [true]}')""", ["input_ids", "True"]),
    ("""examples_in('{"input_ids": [4294967296]}')""", ["input_ids", "4294967296"]),
    ("""examples_in('{"input_ids": [3, 4], "labels": [3]}')""", ["labels", "2"]),
    ("""examples_in('{"input_ids": [3], "labels": null}')""", ["labels", "None"]),
]


def test_files_of_examples_are_refused(tmp_path):
    def examples_in(*lines):
        path = tmp_path / "batch.jsonl"
        path.write_text("\n".join(lines))
        return _examples(str(path))

    assert not faults_of_refusals(FILES, {"examples_in": examples_in})


# ---- inputs of our attention


def boundaries(*lengths):
    return torch.tensor([0, *lengths]).cumsum(0).int()


TWO_EXAMPLES = boundaries(3, 7)


def attended(keys=10, cu_seq_lens_q=TWO_EXAMPLES, **arguments):
    heads = [torch.zeros(1, 1, tokens, 8) for tokens in (10, keys, keys)]
    layer = SimpleNamespace(is_causal=True, config=SimpleNamespace(sliding_window=4))
    attention._padding_free_attention(layer, *heads, cu_seq_lens_q=cu_seq_lens_q, **arguments)


def called(cu_seq_lens=None, **options):
    """Call a model with the positions of two examples of 3 and 5 tokens."""
    model = a_model(attention="padding_free")
    positions = torch.tensor([[0, 1, 2, 0, 1, 2, 3, 4]])
    model(input_ids=positions + 1, position_ids=positions, cu_seq_lens_q=cu_seq_lens, **options)


ROWS = [
    ("attended(keys=12)", ["10", "12", "cache"]),
    ("attended(cu_seq_lens_q=boundaries(3, 4))", ["cu_seq_lens_q", "from 0 to 10"]),
    ("attended(cu_seq_lens_k=boundaries(4, 6))", ["cu_seq_lens_k", "same"]),
    ("attended(cu_seq_lens_k=boundaries(3, 3, 4))", ["cu_seq_lens_k", "same"]),
    ("attended(block_indices=torch.zeros(1))", ["block_indices", "sdpa"]),
    ("attended(attention_mask=torch.ones(1, 1, 10, 10) > 0)", ["attention_mask"]),
    ("attended(sliding_window=4, is_causal=False)", ["window on both sides", "sdpa"]),
    (
        "attended(cu_seq_lens_q=None, position_ids=torch.arange(10).view(1, 2, 5).repeat(3, 1, 2) % 7)",
        ["position_ids restart"],
    ),
    ("called(use_cache=True)", ["position_ids restart", "use_cache=False"]),
    ("called(boundaries(4, 4), use_cache=False)", ["cu_seq_lens_q", "position_ids"]),
]


def test_rows_that_our_attention_does_not_compute_are_refused():
    assert not faults_of_refusals(ROWS, globals())
