"""A run beside its sequences unpacked: the same work on both sides, equal updates, and nothing changed by it."""

import numpy as np
import pytest
import torch

from ipu_packed_bert.data.global_batches import SameSequences
from ipu_packed_bert.engine.base import Engine, Gradients, StepResult
from ipu_packed_bert.model.optimizer import build_optimizer
from ipu_packed_bert.settings.loading import config_from_tree
from ipu_packed_bert.training.compare_unpacked import EXPECTED, _gradient_difference, compare_unpacked, side_by_side
from pack_data.cli.terminal import progress_bar
from tests.packed_examples import with_scales
from tests.pretraining import global_batches, host_engine
from tests.tiny_runs import tiny_settings
from tests.tolerances import relative_tolerance


def tiny(store, **sections):
    settings = tiny_settings(store.folder)
    for section, values in sections.items():
        settings.setdefault(section, {}).update(values)
    config = config_from_tree(settings, "tiny")
    factor = store.manifest.packing_factor
    return host_engine(config, store.schema, packing_factor=factor), global_batches(
        store, config, packing_factor=factor
    )


def in_float64(engine, pairs):
    """The engine and what it is given, scales included, as if all of it were float64."""
    engine.model.double()
    engine.optimizer = build_optimizer(engine.model, engine._config.optimizer, betas=(0.9, 0.999))

    def exact(batch):
        micro_batches = len(batch["input_ids"]) // engine._config.batch.micro_batch
        normalisation = engine._config.loss.normalisation
        return with_scales(batch, micro_batches=micro_batches, normalisation=normalisation, dtype=np.float64)

    return [SameSequences(exact(pair.packed), exact(pair.unpacked)) for pair in pairs]


@pytest.mark.parametrize("attention", ["eager", "sdpa", "varlen"])
@pytest.mark.parametrize("normalisation", ["token", "sequence"])
def test_packed_and_unpacked_updates_are_equal(store, attention, normalisation):
    """Although the run has dropout, and rows are filled up with empty ones."""
    sections = {
        "engine": {"attention": attention},
        "loss": {"normalisation": normalisation},
        "batch": {"micro_batch": 4},
    }
    engine, batches = tiny(store, **sections)
    next(batches)
    position = batches.position
    pairs = list(batches.same_sequences(3))
    unpacked_rows = [pair.unpacked["input_mask"] for pair in pairs]
    assert any(not rows.any(axis=1).all() for rows in unpacked_rows)
    assert all(rows.max() == 1 and len(rows) % 4 == 0 for rows in unpacked_rows)
    compared = compare_unpacked(engine, batches, updates=3)
    assert compared.loss_difference <= 1e-5
    assert compared.gradient_difference <= relative_tolerance(dtype=torch.float32)
    assert len(compared.packed) == len(compared.unpacked) == 3
    assert (compared.speed_ups > 0).all()
    counts = [engine.task.count(pair.packed) for pair in pairs]
    sequences = sum(count["sequences"] for count in counts)
    assert compared.packing_factor == sequences / sum(count["packs"] for count in counts)
    with progress_bar(None, "") as bar:
        exact = side_by_side(engine, in_float64(engine, pairs), bar=bar)
    assert exact.loss_difference <= 1e-12
    assert exact.gradient_difference <= 1e-12
    # The loader stays where it is; it gives no more than the epoch has without empty packs.
    assert batches.position == position
    assert len(list(batches.same_sequences(10**6))) == len(store) // batches.packs_per_update
    batches.close()


def test_a_missing_mask_is_seen(store):
    """The comparison can fail: sequences of a pack that see each other have other gradients by far."""
    engine, batches = tiny(store, engine={"attention": "eager"})

    class NoMask(torch.nn.Module):
        def forward(self, input_mask_BS, dtype):
            return torch.zeros((), dtype=dtype)

    (pair,) = batches.same_sequences(1)
    unpacked = engine.gradients(pair.unpacked, alone=True)
    engine.model.attention_mask = NoMask()
    assert _gradient_difference(engine.gradients(pair.packed), unpacked) > 10 * EXPECTED["float32"]
    batches.close()


def flat(state):
    """The values of a state, tensors as lists, so that `==` compares all."""
    if isinstance(state, dict):
        return {name: flat(value) for name, value in state.items()}
    return state.tolist() if isinstance(state, torch.Tensor) else state


def test_it_changes_nothing_bit_for_bit(store):
    """Not the state, not the caller's generator; the next update, with dropout, is the same."""
    outcomes = []
    for is_compared in (False, True):
        engine, batches = tiny(store)
        torch.manual_seed(3)
        engine.step(next(batches), 0.01)
        before = flat(engine.state())
        if is_compared:
            assert compare_unpacked(engine, batches, updates=2) is not None
            assert flat(engine.state()) == before
        loss = engine.step(next(batches), 0.01).loss
        outcomes.append((loss, batches.state(), torch.rand(1).item(), flat(engine.state())))
        batches.close()
    assert outcomes[0] == outcomes[1]


class OtherProgram(Engine):
    """Mock an engine whose device needs another program for unpacked rows."""

    description = "no such device"

    def __init__(self, engine):
        self.task = engine.task

    def compile(self, batch):
        raise AssertionError

    step = evaluate = state = load_state = compile


def test_engines_without_a_second_program_are_not_compared(store):
    engine, batches = tiny(store)
    assert compare_unpacked(OtherProgram(engine), batches, updates=2) is None
    batches.close()


class Timed(OtherProgram):
    """Seconds as they are told, and the same gradients in every round."""

    def __init__(self, engine, seconds):
        super().__init__(engine)
        self.seconds = iter(seconds)
        self.calls = []

    def gradients(self, batch, *, alone=False, dropout=False):
        self.calls.append(alone)
        loss, weight = (2.0, 4.0) if alone else (1.5, 4.5)
        return Gradients(StepResult({"loss": loss}, next(self.seconds)), {"w": torch.tensor([3.0, weight])})


def test_figures_by_hand(store):
    def batch(*sequences_of_row):
        present = np.array([[number > 0, number > 1] for number in sequences_of_row], np.int32)
        return {"input_mask": present, "next_sentence_weights": present, "masked_lm_weights": present}

    # Three sequences: in two rows of 2 and 1; unpacked in three rows and an empty one, whose time does not count.
    pair = SameSequences(batch(2, 1), batch(1, 1, 1, 0))
    engine, _ = tiny(store)
    # First a round that does not count; then rounds of (packed 1.5 s, unpacked 4 s) and, unpacked first, (8 s, 1 s).
    timed = Timed(engine, [9.0, 9.0, 4.0, 1.5, 1.0, 8.0])
    with progress_bar(None, "") as bar:
        compared = side_by_side(timed, [pair, pair], bar=bar)
    assert timed.calls == [False, True, True, False, False, True]
    assert compared.packed.tolist() == [2.0, 3.0]
    assert compared.unpacked.tolist() == [1.0, 0.5]
    values = compared.to_json()
    assert values.pop("speedup_quartiles") == [3.0, 5.0]
    assert values == pytest.approx(
        {
            "updates": 2,
            "packed_sequences_per_second": 2.5,
            "unpacked_sequences_per_second": 0.75,
            "speedup": 4.0,
            "packing_factor": 1.5,
            "loss_difference": 0.25,
            "gradient_difference": 0.1,
        }
    )
