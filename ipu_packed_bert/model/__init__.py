"""The network: BERT in plain torch, what packing changes in it, and its loss.

Read `bert.py` (the encoder and the heads), then `packed.py` (positions, mask and gathered slots), then `loss.py`.
"""
