"""Dropout masks on a CPU that follow from the pack of the update and the name of the layer.

A value is dropped if its 16-bit word of NumPy's SFC64 is below a threshold; torch's generator would take a fifth of a
bfloat16 update's time. The words of a pack in a layer follow from the seed, the update, the number of the pack in the
update and the name of the layer. Masks depend neither on the size of micro-batches, nor on the number of processes, nor
on the way in which attention is computed or compiled; a layer that is computed again gets the same mask.

Words belong to slots, so the tokens of a row have the same masks with and without the padding around them. The words of
attention weights belong to a sequence, [N heads, L tokens, L tokens], because a weight between two sequences is 0.
"""

from __future__ import annotations

import hashlib
import itertools
import weakref
from typing import Any, List, NamedTuple, Sequence, Tuple

import numpy as np
import torch
from numpy.random.bit_generator import ISeedSequence
from torch import nn

from ipu_packed_bert.model.bert import AttentionDropout

_WORDS = 1 << 16  # values of a random word
# The beginning of the names of layers that may get the tokens of all rows without padding, [1, T, H].
_IN_THE_ENCODER = "bert."


class _GeneratorState(ISeedSequence):
    """The initial state of a generator, which takes a tenth of the time of a `SeedSequence`."""

    def __init__(self, words: Sequence[int]):
        self._words = np.array(words, np.uint64)

    def generate_state(self, n_words: int, dtype: Any = np.uint32) -> np.ndarray:
        return self._words


class _SequenceSlots(NamedTuple):
    """The slots of one sequence."""

    row: int
    first: int  # slot
    length: int


class PackNoise:
    """The random words of a network's dropout layers, which are replaced in place; layers with a rate of 0 stay.

    Args:
        network: the network.
        compiled: the layers are compiled by torch, to which the words are one operator.
    """

    def __init__(self, network: nn.Module, *, compiled: bool = False):
        self._keys = np.zeros((0, 2), np.uint64)
        self._numbers = np.zeros((0, 0), np.int32)
        parents = list(network.named_modules())
        for prefix, parent in parents:
            for name, layer in list(parent.named_children()):
                if isinstance(layer, nn.Dropout) and layer.p > 0.0:
                    full_name = f"{prefix}.{name}".lstrip(".")
                    setattr(parent, name, _PackDropout(layer, full_name, self, compiled=compiled))

    def begin(self, entropy: Sequence[int], first: int, numbers_BS: np.ndarray) -> None:
        """Begin a micro-batch.

        Args:
            entropy: numbers that determine the words of the update, such as the seed.
            first: number of the first pack in the update.
            numbers_BS: number of each slot's sequence in its pack, 0 in padding.
        """
        keys = []
        for pack in range(first, first + len(numbers_BS)):
            keys.append(np.random.SeedSequence((*entropy, pack)).generate_state(2, np.uint64))
        self._keys = np.array(keys)
        self._numbers = numbers_BS

    @property
    def shape(self) -> Tuple[int, int]:
        """Rows and slots of the micro-batch."""
        rows, slots = self._numbers.shape
        return rows, slots

    def words(self, row: int, layer: int, count: int, stream: int = 0) -> np.ndarray:
        """Return the first random words of a stream, uint16 [count].

        Args:
            row: row of the micro-batch.
            layer: key of the layer.
            count: number of words.
            stream: index of the stream among those of the pack in the layer.
        """
        first, second = self._keys[row].tolist()
        state: Any = _GeneratorState((first, (second + stream) % (1 << 64), layer))
        return np.random.SFC64(state).random_raw(-(-count // 4)).view(np.uint16)[:count]

    def tokens(self, row: int) -> np.ndarray:
        """Return the slots of a row that have a token."""
        return np.flatnonzero(self._numbers[row])

    def sequences(self) -> List[_SequenceSlots]:
        """Return the slots of all sequences of the micro-batch."""
        runs = []
        for row, numbers in enumerate(self._numbers):
            ends = np.flatnonzero(np.diff(numbers, prepend=0, append=0)).tolist()
            for first, end in zip(ends, ends[1:]):
                if numbers[first]:
                    runs.append(_SequenceSlots(row, first, end - first))
        return runs


class _PackDropout(AttentionDropout):
    """A dropout layer with the words of a `PackNoise`.

    Args:
        layer: the layer that it replaces.
        name: the name of the layer in the network.
        noise: the words.
        compiled: the layer is compiled by torch.
    """

    number: torch.Tensor

    def __init__(self, layer: nn.Dropout, name: str, noise: PackNoise, *, compiled: bool):
        super().__init__(layer.p)
        self.train(layer.training)
        digest = hashlib.sha256(name.encode()).digest()
        self._name = name
        self._key = int.from_bytes(digest[:8], "little")
        self._noise = noise
        self._of_attention = isinstance(layer, AttentionDropout)
        self._compiled = compiled
        # A tensor, so that the compiled layers of a network share a graph.
        number = next(_NUMBERS)
        self.register_buffer("number", torch.tensor(number), persistent=False)
        _LAYERS[number] = self

    def forward(self, values: torch.Tensor, starts: Sequence[int] = ()) -> torch.Tensor:
        """Drop values of rows [B, ...], or of attention as `AttentionDropout`."""
        if not self.training:
            return values
        if self._compiled:
            factors = torch.ops.packed_bert.dropout_factors(values.detach(), self.number)
        else:
            factors = self.factors(values, starts)
        return values * factors

    def factors(self, values: torch.Tensor, starts: Sequence[int] = ()) -> torch.Tensor:
        """Return the factor of each value: 0 if it is dropped."""
        shape = tuple(values.shape)
        if starts:
            factors = self._of_words(self._words_of_blocks(shape, starts))
        elif self._of_attention:
            factors = self._of_whole_rows(shape)
        elif self._name.startswith(_IN_THE_ENCODER) and shape[:2] != self._noise.shape:
            factors = self._of_words(self._words_of_tokens(shape[-1]))
        else:
            factors = self._of_words(self._words_of_rows(shape))
        return torch.from_numpy(factors).view(shape).to(values.dtype)

    def _of_words(self, words: np.ndarray) -> np.ndarray:
        # At least one of the 65,536 words is not dropped, so that the scale is finite.
        dropped_words = min(round(self.p * _WORDS), _WORDS - 1)
        scale = np.float32(_WORDS / (_WORDS - dropped_words))
        return (words >= dropped_words) * scale

    def _words_of_rows(self, shape: Sequence[int]) -> np.ndarray:
        packs = self._noise.shape[0]
        count, rest = divmod(int(np.prod(shape)), packs)
        if rest:
            raise ValueError(
                f"the dropout layer {self._name} gets values of shape {list(shape)}, which are not those of {packs} "
                "packs; call it with a row for each pack"
            )
        return np.stack([self._noise.words(row, self._key, count) for row in range(packs)])

    def _words_of_tokens(self, width: int) -> np.ndarray:
        """Return the words [T, H] of all tokens, or of the first slot if there are none."""
        pieces = []
        for row in range(self._noise.shape[0]):
            slots = self._noise.tokens(row)
            if len(slots):
                count = int(slots[-1]) + 1
                words = self._noise.words(row, self._key, count * width).reshape(count, width)
                pieces.append(words if count == len(slots) else words[slots])
        if not pieces:
            pieces.append(self._noise.words(0, self._key, width))
        return np.concatenate(pieces)

    def _words_of_blocks(self, shape: Sequence[int], starts: Sequence[int]) -> np.ndarray:
        """Return the words [n, N, L, L] of sequences that begin at slots ``starts`` of rows laid end to end."""
        count = int(np.prod(shape[1:]))
        pieces = []
        for start in starts:
            row, slot = divmod(start, self._noise.shape[1])
            pieces.append(self._noise.words(row, self._key, count, slot))
        return np.stack(pieces)

    def _of_whole_rows(self, shape: Sequence[int]) -> np.ndarray:
        """Return the factors [B, N, S, S] of attention weights; those of the weights between sequences are 1."""
        factors = np.ones(shape, np.float32)
        heads = shape[1]
        for row, first, length in self._noise.sequences():
            words = self._noise.words(row, self._key, heads * length * length, first)
            end = first + length
            block = self._of_words(words).reshape(heads, length, length)
            factors[row, :, first:end, first:end] = block
        return factors


# Layers by number, for the operator.
_LAYERS: weakref.WeakValueDictionary[int, _PackDropout] = weakref.WeakValueDictionary()
_NUMBERS = itertools.count()
_OPERATORS = torch.library.Library("packed_bert", "DEF")
_OPERATORS.define("dropout_factors(Tensor values, Tensor layer) -> Tensor")


def _factors(values: torch.Tensor, layer: torch.Tensor) -> torch.Tensor:
    return _LAYERS[int(layer)].factors(values)


def _shape_of_factors(values: torch.Tensor, layer: torch.Tensor) -> torch.Tensor:
    return torch.empty(values.shape, dtype=values.dtype, device=values.device)


_OPERATORS.impl("dropout_factors", _factors, "CPU")
_OPERATORS.impl("dropout_factors", _shape_of_factors, "Meta")
