"""Fine-tune a BERT on packs."""

from functools import partial

from ipu_packed_bert.commands import run_options

parse = partial(run_options.parse, "finetune")
main = partial(run_options.train, "finetune")
