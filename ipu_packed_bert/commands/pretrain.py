"""Pre-train a packed BERT."""

from functools import partial

from ipu_packed_bert.commands import run_options

parse = partial(run_options.parse, "pretrain")
main = partial(run_options.train, "pretrain")
