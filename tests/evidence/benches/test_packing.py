"""A build has a row for each stage, assignment one for each number of sequences, long rows one for each packer."""

import json

from evidence.benches import assignment, peers
from evidence.benches import cases as many_cases
from evidence.benches import packing as benchmark
from evidence.benches.peers import Peer
from pack_data.cli.command import run_main


def test_many_cases_have_ours_and_the_peers_where_the_depth_is_not_limited():
    naive = Peer("lightbinpack", lambda lengths, slots: len(lengths))
    small = Peer("small", lambda lengths, slots: 0, most_tokens=0)  # there are more: it is left out
    found = many_cases._cases(12, [naive, small], most=256)
    assert len({(case.kind, case.sequences, case.slots, case.depth) for case in found}) > 6
    for case in found:
        assert case.gap >= 0 and case.sequences <= 256 and bool(case.peers) == (case.depth is None)
        assert all((name, packs) == ("lightbinpack", case.sequences) for name, (packs, _) in case.peers.items())
        assert case.ratio is None or case.packs == case.sequences
    values = {what.strip(): value for what, value, _ in many_cases._summary(found)}
    assert values["more packs than a peer"] == "0"


def test_what_is_not_installed_is_one_line_each(monkeypatch, capsys):
    monkeypatch.setattr(peers, "_PEERS", {"no_such_packer": lambda: __import__("no_such_packer")})
    assert run_main(benchmark.main, ["--cases", "2", "--sequences", "64"]) == 0
    printed = capsys.readouterr().out.splitlines()
    assert printed[0] == "not installed: no_such_packer (pip install no_such_packer)"
    assert "2 cases, processor seconds of one core" in printed


def test_a_build_has_a_row_for_each_stage(capsys):
    assert benchmark.main(["--sequences", "2000", "--workers", "1"]) == 0
    printed = capsys.readouterr().out
    labels = ("drawing", "assign and write", "processors", "memory", "reading, mixed", "checksums")
    assert all(label in printed for label in labels)
    assert "2,000 sequences drawn" in printed


def test_assignment_has_a_row_for_each_number(capsys):
    options = ["--sequences", "900", "600", "--workers", "1"]
    assert assignment.main([*options, "--json"]) == 0
    found = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [(each["sequences"], each["assigned"], each["worker"]) for each in found] == [
        (600, "in memory", None),
        (900, "in memory", None),
    ]
    assert all(each["assignment"] > 0 and each["own"] > 0 and each["packs"] > 300 for each in found)
    assert assignment.main(options) == 0
    printed = capsys.readouterr().out
    assert "600" in printed and "in memory" in printed and "MiB a worker" in printed
