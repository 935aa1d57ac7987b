"""Experiments: cells are measured once, ablations change what they say, a control that passes shows nothing."""

import importlib
import json
import os
import re
import shutil
import signal
import sys
import threading
import types
from dataclasses import replace

import numpy as np
import pytest

from evidence import __main__ as command
from evidence import figures, packed_runs, runner
from evidence.packed_runs import SIZES, PretrainingSetup
from evidence.pretraining import changed
from evidence.pretraining_shown import PretrainingShown
from evidence.pretraining_variants import VARIANTS, Variant
from evidence.runner import CELLS, SETTINGS, Cell, Runner, finished_cells
from evidence.statistics import Interval, Scores, difference, verdict
from evidence.writer import Table, bars, curve, limited
from ipu_packed_bert.data.global_batches import StoredPacks, in_order
from ipu_packed_bert.engine.host import HostEngine
from ipu_packed_bert.tasks.pretraining import Pretraining
from pack_data.cli.command import run_main
from pack_data.reading import files

CELLS_WANTED = [Cell("packed", 0), Cell("packed", 1), Cell("unpacked, all", 0)]


# ---- cells


def test_a_stopped_experiment_goes_on_with_the_missing_cells(tmp_path):
    measured = []

    def measure(cell, stop_at=None):
        if cell == stop_at:
            raise KeyboardInterrupt
        measured.append(cell)
        return [{"loss": cell.seed + 0.5}]

    with pytest.raises(KeyboardInterrupt):
        Runner(tmp_path / "run", {"size": 1}).run(CELLS_WANTED, lambda cell: measure(cell, CELLS_WANTED[2]))
    rows = Runner(tmp_path / "run", {"size": 1}).run(CELLS_WANTED, measure)
    assert measured == CELLS_WANTED
    assert [(row["variant"], row["seed"], row["loss"]) for row in rows] == [
        ("packed", 0, 0.5),
        ("packed", 1, 1.5),
        ("unpacked, all", 0, 0.5),
    ]
    assert set(finished_cells(tmp_path / "run")) == set(CELLS_WANTED)
    with pytest.raises(ValueError, match="measured with size"):
        Runner(tmp_path / "run", {"size": 2})


def test_two_processes_share_the_cells(tmp_path, monkeypatch):
    """Here two threads: a lock belongs to an open file. One has a cell until the other has finished all others."""
    monkeypatch.setattr(files, "LOCK_PATIENCE", 0.0)
    monkeypatch.setattr(runner, "_WAIT", 0.01)
    measured, held, others_done = [], threading.Event(), threading.Event()

    def slow(cell):
        held.set()
        assert others_done.wait(60)
        measured.append(cell)
        return [{"by": "slow"}]

    def quick(cell):
        measured.append(cell)
        if len(measured) == 2:
            others_done.set()
        return [{"by": "quick"}]

    first, second = (Runner(tmp_path / "run", {}) for _ in range(2))
    found = []
    thread = threading.Thread(target=lambda: found.extend(first.run(CELLS_WANTED, slow)))
    thread.start()
    assert held.wait(60)
    rows = second.run(CELLS_WANTED, quick)
    thread.join(60)
    assert [row["by"] for row in rows] == ["slow", "quick", "quick"] and found == rows
    assert sorted(measured) == sorted(CELLS_WANTED)


def test_a_killed_run_goes_on_inside_its_cell_and_ends_as_if_it_had_not_been(tmp_path, capsys):
    """Also: each held-out sequence is scored as `evaluate` scores it, without padding or with it."""
    size = SIZES["quick"]._replace(resumable=True, points=5, sequences=600)
    setup = PretrainingSetup(tmp_path / "data", size, None)
    config = setup.config("packed", seed=1)
    whole = setup.run(config, unfinished=tmp_path / "whole")
    updates = 0

    def kill(batch):
        nonlocal updates
        updates += 1
        if updates == config.run.steps // 2:
            os.kill(os.getpid(), signal.SIGTERM)
        return batch

    with pytest.raises(KeyboardInterrupt):
        setup.run(config, kill, tmp_path / "killed")
    again = setup.run(config, unfinished=tmp_path / "killed")

    def without_time(rows):
        return [{name: value for name, value in row.items() if "seconds" not in name} for row in rows]

    assert len(whole) >= 4 and without_time(whole) == without_time(again)
    assert whole[-1]["mlm_loss"] < whole[0]["mlm_loss"]
    with setup.store("held_out") as store:
        task = Pretraining(replace(config, data=replace(config.data, max_sequences_per_pack=1)), store.schema)
        engine = HostEngine(config, task, packing_factor=1.0)
        engine.load_state(packed_runs.load_newest(tmp_path / "killed").engine)
        layout = task.layout(replace(config, optimizer=replace(config.optimizer, packing_adjustment="none")), 1.0)
        found = task.evaluate(engine, in_order(StoredPacks(store), layout))
    for name in ("mlm_loss", "mlm_accuracy", "nsp_loss", "nsp_accuracy"):
        assert whole[-1][name] == pytest.approx(found.metrics[name], abs=2e-6)
    facts = setup.facts()
    assert sum(whole[-1]["mlm_centinats"]) / 100 / sum(facts["masked"]) == pytest.approx(
        whole[-1]["mlm_loss"], abs=1e-3
    )
    assert facts["sequences"]["held_out"] == len(facts["masked"]) == len(whole[-1]["nsp_millinats"])


def test_no_topic_document_is_on_both_sides(tmp_path, capsys):
    setup = PretrainingSetup(tmp_path / "data", SIZES["quick"], None)
    with setup.store("unpacked") as training, setup.store("held_out") as held_out:
        made = [store.manifest.made_with for store in (training, held_out)]
    assert made[0]["sources"] == made[1]["sources"] and [each["side"] for each in made] == ["training", "held-out"]
    with pytest.raises(ValueError, match="made with"):
        PretrainingSetup(tmp_path / "data", SIZES["quick"]._replace(amount=151), None)


# ---- statistics


def scores(random, sequences, shift=0.0):
    masked = np.full(sequences, 10)
    return Scores(masked, 10 * (5 + shift + random.normal(0, 1, sequences)), random.exponential(0.5, sequences))


def test_intervals_cover_the_true_difference_as_often_as_they_say():
    """Seeds differ by 0.05, sequences by 1: with 3 seeds and 400 sequences both matter."""
    random, covered, resampled = np.random.default_rng(1), 0, 0
    for _ in range(120):
        base = scores(random, 400)
        pairs = []
        for _seed in range(3):
            apart = 0.1 + random.normal(0, 0.05) + random.normal(0, 1, 400)
            pairs.append((base._replace(mlm=base.mlm + 10 * apart), base))
        found = difference([one for one, _ in pairs], [other for _, other in pairs])
        covered += found.low <= 0.1 <= found.high
        assert found.seeds == 3 and found.low < found.mean < found.high
        seeds = np.array([one.mlm_loss - other.mlm_loss for one, other in pairs])
        drawn = seeds[random.integers(3, size=(1000, 3))].mean(axis=1)
        resampled += np.quantile(drawn, 0.05) <= 0.1 <= np.quantile(drawn, 0.95)
    assert covered >= 0.85 * 120  # of 90 %
    assert resampled < 0.85 * 120  # what resampling three seeds would give


def test_a_difference_is_that_of_the_means_and_pairs_must_be_pairs():
    random = np.random.default_rng(2)
    first, second = scores(random, 50), scores(random, 50, shift=0.3)
    found = difference([second, second], [first, first])
    assert found.mean == pytest.approx(second.loss - first.loss)
    alone = difference([second], [first], masked_only=True)
    assert alone.mean == pytest.approx(second.mlm_loss - first.mlm_loss) and alone.seeds == 1
    assert difference([first, first], [first, first]) == Interval(0.0, 0.0, 0.0, 2)
    with pytest.raises(ValueError, match="no pairs"):
        difference([first], [first, second])
    with pytest.raises(ValueError, match="same held-out"):
        difference([first], [second._replace(masked=second.masked + 1)])
    with pytest.raises(ValueError, match="masked tokens only"):
        difference([first], [second._replace(nsp=None)])


def test_a_verdict_needs_a_control_that_fails():
    cost, near, far = Interval(0.4, 0.3, 0.5, 2), Interval(0.02, -0.05, 0.08, 3), Interval(0.4, 0.3, 0.5, 3)
    assert verdict(cost, near, far)[:2] == (True, True)  # margin 0.1
    assert verdict(cost, far, far)[:2] == (True, False)
    assert verdict(cost, near, near)[:2] == (False, False)  # the control passes as well
    assert verdict(cost, near, Interval(0.2, -0.1, 0.5, 3))[:2] == (False, False)  # it may cost nothing
    assert verdict(cost, near, Interval(-0.4, -0.5, -0.3, 3))[:2] == (False, False)  # it is better
    assert verdict(Interval(0.4, -0.1, 0.9, 2), near, far)[:2] == (False, False)  # the mask may cost nothing
    assert verdict(None, near, far)[:2] == (False, False)
    assert verdict(cost, near._replace(seeds=1), far)[:2] == (False, False)
    assert not Interval(0.0, -0.11, 0.05, 3).within(0.1) and not Interval(0.0, -0.05, 0.1, 3).within(0.1)


# ---- what is run and what is shown


def test_every_name_is_an_experiment(capsys):
    assert command.EXPERIMENTS
    for name in command.EXPERIMENTS:
        module = importlib.import_module("evidence." + name)
        assert module.SUMMARY and callable(module.run) and callable(module.settings)
        assert {"quick", "full", getattr(module, "DEFAULT", "default")} <= set(module.SIZES)
    assert command.main(["--help"]) == 0
    listed = capsys.readouterr().out
    assert all(name in listed for name in command.EXPERIMENTS)
    assert run_main(command.main, ["nonsense"]) == 2
    message = capsys.readouterr().err
    assert message.count("\n") == 1 and all(name in message for name in ("nonsense", *command.EXPERIMENTS))


@pytest.mark.parametrize("name", ["exactness", "pretraining", "fine_tuning"])
def test_an_experiment_is_made_by_one_process(name, tmp_path, monkeypatch, capsys):
    torchrun = {"WORLD_SIZE": "2", "RANK": "0", "LOCAL_RANK": "0", "MASTER_ADDR": "localhost", "MASTER_PORT": "29500"}
    monkeypatch.chdir(tmp_path)
    for variable, value in torchrun.items():
        monkeypatch.setenv(variable, value)
    assert run_main(command.main, [name]) == 2
    text = capsys.readouterr().err
    assert text.startswith("error: WORLD_SIZE is 2: every process of torchrun") and text.count("\n") == 1
    assert list(tmp_path.iterdir()) == []


def test_ablations_change_the_mask_and_the_positions_and_nothing_else():
    batch = {
        "input_mask": np.array([[1, 1, 2, 2, 2, 0]], np.int32),
        "positions": np.array([[0, 1, 0, 1, 2, 0]], np.int32),
        "input_ids": np.array([[2, 3, 2, 5, 3, 0]], np.int32),
    }
    no_mask, no_positions, both = (
        changed(batch, VARIANTS[name], 1) for name in ("no_mask", "no_positions", "separators")
    )
    assert no_mask["input_mask"].tolist() == [[1, 1, 1, 1, 1, 0]] and no_mask["positions"] is batch["positions"]
    assert no_positions["positions"].tolist() == [[0, 1, 2, 3, 4, 0]]
    assert no_positions["input_mask"] is batch["input_mask"]
    assert both["input_mask"].tolist() == [[1, 1, 1, 1, 1, 0]] and both["positions"].tolist() == [[0, 1, 2, 3, 4, 0]]
    assert both["input_ids"] is batch["input_ids"] and batch["positions"].tolist() == [[0, 1, 0, 1, 2, 0]]
    assert {name: array.dtype for name, array in both.items()} == {name: array.dtype for name, array in batch.items()}
    assert changed(batch, Variant("as it is"), 1) is batch


def test_a_run_too_small_to_learn_says_that_it_shows_nothing(tmp_path, capsys):
    """Exit status 1; its cells can be taken into the results, and give the same table again."""
    out = tmp_path / "pretraining_quick"
    arguments = ["pretraining", "--size", "quick", "--seeds", "2", "--variants", "betas", "--no-plot"]
    assert command.main([*arguments, "--out", str(out)]) == 1
    assert "shows nothing" in capsys.readouterr().out
    found = [cell.variant for cell in finished_cells(out)]
    assert sorted(set(found)) == ["betas", "no_mask", "packed", "unpacked"] and len(found) == 2 * 2 + 2 * 4
    root = tmp_path / "checkout"
    (root / "docs").mkdir(parents=True)
    (root / figures.PAGE).write_text(
        "# Evidence\n<!-- results: pretraining_quick -->\nold\n<!-- end of results -->\nmore\n"
    )
    figures.take(out, root)
    text = figures.page((root / figures.PAGE).read_text(), figures.results(root))
    assert (out / "table.md").read_text() in text and "old" not in text and text.endswith("more\n")
    with pytest.raises(ValueError, match="each needs one block"):
        figures.page("# Evidence\n", figures.results(root))


def test_rules_without_all_their_runs_keep_their_columns(tmp_path):
    """`none` has no run at depth 2: its losses stay below the p of their own updates."""
    (tmp_path / CELLS).mkdir()
    facts = dict(masked=[10, 10], baseline={}, sequences={}, packing_factor=3.0)
    (tmp_path / "facts.json").write_text(json.dumps(facts))
    (tmp_path / "settings.json").write_text("{}")
    losses = {"unpacked": 0, "betas": 1, "betas_depth_2": 2, "betas_times_2": 3, "none": 4, "none_times_2": 5}
    losses.update(depth_2=6, packed=7)
    updates = {"unpacked": 60, "betas": 20, "betas_depth_2": 30, "betas_times_2": 10, "none": 20, "none_times_2": 10}
    updates.update(depth_2=60, packed=60)

    def finish(name):
        row = dict(mlm_centinats=[1000 * losses[name]] * 2, nsp_millinats=[0, 0], held_out_data="x")
        row.update(mlm_loss=losses[name], nsp_loss=0.0, updates=updates[name])
        record = dict(variant=name, seed=1, seconds=1.0, rows=[row])
        (tmp_path / CELLS / f"{name}-1.json").write_text(json.dumps(record))

    for name in list(losses)[1:]:
        finish(name)
    assert PretrainingShown(tmp_path).rules_table() is None  # nothing to compare with yet
    finish("unpacked")
    table = [
        [cell.strip() for cell in line.strip("|").split("|")]
        for line in PretrainingShown(tmp_path).rules_table().markdown().splitlines()
        if line.startswith("|")
    ]
    head, _, betas, none, accumulation = table
    assert head == ["rule", "p = 2.0", "p = 3.0", "p = 6.0"]
    assert [cell.split(" ")[0] for cell in betas[1:]] == ["+2.00", "+1.00", "+3.00"]
    assert [cell.split(" ")[0] for cell in none[1:]] == ["", "+4.00", "+5.00"]
    assert [cell.split(" ")[0] for cell in accumulation[1:]] == ["+6.00", "+7.00", ""]


def test_declared_values_are_drawn_and_written_as_they_are():
    table = Table([("n", str), ("half", lambda n: None if n % 2 else str(n // 2))], [1, 4], [["last"]])
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in table.markdown().splitlines()]
    assert [cells[0], *cells[2:]] == [["n", "half"], ["1", ""], ["4", "2"], ["last", ""]]
    line = curve("seeds", np.array([[1, 2], [1, 2]]), np.array([[3.0, 5.0], [5.0, 4.0]]))
    assert line[1:3] == ((1.0, 2.0), (4.0, 4.5)) and (line.lower, line.upper) == ((3.0, 4.0), (5.0, 5.0))
    drawn = bars("", "s", {"a": {"x": Interval(1.0, 0.5, 2.0, 3)}, "b": {"y": None}})
    assert drawn.categories == ("x", "y") and [each.values for each in drawn.series] == [(1.0, None), (None, None)]
    assert (drawn.series[0].lower, drawn.series[0].upper) == ((0.5, None), (2.0, None))


def test_a_wide_interval_is_cut_and_leaves_room_for_the_others():
    found = {
        name: Interval(mean, mean - half, mean + half, 2) for name, mean, half in (("a", 0.0, 0.1), ("b", 1.0, 9.0))
    }
    cut = limited({**found, "c": Interval(0.2, 0.1, 0.3, 2)}, 0.1)
    assert cut["a"] == found["a"] and set(cut) == {"a", "b (interval cut)", "c"}
    assert -1.0 < cut["b (interval cut)"].low < -0.2 and 1.0 < cut["b (interval cut)"].high < 2.0
    assert limited({"a": found["a"]}, 0.0) == {"a": found["a"]}


def test_the_page_says_what_the_committed_results_say():
    root = figures.Path(__file__).resolve().parents[2]
    text, shown = (root / figures.PAGE).read_text(encoding="utf-8"), figures.results(root)
    assert figures.page(text, shown) == text
    shown_there = set(re.findall(r"\(evidence/(\w+)\.png\)", text))
    assert shown_there == {path.stem for path in (root / figures.PICTURES).glob("*.png")}
    assert all(any(picture.startswith(f"{name}_") for name in shown) for picture in shown_there)
    for name in shown:
        pictures = [root / figures.PICTURES / f"{each}.png" for each in shown_there if each.startswith(f"{name}_")]
        kept = json.loads((root / figures.RESULTS / name / figures.DRAWN).read_text())
        assert figures.drawn(root / figures.RESULTS / name, pictures) == kept, f"{name}: run `make figures`"
        assert "/" not in (root / figures.RESULTS / name / "settings.json").read_text(), "a path in committed settings"


def test_the_numbers_of_the_claims_stand_below_them():
    """So that a table made anew changes the claims above it, too."""
    text = (figures.Path(__file__).resolve().parents[2] / figures.PAGE).read_text(encoding="utf-8")
    claims, below = text.split("## Method")
    rows = [line.split("|")[1:-1] for line in claims.splitlines() if line.startswith("| [")]
    came_out = [number for row in rows for number in re.findall(r"[+-]?\d+\.\d+(?:e-\d+)?", row[2])]
    assert len(came_out) > 10
    shown = re.findall(r"[+-]?\d+\.\d+(?:e-\d+)?", below)
    assert [number for number in came_out if number not in shown] == []


class Numbers:
    """What a small experiment shows."""

    def __init__(self, folder):
        self.folder = folder

    def text(self):
        return f"{len(finished_cells(self.folder))} cells\n"

    def draw(self, folder, stem=""):
        folder.mkdir(exist_ok=True)
        (folder / f"{stem}bars.png").write_bytes(b"")
        return [folder / f"{stem}bars.png"]


@pytest.fixture
def two_experiments(monkeypatch, tmp_path):
    """`speed`, which shows nothing, and `speed_rows`; and a page with a block of results."""
    for name in ("speed", "speed_rows"):
        module = types.ModuleType(f"evidence.{name}")
        monkeypatch.setitem(sys.modules, module.__name__, module)
        monkeypatch.setitem(command.EXPERIMENTS, name, "")
    module.shown = Numbers
    root = tmp_path / "checkout"
    (root / "docs").mkdir(parents=True)
    (root / figures.PAGE).write_text("# Evidence\n<!-- results: speed_rows_quick -->\n<!-- end of results -->\n")
    return root


def a_run(folder, seeds, size="quick"):
    Runner(folder, {"size": size}).run([Cell("packed", seed) for seed in seeds], lambda cell: [{"loss": 1.0}])
    return folder


def test_a_run_of_any_experiment_is_taken_into_the_page(two_experiments, tmp_path, capsys):
    root, run = two_experiments, tmp_path / "runs" / "speed_rows_quick"
    take = ["--root", str(root), "--take", str(run)]
    for seeds, size, cells in (([1], "quick", 1), ([2, 3], "quick", 3), ([4, 5], "full", 2)):
        shutil.rmtree(run, ignore_errors=True)
        a_run(run, seeds, size)
        assert figures.main(take) == 0
        assert f"\n{cells} cells\n" in (root / figures.PAGE).read_text()  # of other settings only the new ones
        assert (root / figures.PICTURES / "speed_rows_quick_bars.png").exists()
    taken = sorted(path.name for path in (root / figures.RESULTS / run.name).iterdir())
    assert taken == ["cells", figures.DRAWN, "settings.json"]


@pytest.mark.parametrize(
    "name, seeds, message",
    [
        ("nonsense_rows", [1], "no results of an experiment"),
        ("speedy", [1], "no results of an experiment"),
        ("speed_rows_quick", [], "has no finished cell"),
        ("speed_rows_full", [1], "each needs one block"),
    ],
)
def test_what_cannot_be_shown_is_one_line_and_changes_nothing(two_experiments, tmp_path, capsys, name, seeds, message):
    root = two_experiments
    before = (root / figures.PAGE).read_text()
    assert run_main(figures.main, ["--root", str(root), "--take", str(a_run(tmp_path / name, seeds))]) == 2
    printed = capsys.readouterr().err
    assert message in printed and printed.count("\n") == 1
    assert (root / figures.PAGE).read_text() == before and not (root / figures.RESULTS).exists()


def test_blocks_and_results_belong_to_each_other(two_experiments, capsys):
    root = two_experiments
    assert run_main(figures.main, ["--root", str(root)]) == 2  # a block without results
    a_run(root / figures.RESULTS / "speed_rows_quick", [1])
    assert run_main(figures.main, ["--root", str(root)]) == 0
    a_run(root / figures.RESULTS / "speed_rows_full", [1])
    assert run_main(figures.main, ["--root", str(root)]) == 2  # results without a block
    (root / figures.RESULTS / "speed_rows_full" / SETTINGS).unlink()
    assert run_main(figures.main, ["--root", str(root)]) == 2
    first, second, third = capsys.readouterr().err.splitlines()
    assert "each needs one block" in first and "each needs one block" in second and f"has no {SETTINGS}" in third


def test_exactness_at_its_smallest(tmp_path):
    """Packed and unpacked float64 weights agree after the updates; with means over micro-batches they part."""
    assert (
        command.main(["exactness", "--size", "quick", "--seeds", "1", "--no-plot", "--out", str(tmp_path / "out")]) == 0
    )
    cells = finished_cells(tmp_path / "out")
    apart = {cell.variant: max(row["distance"] for row in rows) for cell, rows in cells.items()}
    assert apart["update_float64"] < 1e-12 and apart["update_float32"] < 1e-5  # rounding, through five updates
    assert apart["micro_batch_float64"] > 1e-3  # another objective
