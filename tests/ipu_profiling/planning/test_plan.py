"""The plan: parameters as in the model, memory by hand, updates and traffic as the loader makes them."""

import re
import subprocess
import sys

import pytest
import torch

from ipu_packed_bert.data.data_sets import described
from ipu_packed_bert.model.packed import PackedBertForPreTraining
from ipu_packed_bert.settings.config import ConfigError
from ipu_packed_bert.settings.loading import load_config
from ipu_packed_bert.settings.shipped import shipped_names
from ipu_profiling.cycles.points import POINTS
from ipu_profiling.planning.ipu_memory import FULLEST_THAT_RAN, IPU_BYTES, _parameters
from ipu_profiling.planning.plan import _updates_per_epoch, plan
from ipu_profiling.planning.printing import _lines, print_plan
from pack_data.store.data_set import PackStore
from tests.imports import CONFIGS, ROOT
from tests.pretraining import global_batches, placed
from tests.tiny_runs import tiny_config, tiny_data

PATHS = [CONFIGS / f"{name}.yml" for name in shipped_names() if "finetune" not in name]
FACTOR = 1.995
MIB = 1 << 20


def planned(name, *overrides, factor=FACTOR):
    return plan(load_config(CONFIGS / f"{name}.yml", overrides), packing_factor=factor)


@pytest.fixture(autouse=True)
def empty_cache(tmp_path, monkeypatch):
    """Give each test a fresh cache of traces, on which the speed in a plan depends."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


# The others change replicas, accumulation, loss scale, memory or clock: not the model.
WHOLE = [path for path in PATHS if not path.stem.endswith(("pod4", "pod64", "bow_pod16"))]


@pytest.mark.parametrize("path", WHOLE, ids=lambda path: path.stem)
def test_parameters_are_the_models(path):
    """Block by block; tied weights once."""
    config = load_config(path)
    with torch.device("meta"):
        network = PackedBertForPreTraining(config.model, config.loss)
    placement = placed(config)
    found = {block.module: _parameters(block, config.model) for block in placement.blocks}
    expected = {module: sum(p.numel() for p in network.get_submodule(module).parameters()) for module in found}
    assert found == expected
    assert sum(found.values()) == sum(p.numel() for p in network.parameters())


@pytest.mark.parametrize("path", PATHS, ids=lambda path: path.stem)
def test_every_configuration_has_a_plan_that_fits(path, capsys):
    config = load_config(path)
    made = plan(config, packing_factor=FACTOR)
    assert print_plan(made) == 0
    text = capsys.readouterr().out
    if config.engine.kind != "host":
        assert all(0 < memory.together <= FULLEST_THAT_RAN * IPU_BYTES for memory in made.memory)
    assert len(made.memory) == config.placement.ipus_per_replica
    assert f"{made.update.packs:,} packs" in text and f"{config.run.steps:,} updates" in text
    # A glance takes one screen.
    assert len(text.splitlines()) <= 25 and max(len(line) for line in text.splitlines()) <= 160


def test_half_logits_save_what_the_page_says():
    """docs/ipu.md: BERT-base, phase 1: 736 masked slots of 30,522 words, twice two bytes each."""
    wide, half = (
        planned("packed_phase1_base_pod16", f"engine.half_logits={value}", factor=1.17).memory[0].at_work
        for value in ("false", "true")
    )
    assert wide - half == 2 * 2 * 32 * 23 * 30522


def test_the_machine_is_named_with_its_clock(capsys):
    for machine, words in (("pod16", "4 replicas of 4 IPUs = 16 IPUs, Mk2, 1.33 GHz"), ("bow_pod64", "Bow, 1.85 GHz")):
        print_plan(planned(f"packed_phase2_{machine}"))
        assert words in capsys.readouterr().out


def test_the_published_batch_of_bert_large():
    """Accumulation 2048 / 1.995 = 1026.6: 1,027; times 4 replicas times 2 packs."""
    made = planned("packed_phase2_pod16")
    assert made.update.accumulation == 1027 and made.update.packs == 8216
    assert any(f"about {8216 * 1.995:,.0f} sequences" in line for line in _lines(made))
    # S 512, P 79, D 3: 4 x 512 + 3 x 79 + 3 x 3 + 2 = 2296 numbers of 4 bytes.
    assert made.bytes_per_pack == 9184
    # 9 stages: 8 of 1027 + 8 slots of time are idle.
    assert any(f"waiting {8 / 1035:.1%} of the time" in line for line in _lines(made))
    assert made.training_packs is None and "length of an epoch is unknown" in made.words.run


def test_memory_by_hand():
    """IPU 1 of BERT-large at 512: layers 3-9.

    A layer has 4 (1024^2 + 1024) + 2 x 1024 + (1024 x 4096 + 4096) + (4096 x 1024 + 1024) + 2 x 1024 = 12,596,224
    parameters, half weights and half accumulators.  It is stage 1 of 5, so 2 (4 - 1) + 1 = 7 micro-batches are under
    way; each keeps the stage's input (2 x 512 x 1024 halves = 2 MiB), the mask's codes (2 x 2 x 512 x 16 halves =
    1/16 MiB) and 7 checkpoints of 2 MiB: 7 x (16 + 1/16) MiB.  At work is one layer: (34 x 512 x 1024 + 2 x 16 x 512 x
    512) x 2 rows = 50 MiB, and query and key with their codes, 2 x 2 x 512 x 16 x (64 + 16) halves = 5 MiB.
    """
    made = planned("packed_phase2_pod16")
    memory = made.memory[1]
    assert memory.parameters == 7 * 12596224
    assert memory.weights == memory.gradients == 2 * memory.parameters
    assert memory.optimizer == 0
    assert (memory.kept, memory.at_work) == (7 * (16 + 1 / 16) * MIB, 55 * MIB)
    additive = planned("packed_phase2_pod16", "engine.mask=additive")
    # The mask itself, 2 x 512 x 512 halves = 1 MiB, in place of the codes.
    assert (additive.memory[1].kept, additive.memory[1].at_work) == (7 * 17 * MIB, 50 * MIB)
    assert IPU_BYTES == 624 * 1024 * 1472


@pytest.mark.parametrize(
    "overrides, words",
    [
        ([], "in the query/key product: heads of 64 + 16 columns keep up to 3 sequences and padding apart; 0.06 MiB"),
        (["data.packer=spfhp", "data.max_sequences_per_pack=300"], "heads of 64 + 32 columns keep up to 300"),
        (["data.packer=spfhp", "data.max_sequences_per_pack=null"], "keep the data set's sequences and padding apart"),
        (["engine.mask=additive"], "additive: 512 x 512 for each pack, added to every head's scores; 1.0 MiB"),
    ],
)
def test_the_mask_is_named(overrides, words):
    made = planned("packed_phase2_pod16", *overrides)
    (line,) = [line for line in _lines(made) if line.startswith("  mask ")]
    assert words in line


def test_state_on_the_chip_is_counted_and_shared():
    on_chip = "placement.optimizer_state_off_chip=false"
    memory = planned("packed_phase2_pod16", on_chip).memory[1]
    assert memory.optimizer == 8 * memory.parameters / 4
    alone = planned("packed_phase2_pod16", on_chip, "placement.replicated_tensor_sharding=false").memory[1]
    assert alone.optimizer == 8 * memory.parameters


def test_without_recomputation_everything_is_kept():
    kept, recomputed = planned("packed_phase2_pod16", "engine.recompute_layers=false"), planned("packed_phase2_pod16")
    assert all(a.kept > b.kept for a, b in zip(kept.memory, recomputed.memory))


def test_a_data_set_that_is_there_is_counted(tmp_path):
    """Updates of an epoch and bytes of an update are those of the loader."""
    folder = tiny_data(tmp_path / "data")
    config, manifest = described(load_config(tiny_config(tmp_path / "tiny.yml", folder)))
    made = plan(config, manifest)
    batches = global_batches(PackStore.open(folder), config, packing_factor=manifest.packing_factor)
    assert made.update.packs == batches.packs_per_update
    assert _updates_per_epoch(made.training_packs, made.update) == batches.updates_per_epoch > 1
    sent = sum(field.nbytes for field in next(batches).values())
    assert made.update.packs * made.bytes_per_pack == sent
    batches.close()
    text = "\n".join(_lines(made))
    assert (
        f"{made.training_packs:,} packs to train on" in text
        and f"{_updates_per_epoch(made.training_packs, made.update):,} an epoch" in text
    )


def test_too_little_accumulation_is_refused():
    with pytest.raises(ConfigError, match="at least the 9 stages"):
        planned("packed_phase2_pod16", "batch.gradient_accumulation=9")


def test_published_runs_fit_and_one_has_the_verdicts_limit():
    fullest = {
        point.name: plan(
            load_config(CONFIGS / point.config, ("without_ipus=null",) + point.overrides), packing_factor=1.0
        )
        for point in POINTS
    }
    assert len(fullest) >= 13 and all(made.fits for made in fullest.values())
    assert max(made.fullest for made in fullest.values()) == pytest.approx(fullest["E4"].fullest)
    assert fullest["E4"].fullest == pytest.approx(FULLEST_THAT_RAN, abs=1e-4)


@pytest.mark.parametrize(
    "overrides",
    [["engine.recompute_layers=false"], ["batch.micro_batch=4", "placement.optimizer_state_off_chip=false"]],
    ids=["all activations kept", "micro-batch 4 and the state on the chip"],
)
def test_what_is_known_not_to_fit_does_not(overrides):
    assert planned("packed_phase2_pod16", *overrides).fits is False


def test_products_take_what_their_plan_says_and_no_more_than_their_room():
    """Given all of a tile they take a third of it; given little, the smallest plan may take more than that."""
    for proportion, least, most in ((1.0, 0.2, 0.4), (0.15, 0.1, 0.15), (0.0001, 0.0001, 0.05)):
        rooms = f"placement.available_memory_proportion={[proportion] * 4}"
        for memory in planned("packed_phase2_pod16", rooms).memory:
            assert least * IPU_BYTES < memory.products <= most * IPU_BYTES
            assert memory.together == memory.total + memory.products


@pytest.mark.parametrize(
    "micro_batch, fits, status, words",
    [
        (2, True, 0, "verdict   fits: "),
        (4, None, 0, "verdict   tight, unknown: 89.6% of IPU 1 is counted"),
        (64, False, 1, "of IPU 1 is counted, 635% without temporary values of products"),
    ],
)
def test_the_verdict_on_memory(micro_batch, fits, status, words, capsys):
    path = CONFIGS / "packed_phase2_pod16.yml"
    config = load_config(path, [f"batch.micro_batch={micro_batch}"])
    made = plan(config, packing_factor=FACTOR)
    assert made.fits is fits and print_plan(plan(config, packing_factor=FACTOR)) == status
    text = capsys.readouterr().out
    assert words in text and bool(re.search(r"\d{3}% #{10}!", text)) == (fits is False)
    # What it proposes: as many packs in an update, and it fits; more in a micro-batch than it names do not.
    proposed = re.findall(r"--set (\S+=\d+)", text)
    assert bool(proposed) == (not fits)
    if proposed:
        better = load_config(path, proposed)
        assert better.packs_per_update(FACTOR) == config.packs_per_update(FACTOR)
        assert plan(better, packing_factor=FACTOR).fits
        larger = load_config(path, [f"batch.micro_batch={made.micro_batch_that_fits() + 1}"])
        assert not plan(larger, packing_factor=FACTOR).fits


def test_where_no_micro_batch_fits(capsys):
    one_ipu = ("ipus_per_replica=1", "layers_per_ipu=[24]", "available_memory_proportion=[0.2]")
    made = planned("packed_phase2_pod4", "without_ipus=null", *(f"placement.{each}" for each in one_ipu))
    assert made.micro_batch_that_fits() is None
    assert print_plan(made) == 1 and "no micro-batch fits" in capsys.readouterr().out


def test_predictions_that_are_left_out_are_those_of_the_length():
    """The published rule, at every length: not 76 everywhere."""
    stated = planned("packed_phase1_pod16", factor=1.17)
    left_out = planned("packed_phase1_pod16", "data.max_predictions_per_sequence=null", factor=1.17)
    assert left_out.memory == stated.memory and left_out.bytes_per_pack == stated.bytes_per_pack
    assert left_out.memory[0].total / MIB == pytest.approx(402, abs=0.5)


@pytest.mark.parametrize("name", ["packed_phase1_pod16", "packed_phase1_base_pod16", "packed_small_ipu1"])
def test_at_128_the_factor_is_the_papers(name):
    made = planned(name, factor=None)
    assert made.update.factor.value == 1.17 and "the paper" in made.update.factor.source


def test_without_any_factor_pipeline_and_memory_are_planned():
    overrides = "packed_phase2_pod16", "data.max_sequence_length=256"
    made = planned(*overrides, factor=None)
    assert made.update is None and made.memory == planned(*overrides).memory
    assert any(line.startswith("  update    unknown: ") for line in _lines(made))


@pytest.mark.parametrize("factor", [0.0, -3.0, 0.99, float("nan"), float("inf")])
def test_a_packing_factor_below_one_is_refused(factor):
    with pytest.raises(ValueError, match="at least one sequence"):
        planned("packed_phase2_pod16", factor=factor)


def test_a_packing_factor_above_the_depth_is_refused_by_every_plan(tmp_path):
    """Also where a data set, or files, say their own; unpacked rows stand beside packed ones, with one option."""
    assert planned("packed_phase2_pod16", factor=3.0).update.factor.value == 3.0
    task = CONFIGS / "finetune_squad_packed_pod16.yml"
    built, manifest = described(load_config(tiny_config(tmp_path / "tiny.yml", tiny_data(tmp_path / "data"))))
    for refused in (
        lambda: planned("packed_phase2_pod16", factor=3.1),
        lambda: plan(built, manifest, packing_factor=built.data.max_sequences_per_pack + 0.1),
        lambda: plan(load_config(task, ["data.max_sequences_per_pack=4"]), packing_factor=4.1),
    ):
        with pytest.raises(ValueError, match="at most [0-9]+ sequences"):
            refused()
    assert planned("unpacked_phase2_pod16", factor=3.1).update.factor[0] == 1.0


@pytest.mark.parametrize("path", [path for path in PATHS if "_host" in path.name], ids=lambda path: path.stem)
def test_the_plan_of_a_host_configuration_is_of_the_host(path, capsys):
    config = load_config(path)
    assert print_plan(plan(config, packing_factor=FACTOR)) == 0
    text = capsys.readouterr().out
    assert "IPU  blocks" not in text and "pipeline" not in text and "no IPU" in text
    # Four float32 values a parameter: 3,136,962 of them are 47.9 MiB.
    parameters_of_all = sum(memory.parameters for memory in plan(config, packing_factor=FACTOR).memory)
    assert f"{parameters_of_all * 16 / MIB:,.0f} MiB of weights, gradients and optimiser state" in text


def test_a_plan_needs_neither_torch_nor_a_device():
    command = (
        "import sys; from ipu_profiling.planning.command import main; "
        "code = main(['--config', 'configs/packed_phase2_pod16.yml', '--packing-factor', '2']); "
        "assert 'torch' not in sys.modules and 'poptorch' not in sys.modules; raise SystemExit(code)"
    )
    finished = subprocess.run([sys.executable, "-c", command], cwd=ROOT, capture_output=True, text=True)
    assert finished.returncode == 0, finished.stderr
    assert "layers 3-9" in finished.stdout and finished.stderr == ""
    assert "MiB of 897 (624 KiB x 1,472 tiles)" in finished.stdout
