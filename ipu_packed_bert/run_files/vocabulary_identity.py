"""The identity of a vocabulary: the sha256 of its file and its casing, compared wherever weights and data meet."""

from __future__ import annotations

from typing import Any, Dict, NamedTuple, Optional

from pack_data.store.data_set import Manifest
from pack_data.text.vocabulary import AnyVocabulary


class Identity(NamedTuple):
    """The identity of a vocabulary: its tokens, and the casing of the texts that it is applied to."""

    sha256: str = ""  # of vocab.txt or tokenizer.json; empty if unknown
    lower_case: Optional[bool] = None  # None if unknown

    @property
    def lowers_case(self) -> bool:
        """True if texts are lower-cased; assumed if unknown, because most vocabularies do."""
        return self.lower_case is not False

    @property
    def recorded(self) -> Dict[str, Any]:
        """Fields for environment.json."""
        return {"vocabulary_sha256": self.sha256, "lower_case": self.lower_case}

    @classmethod
    def of(cls, vocabulary: AnyVocabulary) -> Identity:
        """Return the identity of a vocabulary."""
        return cls(vocabulary.sha256, vocabulary.lower_case)

    @classmethod
    def of_data(cls, manifest: Manifest) -> Identity:
        """Return the identity that a data set states; lower_case is ignored if it has no vocabulary."""
        if not manifest.vocabulary_sha256:
            return cls(manifest.vocabulary_sha256, None)
        options = manifest.made_with.get("options", {})
        return cls(manifest.vocabulary_sha256, options.get("lower_case"))


UNKNOWN = Identity()


class _Agreement(NamedTuple):
    """Result of a comparison without differences."""

    vocabulary: Identity  # combines the known values of both sides
    note: Optional[str]  # which side is unknown, one line


def agree(weights: Identity, data: Identity, *, weights_of: object, data_of: object) -> _Agreement:
    """Compare the vocabularies of weights and data, which are named in messages by the other two arguments.

    Raises ValueError if they differ: equal token numbers then mean different tokens, or equal words different tokens.
    """
    if weights.sha256 and data.sha256 and weights.sha256 != data.sha256:
        raise ValueError(
            f"{weights_of} was trained with another vocabulary (sha256 {weights.sha256[:12]}) than that of {data_of} "
            f"({data.sha256[:12]}), so token numbers do not match; build the data with the vocabulary of the weights: "
            "packed-bert build --vocabulary FILE"
        )
    if None not in (weights.lower_case, data.lower_case) and weights.lower_case != data.lower_case:
        lowered, kept, option = weights_of, data_of, "without"
        if data.lower_case:
            lowered, kept, option = data_of, weights_of, "with"
        raise ValueError(
            f"{weights_of} was trained with another vocabulary than that of {data_of}: {lowered} has lower-case text, "
            f"{kept} keeps capitals; build the data {option} --keep-case, to match the weights"
        )
    unknown = []
    if not weights.sha256:
        unknown.append(str(weights_of))
    if not data.sha256:
        unknown.append(str(data_of))
    note = None
    if unknown:
        note = f"vocabularies are not compared, because that of {' and '.join(unknown)} is unknown"
    lower_case = data.lower_case if weights.lower_case is None else weights.lower_case
    return _Agreement(Identity(weights.sha256 or data.sha256, lower_case), note)
