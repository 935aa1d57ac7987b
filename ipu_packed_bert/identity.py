"""Which vocabulary weights and data are of: the sha256 of its vocab.txt, compared wherever the two meet."""

from __future__ import annotations

import json
from pathlib import Path
from typing import NamedTuple, Optional

from ipu_packed_bert.checkpoint import Checkpoint


class Agreement(NamedTuple):
    """What weights and data that may go together come to."""

    vocabulary: str  # sha256 of vocab.txt, empty where neither side knows it
    note: Optional[str]  # what could not be compared, in one line


def agree(weights: str, data: str, *, weights_of: object, data_of: object) -> Agreement:
    """Hold the vocabulary that weights were trained with against that of data; both sha256, empty where it is not
    known.

    Raises ValueError where they differ: the same number is another token in each.
    """
    if weights and data and weights != data:
        raise ValueError(
            f"{weights_of} was trained with another vocabulary (sha256 {weights[:12]}) than that of {data_of} "
            f"({data[:12]}): each token "
            "number means another token; give both the vocab.txt of the weights, as pack_data.build --vocabulary FILE "
            "does for data"
        )
    unknown = [str(name) for name, sha256 in ((weights_of, weights), (data_of, data)) if not sha256]
    note = (
        f"vocabularies are not compared: {' and '.join(unknown)} {'do' if unknown[1:] else 'does'} not say which it "
        f"was made with"
        if unknown
        else None
    )
    return Agreement(weights or data, note)


def vocabulary_of_run(run: Path, checkpoint: Checkpoint) -> str:
    """sha256 of the vocabulary that a run's weights are of; empty where nothing says it.

    Checkpoints did not record it at first; the environment.json of their run did.
    """
    if checkpoint.vocabulary:
        return checkpoint.vocabulary
    try:
        found = json.loads(Path(run, "environment.json").read_text(encoding="utf-8"))["data"]["vocabulary_sha256"]
    except (OSError, ValueError, KeyError, TypeError):
        return ""
    return found if isinstance(found, str) else ""
