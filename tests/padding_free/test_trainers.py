"""`pack_into`: Trainer and SFTTrainer on packs make the updates of a padded run, on any accumulation and ranks."""

import itertools
import json
import logging
import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

runs = pytest.importorskip("tests.trainer_runs", reason="make test-trainers installs TRL", exc_type=ImportError)

from pack_data.batching.plans import BatchOptions, get_way
from padding_free import pack_into
from padding_free.models import choice_of
from padding_free.trainers import WAYS_OF_EQUAL_EPOCHS, _lengths_of
from tests.batching_ways import MSL, drawn
from tests.imports import ROOT
from tests.refusals import refused
from tests.tolerances import relative_error
from tests.trainer_runs import (
    ROW,
    SETTINGS,
    Collator,
    a_model,
    a_trainer,
    datasets,
    losses,
    packed_run,
    padded_run,
    tokens_seen,
    tokens_with_labels,
    transformers,
    weights,
)

KINDS = ["trainer", "completion", "assistant"]
FULL_ROWS, AS_MANY_EXAMPLES = "OptimalPacking+PosID", "MiniBatchPacking+PosID"


@pytest.mark.parametrize("rows, accumulation", [(1, 1), (2, 3)])
@pytest.mark.parametrize("kind", KINDS)
def test_a_packed_run_is_the_padded_run(kind, rows, accumulation, tmp_path):
    """Two epochs of plain gradient descent: the weights tell of every loss and its normalisation."""
    packed, _ = packed_run(kind, tmp_path, per_device_train_batch_size=rows, gradient_accumulation_steps=accumulation)
    packed.train()
    padded = padded_run(kind, tmp_path, 1, rows, accumulation)
    assert relative_error(weights(packed), weights(padded)) <= 1e-6
    assert relative_error(weights(padded), [weight.detach() for weight in a_model().parameters()]) > 1e-3
    assert losses(packed) == pytest.approx(losses(padded), rel=1e-6, abs=1e-4) and len(losses(packed)) >= 4
    if kind != "trainer":
        tokens = sum(len(example["input_ids"]) for example in packed.train_dataset)
        assert tokens_seen(packed) == tokens_seen(padded) == 2 * tokens


@pytest.mark.parametrize("evaluated", [False, True])
@pytest.mark.parametrize(
    "optimizer, single, bf16, allowed",
    [
        ("sgd", False, False, 1e-6),
        ("sgd", True, False, 1e-6),
        ("adamw_torch", False, False, 1e-6),
        ("sgd", True, True, 0.02),
    ],
)
@pytest.mark.parametrize("kind", ["trainer", "completion"])
def test_an_update_keeps_its_examples(kind, optimizer, single, bf16, allowed, evaluated, tmp_path, capsys):
    """By default: as many updates as before, with the weights of a padded run of the same examples an update.

    So it is after an evaluation, and in a run that was stopped in the second epoch.
    """
    rate = 0.01 if "adam" in optimizer else 0.5
    settings = {"optim": optimizer, "bf16": bf16, "learning_rate": rate, "single": single}
    saving = {"save_strategy": "steps" if evaluated else "no", "save_steps": 5}
    saving.update(per_device_train_batch_size=3, gradient_accumulation_steps=2)
    packed = a_trainer(kind, tmp_path, **settings, **saving)
    config = packed.model.config.to_dict()
    if evaluated:
        packed.evaluate(packed.train_dataset.select(range(4)))
    pack_into(packed, **({"max_sequence_length": ROW} if evaluated else {}))
    assert re.search(
        r"; 4 updates an epoch \(before: 4\); padding 0 % .* \(before: [1-9]\d?%\); ", capsys.readouterr().out
    )
    assert [len(inputs["cu_seq_lens_q"]) - 1 for inputs in packed.get_train_dataloader()] == [3] * 8
    assert choice_of(packed.model).attention == "padding_free"  # Accelerate may have wrapped the model in autocast
    packed.train()
    assert packed.state.global_step == 2 * 4
    changed = {name for name, value in packed.model.config.to_dict().items() if value != config[name]}
    assert changed <= ({"architectures", "dtype"} if evaluated else set())  # what saving writes
    if evaluated:
        packed, _ = packed_run(kind, tmp_path, AS_MANY_EXAMPLES, **settings, **saving)
        packed.train(resume_from_checkpoint=os.fspath(tmp_path / "checkpoint-5"))
    padded = padded_run(kind, tmp_path, 1, 3, 2, AS_MANY_EXAMPLES, **settings)
    assert relative_error(weights(packed), weights(padded)) <= allowed
    assert losses(packed) == pytest.approx(losses(padded), rel=allowed, abs=max(allowed, 1e-4))
    evaluations = [trainer.evaluate(trainer.train_dataset)["eval_loss"] for trainer in (packed, padded)]
    assert evaluations[0] == pytest.approx(evaluations[1], rel=allowed)


def test_the_loss_in_blocks_never_asks_for_whole_logits(tmp_path, capsys):
    """Also with a bias, a scale and a cap; a model that does something unknown keeps its own loss."""
    widths = []
    trainer = a_trainer("trainer", tmp_path, per_device_train_batch_size=3)
    pack_into(trainer, audit=False)
    trainer.model.register_forward_hook(lambda model, given, output: widths.append(output.logits.shape[-1]))
    trainer.train()
    assert widths.count(0) == trainer.state.global_step
    unknown = a_trainer("trainer", tmp_path)
    unknown.model.lm_head.register_forward_hook(lambda layer, given, output: 2 * output)
    for trainer in (unknown, a_trainer("completion", tmp_path)):
        pack_into(trainer)
    sources = re.findall("the loss is (?:that of )?([A-Za-z]+)", capsys.readouterr().out)
    assert sources == ["computed", "LlamaForCausalLM", "SFTTrainer"]


def test_batches_of_one_example_have_nothing_to_gain(tmp_path, capsys):
    pack_into(a_trainer("trainer", tmp_path, per_device_train_batch_size=1))
    assert "nothing to gain" in capsys.readouterr().out


def labels_by_tokens(batches):
    """Tokens of each example of these rows -> its labels."""
    labels = {}
    for inputs in batches:
        lengths = inputs["cu_seq_lens_q"].diff().tolist()
        parts = zip(inputs["input_ids"][0].split(lengths), inputs["labels"][0].split(lengths))
        labels.update((tuple(ids.tolist()), part.tolist()) for ids, part in parts)
    return labels


@pytest.mark.parametrize("kind", KINDS)
def test_labels_are_those_of_the_masks(kind, tmp_path):
    """For every example, masked tokens are not predicted, and all others but the first are."""
    trainer, _ = packed_run(kind, tmp_path)
    labels = labels_by_tokens(trainer.get_train_dataloader())
    masks = {"completion": "completion_mask", "assistant": "assistant_masks", "trainer": None}[kind]
    assert len(labels) == len(trainer.train_dataset)
    for row in trainer.train_dataset:
        expected = row.get("labels")
        if expected is None:  # TRL before 1 leaves the masks to the collator
            expected = [token if kept else -100 for token, kept in zip(row["input_ids"], row[masks])]
        assert labels[tuple(row["input_ids"])] == [-100, *expected[1:]]
    ignored = sum(part.count(-100) for part in labels.values())
    assert len(labels) < ignored < sum(map(len, labels))


@pytest.mark.parametrize("is_stream", [False, True])
@pytest.mark.parametrize("mask", ["completion_mask", "assistant_masks", "loss_mask"])
def test_masks_that_the_trainer_ignores_apply(mask, is_stream, tmp_path):
    """Trainer removes the column, and its collator learns all tokens."""
    rows = []
    expected = {}
    for row in tokens_with_labels():
        ids = row["input_ids"]
        rows.append({"input_ids": ids, mask: [float(label != -100) for label in row["labels"]]})
        expected[tuple(ids)] = row["labels"]
    trainer = a_trainer("trainer", tmp_path, max_steps=1)
    trainer.train_dataset = datasets.Dataset.from_list(rows)
    if is_stream:
        trainer.train_dataset = trainer.train_dataset.to_iterable_dataset()
    trainer.data_collator = lambda examples: Collator()([{**each, "labels": each["input_ids"]} for each in examples])
    pack_into(trainer, max_sequence_length=ROW)
    assert labels_by_tokens(itertools.islice(trainer.get_train_dataloader(), 3)) == expected


@pytest.mark.parametrize("way", [FULL_ROWS, AS_MANY_EXAMPLES])
def test_a_run_goes_on_inside_an_epoch(way, tmp_path):
    """Stopped after an update in the second epoch, it ends with the weights of a run that was not."""
    settings = {"save_strategy": "steps", "save_steps": 1, "per_device_train_batch_size": 1, "way": way}
    whole, sampler = packed_run("trainer", tmp_path / "whole", **settings)
    stop = len(sampler) + 5
    whole.train()
    again, _ = packed_run("trainer", tmp_path / "again", **settings)
    again.train(resume_from_checkpoint=os.fspath(tmp_path / "whole" / f"checkpoint-{stop}"))
    assert again.state.global_step == whole.state.global_step == 2 * len(sampler)
    assert relative_error(weights(again), weights(whole)) <= 1e-12
    assert losses(again) == losses(whole)


@pytest.mark.parametrize("kind", ["trainer", "completion"])
def test_an_iterable_data_set_goes_through_the_stream(kind, tmp_path, capsys):
    """Over more than one pass; stopped and resumed in the second, the run ends with the same weights."""
    settings = {"max_steps": 9, "per_device_train_batch_size": 1, "gradient_accumulation_steps": 2}
    saving = {**settings, "save_strategy": "steps", "save_steps": 8, "way": None}
    whole, stream = packed_run(kind, tmp_path / "whole", **saving)
    assert f"an update has 2 rows of {ROW} slots (before: 2 examples) until max_steps" in capsys.readouterr().out
    whole.train()
    padded = padded_run(kind, tmp_path, 1, 1, 2, None, max_steps=9)
    assert relative_error(weights(whole), weights(padded)) <= 1e-6
    assert losses(whole) == pytest.approx(losses(padded), rel=1e-6, abs=1e-4) and stream.longer.examples > 0
    again, _ = packed_run(kind, tmp_path / "again", **saving)
    again.train(resume_from_checkpoint=os.fspath(tmp_path / "whole" / "checkpoint-8"))
    assert relative_error(weights(again), weights(whole)) <= 1e-12 and losses(again) == losses(whole)


@pytest.mark.parametrize("bf16", [False, True])
def test_the_first_batch_is_audited_once(tmp_path, capsys, bf16):
    """A layer that joins examples after `pack_into` has looked at the model."""
    for audit in (True, False):
        trainer = a_trainer("trainer", tmp_path, single=bf16, bf16=bf16)
        pack_into(trainer, max_sequence_length=ROW, audit=audit)
        handle = trainer.model.model.layers[0].mlp.register_forward_hook(
            lambda module, given, output: output + output.mean(1, keepdim=True)
        )
        if audit:
            with refused("in a row of .* examples, example .* scores otherwise than alone"):
                trainer.train()
            handle.remove()
        trainer.train()
        assert "the first batch" not in capsys.readouterr().out
    trainer = a_trainer("trainer", tmp_path, single=bf16, bf16=bf16)
    pack_into(trainer, max_sequence_length=ROW)
    trainer.train()
    assert capsys.readouterr().out.count("the first batch: probed rows of ") == 1


@pytest.mark.skipif(int(transformers.__version__.split(".")[0]) < 5, reason="encoders took no other attention")
def test_a_masked_model_learns_the_mean_over_the_masked_tokens_of_an_update(tmp_path):
    """In three micro-batches, by one step of plain gradient descent; labels are of the tokens themselves."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32}
    config = transformers.BertConfig(vocab_size=50, **sizes, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0)
    model = transformers.BertForMaskedLM(config).double()
    settings = {**SETTINGS, "max_steps": 1, "per_device_train_batch_size": 2, "gradient_accumulation_steps": 3}
    args = transformers.TrainingArguments(os.fspath(tmp_path), **settings)
    examples = tokens_with_labels().select(range(6))
    logits = [model(torch.tensor([each["input_ids"]])).logits[0] for each in examples]
    labels = torch.cat([torch.tensor(each["labels"]) for each in examples])
    loss = torch.nn.functional.cross_entropy(torch.cat(logits), labels)
    gradients = torch.autograd.grad(loss, model.parameters())
    expected = [weight.detach() - 0.5 * gradient for weight, gradient in zip(model.parameters(), gradients)]
    trainer = transformers.Trainer(model, args=args, train_dataset=examples, data_collator=Collator())
    pack_into(trainer, max_sequence_length=ROW)
    trainer.train()
    assert relative_error(weights(trainer), expected) <= 1e-6


def test_longer_examples_are_cut_or_left_out_and_it_is_said(tmp_path, caplog):
    texts = [(list(range(3, 50)) * 2)[:length] for length in (5, 70, 12, 33)]
    rows = datasets.Dataset.from_list([{"input_ids": ids, "labels": ids} for ids in texts])
    for longer, tokens in [("truncate", 81), ("split", 120), ("drop", 17)]:
        trainer = a_trainer("trainer", tmp_path)
        trainer.train_dataset = rows
        with caplog.at_level(logging.WARNING, logger="padding_free"):
            sampler = pack_into(trainer, max_sequence_length=ROW, longer=longer)
        assert sampler.longer.longer == 2 and str(sampler.longer) in caplog.text
        assert sum(inputs["input_ids"].numel() for inputs in trainer.get_train_dataloader()) == tokens
        trainer.train()
    trainer = a_trainer("trainer", tmp_path)
    trainer.train_dataset = rows
    with refused("sequence 1", "70"):
        pack_into(trainer, max_sequence_length=ROW)


@pytest.mark.parametrize("way", WAYS_OF_EQUAL_EPOCHS)
def test_every_epoch_of_these_ways_has_as_many_steps(way):
    """A trainer stops each epoch after the steps of the first."""
    for seed in range(3):
        lengths = drawn(60, seed)
        steps = {get_way(way).plan(lengths, BatchOptions(2, MSL, 2, seed), epoch).steps for epoch in range(6)}
        assert len(steps) == 1


def test_lengths_are_read_from_any_data_set():
    """A table, some of its rows in another order, rows made when they are asked for, and a plain list."""
    rows = [{"input_ids": list(range(length)), "labels": [1] * length} for length in (3, 1, 4, 1, 5)]
    table = datasets.Dataset.from_list(rows)
    assert _lengths_of(table).tolist() == _lengths_of(rows).tolist() == [3, 1, 4, 1, 5]
    assert _lengths_of(table.select([4, 0, 2]).with_format("torch")).tolist() == [5, 3, 4]
    doubled = table.with_transform(lambda batch: {"input_ids": [[*ids, *ids] for ids in batch["input_ids"]]})
    assert _lengths_of(doubled).tolist() == [6, 2, 8, 2, 10]


# With any settings, evaluated before, and resumed.
OF_TWO_RANKS = [
    ("trainer", AS_MANY_EXAMPLES, {}),
    ("completion", FULL_ROWS, {}),
    ("trainer", None, {"max_steps": 9}),
    ("trainer", AS_MANY_EXAMPLES, {"single": True, "learning_rate": 0.1}),  # 12 updates make 1e-7 larger
    ("completion", AS_MANY_EXAMPLES, {"single": True, "learning_rate": 0.1, "bf16": True}),
]
TWO_RANKS = """
import json, sys
from pathlib import Path
import torch
from accelerate import Accelerator
from accelerate.utils import DataLoaderConfiguration
from padding_free import PaddingFreeCollator, use_padding_free
from pack_data.batching.plans import BatchOptions
from pack_data.batching.sampler import IndexBatchSampler
from tests.trainer_runs import ROW, a_model, a_trainer, losses, packed_run, tokens_seen, weights

folder = Path(sys.argv[1])
for kind, way, settings in json.loads(sys.argv[2]):
    saved = folder / f"{kind}-{way}-{len(settings)}"

    def a_run():
        return packed_run(
            kind, saved, way, per_device_train_batch_size=1, gradient_accumulation_steps=2, ddp_backend="gloo",
            save_strategy="steps", save_steps=8, **settings,
        )

    trainer, sampler = a_run()
    if settings:
        trainer.evaluate(trainer.train_dataset if way else trainer.train_dataset.take(4))
    trainer.train()
    if settings:
        trainer, sampler = a_run()
        trainer.train(resume_from_checkpoint=str(saved / "checkpoint-8"))
    rank = trainer.args.process_index
    torch.save(weights(trainer), folder / f"{saved.name}-{rank}.pt")
    said = [losses(trainer), way and len(sampler), kind != "trainer" and tokens_seen(trainer)]
    (folder / f"{saved.name}-{rank}.json").write_text(json.dumps(said))

# Accelerate: every example of two epochs, with each process reading its own batches and with one reading for all.
dataset = [{"input_ids": [3 + number] * (5 + number % 17)} for number in range(41)]
for dispatch in (False, True):
    accelerator = Accelerator(
        cpu=True, dataloader_config=DataLoaderConfiguration(dispatch_batches=dispatch, even_batches=False)
    )
    sampler = IndexBatchSampler(
        "OptimalPacking+PosID", [len(example["input_ids"]) for example in dataset],
        BatchOptions(2, ROW, accelerator.num_processes), rank=None,
    )
    model = a_model()
    use_padding_free(model)
    collator = PaddingFreeCollator(model, slots=2 * ROW)
    loader = accelerator.prepare(
        torch.utils.data.DataLoader(sampler.view(dataset), batch_sampler=sampler, collate_fn=collator)
    )
    epochs = []
    for epoch in range(2):
        loader.set_epoch(epoch)
        epochs.append([inputs["input_ids"].flatten().tolist() for inputs in loader])
    (folder / f"dispatch-{dispatch}-{accelerator.process_index}.json").write_text(json.dumps(epochs))
"""


def test_two_ranks_make_the_updates_of_one_and_accelerate_deals_every_example_once(tmp_path):
    """One start of two processes for all of it, which is what takes time."""
    script = tmp_path / "two_ranks.py"
    script.write_text(TWO_RANKS)
    environment = {**os.environ, "PYTHONPATH": os.fspath(ROOT), "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"]
    finished = subprocess.run(
        [*command, os.fspath(script), os.fspath(tmp_path), json.dumps(OF_TWO_RANKS)],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
    )
    assert finished.returncode == 0, finished.stderr[-3000:]
    for kind, way, settings in OF_TWO_RANKS:
        padded = padded_run(kind, tmp_path / kind, 2, 1, 2, way, **settings)
        name, allowed = tmp_path / f"{kind}-{way}-{len(settings)}", 0.02 if "bf16" in settings else 1e-6
        for rank in range(2):
            found = torch.load(f"{name}-{rank}.pt", weights_only=True)
            assert relative_error(found, weights(padded)) <= allowed
        logged, steps, tokens = json.loads(Path(f"{name}-0.json").read_text())
        assert logged == pytest.approx(losses(padded), rel=allowed, abs=max(allowed, 1e-4))
        assert json.loads(Path(f"{name}-1.json").read_text())[1] == steps
        if kind != "trainer" and not settings:  # SFTTrainer begins to count again in a resumed run
            assert tokens == tokens_seen(padded)
    expected = np.repeat(np.arange(3, 44), [5 + number % 17 for number in range(41)]).tolist()
    orders = []
    for dispatch in (False, True):
        of_ranks = [json.loads((tmp_path / f"dispatch-{dispatch}-{rank}.json").read_text()) for rank in range(2)]
        for epoch in range(2):
            batches = [ranks[epoch] for ranks in of_ranks]
            assert len(batches[0]) == len(batches[1]) > 3
            assert sorted(token for ids in sum(batches, []) for token in ids if token) == expected
            assert all(len(ids) == 2 * ROW for ids in sum(batches, []))
        orders.append(of_ranks)
    assert orders[0] == orders[1] and orders[0][0][0] != orders[0][0][1]
