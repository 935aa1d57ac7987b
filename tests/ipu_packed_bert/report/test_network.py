"""What a reduction costs, against a ring that is carried out."""

from pathlib import Path

import pytest

from ipu_packed_bert.engine.base import build_network
from ipu_packed_bert.report import network
from ipu_packed_bert.settings.pretraining import load_config
from ipu_packed_bert.settings.schema import ModelConfig
from ipu_packed_bert.settings.shipped import config_file
from ipu_packed_bert.tasks.pretraining import Pretraining

ROOT = Path(__file__).resolve().parents[3]


@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 7])
def test_bytes_are_those_of_a_ring(ranks):
    """Each rank sends a chunk to its neighbour, n-1 times to add up and n-1 times to hand round."""
    values = 84 * 5
    sums = [[rank + 1] * ranks for rank in range(ranks)]  # a chunk is one number that stands for all of its values
    sent = [0.0] * ranks
    for turn in range(2 * (ranks - 1)):
        for rank in range(ranks):
            chunk, adds = (rank - turn) % ranks, turn < ranks - 1
            neighbour = (rank + 1) % ranks
            # In place: the neighbour passes on another chunk in this turn.
            sums[neighbour][chunk] = sums[rank][chunk] + (sums[neighbour][chunk] if adds else 0)
            sent[rank] += 4 * values / ranks
    assert all(chunk == sum(range(1, ranks + 1)) for each in sums for chunk in each)
    assert sent == pytest.approx([network.ring_bytes(values, ranks)] * ranks)


def test_the_parameters_are_those_of_the_network(capsys):
    config = load_config(config_file("packed_host"))
    number = sum(weight.numel() for weight in build_network(Pretraining(config), 0).parameters())
    assert network.main(["--config", "packed_host", "--seconds", "0.5"]) == 0
    words = capsys.readouterr().out
    assert words.startswith(f"{number / 1e6:.1f} M parameters") and "0.500 s (as given)" in words


def test_operations_and_share():
    model = ModelConfig(hidden_size=4, intermediate_size=8, num_layers=2, num_heads=2)
    # A token, a layer: 4 x 16 + 2 x 32 multiply-adds with weights, 2 x 3 x 4 with the other tokens; two layers, six.
    assert network.operations(model, 3, 2) == 6 * 2 * 6 * (128 + 24)
    assert network.share(1.0, 0.5, 2) == 0.5
    assert network.seconds_on_network(25_000_000, 2, 0.8) == pytest.approx(1.0)


def test_the_page_shows_what_the_command_prints(capsys):
    assert network.main([]) == 0
    page = (ROOT / "docs" / "cluster.md").read_text(encoding="utf-8")
    _, _, table = capsys.readouterr().out.partition("\n\n")
    assert table.count("\n") > 7 and table in page
