"""Padding-free training refuses trainers, collators, models and batches in one line that names the cause."""

from types import SimpleNamespace

import pytest
import torch

from pack_data.batching.shard_files import ShardFiles
from padding_free import (
    PaddingCollator,
    PaddingFreeCollator,
    accumulate,
    attention,
    choice,
    mean_loss,
    pack_into,
    use_padding_free,
)
from padding_free.leaks.probe import audit_batch, check_no_leak
from padding_free.streams import PackedStream
from padding_free.trainers import WAYS_OF_EQUAL_EPOCHS, _EndlessPacks, _JoiningCollator
from tests.padding_free_models import SIZE, a_model, some_examples, transformers
from tests.refusals import refused


class ATrainer:
    """The attributes that `pack_into` reads before it changes anything."""

    def __init__(self, **changes):
        arguments = {"dataloader_num_workers": 0, "packing": False, "n_gpu": 1, "max_length": None}
        layout = SimpleNamespace(tp_size=1, cp_size=changes.pop("cp_size", 1), sp_size=None)
        self.args = SimpleNamespace(**{name: changes.pop(name, value) for name, value in arguments.items()})
        self.accelerator = SimpleNamespace(parallelism_config=layout, is_main_process=True)
        self.train_dataset = [{"input_ids": [3, 4, 5, 6]}]
        self.model = a_model()
        self.label_smoother = None
        vars(self).update(changes)

    def get_train_dataloader(self):
        return SimpleNamespace(dataset=self.train_dataset)


class APairs(list):
    column_names = ["prompt_ids", "chosen_ids", "rejected_ids"]


class AStream(torch.utils.data.IterableDataset):
    def __iter__(self):
        """May share its examples out to workers by itself."""


def one_answer():
    return transformers.AutoModelForSequenceClassification.from_config(transformers.LlamaConfig(**SIZE, pad_token_id=0))


@pytest.mark.parametrize(
    "changes, arguments, names",
    [
        ({"train_dataset": APairs()}, {}, ["input_ids", "prompt_ids, chosen_ids, rejected_ids"]),
        ({"model": one_answer()}, {}, ["LlamaForSequenceClassification", "one answer"]),
        ({"train_dataset": None}, {}, ["train_dataset"]),
        (
            {"train_dataset": AStream(), "dataloader_num_workers": 1},
            {},
            ["IterableDataset", "dataloader_num_workers=0"],
        ),
        ({"packing": True}, {}, ["packing=True", "packing=False"]),
        ({"n_gpu": 2}, {}, ["2 GPUs", "torchrun"]),
        ({"get_train_dataloader": None}, {}, ["pack_into", "already"]),
        ({"label_smoother": lambda model_output, labels: None}, {}, ["label_smoothing_factor", "0", "5.15"]),
        ({"cp_size": 2}, {}, ["tensor, context or sequence parallelism"]),
        ({}, {"way": "FixedLengthPacking+PosID"}, ["FixedLengthPacking", *WAYS_OF_EQUAL_EPOCHS]),
        ({}, {"way": "RandomSampling+Padding"}, ["RandomSampling", *WAYS_OF_EQUAL_EPOCHS]),
        ({}, {"way": "RandomPacking+PosID"}, ["RandomPacking", *WAYS_OF_EQUAL_EPOCHS]),
        ({}, {"way": WAYS_OF_EQUAL_EPOCHS[0]}, ["max_sequence_length", "max_length"]),
        ({"max_length": 8}, {"check": False}, ["sdpa", "use_padding_free"]),  # the model as it was loaded
    ],
)
def test_a_trainer_that_cannot_be_packed_is_refused(changes, arguments, names):
    with refused(*names):
        pack_into(ATrainer(**changes), **arguments)


def collated(**changes):
    return {"input_ids": [[3, 4, 5]], "labels": [[3, 4, 5]], "attention_mask": [[1, 1, 1]], **changes}


@pytest.mark.parametrize(
    "batch, names",
    [
        (collated(pixel_values=[0.0]), ["pixel_values", "data set"]),
        (collated(labels=None), ["labels", "DataCollatorForLanguageModeling"]),
        (collated(), ["6 tokens", "5 are planned"]),  # it may have added tokens
    ],
)
def test_a_collator_that_does_not_fit_a_row_is_refused(batch, names):
    model = a_model(attention="padding_free")

    def repeated(of_one):
        return lambda examples: {name: values and values * len(examples) for name, values in of_one.items()}

    assert _JoiningCollator(repeated(collated()), model, 6)([{}, {}])["input_ids"].shape == (1, 6)
    with refused(*names):
        _JoiningCollator(repeated(batch), model, 5)([{}, {}])


def test_a_rank_without_an_example_is_refused():
    with refused("train_dataset", "rank"):
        next(iter(_EndlessPacks(PackedStream([], 8, rank=0, ranks=1), [])))


class FullyShardedDataParallel(torch.nn.Linear):
    """By the name of torch's class."""


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


IDS = torch.ones(2, 3, dtype=torch.long)


@pytest.mark.parametrize(
    "call, names",
    [
        (lambda: check_no_leak(a_model(), mean="row"), ["mean", "'row'", "token", "example"]),
        (lambda: audit_batch(a_model(), {"input_ids": IDS, "labels": IDS}), ["position_ids", "one row"]),
        (lambda: mean_loss(a_model(), [PaddingCollator()(some_examples(1, [1]))]), ["no token", "-100"]),
        (lambda: accumulated(FullyShardedDataParallel(2, 2)), ["FullyShardedDataParallel", "fully_shard"]),
        (lambda: accumulated(Shard(2, 2)), ["weight", "fully_shard"]),
        (lambda: collated_by("sdpa"), ["LlamaForCausalLM", 'attn_implementation="sdpa"', "use_padding_free"]),
        (lambda: collated_by("eager"), ["LlamaForCausalLM", 'attn_implementation="eager"']),
        (lambda: collated_by("flex_attention"), ["LlamaForCausalLM", 'attn_implementation="flex_attention"']),
        (lambda: streamed(iter([])), ["source", "iterator"]),
        (lambda: streamed([], rank=1), ["rank is 1", "ranks is None"]),
        (lambda: streamed([], rank=2, ranks=2), ["rank", "2"]),
        (lambda: streamed([], share="packs"), ["share", "omit it"]),
        (lambda: streamed([], longer="cut"), ["longer", "cut"]),
        (lambda: streamed([{"input_ids": [1]}, {"input_ids": [1] * 65}]), ["example 1", "65"]),
    ],
)
def test_a_wrong_call_is_refused(call, names):
    with refused(*names):
        call()


def test_a_source_with_a_state_is_not_read_ahead(tmp_path):
    (tmp_path / "0.jsonl").write_text('{"input_ids": [1]}')
    with refused("flush_after", "source"):
        PackedStream(ShardFiles([tmp_path / "0.jsonl"]), 8, flush_after=1.0)


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


def test_a_model_that_takes_two_tokens_only_is_refused():
    """No plain call tells how examples score alone."""
    model = a_model()

    def forward(module, arguments):
        if arguments and arguments[0].shape[1] > 2:
            raise RuntimeError("two tokens at most")

    model.register_forward_pre_hook(forward)
    with refused("LlamaForCausalLM", "two tokens at most"):
        check_no_leak(model)


def test_a_kernel_of_half_precision_that_joins_examples_is_refused(monkeypatch):
    """Rows are compared in float32, which another kernel computes."""

    def joined(query, key, value, *_, **__):
        return value.mean(0, keepdim=True).expand(query.shape)

    def kernel(query, value, settings):
        return joined if query.dtype == torch.bfloat16 else None

    model = a_model(attention="padding_free", dtype=torch.bfloat16)
    check_no_leak(model, longest=16)
    monkeypatch.setattr(attention, "_kernel", kernel)
    with refused("example", "scores otherwise than alone in torch.bfloat16", "first in model.layers.0"):
        check_no_leak(model, longest=16)


def boundaries(*lengths):
    return torch.tensor([0, *lengths]).cumsum(0).int()


@pytest.mark.parametrize(
    "keys, arguments, names",
    [
        (12, {"cu_seq_lens_q": boundaries(3, 7)}, ["10", "12", "cache"]),
        (10, {"cu_seq_lens_q": boundaries(3, 4)}, ["cu_seq_lens_q", "from 0 to 10"]),
        (10, {"cu_seq_lens_q": boundaries(3, 7), "cu_seq_lens_k": boundaries(4, 6)}, ["cu_seq_lens_k", "same"]),
        (10, {"cu_seq_lens_q": boundaries(3, 7), "cu_seq_lens_k": boundaries(3, 3, 4)}, ["cu_seq_lens_k", "same"]),
        (10, {"cu_seq_lens_q": boundaries(3, 7), "block_indices": torch.zeros(1)}, ["block_indices", "sdpa"]),
        (10, {"cu_seq_lens_q": boundaries(3, 7), "attention_mask": torch.ones(1, 1, 10, 10) > 0}, ["attention_mask"]),
        (10, {"sliding_window": 4, "is_causal": False}, ["window on both sides", "sdpa"]),
    ],
)
def test_attention_that_it_does_not_compute_is_refused(keys, arguments, names):
    heads = [torch.zeros(1, 1, tokens, 8) for tokens in (10, keys, keys)]
    layer = SimpleNamespace(is_causal=True, config=SimpleNamespace(sliding_window=4))
    with refused(*names):
        attention._padding_free_attention(layer, *heads, **arguments)


@pytest.mark.parametrize("model", [None, "bert-base-uncased", transformers.LlamaForCausalLM])
@pytest.mark.parametrize("call", [check_no_leak, use_padding_free])
def test_what_is_no_loaded_model_is_refused(call, model):
    with refused(type(model).__name__, "loaded torch.nn.Module"):
        call(model)


def test_what_is_no_trainer_is_refused():
    for trainer in ("gpt2", a_model()):
        with refused(type(trainer).__name__, "SFTTrainer"):
            pack_into(trainer)
