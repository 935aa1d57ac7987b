"""The mask and the gathered slots as matrix products, for devices on which a product is cheaper than a gather.

Each class replaces a part of `packed.PackedBertForPreTraining` from outside and computes the same, without parameters.
Letters as in `bert.py`: B rows, S slots, N heads, A width of a head, H hidden size, K gathered slots; C columns of a
code.

The mask needs no [S, S] tensor. The sequence numbers are written in binary, and each slot gets two codes: "own" has a
column for each digit and a column for its complement, "other" has them exchanged and negative. The product of the codes
of two slots then counts the digits in which their numbers differ. With numbers of two digits:

    number   digits   own               other                 own . other     0        1        2        3
       0     0 0       0  32   0  32    -32   0  -32   0               0      0    -1024    -1024    -2048
       1     0 1       0  32  32   0    -32   0    0 -32               1  -1024        0    -2048    -1024
       2     1 0      32   0   0  32      0 -32  -32   0               2  -1024    -2048        0    -1024
       3     1 1      32   0  32   0      0 -32    0 -32               3  -2048    -1024    -1024        0

The codes are appended to query and key, so that the score product adds the mask. This is exact in every type. Between
slots of one sequence every added term is 0, so the rounding of partial sums, in any order and precision, is that of the
sum without codes. Between two sequences at least one term is -1024, for which softmax is exactly 0, as for the additive
mask's -1000. Both factors are small powers of two: they are exact, and the gradients of the columns of codes, which are
computed but not used, stay as small as those of query and key.
"""

from __future__ import annotations

from typing import Any, List

import torch
from torch import nn

from ipu_packed_bert.model.packed import PackedBert

_WEIGHT = 32.0  # value of a digit in a code: 32 x 32 = 1024 hides a slot


class _SequenceCodes(nn.Module):
    """Codes of sequence numbers, in place of `packed.AttentionMask`.

    Args:
        sequences: largest sequence number of a row.
        columns: width C of a code, at least two columns for each binary digit of ``sequences``; other columns are zero.

    Raises:
        ValueError: there are too few columns.
    """

    def __init__(self, sequences: int, columns: int):
        super().__init__()
        digits = sequences.bit_length()
        if columns < 2 * digits:
            raise ValueError(
                f"columns is {columns}; must be at least {2 * digits} for the codes of {sequences} sequences"
            )
        unused = [0.0] * (columns - 2 * digits)
        rows = []
        for number in range(sequences + 1):
            own_code: List[float] = []
            other_code: List[float] = []
            for digit in reversed(range(digits)):
                bit = float(number >> digit & 1)
                own_code += [_WEIGHT * bit, _WEIGHT * (1.0 - bit)]
                other_code += [-_WEIGHT * (1.0 - bit), -_WEIGHT * bit]
            rows.append([*own_code, *unused, *other_code, *unused])
        # Buffers, because a tensor created in the forward pass would be a constant captured from the host.
        self.numbers: torch.Tensor
        self.codes: torch.Tensor
        self.register_buffer(
            "numbers", torch.arange(sequences + 1, dtype=torch.int32), persistent=False
        )
        self.register_buffer("codes", torch.tensor(rows), persistent=False)

    def forward(self, input_mask_BS, dtype: torch.dtype) -> torch.Tensor:
        """Map sequence numbers [B, S], 0 in padding, to codes [B, 2, S, C], own and other."""
        rows, slots = input_mask_BS.shape
        one_hot_BSM = (input_mask_BS.unsqueeze(2) == self.numbers).to(dtype)
        # Each sum of the product has one term, which looks up a code.
        codes_BSC = torch.matmul(one_hot_BSM, self.codes.to(dtype))
        return codes_BSC.view(rows, slots, 2, -1).transpose(1, 2)


class _ProductMaskedScores(nn.Module):
    """`bert.MaskedScores` with the codes of `_SequenceCodes` in place of the additive mask."""

    def forward(self, query_BNSA, key_BNSA, codes_B2SC) -> torch.Tensor:
        rows, heads, slots, _ = query_BNSA.shape
        columns = codes_B2SC.shape[3]
        own_B1SC = codes_B2SC.select(1, 0).unsqueeze(1)
        other_B1SC = codes_B2SC.select(1, 1).unsqueeze(1)
        query = torch.cat((query_BNSA, own_B1SC.expand(rows, heads, slots, columns)), dim=3)
        key = torch.cat((key_BNSA, other_B1SC.expand(rows, heads, slots, columns)), dim=3)
        return torch.matmul(query, key.transpose(2, 3))


class OneHotSlots(nn.Module):
    """`packed.GatherSlots` as a product, exact since every sum has one term; its gradient is cheaper than a scatter."""

    def __init__(self, max_sequence_length: int):
        super().__init__()
        self.register_buffer(
            "slots", torch.arange(max_sequence_length, dtype=torch.int32), persistent=False
        )

    def forward(self, hidden_BSH, slots_BK) -> torch.Tensor:
        """Gather hidden states [B, S, H] of slots [B, K] -> [B, K, H]."""
        chosen_BKS = (slots_BK.unsqueeze(2) == self.slots).to(hidden_BSH.dtype)
        return torch.matmul(chosen_BKS, hidden_BSH)


def mask_in_product(network: PackedBert, *, sequences: int, columns: int) -> None:
    """Replace the additive mask of a network with eager attention, in place.

    Args:
        network: the network.
        sequences: largest number of sequences in a row.
        columns: width of a code, at least two for each binary digit of ``sequences``.
    """
    network.attention_mask = _SequenceCodes(sequences, columns)
    layers: Any = network.bert.encoder.layer
    for layer in layers:
        layer.attention.self.scores = _ProductMaskedScores()
