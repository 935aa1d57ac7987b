"""Compare TRL's SFTTrainer on packs with the same SFTTrainer on padded batches; train on completions only.

    pip install '.[trainers]'
    python examples/trl_sft.py [--model NAME]

The only additional line is `pack_into(trainer)`.
"""

from __future__ import annotations

import tempfile
from typing import Optional, Sequence

import tiny
from pack_data.cli.command import run_main


def main(argv: Optional[Sequence[str]] = None) -> None:
    options = tiny.options(argv, __doc__, "trl", "datasets")
    import datasets
    import trl

    from padding_free import pack_into

    texts = [[f"w{token}" for token in row["input_ids"]] for row in tiny.examples(options.examples)]
    rows = [
        {"prompt": " ".join(text[:-5] or ["w0"]), "completion": " " + " ".join(text[-5:])}
        for text in texts
    ]
    seconds = {}
    for name in ("unpacked", "packed"):
        with tempfile.TemporaryDirectory() as folder:
            trainer = trl.SFTTrainer(
                tiny.load(options.model),
                args=trl.SFTConfig(
                    output_dir=folder,
                    max_length=options.row,
                    num_train_epochs=1,
                    per_device_train_batch_size=16,  # pack_into keeps the examples of an update
                    gradient_checkpointing=False,
                    bf16=False,
                    report_to=[],
                    save_strategy="no",
                    disable_tqdm=True,
                ),
                train_dataset=datasets.Dataset.from_list(rows),
                processing_class=tiny.tokenizer() if not options.model else None,
            )
            if name == "packed":
                pack_into(trainer)
            seconds[name] = trainer.train().metrics["train_runtime"]
    tiny.report(sum(len(row["input_ids"]) for row in trainer.train_dataset), seconds)


if __name__ == "__main__":
    raise SystemExit(run_main(main))
