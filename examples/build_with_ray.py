"""Packs token sequences on a Ray cluster, whose machines see the files under the same paths.

    python examples/build_with_ray.py --from /data/tokens --out /data/packed --tasks 64 [--address auto]

Two tasks at a time on this machine without --address. A task whose machine dies runs again elsewhere; started again,
the script goes on with what is missing.
"""

import argparse

import ray

from pack_data.building.command import BuildOptions, missing_tasks, run_task


@ray.remote(num_cpus=1, max_retries=3)
def run(options: BuildOptions, stage: str, task: int, tasks: int) -> str:
    return run_task(options, stage, task, tasks).words


def main() -> None:
    parser = argparse.ArgumentParser(description="Packs token sequences on a Ray cluster.")
    parser.add_argument("--from", dest="source", required=True)
    parser.add_argument("--out", required=True)
    parser.add_argument("--tasks", type=int, default=64)
    parser.add_argument("--max-sequence-length", type=int, default=512)
    parser.add_argument("--address", help="of the cluster's head, or auto")
    given = parser.parse_args()
    options = BuildOptions(
        out=given.out, source=given.source, max_sequence_length=given.max_sequence_length
    )
    ray.init(
        address=given.address,
        **({} if given.address else {"num_cpus": 2, "include_dashboard": False}),
    )
    while True:
        stage, tasks = missing_tasks(options, given.tasks)
        if not stage:
            break
        print(f"{stage}: {len(tasks)} of {given.tasks} tasks", flush=True)
        ray.get([run.remote(options, stage, task, given.tasks) for task in tasks])
    print(f"{given.out}: complete")


if __name__ == "__main__":
    main()
