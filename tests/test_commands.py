"""The commands of the README, as a new user types them in a clean checkout of the last commit; and options that no test
of a room uses."""

import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from ipu_packed_bert.__main__ import main
from pack_data.store.data_set import PackStore
from tests.imports import ROOT
from tests.pack_data.text_corpus import write_corpus


def git(*arguments, **options):
    return subprocess.run(("git",) + arguments, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, **options)


@pytest.fixture(scope="module")
def checkout(tmp_path_factory):
    """The committed files and nothing else: no data, no runs, no environment."""
    folder = tmp_path_factory.mktemp("clean") / "a checkout"
    if git("-C", str(ROOT), "rev-parse", "HEAD").returncode == 0:
        cloned = git("clone", "--quiet", "--depth", "1", "file://" + str(ROOT), str(folder))
        assert cloned.returncode == 0, cloned.stdout
    else:  # an unpacked archive
        shutil.copytree(
            str(ROOT),
            str(folder),
            ignore=shutil.ignore_patterns(".*", "data", "runs", "__pycache__", "*.egg-info"),
        )
        shutil.copytree(str(ROOT / "tests" / "data"), str(folder / "tests" / "data"), dirs_exist_ok=True)
    return folder


# As in a shell without an active environment.
BARE_PATH = "/usr/bin:/bin"


def command(checkout, *arguments, status=0):
    """Runs ``python ARGUMENTS`` there; returns its standard output, or the one line of its error where status is 2."""
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    environment.update(OMP_NUM_THREADS="1", PATH=BARE_PATH)
    done = subprocess.run(
        (sys.executable,) + arguments,
        cwd=str(checkout),
        env=environment,
        capture_output=True,
        text=True,
    )
    assert done.returncode == status, done.stdout + done.stderr
    assert "Traceback" not in done.stderr
    if status == 2:
        assert done.stderr.startswith("error: ") and done.stderr.count("\n") == 1
        return done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def pretrained(checkout):
    """The command of the README, for three updates: it packs the embedded corpus and trains on it."""
    pytest.importorskip("torch", reason="training needs torch")
    options = ("--steps", "3", "--compare-unpacked", "1")
    return command(checkout, "run_pretraining.py", "--config", "configs/packed_phase2_pod16.yml", *options)


@pytest.mark.parametrize("label", ["continue", "use it"])
def test_the_printed_next_steps_run_in_a_shell_without_an_active_environment(checkout, pretrained, label, tmp_path):
    copy = shutil.copytree(str(checkout), str(tmp_path / "a copy"))
    (line,) = re.findall(rf"^{label}  +(.*?)(?:  \(.*)?$", pretrained, re.M)
    bare = {"PATH": BARE_PATH, "OMP_NUM_THREADS": "1"}
    line = line.replace(" DIR", " exported")
    done = subprocess.run(["sh", "-c", line], cwd=copy, env=bare, capture_output=True, text=True)
    assert done.returncode == 0, line + done.stderr
    if label == "continue":
        (run,) = Path(copy, "runs").iterdir()
        assert "from update 3" in done.stdout and "building" not in done.stdout
        assert len((run / "log.jsonl").read_text().splitlines()) == 6


@pytest.mark.parametrize("script", ["run_pretraining.py", "profiling/overhead_report.py", "profiling/calibrate.py"])
def test_without_the_packages_a_script_says_how_to_get_them(checkout, script):
    assert "has no package numpy; `make pretrain` installs" in command(checkout, "-S", script, status=2)


def test_pretraining_packs_and_trains_without_an_ipu_or_a_data_set(checkout, pretrained):
    missing = "data/embedded_2k_packed_512 is missing: building it from the embedded corpus; kept for the next run"
    assert missing in pretrained
    sequences, packs = (
        int(text.replace(",", ""))
        for text in re.search(r"([\d,]+) sequences in ([\d,]+) packs of 512", pretrained).groups()
    )
    assert 1000 < sequences < 10000 and 1.3 < sequences / packs < 3
    (run,) = (checkout / "runs").iterdir()
    records = [json.loads(line) for line in (run / "log.jsonl").read_text().splitlines()]
    assert [record["step"] for record in records] == [1, 2, 3]
    # An update of four packs may hold a sequence each; of three updates, drawn by the run's seed, some are packed.
    assert sum(record["sequences"] for record in records) > sum(record["packs"] for record in records) > 0
    assert 7 < records[1]["mlm_loss"] < records[0]["mlm_loss"] < 8  # ln 2048 = 7.62
    compared = json.loads((run / "summary.json").read_text())["compare_unpacked"]
    assert compared["speedup"] > 0 and compared["gradient_difference"] < 1e-4  # a ratio of times: printed, not judged
    # The path of the interpreter is quoted if the checkout is in a directory with a space.
    assert re.search(f"python'? run_pretraining.py --resume {run.relative_to(checkout)}", pretrained)


def test_the_data_set_is_whole(checkout, pretrained):
    assert "each exactly once" in command(checkout, "-m", "ipu_packed_bert", "verify", "data/embedded_2k_packed_512")


def test_git_sees_nothing_of_data_and_runs(checkout, pretrained):
    if (checkout / ".git").exists():
        assert git("-C", str(checkout), "status", "--porcelain").stdout == ""


def test_a_text_of_ones_own(checkout, tmp_path):
    text = tmp_path / "text"
    text.mkdir()
    for number in range(4):
        lines = [f"Line {line} of text {number} says how many sequences share a pack of slots." for line in range(60)]
        (text / f"{number}.txt").write_text("\n".join(lines))
    out = str(tmp_path / "packed")
    sizes = "--max-sequence-length 128 --packer spfhp --max-sequences-per-pack 3 --vocabulary-size 300".split()
    table = command(checkout, "-m", "ipu_packed_bert", "build", "--corpus", str(text), *sizes, "--out", out)
    assert "packing factor" in table
    command(checkout, "-m", "ipu_packed_bert", "verify", out)


def test_spfhp_bare_packs_wikipedia_at_depth_3(checkout, tmp_path):
    recipe = str(tmp_path / "recipe.json")
    table = command(checkout, "-m", "pack_data.spfhp", "--out", recipe)
    assert "9,094,695" in table
    numbers = json.loads(command(checkout, "-m", "pack_data.spfhp", "--json", "--max-sequences-per-pack", "unlimited"))
    assert numbers["packs"] == 8166708 and numbers["largest_depth"] == 16


def test_nnlshp_on_squad(checkout):
    numbers = json.loads(command(checkout, "-m", "pack_data.nnlshp", "--histogram", "squad_1_1_384", "--json"))
    assert numbers["sequences"] == 88641 and numbers["packing_factor"] > 2.16


def test_a_plan_needs_no_device(checkout):
    text = command(checkout, "run_pretraining.py", "--config", "configs/unpacked_phase2_pod16.yml", "--plan")
    assert "16,384" in text or "16384" in text  # packs in an update


@pytest.mark.skipif(importlib.util.find_spec("poptorch") is not None, reason="PopTorch is installed here")
def test_ipus_that_are_not_there_are_one_line(checkout):
    pytest.importorskip("torch", reason="training needs torch")
    text = command(
        checkout,
        "run_pretraining.py",
        "--config",
        "configs/packed_phase2_pod16.yml",
        "--engine",
        "ipu",
        status=2,
    )
    assert "Poplar SDK" in text and "--engine host" in text


def test_a_stream_waits_no_longer_than_it_may(capsys):
    waits = []
    for longest in ("16", "64"):
        arguments = [
            "stream",
            "--synthetic",
            "sample:squad_1_1_384,n=600",
            "--buffer",
            "16",
            "--json",
        ]
        assert main([*arguments, "--longest-wait", longest]) == 0
        rows = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
        waits.append(max(row["longest_wait"] or 0 for row in rows))
    assert waits[0] <= 16 < waits[1] <= 64


def test_another_epoch_pairs_the_same_sequences_differently(tmp_path, capsys):
    corpus = write_corpus(tmp_path / "text")
    stores = []
    for epoch in ("0", "1"):
        out = tmp_path / f"epoch_{epoch}"
        options = [
            "--corpus",
            str(corpus),
            "--out",
            str(out),
            "--epoch",
            epoch,
            "--max-sequence-length",
            "64",
        ]
        assert (
            main(
                [
                    "build",
                    *options,
                    "--vocabulary-size",
                    "200",
                    "--packer",
                    "spfhp",
                    "--workers",
                    "1",
                ]
            )
            == 0
        )
        stores.append(PackStore.open(out))
    with stores[0] as first, stores[1] as second:
        assert first.manifest.digest == second.manifest.digest and len(first) == len(second)
        packs = [store.batch(range(len(store)))["input_ids"] for store in (first, second)]
        assert (packs[0] != packs[1]).any()
