"""The default depth: unlimited for the user's own lengths, the paper's for its histograms; a costly limit is named."""

import json

import pytest

from pack_data.lengths import packer_command


@pytest.mark.parametrize(
    "name, own, published",
    [("spfhp", None, 3), ("optimal", None, 3), ("best_fit", None, 3), ("nnlshp", 3, 3), ("none", 1, 1)],
)
def test_the_default_depth_depends_on_whose_lengths_they_are(tmp_path, capsys, name, own, published):
    lengths = tmp_path / "lengths.txt"
    lengths.write_text("3\n" * 40)
    for source, depth in (
        (["--histogram", str(lengths), "--max-sequence-length", "30"], own),
        (["--synthetic", "sample:squad_1_1_384,n=400"], published),
    ):
        assert packer_command.main(name, [*source, "--json"]) == 0
        assert json.loads(capsys.readouterr().out)["max_sequences_per_pack"] == depth


@pytest.mark.parametrize("depth, packs", [("3", 14), ("9", 5), ("10", None), ("unlimited", None)])
def test_a_limit_on_depth_that_costs_packs_is_reported(tmp_path, capsys, depth, packs):
    lengths = tmp_path / "lengths.txt"
    lengths.write_text("3\n" * 40)
    options = ["--histogram", str(lengths), "--max-sequence-length", "30", "--max-sequences-per-pack", depth]
    assert packer_command.main("best_fit", options) == 0
    report = f"limit of {depth} sequences per pack costs packs: {packs} instead of at most 4"
    assert (report in capsys.readouterr().out) == (packs is not None)
