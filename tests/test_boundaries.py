"""The arrow of imports, read from the source: who may know of whom, and what loads without torch or the SDK."""

import ast
import json
import subprocess
import sys

import pytest

from tests import house
from tests.house import SOURCES, circles, graph, imported_modules, module_name

ROOT = house.ROOT

# Left to right: a file imports only from its own line and from lines above it.  A file belongs to the longest name here
# that it begins with; every file belongs to one.
ARROW = """
pack_data.cores pack_data.files pack_data.decoding pack_data.npy pack_data.memory pack_data.packages pack_data.command pack_data.bad_records
pack_data.picture
pack_data.table
pack_data.page
pack_data.blocks
pack_data.sequences
pack_data.text
pack_data.histogram
pack_data.longer
pack_data.certificate
pack_data.packing
pack_data.proof
pack_data.packs
pack_data.store
pack_data.formats
pack_data.lengths pack_data.histogram.__main__
pack_data.certificate.__main__
pack_data.packer_command pack_data.packers pack_data.free_slots pack_data.fit_decreasing
pack_data.solver
pack_data.none pack_data.greedy pack_data.first_fit pack_data.best_fit pack_data.spfhp pack_data.lpfhp pack_data.nnlshp pack_data.sort
pack_data.optimal
pack_data.lengths.factors
pack_data.building
pack_data.bins pack_data.stream pack_data.batching pack_data.measuring
pack_data.build pack_data.verify pack_data.convert pack_data.compare pack_data.row_benchmark
pack_data.look
pack_data.benchmark pack_data.__main__ pack_data

ipu_packed_bert.settings ipu_packed_bert.run_folder ipu_packed_bert.configurations ipu_packed_bert.beats ipu_packed_bert.processes
ipu_packed_bert.schema
ipu_packed_bert.config ipu_packed_bert.resuming ipu_packed_bert.identity
ipu_packed_bert.placement ipu_packed_bert.data ipu_packed_bert.optim ipu_packed_bert.tensor_files
ipu_packed_bert.checkpoint
ipu_packed_bert.model ipu_packed_bert.loader
ipu_packed_bert.hugging_face
ipu_packed_bert.tasks
ipu_packed_bert.start
ipu_packed_bert.cycles
ipu_packed_bert.host_memory ipu_packed_bert.launch
ipu_packed_bert.plan
ipu_packed_bert.finetune_plan
ipu_packed_bert.engine
ipu_packed_bert.train ipu_packed_bert.compare_unpacked
ipu_packed_bert.runlog ipu_packed_bert.run_picture ipu_packed_bert.run_page ipu_packed_bert.unigram
ipu_packed_bert.run_summary
ipu_packed_bert.training.run
ipu_packed_bert.training
ipu_packed_bert.predictions
ipu_packed_bert.throughput ipu_packed_bert.padding_free ipu_packed_bert.layouts
ipu_packed_bert.report
ipu_packed_bert.experiments
ipu_packed_bert.commands ipu_packed_bert.padding_free.benchmark
ipu_packed_bert
profiling run_pretraining examples
"""  # noqa: E501
LINES = {name: number for number, line in enumerate(ARROW.splitlines()) for name in line.split()}
# Words of a device, an SDK or a schedule; the network knows none of them.
DEVICE_WORDS = ("ipu", "poptorch", "cuda", "micro_batch", "replica")


def line_of(name: str) -> int:
    """Number of the line of ARROW that a module belongs to; -1 if none."""
    owners = [owner for owner in LINES if name == owner or name.startswith(owner + ".")]
    return LINES[max(owners, key=len)] if owners else -1


def test_there_are_sources_to_read():
    assert len(SOURCES) > 100 and sum(map(len, graph().values())) > 300


def test_no_files_import_each_other():
    assert circles(graph()) == []


def test_circles_and_floors_are_found():
    arrows = {"a": {"b"}, "b": {"c"}, "c": {"a", "d"}, "d": set(), "e": {"d"}}
    assert circles(arrows) == [["a", "b", "c"]]
    assert house.floors(arrows) == {"d": 1, "e": 2}  # a circle stands nowhere


def test_the_house_is_within_its_limits():
    limits = json.loads(house.LIMITS.read_text())
    assert {name: value for name, value in house.plan().items() if value > limits[name]} == {}


@pytest.mark.parametrize("path", SOURCES, ids=module_name)
def test_imports_point_left(path):
    name = module_name(path)
    assert line_of(name) >= 0, f"{name} has no place in ARROW"
    for target in graph()[path]:
        assert line_of(module_name(target)) <= line_of(name), (
            f"{name} imports {module_name(target)}, which stands to its right"
        )
    for imported in imported_modules(path):
        root = imported.split(".")[0]
        if name.startswith("pack_data"):
            assert root not in ("torch", "poptorch", "ipu_packed_bert", "transformers"), f"{name} imports {imported}"
        if root == "poptorch":
            assert name == "ipu_packed_bert.engine.ipu.sdk", f"only engine/ipu/sdk.py may import the SDK, {name} does"
        if root in ("popdist", "horovod"):
            assert name == "ipu_packed_bert.engine.ipu.poprun", f"only engine/ipu/poprun.py knows poprun, {name} does"
        if name in ("ipu_packed_bert.settings", "ipu_packed_bert.config", "ipu_packed_bert.placement"):
            assert root != "torch", f"{name} imports {imported}"
        assert root != "tests"


def test_the_model_knows_no_device():
    for path in (ROOT / "ipu_packed_bert" / "model").glob("*.py"):
        tree = ast.parse(path.read_text(encoding="utf-8"))
        names = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}
        names |= {node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
        names |= {argument.arg for argument in ast.walk(tree) if isinstance(argument, ast.arg)}
        for name in names:
            assert not any(word in name.lower() for word in DEVICE_WORDS), f"{path.name} says {name}"


@pytest.mark.parametrize(
    "statement",
    [
        "import pack_data, pkgutil\n"
        "for module in pkgutil.iter_modules(pack_data.__path__):\n"
        "    __import__('pack_data.' + module.name)",
        "import ipu_packed_bert.config, ipu_packed_bert.placement",
        "import ipu_packed_bert.plan, ipu_packed_bert.report.command, ipu_packed_bert.report.calibrate, "
        "ipu_packed_bert.commands.look",
    ],
    ids=["pack_data", "config", "plan, report and look"],
)
def test_loads_without_torch(statement):
    """With torch, poptorch and every extra forbidden, what has to pack and plan on any machine still loads."""
    forbidden = (
        "torch",
        "poptorch",
        "tensorboard",
        "h5py",
        "pyarrow",
        "google_crc32c",
        "matplotlib",
        "jinja2",
        "dask",
        "distributed",
        "transformers",
    )
    blocked = f"import sys\nfor name in {forbidden!r}:\n    sys.modules[name] = None\n"
    finished = subprocess.run([sys.executable, "-c", blocked + statement], cwd=ROOT, capture_output=True, text=True)
    assert finished.returncode == 0, finished.stderr


def test_reading_ahead_and_the_optimisers_state_load_without_the_sdk():
    statement = (
        "import sys; sys.modules['poptorch'] = None; import ipu_packed_bert.engine.ipu.feed, "
        "ipu_packed_bert.engine.ipu.poprun, ipu_packed_bert.engine.ipu.state"
    )
    finished = subprocess.run([sys.executable, "-c", statement], cwd=ROOT, capture_output=True, text=True)
    assert finished.returncode == 0, finished.stderr


def test_profiling_shadows_no_standard_module():
    standard = set(sys.builtin_module_names) | set(getattr(sys, "stdlib_module_names", ()))
    names = {path.stem for path in (ROOT / "profiling").glob("*.py")}
    assert names and not names & (standard | {"profile", "trace", "statistics", "calendar"})
    assert not (ROOT / "profiling" / "__init__.py").exists()
