"""Packs token sequences as three steps of datatrove, here on this machine.

    python examples/build_with_datatrove.py --from /data/tokens --out /data/packed --logs /data/logs --tasks 64

On a cluster take SlurmPipelineExecutor, with `depends=` the step before, in place of LocalPipelineExecutor. Started
again, it goes on: the build knows what is done, not the logs. The local pool waits for ever for a process that was
killed; end it and start it again.
"""

import argparse
from typing import Any

from datatrove.executor import LocalPipelineExecutor
from datatrove.pipeline.base import PipelineStep

from pack_data.building.command import BuildOptions, run_task


class BuildStage(PipelineStep):
    """A stage of a build; datatrove's rank and world_size are its task."""

    name, type = "packed data set", "PACK"

    def __init__(self, options: BuildOptions, stage: str) -> None:
        super().__init__()
        self.options, self.stage = options, stage

    def run(self, data: Any, rank: int = 0, world_size: int = 1) -> Any:
        print(run_task(self.options, self.stage, rank, world_size).words, flush=True)
        return data


def main() -> None:
    parser = argparse.ArgumentParser(description="Packs token sequences as steps of datatrove.")
    parser.add_argument("--from", dest="source", required=True)
    parser.add_argument("--out", required=True)
    parser.add_argument("--logs", required=True)
    parser.add_argument("--tasks", type=int, default=64)
    parser.add_argument("--max-sequence-length", type=int, default=512)
    given = parser.parse_args()
    options = BuildOptions(
        out=given.out, source=given.source, max_sequence_length=given.max_sequence_length
    )
    step = None
    for stage, tasks in (("count", given.tasks), ("recipe", 1), ("deal", given.tasks)):
        step = LocalPipelineExecutor(
            pipeline=[BuildStage(options, stage)],
            tasks=tasks,
            workers=2,
            skip_completed=False,  # a task whose work is done ends at once
            logging_dir=f"{given.logs}/{stage}",
            depends=step,
        )
    step.run()


if __name__ == "__main__":
    main()
