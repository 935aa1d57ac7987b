"""How the parts of the graph that packing touches are written: the graphs that the cycle model compares."""

from __future__ import annotations

from dataclasses import dataclass, replace


@dataclass(frozen=True)
class Arrangement:
    """How the parts of the graph that packing changes are written. The default is the model's own way."""

    mask: str = "once"  # "once"; "layer": built again in every layer; "product": part of the query/key product;
    #                               "row": an unpacked sequence's padding mask; "none": no mask, to see its cost
    mask_form: str = "select"  # "select": where(); "arithmetic": cast and multiply
    apply: str = "add"  # "add": additive; "select": where() on the scores
    cls: str = "gather"  # "gather"; "one_hot": product with a one-hot matrix; "fixed": the first slots of the pack
    mlm: str = "gather"  # "gather"; "one_hot"
    positions: str = "gather"  # "gather"; "one_hot"; "fixed": the same for every row, as in unpacked BERT

    def with_(self, **changes: str) -> Arrangement:
        return replace(self, **changes)


# What engine/ipu/ runs with `engine.mask: product`, its default, and with `additive`: the model's mask, made once.
PACKED = Arrangement(mask="product", cls="one_hot", mlm="one_hot")
ADDITIVE = PACKED.with_(mask="once")
# Canonical BERT, the paper's baseline: a padding mask, [CLS] at slot 0, the same positions in every row.
UNPACKED = Arrangement(mask="row", cls="fixed", mlm="one_hot", positions="fixed")
