"""Pack token sequences on a Ray cluster.

    python examples/build_with_ray.py --from /data/tokens --out /data/packed --tasks 64 [--address auto]

All machines need the files under the same paths. Without --address, two tasks at a time run on this machine. If a
machine fails, its tasks run on another one. If you start the script again, it runs the missing tasks.
"""

import argparse

import ray

from pack_data.building.command import BuildOptions, missing_tasks, run_task


@ray.remote(num_cpus=1, max_retries=3)
def run(options: BuildOptions, stage: str, task: int, tasks: int) -> str:
    return run_task(options, stage, task, tasks).words


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--from", dest="source", required=True)
    parser.add_argument("--out", required=True)
    parser.add_argument("--tasks", type=int, default=64)
    parser.add_argument("--max-sequence-length", type=int, default=512)
    parser.add_argument("--address", help="address of the head of the cluster, or auto")
    arguments = parser.parse_args()
    options = BuildOptions(
        out=arguments.out,
        source=arguments.source,
        max_sequence_length=arguments.max_sequence_length,
    )
    ray.init(
        address=arguments.address,
        **({} if arguments.address else {"num_cpus": 2, "include_dashboard": False}),
    )
    while True:
        stage, tasks = missing_tasks(options, arguments.tasks)
        if not stage:
            break
        print(f"{stage}: {len(tasks)} of {arguments.tasks} tasks", flush=True)
        ray.get([run.remote(options, stage, task, arguments.tasks) for task in tasks])
    print(f"{arguments.out}: complete")


if __name__ == "__main__":
    main()
