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
    "order_topics": (
        "order_topics",
        range(1, 9),
        "packs",
        "random",
        {"mlm_loss": 0.029, "nsp_loss": 0.021},
    ),
    "order_wikipedia": (
        "order_wikipedia",
        range(1, 8),
        "packs",
        "random",
        {"mlm_loss": 0.029, "nsp_loss": 0.021},
    ),
}


def cells(path):
    """Return (arm, seed) -> the rows of each finished run; the first line has settings, the last one facts."""
    if not path.exists():
        return {}
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    return {(line["variant"], line["seed"]): line["rows"] for line in lines[1:-1]}


def last(rows, name):
    """Return the final scores of a run over all scored sequences."""
    return rows[-1].get(
        f"all_{name}",
        rows[-1][name],
    )


def interval(values):
    """Return the mean and the ends of the 90 % interval."""
    mean = sum(values) / len(values)
    half = stats.t.ppf(0.95, len(values) - 1) * stats.sem(values)
    return mean, mean - half, mean + half


def p_value(values, margin):
    """Return the larger P value of the two one-sided tests, from t's distribution."""
    mean = sum(values) / len(values)
    distance = margin - abs(mean)
    return stats.t.sf(
        distance / stats.sem(values),
        len(values) - 1,
    )


def recomputed(results):
    """Return the P value and the interval of each output of every claim whose runs are finished."""
    actual = {}
    for claim, (run, seeds, first, second, margins) in TESTS.items():
        measured = cells(results / f"{run}.jsonl")
        if any((arm, seed) not in measured for arm in (first, second) for seed in seeds):
            continue
        ends = {}
        p_values = []
        for name, margin in margins.items():
            values = []
            for seed in seeds:
                values.append(last(measured[first, seed], name) - last(measured[second, seed], name))
            ends[name] = interval(values)
            p_values.append(p_value(values, margin))
        actual[claim] = max(p_values), ends
    return actual


if __name__ == "__main__":
    folder = (sys.argv[1:] or ["evidence/results"])[0]
    for claim, (p, ends) in recomputed(Path(folder)).items():
        intervals = {name: tuple(round(end, 5) for end in each) for name, each in ends.items()}
        print(claim, f"P {p:.3g}", intervals)
