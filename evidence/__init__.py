"""Experiments that show what packing changes and what it does not: `python -m evidence NAME`, from a checkout.

They import the product, never the reverse, and no wheel has them. `evidence/results` has the committed runs.
"""
