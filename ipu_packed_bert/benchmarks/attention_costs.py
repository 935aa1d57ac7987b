"""What attention costs on this CPU, fitted: the constants by which the host engine chooses it.

    OMP_NUM_THREADS=1 python -m ipu_packed_bert.benchmarks.attention_costs

Times a mask over whole rows and attention within each sequence, forward and backward, over sizes of rows, numbers of
sequences and widths, and fits `engine.host.attention.COSTS` to them: nanoseconds of a call, a value, a score and a
multiplication.  `LAYER_COSTS` are the nanoseconds of a multiplication in the rest of a layer, in the same column.  The
last column is the error that half of the fitted times stay below.
"""

from __future__ import annotations

import sys
from functools import partial
from typing import Any, Dict, List, NamedTuple, Optional, Sequence, Tuple

import numpy as np
import torch
from scipy.optimize import nnls

from ipu_packed_bert.engine.host.attention import LAYER_COSTS, AttentionWork, work_of
from ipu_packed_bert.engine.host.devices import clock_of
from ipu_packed_bert.model.bert import BertModel
from ipu_packed_bert.model.blocks import blocks_of
from ipu_packed_bert.model.packed import AttentionMask
from ipu_packed_bert.model.varlen import SDPA_BLOCKS, BlockContext, BlockRule, SequenceBlocks
from ipu_packed_bert.settings.schema import ModelConfig
from pack_data.cli.command import ArgumentParser, run_main
from pack_data.cli.timing import seconds_in_turn
from pack_data.display.table import markdown

_HEADS = ((4, 64), (12, 64), (12, 32))  # number and width
_ROWS = ((8, 64), (2, 128), (8, 128), (4, 256), (2, 384), (2, 512), (1, 1024))
_SEQUENCES = (1, 2, 4)  # in a row, of different lengths
_ROUNDS = 2
# Type, whether by plain products, dropout: what the engine may take.
KINDS = ((torch.float32, False, 0.0), (torch.float32, True, 0.1), (torch.bfloat16, True, 0.0))


class AttentionTime(NamedTuple):
    """Attention of one micro-batch, by one kernel."""

    work: AttentionWork
    seconds: float


def _numbers(rows: int, slots: int, sequences: int, draw: np.random.Generator) -> torch.Tensor:
    """Sequence numbers [rows, slots] of rows that are nearly full."""
    numbers = np.zeros((rows, slots), dtype=np.int32)
    for row in numbers:
        shares = draw.dirichlet(np.full(sequences, 4.0)) * (slots - sequences)
        lengths = shares.astype(int) + 1
        row[: lengths.sum()] = np.repeat(np.arange(1, sequences + 1), lengths)
    return torch.from_numpy(numbers)


def measure(kind: Tuple[torch.dtype, bool, float], draw: np.random.Generator) -> Dict[str, List[AttentionTime]]:
    """Times of a dense mask and of blocks, side by side on the same rows."""
    found: Dict[str, List[AttentionTime]] = {"mask": [], "blocks": []}
    for heads, width in _HEADS:
        for rows, slots in _ROWS:
            for sequences in _SEQUENCES:
                numbers = _numbers(rows, slots, sequences, draw)
                for side, case in _beside(numbers, kind, heads, width).items():
                    found[side].append(case)
    return found


def _beside(
    numbers: torch.Tensor, kind: Tuple[torch.dtype, bool, float], heads: int, width: int
) -> Dict[str, AttentionTime]:
    dtype, eager, dropout = kind
    context = BlockContext(BlockRule(lambda tokens, dropout: eager, lambda blocks, rows, slots: True))
    tokens = SequenceBlocks(SDPA_BLOCKS)(numbers, dtype)
    rows, slots = numbers.shape
    arranged = {"mask": AttentionMask("sdpa")(numbers, dtype), "blocks": tokens}
    shapes = {"mask": (rows, slots), "blocks": (1, sum(count * length for count, length in tokens.blocks.groups))}
    given = {
        side: [torch.randn(*shape, heads * width, dtype=dtype, requires_grad=True) for _ in range(3)]
        for side, shape in shapes.items()
    }

    def attend(side: str) -> None:
        split = [each.unflatten(2, (heads, width)).transpose(1, 2) for each in given[side]]
        context(*split, arranged[side], dropout).transpose(1, 2).flatten(2).sum().backward()

    clock = clock_of(torch.device("cpu"), of_process=True)
    times = seconds_in_turn({side: partial(attend, side) for side in arranged}, _ROUNDS, clock)
    blocks = {"mask": blocks_of([slots] * rows)._replace(groups=((rows, slots),)), "blocks": tokens.blocks}
    return {
        side: AttentionTime(work_of(each, heads, width), float(np.median(times[side]))) for side, each in blocks.items()
    }


def measure_layer(dtype: torch.dtype) -> List[AttentionTime]:
    """Times of a layer whose attention does nothing, by the multiplications of its products."""
    clock = clock_of(torch.device("cpu"), of_process=True)
    found = []
    for heads, width in _HEADS:
        hidden = heads * width
        model = ModelConfig(hidden_size=hidden, num_heads=heads, intermediate_size=4 * hidden, num_layers=1)
        encoder = BertModel(model, attention="sdpa", pooler=False).encoder
        layer: Any = encoder.layer[0]
        layer.attention.self.context = _Values()
        for rows, slots in _ROWS:
            given = torch.randn(rows, slots, hidden, requires_grad=True)

            times = seconds_in_turn({"layer": partial(_compute, encoder, given, dtype)}, _ROUNDS, clock)
            work = AttentionWork(0, 0, 0, rows * slots * 12 * hidden**2)
            found.append(AttentionTime(work, float(np.median(times["layer"]))))
    return found


def _compute(encoder: torch.nn.Module, given: torch.Tensor, dtype: torch.dtype) -> None:
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=dtype == torch.bfloat16):
        encoder(given, None).sum().backward()


class _Values(torch.nn.Module):
    def forward(self, query, key, value, mask, dropout):
        return value


def fit(cases: Sequence[AttentionTime]) -> Tuple[np.ndarray, float]:
    """Nanoseconds of an `AttentionWork`'s parts, none negative, of the least relative error; and its median."""
    seconds = np.array([case.seconds for case in cases]) * 1e9
    parts = np.array([case.work for case in cases], dtype=np.float64) / seconds[:, None]
    found, _ = nnls(parts, np.ones(len(cases)))
    return found, float(np.median(np.abs(parts @ found - 1)))


def main(arguments: Optional[Sequence[str]] = None) -> int:
    name = "python -m ipu_packed_bert.benchmarks.attention_costs"
    ArgumentParser(prog=name, description=__doc__).parse_args(arguments)
    torch.set_num_threads(1)
    found = {
        (str(kind[0])[6:], "eager" if kind[1] else "sdpa", side): fit(cases)
        for kind in KINDS
        for side, cases in measure(kind, np.random.default_rng(0)).items()
    }
    found.update({(str(dtype)[6:], "", "rest of a layer"): fit(measure_layer(dtype)) for dtype in LAYER_COSTS})
    lines = [[*name, *(f"{each:.4g}" for each in costs), f"{error:.0%}"] for name, (costs, error) in found.items()]
    print(markdown(["type", "kernel", "computed", "call", "value", "score", "product", "error"], lines))
    return 0


if __name__ == "__main__":
    sys.exit(run_main(main))
