"""From an unpacked run to packed ones.

    packed-bert adjust --config unpacked.yml --data PACKED --out configs

A pack holds p sequences on average, so the same number of packs in an update is p times the batch (packedBERT, section
3.3).  Two ways out, one configuration each, with p from the data set's manifest:

    accumulation   the accumulation is divided by p: the same batch of sequences, the same hyperparameters and steps;
                   the learning curve over sequences is that of the unpacked run
    betas          the batch of packs stays, p times as many sequences: beta1 and beta2 to the power p, steps divided
                   by p; the device works with whole batches; the learning curve is comparable, not the same

The learning rate stays in both: the paper found that scaling it with the batch slows convergence (section 4.2).
"""

from __future__ import annotations

import math
import shlex
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple, Optional, Sequence, Tuple

import yaml

from ipu_packed_bert.data.data_sets import check_data, facts
from ipu_packed_bert.settings.pretraining import Config, ConfigError, check_accumulation, config_from_tree, load_config
from ipu_packed_bert.settings.shipped import config_file
from pack_data.cli.command import ArgumentParser, check_folder, typed
from pack_data.reading.files import write_atomically
from pack_data.store.data_set import Manifest, read_manifest

_ADJUSTMENTS = ("accumulation", "betas")


class _Adjusted(NamedTuple):
    """A packed configuration, and the name of its file."""

    name: str
    config: Config

    def text(self, origin: Config, manifest: Manifest) -> str:
        """The file: what it is, then every setting."""
        factor = manifest.packing_factor
        lines = [
            f"# {origin.path} for the packs in {self.config.data.directory}: {factor:.3f} sequences a pack.",
            f"# {_summary(self.config, factor)} (packedBERT, section 3.3); made by packed-bert adjust.",
        ]
        return "\n".join(lines) + "\n\n" + self.config.to_yaml()


def adjust(config: Config, manifest: Manifest, directory: str) -> Tuple[_Adjusted, ...]:
    """The packed configurations of an unpacked one, for the data set of this manifest in `directory`.

    Raises ValueError where the configuration is packed already or does not fit the data set.
    """
    if config.packed:
        raise ConfigError(
            f"{config.path}: data.max_sequences_per_pack is {config.data.max_sequences_per_pack}; adjust starts from "
            "an unpacked configuration (packer none, depth 1)"
        )
    if manifest.schema.max_sequences_per_pack == 1:
        raise ValueError(
            f"{directory}: every pack holds one sequence, there is nothing to adjust; give --data a packed data set"
        )
    known, factor = facts(config, manifest), manifest.packing_factor
    config = config.filled_in(known, directory)
    packed_with = ("packer", "max_sequences_per_pack", "duplication_factor", "whole_word_masking", "seed")
    stated = {name: known[f"data.{name}"] for name in packed_with if f"data.{name}" in known}
    data = replace(config.data, directory=directory, **stated)
    # The block's own data set is an unpacked one; the packs given take its place, with the vocabulary of those packs.
    kept = tuple(
        (key, value)
        for key, value in config.without_ipus
        if not key.startswith("data.") and key not in ("model.vocabulary_size", "optimizer.packing_adjustment")
    )
    stem = config.name.replace("unpacked", "packed") if "unpacked" in config.name else config.name + "_packed"
    adjusted = []
    for adjustment in _ADJUSTMENTS:
        divisor = factor if adjustment == "betas" else 1.0
        packed = replace(
            config,
            data=data,
            optimizer=replace(
                config.optimizer,
                packing_adjustment=adjustment,
                schedule_steps=config.optimizer.schedule_steps and _divided(config.optimizer.schedule_steps, divisor),
            ),
            run=replace(config.run, steps=_divided(config.run.steps, divisor)),
            without_ipus=tuple((key, _divided(value, divisor) if key == "run.steps" else value) for key, value in kept),
        )
        name = f"{stem}_{adjustment}.yml"
        # Read back, so that what is handed out is what a run will load.
        packed = config_from_tree(yaml.safe_load(packed.to_yaml()), name)
        for each in (packed, packed.applied_without_ipus()[0]):
            check_data(each, manifest)
            check_accumulation(each, factor)
        adjusted.append(_Adjusted(name, packed))
    return tuple(adjusted)


def _divided(steps: int, divisor: float) -> int:
    return int(math.ceil(steps / divisor))


def _summary(config: Config, packing_factor: float) -> str:
    """What the adjustment comes to, in one line."""
    optimizer, batch = config.optimizer, config.batch
    beta1, beta2 = config.betas(packing_factor)
    betas = f"betas {optimizer.beta1:g}, {optimizer.beta2:g}"
    accumulation = f"accumulation {batch.gradient_accumulation}"
    if optimizer.packing_adjustment == "accumulation":
        accumulation += f" -> {config.accumulation(packing_factor)}"
    else:
        betas += f" -> {beta1:.4f}, {beta2:.6f}"
    return (
        f"{accumulation}, {betas}, {config.packs_per_update(packing_factor):,} packs or about "
        f"{config.expected_sequences_per_update(packing_factor):,.0f} sequences an update, {config.run.steps:,} steps"
    )


def main(argv: Optional[Sequence[str]] = None) -> int:
    parser = ArgumentParser(prog=typed("adjust"), description=__doc__)
    parser.add_argument("--config", required=True, metavar="FILE", help="the settings of the unpacked run")
    parser.add_argument(
        "--data", required=True, metavar="PACKED", help="a packed data set, as pack_data.build makes it"
    )
    parser.add_argument("--out", type=Path, metavar="DIR", help="write the two files there; default: print them")
    args = parser.parse_args(argv)
    config, manifest = load_config(config_file(args.config)), read_manifest(Path(args.data))
    adjusted = adjust(config, manifest, args.data)
    # Without --out the settings go to stdout as two YAML documents, and what is for the reader is in their comments.
    if args.out is None:
        for each in adjusted:
            print(f"---\n# {each.name}\n{each.text(config, manifest)}")
        return 0
    taken = [each.name for each in adjusted if (args.out / each.name).exists()]
    if taken:
        raise ValueError(f"{args.out / taken[0]}: is there already; remove it or give another --out")
    check_folder("--out", args.out, "what two files are written to")
    args.out.mkdir(parents=True, exist_ok=True)
    print(f"{args.data}: {manifest.packing_factor:.3f} sequences a pack")
    print(f"unpacked       {_summary(config, 1.0)}")
    for adjustment, each in zip(_ADJUSTMENTS, adjusted):
        write_atomically(args.out / each.name, each.text(config, manifest).encode())
        print(f"{adjustment:<14} {_summary(each.config, manifest.packing_factor)}")
        file = shlex.quote(str(args.out / each.name))
        print(f"{'':<14} {typed('pretrain')} --config {file}")
    return 0
