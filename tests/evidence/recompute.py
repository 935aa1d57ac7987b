"""The intervals of docs/evidence.md once more, from the committed cells, with json and scipy alone.

    python tests/evidence/recompute.py [evidence/results]

Nothing of `evidence` is imported: arms, seeds and margins are those of claims.yml, typed again.
"""

import json
import sys
from pathlib import Path

from scipy import stats

FIRST_THREE = (11, 12, 13)
# Claim -> run, seeds, the two arms, margins of the outputs.
TESTS = {
    "same_training_wikipedia": ("updates_wikipedia", FIRST_THREE, "packed", "unpacked", {"loss": 0.025}),
    "same_training_trained": ("updates_trained", FIRST_THREE, "packed", "unpacked", {"loss": 0.025}),
    "order_topics": ("order_topics", range(1, 9), "packs", "random", {"mlm_loss": 0.029, "nsp_loss": 0.021}),
    "order_wikipedia": ("order_wikipedia", range(1, 8), "packs", "random", {"mlm_loss": 0.029, "nsp_loss": 0.021}),
}


def cells(path):
    """Return (arm, seed) -> the rows of each finished run; the first line has settings, the last one facts."""
    lines = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
    return {(line["variant"], line["seed"]): line["rows"] for line in lines[1:-1]}


def last(rows, name):
    """Return the final scores of a run over all scored sequences."""
    return rows[-1].get(f"all_{name}", rows[-1][name])


def interval(values):
    """Mean, and the ends of the 90 % interval."""
    mean, error = sum(values) / len(values), stats.sem(values)
    half = stats.t.ppf(0.95, len(values) - 1) * error
    return mean, mean - half, mean + half


def p_value(values, margin):
    """The larger P value of the two one-sided tests, from t's distribution."""
    mean, error, freedom = sum(values) / len(values), stats.sem(values), len(values) - 1
    return max(stats.t.sf((mean + margin) / error, freedom), stats.t.sf((margin - mean) / error, freedom))


def recomputed(results):
    """Claim -> its P value, and the interval of each output; of the claims whose runs are finished."""
    found = {}
    for claim, (run, seeds, first, second, margins) in TESTS.items():
        measured = cells(results / f"{run}.jsonl")
        if not all((arm, seed) in measured for arm in (first, second) for seed in seeds):
            continue
        ends, largest = {}, 0.0
        for name, margin in margins.items():
            values = [last(measured[first, s], name) - last(measured[second, s], name) for s in seeds]
            ends[name], largest = interval(values), max(largest, p_value(values, margin))
        found[claim] = largest, ends
    return found


if __name__ == "__main__":
    for claim, (p, ends) in recomputed(Path((sys.argv[1:] or ["evidence/results"])[0])).items():
        print(claim, f"P {p:.3g}", {name: tuple(round(end, 5) for end in each) for name, each in ends.items()})
