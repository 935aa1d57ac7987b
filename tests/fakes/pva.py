"""A stand-in for the SDK's PopVision analysis library: reads the profiles of tests/fakes/profiles.py.

It has the names that ipu_profiling/measured/popvision.py uses, which are those that published applications use.
"""

import json
from types import SimpleNamespace


def openReport(path):
    with open(path) as file:
        stored = json.load(file)

    def step(each):
        program = SimpleNamespace(name=each["name"], type=SimpleNamespace(name=each["type"]))
        return SimpleNamespace(program=program, ipus=[SimpleNamespace(cycles=cycles) for cycles in each["cycles"]])

    def tile(each):
        total = SimpleNamespace(includingGaps=each["bytes"])
        return SimpleNamespace(memory=SimpleNamespace(total=total, alwaysLiveBytes=each["always_live"]))

    runs = [SimpleNamespace(name=run["name"], steps=[step(each) for each in run["steps"]]) for run in stored["runs"]]
    return SimpleNamespace(
        poplarVersion=SimpleNamespace(string="3.4.0 (stand-in)"),
        compilation=SimpleNamespace(
            target=SimpleNamespace(numIPUs=stored["ipus"]), tiles=[tile(each) for each in stored["tiles"]]
        ),
        execution=SimpleNamespace(runs=runs, steps=[each for run in runs for each in run.steps]),
    )
