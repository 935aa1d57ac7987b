"""The public names, and that importing a package loads none of them."""
import importlib
import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PUBLIC = {
    "pack_data": [
        "Certificate", "Example", "LengthHistogram", "Manifest", "PACKERS", "PackSchema", "PackStore", "PackedLengths", "Packing", "Proof",
        "Sequences", "get_packer", "open_source", "pack", "prove"],
    "ipu_packed_bert": [
        "Checkpoint", "Config", "ConfigError", "Engine", "GlobalBatches", "Outcome", "StepResult", "build_engine", "choose_engine",
        "config_file", "export_run", "import_folder", "load_checkpoint", "load_config", "newest_checkpoint", "read_log"],
    "ipu_packed_bert.padding_free": [
        "Batches", "PaddingCollator", "PaddingFreeCollator", "UpdateResult", "accumulate", "check_no_leak", "inputs_for", "mean_loss",
        "take_step"],
}


@pytest.mark.parametrize("package", PUBLIC)
def test_the_public_names_are_these_and_all_there(package):
    module = importlib.import_module(package)
    assert sorted(module.__all__) == sorted(PUBLIC[package])
    for name in module.__all__:
        assert getattr(module, name).__doc__ and name in dir(module)
        # Loading a submodule of that name would put it in the place of what is public.
        assert importlib.util.find_spec(f"{package}.{name}") is None
    with pytest.raises(AttributeError, match="has no attribute 'nothing'"):
        module.nothing


@pytest.mark.parametrize("package", PUBLIC)
def test_an_import_loads_no_public_name(package):
    statement = (f"import sys, {package}\n"
                 f"loaded = [name for name in sys.modules if name.startswith(({package!r} + '.', 'numpy', 'scipy', 'torch'))]\n"
                 "assert not loaded, loaded")
    subprocess.run([sys.executable, "-c", statement], cwd=ROOT, check=True)
