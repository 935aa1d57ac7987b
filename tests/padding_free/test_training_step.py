"""`pack_into` judges the trainer's own step and collator: wrong ones are refused, right ones train."""

import random
import types

import pytest
import torch

runs = pytest.importorskip("tests.trainer_runs", reason="make test-trainers installs TRL", exc_type=ImportError)

from torch.nn import functional as F

from padding_free import pack_into
from padding_free.leaks.step import check_step
from padding_free.models import Leak
from padding_free.trainers import _noisy_embeddings
from tests.refusals import refused
from tests.tolerances import relative_error
from tests.trainer_runs import ROW, Collator, a_trainer, datasets, tokens_with_labels, transformers, weights

IGNORED = -100


def summed(logits, labels):
    return F.cross_entropy(logits[:, :-1].flatten(0, 1).float(), labels[:, 1:].flatten(), reduction="sum")


def only_tokens(trainer, model, inputs, return_outputs=False, num_items_in_batch=None):
    return model(input_ids=inputs["input_ids"], labels=inputs["labels"], num_items_in_batch=num_items_in_batch).loss


def mean_of_rows(trainer, model, inputs, return_outputs=False, num_items_in_batch=None):
    labels = inputs.pop("labels")
    logits = model(**inputs).logits
    return torch.stack(
        [summed(*(each[None] for each in pair)) / (pair[1] != IGNORED).sum() for pair in zip(logits, labels)]
    ).mean()


def by_slots(outputs, labels, num_items_in_batch=None):
    return summed(outputs["logits"], labels) / labels.numel()


def by_tokens(outputs, labels, num_items_in_batch=None):
    return summed(outputs["logits"], labels) / num_items_in_batch


def trained(trainer, **options):
    pack_into(trainer, max_sequence_length=ROW, **options)
    trainer.train()
    return trainer


def a_small_trainer(tmp_path, kind="trainer", **changes):
    settings = {"per_device_train_batch_size": 3, "num_train_epochs": 1, "learning_rate": 0.01, **changes}
    return a_trainer(kind, tmp_path, **settings)


def joining(forward):
    """A forward pass that mixes the tokens of a row of several examples, and leaves plain batches alone."""

    def mixed(*arguments, **named):
        output = forward(*arguments, **named)
        return output + output.roll(1, dims=1) if output.shape[0] == 1 else output

    return mixed


@pytest.mark.parametrize("loss", [only_tokens, mean_of_rows])
@pytest.mark.parametrize("kind", ["trainer", "completion"])
def test_a_wrong_compute_loss_is_refused(loss, kind, tmp_path):
    trainer = a_small_trainer(tmp_path, kind)
    trainer.compute_loss = types.MethodType(loss, trainer)
    before = [weight.clone() for weight in weights(trainer)]
    with refused("training step", "padded batch", "num_items_in_batch", kind=Leak):
        trained(trainer)
    assert relative_error(weights(trainer), before) == 0


def test_a_loss_function_that_divides_by_slots_is_refused(tmp_path):
    for function, is_right in ((by_slots, False), (by_tokens, True)):
        trainer = a_small_trainer(tmp_path)
        trainer.compute_loss_func = function
        if is_right:
            trained(trainer)
        else:
            with refused("training step", kind=Leak):
                trained(trainer)


def test_a_model_that_joins_examples_only_with_labels_is_refused(tmp_path):
    trainer = a_small_trainer(tmp_path)
    model, forward = trainer.model, type(trainer.model).forward

    def labelled(self, *arguments, labels=None, **named):
        if labels is None:
            return forward(self, *arguments, **named)
        named.pop("cu_seq_lens_q", None), named.pop("cu_seq_lens_k", None), named.pop("position_ids", None)
        return forward(self, labels=labels, **named)

    pack_into(trainer, max_sequence_length=ROW)
    model.forward = types.MethodType(labelled, model)
    with refused("training step", kind=Leak):
        trainer.train()


def test_a_forward_that_is_replaced_after_the_first_update_is_refused(tmp_path):
    class Replacing(transformers.TrainerCallback):
        def on_step_end(self, args, state, control, model=None, **_):
            if state.global_step == 1:
                layer = model.model.layers[0].mlp
                layer.forward = joining(layer.forward)

    trainer = a_small_trainer(tmp_path)
    trainer.add_callback(Replacing())
    with refused("training step", kind=Leak):
        trained(trainer)
    assert trainer.state.global_step == 2


@pytest.mark.parametrize("is_leaking", [True, False])
def test_autocast_is_judged(is_leaking, tmp_path):
    """A leak in bfloat16 only; the audit computes in float32."""
    trainer = a_small_trainer(tmp_path, single=True, bf16=True)
    layer = trainer.model.model.layers[0].self_attn.o_proj
    if is_leaking:
        layer.register_forward_hook(
            lambda module, inputs, output: (
                output + output.roll(1, dims=1) if output.dtype == torch.bfloat16 and len(output) == 1 else output
            )
        )
        with refused("training step", kind=Leak):
            trained(trainer)
    else:
        trained(trainer)


@pytest.mark.parametrize(
    "settings",
    [
        {"gradient_checkpointing": True, "gradient_checkpointing_kwargs": {"use_reentrant": True}},
        {"gradient_checkpointing": True, "gradient_checkpointing_kwargs": {"use_reentrant": False}},
        {"label_smoothing_factor": 0.1},
        {"gradient_accumulation_steps": 2},
    ],
)
def test_right_steps_are_judged_as_configured(settings, tmp_path, capsys):
    trainer = a_small_trainer(tmp_path, **settings)
    if "label_smoothing_factor" in settings and int(transformers.__version__.split(".")[0]) < 5:
        pytest.skip("refused: its mean is one of micro-batches")
    trainer.model.config.attention_dropout = 0.2
    trained(trainer)
    printed = capsys.readouterr().out
    assert printed.count("pack_into: the training step after ") == 2 and "not judged" not in printed


def test_a_step_that_fails_on_a_padded_batch_or_is_random_is_told(tmp_path, capsys):
    trainer = a_small_trainer(tmp_path)
    trainer.compute_loss_func = lambda outputs, labels, num_items_in_batch: labels["none"]
    with refused("training step", "audit=False"):
        trained(trainer)
    trainer = a_small_trainer(tmp_path)
    trainer.compute_loss_func = lambda outputs, labels, num_items_in_batch: random.random() * outputs["logits"].sum()
    trained(trainer)
    assert "not judged, because it is random" in capsys.readouterr().out


def without_long(examples):
    return Collator()([each for each in examples if len(each["input_ids"]) < 20] or examples)


def last_masked(examples):
    batch = Collator()(examples)
    batch["labels"][-1] = IGNORED
    return batch


@pytest.mark.parametrize("collator", [without_long, last_masked])
def test_a_collator_that_looks_at_the_whole_batch_is_refused(collator, tmp_path):
    trainer = a_small_trainer(tmp_path)
    trainer.data_collator = collator
    with refused("data collator", "3 examples"):
        pack_into(trainer)
    stream = a_small_trainer(tmp_path, max_steps=20)
    stream.train_dataset, stream.data_collator = stream.train_dataset.to_iterable_dataset(), collator
    with refused("data collator", "examples"):
        trained(stream)


def test_a_collator_that_masks_at_random_is_taken(tmp_path):
    def masking(examples):
        batch = Collator()(examples)
        batch["labels"][torch.rand(batch["labels"].shape) < 0.3] = IGNORED
        return batch

    trainer = a_small_trainer(tmp_path)
    trainer.data_collator = masking
    trained(trainer)


def test_a_data_set_without_tokens_is_refused(tmp_path):
    for examples in ([{"text": "w1 w2"}], [[3, 4, 5]]):
        trainer = a_small_trainer(tmp_path)
        trainer.train_dataset = examples
        with refused("train_dataset", "input_ids"):
            pack_into(trainer)


@pytest.mark.parametrize("kind", ["trainer", "completion"])
def test_neftune_noise_is_that_of_each_example_and_is_judged(kind, tmp_path, capsys):
    trainer = a_small_trainer(tmp_path, kind, neftune_noise_alpha=5.0)
    embeddings = trainer.model.get_input_embeddings()
    trained(trainer)
    assert capsys.readouterr().out.count("(rounding: up to 1e-04)") == 2
    with torch.no_grad():
        assert torch.equal(embeddings(torch.tensor([[3, 4]])), embeddings.weight[None, 3:5])  # it is gone
    model = trainer.model.train()
    lengths = torch.tensor([5, 20, 1])
    positions = torch.cat([torch.arange(length) for length in lengths])[None]
    with torch.no_grad(), _noisy_embeddings(model, {"position_ids": positions}, 5.0) as kept:
        for _ in range(200):
            embeddings(torch.full((1, 26), 3))
    noise = (torch.stack(kept) - embeddings.weight[3].detach()).abs().amax((0, 1, 3)).split(lengths.tolist())
    for largest, length in zip(noise, lengths):
        bound = 5.0 / (length * embeddings.weight.shape[1]) ** 0.5
        assert bound * 0.98 < float(largest.max()) <= bound


def test_noise_by_the_tokens_of_the_row_is_refused(tmp_path):
    """By the audit of the first batch, and by the comparison of steps, which would call it random."""

    def noisy(module, given, output):
        return output + torch.zeros_like(output).uniform_(-1, 1) * output.shape[1] ** -0.5 * module.training

    trainer = a_small_trainer(tmp_path)
    pack_into(trainer, max_sequence_length=ROW)
    trainer.model.get_input_embeddings().register_forward_hook(noisy)
    with refused("noise", kind=Leak):
        trainer.train()
    inputs = next(iter(trainer.get_train_dataloader()))
    with refused("training step", kind=Leak):
        check_step(trainer, trainer.model, inputs, lambda model, inputs: model(**inputs).loss)


def as_rows(name, collated=False):
    """The examples of `tokens_with_labels` in pairs, each pair one row with its boundaries under this name."""
    rows = []
    examples = list(tokens_with_labels())
    for first, second in zip(examples[::2], examples[1::2]):
        lengths = [len(first["input_ids"]), len(second["input_ids"])]
        ends = [0, lengths[0], sum(lengths)]
        positions = [*range(lengths[0]), *range(lengths[1])]
        boundaries = {"seq_lengths": lengths, "cu_seq_lens_q": ends, "position_ids": positions}
        rows.append({column: first[column] + second[column] for column in first} | {name: boundaries[name]})
    return datasets.Dataset.from_list(rows)


@pytest.mark.parametrize("is_stream", [False, True])
@pytest.mark.parametrize("name", ["seq_lengths", "cu_seq_lens_q", "position_ids"])
def test_rows_of_a_data_set_keep_their_boundaries(name, is_stream, tmp_path):
    examples = list(tokens_with_labels())
    trainer = a_small_trainer(tmp_path, per_device_train_batch_size=1, max_steps=12)
    trainer.train_dataset = as_rows(name).to_iterable_dataset() if is_stream else as_rows(name)
    pack_into(trainer, max_sequence_length=2 * ROW)
    lengths = sorted(len(each["input_ids"]) for each in examples)
    batches = []
    for inputs in trainer.get_train_dataloader():
        batches.append(inputs)
        if sum(len(batch["cu_seq_lens_q"]) - 1 for batch in batches) >= len(lengths):
            break
    assert sorted(sum((batch["cu_seq_lens_q"].diff().tolist() for batch in batches), [])) == lengths
    for batch in batches:
        starts = batch["cu_seq_lens_q"][:-1].long()
        assert (batch["position_ids"][0, starts] == 0).all() and (batch["labels"][0, starts] == IGNORED).all()
    trainer.train()


@pytest.mark.parametrize("kind", ["positions", "flattened"])
def test_rows_of_a_collator_keep_their_boundaries(kind, tmp_path):
    """Positions that restart, or the collator of Transformers that joins a batch itself."""
    trainer = a_small_trainer(tmp_path, per_device_train_batch_size=2)

    def with_positions(examples):
        batch = Collator()(examples)
        longest = batch["input_ids"].shape[1]
        batch["position_ids"] = torch.tensor([[*range(2), *range(longest - 2)]] * len(examples))
        return batch

    trainer.data_collator = with_positions if kind == "positions" else transformers.DataCollatorWithFlattening()
    pack_into(trainer, max_sequence_length=ROW)
    inputs = next(iter(trainer.get_train_dataloader()))
    assert len(inputs["cu_seq_lens_q"]) - 1 == (4 if kind == "positions" else 2)


def test_a_zero_inside_an_attention_mask_is_refused(tmp_path):
    trainer = a_small_trainer(tmp_path)
    masks = [[1, 0, *[1] * (len(each["input_ids"]) - 2)] for each in trainer.train_dataset]
    trainer.train_dataset = trainer.train_dataset.add_column("attention_mask", masks)
    with refused("attention_mask", "zeros"):
        trained(trainer)


def test_truncated_examples_and_examples_without_a_label_count_as_their_tokens(tmp_path):
    """TRL #6439 and Automodel #737: half of the completions are cut, and one example predicts nothing."""
    rows = [{"input_ids": [3 + number] * 40, "labels": [IGNORED, *[3 + number] * 39]} for number in range(2)]
    rows += [{"input_ids": [5] * 9, "labels": [IGNORED] * 9}, {"input_ids": [6] * 12, "labels": [IGNORED, *[6] * 11]}]
    updated = []
    for longer in ("truncate", "raise"):
        cut = [{name: values[:ROW] for name, values in row.items()} for row in rows]
        trainer = a_small_trainer(tmp_path, per_device_train_batch_size=4, max_steps=1, learning_rate=0.5)
        trainer.train_dataset = datasets.Dataset.from_list(rows if longer == "truncate" else cut)
        trained(trainer, longer=longer)
        updated.append(weights(trainer))
    model = a_small_trainer(tmp_path).model
    total = sum(summed(model(torch.tensor([row["input_ids"]])).logits, torch.tensor([row["labels"]])) for row in cut)
    gradients = torch.autograd.grad(total / (2 * 31 + 11), model.parameters())
    expected = [weight.detach() - 0.5 * by for weight, by in zip(model.parameters(), gradients)]
    assert max(relative_error(found, expected) for found in updated) <= 1e-6
