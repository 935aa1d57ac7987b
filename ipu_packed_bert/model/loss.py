"""The pre-training loss of packs, such that a packed update equals the unpacked one (paper section 3.2.3).

Rows have different numbers of sequences and of masked tokens, so a mean over a row or a micro-batch would be wrong:
only sums divided by the counts of the whole update equal unpacked training. The caller counts and passes

    mlm_scale = micro-batches of the update / masked tokens of the update     (normalisation "token")
    mlm_scale = micro-batches of the update / sequences of the update         (normalisation "sequence")
    nsp_scale = micro-batches of the update / sequences of the update

the same value for each row. The mean over the micro-batches of `PretrainingOutput.loss` is then the mean over the
update, to the last bit of the sum, for any division of the packs.
Letters: B rows, P slots for masked tokens, D slots for sequences, V vocabulary.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple, Optional

import torch
from torch import nn
from torch.nn import functional as F

if TYPE_CHECKING:
    from ipu_packed_bert.settings.schema import LossConfig


class PretrainingOutput(NamedTuple):
    """Scalars, sums over a micro-batch, float32 (float64 for a float64 model)."""

    loss: torch.Tensor  # mlm_loss + nsp_loss
    mlm_loss: torch.Tensor  # multiplied by its scale
    nsp_loss: torch.Tensor  # multiplied by its scale; 0 without next sentence prediction
    mlm_correct: torch.Tensor  # correctly predicted masked tokens
    nsp_correct: torch.Tensor  # correctly classified sequences


def cross_entropy(logits_BKC, labels_BK, *, widen: bool = True) -> torch.Tensor:
    """Compute the loss of each slot, [B, K] in float32 or wider.

    Args:
        logits_BKC: logits of any floating-point type.
        labels_BK: classes.
        widen: compute in float32 or wider; otherwise in the type of the logits, which saves a copy.
    """
    half = logits_BKC.dtype in (torch.float16, torch.bfloat16)
    wide = torch.float32 if half else logits_BKC.dtype
    if widen:
        logits_BKC = logits_BKC.to(wide)
    labels = labels_BK.to(torch.int64).flatten()
    losses = F.cross_entropy(logits_BKC.flatten(0, 1), labels, reduction="none")
    return losses.to(wide).view(labels_BK.shape)


def at_least_float32(values: torch.Tensor) -> torch.Tensor:
    """Convert half-precision values to float32."""
    return values if values.dtype == torch.float64 else values.float()


def correct(logits_BKC, labels_BK, *, in_blocks: bool = False) -> torch.Tensor:
    """Mark the slots in which the largest logit, or the first of equal ones, is that of the label, bool [B, K].

    Args:
        logits_BKC: logits.
        labels_BK: classes.
        in_blocks: find the largest logit block by block, which is faster on a CPU.
    """
    largest_BK = _first_largest(logits_BKC) if in_blocks else torch.argmax(logits_BKC, dim=2)
    return largest_BK.to(labels_BK.dtype) == labels_BK


def _first_largest(logits_BKC, block: int = 256) -> torch.Tensor:
    """Compute `torch.argmax` of the last dimension: the block with the largest maximum, then the place in the block.

    On a CPU a maximum is vectorised and its place is not: this takes a sixth of the time for 30,522 logits.
    """
    classes = logits_BKC.shape[2]
    whole = classes // block * block
    maxima = []
    if whole:
        blocks = logits_BKC[:, :, :whole].unflatten(2, (-1, block))
        maxima.append(blocks.amax(3))
    if whole < classes:
        rest = logits_BKC[:, :, whole:]
        maxima.append(rest.amax(2, keepdim=True))

    start_BK1 = torch.cat(maxima, dim=2).argmax(2, keepdim=True) * block
    offsets = torch.arange(block, device=logits_BKC.device)
    inside = (start_BK1 + offsets).clamp(max=classes - 1)
    return start_BK1.squeeze(2) + logits_BKC.gather(2, inside).argmax(2)


def _membership(masked_lm_weights_BP, sequences: int, dtype: torch.dtype) -> torch.Tensor:
    """Return 1 if masked slot p belongs to sequence d of its row, else 0: [B, D, P].

    Args:
        masked_lm_weights_BP: sequence number of each masked slot; 0 in unused slots, which belong to no sequence.
        sequences: D.
        dtype: type of the result.
    """
    like = dict(dtype=masked_lm_weights_BP.dtype, device=masked_lm_weights_BP.device)
    numbers_1D1 = torch.arange(1, sequences + 1, **like).view(1, sequences, 1)
    return (masked_lm_weights_BP.unsqueeze(1) == numbers_1D1).to(dtype)


def _sequence_means(values_BP, masked_lm_weights_BP, sequences: int) -> torch.Tensor:
    """Compute the mean of each sequence's values [B, D], 0 for a sequence without values."""
    belongs_BDP = _membership(masked_lm_weights_BP, sequences, values_BP.dtype)
    sums_BD = (belongs_BDP * values_BP.unsqueeze(1)).sum(2)
    # The count is clamped, because a `where` of the quotient would have the gradient NaN for empty slots.
    counts_BD = belongs_BDP.sum(2).clamp(min=1.0)
    return sums_BD / counts_BD


class PretrainingLoss(nn.Module):
    """Masked language model loss and, if configured, next sentence loss, each a scaled sum over the rows."""

    def __init__(self, loss: LossConfig):
        super().__init__()
        self.normalisation = loss.normalisation
        self.widen_logits = True  # off in engines with too little memory for it
        self.in_blocks = False  # on in engines on which `_first_largest` is faster

    def forward(
        self,
        mlm_logits_BPV,
        nsp_logits_BD2: Optional[torch.Tensor],
        masked_lm_ids_BP,
        masked_lm_weights_BP,
        next_sentence_labels_BD,
        next_sentence_weights_BD,
        mlm_scale_B,
        nsp_scale_B,
    ) -> PretrainingOutput:
        """Compute the losses and the numbers of correct predictions of a micro-batch."""
        mlm_BP = cross_entropy(mlm_logits_BPV, masked_lm_ids_BP, widen=self.widen_logits)
        # Unused slots have finite losses of arbitrary tokens: their weight must be exactly 0.
        used_BP = (masked_lm_weights_BP > 0).to(mlm_BP.dtype)
        if self.normalisation == "sequence":
            sequences = next_sentence_weights_BD.shape[1]
            row_mlm_B = _sequence_means(mlm_BP, masked_lm_weights_BP, sequences).sum(1)
        else:
            row_mlm_B = (mlm_BP * used_BP).sum(1)
        mlm_loss = (row_mlm_B * mlm_scale_B).sum()
        mlm_correct_BP = correct(mlm_logits_BPV, masked_lm_ids_BP, in_blocks=self.in_blocks)
        mlm_correct = (mlm_correct_BP.to(mlm_BP.dtype) * used_BP).sum()

        if nsp_logits_BD2 is None:
            zero = torch.zeros_like(mlm_loss)
            return PretrainingOutput(mlm_loss, mlm_loss, zero, mlm_correct, zero)

        nsp_BD = cross_entropy(nsp_logits_BD2, next_sentence_labels_BD)
        present_BD = (next_sentence_weights_BD > 0).to(nsp_BD.dtype)
        nsp_loss = ((nsp_BD * present_BD).sum(1) * nsp_scale_B).sum()
        nsp_correct_BD = correct(nsp_logits_BD2, next_sentence_labels_BD)
        nsp_correct = (nsp_correct_BD.to(nsp_BD.dtype) * present_BD).sum()
        return PretrainingOutput(mlm_loss + nsp_loss, mlm_loss, nsp_loss, mlm_correct, nsp_correct)
