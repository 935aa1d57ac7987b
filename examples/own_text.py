"""Train a BERT on texts and fill in a word: build, train, resume, export, predict.

    python examples/own_text.py [--text FILE|FOLDER] [--steps N] [--sentence "... [MASK] ..."]

Without --text it trains on the English documentation that comes with Python. The last step needs `pip install
transformers`. The steps are the same as those of the commands `packed-bert build`, `pretrain` and `export`.
"""

from __future__ import annotations

from pathlib import Path
from typing import Optional, Sequence

from ipu_packed_bert import config_file, export_run
from ipu_packed_bert.__main__ import main as packed_bert
from pack_data import BuildOptions, build
from pack_data.cli.command import ArgumentParser, positive_int, run_main


def main(argv: Optional[Sequence[str]] = None) -> None:
    parser = ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--text",
        default="embedded",
        help="a directory of texts, one document per file, or a JSONL file; default: Python's",
    )
    parser.add_argument("--slots", type=positive_int, default=128, help="tokens of a packed row")
    parser.add_argument(
        "--words",
        type=positive_int,
        default=4096,
        help="size of the vocabulary, trained on the texts",
    )
    parser.add_argument("--steps", type=positive_int, default=300, help="weight updates")
    parser.add_argument("--sentence", default="The function returns a [MASK] of strings.")
    parser.add_argument(
        "--out", type=Path, default=Path("own_text"), help="directory of all outputs"
    )
    options = parser.parse_args(argv)
    if options.steps < 2:
        parser.error("--steps 1: must be at least 2, half before the stop and half after it")
    if options.sentence.count("[MASK]") != 1:
        parser.error(f"--sentence {options.sentence!r}: must contain [MASK] exactly once")
    data, run, exported = (str(options.out / name) for name in ("data", "run", "hugging_face"))

    # Pack pieces of the texts into rows of --slots tokens, up to three per row.
    sizes = {
        "vocabulary_size": options.words,
        "max_sequence_length": options.slots,
        "duplication_factor": 1,
    }
    build(BuildOptions(data, corpus=options.text, **sizes)).close()

    changed = ["batch.micro_batch=16", "batch.gradient_accumulation=1", "run.evaluate_every=0"]
    changed += [f"optimizer.schedule_steps={options.steps}"]
    settings = [word for change in changed for word in ("--set", change)]
    config = str(config_file("packed_host"))
    # Train half of the updates, stop, and resume: the losses equal those of one run without the stop.
    first_half = ["--config", config, "--data", data, "--out", run]
    first_half += ["--steps", str(options.steps // 2)]
    packed_bert(["pretrain", *first_half, *settings])
    packed_bert(["pretrain", "--resume", run, "--steps", str(options.steps)])

    export_run(Path(run), Path(exported))
    from transformers import pipeline

    for answer in pipeline("fill-mask", model=exported)(options.sentence):
        print(f"{answer['score']:6.1%}  {answer['sequence']}")


if __name__ == "__main__":
    raise SystemExit(run_main(main))
