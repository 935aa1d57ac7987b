"""The two sides of a corpus: documents to train on, and documents held out to evaluate on.

The hash of a document's text decides, so copies of a document are on one side, a file that is added later changes no
other document's side, and two data sets of one corpus can be compared by their manifests alone.
"""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any, Dict, Iterable, Iterator, Mapping, Tuple, Union

from pack_data.text.corpus import Document

TRAINING, HELD_OUT = "training", "held-out"


_SUFFIX = "-held-out"
# In the `made_with` of a held-out side: the digest of the training side that was built with it.
TRAINING_DIGEST = "training_digest"


def held_out_folder(out: Union[str, Path]) -> Path:
    """Where a build puts the held-out side of the data set in `out`."""
    return Path(out).with_name(Path(out).name + _SUFFIX)


def place(lines: Iterable[str]) -> float:
    """Where the hash of a text lies between 0 and 1; other line breaks and blanks make no other text."""
    words = " ".join(word for line in lines for word in line.split())
    return int.from_bytes(hashlib.sha256(words.encode("utf-8", "surrogatepass")).digest()[:8], "big") / 2**64


def split(documents: Iterable[Document], held_out: float) -> Iterator[Tuple[Document, bool]]:
    """Each document, and whether it is held out, which is where its place is below `held_out`.

    The rest of a document that was cut is on the side of its beginning.
    """
    side = False
    for document in documents:
        if held_out and not document.continues:
            side = place(document.lines) < held_out
        yield document, side


def of_one_build(training_digest: int, evaluation: Mapping[str, Any]) -> bool:
    """Whether a held-out side, by its `made_with`, belongs to the training side of this digest.

    A build puts both in place by two renames; who reads between them sees sides of two builds. True where it does not
    say, as one that was converted.
    """
    return evaluation.get(TRAINING_DIGEST, f"{training_digest:016x}") == f"{training_digest:016x}"


def overlap(training: Mapping[str, Any], evaluation: Mapping[str, Any]) -> bool:
    """Whether a document may be in both data sets, by the `made_with` of their manifests.

    A manifest says which files went in, by sha256, and which of their documents: those with a place from a to b.
    """

    def files(made_with: Mapping[str, Any]) -> set:
        return {sha256 for _, sha256 in made_with.get("sources", ()) if sha256}

    def places(made_with: Mapping[str, Any]) -> Tuple[float, float]:
        options: Dict[str, Any] = made_with.get("options", {})
        fraction = options.get("held_out", 0.0)
        return (0.0, fraction) if made_with.get("side") == HELD_OUT else (fraction, 1.0)

    (begin, end), (other_begin, other_end) = places(training), places(evaluation)
    return bool(files(training) & files(evaluation)) and max(begin, other_begin) < min(end, other_end)
