"""Compare Hugging Face's Trainer on packs with the same Trainer on padded batches.

    pip install '.[trainers]'
    python examples/hf_trainer.py [--model NAME]

The only additional line is `pack_into(trainer, ...)`.
"""

from __future__ import annotations

import tempfile
from typing import Optional, Sequence

import tiny
from pack_data.cli.command import run_main


def main(argv: Optional[Sequence[str]] = None) -> None:
    options = tiny.options(argv, __doc__, "transformers", "accelerate", "datasets")
    import datasets
    import transformers

    from padding_free import pack_into

    rows = tiny.examples(options.examples)
    tokens = sum(len(row["input_ids"]) for row in rows)
    seconds = {}
    for name in ("unpacked", "packed"):
        with tempfile.TemporaryDirectory() as folder:
            trainer = transformers.Trainer(
                tiny.load(options.model),
                args=transformers.TrainingArguments(
                    output_dir=folder,
                    num_train_epochs=1,
                    per_device_train_batch_size=16,  # pack_into keeps the examples of an update
                    report_to=[],
                    save_strategy="no",
                    disable_tqdm=True,
                ),
                train_dataset=datasets.Dataset.from_list(rows),
                data_collator=transformers.DataCollatorForSeq2Seq(tiny.tokenizer()),
            )
            if name == "packed":
                pack_into(trainer, max_sequence_length=options.row)
            seconds[name] = trainer.train().metrics["train_runtime"]
    tiny.report(tokens, seconds)


if __name__ == "__main__":
    raise SystemExit(run_main(main))
