"""The profile that Poplar writes of a program that runs with autoReport.all: here a JSON file of the same name.

Memory is that of the weights, spread over 8 tiles an IPU, and a little code; cycles are the numbers of elements that
each operator makes. So they say nothing of an IPU, and something of which numbers belong to which IPU.
"""

import json
import os
from pathlib import Path

TILES = 8  # an IPU
TILE_BYTES = 638_976
CODE_BYTES = 1_000  # a tile
RUN_COUNT = "autoReport.executionProfileProgramRunCount"


def engine_option(options, name):
    """Return an engine option of the program, or of the environment."""
    return {
        **json.loads(os.environ.get("POPLAR_ENGINE_OPTIONS") or "{}"),
        **options.get("engineOptions", {}),
    }.get(name)


class Profile:
    """Profile of one program; rewritten after each run."""

    def __init__(self, options, *, name, homes, weights, operators, stages, ipus):
        self.folder = engine_option(options, "autoReport.directory")
        self.most = int(engine_option(options, RUN_COUNT) or 2)
        self.name = name
        self.ipus = ipus
        self.runs = []
        self.stages = stages
        self.operators = [
            (
                item.name,
                item.ipu,
                sum(out.numel() for out in item.outputs),
            )
            for item in operators
        ]
        bytes_of = [0] * ipus
        for weight, tensor in weights.items():
            bytes_of[homes.get(weight, 0)] += tensor.numel() * tensor.element_size()
        self.tiles = [-(-item // TILES) for item in bytes_of for _ in range(TILES)]

    def fullest_tile(self):
        return max(self.tiles) + CODE_BYTES

    def write(self):
        if self.folder is None:
            return
        file = Path(self.folder, self.name, "profile.pop")
        file.parent.mkdir(parents=True, exist_ok=True)
        tiles = [{"bytes": item + CODE_BYTES, "always_live": item} for item in self.tiles]
        file.write_text(json.dumps({"ipus": self.ipus, "tiles": tiles, "runs": self.runs}))

    def ran(self, micro_batches):
        """A run of so many micro-batches, and before the first one the run that brings the weights."""
        if self.folder is None:
            return
        if not self.runs:
            self.runs.append(
                {
                    "name": "weights",
                    "steps": [self._step("StreamCopyMid", "weights", [10] * self.ipus)],
                }
            )
        if len(self.runs) < self.most:
            steps = [self._step("StreamCopyMid", "/inputs", [7] * self.ipus)]
            for name, ipu, elements in self.operators:
                here = [micro_batches * elements if item == ipu else 0 for item in range(self.ipus)]
                kind = "/MatMul" if name in ("matmul", "mm", "bmm", "addmm", "linear", "baddbmm") else "/" + name
                steps.append(self._step("OnTileExecute", f"/model{kind}", here))
                steps.append(
                    self._step(
                        "DoExchange",
                        f"/model{kind}/exchange",
                        [item // 4 for item in here],
                    )
                )
            steps += [
                self._step(
                    "GlobalExchange",
                    "/copies",
                    [len(self.stages)] * self.ipus,
                )
            ]
            steps += [self._step("Sync", "/sync", [5] * self.ipus)]
            self.runs.append({"name": "step", "steps": steps})
        self.write()

    def _step(self, kind, name, cycles):
        return {"type": kind, "name": name, "cycles": cycles}
