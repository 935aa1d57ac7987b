"""The data set that is already in --out: is_built compares it with the one that a build would make."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any, Dict, Mapping, Sequence

from pack_data.building.inputs import BuildSide
from pack_data.building.options import stated
from pack_data.store.data_set import MANIFEST, PackStore, read_manifest
from pack_data.store.packs import default_predictions
from pack_data.text.vocabulary import TOKENIZER


def is_built(side: BuildSide, plan: Mapping[str, Any], given_files: Sequence[Path]) -> bool:
    """Return True if the data set of this plan is there and whole. ValueError if another one is in its place.

    plan: "options", "sources" and "given" of the build, as in manifests. given_files: files of the user's that may lie
    in the directory.
    """
    out = side.out
    way_out = "add --overwrite to replace it, or choose another --out"
    if not (out / MANIFEST).exists():
        for name in ("recipe.json", "vocab.txt", TOKENIZER):
            if (out / name).exists() and not any(
                os.path.samefile(out / name, path) for path in given_files
            ):
                raise ValueError(f"{out}: holds a file {name} but no data set; {way_out}")
        return False
    try:
        manifest = read_manifest(out)
    except ValueError:
        raise ValueError(
            f"{out}: holds a {MANIFEST} that is no data set's, or a damaged one; {way_out}"
        ) from None
    made_with = manifest.made_with

    def another(difference: str) -> ValueError:
        return ValueError(
            f"{out}: holds a data set made {difference} ({manifest.packs:,} packs); {way_out}"
        )

    if "options" not in made_with or made_with.get("side") != side.name:
        raise another("in another way")
    if sorted(made_with["sources"]) != sorted(plan["sources"]):
        raise another("from another corpus")
    if made_with.get("given", {}) != plan["given"]:
        raise another("from another vocabulary, tokenizer or recipe")
    before = _meant(made_with["options"])
    now = _meant(plan["options"])
    differing = [name for name in sorted({*before, *now}) if before.get(name) != now.get(name)]
    if differing == ["epoch"]:  # another pairing of the same sequences
        return False
    if differing:
        changes = [f"{name} {before.get(name)} (now {now.get(name)})" for name in differing]
        raise another(f"with {', '.join(changes)}")
    try:
        PackStore.open(out).close()
    except ValueError:  # damaged: it is built again
        return False
    return True


def _meant(options: Dict[str, Any]) -> Dict[str, Any]:
    """Return options of a manifest including those it omits, and the number of predictions that None stands for."""
    options = stated(options)
    if options["max_predictions_per_sequence"] is None:
        predictions = default_predictions(
            options["max_sequence_length"], options["masked_lm_probability"]
        )
        options["max_predictions_per_sequence"] = predictions
    return options
