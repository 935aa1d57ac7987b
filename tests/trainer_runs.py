"""Tiny runs of Hugging Face's Trainer and TRL's SFTTrainer: packed, and padded on the same examples in each update."""

import functools
import itertools
import os

import numpy as np
import pytest
import torch

trl = pytest.importorskip("trl", reason="make test-trainers installs it")
transformers = pytest.importorskip("transformers")
datasets = pytest.importorskip("datasets")

from pack_data.batching.plans import BatchOptions
from pack_data.batching.sampler import IndexBatchSampler
from padding_free import PackedStream, pack_into

ROW = 32
WORDS = 47
EXAMPLES = 24  # 15 rows of tokens, or 12 of prompts and completions: the last step or update is short for two ranks


def a_model():
    """float64 weights so large that what a token attends to matters."""
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=50,
        hidden_size=16,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        intermediate_size=32,
        max_position_embeddings=64,
        pad_token_id=0,
        eos_token_id=1,
        bos_token_id=None,
    )
    model = transformers.LlamaForCausalLM(config).double()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn(parameter.shape, dtype=torch.float64) * 0.2)
    return model


@functools.lru_cache(None)
def a_tokenizer():
    from tokenizers import Tokenizer, models, pre_tokenizers

    words = ["<pad>", "<eos>", "<unk>", *(f"w{number}" for number in range(WORDS))]
    tokenizer = Tokenizer(models.WordLevel({word: number for number, word in enumerate(words)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    special = {"pad_token": "<pad>", "eos_token": "<eos>", "unk_token": "<unk>"}
    return transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, **special)


LENGTHS = np.random.default_rng(0).integers(3, ROW - 3, EXAMPLES).tolist()


def tokens_with_labels():
    """For Trainer: input_ids and labels, of which the first of each example is not predicted.

    Transformers before 5 counts it among the predicted ones.
    """
    rng = np.random.default_rng(1)
    rows = []
    for length in LENGTHS:
        ids = rng.integers(3, 50, length)
        kept = np.roll(rng.random(length) < 0.7, 1)
        kept[0] = False
        labels = np.where(kept, ids, -100)
        rows.append({"input_ids": ids.tolist(), "labels": labels.tolist()})
    return datasets.Dataset.from_list(rows)


def prompts_and_completions():
    rng = np.random.default_rng(2)

    def text(count):
        return " ".join(f"w{number}" for number in rng.integers(0, WORDS, count))

    rows = [{"prompt": text(1 + length // 3), "completion": " " + text(length // 2)} for length in LENGTHS]
    return datasets.Dataset.from_list(rows)


def tokens_with_assistant_masks():
    rng = np.random.default_rng(3)
    rows = []
    for length in LENGTHS:
        ids = rng.integers(3, 50, length).tolist()
        mask = rng.integers(0, 2, length)
        mask[:2] = (0, 1)
        rows.append({"input_ids": ids, "assistant_masks": mask.tolist()})
    return datasets.Dataset.from_list(rows)


SETTINGS = dict(num_train_epochs=2, logging_steps=1, report_to=[], use_cpu=True, bf16=False, disable_tqdm=True)
SETTINGS.update(optim="sgd", learning_rate=0.5, lr_scheduler_type="constant", max_grad_norm=0.0, save_strategy="no")


class Collator:
    """Pads as Trainer's own collators for labels do, in a handful of lines."""

    def __call__(self, examples):
        def padded(name, fill):
            columns = [torch.tensor(example[name]) for example in examples]
            return torch.nn.utils.rnn.pad_sequence(columns, batch_first=True, padding_value=fill)

        ids = padded("input_ids", 0)
        # No example has a token 0.
        return {"input_ids": ids, "labels": padded("labels", -100), "attention_mask": (ids != 0).long()}


def a_trainer(kind, folder, single=False, **changes):
    """kind: "trainer", or for SFTTrainer the masks of its data set, "completion" or "assistant".

    single: weights in float32.
    """
    model = a_model().float() if single else a_model()
    os.environ.pop("ACCELERATE_MIXED_PRECISION", None)  # Transformers 4.57 leaves it behind a run in bfloat16
    settings = {**SETTINGS, "output_dir": os.fspath(folder), **changes}
    if kind == "trainer":
        args = transformers.TrainingArguments(**settings)
        return transformers.Trainer(model, args=args, train_dataset=tokens_with_labels(), data_collator=Collator())
    args = trl.SFTConfig(**settings, max_length=ROW, gradient_checkpointing=False)
    dataset = prompts_and_completions() if kind == "completion" else tokens_with_assistant_masks()
    return trl.SFTTrainer(model, args=args, train_dataset=dataset, processing_class=a_tokenizer())


def packed_run(kind, folder, way="OptimalPacking+PosID", **changes):
    """way: None for the same examples as an iterable data set of two shards."""
    trainer = a_trainer(kind, folder, **changes)
    if way is None:
        trainer.train_dataset = trainer.train_dataset.to_iterable_dataset(num_shards=2)
    sampler = pack_into(trainer, max_sequence_length=ROW, **({} if way is None else {"way": way}))
    return trainer, sampler


def _batches_of_streams(dataset, ranks, rows, number):
    """The examples of so many batches of all ranks in turn."""
    source = dataset.to_iterable_dataset(num_shards=2)
    streams = [PackedStream(source, ROW, rank=rank, ranks=ranks) for rank in range(ranks)]
    packs = [itertools.chain.from_iterable(itertools.repeat(stream)) for stream in streams]
    return [[each for _ in range(rows) for each in next(packs[turn % ranks])] for turn in range(number)]


def _exact_loss(logits, labels, num_items_in_batch=None, **_):
    """That of Transformers, which rounds to float32: forty updates make a difference of 1e-8 one of 1e-3."""
    behind = torch.nn.functional.pad(labels[:, 1:], (0, 1), value=-100).flatten()
    total = torch.nn.functional.cross_entropy(logits.flatten(0, 1), behind, reduction="sum")
    return total / ((behind != -100).sum() if num_items_in_batch is None else num_items_in_batch)


def padded_run(kind, folder, ranks, rows, accumulation, way="OptimalPacking+PosID", **changes):
    """One process; each update has the examples that the update of all ranks of the packed run has."""
    sizes = {"per_device_train_batch_size": rows, "gradient_accumulation_steps": accumulation * ranks}
    trainer = a_trainer(kind, folder, **sizes, **changes)
    if kind == "trainer":
        trainer.model.loss_function = _exact_loss
    loader = trainer.get_train_dataloader()
    lengths = [len(example["input_ids"]) for example in trainer.train_dataset]
    if way is None:
        number = trainer.args.max_steps * accumulation * ranks
        batches = _batches_of_streams(loader.dataset, ranks, rows, number)
        padded = torch.utils.data.DataLoader(batches, batch_size=None, collate_fn=loader.collate_fn)
    else:
        sampler = IndexBatchSampler(way, lengths, BatchOptions(rows, ROW, ranks, seed=42), rank=None)
        padded = torch.utils.data.DataLoader(loader.dataset, batch_sampler=sampler, collate_fn=loader.collate_fn)
    trainer.get_train_dataloader = lambda: padded
    trainer.train()
    return trainer


def weights(trainer):
    return [parameter.detach() for parameter in trainer.model.parameters()]


def losses(trainer):
    """Return the logged loss of every update."""
    return [float(line["loss"]) for line in trainer.state.log_history if "loss" in line]


def tokens_seen(trainer):
    """num_tokens as SFTTrainer logs it after the last update."""
    return [float(line["num_tokens"]) for line in trainer.state.log_history if "num_tokens" in line][-1]
