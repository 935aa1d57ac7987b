"""The identity of a vocabulary: the sha256 of its file and its casing, compared wherever weights and data meet."""

from __future__ import annotations

from typing import Any, Dict, NamedTuple, Optional

from pack_data.store.data_set import Manifest
from pack_data.text.vocabulary import AnyVocabulary


class Identity(NamedTuple):
    """What a vocabulary is known by: the same tokens cut another text where capitals are kept."""

    sha256: str = ""  # of vocab.txt or tokenizer.json; empty where it is not known
    lower_case: Optional[bool] = None  # None where it is not known

    @property
    def lowers_case(self) -> bool:
        """As stated; lower case where it is not known, as in most vocabularies."""
        return self.lower_case is not False

    @property
    def recorded(self) -> Dict[str, Any]:
        """As environment.json has it."""
        return {"vocabulary_sha256": self.sha256, "lower_case": self.lower_case}

    @classmethod
    def of(cls, vocabulary: AnyVocabulary) -> Identity:
        return cls(vocabulary.sha256, vocabulary.lower_case)

    @classmethod
    def of_data(cls, manifest: Manifest) -> Identity:
        """Return the identity that a data set states; lower_case is ignored if it has no vocabulary."""
        lower_case = (
            manifest.made_with.get("options", {}).get("lower_case")
            if manifest.vocabulary_sha256
            else None
        )
        return cls(manifest.vocabulary_sha256, lower_case)


UNKNOWN = Identity()


class _Agreement(NamedTuple):
    """What weights and data that may go together come to."""

    vocabulary: Identity  # of either side, as far as it knows
    note: Optional[str]  # what could not be compared, in one line


def agree(weights: Identity, data: Identity, *, weights_of: object, data_of: object) -> _Agreement:
    """Hold the vocabulary that weights were trained with against that of data.

    Raises ValueError where they differ: the same number is another token in each, or the same word other tokens.
    """
    if weights.sha256 and data.sha256 and weights.sha256 != data.sha256:
        raise ValueError(
            f"{weights_of} was trained with another vocabulary (sha256 {weights.sha256[:12]}) than that of {data_of} "
            f"({data.sha256[:12]}): each token number means another token; give both the vocab.txt of the weights, "
            "as packed-bert build --vocabulary FILE does for data"
        )
    if None not in (weights.lower_case, data.lower_case) and weights.lower_case != data.lower_case:
        lowered, kept = (weights_of, data_of) if weights.lower_case else (data_of, weights_of)
        raise ValueError(
            f"{weights_of} was trained with another vocabulary than that of {data_of}: {lowered} has all text in lower "
            f"case, {kept} keeps capitals; build the data {'without' if weights.lower_case else 'with'} --keep-case, "
            "as that of the weights"
        )
    unknown = [
        str(name) for name, each in ((weights_of, weights), (data_of, data)) if not each.sha256
    ]
    note = (
        f"vocabularies are not compared: {' and '.join(unknown)} {'do' if unknown[1:] else 'does'} not say which it "
        f"was made with"
        if unknown
        else None
    )
    lower_case = data.lower_case if weights.lower_case is None else weights.lower_case
    return _Agreement(Identity(weights.sha256 or data.sha256, lower_case), note)
