"""`pack_into` judges the trainer's own step and collator: wrong ones are refused, right ones train."""

import contextlib
import random
import types

import pytest
import torch

runs = pytest.importorskip("tests.trainer_runs", reason="make test-trainers installs TRL", exc_type=ImportError)

from torch.nn import functional as F

from padding_free import pack_into
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
    counts = (labels != IGNORED).sum(1)
    sums = [summed(logits[[row]], labels[[row]]) for row in range(len(labels))]
    return (torch.stack(sums) / counts).mean()


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


def joining(output):
    """Mix the tokens of a row of several examples, and leave plain batches alone."""
    return output + output.roll(1, dims=1) if output.shape[0] == 1 else output


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
    trainer = a_small_trainer(tmp_path)
    trainer.compute_loss_func = by_tokens
    trained(trainer)
    trainer = a_small_trainer(tmp_path)
    trainer.compute_loss_func = by_slots
    with refused("training step", kind=Leak):
        trained(trainer)


def test_a_normaliser_that_counts_rows_is_refused(tmp_path):
    """A batch of four examples would count as one: its loss is four times as large."""
    trainer = a_small_trainer(tmp_path)
    trainer.compute_loss_func = by_tokens
    trainer._get_num_items_in_batch = lambda batches, device: sum(len(batch["input_ids"]) for batch in batches)
    with refused("training step", kind=Leak):
        trained(trainer)


def test_a_model_that_joins_examples_only_with_labels_is_refused(tmp_path):
    trainer = a_small_trainer(tmp_path)
    forward = trainer.model.forward
    layer = trainer.model.model.layers[0].mlp

    def labelled(*arguments, labels=None, **named):
        if labels is None:
            return forward(*arguments, **named)
        hook = layer.register_forward_hook(lambda module, given, output: joining(output))
        with contextlib.closing(types.SimpleNamespace(close=hook.remove)):
            return forward(*arguments, labels=labels, **named)

    pack_into(trainer, max_sequence_length=ROW)
    trainer.model.forward = labelled
    with refused("training step", kind=Leak):
        trainer.train()


def test_a_forward_that_drops_the_boundaries_trains_with_those_of_the_call(tmp_path):
    """Layers take the boundaries from the model's entrance, so a forward below it cannot lose them."""
    expected = trained(a_small_trainer(tmp_path / "kept"))
    trainer = a_small_trainer(tmp_path / "dropped")
    forward = trainer.model.forward

    def labelled(*arguments, labels=None, **named):
        if labels is not None:
            for name in ("cu_seq_lens_q", "cu_seq_lens_k", "position_ids"):
                named.pop(name, None)
        return forward(*arguments, labels=labels, **named)

    pack_into(trainer, max_sequence_length=ROW)
    trainer.model.forward = labelled
    trainer.train()
    assert relative_error(weights(trainer), weights(expected)) <= 1e-6


def test_a_forward_that_is_replaced_after_the_first_update_is_refused(tmp_path):
    class Replacing(transformers.TrainerCallback):
        def on_step_end(self, args, state, control, model=None, **_):
            if state.global_step == 1:
                model.model.layers[0].mlp.register_forward_hook(lambda module, given, output: joining(output))

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
            lambda module, given, output: joining(output) if output.dtype == torch.bfloat16 else output
        )
    with refused("training step", kind=Leak) if is_leaking else contextlib.nullcontext():
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
    trainer.compute_loss_func = lambda outputs, labels, num_items_in_batch: (
        random.SystemRandom().random() * outputs["logits"].sum()
    )
    trained(trainer)
    assert "not judged, because it is random" in capsys.readouterr().out


def without_long(examples):
    return Collator()([each for each in examples if len(each["input_ids"]) < 20] or examples)


def last_masked(examples):
    batch = Collator()(examples)
    batch["labels"][-1] = IGNORED
    return batch


@pytest.mark.parametrize("collator", [without_long, last_masked])
@pytest.mark.parametrize("is_stream", [False, True])
def test_a_collator_that_looks_at_the_whole_batch_is_refused(collator, is_stream, tmp_path):
    trainer = a_small_trainer(tmp_path, max_steps=20)
    trainer.data_collator = collator
    if is_stream:
        trainer.train_dataset = trainer.train_dataset.to_iterable_dataset()
    with refused("data collator", "examples"):
        trained(trainer)


def test_a_collator_that_masks_at_random_is_taken(tmp_path):
    def masking(examples):
        batch = Collator()(examples)
        batch["labels"][torch.rand(batch["labels"].shape) < 0.3] = IGNORED
        return batch

    trainer = a_small_trainer(tmp_path)
    trainer.data_collator = masking
    trained(trainer)


@pytest.mark.parametrize("kind", ["trainer", "completion"])
def test_neftune_noise_is_that_of_each_example_and_is_judged(kind, tmp_path, capsys):
    trainer = a_small_trainer(tmp_path, kind, neftune_noise_alpha=5.0)
    embeddings = trainer.model.get_input_embeddings()
    trained(trainer)
    assert capsys.readouterr().out.count("(rounding: up to 2e-05)") == 2
    with torch.no_grad():
        assert torch.equal(embeddings(torch.tensor([[3, 4]])), embeddings.weight[None, 3:5])  # it is gone
    lengths = torch.tensor([5, 20, 1])
    positions = torch.cat([torch.arange(length) for length in lengths])[None]
    with torch.no_grad(), _noisy_embeddings(trainer.model.train(), {"position_ids": positions}, 5.0) as kept:
        for _ in range(200):
            embeddings(torch.full((1, 26), 3))
    noise = (torch.stack(kept) - embeddings.weight[3].detach()).abs().amax((0, 1, 3))
    bounds = 5.0 / (lengths * embeddings.weight.shape[1]).sqrt()
    for part, bound in zip(noise.split(lengths.tolist()), bounds):
        assert bound * 0.98 < part.max() <= bound


def as_rows(name):
    """The examples of `tokens_with_labels` in pairs, each pair one row with its boundaries under this name."""
    rows = []
    examples = list(tokens_with_labels())
    for first, second in zip(examples[::2], examples[1::2]):
        lengths = [len(first["input_ids"]), len(second["input_ids"])]
        boundaries = {
            "seq_lengths": lengths,
            "cu_seq_lens_q": [0, lengths[0], sum(lengths)],
            "position_ids": [*range(lengths[0]), *range(lengths[1])],
        }
        rows.append({**{column: first[column] + second[column] for column in first}, name: boundaries[name]})
    return datasets.Dataset.from_list(rows)


@pytest.mark.parametrize("is_stream", [False, True])
@pytest.mark.parametrize("name", ["seq_lengths", "cu_seq_lens_q", "position_ids"])
def test_rows_of_a_data_set_keep_their_boundaries(name, is_stream, tmp_path):
    examples = list(tokens_with_labels())
    trainer = a_small_trainer(tmp_path, per_device_train_batch_size=1, max_steps=12)
    rows = as_rows(name)
    trainer.train_dataset = rows.to_iterable_dataset() if is_stream else rows
    pack_into(trainer, max_sequence_length=2 * ROW)
    lengths = []
    for inputs in trainer.get_train_dataloader():
        lengths += inputs["cu_seq_lens_q"].diff().tolist()
        starts = inputs["cu_seq_lens_q"][:-1].long()
        assert (inputs["position_ids"][0, starts] == 0).all() and (inputs["labels"][0, starts] == IGNORED).all()
        if len(lengths) >= len(examples):
            break
    assert sorted(lengths) == sorted(len(example["input_ids"]) for example in examples)
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
    predicted = [([3] * 40, 1), ([4] * 40, 1), ([5] * 9, 9), ([6] * 12, 1)]  # tokens, and the first that is predicted
    rows = [{"input_ids": ids, "labels": [IGNORED] * first + ids[first:]} for ids, first in predicted]
    cut = [{name: values[:ROW] for name, values in row.items()} for row in rows]
    updated = []
    for longer, given in (("truncate", rows), ("raise", cut)):
        trainer = a_small_trainer(tmp_path, per_device_train_batch_size=4, max_steps=1, learning_rate=0.5)
        trainer.train_dataset = datasets.Dataset.from_list(given)
        trained(trainer, longer=longer)
        updated.append(weights(trainer))
    model = a_small_trainer(tmp_path).model
    losses = [summed(model(torch.tensor([row["input_ids"]])).logits, torch.tensor([row["labels"]])) for row in cut]
    gradients = torch.autograd.grad(sum(losses) / (2 * 31 + 11), model.parameters())
    expected = [weight.detach() - 0.5 * gradient for weight, gradient in zip(model.parameters(), gradients)]
    assert max(relative_error(after, expected) for after in updated) <= 1e-6
