"""`python -m ipu_packed_bert`: the list of this package's commands."""
from __future__ import annotations

from pack_data.command import list_commands, run_main

COMMANDS = {
    "finetune": "fine-tunes a trained BERT on packs: questions, texts",
    "adjust": "turns the configuration of an unpacked run into packed ones",
    "benchmark": "sequences per second on this machine, packed over unpacked",
    "export": "a run to a Hugging Face folder, and such a folder to a run",
    "experiments": "the experiments behind README's evidence",
    "report": "cycles, overhead and speed-up on an IPU, without one (in a checkout also profiling/overhead_report.py)",
}
ELSEWHERE = (
    "Pre-training, and the plan of a configuration: python run_pretraining.py --help",
    "Packing: python -m pack_data",
)


if __name__ == "__main__":
    raise SystemExit(run_main(lambda argv: list_commands("ipu_packed_bert", COMMANDS, argv, ELSEWHERE)))
