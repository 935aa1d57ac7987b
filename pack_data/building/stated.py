"""The options of a build in the manifest of its data set."""

from __future__ import annotations

from typing import Any, Dict, Mapping

# The manifest omits these options at these values, so that data sets built before the options existed keep their bytes.
OMITTED = {
    "held_out": 0.0,
    "whole_word_masking": False,
    "multiple_of": 1,
    "drop_copies": False,
    "split": "",
}


def stated(options: Mapping[str, Any]) -> Dict[str, Any]:
    """Return the options in a manifest (BuildOptions.deciding), including those that it omits."""
    return {**OMITTED, **options}
