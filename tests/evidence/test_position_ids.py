"""The table of the nine ways: every way trains on the same tokens; on two processes the same losses as on one."""

import json
import lzma

import numpy as np
import pytest

pytest.importorskip(
    "transformers", minversion="4.48", reason="causal models are Hugging Face's: pip install 'transformers>=4.48'"
)

from evidence import position_ids  # noqa: E402
from evidence.__main__ import main  # noqa: E402
from evidence.position_ids import FILLED, PADDED, SAME_UPDATES, SIZES, VARIANTS  # noqa: E402
from evidence.runner import RESULTS, read_results  # noqa: E402
from pack_data.batching.plans import WAYS  # noqa: E402
from pack_data.cli.command import run_main  # noqa: E402
from padding_free import choice  # noqa: E402
from padding_free.leaks.probe import check_no_leak  # noqa: E402

pytestmark = pytest.mark.slow

SENTENCE = "the quick brown fox jumps over a lazy dog and then it sleeps for some hours under the old tree"
WORDS = SENTENCE.split()
QUICK = ("position_ids", "--size", "quick")


def texts(number, seed):
    rng = np.random.default_rng(seed)
    return [
        (" ".join(rng.choice(WORDS, rng.integers(3, 20))), " ".join(rng.choice(WORDS, rng.integers(3, 30))))
        for _ in range(number)
    ]


@pytest.fixture
def data_dir(tmp_path):
    """Files as those of GSM8K and GPTeacher, of a few words."""
    for folder in ("gsm8k", "gpteacher"):
        (tmp_path / folder).mkdir()
    for seed, (part, number) in enumerate((("train", 30), ("test", 10))):
        lines = [json.dumps({"question": prompt, "answer": answer}) for prompt, answer in texts(number, seed)]
        (tmp_path / "gsm8k" / f"{part}.jsonl.xz").write_bytes(lzma.compress("\n".join(lines).encode()))
    for seed, part in enumerate(("roleplay", "codegen"), start=5):
        records = [{"instruction": prompt, "input": "", "response": answer} for prompt, answer in texts(20, seed)]
        (tmp_path / "gpteacher" / f"{part}.json.xz").write_bytes(lzma.compress(json.dumps(records).encode()))
    return tmp_path


@pytest.fixture(autouse=True)
def buffers_as_they_are(monkeypatch):
    """In the process of the tests, where keeping them cannot be undone."""
    monkeypatch.setattr(position_ids, "keep_buffers", lambda: True)


@pytest.fixture
def probed_once(monkeypatch):
    """Probe the model of the first way alone: all ways train the same one."""
    actual = []

    def check_once(model, **options):
        if not actual:
            actual.append(check_no_leak(model, **options))
        return actual[0]

    monkeypatch.setattr(choice, "check_no_leak", check_once)
    yield
    assert actual


def rows_of(folder):
    return {(row["data"], row["way"]): row for (row,) in read_results(folder / RESULTS).cells.values()}


def test_every_way_on_both_data_sets(data_dir, tmp_path, capsys, monkeypatch, probed_once):
    monkeypatch.setitem(SIZES, "quick", SIZES["quick"]._replace(vocabulary_size=128))
    arguments = [*QUICK, "--examples", "24", "--seeds", "1", "--no-plot", "--data-dir", str(data_dir)]
    assert run_main(main, [*arguments, "--out", str(tmp_path / "out")]) == 0
    printed = capsys.readouterr().out
    rows = rows_of(tmp_path / "out")
    assert len(rows) == 2 * len(VARIANTS)
    assert all(way in printed for way in WAYS)
    for name in ("GSM8K", "GPTeacher"):
        by_way = {way: row for (data, way), row in rows.items() if data == name}
        assert len({row["tokens"] for row in by_way.values()}) == 1
        # The same batches, padded and not: the same updates, so the same losses up to float32.
        padded = by_way[PADDED]
        for column in ("updates", "training_loss", "held_out_loss"):
            value = float(by_way["MiniBatchPacking+PosID"][column])
            assert value == pytest.approx(float(padded[column]), rel=1e-5)
        for way in FILLED:
            same_updates = by_way[way + SAME_UPDATES]["updates"]
            assert int(by_way[way]["updates"]) < int(padded["updates"]) <= int(same_updates) + 1
    # A second call measures nothing again.
    assert run_main(main, [*arguments, "--out", str(tmp_path / "out")]) == 0
    assert rows_of(tmp_path / "out") == rows
