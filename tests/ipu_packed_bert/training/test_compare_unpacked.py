"""A run beside its sequences unpacked: the same work on both sides, equal updates, and nothing changed by it."""

import numpy as np
import pytest
import torch

from ipu_packed_bert.data.global_batches import SameSequences
from ipu_packed_bert.engine.base import Engine, Gradients, StepResult
from ipu_packed_bert.model.optimizer import build_optimizer
from ipu_packed_bert.settings.loading import config_from_tree
from ipu_packed_bert.training.compare_unpacked import EXPECTED, _gradient_difference, compare_unpacked, side_by_side
from pack_data.cli.command import progress_bar
from pack_data.store.data_set import PackStore
from tests.pretraining import global_batches, host_engine
from tests.tiny_runs import tiny_data, tiny_settings
from tests.tolerances import relative_tolerance


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    return PackStore.open(tiny_data(tmp_path_factory.mktemp("data") / "tiny"))


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
        masked, sequences = np.count_nonzero(batch["masked_lm_weights"]), batch["next_sentence_weights"].sum()
        rows = len(batch["input_ids"])
        micro_batches = rows // engine._config.batch.micro_batch
        of_masked = masked if engine._config.loss.normalisation == "token" else sequences
        scales = {"mlm_scale": micro_batches / of_masked, "nsp_scale": micro_batches / sequences}
        return {**batch, **{name: np.full(rows, scale) for name, scale in scales.items()}}

    return [SameSequences(exact(pair.packed), exact(pair.unpacked)) for pair in pairs]


def held(batch):
    """The sequences of a batch: tokens, segments, positions, masked places and labels, next sentence."""
    found = []
    for row in range(len(batch["input_ids"])):
        start = 0
        for number in range(1, batch["next_sentence_weights"].shape[1] + 1):
            own = batch["input_mask"][row] == number
            if own.any():
                assert batch["next_sentence_positions"][row, number - 1] == start
                masked = batch["masked_lm_weights"][row] == number
                found.append(
                    (
                        *(tuple(batch[name][row, own]) for name in ("input_ids", "segment_ids", "positions")),
                        tuple(batch["masked_lm_positions"][row, masked] - start),
                        tuple(batch["masked_lm_ids"][row, masked]),
                        batch["next_sentence_labels"][row, number - 1],
                    )
                )
            start += int(own.sum())
    return sorted(found)


def test_both_sides_hold_the_same_sequences_and_the_loader_stays_where_it_is(store):
    _, batches = tiny(store)
    next(batches)
    position = batches.position
    pairs = list(batches.same_sequences(2))
    assert len(pairs) == 2 and batches.position == position
    for pair in pairs:
        assert held(pair.packed) == held(pair.unpacked) and len(held(pair.packed)) > len(pair.packed["input_ids"])
        assert len(pair.unpacked["input_ids"]) % 2 == 0  # whole micro-batches
        assert pair.unpacked["next_sentence_weights"].shape[1] == 1
        assert (pair.unpacked["input_mask"] <= 1).all()
    assert held(pairs[0].packed) != held(pairs[1].packed)
    many = list(batches.same_sequences(10**6))  # no more than the epoch has without empty packs
    assert len(many) == len(store) // batches.packs_per_update
    batches.close()


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
    pairs = list(batches.same_sequences(3))
    assert any(not (pair.unpacked["input_mask"] > 0).any(axis=1).all() for pair in pairs)
    found = compare_unpacked(engine, batches, updates=3)
    assert found.loss_difference <= 1e-5 and found.gradient_difference <= relative_tolerance(dtype=torch.float32)
    assert len(found.packed) == len(found.unpacked) == 3 and (found.speed_ups > 0).all()
    assert found.packing_factor == pytest.approx(
        sum(len(held(pair.packed)) for pair in pairs) / sum(len(pair.packed["input_ids"]) for pair in pairs)
    )
    exact = in_float64(engine, pairs)
    with progress_bar(None, "") as bar:
        found = side_by_side(engine, exact, bar=bar)
    assert found.loss_difference <= 1e-12 and found.gradient_difference <= 1e-12
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


def flat(state, prefix=""):
    for name, value in state.items():
        if isinstance(value, dict):
            yield from flat(value, f"{prefix}{name} ")
        else:
            yield f"{prefix}{name}", value


def test_it_changes_nothing_bit_for_bit(store):
    """Not the state, not the caller's generator; the next update, with dropout, is the same."""
    outcomes = []
    for compared in (False, True):
        engine, batches = tiny(store)
        torch.manual_seed(3)
        engine.step(next(batches), 0.01)
        before = dict(flat(engine.state()))
        if compared:
            assert compare_unpacked(engine, batches, updates=2) is not None
            after = dict(flat(engine.state()))
            assert before.keys() == after.keys()
            for name, value in before.items():
                assert torch.equal(value, after[name]) if isinstance(value, torch.Tensor) else value == after[name]
            assert engine.model.training or all(parameter.grad is None for parameter in engine.model.parameters())
        result = engine.step(next(batches), 0.01)
        outcomes.append((result.loss, batches.state(), torch.rand(1).item(), dict(flat(engine.state()))))
        batches.close()
    one, other = outcomes
    assert one[:3] == other[:3]
    assert all(torch.equal(value, other[3][name]) for name, value in one[3].items() if isinstance(value, torch.Tensor))


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
    """Seconds as they are told, and no gradients."""

    def __init__(self, engine, seconds):
        super().__init__(engine)
        self.seconds, self.calls = iter(seconds), []

    def gradients(self, batch, *, alone=False, dropout=False):
        self.calls.append(alone)
        result = StepResult({"loss": 2.0 if alone else 1.5}, next(self.seconds))
        return Gradients(result, {"w": torch.tensor([3.0, 4.0]) if alone else torch.tensor([3.0, 4.5])})


def test_figures_by_hand(store):
    def batch(*sequences_of_row):
        width = 3
        mask = np.array([[1] * width if number else [0] * width for number in sequences_of_row], np.int32)
        present = np.array([[1] * number + [0] * (2 - number) for number in sequences_of_row], np.int32)
        return {"input_mask": mask, "next_sentence_weights": present, "masked_lm_weights": present}

    # Three sequences: in two rows of 2 and 1; unpacked in three rows and an empty one, whose time does not count.
    pair = SameSequences(batch(2, 1), batch(1, 1, 1, 0))
    engine, _ = tiny(store)
    # First a round that does not count; then rounds of (packed 1.5 s, unpacked 4 s) and, unpacked first, (8 s, 1 s).
    timed = Timed(engine, [9.0, 9.0, 4.0, 1.5, 1.0, 8.0])
    with progress_bar(None, "") as bar:
        found = side_by_side(timed, [pair, pair], bar=bar)
    assert timed.calls == [False, True, True, False, False, True]
    assert found.packed.tolist() == [2.0, 3.0] and found.unpacked.tolist() == [1.0, 0.5]
    assert found.packing_factor == 1.5
    assert found.loss_difference == 0.25 and found.gradient_difference == pytest.approx(0.1)
    values = found.to_json()
    assert (values["speedup"], values["speedup_quartiles"]) == (4.0, [3.0, 5.0])
    assert values["packed_sequences_per_second"] == 2.5 and values["unpacked_sequences_per_second"] == 0.75
