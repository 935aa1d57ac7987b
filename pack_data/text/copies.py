"""Documents that are copies of earlier ones, by a hash of their lines."""

from __future__ import annotations

import hashlib
from array import array
from typing import Iterable, Iterator

import numpy as np

from pack_data.text.corpus import Document

# Among a billion documents, two different ones share a hash with a probability of 3 %.
_HASH_BYTES = 8


class DocumentHashes:
    """A hash of each document of a corpus, 8 bytes in memory for each."""

    def __init__(self) -> None:
        self._hashes = array("Q")

    def recorded(self, documents: Iterable[Document]) -> Iterator[Document]:
        """Yield the documents, and record the hash of each."""
        for document in documents:
            text = "\n".join(document.lines).encode("utf-8", "surrogatepass")
            if document.continues:
                text = self._hashes.pop().to_bytes(_HASH_BYTES, "big") + text
            digest = hashlib.blake2b(text, digest_size=_HASH_BYTES).digest()
            self._hashes.append(int.from_bytes(digest, "big"))
            yield document

    def without_copies(self, documents: Iterable[Document]) -> Iterator[Document]:
        """Yield the first document of each hash. The documents must be those that were recorded."""
        is_first = np.zeros(len(self._hashes), bool)
        is_first[np.unique(self._as_array(), return_index=True)[1]] = True
        number = -1
        for document in documents:
            if not document.continues:
                number += 1
            if is_first[number]:
                yield document

    @property
    def documents(self) -> int:
        """The number of documents."""
        return len(self._hashes)

    @property
    def copies(self) -> int:
        """The number of documents that are copies of earlier ones."""
        return self.documents - len(np.unique(self._as_array()))

    def _as_array(self) -> np.ndarray:
        return np.frombuffer(self._hashes, np.uint64) if self._hashes else np.zeros(0, np.uint64)
