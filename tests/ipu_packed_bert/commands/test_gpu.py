"""`make gpu` without a GPU: one line; its benchmark on a CPU: all layouts do the same work, and the JSON is whole."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace

import numpy as np
import pytest
import torch

from ipu_packed_bert.benchmarks import layouts
from ipu_packed_bert.benchmarks.layouts import (
    DENSE,
    FLASH,
    PACKED,
    SORTED,
    UNPACKED,
    EngineSide,
    HuggingFaceSide,
    LayoutMeasured,
    LayoutOutcome,
    measure_layouts,
    sorted_by_length,
    to_json,
    without_padding,
)
from ipu_packed_bert.benchmarks.work import SIZES, config_of, draw_work
from ipu_packed_bert.commands import gpu
from ipu_packed_bert.settings.schema import EngineConfig
from pack_data.cli.command import run_main
from pack_data.histogram import LengthHistogram
from pack_data.packers import get_packer
from tests.ipu_packed_bert.commands.test_benchmark import work  # noqa: F401 (a fixture)

CPU = torch.device("cpu")


@pytest.fixture
def config(monkeypatch, work):
    monkeypatch.setitem(SIZES, "tiny", (16, 2, 2, 32))
    return config_of("tiny", work, EngineConfig(kind="host", threads=1), micro_batch=2, dropout=0.0)


def test_every_layout_does_the_same_work(work, config):
    """Without dropout all have one loss, Hugging Face's model too, though each batch of it has another length."""
    pytest.importorskip("transformers", minversion="4.48", reason="needs transformers 4.48 or newer")
    said = []
    outcome = measure_layouts(config, work, CPU, rounds=2, seconds=0.0, say=said.append)
    assert [each.name for each in outcome.measured] == [PACKED, DENSE, UNPACKED, SORTED]
    assert outcome.missing == [(FLASH, "flash_attn needs CUDA")] and len(said) == 5
    losses = [each.loss for each in outcome.measured]
    assert losses == pytest.approx([losses[0]] * 4, rel=1e-5)
    assert all(len(each.seconds) == 2 and each.peak_bytes is None for each in outcome.measured)


def test_a_side_that_does_not_fit_is_left_out(work, config, monkeypatch):
    run = EngineSide.run

    def full(side):
        if "sdpa" in side.what:
            raise torch.cuda.OutOfMemoryError("CUDA out of memory")
        return run(side)

    monkeypatch.setattr(EngineSide, "run", full)
    monkeypatch.setattr(layouts.importlib.util, "find_spec", lambda name: None)
    config = replace(config, engine=replace(config.engine, attention="eager"))
    outcome = measure_layouts(config, work, CPU, rounds=1, seconds=0.0, say=lambda line: None)
    assert [each.name for each in outcome.measured] == [PACKED]
    assert [why for _, why in outcome.missing[:2]] == ["the device has not enough memory"] * 2


def test_a_side_that_does_other_work_is_found(work, config):
    wrong = work.unpacked["masked_lm_ids"].copy()
    wrong[wrong > 0] = 1
    broken = work._replace(unpacked={**work.unpacked, "masked_lm_ids": wrong})
    with pytest.raises(AssertionError, match="does other work"):
        measure_layouts(config, broken, CPU, rounds=1, seconds=0.0, say=lambda line: None)


def test_other_work_is_exit_status_1_in_one_line(monkeypatch, tmp_path, capsys):
    def wrong(*_, **__):
        raise AssertionError("one does other work")

    monkeypatch.setattr(gpu, "_benchmark", wrong)
    assert run_main(gpu.main, ["--device", "cpu", "--json", str(tmp_path / "gpu.json")]) == 1
    assert capsys.readouterr().err == "error: one does other work\n" and not (tmp_path / "gpu.json").exists()


def test_packs_that_never_fill_their_micro_batches_are_one_line():
    packing = get_packer("spfhp")(LengthHistogram.from_lengths([30] * 2 + [20] * 3, 64), max_sequences_per_pack=3)
    with pytest.raises(ValueError, match="none of 1,000 draws of 1 packs has a multiple of 7 sequences"):
        draw_work(packing, packs=1, micro_batch=7, vocabulary=50, max_predictions=10, seed=1)


def test_sequences_end_to_end_are_the_same_work(work, config):
    """Its boundaries are for FlashAttention; here they become the mask that they mean."""
    pytest.importorskip("transformers", minversion="4.48", reason="needs transformers 4.48 or newer")
    forwards = []
    for each in without_padding(work.unpacked, 128):
        inputs = dict(each.inputs)
        bounds = inputs.pop("cu_seq_lens_q").to(torch.int64)
        assert torch.equal(bounds.to(torch.int32), inputs.pop("cu_seq_lens_k"))
        assert (bounds[1:] - bounds[:-1]).max() == inputs.pop("max_length_q") == inputs.pop("max_length_k")
        assert bounds[-1] == inputs["input_ids"].shape[1] <= 128 and torch.equal(bounds[:-1], each.first)
        number = torch.bucketize(torch.arange(int(bounds[-1])), bounds[1:], right=True)
        inputs["attention_mask"] = (number[:, None] == number[None, :])[None, None]
        forwards.append(each._replace(inputs=inputs))
    assert sum(each.inputs["input_ids"].shape[1] for each in forwards) == work.tokens
    ours = measure_layouts(config, work, CPU, rounds=1, seconds=0.0, say=lambda line: None).measured[-1].loss
    torch.manual_seed(0)
    sides = [HuggingFaceSide(config, {}, made, CPU, "sdpa") for made in (forwards, sorted_by_length(work.unpacked, 3))]
    sides[1]._model.load_state_dict(sides[0]._model.state_dict())
    losses = [side.run() for side in sides]
    assert losses[0] == pytest.approx(losses[1], rel=1e-5) and losses[0] != ours


def test_what_cannot_be_measured_is_a_line(work, config, monkeypatch):
    real = gpu.importlib.util.find_spec
    monkeypatch.setattr(gpu.importlib.util, "find_spec", lambda name: None if name == "transformers" else real(name))
    outcome = measure_layouts(config, work, CPU, rounds=1, seconds=0.0, say=lambda line: None)
    assert (SORTED, "transformers is not installed") in outcome.missing and len(outcome.measured) == 3


def test_figures_by_hand(work):
    def side(name, seconds):
        return LayoutMeasured(name, "", "float32", np.array(seconds), 1.0, 5, None)

    sides = [side(PACKED, [1.0, 2.0, 1.0]), side(UNPACKED, [3.0, 1.9, 1.9]), side(SORTED, [1.9])]
    packed, unpacked, hugging_face = to_json(LayoutOutcome(sides, []), work)
    assert packed["sequences_per_second"] == work.sequences and unpacked["speed_up"] == 1.0
    assert packed["tokens_per_second"] == work.tokens
    assert packed["speed_up"] == 1.9 and packed["share_of_packing_factor"] == 1.9 / work.packing_factor
    assert hugging_face["share_of_packing_factor"] is None and hugging_face["peak_memory_bytes"] == 5


TINY = "--size tiny --rounds 2 --micro-batch 2 --packs 4".split()


def test_the_command_writes_one_json_and_prints_one_table(capsys, monkeypatch, tmp_path):
    monkeypatch.setitem(SIZES, "tiny", (16, 1, 2, 16))
    lengths = tmp_path / "lengths.csv"
    lengths.write_text("length,count\n64,5\n40,9\n24,9\n", encoding="utf-8")
    out = tmp_path / "made" / "gpu.json"
    options = ["--device", "cpu", *TINY, "--histogram", str(lengths), "--max-sequence-length", "64"]
    assert gpu.main([*options, "--json", str(out)]) == 0
    found = json.loads(out.read_text())
    assert set(found) == {"format", "machine", "tests", "model", "packing", "work", "layouts", "not_measured"}
    assert found["tests"] is None and found["machine"]["device"] == "CPU" and found["packing"]["slots"] == 64
    names = [row["name"] for row in found["layouts"]]
    assert names[:3] == [PACKED, DENSE, UNPACKED]
    assert {*names, *(each["name"] for each in found["not_measured"])} == {PACKED, DENSE, UNPACKED, SORTED, FLASH}
    for row in found["layouts"]:
        assert row["sequences_per_second"] > 0 and row["tokens_per_second"] > row["sequences_per_second"]
        assert row["useful_tflops"] > 0
        assert (row["share_of_packing_factor"] is not None) == (row["name"] in (PACKED, DENSE))
    printed = capsys.readouterr().out
    assert "over unpacked" in printed and "useful TFLOP/s" in printed and str(out) in printed
    assert "970" in printed and "890" in printed  # what it is read beside


def test_without_a_gpu_it_is_one_line(capsys):
    assert run_main(gpu.main, []) == 2
    output = capsys.readouterr()
    assert output.err.startswith("error: no CUDA device: ") and output.err.count("\n") == 1 and not output.out


def test_tests_that_cannot_run_are_said(capsys, monkeypatch):
    real = gpu.importlib.util.find_spec
    monkeypatch.setattr(gpu.importlib.util, "find_spec", lambda name: None if name == "hypothesis" else real(name))
    assert gpu.run_tests() == "not run: hypothesis missing"
    assert capsys.readouterr().out.count("\n") == 1


def test_options_that_contradict_each_other():
    with pytest.raises(ValueError, match="multiple of --micro-batch"):
        gpu.main(["--packs", "3", "--micro-batch", "2"])


def test_an_interpreter_without_the_packages_is_one_line():
    """PYTHON=... is the user's own; -S leaves out all that is installed."""
    found = subprocess.run(
        [sys.executable, "-S", "-m", "ipu_packed_bert", "gpu"], cwd=gpu.ROOT, stderr=subprocess.PIPE, text=True
    )
    assert found.returncode == 2 and found.stderr.count("\n") == 1
    assert found.stderr.startswith("error: this command needs the package ")


def test_useful_work_is_that_of_each_sequence_alone(work, monkeypatch):
    """Multiplications of a network of 4 features, 2 layers and 8 inner ones, of the sequences in rows of their own."""
    monkeypatch.setitem(SIZES, "tiny", (4, 2, 2, 8))
    by_hand = 0
    for mask, weights in zip(work.unpacked["input_mask"], work.unpacked["masked_lm_weights"]):
        length, masked = int((mask > 0).sum()), int((weights > 0).sum())
        layer = length * (4 * 4 * 4 + 2 * 4 * 8) + 2 * length * length * 4
        by_hand += 2 * layer + masked * 4 * (4 + 50)
    assert gpu._useful_flop(work, "tiny") == 6 * by_hand > 0
