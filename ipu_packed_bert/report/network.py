"""What adding up the gradients of an update costs on a network: python -m ipu_packed_bert.report.network

Computed, nothing is measured: bytes of a ring all-reduce of float32 gradients over the network's rate, beside the time
of the update's micro-batches, which is that of their products at a given rate of the device.
"""

from __future__ import annotations

import sys
from typing import List, Optional, Sequence

from ipu_packed_bert.planning.plan import plan
from ipu_packed_bert.settings.pretraining import load_config
from ipu_packed_bert.settings.schema import ModelConfig
from ipu_packed_bert.settings.shipped import config_file
from pack_data.cli.command import ArgumentParser, positive_int, run_main

_RANKS = (2, 8, 32)
_GIGABITS = (10.0, 100.0)  # a second
_ACCUMULATIONS = (1, 8, 64)  # micro-batches of a rank in an update
# Half of the 312 TFLOP/s that NVIDIA's data sheet gives for an A100 in bfloat16.
_TERAFLOPS = 156.0


def ring_bytes(parameters: int, ranks: int) -> float:
    """What each rank sends, and receives, in a ring all-reduce of float32 values."""
    return 4.0 * parameters * 2.0 * (ranks - 1) / ranks


def operations(model: ModelConfig, slots: int, packs: int) -> float:
    """Floating-point operations of the encoder's products, forward and backward, for so many packs; heads left out."""
    hidden, tokens = model.hidden_size, packs * slots
    products = 4 * hidden**2 + 2 * hidden * model.intermediate_size  # multiply-adds a token: weights
    attention = 2 * slots * hidden  # and scores, and the sum that they weigh
    return 6.0 * model.num_layers * tokens * (products + attention)


def seconds_on_network(parameters: int, ranks: int, gigabits: float) -> float:
    return ring_bytes(parameters, ranks) / (gigabits * 1e9 / 8)


def share(reduction: float, micro_batch: float, accumulation: int) -> float:
    """Of the update's time, where nothing of the reduction is hidden behind the last backward pass."""
    return reduction / (reduction + accumulation * micro_batch)


def _lines(parameters: int, micro_batch: float) -> List[str]:
    """A Markdown table; micro_batch: seconds of one."""
    heads = ["network", "ranks", "bytes a rank", "seconds"] + [f"accumulation {each}" for each in _ACCUMULATIONS]
    rows = [heads, ["---"] * len(heads)]
    for gigabits in _GIGABITS:
        for ranks in _RANKS:
            seconds = seconds_on_network(parameters, ranks, gigabits)
            shares = [f"{share(seconds, micro_batch, each):.1%}" for each in _ACCUMULATIONS]
            rows.append(
                [f"{gigabits:g} Gb/s", str(ranks), f"{ring_bytes(parameters, ranks) / 1e9:.2f} GB", f"{seconds:.2f}"]
                + shares
            )
    return [f"| {' | '.join(row)} |" for row in rows]


def main(argv: Optional[Sequence[str]] = None) -> int:
    parser = ArgumentParser(prog="python -m ipu_packed_bert.report.network", description=__doc__)
    parser.add_argument("--config", default="packed_phase2_gpu8", metavar="FILE|NAME")
    parser.add_argument("--micro-batch", type=positive_int, metavar="PACKS", help="default: the configuration's")
    parser.add_argument("--tflops", type=float, default=_TERAFLOPS, help="rate of a device; default %(default)s")
    parser.add_argument("--seconds", type=float, help="of a micro-batch, where they are measured; in place of --tflops")
    args = parser.parse_args(argv)
    if min(args.tflops, args.seconds or 1.0) <= 0:
        parser.error("--tflops and --seconds are above 0")
    config = load_config(config_file(args.config))
    # The packing factor decides nothing here.
    parameters = sum(memory.parameters for memory in plan(config, packing_factor=1.0).memory)
    packs, slots = args.micro_batch or config.batch.micro_batch, config.data.max_sequence_length
    seconds = args.seconds or operations(config.model, slots, packs) / (args.tflops * 1e12)
    source = "as given" if args.seconds else f"computed, at {args.tflops:g} TFLOP/s"
    what = f"a micro-batch of {packs} packs of {slots} takes {seconds:.3f} s ({source})"
    print(f"{parameters / 1e6:.1f} M parameters; {what}\n")
    print("\n".join(_lines(parameters, seconds)))
    return 0


if __name__ == "__main__":
    sys.exit(run_main(main))
