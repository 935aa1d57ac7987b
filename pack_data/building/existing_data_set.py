"""The data set that is already in --out: is_built compares it with the one that a build would make."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any, Dict, Mapping, Sequence

from pack_data.building.inputs import BuildSide
from pack_data.building.stated import stated
from pack_data.reading.words import counted
from pack_data.store.data_set import MANIFEST, PackStore, read_manifest
from pack_data.store.packs import default_predictions
from pack_data.text.special_tokens import STATING_FILES
from pack_data.text.vocabulary import TOKENIZER, VOCABULARY, vocabulary_files

_WAY_OUT = "add --overwrite to replace it, or choose another --out"


def is_built(side: BuildSide, plan: Mapping[str, Any], given_files: Sequence[Path]) -> bool:
    """Return True if the data set of this plan is there and whole. ValueError if another one is in its place.

    plan: "options", "sources" and "given" of the build, as in manifests. given_files: files of the user's that may lie
    in the directory.
    """
    out = side.out
    if not (out / MANIFEST).exists():
        _refuse_files_of_a_data_set(out, given_files)
        return False
    try:
        manifest = read_manifest(out)
    except ValueError:
        raise ValueError(
            f"{out}: holds a {MANIFEST} that is no data set's, or a damaged one; {_WAY_OUT}"
        ) from None

    difference = _difference(side, plan, manifest.made_with)
    if difference:
        raise ValueError(
            f"{out}: holds a data set made {difference} ({counted(manifest.packs, 'pack')}); {_WAY_OUT}"
        )
    if manifest.made_with["options"].get("epoch") != plan["options"].get("epoch"):
        return False  # another pairing of the same sequences
    try:
        PackStore.open(out).close()
    except ValueError:  # damaged: it is built again
        return False
    return True


def _refuse_files_of_a_data_set(out: Path, given_files: Sequence[Path]) -> None:
    """Raise ValueError if a directory without a data set holds files that a build would replace."""
    given = [path for file in given_files for path in vocabulary_files(file)]
    for name in ("recipe.json", VOCABULARY, TOKENIZER, *STATING_FILES):
        path = out / name
        if path.exists() and not any(os.path.samefile(path, file) for file in given):
            raise ValueError(f"{out}: holds a file {name} but no data set; {_WAY_OUT}")


def _difference(side: BuildSide, plan: Mapping[str, Any], made_with: Mapping[str, Any]) -> str:
    """Describe how a data set was made otherwise than planned; "" for the planned one, but for the epoch."""
    if "options" not in made_with or made_with.get("side") != side.name:
        return "in another way"
    if sorted(made_with["sources"]) != sorted(plan["sources"]):
        return "from another corpus"
    if made_with.get("given", {}) != plan["given"]:
        return "from another vocabulary, tokenizer or recipe"
    before = _meant(made_with["options"])
    now = _meant(plan["options"])
    differing = [name for name in sorted({*before, *now}) if before.get(name) != now.get(name)]
    if differing in ([], ["epoch"]):
        return ""
    changes = [f"{name} {before.get(name)} (now {now.get(name)})" for name in differing]
    return f"with {', '.join(changes)}"


def _meant(options: Dict[str, Any]) -> Dict[str, Any]:
    """Return options of a manifest including those it omits, and the number of predictions that None stands for."""
    options = stated(options)
    if options["max_predictions_per_sequence"] is None:
        predictions = default_predictions(
            options["max_sequence_length"], options["masked_lm_probability"]
        )
        options["max_predictions_per_sequence"] = predictions
    return options
