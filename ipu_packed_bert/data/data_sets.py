"""The data set of a configuration: opened or built, checked against the configuration; and its packing factor."""

from __future__ import annotations

import hashlib
import shlex
from dataclasses import replace
from pathlib import Path
from typing import Any, Callable, Dict, List, Optional, Sequence, Tuple

import numpy as np

from ipu_packed_bert.data.factors import PackingFactor, checked_factor, planned_factor
from ipu_packed_bert.data.global_batches import MixedStore
from ipu_packed_bert.run_files.vocabulary_identity import Identity
from ipu_packed_bert.settings.config import Config, ConfigError
from ipu_packed_bert.settings.loading import filled_in
from ipu_packed_bert.settings.reader import DEFAULT, OVERRIDE
from pack_data.building.held_out import of_one_build, overlap
from pack_data.building.stated import stated
from pack_data.packers import PACKERS, packs_at_depth
from pack_data.store.data_set import MANIFEST, Manifest, PackStore, StoredFile, read_manifest
from pack_data.store.packs import BERT, PackSchema
from pack_data.text.corpus_files import corpus_files

# Options of a build that a configuration without them takes from the data set.
_FOLLOWED = (
    "vocabulary_size duplication_factor seed held_out whole_word_masking draw_documents".split()
)


def known_packing_factor(
    config: Config, manifest: Optional[Manifest], given: Optional[float] = None
) -> Optional[PackingFactor]:
    """Return the stated factor, else that of the data set, else the published one for packs of this length.

    The published one is that of the histogram, packed as configured, else the paper's.

    Args:
        config: the configuration.
        manifest: manifest of the data set, if it exists.
        given: value of --packing-factor, if stated.

    Returns:
        The factor and its source, None if none of them exists.
    """
    data = config.data
    if given is not None:
        checked_factor(given, data.depth)
    elif manifest is not None:
        return PackingFactor(manifest.packing_factor, f"the data set in {data.named}")
    if not config.packed:
        return PackingFactor(1.0, "one sequence in a pack")
    return planned_factor(data.max_sequence_length, data.packer, data.depth, given=given)


def described(config: Config) -> Tuple[Config, Optional[Manifest]]:
    """Return the configuration completed by its data set, and the manifest, None if nothing has been built yet.

    Raises:
        ConfigError: if data set and configuration contradict each other.
    """
    data = config.data
    folder = Path(data.directory)
    if not (folder / MANIFEST).exists():
        rows = config.model.vocabulary_size
        if data.vocabulary is None and data.vocabulary_size > rows:
            raise ConfigError(
                f"{config.path}: data.vocabulary_size is {data.vocabulary_size}; must be at most "
                f"model.vocabulary_size, {rows}, to build the data set with it"
            )
        return config, None
    manifest = read_manifest(folder)
    if data.mixed_with:
        others = [read_manifest(Path(other)) for other in data.mixed_with]
        manifest = _mixed(config, [manifest, *others])
    followed = config
    if config.origins.get("data.directory") == OVERRIDE and config.packed:
        # The depth in the file is that of its own data set; an engine is compiled for the depth of the packs.
        keys = ["data.max_sequences_per_pack"]
        if not packs_at_depth(data.packer, manifest.schema.max_sequences_per_pack):
            keys.append("data.packer")
        free = [key for key in keys if config.origins.get(key) != OVERRIDE]
        followed = replace(config, origins={**config.origins, **dict.fromkeys(free, DEFAULT)})
    filled = filled_in(followed, _facts(config, manifest), f"the data set in {folder}")
    _check_data(filled, manifest)
    return filled, manifest


def _mixed(config: Config, manifests: List[Manifest]) -> Manifest:
    """Describe an epoch of several data sets, which has the packs of all, divided by their shares.

    Raises:
        ConfigError: they were built with different options.
    """
    data = config.data
    first = manifests[0]
    shards: List[StoredFile] = []
    for folder, manifest in zip(data.folders, manifests):
        difference = ""
        if manifest.schema != first.schema:
            difference = "packs of another shape or with other columns"
        elif Identity.of_data(manifest) != Identity.of_data(first):
            difference = "another vocabulary"
        if difference:
            raise ConfigError(
                f"{config.path}: data.mixed_with: {folder} has {difference} than {data.directory}; build both alike, "
                "with the same --max-sequences-per-pack"
            )
        shards += manifest.shards

    sizes = [manifest.packs for manifest in manifests]
    packs = sum(sizes)
    shares = data.shares or sizes
    passes = []
    for share, size in zip(shares, sizes):
        passes.append(packs * share / sum(shares) / max(1, size))

    def total(values: Sequence[Any]) -> Any:
        return np.rint(np.dot(passes, values)).astype(np.int64).tolist()

    digests = "".join(f"{manifest.digest:016x}" for manifest in manifests)
    return replace(
        first,
        sequences=total([manifest.sequences for manifest in manifests]),
        packs=packs,
        tokens=total([manifest.tokens for manifest in manifests]),
        histogram=tuple(total([manifest.histogram for manifest in manifests])),
        digest=int(hashlib.sha256(digests.encode()).hexdigest()[:16], 16),
        shards=tuple(shards),
    )


def _facts(config: Config, manifest: Manifest) -> Dict[str, Any]:
    """Return the settings that a data set determines, by full name."""
    schema = manifest.schema
    slots = schema.max_sequence_length
    depth = schema.max_sequences_per_pack
    packer = manifest.algorithm
    if packer not in PACKERS or not packs_at_depth(packer, depth):
        # Supports any depth; stands for a packer that this package does not have.
        packer = "optimal"
    settings: Dict[str, Any] = {
        "data.max_sequence_length": slots,
        "data.max_sequences_per_pack": depth,
        "data.packer": packer,
        "model.max_position_embeddings": max(slots, config.model.max_position_embeddings),
    }
    # These are 0 if the data set was converted from a format that does not have them.
    if manifest.max_predictions_per_sequence:
        settings["data.max_predictions_per_sequence"] = manifest.max_predictions_per_sequence
    if manifest.vocabulary_size:
        settings["model.vocabulary_size"] = manifest.vocabulary_size

    for name, value in _options(manifest).items():
        if name in _FOLLOWED:
            settings[f"data.{name}"] = value
    return settings


def _options(manifest: Manifest) -> Dict[str, Any]:
    """Return the options that the data set was built with; none if another program built it."""
    return stated(manifest.made_with["options"]) if "options" in manifest.made_with else {}


def open_packs(
    config: Config, build: Optional[Callable[[Config], Any]] = None
) -> Tuple[Config, PackStore]:
    """Open the data set of a configuration, or have it built if its directory in the configuration file has none.

    Args:
        config: the configuration.
        build: builds the data set of a configuration; None if another process builds a missing one.

    Returns:
        The configuration, completed by the data set as in :func:`described`, and the data set.

    Raises:
        ValueError: the data set contradicts the configuration, or is missing and either the user named its directory or
            ``build`` is None.
    """
    data = config.data
    if described(config)[1] is None:
        if build is None:
            raise ValueError(
                f"{data.directory}: no data set on this machine, only on the machine of rank 0; share the directory, or"
                " copy it to each machine"
            )
        refuse_missing(config)
        build(config)
    config, manifest = described(config)
    if manifest is not None and data.mixed_with:
        return config, MixedStore(data.folders, data.shares, config.run.seed, manifest)
    return config, PackStore.open(Path(data.directory))


def refuse_missing(config: Config, builds_missing: bool = True) -> None:
    """Raise ValueError if there is no data set, and --data or --set named the directory or the caller builds none."""
    is_named = config.origins.get("data.directory") == OVERRIDE
    if (is_named or not builds_missing) and not Path(config.data.directory, MANIFEST).exists():
        raise ValueError(_no_data_set(config))


def _no_data_set(config: Config) -> str:
    """Describe why a directory from --data or --set has no data set: it is mistyped, or contains texts."""
    directory = Path(config.data.directory)
    line = (
        f"packed-bert build --corpus {shlex.quote(str(directory))} --out DIR, and pass --data DIR"
    )
    if directory.is_file():
        return f"{directory}: a file; a data set is a directory written by packed-bert build; if it is text: {line}"
    if directory.is_dir() and any(directory.iterdir()):
        return f"{directory}: no data set ({MANIFEST} is missing); if it holds texts, build a data set: {line}"
    texts = {"data.corpus": "TEXTS"} if config.data.corpus == "embedded" else {}
    line = config.with_settings(texts, OVERRIDE).build_line()
    return f"{directory}: no data set there; pass a directory written by packed-bert build, or build one: {line}"


def open_evaluation(config: Config, training: Manifest) -> Optional[PackStore]:
    """Open the held-out data set of a configuration; return None if the run does not evaluate.

    Args:
        config: the configuration.
        training: manifest of the training data.

    Raises:
        ConfigError: the data set is missing, does not fit the training data, or contains training documents.
    """
    if not config.run.evaluate_every:
        return None
    folder = config.evaluation_directory
    if folder is None or not Path(folder, MANIFEST).exists():
        if training.made_with.get("documents"):
            way_out = (
                f"build both with documents held out: `{_line_to_build_again(config, training)}`"
            )
        else:
            way_out = (
                f"the sequences in {config.data.directory} have no documents that could be held out: "
                "name a data set in data.evaluation_directory"
            )
        raise ConfigError(
            f"{config.path}: run.evaluate_every is {config.run.evaluate_every}, but {folder} has no data set to"
            f" evaluate on; {way_out}; or set run.evaluate_every=0"
        )
    store = PackStore.open(Path(folder))
    problems = _not_for_evaluation(config, training, store.manifest)
    if problems:
        store.close()
        raise ConfigError(
            f"{config.path}: the data set in {folder} {'; '.join(problems)}; or name another data.evaluation_directory"
        )
    return store


def _line_to_build_again(config: Config, manifest: Manifest) -> str:
    """Return the command that builds a data set again with held-out documents; CORPUS stands for unknown texts."""
    options = _options(manifest)
    names = options.keys() & config.data.build_options.keys() - {"held_out"}
    values = {f"data.{name}": options[name] for name in names}
    embedded = of_embedded_corpus(manifest)
    if embedded or config.data.corpus == "embedded":
        values["data.corpus"] = "embedded" if embedded else "CORPUS"
    return config.with_settings(values, "data set").build_line(overwrite=True)


def _not_for_evaluation(config: Config, training: Manifest, evaluation: Manifest) -> List[str]:
    """Describe why a held-out data set does not fit the training data."""
    data = config.data
    schema = evaluation.schema
    wanted = training.schema
    problems = []
    if (schema.kind, schema.max_sequence_length) != (wanted.kind, wanted.max_sequence_length):
        problems.append(
            f"has {schema.kind} packs of {schema.max_sequence_length} slots, but the training data have "
            f"{wanted.kind} packs of {wanted.max_sequence_length}"
        )
    for depth, most, noun in (
        (schema.max_sequences_per_pack, wanted.max_sequences_per_pack, "sequences"),
        (schema.max_predictions_per_pack, wanted.max_predictions_per_pack, "masked tokens"),
    ):
        if depth > most:
            problems.append(
                f"has packs of up to {depth} {noun}, but packs of the training data have room for {most}"
            )
    problems += _vocabulary_problems(config, evaluation)

    identity = Identity.of_data(evaluation)
    expected = Identity.of_data(training)
    if len({expected.sha256, identity.sha256} - {""}) > 1:
        problems.append(
            "was built with another vocabulary than the training data; build both with one vocab.txt (--vocabulary)"
        )
    elif len({expected.lower_case, identity.lower_case} - {None}) > 1:
        casing = "has lower-case text" if identity.lower_case else "keeps capitals"
        problems.append(
            f"{casing}, unlike the training data; build both with --keep-case, or neither"
        )

    manifests = [training]
    if data.mixed_with is not None:
        manifests = [read_manifest(Path(folder)) for folder in data.folders]
    is_default = data.evaluation_directory is None
    if is_default and not of_one_build(manifests[0].digest, evaluation.made_with):
        problems.append(
            f"was not built with the training data in {data.directory}; if a build has just replaced them, start again;"
            f" otherwise build both with `{_line_to_build_again(config, training)}`"
        )
    if any(overlap(manifest.made_with, evaluation.made_with) for manifest in manifests):
        problems.append(
            f"has documents of the training data in {data.named}; build both with "
            f"`{_line_to_build_again(config, training)}`"
        )
    return problems


def _vocabulary_problems(config: Config, manifest: Manifest) -> List[str]:
    rows = config.model.vocabulary_size
    if manifest.vocabulary_size <= rows:
        return []
    return [
        f"has a vocabulary of {manifest.vocabulary_size} tokens, but model.vocabulary_size is {rows}"
    ]


def _check_data(config: Config, manifest: Manifest) -> None:
    """Raise ConfigError, with every contradiction, if ``config`` does not fit the data set."""
    problems = _contradictions(config, manifest.schema)
    # 0 if the data set was converted from a format that does not have it.
    most = manifest.max_predictions_per_sequence
    wanted = config.data.max_predictions_per_sequence
    if wanted is not None and most not in (0, wanted):
        problems.append(
            f"masks up to {most} tokens per sequence, but data.max_predictions_per_sequence is {wanted}"
        )
    _refuse(config, problems + _vocabulary_problems(config, manifest))


def check_schema(config: Config, schema: PackSchema) -> None:
    """Raise ConfigError if ``config`` does not fit the shape of the packs."""
    _refuse(config, _contradictions(config, schema))


def _refuse(config: Config, problems: List[str]) -> None:
    if problems:
        raise ConfigError(
            f"{config.path}: the data set in {config.data.directory} {'; '.join(problems)}; "
            "change the setting with --set, or name another data.directory"
        )


def _contradictions(config: Config, schema: PackSchema) -> List[str]:
    data = config.data
    problems: List[str] = []
    if schema.kind != BERT:
        problems.append(f"has {schema.kind} packs, but pre-training needs {BERT}")
    if schema.max_sequence_length != data.max_sequence_length:
        problems.append(
            f"has packs of {schema.max_sequence_length} slots, but data.max_sequence_length is"
            f" {data.max_sequence_length}"
        )
    if data.depth not in (None, schema.max_sequences_per_pack):
        problems.append(
            f"was packed at depth {schema.max_sequences_per_pack}, but data.max_sequences_per_pack is {data.depth}"
        )
    wanted = data.max_predictions_per_sequence or 1
    if schema.max_predictions_per_pack < wanted:
        problems.append(
            f"has packs with room for {schema.max_predictions_per_pack} masked tokens, but "
            f"data.max_predictions_per_sequence is {wanted}"
        )
    return problems


def built_otherwise(config: Config, manifest: Manifest) -> List[str]:
    """Describe the settings under ``data`` that differ from the options of the build; the data set is used unchanged.

    Empty if the options are unknown, or if the user named the data set, because the settings of the file then describe
    another one.
    """
    if config.origins.get("data.directory") == OVERRIDE:
        return []
    options = _options(manifest)
    data = config.data
    names = "packer duplication_factor whole_word_masking draw_documents seed held_out".split()
    if not data.vocabulary:
        names.append("vocabulary_size")
    differences = []
    for name in names:
        wanted = getattr(data, name)
        if name in options and options[name] != wanted:
            differences.append(f"{name} {options[name]} (data.{name} is {wanted})")
    return differences


def of_embedded_corpus(manifest: Manifest) -> bool:
    """Return True if a data set was built from the embedded corpus."""
    return _sources(manifest) == ["embedded"]


def of_the_same_corpus(config: Config, manifest: Manifest) -> bool:
    """Return True if a build with this configuration would read files of the names that the data set was built from."""
    try:
        files = corpus_files(config.data.corpus)
    except (OSError, ValueError):
        return False
    return _sources(manifest) == sorted(files.names)


def _sources(manifest: Manifest) -> List[str]:
    return sorted(name for name, _ in manifest.made_with.get("sources", ()))
