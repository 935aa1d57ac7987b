"""The arrow of imports, read from the source: who may know of whom, and what loads without torch or the SDK."""

import ast
import json
import re
import subprocess
import sys

import pytest

from ipu_packed_bert import __main__ as packed_bert
from pack_data.packers import PACKERS
from tests import complexity
from tests.fresh import run_fresh
from tests.imports import (
    PACKAGES,
    ROOT,
    SOURCES,
    cycles,
    graph,
    imported_modules,
    levels,
    module_name,
    modules_imported_by,
    package_graph,
    tree_of,
)

# Packages and loose files, level by level: each imports only from the lines above its own. "" is the top level.
LEVELS = {
    "": """
pack_data
padding_free ipu_packed_bert
ipu_profiling
run_pretraining profiling
""",
    "pack_data": f"""
reading
cli
store
packing
display formats packers solver
{" ".join(PACKERS)} sort
lengths text
building
pack_lengths
batching inspection
stream
__init__ __main__
""",
    "padding_free": """
blocks
attention varlen_on_cpu
models
collators
losses
update
leaks
choice streams
trainers check_model_command
__init__
pytest_plugin
""",
    "ipu_packed_bert": """
processes run_files
settings
data model
tasks
engine
training
benchmarks padding_free
commands __init__
__main__
""",
    "ipu_profiling": """
cycles
planning
measured
report ipu_check
__init__
""",
}
# Words of a device, an SDK or a schedule; the network knows none of them.
DEVICE_WORDS = ("ipu", "poptorch", "cuda", "micro_batch", "replica")


def test_there_are_sources_to_read():
    assert len(SOURCES) > 100 and sum(map(len, graph().values())) > 300


def test_no_files_import_each_other():
    assert cycles(graph()) == []


def test_cycles_and_levels_are_found():
    edges = {"a": {"b"}, "b": {"c"}, "c": {"a", "d"}, "d": set(), "e": {"d"}}
    assert cycles(edges) == [["a", "b", "c"]]
    assert levels(edges) == {"d": 1, "e": 2}  # the packages of a cycle have no level


def test_modules_named_to_import_module_are_read():
    source = "import importlib\nimportlib.import_module('ipu_packed_bert.__main__')\nimport_module('a.b')\nf('c.d')\n"
    assert list(modules_imported_by(source)) == ["importlib", "ipu_packed_bert.__main__", "a.b"]


def test_limits_move_in_steps():
    limits = json.loads(complexity.LIMITS.read_text())
    steps = complexity.steps()
    assert limits.keys() == steps.keys()
    assert all(limit % steps[name] == 0 for name, limit in limits.items())


def test_set_lowers_limits_and_never_raises_one():
    steps = complexity.steps()
    measured = {name: 10 * step - 1 for name, step in steps.items()}
    far_above = {name: 20 * step for name, step in steps.items()}
    below = {name: 5 * step for name, step in steps.items()}
    assert complexity.lowered(far_above, measured) == {name: 11 * step for name, step in steps.items()}
    assert complexity.lowered(below, measured) == below


def test_reach_follows_late_imports_but_neither_types_nor_the_main_block():
    source = (
        "if TYPE_CHECKING:\n    import a\nelse:\n    import b\n"
        "def f():\n    import c\nif __name__ == '__main__':\n    import d\n"
    )
    assert list(modules_imported_by(source, without=("TYPE_CHECKING", "__name__"))) == ["b", "c"]
    assert list(modules_imported_by(source)) == ["a", "b", "c", "d"]


def test_reach_contains_what_is_reached():
    reach = complexity.reach()
    assert (
        reach["reach of nnlshp"] < reach["reach of pack"] < reach["reach of run"] < reach["reach of pretrain command"]
    )


def test_only_code_lines_and_nodes_are_counted():
    source = '"""One\n\ntwo."""\n\n# three\nx = (1,\n     2)\n\n\ndef f():\n    """Four."""\n    return x\n'
    # Nodes: two docstrings of 2; x = (1, 2): 5; def, return and its name: 3.
    assert complexity.density(source) == (12, 4)


def test_average_densities_above_the_limit_are_problems(monkeypatch, capsys):
    monkeypatch.setattr(complexity, "weights", lambda: dict.fromkeys([*complexity.steps(), *complexity.ZERO], 0))
    monkeypatch.setattr(complexity, "package_nodes", dict)
    monkeypatch.setattr(complexity, "reach", dict)
    monkeypatch.setattr(complexity, "structure", dict)
    monkeypatch.setattr(complexity, "DENSEST_AVERAGE", 1.0)
    assert complexity.main([]) == 1
    *_, error = capsys.readouterr().out.splitlines()
    assert "of the product, nodes per code line of evidence;" in error


@pytest.mark.parametrize("inside", LEVELS)
def test_imports_point_down(inside):
    lines = LEVELS[inside].splitlines()
    level = {name: number for number, line in enumerate(lines) for name in line.split()}
    packages = package_graph(inside or None)
    assert packages.keys() == level.keys()
    for package, targets in packages.items():
        assert all(level[target] < level[package] for target in targets), f"{package} imports {sorted(targets)}"


# Imported package -> pattern of the modules that may import it.
MAY_IMPORT = {
    "torch": r"(?!pack_data)(?!ipu_packed_bert\.settings\.(reader|loading|placement)$)",
    "transformers": r"(?!pack_data)",
    "poptorch": r"ipu_packed_bert\.engine\.ipu\.devices$",
    "popdist": r"ipu_packed_bert\.engine\.ipu\.poprun$",
    "evidence": r"evidence|examples",
    "examples": r"evidence|examples",
    "tests": r"evidence|examples",
}


@pytest.mark.parametrize("path", SOURCES, ids=module_name)
def test_who_may_import_what(path):
    name = module_name(path)
    for imported in imported_modules(path):
        assert re.match(MAY_IMPORT.get(imported.split(".")[0], ""), name), f"{name} imports {imported}"


def test_private_names_stay_in_their_module():
    """No module imports a name with an underscore from another."""
    for path in SOURCES:
        for node in ast.walk(tree_of(path)):
            if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] in PACKAGES:
                private = [alias.name for alias in node.names if re.match("_(?!_)", alias.name)]
                assert not private, f"{module_name(path)} imports {private} from {node.module}"


def test_the_model_knows_no_device():
    for path in (ROOT / "ipu_packed_bert" / "model").glob("*.py"):
        tree = tree_of(path)
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
        "import ipu_packed_bert.settings.loading, ipu_packed_bert.data.data_sets",
        "import ipu_profiling.planning.plan, ipu_profiling.report.command, ipu_profiling.report.calibrate, "
        "ipu_packed_bert.commands.look",
    ],
    ids=["pack_data", "config", "plan, report and look"],
)
def test_loads_without_torch(statement):
    """With torch, poptorch and every extra forbidden, what has to pack and plan on any machine still loads."""
    forbidden = "torch poptorch tensorboard h5py pyarrow google_crc32c matplotlib jinja2 dask distributed transformers"
    blocked = f"import sys\nfor name in {forbidden.split()!r}:\n    sys.modules[name] = None\n"
    finished = subprocess.run([sys.executable, "-c", blocked + statement], cwd=ROOT, capture_output=True, text=True)
    assert finished.returncode == 0, finished.stderr


REFUSED_EARLY = (
    "pretrain --config packed_host --data nowhere",
    "finetune --config finetune_squad_packed --data-dir nowhere",
    "export nowhere there",
    "predict nowhere nowhere",
    "report --table 7",
    "pretrain --stepz 3",
    "look nowhere",
)


def test_help_and_a_wrong_option_or_path_load_little():
    """Neither torch, SciPy and matplotlib nor the cycle model; `build` loads the most of our modules, 76."""
    statement = (
        "import sys; from ipu_packed_bert.__main__ import main\n"
        "try:\n    main(sys.argv[1:])\nexcept (ValueError, SystemExit) as error:\n    print(error)\n"
        "print(*sys.modules)"
    )
    helps = [f"{command} --help" for group in packed_bert._GROUPS.values() for command in group]
    lines = [*helps, *REFUSED_EARLY]
    faults = []
    for line, finished in zip(lines, run_fresh(statement, [line.split() for line in lines])):
        printed, _, modules = finished.stdout.strip().rpartition("\n")
        loaded = modules.split()
        heavy = {"torch", "scipy", "matplotlib", "ipu_profiling.cycles"} & set(loaded)
        ours = sum(name.startswith(("pack_data", "ipu_packed_bert")) for name in loaded)
        if not printed or heavy or (line in helps and ours >= 80):
            faults.append(f"{line}: prints {printed[:40]!r}, loads {heavy} and {ours} modules of ours")
    assert len(helps) > 10 and not faults, "\n".join(faults)


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
