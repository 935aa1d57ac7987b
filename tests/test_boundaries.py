"""The arrow of imports, read from the source: who may know of whom, and what loads without torch or the SDK."""
import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = ("pack_data", "ipu_packed_bert", "profiling")
SOURCES = sorted(path for package in PACKAGES for path in (ROOT / package).rglob("*.py")) + [ROOT / "run_pretraining.py"]

# Left to right: a module imports only what stands left of it (its own stage, and what is left out here, are free).
PIPELINE = [
    {"pack_data.text.corpus", "pack_data.text.wordpiece"},
    {"pack_data.text.examples"},
    {"pack_data.histogram"},
    {"pack_data.packing", "pack_data.certificate"},
    {"pack_data.packs"},
    {"pack_data.store"},
    {"ipu_packed_bert.loader"},
    {"ipu_packed_bert.model"},
    {"ipu_packed_bert.cycles"},
    {"ipu_packed_bert.engine"},
    {"ipu_packed_bert.train"},
    {"ipu_packed_bert.report"},
]
# Words of a device, an SDK or a schedule; the network knows none of them.
DEVICE_WORDS = ("ipu", "poptorch", "cuda", "micro_batch", "replica")


def module_name(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def imported_modules(path: Path):
    """Every module a file imports anywhere in it, late imports included."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield alias.name
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            yield node.module
            for alias in node.names:
                yield f"{node.module}.{alias.name}"


def stage(name: str):
    return next((number for number, group in enumerate(PIPELINE)
                 if any(name == member or name.startswith(member + ".") for member in group)), None)


def test_there_are_sources_to_read():
    assert len(SOURCES) > 20


@pytest.mark.parametrize("path", SOURCES, ids=module_name)
def test_imports_point_left(path):
    name, own = module_name(path), stage(module_name(path))
    for imported in imported_modules(path):
        root = imported.split(".")[0]
        if name.startswith("pack_data"):
            assert root not in ("torch", "poptorch", "ipu_packed_bert", "transformers"), f"{name} imports {imported}"
        if root == "poptorch":
            assert name == "ipu_packed_bert.engine.ipu.sdk", f"only engine/ipu/sdk.py may import the SDK, {name} does"
        if name in ("ipu_packed_bert.config", "ipu_packed_bert.placement"):
            assert root != "torch", f"{name} imports {imported}"
        assert root != "tests"
        if own is not None and stage(imported) is not None:
            assert stage(imported) <= own, f"{name} imports {imported}, which stands to its right"


def test_the_model_knows_no_device():
    for path in (ROOT / "ipu_packed_bert" / "model").glob("*.py"):
        tree = ast.parse(path.read_text(encoding="utf-8"))
        names = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}
        names |= {node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
        names |= {argument.arg for argument in ast.walk(tree) if isinstance(argument, ast.arg)}
        for name in names:
            assert not any(word in name.lower() for word in DEVICE_WORDS), f"{path.name} says {name}"


@pytest.mark.parametrize("statement", [
    "import pack_data, pkgutil\n"
    "for module in pkgutil.iter_modules(pack_data.__path__):\n"
    "    __import__('pack_data.' + module.name)",
    "import ipu_packed_bert.config, ipu_packed_bert.placement",
    "import ipu_packed_bert.plan, ipu_packed_bert.report.command, ipu_packed_bert.report.calibrate",
], ids=["pack_data", "config", "plan and report"])
def test_loads_without_torch(statement):
    """With torch, poptorch and every extra forbidden, what has to pack and plan on any machine still loads."""
    forbidden = ("torch", "poptorch", "tensorboard", "h5py", "pyarrow", "google_crc32c", "matplotlib", "dask", "distributed", "transformers")
    blocked = f"import sys\nfor name in {forbidden!r}:\n    sys.modules[name] = None\n"
    finished = subprocess.run([sys.executable, "-c", blocked + statement], cwd=ROOT, capture_output=True, text=True)
    assert finished.returncode == 0, finished.stderr


def test_reading_ahead_and_the_optimisers_state_load_without_the_sdk():
    statement = "import sys; sys.modules['poptorch'] = None; import ipu_packed_bert.engine.ipu.feed, ipu_packed_bert.engine.ipu.state"
    finished = subprocess.run([sys.executable, "-c", statement], cwd=ROOT, capture_output=True, text=True)
    assert finished.returncode == 0, finished.stderr


def test_profiling_shadows_no_standard_module():
    standard = set(sys.builtin_module_names) | set(getattr(sys, "stdlib_module_names", ()))
    names = {path.stem for path in (ROOT / "profiling").glob("*.py")}
    assert names and not names & (standard | {"profile", "trace", "statistics", "calendar"})
    assert not (ROOT / "profiling" / "__init__.py").exists()
