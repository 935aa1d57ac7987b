"""Fine-tuning in several ways: the same updates are the same, a control that passes shows nothing."""

import json
import lzma
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from evidence import __main__ as command
from evidence import fine_tuning
from evidence.fine_tuning_runs import Learner, Timing, no_model, same_updates, times, train
from evidence.fine_tuning_shown import FineTuningShown
from evidence.ways import (
    AGAIN,
    INFERENCE,
    LONGEST,
    MAXIMUM,
    NO_MASK,
    PACKED,
    SORTED,
    TRAINING,
    WAYS,
    Ways,
    slots_per_token,
)
from ipu_packed_bert.model.optimizer import build_optimizer
from ipu_packed_bert.tasks.inputs import Inputs, pack_inputs
from ipu_packed_bert.training.examples import prepare
from pack_data.cli.command import run_main
from tests.fine_tuning_files import tiny_checkpoint, tiny_config, tiny_squad, tiny_table, training_file


def learner(checkpoint, folder, kind="single_label", *, dtype=torch.float64, **sections):
    made = prepare(tiny_config(checkpoint, training_file(folder, kind), task=kind, **sections))
    made.engine.model.to(dtype)
    made.engine.optimizer = build_optimizer(made.engine.model, made.config.optimizer, betas=(0.9, 0.999))
    return Learner(made), made


@pytest.mark.parametrize("kind", ["single_label", "squad"])
def test_without_a_model_the_most_frequent_answer_scores(checkpoint, tmp_path, kind):
    task = learner(checkpoint, tmp_path, kind)[0].task
    found = no_model(task)
    if kind == "single_label":
        labels = task.evaluation.targets["labels"]
        assert found == pytest.approx(100 * np.mean(labels == np.bincount(task.training.targets["labels"]).argmax()))
    else:  # by slots alone, which say something only where answers stand at the same ones
        starts = task.training.slot_targets["start_positions"]
        assert 0 < np.bincount(starts).max() < len(starts) and 0 <= found < 60


@pytest.fixture(scope="module")
def ways():
    lengths = np.random.default_rng(4).integers(3, 33, 70)
    total = int(lengths.sum())
    inputs = Inputs(lengths, np.ones(total, np.int32), np.zeros(total, np.int32))
    packing = pack_inputs(inputs, max_sequence_length=32, packer="spfhp", max_sequences_per_pack=None)
    return Ways(lengths, packing, rows_of_pass=3, rows_of_update=6, seed=2)


@pytest.mark.parametrize("way", WAYS)
def test_every_way_has_each_sequence_once_and_no_larger_passes(ways, way):
    updates = ways.updates(way)
    assert len(updates) == ways.updates_per_epoch > 3
    for passes in [*([each for update in updates for each in update],), list(ways.all_passes(way))]:
        assert sorted(number for each in passes for number in each.sequences) == list(range(70))
        for each in passes:
            assert each.size <= 3 * 32
            assert all(0 < ways.lengths[list(row)].sum() <= each.slots for row in each.rows)
    assert ways.updates(way, 1) != updates and ways.updates(way) == updates


def test_three_ways_have_the_same_updates_and_sorted_ones_nearly_equal_lengths(ways):
    def sequences(way):
        return [sorted(number for each in update for number in each.sequences) for update in ways.updates(way)]

    assert sequences(PACKED) == sequences(MAXIMUM) == sequences(LONGEST) != sequences(SORTED)
    spans = [np.ptp(ways.lengths[each]) for each in sequences(SORTED)]
    assert sum(spans) <= 32 and {len(each) for each in sequences(SORTED)} <= {70 // len(spans), 70 // len(spans) + 1}
    slots = {way: slots_per_token(ways.updates(way), ways.lengths) for way in WAYS}
    assert slots[MAXIMUM] == pytest.approx(70 * 32 / ways.lengths.sum())
    assert slots[MAXIMUM] > slots[LONGEST] > 1.3 > max(slots[SORTED], slots[PACKED]) >= 1.0
    assert [each for update in ways.sample(PACKED, 2) for each in update] == [
        *ways.updates(PACKED)[0],
        *ways.updates(PACKED)[1],
    ]
    middles = [
        np.mean(ways.lengths[[n for each in update for n in each.sequences]]) for update in ways.sample(SORTED, 3)
    ]
    assert middles[0] < middles[1] < middles[2] and abs(np.mean(middles) - ways.lengths.mean()) < 2


@pytest.mark.parametrize("kind", ["single_label", "squad"])
def test_ways_with_the_same_updates_make_the_same_weights_and_the_engine_makes_them_too(checkpoint, tmp_path, kind):
    weights = {}
    for way in (PACKED, MAXIMUM, LONGEST, NO_MASK):
        one, made = learner(checkpoint, tmp_path, kind)
        assert one.ways(TRAINING).updates_per_epoch == made.batches.updates_per_epoch
        for passes in one.ways(TRAINING).updates(PACKED if way == NO_MASK else way):
            one.update(passes, 1e-3, way)
        outputs = [one.predict(one.ways(INFERENCE).all_passes(each), each) for each in WAYS]
        for others in outputs[1:]:
            assert max(float(np.abs(a - b).max()) for a, b in zip(outputs[0], others)) < 1e-10
        weights[way] = torch.cat([each.detach().flatten() for each in made.engine.model.parameters()])
    start, made = learner(checkpoint, tmp_path, kind)
    before = torch.cat([each.detach().flatten() for each in made.engine.model.parameters()])
    for _ in range(made.batches.updates_per_epoch):
        batch = next(made.batches)
        number = made.batches.micro_batches_per_update
        batch["scale"] = np.full(len(batch["scale"]), number / np.count_nonzero(batch["sequence_numbers"]))
        made.engine.step(batch, 1e-3)
    weights["engine"] = torch.cat([each.detach().flatten() for each in made.engine.model.parameters()])
    moved = float((weights[PACKED] - before).norm())
    apart = {way: float((found - weights[PACKED]).norm()) / moved for way, found in weights.items()}
    assert max(apart[MAXIMUM], apart[LONGEST], apart["engine"]) < 1e-6 and apart[NO_MASK] > 1e-2


def test_a_run_says_what_each_example_scores(checkpoint, tmp_path):
    one, _ = learner(checkpoint, tmp_path, dtype=torch.float32, optimizer={"learning_rate": 1e-3})
    (row,) = train(one, PACKED, steps=8)
    assert row["metrics"]["accuracy"] == pytest.approx(np.mean(row["points"])) and row["updates"] == 8
    assert row["answered_packed"]["different"] == 0
    assert row["answered_packed"]["logits"] < 1e-5 < 1e-4 < row["answered_no_mask"]["logits"]


def test_the_experiment_trains_and_answers_alike_packed_and_padded(tmp_path, capsys):
    start = tiny_checkpoint(tmp_path / "bert", positions=384)
    for folder in ("squad", "banking77"):
        (tmp_path / "data" / folder).mkdir(parents=True)
    for name, seed in (("dev_half_v2", 1), ("xquad_en", 2)):
        plain = tiny_squad(tmp_path / "plain.json", seed=seed)
        (tmp_path / "data" / "squad" / f"{name}.json.xz").write_bytes(lzma.compress(plain.read_bytes()))
    for name in ("train", "test"):
        plain = tiny_table(tmp_path / "plain.csv", "single_label", texts=60)
        (tmp_path / "data" / "banking77" / f"{name}.csv.xz").write_bytes(
            lzma.compress(plain.read_bytes().replace(b"text,label", b"text,category"))
        )
    arguments = ["fine_tuning", "--out", str(tmp_path / "out"), "--size", "quick", "--seeds", "2", "--no-plot"]
    arguments += ["--checkpoint", str(start)]
    assert run_main(command.main, arguments) == 2
    assert "requires data: pass --data-dir DIR" in capsys.readouterr().err and not (tmp_path / "out").exists()
    arguments += ["--data-dir", str(tmp_path / "data")]
    run_main(command.main, arguments + ["--tasks", "banking77", "--only", "times"])
    assert [path.name for path in (tmp_path / "out" / "cells").iterdir()] == ["banking77_times-1.json"]
    assert [cell.stem for cell in fine_tuning.cells("squad", 2, "answers")] == ["squad_packed-1", "squad_packed-2"]
    capsys.readouterr()
    # So small a network learns nothing, so that its controls cannot fail, and the page says so.
    assert run_main(command.main, arguments) == 0
    out = capsys.readouterr().out
    assert "shows nothing" in out and "| SQuAD at 384, packed" in out and "| BANKING77 at 64, sorted" in out
    rows = [json.loads(path.read_text()) for path in (tmp_path / "out" / "cells").glob("*.json")]
    assert len(rows) == 2 * 8 + 1 and (tmp_path / "out" / "start" / "config.json").exists()
    final = {(row["variant"], row["seed"]): row["rows"][-1] for row in rows}
    for name in ("squad", "banking77"):
        for seed in (1, 2):
            packed, ordered = final[f"{name}_packed", seed], final[f"{name}_sorted", seed]
            assert all(packed[field] == ordered[field] for field in ("sequences", "tokens", "updates"))
            assert packed["answered_packed"]["different"] == 0


def test_times_are_of_the_same_sequences_in_every_round(checkpoint, tmp_path):
    one, _ = learner(checkpoint, tmp_path)
    rows = times(one, Timing(2, 2, 20))
    assert len(rows) == 2 * 2 * 5
    for way in (*WAYS, AGAIN):
        for what in (TRAINING, INFERENCE):
            first, second = (row for row in rows if (row["what"], row["way"]) == (what, way))
            assert all(first[name] == second[name] for name in ("sequences", "tokens", "slots"))
    assert len({row["tokens"] for row in rows if row["what"] == INFERENCE}) == 1
    apart = {row["way"]: row["logits"] for row in same_updates(one, updates=2, sequences=10)}
    assert max(apart[MAXIMUM], apart[LONGEST]) < 1e-10 < 1e-6 < min(apart[NO_MASK], apart["start"])


def folder_of(path, *, sorted_right=0.9, packed_right=0.9, no_mask_right=0.6, again=1.0, sorted_time=1.0, spread=0.01):
    """Cells as an experiment leaves them, made up."""
    (path / "cells").mkdir(parents=True)
    options = type("Options", (), {"data_dir": ".", "size": "default", "checkpoint": "some"})
    (path / "settings.json").write_text(json.dumps(fine_tuning.settings(options)))
    slots = dict.fromkeys(WAYS, 1.5)
    known = {"sequences": 100, "tokens": 1000, "packing_factor": 2.0, "slots_per_token": slots}
    task = {TRAINING: known, INFERENCE: known, "updates_per_epoch": 5, "packing_seconds": 0.1, "no_model": 1.3}
    (path / "facts.json").write_text(json.dumps({"machine": "here", "banking77": task}))
    random = np.random.default_rng(1)
    cells = {}
    for way, right in ((PACKED, packed_right), (SORTED, sorted_right), (NO_MASK, no_mask_right)):
        for seed in (1, 2, 3):
            points = (100 * (random.random(2000) < right)).astype(int).tolist()
            same = {"different": 0, "answers": 2000, "logits": 1e-6}
            cells[f"{way}-{seed}"] = [
                {"points": points, "answered_packed": same, "answered_no_mask": {**same, "different": 700}}
            ]
    logits = {"start": 1.0, MAXIMUM: 1e-6, LONGEST: 1e-6, NO_MASK: 0.5}
    cells["same-1"] = [{"way": way, "logits": value} for way, value in logits.items()]
    seconds = {MAXIMUM: 3.0, LONGEST: 2.0, SORTED: sorted_time, PACKED: 1.0, AGAIN: again}
    cells["times-1"] = [
        dict(
            what=what,
            way=way,
            seconds=value * random.uniform(1 - spread, 1 + spread),
            tokens=500,
            sequences=50,
            slots=750,
        )
        for what in (TRAINING, INFERENCE)
        for _ in range(6)
        for way, value in seconds.items()
    ]
    for name, rows in cells.items():
        variant, seed = name.rsplit("-", 1)
        record = dict(variant=f"banking77_{variant}", seed=int(seed), seconds=1.0, rows=rows)
        (path / "cells" / f"banking77_{name}.json").write_text(json.dumps(record))
    return path


def test_times_whose_control_fails_show_nothing(tmp_path):
    good = FineTuningShown(folder_of(tmp_path / "good"))
    assert good.timing_shown("banking77", TRAINING) and good.same_shown("banking77")
    assert good.answers("banking77") == (0, 2100, 6000) and good.answers("squad") is None
    found, control = (good.score_against_sorted("banking77", way) for way in (PACKED, NO_MASK))
    assert abs(found.mean) < 1.5 and control.mean == pytest.approx(-30, abs=3) and found.seeds == 3
    assert (
        "packing gains nothing over rows sorted" in good.text() and "faster than rows padded to the max" in good.text()
    )
    barely = FineTuningShown(folder_of(tmp_path / "barely", sorted_time=1.015, spread=0.03))
    assert "packing gains nothing over rows sorted" in barely.text()  # so little is noise
    assert good.against_packed("banking77", TRAINING, MAXIMUM).mean == pytest.approx(3.0, rel=0.02)
    assert good.per_sequence("banking77", TRAINING, PACKED).mean == pytest.approx(20.0, rel=0.02)
    # 1 s for 750 slots, of which all 100 sequences need 1500
    slow = FineTuningShown(folder_of(tmp_path / "again", again=1.2))
    assert not slow.timing_shown("banking77", TRAINING) and "shows nothing" in slow.text()
    noisy = FineTuningShown(folder_of(tmp_path / "noisy", spread=0.3))  # no narrower than what is to be told
    again = noisy.against_packed("banking77", TRAINING, AGAIN)
    assert again.low < 0.9 < 1.0 < again.high and "shows nothing" in noisy.text()
    assert "slower than rows sorted" in FineTuningShown(folder_of(tmp_path / "sorted", sorted_time=0.8)).text()


def test_pictures_are_drawn_from_whichever_cells_are_finished(tmp_path):
    pytest.importorskip("matplotlib")
    folder = folder_of(tmp_path / "run")
    (picture,) = FineTuningShown(folder).draw(tmp_path, "fine_tuning_")
    assert picture.stat().st_size > 1000
    for name in ("times-1", "same-1", "sorted-1", "sorted-2", "sorted-3"):
        (folder / "cells" / f"banking77_{name}.json").unlink()
    assert FineTuningShown(folder).draw(tmp_path)


def test_whichever_cells_are_finished_are_shown(tmp_path):
    folder = folder_of(tmp_path / "run")
    files = sorted((folder / "cells").glob("*.json"))
    for path in files[::-1]:
        path.unlink()
        found = FineTuningShown(folder)
        assert found.text()
    assert not found.draw(tmp_path) and "No run" in found.text()


def test_settings_hold_no_path_of_a_machine(tmp_path):
    """They are committed with the results; `trained` has the same rule."""
    options = SimpleNamespace(size="default", data_dir=tmp_path, checkpoint=str(tmp_path / "bert"))
    found = json.dumps(fine_tuning.settings(options))
    assert '"bert"' in found and str(tmp_path) not in found
