"""What padding-free training refuses, in one line that names the cause: trainers, collators, models, batches."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from ipu_packed_bert.padding_free import attention, choice, pack_into, use_padding_free
from ipu_packed_bert.padding_free.probe import audit_batch, check_no_leak
from ipu_packed_bert.padding_free.streams import PackedStream
from ipu_packed_bert.padding_free.trainers import WAYS_OF_EQUAL_EPOCHS, _EndlessPacks, _JoiningCollator
from tests.padding_free_models import SIZE, a_model, transformers
from tests.refusals import refused

# ---- trainers and their collators


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
    assert _JoiningCollator(lambda examples: collated(), model, 6)([{}, {}])["input_ids"].shape == (1, 6)
    with refused(*names):
        _JoiningCollator(lambda examples: batch, model, 5)([{}, {}])


def test_a_rank_without_an_example_is_refused():
    with refused("train_dataset", "rank"):
        next(iter(_EndlessPacks(PackedStream([], 8, rank=0, ranks=1), [])))


# ---- models and batches


def test_a_loss_of_another_mean_is_refused():
    with refused("mean", "'row'", "token", "example"):
        check_no_leak(a_model(), mean="row")


def test_a_batch_of_two_rows_is_not_audited():
    ids = torch.ones(2, 3, dtype=torch.long)
    with refused("position_ids", "one row"):
        audit_batch(a_model(attention="padding_free"), {"input_ids": ids, "labels": ids})


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


def test_boundaries_with_a_cache_are_refused():
    heads = [torch.zeros(1, 1, tokens, 8) for tokens in (10, 12, 12)]
    layer = SimpleNamespace(is_causal=True)
    with refused("10", "12", "cache"):
        attention._padding_free_attention(layer, *heads, cu_seq_lens_q=torch.tensor([0, 3, 10]).int())
