"""Conversion of a run to a Hugging Face directory and back."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING, List, NamedTuple, Optional, Tuple

import yaml

from ipu_packed_bert.data.constant_baseline import BESIDE
from ipu_packed_bert.run_files.folder import CHECKPOINTS, CONFIG, ENVIRONMENT, SUMMARY
from ipu_packed_bert.settings.config import BLOCK
from ipu_packed_bert.settings.loading import config_from_tree
from ipu_packed_bert.settings.yaml_files import parse_yaml
from pack_data.display.facts import number, quantity_with_unit, with_unit
from pack_data.reading.durable import check_new_folder, write_atomically
from pack_data.reading.fields import Fields, read_object, said_of
from pack_data.reading.words import counted
from pack_data.store.quantities import quantity_of

if TYPE_CHECKING:
    from ipu_packed_bert.model.hugging_face import Loaded
    from ipu_packed_bert.tasks.starting_weights import Learnt

# torch is imported inside the functions, so that a machine without it gets an error of one line.

_PACKED = """ It was trained with packed sequences: several
sequences share a row and do not attend to each other ([Efficient Sequence
Packing](https://arxiv.org/abs/2107.02027))."""
_Facts = List[Tuple[str, str]]
# Of an imported model, as in configs/packed_host.yml.
_BATCH_WITHOUT_IPUS = {"micro_batch": "auto", "gradient_accumulation": 16}
_WAY_OUT = "the file was changed after the run; remove it to leave its facts out of the model card"


class _Exported(NamedTuple):
    """Result of an export."""

    step: int  # updates made
    note: Optional[str]  # which parts of the vocabulary could not be compared, one line


def export_run(run: Path, folder: Path, *, vocabulary: Optional[Path] = None) -> _Exported:
    """Write the newest checkpoint of a pre-training run as a Hugging Face directory with a model card.

    Args:
        run: directory of the run.
        folder: directory to write.
        vocabulary: vocabulary file; by default that of the run's configuration, or else of its data set.

    Returns:
        The number of updates, and a note if the vocabulary could not be compared.

    Raises:
        ValueError: the run has no checkpoint, or was trained with another vocabulary.
    """
    check_new_folder(folder)
    from ipu_packed_bert.model.hugging_face import write_folder
    from ipu_packed_bert.tasks.starting_weights import learnt

    weights = learnt(run, vocabulary=vocabulary)
    checkpoint = weights.checkpoint
    card = _model_card(run, folder.resolve().name, weights)
    with said_of(run):
        write_folder(
            folder,
            weights.model,
            checkpoint.engine["model"],
            weights.vocabulary,
            architecture=weights.architecture,
            trained_length=weights.trained_length,
        )
    write_atomically(folder / "README.md", card.encode())
    return _Exported(checkpoint.step, weights.note)


# Settings of a build that a run begins if its data set is missing. A data set that was there may have been built with
# others, so that they would be false in a model card.
_BUILD_OPTIONS = (
    "corpus",
    "json_field",
    "vocabulary",
    "vocabulary_size",
    "duplication_factor",
    "whole_word_masking",
    "draw_documents",
    "held_out",
)


def _model_card(run: Path, title: str, weights: Learnt) -> str:
    """Return a README.md for a model hub, with facts that the run has recorded."""
    checkpoint = weights.checkpoint
    config = config_from_tree(parse_yaml(checkpoint.config, run), str(run))
    model = config.model
    data = config.data
    step = checkpoint.step
    metadata = {
        "library_name": "transformers",
        "pipeline_tag": "fill-mask",
        "tags": ["bert", "fill-mask", "sequence-packing", "ipu_packed_bert"],
    }
    row = f"{data.max_sequence_length:,} slots, packed by `{data.packer}`"
    facts = [("row", row), ("updates", f"{step:,}")]
    if weights.trained_length < model.max_position_embeddings:
        untrained = f"{weights.trained_length:,} to {model.max_position_embeddings - 1:,} were not trained in this run"
        facts.append(("positions", f"0 to {weights.trained_length - 1:,}; {untrained}"))
    facts += _data_facts(run / ENVIRONMENT)
    facts += _summary_facts(run / SUMMARY, step)
    table = "\n".join(f"| {fact} | {value} |" for fact, value in facts)
    packed = _PACKED if step and data.packer != "none" else ""
    settings = config.as_dict()
    for option in _BUILD_OPTIONS:
        settings["data"].pop(option, None)
    return f"""---
{yaml.safe_dump(metadata, sort_keys=False)}---

# {title}

A BERT of {model.num_layers} layers and {model.hidden_size} hidden units.{packed}

| | |
| --- | --- |
{table}

## Configuration

```yaml
{yaml.safe_dump(settings, sort_keys=False)}```
"""


def _data_facts(path: Path) -> _Facts:
    """Return facts of a run's environment.json; none if there is no such file."""
    if not path.is_file():
        return []
    data = read_object(path, way_out=_WAY_OUT).optional("data", Fields.object)
    if data is None or "packs" not in data:
        return []
    sequences = data.integer("sequences")
    return [
        ("data set", f"{counted(sequences, 'sequence')} in {counted(data.integer('packs'), 'row')}")
    ]


def _summary_facts(path: Path, step: int) -> _Facts:
    """Return facts of a run's summary.json; none if it is missing or was not written after update ``step``."""
    if not path.is_file():
        return []
    summary = read_object(path, way_out=_WAY_OUT)
    if summary.integer("steps") != step:
        return []
    factor = summary.number("packing_factor")
    facts = [
        ("sequences trained on", f"{summary.integer('sequences'):,}"),
        ("tokens trained on", f"{summary.integer('tokens'):,}"),
        (quantity_of("packing_factor").name, quantity_with_unit("packing_factor", factor)),
    ]
    speed = summary.optional("sequences_per_second", Fields.number)
    if speed is not None:
        facts.append(("speed of training", quantity_with_unit("sequences_per_second", speed)))

    held_out = summary.optional("held_out", Fields.object)
    if held_out and held_out.integer("step") == step:
        for label, name, constant_name, constant_label in BESIDE:
            unit = "share" if name.endswith("accuracy") else "nats"
            score = held_out.optional(name, Fields.number)
            baseline = held_out.optional(constant_name, Fields.number)
            if score is None:
                continue
            value = number(score, unit)
            if baseline is not None:
                value += f" ({constant_label}: {number(baseline, unit)})"
            facts.append((f"held out: {label}", value))

    compared = summary.optional("compare_unpacked", Fields.object)
    if compared:
        packed = compared.number("packed_sequences_per_second")
        unpacked = compared.number("unpacked_sequences_per_second")
        rate = with_unit(packed, "sequences/s")
        speeds = f"{rate} packed, {number(unpacked, 'sequences/s')} unpacked"
        facts.append(("comparison of the same updates", speeds))
    return facts


def import_folder(folder: Path, run: Path) -> Loaded:
    """Convert a Hugging Face directory to a run before its first update.

    Args:
        folder: the Hugging Face directory.
        run: directory of the run, missing or empty.

    Returns:
        Which weights were loaded. Missing heads are initialised from the default of `run.seed`.

    Raises:
        ValueError: the directory is not a BERT, or ``run`` is not empty.
    """
    check_new_folder(run)
    import torch

    from ipu_packed_bert.model.hugging_face import load_into, read_folder
    from ipu_packed_bert.model.packed import PackedBertForPreTraining
    from ipu_packed_bert.run_files.checkpoints import Checkpoint, save_checkpoint
    from ipu_packed_bert.run_files.vocabulary_identity import Identity

    pretrained = read_folder(folder)
    vocabulary = pretrained.vocabulary
    # Only settings that the weights determine; the data set and the defaults decide the others. The default batch, that
    # of an IPU Pod, is too large for a CPU.
    tree = {
        "data": {"vocabulary": str(run / vocabulary.file)},
        "model": dataclasses.asdict(pretrained.model),
        BLOCK: {"batch": _BATCH_WITHOUT_IPUS},
    }
    config = config_from_tree(tree, str(folder))
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(config.run.seed)
        network = PackedBertForPreTraining(config.model, config.loss)
    loaded = load_into(network, pretrained.weights)

    run.mkdir(parents=True, exist_ok=True)
    write_atomically(run / vocabulary.file, vocabulary.text)
    write_atomically(run / CONFIG, yaml.safe_dump(tree, sort_keys=False).encode())
    weights = {"model": network.state_dict()}
    checkpoint = Checkpoint(0, weights, {}, config.to_yaml(), *Identity.of(vocabulary))
    save_checkpoint(run / CHECKPOINTS, checkpoint, keep=1)
    return loaded
