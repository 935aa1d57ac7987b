"""What packing adds to BERT, written as matrix products: for devices on which a product is cheaper than a select or a
gather.

Each class replaces a piece of `packed.PackedBertForPreTraining` from outside and computes the same; none has
parameters. Letters as in `bert.py`: B rows, S slots, N heads, A width of a head, H hidden size, K gathered slots; C
columns of a code.

The mask needs no [S, S] tensor. The sequence numbers are written in binary, and each slot gets two codes: "own" has a
column for each digit and one for its complement, "other" the same with complement and digit exchanged and negative.
The product of two slots' codes then counts the digits in which their numbers differ. With numbers of two digits:

    number   digits   own               other                 own . other     0        1        2        3
       0     0 0       0  32   0  32    -32   0  -32   0               0      0    -1024    -1024    -2048
       1     0 1       0  32  32   0    -32   0    0 -32               1  -1024        0    -2048    -1024
       2     1 0      32   0   0  32      0 -32  -32   0               2  -1024    -2048        0    -1024
       3     1 1      32   0  32   0      0 -32    0 -32               3  -2048    -1024    -1024        0

Appended to query and key, the codes make the score product itself add the mask. It is exact in every type: between
slots of one sequence each added term is 0 for itself, so that no rounding of a partial sum, in whatever order and
precision it is made, can differ from the sum without codes; between two sequences at least one term is -1024, which
like the additive mask's -1000 leaves soft-max nothing but 0. Both factors are powers of two and small, so that they are
exact, and so that the gradients of the codes' columns, which nobody needs but the product makes, stay as small as those
of query and key.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from ipu_packed_bert.model.packed import PackedBert

_WEIGHT = 32.0  # of a digit; 32 x 32 = 1024 hides a slot


class _SequenceCodes(nn.Module):
    """As `packed.AttentionMask`: sequence numbers [B, S], 0 in padding -> codes [B, 2, S, C], own and other.

    sequences: the largest number that occurs. columns: C, at least two for each binary digit of it; the rest is zero.
    Raises ValueError where the columns are too few.
    """

    def __init__(self, sequences: int, columns: int):
        super().__init__()
        digits = sequences.bit_length()
        if columns < 2 * digits:
            raise ValueError(
                f"{columns} columns for the codes of {sequences} sequences; at least {2 * digits} are needed"
            )
        rows = []
        for number in range(sequences + 1):
            ones = [float(number >> digit & 1) for digit in reversed(range(digits))]
            own = [code for one in ones for code in (_WEIGHT * one, _WEIGHT * (1.0 - one))]
            other = [code for one in ones for code in (-_WEIGHT * (1.0 - one), -_WEIGHT * one)]
            rows.append([code for half in (own, other) for code in half + [0.0] * (columns - 2 * digits)])
        # Buffers, because a tensor made in the forward pass would be a constant captured from the host.
        self.numbers: torch.Tensor
        self.codes: torch.Tensor
        self.register_buffer("numbers", torch.arange(sequences + 1, dtype=torch.int32), persistent=False)
        self.register_buffer("codes", torch.tensor(rows), persistent=False)

    def forward(self, input_mask_BS, dtype: torch.dtype) -> torch.Tensor:
        one_hot_BSM = (input_mask_BS.unsqueeze(2) == self.numbers).to(dtype)
        rows, slots = input_mask_BS.shape
        # Each row of the product has one term: it looks the codes up.
        return torch.matmul(one_hot_BSM, self.codes.to(dtype)).view(rows, slots, 2, -1).transpose(1, 2)


class _ProductMaskedScores(nn.Module):
    """As `bert.MaskedScores`, with what `_SequenceCodes` makes in place of the additive mask."""

    def forward(self, query_BNSA, key_BNSA, codes_B2SC) -> torch.Tensor:
        rows, heads, slots, _ = query_BNSA.shape
        own, other = (
            codes_B2SC.select(1, which).unsqueeze(1).expand(rows, heads, slots, codes_B2SC.shape[3]) for which in (0, 1)
        )
        return torch.matmul(torch.cat((query_BNSA, own), dim=3), torch.cat((key_BNSA, other), dim=3).transpose(2, 3))


class OneHotSlots(nn.Module):
    """As `packed.GatherSlots`; exact, since every sum has one term. Above all its gradient is cheaper than a
    scatter."""

    def __init__(self, max_sequence_length: int):
        super().__init__()
        self.register_buffer("slots", torch.arange(max_sequence_length, dtype=torch.int32), persistent=False)

    def forward(self, hidden_BSH, slots_BK) -> torch.Tensor:
        chosen_BKS = (slots_BK.unsqueeze(2) == self.slots).to(hidden_BSH.dtype)
        return torch.matmul(chosen_BKS, hidden_BSH)


def mask_in_product(network: PackedBert, *, sequences: int, columns: int) -> None:
    """Replace the additive mask of a network with eager attention, in place."""
    network.attention_mask = _SequenceCodes(sequences, columns)
    layers: Any = network.bert.encoder.layer
    for layer in layers:
        layer.attention.self.scores = _ProductMaskedScores()
