"""Errors of PopTorch and Poplar, classified by the words of their messages."""

from __future__ import annotations

import re
from typing import NamedTuple, Optional

from pack_data.reading.fields import one_line

_TEXT_LENGTH = 120  # characters of the SDK's text in a message, which stays below 300


class _Kind(NamedTuple):
    name: str
    pattern: str  # of the message and of `recovery_action`, in any case
    cause: str
    remedy: str


_TILE_MEMORY = _Kind(
    "tile memory",
    r"out of memory|memory[ _]allocation",
    "the program does not fit on an IPU",
    "see the memory with packed-bert plan; packed-bert ipu-check prints settings that need less",
)
_OTHER = _Kind(
    "other",
    "",
    "unexpected error of the SDK",
    "see Troubleshooting in docs/ipu.md, or attach the bundle of packed-bert ipu-check to a report",
)
# The first kind whose pattern occurs in a message is its kind.
_KINDS = (
    _Kind(
        "host memory",
        r"bad_alloc|stream[ _]memory|host (memory|stream|buffer)|cannot allocate memory",
        "the host is out of memory",
        "free memory on the host, or divide the replicas among hosts with poprun",
    ),
    _TILE_MEMORY,
    _Kind(
        "wrong version",
        r"version mismatch|(another|different|incompatible|unsupported|wrong) \S*\s?version|undefined symbol",
        "versions of the SDK, its driver or the compiled program differ",
        "enable SDK 3.4, and compile again with an empty engine.executable_cache",
    ),
    _Kind(
        "link",
        r"fabric error|connection not established|connection_kill|ipuof|ipu-?link|gw-?link|link[ _](reset|error|down)"
        r"|link training|unreachable",
        "the connection to the IPUs, or between them, is lost",
        "see the links with gc-links and vipu, reset the partition, and start the command again",
    ),
    _Kind(
        "reset needed",
        r"(ipu|partition|full)_reset|recoverable_runtime_error",
        "the IPUs need a reset",
        "reset them with gc-reset, or the partition with vipu reset partition, and start the command again",
    ),
    _Kind(
        "no device",
        r"failed to (acquire|attach)|(could not|unable to|cannot) (find|acquire|attach|get)\b.*(device|ipu)"
        r"|no (available )?(device|ipu)s?\b",
        "no IPUs can be attached",
        "see the partition with gc-info -l and its users with gc-monitor; end the other program or enlarge it",
    ),
    _OTHER,
)


class SdkProblem(NamedTuple):
    """The kind, cause and remedy of an error of the SDK.

    Attributes:
        kind: "host memory", "tile memory", "wrong version", "link", "reset needed", "no device" or "other".
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

    Args:
        error: the error; `recovery_action` of PopTorch's recoverable errors counts as part of the message.

    Returns:
        The problem, of the kind "other" if no pattern occurs in the message.
    """
    message = str(error) or type(error).__name__
    if isinstance(error, MemoryError):
        message = f"std::bad_alloc {message}"
    action = getattr(error, "recovery_action", "")
    searched = f"{message} {action}"
    kind = next(kind for kind in _KINDS if re.search(kind.pattern, searched, re.I))

    text = re.sub(r"^In \S+:\d+: ", "", message.partition("Error raised in:")[0])
    tile = re.search(r"out of memory on tile (\d+)", message, re.I)
    number = int(tile[1]) if tile else None
    return SdkProblem(kind.name, one_line(text, 400), kind.cause, kind.remedy, number)
