"""The wheel, installed outside the checkout, does what the checkout does: build, verify, train, plan, report, by name.

It is built here without isolation and installed without dependencies, over this environment's packages;
`--packed-bert PATH` tests the console command of another environment (`make test-wheel`: an empty one).
Its commands are slow, and those of the checkout are tested elsewhere.
"""

import json
import os
import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Dict, List, NamedTuple

import pytest

import pack_data
from tests.imports import ROOT


class Installed(NamedTuple):
    """The console command, the environment it runs in, and an empty folder to run it in."""

    command: List[str]
    environment: Dict[str, str]
    folder: Path


def run(*arguments, status=0, **options):
    done = subprocess.run([str(argument) for argument in arguments], capture_output=True, text=True, **options)
    assert done.returncode == status, done.stdout + done.stderr
    return done.stdout if status == 0 else done.stderr


def packed_bert(installed, *arguments, status=0):
    text = run(
        *installed.command,
        *arguments,
        status=status,
        cwd=str(installed.folder),
        env=installed.environment,
    )
    assert "Traceback" not in text
    return text


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    setuptools = pytest.importorskip("setuptools", reason="a wheel needs setuptools")
    if tuple(map(int, setuptools.__version__.split(".")[:2])) < (70, 1):
        pytest.skip(f"setuptools {setuptools.__version__} needs the package wheel; 70.1 or newer does not")
    source = tmp_path_factory.mktemp("wheel") / "source"
    command = ["git", "-C", str(ROOT), "ls-files", "-co", "--exclude-standard"]
    listed = subprocess.run(command, stdout=subprocess.PIPE, text=True)
    if listed.returncode == 0:
        for name in listed.stdout.splitlines():
            if (ROOT / name).is_file():
                (source / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy(str(ROOT / name), str(source / name))
    else:  # an unpacked archive
        ignored = shutil.ignore_patterns(".*", "data", "runs", "__pycache__", "*.egg-info")
        shutil.copytree(str(ROOT), str(source), ignore=ignored)
    out = source.parent / "out"
    options = "--quiet --no-deps --no-build-isolation --no-index -w".split()
    run(sys.executable, "-m", "pip", "wheel", *options, out, source)
    (wheel,) = out.glob("*.whl")
    return wheel


@pytest.fixture(scope="module")
def installed(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp("outside")
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    environment.pop("PYTHONPATH", None)
    given = request.config.getoption("--packed-bert")
    if given is not None:
        return Installed([str(given.absolute())], environment, folder)
    pytest.importorskip("torch", reason="training needs torch")
    site = tmp_path_factory.mktemp("site")
    options = "--quiet --no-deps --no-index --target".split()
    run(sys.executable, "-m", "pip", "install", *options, site, request.getfixturevalue("wheel"))
    command = [sys.executable, str(site / "bin" / "packed-bert")]
    return Installed(command, {**environment, "PYTHONPATH": str(site)}, folder)


@pytest.fixture(scope="module")
def trained(installed):
    """A data set from a text of one's own, and a run of two updates on it; returns what training printed."""
    words = "the pack holds many short sequences and no slot is left empty while a long one stands alone".split()
    (installed.folder / "text").mkdir()
    for number in range(6):
        lines = [
            " ".join(words[(number + line + word) % len(words)] for word in range(4 + line % 7)) + "."
            for line in range(40)
        ]
        (installed.folder / "text" / f"{number}.txt").write_text("\n".join(lines))
    sizes = "--max-sequence-length 64 --max-sequences-per-pack 3 --vocabulary-size 200 --workers 1".split()
    packed_bert(installed, "build", "--corpus", "text", *sizes, "--out", "data/own")
    model = {"hidden_size": 16, "num_layers": 1, "num_heads": 2, "intermediate_size": 32}
    settings = [f"model.{name}={value}" for name, value in model.items()]
    settings += [
        "placement.layers_per_ipu=[1]",
        "batch.gradient_accumulation=4",
        "run.evaluate_every=0",
    ]
    options = "--config packed_host --data data/own --steps 2 --out run".split()
    return packed_bert(
        installed,
        "pretrain",
        *options,
        *(word for setting in settings for word in ("--set", setting)),
    )


def test_the_release_has_one_version_and_one_date():
    citation = (ROOT / "CITATION.cff").read_text(encoding="utf-8")
    released = re.search("^date-released: (.*)$", citation, re.MULTILINE)[1]
    assert f"\nversion: {pack_data.__version__}\n" in citation
    assert f"\n## {pack_data.__version__} - {released}\n" in (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")


def test_the_wheel_holds_what_is_installed_and_no_more(wheel):
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
    assert {
        "pack_data/py.typed",
        "pack_data/published/wikipedia_512.csv",
        "ipu_profiling/cycles/points.json",
    } <= names
    templates = {path.relative_to(ROOT).as_posix() for path in (ROOT / "pack_data/display/templates").iterdir()}
    assert len(templates) > 1 and templates <= names
    packages = ("pack_data", "padding_free", "ipu_packed_bert", "ipu_profiling")
    paths = [path for package in packages for path in (ROOT / package).rglob("*.py")]
    sources = {path.relative_to(ROOT).as_posix() for path in paths}
    configs = {f"ipu_packed_bert/configs/{path.name}" for path in (ROOT / "configs").iterdir()}
    assert len(configs) > 10 and sources | configs <= names
    assert {name.split("/")[0].split("-")[0] for name in names} == set(packages)


@pytest.mark.slow
def test_it_builds_verifies_and_trains(installed, trained):
    assert "each exactly once" in packed_bert(installed, "verify", "data/own")
    log = installed.folder / "run" / "log.jsonl"
    assert [json.loads(line)["step"] for line in log.read_text().splitlines()] == [1, 2]
    (advice,) = (line for line in trained.splitlines() if line.startswith("continue"))
    _, program, command = advice.split()[:3]
    assert (Path(program).name, command) == ("packed-bert", "pretrain")
    packed_bert(installed, *advice.split()[2:])  # what it tells to type works
    assert len(log.read_text().splitlines()) == 4


@pytest.mark.slow
def test_it_plans_by_name(installed):
    text = packed_bert(installed, "plan", *"--config packed_phase2_pod16 --packing-factor 2".split())
    assert "4 replicas of 4 IPUs = 16 IPUs" in text and "verdict  fits" in text
    too_large = "--config packed_phase2_pod16 --packing-factor 2 --set batch.micro_batch=64".split()
    packed_bert(installed, "plan", *too_large, status=1)
    assert "mean packed_phase2_pod16" in packed_bert(installed, "plan", "--config", "packed_phase3_pod16", status=2)


@pytest.mark.slow
def test_it_reports(installed):
    assert "16 IPUs" in packed_bert(installed, "report", "--config", "packed_phase2_base_pod16", "--packing-factor", 2)


def test_the_packages_are_the_installed_ones(installed):
    """Nothing of the checkout was used by accident."""
    python = (
        installed.command[0] if len(installed.command) == 2 else str(Path(installed.command[0]).with_name("python"))
    )
    program = (
        "import ipu_packed_bert, pack_data; from ipu_packed_bert.settings.shipped import FOLDER;"
        "print(ipu_packed_bert.__file__, pack_data.__file__, FOLDER)"
    )
    for path in run(python, "-c", program, cwd=str(installed.folder), env=installed.environment).split():
        assert ROOT not in Path(path).resolve().parents or ".venv-wheel" in path
