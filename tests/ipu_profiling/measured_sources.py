"""Files of measured cycles: the directory of a run, and a profile for the stand-in of PopVision's library."""

import json


def run_folder(folder, *, packs=8, cycles=8000, steps=5, changed=(), config=None):
    """Write a run whose first step compiles.

    changed: fields of lines of the log, by their index. config: the text of config.yml.
    """
    folder.mkdir(parents=True)
    lines = []
    for step in range(steps):
        slow = 100 if step == 0 else 1
        record = {"step": step, "packs": packs, "seconds": 1.0 * slow, "cycles": cycles and slow * cycles}
        record.update(dict(changed).get(step, {}))
        lines.append(json.dumps(record))
    (folder / "log.jsonl").write_text("\n".join(lines) + "\n")
    if config is not None:
        (folder / "config.yml").write_text(config)
    return folder


def write_profile(folder, *cycles_of_ipus):
    """Write profile.pop: one run of steps with these cycles of each IPU; return its path."""
    steps = []
    for cycles in cycles_of_ipus:
        steps.append({"type": "OnTileExecute", "name": "/MatMul", "cycles": cycles})
    run = {"name": "step", "steps": steps}
    stored = {"ipus": len(cycles), "tiles": [], "runs": [run]}
    folder.mkdir(exist_ok=True)
    (folder / "profile.pop").write_text(json.dumps(stored))
    return folder / "profile.pop"
