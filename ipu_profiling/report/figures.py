"""Figures 1, 2 and 5 of the packedBERT paper as facts: lengths, the mask, and un-padding on many accelerators.

Figures 3 and 4 are learning curves, which the experiments of `evidence` measure.
"""

from __future__ import annotations

from typing import Dict, List, Sequence, Tuple

import numpy as np

from pack_data.display.facts import COMPUTED, PAPER, Fact, Facts, with_unit
from pack_data.packing.histogram import BUNDLED, LengthHistogram

# ---- Figure 1 --------------------------------------------------------------------------------------------------------


# The theoretical speed-ups in the paper's text; for CoLA, 89 % of padding in its abstract.
_SPEED_UPS = {
    "wikipedia_mixed_128": 1.2,
    "wikipedia_mixed_384": 1.7,
    "wikipedia_512": 2.0,
    "squad_1_1_384": 2.2,
    "glue_cola_train_128": 9.1,
    "librispeech_audio_40ms": 1.6,
    "qm9_atoms": 1.6,
}


def lengths_of_figure1() -> List[LengthHistogram]:
    """Read the bundled histograms of Figure 1."""
    return [LengthHistogram.published(name) for name in BUNDLED]


def figure1() -> Facts:
    """Return the data sets of Figure 1 with their theoretical speed-ups."""
    rows = []
    for histogram in lengths_of_figure1():
        rows.append(
            {
                "data": Fact("data set", histogram.name),
                "slots": Fact("slots", histogram.max_sequence_length),
                "sequences": Fact("sequences", histogram.sequences, source=COMPUTED),
                "mean": Fact("mean length", histogram.mean_length, "tokens", COMPUTED),
                "speed_up": Fact(
                    "speed-up without padding", histogram.theoretical_speedup, "ratio", COMPUTED
                ),
                "paper": Fact("paper", _SPEED_UPS.get(histogram.name), source=PAPER),
            }
        )
    notes = (
        "Wikipedia at 512, SQuAD and QM9 are published histograms; Wikipedia at 128 and 384 is a sample of 14,229 "
        "articles.",
        "LibriSpeech is dev-clean and test-clean, which contain more short utterances than the training set of the "
        "paper; its maximum is the longest utterance.",
    )
    return Facts("Figure 1: lengths of sequences", rows, notes, "figure1")


# ---- Figure 2 --------------------------------------------------------------------------------------------------------

_FIGURE2 = (1, 1, 1, 2, 2, 2, 2, 3, 3, 0)  # the sequence of each slot of a pack; 0: padding


def figure2() -> Facts:
    """Return the mask of a pack of three sequences and one slot of padding, computed by the module of the model."""
    import torch

    from ipu_packed_bert.model.packed import AttentionMask

    slots = torch.tensor([_FIGURE2], dtype=torch.int32)
    seen = AttentionMask("eager")(slots, torch.float32)[0, 0] == 0.0
    rows = []
    for sequence, sees in zip(_FIGURE2, seen.int().tolist()):
        row = {"sequence": Fact("sequence of the slot", str(sequence))}
        for slot, (other, value) in enumerate(zip(_FIGURE2, sees)):
            row[str(slot)] = Fact(str(other), value, source=COMPUTED)
        rows.append(row)
    notes = (
        "1: the slot of the row attends to the slot of the column. Padding (0) attends to padding.",
    )
    return Facts("Figure 2: zero-one mask of a pack", rows, notes, "figure2")


# ---- Figure 5 and section 4.4 ----------------------------------------------------------------------------------------

_ACCELERATORS = tuple(2**exponent for exponent in range(12))  # 1 to 2,048
_SEQUENCES = (1, 4, 16, 64)  # of an accelerator in an update


def _work(lengths: np.ndarray, hidden_size: int) -> np.ndarray:
    """Return the multiply-adds of sequences in an encoder layer: 12 H^2 L + 2 H L^2."""
    lengths = np.asarray(lengths, dtype=np.float64)
    return 12.0 * hidden_size**2 * lengths + 2.0 * hidden_size * lengths**2


def _un_padding(
    histogram: LengthHistogram,
    hidden_size: int,
    *,
    accelerators: Sequence[int],
    sequences: Sequence[int],
    updates: int = 64,
    seed: int = 0,
) -> Dict[Tuple[int, int], float]:
    """Simulate the speed-up of un-padding over padding; an update takes as long as the accelerator with the most work.

    Args:
        histogram: the lengths, from which each accelerator draws at random.
        hidden_size: H.
        accelerators: numbers of accelerators. Smaller numbers average over more groups of the same draws.
        sequences: numbers of sequences of an accelerator in an update.
        updates: simulated updates.
        seed: of the random numbers.

    Returns:
        The speed-up by (sequences, accelerators).
    """
    counts = histogram.counts
    lengths = np.flatnonzero(counts)
    cumulative = np.cumsum(counts[lengths]) / counts.sum()
    work = _work(lengths, hidden_size)
    padded = float(_work(np.array(histogram.max_sequence_length), hidden_size))
    most = max(accelerators)

    speed_ups = {}
    for number in sequences:
        generator = np.random.default_rng([seed, number])
        slowest = dict.fromkeys(accelerators, 0.0)
        for _ in range(updates):
            draws = np.searchsorted(cumulative, generator.random((most, number)), side="right")
            work_of_each = work[np.minimum(draws, len(lengths) - 1)].sum(axis=1)
            for count in accelerators:
                groups = work_of_each[: most // count * count].reshape(-1, count)
                slowest[count] += groups.max(axis=1).mean() / updates
        for count in accelerators:
            speed_ups[number, count] = number * padded / float(slowest[count])
    return speed_ups


def figure5(histogram: LengthHistogram, hidden_size: int, packing_factor: float) -> Facts:
    """Return Figure 5: theoretical speed-ups of packing and un-padding by the number of accelerators.

    Args:
        histogram: the lengths of the sequences.
        hidden_size: width of the network.
        packing_factor: mean sequences per pack, the speed-up of packing on any number of accelerators.
    """
    speed_ups = _un_padding(
        histogram, hidden_size, accelerators=_ACCELERATORS, sequences=_SEQUENCES
    )
    rows = []
    for count in _ACCELERATORS:
        row = {
            "accelerators": Fact("accelerators", count),
            "packing": Fact("packing", packing_factor, "ratio", COMPUTED),
        }
        for number in _SEQUENCES:
            speed_up = Fact(f"un-padding of {number}", speed_ups[number, count], "ratio", COMPUTED)
            row[f"un_padding_{number}"] = speed_up
        rows.append(row)
    notes = (
        "Theoretical: without overhead and communication. Un-padding of 64: each accelerator draws 64 sequences at "
        "random. An update of un-padding takes as long as the accelerator with the most work; packs take "
        "equally long everywhere.",
        "Un-padding does not compute attention to padding, so on one accelerator it exceeds the "
        f"{with_unit(histogram.theoretical_speedup, 'ratio')} that packing can reach.",
    )
    title = f"Figure 5: theoretical speed-up over padding, {histogram.name}"
    return Facts(title, rows, notes, "figure5")
