"""Pieces of examples as single numbers, and a data set from which such a number reads its piece.

A DataLoader takes whole numbers from its batch sampler.  A whole example is its own number in the data set, so most
plans need nothing of this.  A plan that breaks examples needs `PieceView`.
"""

from __future__ import annotations

from typing import Any, Dict, List, Mapping, Optional, Sequence

from pack_data.lengths.overlong import Span


class PieceNumbers:
    """One number for each piece of each of `examples` examples of at most `longest` tokens.

    The number says all, so that the workers of a DataLoader need to know neither the epoch nor its plan.
    """

    def __init__(self, examples: int, longest: int) -> None:
        self.examples, self._width = examples, longest + 1

    def number(self, example: int, span: Optional[Span]) -> int:
        """span: None for the whole example, whose number is `example`."""
        return example if span is None else example + self.examples * (1 + span.start * self._width + span.stop)

    def example(self, number: int) -> int:
        return number % self.examples

    def span(self, number: int) -> Optional[Span]:
        """None for a whole example."""
        code = number // self.examples
        return None if code == 0 else Span(*divmod(code - 1, self._width))


class PieceView:
    """A map-style data set whose items are pieces of the examples of another one: `view[number]`.

    An example is a mapping with input_ids.  Everything in it that has one value a token is cut; the rest stays.
    """

    def __init__(self, dataset: Any, numbers: PieceNumbers) -> None:
        if len(dataset) != numbers.examples:
            raise ValueError(
                f"the data set has {len(dataset)} examples, the batch sampler was made for {numbers.examples}; "
                "give it the lengths of this data set"
            )
        self._dataset, self._numbers = dataset, numbers

    def __len__(self) -> int:
        """Examples, broken or not."""
        return self._numbers.examples

    def __getitem__(self, number: int) -> Mapping[str, Any]:
        return _cut(self._dataset[self._numbers.example(number)], self._numbers.span(number))

    def __getitems__(self, numbers: Sequence[int]) -> List[Mapping[str, Any]]:
        """All items of a batch.  A DataLoader asks for them at once, which is faster where the data set can do it."""
        together = getattr(self._dataset, "__getitems__", None)
        if together is None or not numbers:
            return [self[number] for number in numbers]
        found = together([self._numbers.example(number) for number in numbers])
        return [_cut(example, self._numbers.span(number)) for example, number in zip(found, numbers)]


def _cut(example: Mapping[str, Any], span: Optional[Span]) -> Mapping[str, Any]:
    if span is None:
        return example
    tokens = len(example["input_ids"])
    cut: Dict[str, Any] = dict(example)
    for name, values in example.items():
        if hasattr(values, "__len__") and not isinstance(values, (str, bytes, Mapping)) and len(values) == tokens:
            cut[name] = values[span.start : span.stop]
    return cut
