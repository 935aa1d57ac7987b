"""The data set that is there already: whether it is the one to be built, and how one is appended to."""

from __future__ import annotations

import os
from dataclasses import fields, replace
from pathlib import Path
from typing import Any, Collection, Dict, List, Mapping, Optional, Sequence, Tuple

import numpy as np

from pack_data.building import sides
from pack_data.building.inputs import BuildSide
from pack_data.building.options import BuildOptions, stated
from pack_data.packers import PACKERS, get_packer
from pack_data.packing.histogram import LengthHistogram
from pack_data.packing.packing import Packing
from pack_data.store.data_set import MANIFEST, PackStore, read_manifest
from pack_data.store.packs import PackSchema, default_predictions
from pack_data.text.vocabulary import TOKENIZER, load_either


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
        raise ValueError(
            f"{out}: holds a data set made from another {what} ({manifest.packs:,} packs); "
            f"{way_out}, or add to it with --append"
        )
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


# ---- appending ------------------------------------------------------------------------------------------------------


def with_former_options(options: BuildOptions, given: Optional[Collection[str]] = None) -> BuildOptions:
    """What is appended is made as the rest was: same vocabulary, lengths, masking, packer, depth and share held out.

    given: the options that the user gave; None: those that are not at their defaults. ValueError where one of them
    contradicts the data set, or where nothing can be appended.
    """
    out = Path(options.out)
    manifest = read_manifest(out)
    if "options" not in manifest.made_with or "recipe.json" not in [entry.file for entry in manifest.files]:
        raise ValueError(
            f"{out}: was not made by packed-bert build, so nothing can be appended; build it anew with --from {out}"
        )
    if manifest.made_with.get("side") == sides.HELD_OUT:
        raise ValueError(f"{out}: is the held-out side of a data set; append to the training side, both grow together")
    kept_files = {name: out / name if (out / name).exists() else None for name in ("vocab.txt", TOKENIZER)}
    if options.synthetic is None is options.source and not any(kept_files.values()):
        raise ValueError(
            f"{out}: keeps no vocabulary, so --corpus cannot be cut into tokens as its sequences were; build the texts "
            "as a data set of their own, with --vocabulary"
        )
    made_with = stated(manifest.made_with["options"])
    algorithm = Packing.load(out / "recipe.json").algorithm
    kept = {
        name: made_with[name]
        for name in (
            "vocabulary_size lower_case max_sequence_length max_predictions_per_sequence max_sequences_per_pack "
            "duplication_factor short_sequence_probability masked_lm_probability whole_word_masking seed epoch "
            "held_out multiple_of"
        ).split()
    }
    kept["packer"] = algorithm if algorithm in PACKERS else made_with["packer"]
    if given is None:
        given = [field.name for field in fields(options) if getattr(options, field.name) != field.default]
    before = {**_meant(manifest.made_with["options"]), "packer": kept["packer"]}
    for name in (*kept, "vocabulary", "tokenizer", "recipe"):
        if name not in given:
            continue
        now = getattr(options, name)
        if name in kept:
            same = now == before[name]
        else:
            same = name != "recipe" and load_either(now, kept["lower_case"]).sha256 == manifest.vocabulary_sha256
        if not same:
            option = "--keep-case" if name == "lower_case" else f"--{name.replace('_', '-')}"
            raise ValueError(
                f"{out}: {option}: {name} is {now}, the data set was made with {before.get(name, 'another')}; "
                f"what is appended is made as the rest was, so leave {option} out, or build a data set of its own"
            )
    return replace(options, **kept, recipe=None, vocabulary=kept_files["vocab.txt"], tokenizer=kept_files[TOKENIZER])


def fitted_schema(wanted: PackSchema, fixed: PackSchema, out: Path) -> PackSchema:
    """`fixed`, if the columns of what is new fit its columns. ValueError otherwise."""
    types = {column.name: np.dtype(column.dtype) for column in fixed.columns}
    for column in wanted.columns:
        if column.name not in types or not np.can_cast(np.dtype(column.dtype), types[column.name]):
            raise ValueError(
                f"{out}: column {column.name} of what is new does not fit the data set's columns; "
                "build one of both together"
            )
    if len(wanted.columns) != len(fixed.columns):
        raise ValueError(
            f"{out}: what is new lacks some of the data set's columns ({', '.join(types)}); build one of both together"
        )
    return fixed


def split_overfull(packing: Packing, masked: np.ndarray, most: int) -> Packing:
    """The packing with those packs taken apart that could hold more than `most` masked tokens.

    masked[l]: the most masked tokens of any sequence of l tokens. ValueError where one sequence alone has more.
    """
    packs: List[Tuple[Tuple[int, ...], int]] = []
    for strategy, repeat in zip(packing.strategies, packing.repeats):
        begun: Tuple[int, ...] = ()
        for length in strategy:
            if begun and int(masked[[*begun, length]].sum()) > most:
                packs.append((begun, repeat))
                begun = ()
            begun += (length,)
        packs.append((begun, repeat))
    if int(masked.max()) > most:
        raise ValueError(
            f"a sequence has {int(masked.max())} masked tokens, the packs of this data set have room for "
            f"{most}; build one of both together"
        )
    return Packing.of(
        packing.algorithm,
        LengthHistogram(packing.placed()),
        packing.max_sequences_per_pack,
        packs,
        solve_seconds=packing.solve_seconds,
        lower_bound=packing.lower_bound,
        lp_bound=packing.lp_bound,
        certificate=packing.certificate,
    )


def merged(former: Packing, new: Packing) -> Packing:
    """Both packings as one. Where the packer proves bounds, the bound is proved for all sequences together."""
    histogram = LengthHistogram(former.placed() + new.placed())
    proof: Dict[str, Any] = {}
    if former.certificate is not None:
        whole = get_packer(former.algorithm)(histogram, max_sequences_per_pack=former.max_sequences_per_pack)
        proof = {"lower_bound": whole.lower_bound, "lp_bound": whole.lp_bound, "certificate": whole.certificate}
    packs = [*zip(former.strategies, former.repeats), *zip(new.strategies, new.repeats)]
    return Packing.of(
        former.algorithm, histogram, former.max_sequences_per_pack, packs, solve_seconds=new.solve_seconds, **proof
    )
