"""Without torch, where only the packers' packages are installed, a command that needs it ends in one line with the way
to get it."""

import sys

import pytest

from pack_data.reading.packages import load_package, package_of, require
from tests.fresh import run_fresh
from tests.imports import ROOT
from tests.tiny_runs import tiny_config, tiny_data

_WITHOUT = """
import runpy, sys
blocked, target, *arguments = sys.argv[1:]
sys.modules.update(dict.fromkeys(blocked.split()))
sys.argv = [target, *arguments]
run = runpy.run_path if target.endswith(".py") else runpy.run_module
run(target, run_name="__main__")
"""


def without(rows):
    """Run commands, each as `python -m target` or `python target` does, in a process that cannot import some modules.

    rows: (modules, separated by spaces; target; arguments) of each command.
    """
    return run_fresh(_WITHOUT, [[modules, target, *arguments] for modules, target, arguments in rows])


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tiny")
    return tiny_config(folder / "tiny.yml", tiny_data(folder / "data"))


# Any files: torch is named before they are read.
FILES = ["--set", "data.training=README.md", "--set", "data.evaluation=README.md"]
COMMANDS = {
    "pretraining": ("run_pretraining.py", ["--config", "TINY"]),
    "resume": ("run_pretraining.py", ["--resume", "RUN"]),
    "export": ("ipu_packed_bert", ["export", "RUN", "OUT"]),
    "import": ("ipu_packed_bert", ["export", "--import", "RUN", "OUT"]),
    "benchmark": ("ipu_packed_bert", ["benchmark", "--size", "tiny"]),
    "finetune": ("ipu_packed_bert", ["finetune", "--config", "configs/finetune_squad_packed.yml", *FILES]),
    "experiments": ("evidence", ["updates", "--size", "quick", "--out", "OUT"]),
}


def test_a_command_that_trains_names_torch(tiny, tmp_path):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "config.yml").write_text(tiny.read_text())
    places = {"TINY": tiny, "RUN": tmp_path / "run", "OUT": tmp_path / "out"}
    rows = []
    for target, arguments in COMMANDS.values():
        rows.append(("torch", target, [places.get(argument, argument) for argument in arguments]))
    for name, done in zip(COMMANDS, without(rows)):
        assert done.returncode == 2, (name, done)
        assert done.stderr.startswith("error: ") and done.stderr.count("\n") == 1, (name, done)
        assert "pip install torch" in done.stderr, (name, done)
    assert not (tmp_path / "out").exists()


def test_what_needs_no_torch_works_without():
    plan = ["--config", "configs/packed_phase2_pod16.yml", "--plan", "--packing-factor", "2.0"]
    rows = [("torch", "run_pretraining.py", plan), ("torch", "ipu_packed_bert", ["report", "--help"])]
    for done in without([*rows, ("torch", "evidence", [])]):
        assert done.returncode == 0, done.stderr


# Command that writes OUT -> the packages that it needs for that.
WRITES = {
    "ipu_packed_bert compare --plot OUT.png": "matplotlib",
    "ipu_packed_bert look wikipedia_512 --plot OUT.png": "matplotlib",
    "ipu_packed_bert stream --plot OUT.svg": "matplotlib",
    "profiling/overhead_report.py --html OUT.html": "matplotlib jinja2",
    "ipu_packed_bert look wikipedia_512 --html OUT.html": "matplotlib jinja2",
    "run_pretraining.py --config packed_phase2_pod16 --whole --engine host --out OUT": "safetensors",
}


def test_a_command_that_writes_names_what_is_missing_before_it_works(tmp_path):
    rows = []
    for line, packages in WRITES.items():
        target, *arguments = line.replace("OUT", str(tmp_path / "out")).split()
        rows.append((packages, target, arguments))
    for (packages, *row), done in zip(rows, without(rows)):
        assert done.returncode == 2 and done.stdout == "", (row, done)
        assert done.stderr.startswith("error: ") and done.stderr.endswith(f": pip install {packages}\n"), (row, done)
        assert done.stderr.count("\n") == 1, (row, done)
    assert not list(tmp_path.iterdir())


def test_all_that_is_missing_is_named_at_once(monkeypatch):
    for module in ("matplotlib", "jinja2"):
        monkeypatch.setitem(sys.modules, module, None)
    require("this", "json", "csv")
    with pytest.raises(ValueError) as missing:
        require("--html", "json", "matplotlib", "jinja2")
    assert str(missing.value) == "--html needs matplotlib and jinja2: pip install matplotlib jinja2"


def test_a_package_is_named_as_it_is_installed(monkeypatch):
    packages = {"yaml": "pyyaml", "matplotlib.figure": "matplotlib", "google.protobuf.message": "protobuf"}
    for module, package in packages.items():
        monkeypatch.setitem(sys.modules, module, None)
        with pytest.raises(ValueError) as missing:
            load_package(module, "this")
        assert str(missing.value) == f"this needs the package {package}: pip install {package}"
    assert load_package("json.decoder", "this").__name__ == "json.decoder"
    assert [package_of(name) for name in ("torch.nn.functional", "pack_data.nothing", None)] == ["torch", None, None]


def test_a_package_that_does_not_load_is_not_called_missing(tmp_path, monkeypatch):
    (tmp_path / "h5py.py").write_text("raise ImportError('libhdf5.so: cannot open shared object file')")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "h5py", raising=False)
    with pytest.raises(ValueError, match="libhdf5.so: cannot open"):
        load_package("h5py", "this")


def test_a_pyarrow_that_runs_code_in_files_is_refused(monkeypatch):
    arrow = pytest.importorskip("pyarrow")
    for version, is_safe in (("14.0.0", False), ("9.0.0", False), ("14.0.1", True), ("15.0.0.dev3", True)):
        monkeypatch.setattr(arrow, "__version__", version)
        if is_safe:
            load_package("pyarrow.parquet", "this")
            continue
        with pytest.raises(ValueError, match=r"CVE-2023-47248.*pyarrow>=14\.0\.1"):
            load_package("pyarrow.parquet", "this")
    assert "pyarrow>=14.0.1\n" in (ROOT / "setup.cfg").read_text()


def test_no_hint_names_a_package_that_no_index_has():
    for package in ("pack_data", "ipu_packed_bert", "profiling"):
        for path in (ROOT / package).rglob("*.py"):
            assert "pip install 'ipu_packed_bert" not in path.read_text(encoding="utf-8"), path
