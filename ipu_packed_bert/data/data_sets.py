"""The data set of a configuration: opened or built, checked against the configuration; and its packing factor."""

from __future__ import annotations

import hashlib
import shlex
from dataclasses import replace
from pathlib import Path
from typing import Any, Dict, List, Optional, Sequence, Tuple

import numpy as np

from ipu_packed_bert.data.factors import PackingFactor, checked_factor, planned_factor
from ipu_packed_bert.data.global_batches import MixedStore
from ipu_packed_bert.run_files.vocabulary_identity import Identity
from ipu_packed_bert.settings.config import Config, ConfigError
from ipu_packed_bert.settings.loading import filled_in
from ipu_packed_bert.settings.reader import OVERRIDE
from pack_data.building.held_out import of_one_build, overlap
from pack_data.building.options import stated
from pack_data.packers import PACKERS, packs_at_depth
from pack_data.store.data_set import MANIFEST, Manifest, PackStore, read_manifest
from pack_data.store.packs import BERT, PackSchema
from pack_data.text.corpus import EMBEDDED, relative_name, source_files

# Settings under `data` that are options of a build too, and stand in a manifest.
_BUILT_WITH = tuple(
    "vocabulary_size max_sequence_length max_predictions_per_sequence packer max_sequences_per_pack duplication_factor "
    "whole_word_masking seed json_field".split()
)


def packing_factor(config: Config, manifest: Optional[Manifest], given: Optional[float] = None) -> PackingFactor:
    """As :func:`known_packing_factor`; ValueError where there is none."""
    factor = known_packing_factor(config, manifest, given)
    if factor is None:
        raise ValueError(
            f"{config.path}: no data set in {config.data.directory} yet, and no published packing factor for "
            f"{config.data.max_sequence_length} slots; give --packing-factor, or build the data set with "
            "packed-bert build"
        )
    return factor


def known_packing_factor(
    config: Config, manifest: Optional[Manifest], given: Optional[float] = None
) -> Optional[PackingFactor]:
    """The factor of the data set if there is one, else the one given, else the published one for packs of this length.

    Published is the histogram's, packed as configured, else the paper's. None where none of them exists.
    """
    if given is not None:
        checked_factor(given, config.data.max_sequences_per_pack)
    if manifest is not None:
        return PackingFactor(manifest.packing_factor, f"the data set in {config.data.named}")
    if not config.packed:
        return PackingFactor(1.0, "one sequence in a pack")
    data = config.data
    return planned_factor(data.max_sequence_length, data.packer, data.max_sequences_per_pack, given=given)


def described(config: Config) -> Tuple[Config, Optional[Manifest]]:
    """The configuration with what it leaves out about its data set taken from there, and the manifest of that.

    The manifest is None if nothing has been built yet.  Raises ConfigError where the two contradict each other.
    """
    folder = Path(config.data.directory)
    if not (folder / MANIFEST).exists():
        data, rows = config.data, config.model.vocabulary_size
        if data.vocabulary is None and data.vocabulary_size > rows:
            raise ConfigError(
                f"{config.path}: data.vocabulary_size is {data.vocabulary_size}; must be at most "
                f"model.vocabulary_size, {rows}, where the data set is still to be built with it"
            )
        return config, None
    manifest = read_manifest(folder)
    if config.data.mixed_with:
        manifest = _mixed(config, [manifest, *map(read_manifest, map(Path, config.data.mixed_with))])
    filled = filled_in(config, facts(config, manifest), f"the data set in {folder}")
    _check_data(filled, manifest)
    return filled, manifest


def _mixed(config: Config, manifests: List[Manifest]) -> Manifest:
    """What an epoch of several data sets holds: as many packs as they have together, of each its share.

    ConfigError where they were not built alike.
    """
    data, first = config.data, manifests[0]
    for folder, each in zip(data.folders, manifests):
        for what, same in (
            ("packs of another shape or with other columns", each.schema == first.schema),
            ("another vocabulary", Identity.of_data(each) == Identity.of_data(first)),
        ):
            if not same:
                raise ConfigError(
                    f"{config.path}: data.mixed_with: {folder} has {what} than {data.directory}; build both alike"
                )
    packs = sum(each.packs for each in manifests)
    shares = data.shares or [each.packs for each in manifests]
    times = [packs * share / sum(shares) / max(1, each.packs) for share, each in zip(shares, manifests)]

    def in_all(values: Sequence[Any]) -> Any:
        return np.rint(np.dot(times, values)).astype(np.int64).tolist()

    digests = "".join(f"{each.digest:016x}" for each in manifests)
    return replace(
        first,
        sequences=in_all([each.sequences for each in manifests]),
        packs=packs,
        tokens=in_all([each.tokens for each in manifests]),
        histogram=tuple(in_all([each.histogram for each in manifests])),
        digest=int(hashlib.sha256(digests.encode()).hexdigest()[:16], 16),
        shards=tuple(shard for each in manifests for shard in each.shards),
    )


def facts(config: Config, manifest: Manifest) -> Dict[str, Any]:
    """The settings that a data set speaks about, by full name."""
    schema, made = manifest.schema, _options(manifest)
    depth, packer = schema.max_sequences_per_pack, manifest.algorithm
    found: Dict[str, Any] = {
        "data.max_sequence_length": schema.max_sequence_length,
        "data.max_sequences_per_pack": depth,
        # The optimal packer takes any depth: it stands for a packer that this package does not have.
        "data.packer": packer if packer in PACKERS and packs_at_depth(packer, depth) else "optimal",
        "model.max_position_embeddings": max(schema.max_sequence_length, config.model.max_position_embeddings),
    }
    # 0: a data set from a foreign format, which does not say.
    if manifest.max_predictions_per_sequence:
        found["data.max_predictions_per_sequence"] = manifest.max_predictions_per_sequence
    if manifest.vocabulary_size:
        found["model.vocabulary_size"] = manifest.vocabulary_size
    if made:
        found.update({f"data.{name}": made[name] for name in ("held_out", "whole_word_masking")})
    for name in ("vocabulary_size", "duplication_factor", "seed"):
        if name in made:
            found[f"data.{name}"] = made[name]
    return found


def _options(manifest: Manifest) -> Dict[str, Any]:
    """The options that the data set was built with; none where it was not built by this program."""
    return stated(manifest.made_with["options"]) if "options" in manifest.made_with else {}


def open_or_build(config: Config, *, build: bool = True) -> Tuple[Config, PackStore]:
    """The data set of the configuration, and the configuration as :func:`described` by it.

    If the folder that the configuration file names holds none, it is built there and kept, with its held-out side; one
    line says so.  Raises ValueError where a folder that the user named holds none, and where the data set contradicts
    the configuration, or is missing and ``build`` is false: another process has built it, elsewhere.
    """
    data = config.data
    if described(config)[1] is None:
        if not build:
            raise ValueError(
                f"{data.directory}: no data set here, but where rank 0 runs; share the folder among the machines, or "
                "copy it to each"
            )
        if config.origins.get("data.directory") == OVERRIDE:
            raise ValueError(_no_data_set(config))
        from pack_data.building.command import BuildOptions
        from pack_data.building.command import build as build_data_set

        what = "the embedded corpus" if data.corpus == "embedded" else data.corpus
        print(f"data      {data.directory} is missing: building it from {what}; kept for the next run", flush=True)
        build_data_set(
            BuildOptions(
                data.directory,
                workers=None,
                **{name: getattr(data, name) for name in (*_BUILT_WITH, "corpus", "vocabulary", "held_out")},
            )
        ).close()
    config, manifest = described(config)
    if manifest is not None and data.mixed_with:
        return config, MixedStore(data.folders, data.shares, config.run.seed, manifest)
    return config, PackStore.open(Path(data.directory))


def _no_data_set(config: Config) -> str:
    """The words for a folder without a data set that --data or --set named, which may be mistyped or of texts."""
    folder = Path(config.data.directory)
    line = f"packed-bert build --corpus {shlex.quote(str(folder))} --out DIR, and --data DIR"
    if folder.is_file():
        return f"{folder}: a file; a data set is a folder that packed-bert build made; if it is of text: {line}"
    if folder.is_dir() and any(folder.iterdir()):
        return f"{folder}: holds no data set ({MANIFEST} is missing); if it holds texts, build one of them: {line}"
    texts = {"data.corpus": "TEXTS"} if config.data.corpus == "embedded" else {}
    line = config.with_settings(texts, OVERRIDE).build_line()
    return f"{folder}: no data set there; name a folder that packed-bert build made, or build one: {line}"


def open_evaluation(config: Config, training: Manifest) -> Optional[PackStore]:
    """The data set that the configuration evaluates on, None where it evaluates on none.

    Raises ConfigError where it is missing, does not fit the training data, or holds training documents.
    """
    if not config.run.evaluate_every:
        return None
    folder = config.evaluation_directory
    if folder is None or not Path(folder, MANIFEST).exists():
        if training.made_with.get("documents"):
            way_out = f"build both with documents held out: `{_line_to_build_again(config, training)}`"
        else:
            way_out = (
                f"the sequences in {config.data.directory} have no documents that could be held out: "
                "name a data set in data.evaluation_directory"
            )
        raise ConfigError(
            f"{config.path}: run.evaluate_every is {config.run.evaluate_every}, and there is no data set "
            f"in {folder} to evaluate on; {way_out}; or set run.evaluate_every=0"
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
    """The command that builds a data set again, with documents held out; CORPUS where the text is not known."""
    made = _options(manifest)
    values = {f"data.{name}": made[name] for name in _BUILT_WITH if name in made}
    embedded = [name for name, _ in manifest.made_with.get("sources", ())] == ["embedded"]
    if embedded or config.data.corpus == "embedded":
        values["data.corpus"] = "embedded" if embedded else "CORPUS"
    return config.with_settings(values, "data set").build_line(overwrite=True)


def _not_for_evaluation(config: Config, training: Manifest, evaluation: Manifest) -> List[str]:
    schema, wanted, problems = evaluation.schema, training.schema, []
    if (schema.kind, schema.max_sequence_length) != (wanted.kind, wanted.max_sequence_length):
        problems.append(
            f"holds {schema.kind} packs of {schema.max_sequence_length} slots, the training data "
            f"{wanted.kind} packs of {wanted.max_sequence_length}"
        )
    for found, room, words in (
        (schema.max_sequences_per_pack, wanted.max_sequences_per_pack, "sequences"),
        (schema.max_predictions_per_pack, wanted.max_predictions_per_pack, "masked tokens"),
    ):
        if found > room:
            problems.append(f"has packs of up to {found} {words}, those of the training data have room for {room}")
    if evaluation.vocabulary_size > config.model.vocabulary_size:
        problems.append(
            f"has a vocabulary of {evaluation.vocabulary_size} tokens, "
            f"model.vocabulary_size is {config.model.vocabulary_size}"
        )
    ours, theirs = Identity.of_data(training), Identity.of_data(evaluation)
    if len({ours.sha256, theirs.sha256} - {""}) > 1:
        problems.append(
            "was made with another vocabulary than the training data; give both the same vocab.txt (--vocabulary)"
        )
    elif len({ours.lower_case, theirs.lower_case} - {None}) > 1:
        problems.append(
            f"{'has all text in lower case' if theirs.lower_case else 'keeps capitals'}, unlike the training data; "
            "build both with --keep-case, or neither"
        )
    mixed = config.data.mixed_with is not None
    manifests = [read_manifest(Path(folder)) for folder in config.data.folders] if mixed else [training]
    if config.data.evaluation_directory is None and not of_one_build(manifests[0].digest, evaluation.made_with):
        problems.append(
            f"was not built with the training data in {config.data.directory}; a build may have put both in place just "
            f"now, then start again; else build both with `{_line_to_build_again(config, training)}`"
        )
    if any(overlap(each.made_with, evaluation.made_with) for each in manifests):
        problems.append(
            f"holds documents that the training data in {config.data.named} hold too; "
            f"build both with `{_line_to_build_again(config, training)}`"
        )
    return problems


def _check_data(config: Config, manifest: Manifest) -> None:
    """Raise ConfigError, with every contradiction, where ``config`` does not fit the data set."""
    problems = _contradictions(config, manifest.schema)
    # 0: a data set from a foreign format, which does not say.
    wanted = config.data.max_predictions_per_sequence
    if wanted is not None and manifest.max_predictions_per_sequence not in (0, wanted):
        problems.append(
            f"masks up to {manifest.max_predictions_per_sequence} tokens a sequence, "
            f"data.max_predictions_per_sequence is {wanted}"
        )
    if manifest.vocabulary_size > config.model.vocabulary_size:
        problems.append(
            f"has a vocabulary of {manifest.vocabulary_size} tokens, "
            f"model.vocabulary_size is {config.model.vocabulary_size}"
        )
    _refuse(config, problems)


def check_schema(config: Config, schema: PackSchema) -> None:
    """As :func:`_check_data`, by the shape of the packs alone."""
    problems = _contradictions(config, schema)
    wanted = config.data.max_predictions_per_sequence or 1
    if schema.max_predictions_per_pack < wanted:
        problems.append(
            f"has packs with room for {schema.max_predictions_per_pack} masked tokens, "
            f"data.max_predictions_per_sequence is {wanted}"
        )
    _refuse(config, problems)


def _refuse(config: Config, problems: List[str]) -> None:
    if problems:
        raise ConfigError(
            f"{config.path}: the data set in {config.data.directory} {'; '.join(problems)}; "
            "change the setting, or name another data.directory"
        )


def _contradictions(config: Config, schema: PackSchema) -> List[str]:
    data, problems = config.data, []
    if schema.kind != BERT:
        problems.append(f"holds {schema.kind} packs; pre-training needs {BERT}")
    if schema.max_sequence_length != data.max_sequence_length:
        problems.append(
            f"has packs of {schema.max_sequence_length} slots, data.max_sequence_length is {data.max_sequence_length}"
        )
    if data.max_sequences_per_pack not in (None, schema.max_sequences_per_pack):
        problems.append(
            f"was packed at depth {schema.max_sequences_per_pack}, "
            f"data.max_sequences_per_pack is {data.max_sequences_per_pack}"
        )
    return problems


def built_otherwise(config: Config, manifest: Manifest) -> List[str]:
    """Settings under ``data`` that the data set was not built with, in words; it is used as it is.

    Empty for a data set that does not say how it was built, and for one that the user named: what the file says is of
    another.
    """
    if config.origins.get("data.directory") == OVERRIDE:
        return []
    made, wanted = _options(manifest), config.data
    names = ["packer", "duplication_factor", "whole_word_masking", "seed", "held_out"] + (
        [] if wanted.vocabulary else ["vocabulary_size"]
    )
    return [
        f"{name} {made[name]} (data.{name} is {getattr(wanted, name)})"
        for name in names
        if name in made and made[name] != getattr(wanted, name)
    ]


def of_the_same_corpus(config: Config, manifest: Manifest) -> bool:
    """Whether a build with this configuration would read the files that the data set was made from, by their names."""
    made_from = sorted(name for name, _ in manifest.made_with.get("sources", ()))
    if config.data.corpus == EMBEDDED:
        return made_from == [EMBEDDED]
    try:
        files = source_files(config.data.corpus)
    except (OSError, ValueError):
        return False
    return made_from == sorted(relative_name(path, config.data.corpus) for path in files)
