"""Packs from a stream of sequences, with a bounded buffer.  `packed-bert stream` measures it."""

from pack_data.stream.pack_stream import Pack, PackStream, Waits
from pack_data.stream.rows import PackRows, packed_rows

__all__ = ["Pack", "PackRows", "PackStream", "Waits", "packed_rows"]
