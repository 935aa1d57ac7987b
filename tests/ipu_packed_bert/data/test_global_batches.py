"""Global batches: every pack once an epoch, nothing dropped, those held out apart, the same again after a
resumption."""

from collections import Counter
from contextlib import closing

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ipu_packed_bert.data.global_batches import GlobalBatches, Layout, Packs, StoredPacks
from ipu_packed_bert.settings.loading import config_from_tree
from pack_data.building.held_out import held_out_folder
from pack_data.store.data_set import PackStore
from tests.packed_examples import with_scales
from tests.pretraining import global_batches
from tests.refusals import refused
from tests.tiny_runs import tiny_data, tiny_settings


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    with PackStore.open(tiny_data(tmp_path_factory.mktemp("loader") / "data", sequences=90)) as store:
        yield store


def configured(*overrides):
    return config_from_tree(tiny_settings(), "tiny.yml", overrides)


def opened(store, *overrides, factor=2.0, **options):
    return global_batches(store, configured(*overrides), packing_factor=factor, **options)


def packs_in(batch):
    """The real packs of a batch as bytes, which tell them apart; packs of random tokens are all different."""
    return [row.tobytes() for row in batch["input_ids"] if row.any()]


class Counted(Packs):
    """Packs of one number each, for a layout of that field alone."""

    seed = digest = 0
    even_updates = True

    def __init__(self, packs):
        self._packs = packs

    def __len__(self):
        return self._packs

    def order(self, epoch):
        return np.arange(self._packs)

    def batch(self, numbers, epoch):
        return {"input_ids": 1 + numbers.reshape(-1, 1)}

    def alone(self, numbers, epoch):
        raise NotImplementedError

    def again(self):
        raise NotImplementedError


@given(st.integers(1, 130), st.integers(1, 40), st.integers(1, 9), st.integers(1, 4))
def test_updates_of_an_epoch_differ_by_one_pack_at_most(packs, most, micro_batch, ranks):
    """103 texts, 32 an update: the last update had 3, which counted elevenfold."""
    layout = Layout(("input_ids",), {}, micro_batch, -(-most // micro_batch), most)
    of_ranks = [GlobalBatches(Counted(packs), layout, share=(rank, ranks)) for rank in range(ranks)]
    sizes = []
    seen = []
    while of_ranks[0].position.epoch == 0:
        shares = [next(batches)["input_ids"].ravel() for batches in of_ranks]
        assert len({len(share) for share in shares}) == 1
        assert len(shares[0]) % micro_batch == 0
        update = np.concatenate(shares)
        sizes.append(np.count_nonzero(update))
        seen += update[update > 0].tolist()
    for batches in of_ranks:
        batches.close()
    assert seen == list(range(1, packs + 1))
    assert len(sizes) == -(-packs // most)
    assert max(sizes) - min(sizes) <= 1


def all_packs(store):
    return packs_in(store.batch(np.arange(len(store))))


@pytest.mark.parametrize("accumulation", [3, 500])
def test_an_epoch_shows_every_pack_once(store, accumulation):
    """Also in a single update that is larger than the data set."""
    batches = opened(store, f"batch.gradient_accumulation={accumulation}")
    assert (batches.updates_per_epoch == 1) == (accumulation == 500)
    everything = Counter(all_packs(store))
    assert max(everything.values()) == 1
    orders = []
    for epoch in range(3):
        seen = []
        for _number in range(batches.updates_per_epoch):
            assert batches.position.epoch == epoch
            seen += packs_in(next(batches))
        assert Counter(seen) == everything
        orders.append(seen)
    assert batches.position == (3, 0)
    assert orders[0] != orders[1] != orders[2] != orders[0]
    batches.close()


@pytest.mark.parametrize("depth", [3, 2])
def test_held_out_packs_come_in_order_in_batches_of_the_shape_of_training(store, tmp_path, depth):
    """Also those of a data set of a smaller depth: the places that it does not use are empty."""
    evaluation = PackStore.open(held_out_folder(tiny_data(tmp_path / "data", depth=depth)))
    with closing(opened(store, evaluation=evaluation)) as batches, evaluation:
        training = batches.first()
        packs = []
        sequences = masked = 0
        for batch in batches.held_out():
            assert all(batch[name].shape == values.shape for name, values in training.items())
            packs += packs_in(batch)
            sequences += np.count_nonzero(batch["next_sentence_weights"])
            masked += np.count_nonzero(batch["masked_lm_weights"])
        assert packs == all_packs(evaluation)
        assert set(packs).isdisjoint(all_packs(store))
        assert len(packs) > batches.packs_per_update
        assert sequences == evaluation.manifest.sequences
        assert masked == int(evaluation.lengths()["prediction_counts"].sum())


@pytest.mark.parametrize("normalisation", ["token", "sequence"])
def test_scales_normalise_over_the_whole_update(store, normalisation):
    batches = opened(store, "loss.normalisation=" + normalisation, "placement.replicas=2")
    for _ in range(batches.updates_per_epoch):  # the last one has empty packs
        batch = next(batches)
        expected = with_scales(batch, micro_batches=batches.micro_batches_per_update, normalisation=normalisation)
        assert batches.micro_batches_per_update * 2 == batches.packs_per_update == len(batch["input_ids"])
        for name in ("mlm_scale", "nsp_scale"):
            np.testing.assert_array_equal(batch[name], expected[name])
    batches.close()


@given(updates=st.integers(0, 40), ahead=st.integers(1, 4))
def test_resumed_anywhere_the_next_batches_are_the_same(store, updates, ahead):
    undisturbed = opened(store, prefetch=ahead)
    stopped = opened(store)
    for _ in range(updates):
        next(undisturbed)
        next(stopped)
    state = stopped.state()  # what was decoded ahead is not counted as used
    stopped.close()
    assert all(type(value) in (int, str) for value in state.values())
    resumed = opened(store, prefetch=ahead)
    resumed.load_state(state)
    assert resumed.position == undisturbed.position
    for _ in range(3):
        for name, values in next(undisturbed).items():
            np.testing.assert_array_equal(values, resumed.first()[name])
        next(resumed)
    undisturbed.close()
    resumed.close()


def test_the_order_follows_from_the_seed(store):
    def packs(seed):
        batches = opened(store, f"run.seed={seed}")
        updates = [packs_in(next(batches)) for _ in range(3)]
        batches.close()
        return updates

    assert packs(1) == packs(1) != packs(2)


@pytest.mark.parametrize("parts", [2, 3, 4, 5])
def test_several_processes_share_an_update(store, parts):
    """Together they have the rows and the scales of one process, the empty packs of an incomplete update included."""
    setting = "placement.replicas=4"
    whole = opened(store, setting)
    shares = [opened(store, setting, share=(part, parts)) for part in range(parts)]
    for _ in range(2 * whole.updates_per_epoch + 1):
        parts_of_update = [next(share) for share in shares]
        for name, values in next(whole).items():
            joined = np.concatenate([part[name] for part in parts_of_update])
            np.testing.assert_array_equal(values, joined[: len(values)])
            assert name.endswith("_scale") or not joined[len(values) :].any()
        assert {share.position for share in shares} == {whole.position}
        assert ("of them empty" in shares[0].sharing) == (len(joined) > len(values))
        assert len({len(part["input_ids"]) for part in parts_of_update}) == 1
    for loader in [whole, *shares]:
        loader.close()


def test_a_process_decodes_only_its_own_rows(store, monkeypatch):
    read = []
    batch = PackStore.batch
    monkeypatch.setattr(PackStore, "batch", lambda self, numbers: read.append(len(numbers)) or batch(self, numbers))
    batches = opened(store, "placement.replicas=4", share=(1, 4))
    next(batches)
    batches.close()
    assert set(read) == {batches.packs_per_update // 4}


@pytest.mark.parametrize("fields", [("masked_lm_weights", "next_sentence_weights"), ("masked_lm_weights", "positions")])
def test_the_table_counts_what_the_packs_hold(store, fields):
    packs = StoredPacks(store)
    for numbers in (np.arange(0), np.arange(1), np.arange(len(packs))[::-2]):
        batch = packs.batch(numbers, 0)
        counts = packs.count(numbers, 0, fields)
        for name in fields:
            assert counts[name] == np.count_nonzero(batch[name])


def test_what_goes_wrong_in_the_thread_reaches_the_loop(store):
    class Broken(StoredPacks):
        def batch(self, numbers, epoch):
            raise OSError("packs-00001.npy: input/output error")

    batches = GlobalBatches(Broken(store), opened(store).layout)
    with closing(batches), refused("packs-00001.npy", kind=OSError):
        next(batches)


@pytest.mark.parametrize("name, parts", [("packs", 1), ("packs", 3), ("lengths", 3)])
def test_damage_ends_the_run_with_file_pack_and_block(tmp_path, name, parts):
    """The loop gets no batch of changed packs, and no scale of changed counts where processes share an update."""
    folder = tiny_data(tmp_path / "data", sequences=40)
    path = next(folder.glob(f"{name}-*.npy"))
    content = path.read_bytes()
    path.write_bytes(content[:-9] + bytes([content[-9] ^ 4]) + content[-8:])
    output = rf"{path.name}: pack \d+: the checksum of its block 0 \(packs 0 to \d+\)"
    with PackStore.open(folder) as store, closing(opened(store, share=(0, parts))) as batches, pytest.raises(
        ValueError, match=output
    ):
        next(batches)
