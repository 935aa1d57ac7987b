"""Each number of sequences in a process of its own, and one table, or one JSON object a line, of all."""

import json

from pack_data.benchmark.assignment import main


def test_a_row_for_each_number(capsys):
    options = ["--sequences", "3000", "2000", "--workers", "1"]
    assert main([*options, "--json"]) == 0
    found = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [(each["sequences"], each["assigned"], each["worker"]) for each in found] == [
        (2000, "in memory", None),
        (3000, "in memory", None),
    ]
    assert all(each["seconds"] > 0 and each["own"] > 0 for each in found)
    assert main(options) == 0
    printed = capsys.readouterr().out
    assert "2,000" in printed and "in memory" in printed and "MiB a worker" in printed
