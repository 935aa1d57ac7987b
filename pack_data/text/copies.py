"""Documents that are copies of earlier ones, by a hash of their lines.

hashes = array("Q")
for document in hashed(documents, hashes): ...
copies = len(hashes) - len(np.unique(hashes))
"""

from __future__ import annotations

import hashlib
from array import array
from typing import Iterable, Iterator

import numpy as np

from pack_data.text.corpus import Document

# Among a billion documents, two different ones share a hash with a probability of 3 %.
_HASH_BYTES = 8


def hashed(documents: Iterable[Document], hashes: array) -> Iterator[Document]:
    """Yield the documents, and append the hash of each to `hashes`; the parts of a long document have one."""
    for document in documents:
        text = "\n".join(document.lines).encode("utf-8", "surrogatepass")
        if document.continues:
            text = hashes.pop().to_bytes(_HASH_BYTES, "big") + text
        digest = hashlib.blake2b(text, digest_size=_HASH_BYTES).digest()
        hashes.append(int.from_bytes(digest, "big"))
        yield document


def without_copies(documents: Iterable[Document], hashes: array) -> Iterator[Document]:
    """Yield the first document of each hash; `hashes` are those of all documents in turn."""
    firsts = np.zeros(len(hashes), bool)
    firsts[np.unique(hashes, return_index=True)[1]] = True
    number = -1
    for document in documents:
        number += not document.continues
        if firsts[number]:
            yield document
