"""The plan: parameters as in the model, memory by hand, updates and traffic as the loader makes them; and laws."""

import re
import subprocess
import sys

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ipu_packed_bert.data.data_sets import described
from ipu_packed_bert.model.packed import PackedBertForPreTraining
from ipu_packed_bert.settings.loading import load_config
from ipu_packed_bert.settings.shipped import shipped_names
from ipu_profiling.cycles.points import POINTS
from ipu_profiling.planning.ipu_memory import FULLEST_THAT_RAN, IPU_BYTES, _parameters
from ipu_profiling.planning.plan import _updates_per_epoch, plan
from ipu_profiling.planning.printing import print_plan
from pack_data.store.data_set import PackStore
from tests.imports import CONFIGS, ROOT
from tests.pretraining import global_batches, placed
from tests.tiers import sample
from tests.tiny_runs import tiny_config, tiny_data

NAMES = [name for name in shipped_names() if "finetune" not in name]
# Configurations of the same model differ in replicas, accumulation, loss scale, memory or clock.
MODELS = [name for name in NAMES if not name.endswith(("pod4", "pod64", "bow_pod16"))]
FACTOR = 1.995
MIB = 1 << 20
LARGE = "packed_phase2_pod16"


def planned(name, *overrides, factor=FACTOR):
    return plan(load_config(CONFIGS / f"{name}.yml", overrides), packing_factor=factor)


@pytest.mark.parametrize("name", sample(MODELS, 4))
def test_parameters_are_the_models(name):
    """Block by block; tied weights once."""
    config = load_config(CONFIGS / f"{name}.yml")
    with torch.device("meta"):
        network = PackedBertForPreTraining(config.model, config.loss)

    def elements(part):
        return sum(parameter.numel() for parameter in part.parameters())

    counted = {block.module: _parameters(block, config.model) for block in placed(config).blocks}
    assert counted == {module: elements(network.get_submodule(module)) for module in counted}
    assert sum(counted.values()) == elements(network)


def test_every_configuration_has_a_plan_that_fits(capsys):
    faults = []
    for name in NAMES:
        run = planned(name)
        status = print_plan(run)
        text = capsys.readouterr().out
        of_host = run.config.engine.kind == "host"
        named = f"{run.update.packs:,} packs" in text and f"{run.config.run.steps:,} updates" in text
        fits = of_host or all(0 < memory.share <= FULLEST_THAT_RAN for memory in run.memory)
        if status or not named or not fits or of_host != ("no IPU" in text):
            faults.append(f"{name}: status {status}, {text}")
    assert not faults
    assert len(NAMES) > 50


@settings(max_examples=4, deadline=None)
@given(
    name=st.sampled_from([LARGE, "packed_phase1_base_pod16", "unpacked_phase2_pod16"]),
    micro_batch=st.integers(1, 40),
    more=st.integers(1, 24),
    recompute=st.booleans(),
)
def test_a_plan_is_monotonic_in_the_micro_batch(name, micro_batch, more, recompute):
    """And the micro-batch that it names is the largest that fits."""
    recomputed = f"engine.recompute_layers={str(recompute).lower()}"
    smaller, larger = (
        planned(name, recomputed, f"batch.micro_batch={number}") for number in (micro_batch, micro_batch + more)
    )
    for before, after in zip(smaller.memory, larger.memory):
        assert before.kept <= after.kept
        # A larger product may have a plan with smaller temporaries.
        assert before.together <= 1.001 * after.together
        assert before.weights == after.weights
    assert smaller.fullest <= 1.001 * larger.fullest
    assert smaller.bytes_per_pack == larger.bytes_per_pack
    largest = larger.micro_batch_that_fits()
    if not larger.fits and largest is not None:
        assert planned(name, recomputed, f"batch.micro_batch={largest}").fits
        assert not planned(name, recomputed, f"batch.micro_batch={largest + 1}").fits


def test_the_published_batch_of_bert_large():
    """Accumulation 2048 / 1.995 = 1026.6: 1,027; times 4 replicas times 2 packs.

    S 512, P 79, D 3: 4 x 512 + 3 x 79 + 3 x 3 + 2 = 2296 numbers of 4 bytes.
    """
    run = planned(LARGE)
    assert (run.update.accumulation, run.update.packs, run.bytes_per_pack) == (1027, 8216, 9184)
    assert run.training_packs is None


def test_memory_by_hand():
    """IPU 1 of BERT-large at 512: layers 3-9.

    A layer has 4 (1024^2 + 1024) + 2 x 1024 + (1024 x 4096 + 4096) + (4096 x 1024 + 1024) + 2 x 1024 = 12,596,224
    parameters, half weights and half accumulators.  It is stage 1 of 5, so 2 (4 - 1) + 1 = 7 micro-batches are under
    way; each keeps the stage's input (2 x 512 x 1024 halves = 2 MiB), the mask's codes (2 x 2 x 512 x 16 halves =
    1/16 MiB) and 7 checkpoints of 2 MiB: 7 x (16 + 1/16) MiB.  At work is one layer: (34 x 512 x 1024 + 2 x 16 x 512 x
    512) x 2 rows = 50 MiB, and query and key with their codes, 2 x 2 x 512 x 16 x (64 + 16) halves = 5 MiB.
    """
    memory = planned(LARGE).memory[1]
    assert memory.parameters == 7 * 12596224
    assert memory.weights == memory.gradients == 2 * memory.parameters
    assert memory.optimizer == 0
    assert (memory.kept, memory.at_work) == (7 * (16 + 1 / 16) * MIB, 55 * MIB)
    # The mask itself, 2 x 512 x 512 halves = 1 MiB, in place of the codes.
    additive = planned(LARGE, "engine.mask=additive").memory[1]
    assert (additive.kept, additive.at_work) == (7 * 17 * MIB, 50 * MIB)
    # Two moments in float32, a quarter on each of four replicas.
    on_chip = "placement.optimizer_state_off_chip=false"
    alone = planned(LARGE, on_chip, "placement.replicated_tensor_sharding=false").memory[1]
    assert alone.optimizer == 8 * memory.parameters == 4 * planned(LARGE, on_chip).memory[1].optimizer
    assert IPU_BYTES == 624 * 1024 * 1472


def test_products_take_what_their_plan_says_and_no_more_than_their_room():
    """Given all of a tile they take a third of it; given little, the smallest plan may take more than that."""
    for proportion, least, most in ((1.0, 0.2, 0.4), (0.15, 0.1, 0.15), (0.0001, 0.0001, 0.05)):
        rooms = f"placement.available_memory_proportion={[proportion] * 4}"
        for memory in planned(LARGE, rooms).memory:
            assert least * IPU_BYTES < memory.products <= most * IPU_BYTES
            assert memory.together == memory.total + memory.products


def test_a_data_set_that_is_there_is_counted(tmp_path):
    """Updates of an epoch and bytes of an update are those of the loader."""
    folder = tiny_data(tmp_path / "data")
    config, manifest = described(load_config(tiny_config(tmp_path / "tiny.yml", folder)))
    run = plan(config, manifest)
    batches = global_batches(PackStore.open(folder), config, packing_factor=manifest.packing_factor)
    assert run.update.packs == batches.packs_per_update
    assert _updates_per_epoch(run.training_packs, run.update) == batches.updates_per_epoch > 1
    sent = sum(field.nbytes for field in next(batches).values())
    assert run.update.packs * run.bytes_per_pack == sent
    batches.close()


def test_published_runs_fit_and_one_has_the_verdicts_limit():
    fullest = {}
    for point in POINTS:
        config = load_config(CONFIGS / point.config, ("without_ipus=null", *point.overrides))
        run = plan(config, packing_factor=1.0)
        assert run.fits, point.name
        fullest[point.name] = run.fullest
    assert max(fullest.values()) == fullest["E4"] == pytest.approx(FULLEST_THAT_RAN, abs=1e-4)


@pytest.mark.parametrize("micro_batch, fits, status", [(2, True, 0), (4, None, 0), (64, False, 1)])
def test_the_verdict_on_memory(micro_batch, fits, status, capsys):
    run = planned(LARGE, f"batch.micro_batch={micro_batch}")
    assert run.fits is fits
    assert print_plan(run) == status
    # The proposed changes keep the packs of an update, and fit.
    proposed = re.findall(r"--set (\S+=\d+)", capsys.readouterr().out)
    assert bool(proposed) == (not fits)
    if proposed:
        better = planned(LARGE, *proposed)
        assert better.update.packs == run.update.packs
        assert better.fits


def test_what_is_not_stated_is_that_of_the_length():
    """The published rule of predictions at every length, and the paper's factor at 128."""
    stated = planned("packed_phase1_pod16", factor=None)
    assert stated.update.factor.value == 1.17
    left_out = planned("packed_phase1_pod16", "data.max_predictions_per_sequence=null", factor=None)
    assert left_out.memory == stated.memory
    assert left_out.bytes_per_pack == stated.bytes_per_pack
    unknown = planned(LARGE, "data.max_sequence_length=256", factor=None)
    assert unknown.update is None
    assert unknown.memory == planned(LARGE, "data.max_sequence_length=256").memory


def test_a_plan_needs_neither_torch_nor_a_device():
    command = (
        "import sys; from ipu_profiling.planning.command import main; "
        "code = main(['--config', 'configs/packed_phase2_pod16.yml', '--packing-factor', '2']); "
        "assert 'torch' not in sys.modules and 'poptorch' not in sys.modules; raise SystemExit(code)"
    )
    finished = subprocess.run([sys.executable, "-c", command], cwd=ROOT, capture_output=True, text=True)
    assert finished.returncode == 0, finished.stderr
    assert "layers 3-9" in finished.stdout
    assert finished.stderr == ""
