"""A training loop of one's own on packs, beside padded batches.

    python examples/plain_loop.py [--model NAME]

Started by torchrun, with the model in DistributedDataParallel or sharded by fully_shard, the same lines train on many
ranks: give the sampler the number of ranks and this process's rank.
"""

from __future__ import annotations

import time
from typing import Optional, Sequence

import tiny
from pack_data.cli.command import run_main


def main(argv: Optional[Sequence[str]] = None) -> None:
    options = tiny.options(argv, __doc__, "torch", "transformers")
    import torch
    from torch.utils.data import DataLoader

    from ipu_packed_bert.padding_free import (
        PaddingCollator,
        PaddingFreeCollator,
        take_step,
        use_padding_free,
    )
    from pack_data.batching.plans import BatchOptions
    from pack_data.batching.sampler import IndexBatchSampler

    dataset = tiny.examples(options.examples)
    lengths = [len(example["input_ids"]) for example in dataset]
    seconds = {}
    # A packed row of 1,024 tokens holds as much as 16 of these examples.
    for name, way, batch_size in [
        ("unpacked", "RandomSampling+Padding", 16),
        ("packed", "OptimalPacking+PosID", 1),
    ]:
        model = tiny.load(options.model)
        if name == "packed":
            use_padding_free(model, longest=options.row)
        collator = PaddingFreeCollator(model) if name == "packed" else PaddingCollator()
        sampler = IndexBatchSampler(
            way, lengths, BatchOptions(batch_size, options.row, ranks=1), rank=0
        )
        loader = DataLoader(sampler.view(dataset), batch_sampler=sampler, collate_fn=collator)
        optimizer = torch.optim.AdamW(model.parameters())
        started = time.perf_counter()
        for inputs in loader:
            # One update from any number of micro-batches: its loss is the mean over the predicted tokens of them all.
            result = take_step(model, optimizer, [inputs], learning_rate=1e-3)
        seconds[name] = time.perf_counter() - started
        print(f"{name:9} last loss {result.loss:.3f}")
    tiny.report(sum(lengths), seconds)


if __name__ == "__main__":
    raise SystemExit(run_main(main))
