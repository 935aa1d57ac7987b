"""A build has a row for each stage, assignment one for each number of sequences, long rows one for each packer."""

import json

from pack_data.benchmark import __main__ as benchmark
from pack_data.benchmark import assignment
from pack_data.benchmark import cases as many_cases
from pack_data.benchmark import rows as row_benchmark
from pack_data.cli.command import run_main


def test_each_case_has_ours_and_the_peers(monkeypatch):
    naive = row_benchmark.Peer("naive", lambda lengths, slots: len(lengths))
    small = naive._replace(name="small", most_tokens=1000)  # there are more: it is left out
    rows = list(row_benchmark.rows(300, slots=(512,), depths=(4, None), others=[naive, small]))
    cases = [(row["lengths"], row["depth"], row["packer"]) for row in rows]
    assert cases == [
        ("long tail", "4", "optimal"),
        ("long tail", "4", "lpfhp"),
        ("long tail", "unlimited", "optimal"),
        ("long tail", "unlimited", "lpfhp"),
        ("long tail", "unlimited", "naive"),
        ("around S / 3.5", "unlimited", "optimal"),
        ("around S / 3.5", "unlimited", "lpfhp"),
        ("around S / 3.5", "unlimited", "naive"),
    ]
    above = {case: row["above"] for case, row in zip(cases, rows)}
    assert all(0 <= above[kind, depth, "optimal"] <= above[kind, depth, name] for kind, depth, name in cases)
    assert rows[4]["packs"] == 300


def test_many_cases_have_ours_and_the_peers_where_the_depth_is_not_limited():
    naive = row_benchmark.Peer("lightbinpack", lambda lengths, slots: len(lengths))
    found = many_cases.cases(12, [naive], most=256)
    assert len({(case.kind, case.sequences, case.slots, case.depth) for case in found}) > 6
    for case in found:
        assert case.gap >= 0 and case.sequences <= 256 and bool(case.peers) == (case.depth is None)
        assert all(packs == case.sequences for packs, _ in case.peers.values())
        assert case.ratio is None or case.packs == case.sequences
    values = {what.strip(): value for what, value, _ in many_cases.summary(found)}
    assert values["more packs than a peer"] == "0"


def test_what_is_not_installed_is_one_line_each(monkeypatch, capsys):
    monkeypatch.setattr(row_benchmark, "SLOTS", (64,))
    monkeypatch.setattr(row_benchmark, "_PEERS", {"no_such_packer": lambda: __import__("no_such_packer")})
    monkeypatch.setattr(
        row_benchmark, "rows", lambda sequences, others: iter([dict.fromkeys("lengths depth packer".split(), "x")])
    )
    assert run_main(benchmark.main, ["--cases", "2", "--sequences", "64"]) == 0
    assert "2 cases, processor seconds" in capsys.readouterr().out
    assert run_main(benchmark.main, ["--rows", "--sequences", "20"]) == 0
    printed = capsys.readouterr().out.splitlines()
    assert printed[1] == "not installed: no_such_packer (pip install no_such_packer)"
    assert [cell.strip() for cell in printed[-1].strip("| ").split("|")] == "x - x x - - - - -".split()


def test_a_build_has_a_row_for_each_stage(capsys):
    assert benchmark.main(["--sequences", "2000", "--workers", "1"]) == 0
    printed = capsys.readouterr().out
    labels = ("assignment", "drawing", "assign and write", "processors", "memory", "reading, random", "checksums")
    assert all(label in printed for label in labels)
    assert "2,000 sequences drawn" in printed and "of 2,000 lengths to packs" in printed


def test_assignment_has_a_row_for_each_number(capsys):
    options = ["--sequences", "3000", "2000", "--workers", "1"]
    assert assignment.main([*options, "--json"]) == 0
    found = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [(each["sequences"], each["assigned"], each["worker"]) for each in found] == [
        (2000, "in memory", None),
        (3000, "in memory", None),
    ]
    assert all(each["seconds"] > 0 and each["own"] > 0 for each in found)
    assert assignment.main(options) == 0
    printed = capsys.readouterr().out
    assert "2,000" in printed and "in memory" in printed and "MiB a worker" in printed
