"""The share of each part of an update on a CPU, measured by torch's profiler."""

from __future__ import annotations

import re
from functools import partial
from typing import Any, Dict, Mapping, Tuple

import torch
from torch import nn

from ipu_packed_bert.benchmarks.packed import accumulated, host_engine, useful_flop
from ipu_packed_bert.benchmarks.work import BenchmarkWork
from ipu_packed_bert.engine.host.devices import clock_of, find_device, product_rate
from ipu_packed_bert.engine.timing import seconds_in_turn
from ipu_packed_bert.settings.config import Config
from pack_data.display.facts import Fact, Facts

_PRODUCTS = "layer products"
_VOCABULARY = "vocabulary product"
# A part, and the operators that belong to it: a pattern of the operator's name and of those that called it. The first
# match counts.
_PARTS = (
    ("optimiser, norm of gradients", r"Optimizer\.step|_foreach_norm"),
    ("dropout", r"dropout|MulBackward"),
    ("loss", r"cross_entropy|log_?softmax|LogSoftmax|nll_loss|amax|argmax"),
    ("attention", r"scaled_dot_product|ScaledDotProduct|bmm|softmax|Softmax"),
    (_PRODUCTS, r"^aten::(addmm|mm|linear|mkldnn)"),
    (_VOCABULARY, r"^$"),
    ("copies, casts", r"^aten::(copy_|_to_copy|cat|clone|index_copy)"),
    ("embedding, gather", r"[eE]mbedding|index_|gather|Gather"),
    ("GELU, LayerNorm", r"gelu|Gelu|layer_norm|LayerNorm"),
    ("gradients added", r"AccumulateGrad|^aten::(add_|sum).*Backward"),
)
_REST = "Python, dispatch, other operators"
_USEFUL = "useful products in forward and backward pass"


def where_time_goes(config: Config, work: BenchmarkWork) -> Dict[str, float]:
    """Measure the shares of an update's parts.

    Args:
        config: model, engine and micro-batch.
        work: the packs of an update.

    Returns:
        The share of each part, and that of useful products in the forward and backward pass: the time that products of
        real tokens would take at the best rate of four square matrix products.
    """
    engine = host_engine(config, work)
    device = find_device(config.engine)
    clock = clock_of(device, of_process=torch.get_num_threads() == 1)
    sides = {"passes": partial(accumulated, engine, work)}
    passes = float(seconds_in_turn(sides, 2, clock)["passes"].min())
    layer: Any
    for layer in engine.model.modules():
        if isinstance(layer, nn.Dropout):
            # NumPy's part of it is no operator of torch.
            in_range = torch.profiler.record_function("dropout")(layer.forward)
            layer.forward = in_range  # type: ignore[method-assign]
    with torch.profiler.profile(record_shapes=True) as profiler:
        seconds = engine.step(work.packed, 1e-4).seconds

    shares = dict.fromkeys([*(part for part, _ in _PARTS), _REST], 0.0)
    for event in profiler.events():
        shares[_part(event, work.vocabulary)] += 1e-6 * event.self_cpu_time_total / seconds
    shares[_REST] = 1.0 - sum(shares[part] for part, _ in _PARTS)

    rates = [product_rate(device, config.engine, size=size) for size in (256, 512, 1024, 2048)]
    useful = useful_flop(work, config.model) / 2 / max(rates)
    shares[_USEFUL] = useful / passes
    return shares


def _part(event: Any, vocabulary: int) -> str:
    """Return the part to which an operator of the profile belongs."""
    names = []
    caller = event
    while caller is not None:
        names.append(caller.name)
        caller = caller.cpu_parent
    chain = " ".join(names)
    for part, pattern in _PARTS:
        if re.search(pattern, chain):
            of_vocabulary = any(vocabulary in shape for shape in event.input_shapes)
            return _VOCABULARY if part == _PRODUCTS and of_vocabulary else part
    return _REST


def profile_facts(
    cases: Mapping[str, Mapping[str, float]], title: str, notes: Tuple[str, ...]
) -> Facts:
    """Return a table of results of `where_time_goes`, a column for each named case."""
    rows = []
    for part in (*(part for part, _ in _PARTS), _REST, _USEFUL):
        row = {"part": Fact("part", part)}
        for name, shares in cases.items():
            row[name] = Fact(name, shares[part], "%")
        rows.append(row)
    return Facts(title, rows, notes, "profile")
