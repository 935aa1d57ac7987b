"""The paths of `tests.gpu_dry` on a real GPU: values against those of the CPU, and memory against the plan's.

Tolerances as in `test_cuda`: in bfloat16 the GPU may round twice as much as the CPU does in bfloat16.
"""

import pytest
import torch

pytest.importorskip("transformers", minversion="4.57", reason="some paths are models of Transformers 4.57 and newer")

from ipu_packed_bert.engine.host import HostEngine
from ipu_packed_bert.tasks.pretraining import Pretraining
from ipu_profiling.planning.plan import plan
from padding_free import assert_isolated
from padding_free.leaks.probe import check_no_leak
from padding_free.models import Leak
from tests.gpu_dry import (
    FAMILIES,
    FINE_TUNING,
    fine_tuning,
    gpu_configurations,
    layout_configs,
    padding_free_model,
    random_update,
)
from tests.ipu_packed_bert.engine.test_cuda import DEVICE, apart, gradient, half_types
from tests.update_batches import change

pytestmark = pytest.mark.cuda

# Large weights, so that the attention's choice of tokens is not flat; no dropout, whose draws are the device's.
SHARP = dict(hidden_dropout=0.0, attention_dropout=0.0, initializer_range=0.08)
# Of a gradient, relative: float32 sums in another order; TF32 keeps 11 bits.
LARGEST_ERRORS = {"float32": 5e-5, "tf32": 2e-2}
HALF = 0.1  # bfloat16; the CPU's own error, doubled, is the limit if it is smaller


def layouts():
    """Settings that change a gradient; the optimiser's step has tests of its own."""
    names = [name for name in layout_configs() if not name.startswith(("lamb", "adamw"))]
    return [name for name in names if "dropout" not in name]


def limit(precision, of_cpu):
    """Return the largest error of a gradient on the GPU; `of_cpu()` computes that of the CPU."""
    return LARGEST_ERRORS.get(precision) or min(HALF, 2 * of_cpu() + 1e-5)


@pytest.mark.parametrize("name", layouts())
def test_the_gradient_of_every_layout_is_that_of_the_cpu(name):
    config = change(layout_configs()[name], model=SHARP)
    precision = config.engine.precision
    if precision == "bfloat16":
        half_types()
    update = random_update(config, 8)

    def computed(device, **engine):
        of_device = change(config, engine=engine)
        return gradient(HostEngine(of_device, Pretraining(config), packing_factor=2.0, device=device), update)[1]

    exact = computed("cpu", precision="float32", attention="auto", deterministic=False)
    on_gpu = computed(DEVICE)
    dense = dict(precision="bfloat16", attention="sdpa", deterministic=False)
    assert apart(on_gpu, exact) < limit(precision, lambda: apart(computed("cpu", **dense), exact))


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
@pytest.mark.parametrize("kind", FINE_TUNING)
def test_the_gradient_of_fine_tuning_is_that_of_the_cpu(kind, precision):
    if precision == "bfloat16":
        half_types()
    exact, rounded, on_gpu = (
        gradient(*fine_tuning(kind, item, device))[1]
        for item, device in [("float32", "cpu"), (precision, "cpu"), (precision, DEVICE)]
    )
    assert apart(on_gpu, exact) < limit(precision, lambda: apart(rounded, exact))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("family", FAMILIES)
def test_a_model_on_the_gpu_is_judged_isolated(family, dtype):
    assert_isolated(padding_free_model(family, dtype, DEVICE), longest=96)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_leak_on_the_gpu_is_caught(dtype):
    model = padding_free_model("Llama, grouped queries", dtype, DEVICE)
    model.set_attn_implementation("sdpa")
    with pytest.raises(Leak):
        check_no_leak(model, longest=96, forward=lambda model, row: model(row["input_ids"]).logits)


@pytest.mark.parametrize("name", sorted(gpu_configurations()))
def test_a_configuration_takes_the_memory_that_its_plan_computes(name):
    config = gpu_configurations()[name]
    planned = plan(config, packing_factor=2.0).host_memory.most
    card = torch.cuda.get_device_properties(DEVICE).total_memory
    if planned > 0.9 * card:
        pytest.skip(f"needs {planned / 2**30:.0f} GiB of GPU memory")
    engine = HostEngine(config, Pretraining(config), packing_factor=2.0, device=DEVICE)
    torch.cuda.reset_peak_memory_stats()
    assert engine.step(random_update(config, 2 * config.batch.micro_batch), 1e-3).finite
    measured = torch.cuda.max_memory_allocated()
    print(f"{name}: {measured / 2**30:.2f} GiB, planned {planned / 2**30:.2f} GiB")
    assert 0.85 * planned < measured < 1.02 * planned
