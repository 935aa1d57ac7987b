"""Small helpers of all packages: items in blocks, and words of messages."""

from __future__ import annotations

from itertools import islice
from typing import Iterable, Iterator, List, TypeVar

_Item = TypeVar("_Item")

# Settings, with the names that users of other projects type for them.
_NAMES_BY_MEANING = {
    "optimizer.learning_rate": "learning_rate lr max_lr peak_lr",
    "batch.micro_batch": "micro_batch batch_size batch bs per_device_train_batch_size",
    "data.max_sequences_per_pack": "max_sequences_per_pack depth max_depth sequences_per_pack",
    "data.max_sequence_length": "max_sequence_length length seq_len seq_length max_len max_length max_seq_len "
    "max_seq_length",
    "engine.device": "device",
    "run.epochs": "epochs epoch num_epochs num_train_epochs",
    "run.steps": "epochs epoch num_epochs num_train_epochs steps max_steps num_steps iterations updates",
}


class NotFinite(ArithmeticError):
    """A loss or weights of a training run are infinite or NaN; the exit status is 3."""


class Problems(ValueError):
    """Several problems in one error, one per line; `cli.command.run_main` prints any other error on a single line."""


def settings_by_meaning(name: str) -> List[str]:
    """Return the settings that a name means in other projects (`lr`, `batch_size`, `epochs`), the best first."""
    return [setting for setting, names in _NAMES_BY_MEANING.items() if name in names.split()]


def in_blocks(items: Iterable[_Item], size: int) -> Iterator[List[_Item]]:
    """Yield the items in lists of `size`; the last may be shorter."""
    iterator = iter(items)
    return iter(lambda: list(islice(iterator, size)), [])


def counted(number: int, noun: str) -> str:
    """Return a number and its noun: `1 shard`, `2 shards`."""
    plural = "" if number == 1 else "s"
    return f"{number:,} {noun}{plural}"
