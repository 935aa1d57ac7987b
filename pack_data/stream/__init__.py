"""Packs from a stream of sequences, with a bounded buffer.  `python -m pack_data.stream` measures it."""

from pack_data.stream.pack_stream import Pack, PackStream, Waits

__all__ = ["Pack", "PackStream", "Waits"]
