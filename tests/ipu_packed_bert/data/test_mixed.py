"""Pre-training on several data sets: each in its share, the same updates for any ranks and after any stop."""

from contextlib import closing

import numpy as np
import pytest

from ipu_packed_bert.commands import pretrain
from ipu_packed_bert.commands.first_build import build_missing
from ipu_packed_bert.data import global_batches as global_batches_
from ipu_packed_bert.data.data_sets import open_packs
from ipu_packed_bert.data.global_batches import StoredPacks
from ipu_packed_bert.settings.loading import load_config
from pack_data.cli.command import run_main
from pack_data.store.data_set import PackStore
from tests.ipu_packed_bert.commands.test_resume import results, stop_at
from tests.pretraining import global_batches
from tests.tiny_runs import tiny_config, tiny_data


@pytest.fixture(scope="module")
def mix(tmp_path_factory):
    """A configuration, and the options that make it a mix of two data sets, the smaller one three times the larger."""
    folder = tmp_path_factory.mktemp("mix")
    first = tiny_data(folder / "data-0", sequences=90, seed=0)
    second = tiny_data(folder / "data-1", sequences=30, seed=1)
    config = tiny_config(folder / "tiny.yml", first)
    return str(config), [f"data.mixed_with=[{second}]", "data.shares=[1, 3]"]


def opened(mix, *overrides):
    return open_packs(
        load_config(mix[0], [*mix[1], *overrides]),
        build_missing,
    )


def packs_of(store):
    return {row.tobytes() for row in store.batch(np.arange(len(store)))["input_ids"]}


def test_every_update_has_the_shares(mix):
    config, store = opened(mix)
    stores = list(map(PackStore.open, config.data.folders))
    alone = list(map(packs_of, stores))
    assert len(store) == sum(map(len, alone))
    assert packs_of(store) == set().union(*alone)
    assert np.array_equal(
        store.lengths(),
        store.lengths(np.arange(len(store))),
    )
    seen = []
    with store, closing(global_batches(store, config)) as batches:
        for _ in range(3 * batches.updates_per_epoch):
            rows = next(batches)["input_ids"]
            seen += [row.tobytes() in alone[1] for row in rows if row.any()]
    expected = 0.75 * np.arange(1, len(seen) + 1)
    assert np.abs(np.cumsum(seen) - expected).max() < 2
    # An epoch's packing factor is that of its packs, three quarters of which are of the second data set.
    first, second = (item.manifest.packing_factor for item in stores)
    mean = 0.25 * first + 0.75 * second
    assert store.manifest.packing_factor == pytest.approx(mean, abs=0.02)


def test_two_ranks_have_the_updates_of_one(mix, monkeypatch):
    config, store = opened(mix)
    whole = StoredPacks(store).order(3)
    monkeypatch.setattr(global_batches_, "_PLACES", 5)
    assert np.array_equal(StoredPacks(store).order(3), whole)
    with store, closing(global_batches(store, config)) as whole:
        again = StoredPacks(store, seed=config.run.seed).again()()
        assert np.array_equal(
            again.order(3),
            whole.packs.order(3),
        )
        ranks = [global_batches(store, config, share=(rank, 2)) for rank in range(2)]
        for _ in range(whole.updates_per_epoch + 2):
            parts = [next(rank) for rank in ranks]
            for name, values in next(whole).items():
                joined = np.concatenate([part[name] for part in parts])
                assert np.array_equal(joined[: len(values)], values), name
        for item in ranks:
            item.close()


def test_resumed_it_has_the_losses_of_a_run_that_was_not_stopped(mix, tmp_path, monkeypatch, capsys):
    line = ["--config", mix[0], *(word for each in mix[1] for word in ("--set", each))]
    assert run_main(pretrain.main, [*line, "--out", str(tmp_path / "undisturbed")]) == 0
    with monkeypatch.context() as patch:
        stop_at(patch, 7, None)
        assert run_main(pretrain.main, [*line, "--out", str(tmp_path / "run")]) == 2
    assert run_main(pretrain.main, ["--resume", str(tmp_path / "run")]) == 0
    assert results(tmp_path / "run") == results(tmp_path / "undisturbed")
    other = [
        "--resume",
        str(tmp_path / "run"),
        "--steps",
        "14",
        "--set",
        "optimizer.schedule_steps=14",
    ]
    assert run_main(pretrain.main, [*other, "--set", "data.shares=[1, 1]"]) == 2
    assert "data.shares" in capsys.readouterr().err
