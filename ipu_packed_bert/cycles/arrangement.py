"""The graphs that the cycle model compares, by how the parts that packing touches are written (`variants`)."""

# What engine/ipu/ runs with `engine.mask: product`, its default, and with `additive`: the model's mask, made once.
PACKED, ADDITIVE = "product", "additive"
# The graph of the PopART and MLPerf code of the paper's time: every layer builds the mask from the sequence numbers.
POPART = "layer"
# Canonical BERT, the paper's baseline: a padding mask, [CLS] at slot 0, the same positions in every row.
UNPACKED = "unpacked"
