"""The data set that is already in --out: whether it is the one that a build would make."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any, Dict, Mapping, Sequence

from pack_data.building.inputs import BuildSide
from pack_data.building.options import stated
from pack_data.store.data_set import MANIFEST, PackStore, read_manifest
from pack_data.store.packs import default_predictions
from pack_data.text.vocabulary import TOKENIZER


def is_built(side: BuildSide, plan: Mapping[str, Any], own_files: Sequence[Path]) -> bool:
    """Whether the data set of this plan is there and whole. ValueError where another one is in its place.

    plan: "options", "sources" and "given" of the build, as in manifests. own_files: files of the user's that may lie in
    the folder.
    """
    out, way_out = side.out, "add --overwrite to replace it, or choose another --out"
    if not (out / MANIFEST).exists():
        for name in ("recipe.json", "vocab.txt", TOKENIZER):
            if (out / name).exists() and not any(os.path.samefile(out / name, path) for path in own_files):
                raise ValueError(
                    f"{out}: holds a file {name} but no data set; add --overwrite to replace the file, "
                    "or choose another --out"
                )
        return False
    try:
        manifest = read_manifest(out)
    except ValueError:
        raise ValueError(f"{out}: holds a {MANIFEST} that is no data set's, or a damaged one; {way_out}") from None
    made = manifest.made_with
    if "options" not in made or made.get("side") != side.name:
        raise ValueError(f"{out}: holds a data set that was made in another way ({manifest.packs:,} packs); {way_out}")
    same_files = sorted(made["sources"]) == sorted(plan["sources"])
    if not same_files or made.get("given", {}) != plan["given"]:
        what = "vocabulary, tokenizer or recipe" if same_files else "corpus"
        raise ValueError(f"{out}: holds a data set made from another {what} ({manifest.packs:,} packs); {way_out}")
    before, now = _meant(made["options"]), _meant(plan["options"])
    others = [name for name in sorted({*before, *now}) if before.get(name) != now.get(name)]
    if others == ["epoch"]:  # another pairing of the same sequences
        return False
    if others:
        changes = ", ".join(f"{name} {before.get(name)} (now {now.get(name)})" for name in others)
        raise ValueError(f"{out}: holds a data set made with {changes}; {way_out}")
    try:
        PackStore.open(out).close()
    except ValueError:  # damaged: it is built again
        return False
    return True


def _meant(options: Dict[str, Any]) -> Dict[str, Any]:
    """Options of a manifest with what it leaves out, and the number of predictions that None stands for."""
    options = stated(options)
    if options["max_predictions_per_sequence"] is not None:
        return options
    predictions = default_predictions(options["max_sequence_length"], options["masked_lm_probability"])
    return {**options, "max_predictions_per_sequence": predictions}
