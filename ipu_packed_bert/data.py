"""The data set of a configuration: opened, built if it is missing, held against the configuration; and its packing factor."""
from __future__ import annotations

import sys
from functools import lru_cache
from pathlib import Path
from typing import List, NamedTuple, Optional

from ipu_packed_bert.config import Config, ConfigError
from pack_data.histogram import LengthHistogram
from pack_data.packers import get_packer
from pack_data.packs import BERT
from pack_data.store import MANIFEST, Manifest, PackStore, read_manifest

# The published histogram for a pack of this many slots, by which a run is planned before its data set exists.
_PUBLISHED = {512: "wikipedia_512", 384: "squad_1_1_384"}


class PackingFactor(NamedTuple):
    """Mean sequences per pack, and where the figure comes from."""

    value: float
    source: str


def packing_factor(config: Config, manifest: Optional[Manifest], given: Optional[float] = None) -> PackingFactor:
    """The factor of the data set if there is one, else the one given, else that of the published histogram of this length.

    Raises ValueError where none of them exists.
    """
    if manifest is not None:
        return PackingFactor(manifest.packing_factor, "the data set in {}".format(config.data.directory))
    if not config.packed:
        return PackingFactor(1.0, "one sequence in a pack")
    if given is not None:
        return PackingFactor(given, "--packing-factor")
    name = _PUBLISHED.get(config.data.max_sequence_length)
    if name is None:
        raise ValueError(
            "{}: no data set in {} yet, and no published histogram for {} slots; give --packing-factor, or build the data "
            "set with python -m pack_data.build".format(config.path, config.data.directory, config.data.max_sequence_length))
    factor = _published_factor(name, config.data.packer, config.data.max_sequences_per_pack)
    return PackingFactor(factor, "the published histogram {}, packed by {}".format(name, config.data.packer))


@lru_cache(None)
def _published_factor(name: str, packer: str, depth: Optional[int]) -> float:
    print("packing the published histogram {} with {} for its packing factor; --packing-factor saves the seconds".format(
        name, packer), file=sys.stderr, flush=True)
    return get_packer(packer)(LengthHistogram.published(name), max_sequences_per_pack=depth).packing_factor


def manifest_if_there(config: Config) -> Optional[Manifest]:
    """The manifest of the data set, checked against the configuration; None if nothing has been built yet."""
    folder = Path(config.data.directory)
    if not (folder / MANIFEST).exists():
        return None
    manifest = read_manifest(folder)
    check_data(config, manifest)
    return manifest


def open_or_build(config: Config, *, progress: Optional[bool] = None) -> PackStore:
    """The data set of the configuration; if its folder holds none, it is built there and kept.

    Says in one line that it builds.  Raises ValueError where the data set contradicts the configuration.
    """
    data = config.data
    if manifest_if_there(config) is None:
        from pack_data.build import BuildOptions, build

        what = "the embedded corpus" if data.corpus == "embedded" else data.corpus
        print("data      {} is missing: building it from {}; kept for the next run".format(data.directory, what), flush=True)
        build(BuildOptions(
            corpus=data.corpus, out=data.directory, vocabulary=data.vocabulary, vocabulary_size=data.vocabulary_size,
            max_sequence_length=data.max_sequence_length, max_predictions_per_sequence=data.max_predictions_per_sequence,
            packer=data.packer, max_sequences_per_pack=data.max_sequences_per_pack,
            duplication_factor=data.duplication_factor, seed=data.seed, json_field=data.json_field), progress)
        manifest_if_there(config)
    return PackStore.open(Path(data.directory))


def check_data(config: Config, manifest: Manifest) -> None:
    """Raise ConfigError, with every contradiction, where the model or the batch of ``config`` does not fit the data set."""
    data, schema = config.data, manifest.schema
    problems: List[str] = []
    if schema.kind != BERT:
        problems.append("holds {} packs; pre-training needs {}".format(schema.kind, BERT))
    if schema.max_sequence_length != data.max_sequence_length:
        problems.append("has packs of {} slots, data.max_sequence_length is {}".format(
            schema.max_sequence_length, data.max_sequence_length))
    if data.max_sequences_per_pack not in (None, schema.max_sequences_per_pack):
        problems.append("was packed at depth {}, data.max_sequences_per_pack is {}".format(
            schema.max_sequences_per_pack, data.max_sequences_per_pack))
    # 0: a data set from a foreign format, which does not say.
    if data.max_predictions_per_sequence is not None and manifest.max_predictions_per_sequence not in (
            0, data.max_predictions_per_sequence):
        problems.append("masks up to {} tokens a sequence, data.max_predictions_per_sequence is {}".format(
            manifest.max_predictions_per_sequence, data.max_predictions_per_sequence))
    if manifest.vocabulary_size > config.model.vocabulary_size:
        problems.append("has a vocabulary of {} tokens, model.vocabulary_size is {}".format(
            manifest.vocabulary_size, config.model.vocabulary_size))
    if problems:
        raise ConfigError("{}: the data set in {} {}; change the setting, or name another data.directory".format(
            config.path, data.directory, "; ".join(problems)))


def built_otherwise(config: Config, manifest: Manifest) -> List[str]:
    """Settings under ``data`` that the data set was not built with, in words; it is used as it is.

    Empty for a data set that does not say how it was built.
    """
    made, wanted = manifest.made_with.get("options", {}), config.data
    names = ["packer", "duplication_factor", "seed"] + ([] if wanted.vocabulary else ["vocabulary_size"])
    return ["{} {} (data.{} is {})".format(name, made[name], name, getattr(wanted, name))
            for name in names if name in made and made[name] != getattr(wanted, name)]
