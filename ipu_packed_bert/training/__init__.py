"""One run for every task: `run` has what all share, `pretraining` and `examples` what a run of theirs adds."""
