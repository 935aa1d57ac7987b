"""The public names, and that importing a package loads none of them."""

import importlib
import importlib.util
import inspect
import re
import subprocess
import sys
from types import ModuleType

import pytest

from tests.imports import ROOT

PUBLIC = {
    "pack_data": (
        "BuildOptions Certificate Example LengthHistogram Manifest MicroBatches PACKERS PackDataset PackMixture "
        "PackSchema PackStore PackStream PackedLengths Packing Proof Sequences StoredColumn Verified build get_packer "
        "micro_batches open_source pack pack_dataset pack_groups pack_in_order pack_with_capacity plot prove table "
        "verify"
    ),
    "ipu_packed_bert": (
        "Checkpoint Config ConfigError Engine GlobalBatches Outcome Pretraining StepResult StoredPacks "
        "build_engine choose_engine config_file export_run import_folder load_checkpoint load_config "
        "newest_checkpoint read_log"
    ),
    "pack_data.batching": (
        "BatchOptions EpochPlan IndexBatchSampler MicroBatchSampler WAYS Way get_way padded_batch padding_free_batch"
    ),
    "pack_data.stream": "Pack PackRows PackStream Waits packed_rows",
    "padding_free": (
        "PackedStream PaddingCollator PaddingFreeCollator UpdateResult accumulate assert_isolated check_no_leak "
        "inputs_for keep_buffers least_of_ranks mean_loss pack_into take_step use_padding_free"
    ),
}


@pytest.mark.parametrize("package", PUBLIC)
def test_the_public_names_are_these_and_all_there(package):
    module = importlib.import_module(package)
    assert sorted(module.__all__) == sorted(PUBLIC[package].split())
    for name in module.__all__:
        assert getattr(module, name).__doc__ and name in dir(module)
        # Loading a submodule of that name (a command) must not put it in the place of what is public.
        if importlib.util.find_spec(f"{package}.{name}") is not None:
            importlib.import_module(f"{package}.{name}")
            assert not isinstance(getattr(module, name), ModuleType)
    with pytest.raises(AttributeError, match="has no attribute 'nothing'"):
        _ = module.nothing


def _sections_missing(function):
    """Return the Google sections that the docstring of a function should have and has not."""
    docstring = inspect.getdoc(function) or ""
    signature = inspect.signature(function)
    missing = []
    if signature.parameters and "\nArgs:\n" not in docstring:
        missing.append("Args")
    returns_nothing = signature.return_annotation in (None, "None", inspect.Signature.empty)
    if not returns_nothing and not re.search("\n(Returns|Yields):\n", docstring):
        missing.append("Returns")
    return missing


@pytest.mark.parametrize("package", PUBLIC)
def test_public_functions_describe_their_arguments_and_results(package):
    module = importlib.import_module(package)
    functions = [name for name in PUBLIC[package].split() if inspect.isfunction(getattr(module, name))]
    missing = {name: _sections_missing(getattr(module, name)) for name in functions}
    assert functions and not any(missing.values()), missing


@pytest.mark.parametrize("package", ["pack_data", "ipu_packed_bert", "padding_free"])
def test_an_import_loads_no_public_name(package):
    statement = (
        f"import sys, {package}\n"
        f"loaded = [name for name in sys.modules if name.startswith(({package!r} + '.', 'numpy', 'scipy', 'torch'))]\n"
        "assert not loaded, loaded"
    )
    subprocess.run([sys.executable, "-c", statement], cwd=ROOT, check=True)
