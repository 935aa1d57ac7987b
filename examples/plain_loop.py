"""Compare a plain training loop on packs with the same loop on padded batches.

    python examples/plain_loop.py [--model NAME]

For several ranks, start it with torchrun, wrap the model in DistributedDataParallel or shard it with fully_shard, and
pass the sampler the number of ranks and the rank of this process.
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

    from pack_data.batching.plans import BatchOptions
    from pack_data.batching.sampler import IndexBatchSampler
    from padding_free import (
        PaddingCollator,
        PaddingFreeCollator,
        take_step,
        use_padding_free,
    )

    dataset = tiny.examples(options.examples)
    lengths = [len(example["input_ids"]) for example in dataset]
    seconds = {}
    # A packed row of 1,024 tokens holds about 16 of these examples.
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
            # One update from any number of micro-batches; the loss is the mean over their predicted tokens.
            result = take_step(model, optimizer, [inputs], learning_rate=1e-3)
        seconds[name] = time.perf_counter() - started
        print(f"{name:9} last loss {result.loss:.3f}")
    tiny.report(sum(lengths), seconds)


if __name__ == "__main__":
    raise SystemExit(run_main(main))
