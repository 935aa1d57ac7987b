"""Errors of PopTorch and Poplar, classified by the types of the exceptions and by phrases of their messages."""

from __future__ import annotations

import re
from typing import NamedTuple, Optional, Tuple

from pack_data.reading.fields import one_line

_TEXT_LENGTH = 120  # characters of the SDK's text in a message, which stays below 300


class _Kind(NamedTuple):
    name: str
    # Types of exceptions that PopTorch names; they decide before any phrase.
    types: Tuple[str, ...]
    phrases: str  # pattern of whole phrases of the message, in any case
    cause: str
    remedy: str


_OTHER = _Kind(
    "other",
    (),
    "",
    "unexpected error of the SDK",
    "see Troubleshooting in docs/ipu.md, or attach the bundle of packed-bert ipu-check to a report",
)
_DEVICES = r"\b(devices?|ipus?)\b"
# The phrases of a kind stand before those of more general kinds.
_KINDS = (
    _Kind(
        "host memory",
        ("poplar_stream_memory_allocation_error", "MemoryError"),
        r"bad_alloc|cannot allocate memory|stream memory allocation|host( is)? out of memory",
        "the host is out of memory",
        "free memory on the host, or divide the replicas among hosts with poprun",
    ),
    _Kind(
        "tile memory",
        ("poplar_graph_memory_allocation_error", "popart_memory_allocation_err"),
        r"out of memory on tile|(?<!host )(?<!host is )out of memory|graph memory allocation",
        "the program does not fit on an IPU",
        "see the memory with packed-bert plan; packed-bert ipu-check prints settings that need less",
    ),
    _Kind(
        "linker",  # of programs: no link between IPUs
        ("poplar_link_error",),
        r"\bld\.lld: error|undefined reference",
        "Poplar could not link the compiled program",
        "see the end of the linker's output in the SDK's log; if it names memory, use settings that need less",
    ),
    _Kind(
        "wrong version",
        (),
        r"version mismatch|(another|different|incompatible|unsupported|wrong) \S*\s?version|undefined symbol",
        "versions of the SDK, its driver or the compiled program differ",
        "enable SDK 3.4, and compile again with an empty engine.executable_cache",
    ),
    _Kind(
        "link",
        (),
        r"fabric error|connection not established|connection_kill|\blink[ _](reset|error|down|training)"
        r"|(ipu-?links?|gw-?links?|gateway) (is |are )?(down|lost|unreachable|not trained)",
        "the connection to the IPUs, or between them, is lost",
        "see the links with gc-links and vipu, reset the partition, and start the command again",
    ),
    _Kind(
        "reset needed",
        ("poplar_recoverable_runtime_error",),
        r"\b(ipu|partition|full)_reset\b",
        "the IPUs need a reset",
        "reset them with gc-reset, or the partition with vipu reset partition, and start the command again",
    ),
    _Kind(
        "no device",
        (),
        rf"(failed to|could not|unable to|cannot) (find|acquire|attach|get)\b.*{_DEVICES}"
        rf"|no (available |suitable |attached )?{_DEVICES} (was |were )?(found|available|attached)"
        r"|ipuof_\w+ is not set|(could not|failed to|cannot) connect to (the )?v-?ipu",
        "no IPUs can be attached",
        "see the partition with gc-info -l and its users with gc-monitor; end the other program or enlarge it",
    ),
)


class SdkProblem(NamedTuple):
    """The kind, cause and remedy of an error of the SDK.

    Attributes:
        kind: "host memory", "tile memory", "linker", "wrong version", "link", "reset needed", "no device" or "other".
        text: the SDK's message, without places in its source.
        cause: the meaning of the message.
        remedy: the next action.
        tile: the number of the tile that lacks memory, if the message has it.
    """

    kind: str
    text: str
    cause: str
    remedy: str
    tile: Optional[int]


class SdkError(ValueError):
    """An error of the SDK, as one line with its cause and remedy.

    Args:
        problem: the classified error.
    """

    def __init__(self, problem: SdkProblem):
        text = one_line(problem.text, _TEXT_LENGTH)
        super().__init__(f"engine.kind ipu: {problem.cause} ({text}); {problem.remedy}")
        self.problem = problem


def classify(error: BaseException) -> SdkProblem:
    """Classify an error of PopTorch or Poplar.

    The type of the exception decides, then the phrases of its message. A recoverable error of PopTorch needs the reset
    that its `recovery_action` names.

    Args:
        error: the error.

    Returns:
        The problem, of the kind "other" if neither its type nor a phrase is known.
    """
    message = str(error) or type(error).__name__
    kind = _of_type(error, message) or _of_phrases(message)

    text = re.sub(r"^In \S+:\d+: ", "", message.partition("Error raised in:")[0])
    tile = re.search(r"out of memory on tile (\d+)", message, re.I)
    number = int(tile[1]) if tile else None
    return SdkProblem(kind.name, one_line(text, 400), kind.cause, kind.remedy, number)


def _of_type(error: BaseException, message: str) -> Optional[_Kind]:
    """Return the kind of an error's type, which PopTorch stores or states in quotes before the message, else None."""
    stated = re.match(r"(?:In \S+:\d+: )?'([\w:]+)':", message)
    names = {type(error).__name__, str(getattr(error, "type", ""))}
    if stated:
        names.add(stated[1])
    if getattr(error, "recovery_action", None):
        names.add("poplar_recoverable_runtime_error")
    return next((kind for kind in _KINDS if names.intersection(kind.types)), None)


def _of_phrases(message: str) -> _Kind:
    return next((kind for kind in _KINDS if re.search(kind.phrases, message, re.I)), _OTHER)
