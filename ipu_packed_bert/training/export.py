"""A run as a Hugging Face folder, and such a folder as a run to begin with."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING, List, NamedTuple, Optional, Tuple

import yaml

from ipu_packed_bert.data.constant_baseline import BESIDE
from ipu_packed_bert.run_files.folder import CHECKPOINTS, CONFIG, ENVIRONMENT, SUMMARY
from ipu_packed_bert.settings.loading import config_from_tree
from ipu_packed_bert.settings.yaml_files import parse_yaml
from pack_data.reading.fields import Fields, read_object, said_of
from pack_data.reading.files import write_atomically

if TYPE_CHECKING:
    from ipu_packed_bert.model.hugging_face import Loaded
    from ipu_packed_bert.run_files.checkpoints import Checkpoint

# torch loads inside the functions, so that a machine without it gets one line.

_PACKED = """ It was trained with packed sequences: several
sequences share a row, and none sees another ([Efficient Sequence Packing](https://arxiv.org/abs/2107.02027))."""
_Facts = List[Tuple[str, str]]
_WAY_OUT = "the file was changed after the run; move it away, and the card leaves out what it says"


class _Exported(NamedTuple):
    """What was written."""

    step: int  # updates made
    note: Optional[str]  # what could not be compared, in one line


def export_run(run: Path, folder: Path, *, vocabulary: Optional[Path] = None) -> _Exported:
    """Write the newest checkpoint of a run of pre-training as a Hugging Face folder, with a model card.

    The vocabulary is the given file, else that of the run's configuration, else the one beside its data set.  Raises
    ValueError where the weights were trained with another one.
    """
    from ipu_packed_bert.model.hugging_face import write_folder
    from ipu_packed_bert.tasks.starting_weights import learnt

    found = learnt(run, vocabulary=vocabulary)
    card = _model_card(run, folder.resolve().name, found.checkpoint)
    with said_of(run):
        weights = found.checkpoint.engine["model"]
        write_folder(
            folder, found.model, weights, found.vocabulary, architecture=found.architecture
        )
    write_atomically(folder / "README.md", card.encode())
    return _Exported(found.checkpoint.step, found.note)


def _model_card(run: Path, name: str, checkpoint: Checkpoint) -> str:
    """Return a README.md for a model hub, which states only what the run has recorded."""
    config = config_from_tree(parse_yaml(checkpoint.config, run), str(run))
    model, data, step = config.model, config.data, checkpoint.step
    tags = ["bert", "fill-mask", "sequence-packing", "ipu_packed_bert"]
    front = {"library_name": "transformers", "pipeline_tag": "fill-mask", "tags": tags}
    row = f"{data.max_sequence_length} slots, packed by `{data.packer}`"
    facts = [("row", row), ("updates", f"{step:,}")]
    facts += _data_facts(run / ENVIRONMENT) + _summary_facts(run / SUMMARY, step)
    table = "\n".join(f"| {what} | {value} |" for what, value in facts)
    how = _PACKED if step and data.packer != "none" else ""
    return f"""---
{yaml.safe_dump(front, sort_keys=False)}---

# {name}

A BERT of {model.num_layers} layers and {model.hidden_size} hidden units.{how}

| | |
| --- | --- |
{table}

## Configuration

```yaml
{yaml.safe_dump(config.as_dict(), sort_keys=False)}```
"""


def _data_facts(path: Path) -> _Facts:
    """From a run's environment.json; none where there is no such file."""
    data = (
        read_object(path, way_out=_WAY_OUT).optional("data", Fields.object)
        if path.is_file()
        else None
    )
    if data is None or "packs" not in data:
        return []
    return [
        ("data set", f"{data.integer('sequences'):,} sequences in {data.integer('packs'):,} rows")
    ]


def _summary_facts(path: Path, step: int) -> _Facts:
    """From a run's summary.json; none where it is missing, or of another state than that after ``step`` updates."""
    summary = read_object(path, way_out=_WAY_OUT) if path.is_file() else None
    if summary is None or summary.integer("steps") != step:
        return []
    facts = [
        (f"{what} trained on", f"{summary.integer(what):,}") for what in ("sequences", "tokens")
    ]
    facts.append(("packing factor", f"{summary.number('packing_factor'):.3f} sequences in a row"))
    held_out, compared = (
        summary.optional(name, Fields.object) for name in ("held_out", "compare_unpacked")
    )
    if held_out and held_out.integer("step") == step:
        for what, name, constant, words in BESIDE:
            form = ".1%" if name.endswith("accuracy") else ".3f"
            score, baseline = (held_out.optional(each, Fields.number) for each in (name, constant))
            if score is not None:
                beside = "" if baseline is None else f" ({words}: {baseline:{form}})"
                facts.append((f"held out: {what}", f"{score:{form}}{beside}"))
    if compared:
        packed, unpacked = (
            compared.number(f"{side}_sequences_per_second") for side in ("packed", "unpacked")
        )
        facts.append(
            ("speed of training", f"{packed:,.1f} sequences/s packed, {unpacked:,.1f} unpacked")
        )
    return facts


def import_folder(folder: Path, run: Path) -> Loaded:
    """Write a Hugging Face folder as a run before its first update; says which heads the folder did not have.

    Those are initialised from `run.seed` of the default configuration.
    """
    import torch

    from ipu_packed_bert.model.hugging_face import load_into, read_folder
    from ipu_packed_bert.model.packed import PackedBertForPreTraining
    from ipu_packed_bert.run_files.checkpoints import Checkpoint, save_checkpoint
    from ipu_packed_bert.run_files.vocabulary_identity import Identity

    if run.exists() and (not run.is_dir() or any(run.iterdir())):
        raise ValueError(f"{run}: exists and is not an empty folder; give another one")
    pretrained = read_folder(folder)
    # What the weights decide and no more: the rest is left to the data set and to the defaults.
    decided = {
        "data": {"vocabulary": str(run / pretrained.vocabulary.file)},
        "model": dataclasses.asdict(pretrained.model),
    }
    config = config_from_tree(decided, str(folder))
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(config.run.seed)
        network = PackedBertForPreTraining(config.model, config.loss)
    loaded = load_into(network, pretrained.weights)
    run.mkdir(parents=True, exist_ok=True)
    write_atomically(run / pretrained.vocabulary.file, pretrained.vocabulary.text)
    write_atomically(run / CONFIG, yaml.safe_dump(decided, sort_keys=False).encode())
    weights, identity = {"model": network.state_dict()}, Identity.of(pretrained.vocabulary)
    imported = Checkpoint(0, weights, {}, config.to_yaml(), *identity)
    save_checkpoint(run / CHECKPOINTS, imported, keep=1)
    return loaded
