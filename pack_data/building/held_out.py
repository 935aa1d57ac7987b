"""The two sides of a split corpus: documents to train on, and held-out documents to evaluate on.

The hash of a document's text decides its side. So all copies of a document are on one side, a new file never moves a
document to the other side, and the manifests alone tell whether two data sets of one corpus may share a document.
A single text is divided into stretches instead (stretches.py).
"""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import TYPE_CHECKING, Any, Dict, Iterable, Iterator, Mapping, Set, Tuple, Union

from pack_data.building.account import ACCOUNT

if TYPE_CHECKING:
    from pack_data.text.corpus import Document

# The name of a side in `made_with` of its manifest.
TRAINING = "training"
HELD_OUT = "held-out"
# The key in `made_with` of a held-out data set with the digest of the training data set of the same build.
TRAINING_DIGEST = "training_digest"

_SUFFIX = "-held-out"


def held_out_folder(out: Union[str, Path]) -> Path:
    """Return the directory of the held-out data set that is built with the data set in `out`."""
    folder = Path(out)
    if folder.name in ("", ".."):  # the current directory, or its parent
        folder = folder.resolve()
    return folder.with_name(folder.name + _SUFFIX)


def split(documents: Iterable[Document], held_out: float) -> Iterator[Tuple[Document, bool]]:
    """Yield each document and whether it is held out: whether its position is below `held_out`.

    If a long document was cut, all its parts are on the side of the first.
    """
    is_held_out = False
    for document in documents:
        if held_out and not document.continues:
            is_held_out = position(document.lines) < held_out
        yield document, is_held_out


def position(lines: Iterable[str]) -> float:
    """Return the hash of a text as a fraction from 0 to 1; line breaks and repeated blanks do not change it."""
    words = " ".join(" ".join(lines).split())
    sha256 = hashlib.sha256(words.encode("utf-8", "surrogatepass")).digest()
    return int.from_bytes(sha256[:8], "big") / 2**64


def of_one_build(training_digest: int, evaluation: Mapping[str, Any]) -> bool:
    """Return True unless the held-out data set names another training data set than the one of this digest.

    A build replaces the two data sets with two renames, so a reader in between sees two different builds. `evaluation`
    is the `made_with` of the held-out data set; a converted one names no training data set.
    """
    digest = f"{training_digest:016x}"
    return evaluation.get(TRAINING_DIGEST, digest) == digest


def overlap(training: Mapping[str, Any], evaluation: Mapping[str, Any]) -> bool:
    """Return True if the two data sets may share a document, judged by the `made_with` of their manifests.

    A manifest lists the sha256 of its source files, and the range of positions of the documents that it took from them.
    """
    if not _source_hashes(training) & _source_hashes(evaluation):
        return False
    if _paragraphs(training) != _paragraphs(evaluation):
        return True
    begin, end = _positions(training)
    other_begin, other_end = _positions(evaluation)
    return max(begin, other_begin) < min(end, other_end)


def _paragraphs(made_with: Mapping[str, Any]) -> int:
    """Return the paragraphs of a single text of which stretches are held out, else 0."""
    count: int = made_with.get(ACCOUNT, {}).get("paragraphs", 0)
    return count


def _source_hashes(made_with: Mapping[str, Any]) -> Set[str]:
    return {sha256 for _, sha256 in made_with.get("sources", ()) if sha256}


def _positions(made_with: Mapping[str, Any]) -> Tuple[float, float]:
    """Return the range of positions (begin, end) of the documents in a data set."""
    options: Dict[str, Any] = made_with.get("options", {})
    fraction = options.get("held_out", 0.0)
    if made_with.get("side") == HELD_OUT:
        return (0.0, fraction)
    return (fraction, 1.0)
