"""Pack token sequences in three steps of datatrove on this machine.

    python examples/build_with_datatrove.py --from /data/tokens --out /data/packed --logs /data/logs --tasks 64

On a cluster replace LocalPipelineExecutor by SlurmPipelineExecutor, with the previous step as `depends=`. If you start
the script again, it continues; the state is in the build, not in the logs. The local pool waits for ever for a process
that was killed: stop the script and start it again.
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
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--from", dest="source", required=True)
    parser.add_argument("--out", required=True)
    parser.add_argument("--logs", required=True)
    parser.add_argument("--tasks", type=int, default=64)
    parser.add_argument("--max-sequence-length", type=int, default=512)
    arguments = parser.parse_args()
    options = BuildOptions(
        out=arguments.out,
        source=arguments.source,
        max_sequence_length=arguments.max_sequence_length,
    )
    step = None
    for stage, tasks in (("count", arguments.tasks), ("recipe", 1), ("deal", arguments.tasks)):
        step = LocalPipelineExecutor(
            pipeline=[BuildStage(options, stage)],
            tasks=tasks,
            workers=2,
            skip_completed=False,  # a task that is already done ends at once
            logging_dir=f"{arguments.logs}/{stage}",
            depends=step,
        )
    step.run()


if __name__ == "__main__":
    main()
