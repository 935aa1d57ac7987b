"""The table of long rows: ours are proven, others' counts stand beside them, what is not installed is said."""

from pack_data.benchmark import __main__ as benchmark
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


def test_what_is_not_installed_is_one_line_each(monkeypatch, capsys):
    monkeypatch.setattr(row_benchmark, "SLOTS", (64,))
    monkeypatch.setattr(row_benchmark, "_PEERS", {"no_such_packer": lambda: __import__("no_such_packer")})
    monkeypatch.setattr(
        row_benchmark, "rows", lambda sequences, others: iter([dict.fromkeys("lengths depth packer".split(), "x")])
    )
    assert run_main(benchmark.main, ["--rows", "--sequences", "20"]) == 0
    printed = capsys.readouterr().out.splitlines()
    assert printed[1] == "not installed: no_such_packer (pip install no_such_packer)"
    assert [cell.strip() for cell in printed[-1].strip("| ").split("|")] == "x - x x - - - - -".split()
