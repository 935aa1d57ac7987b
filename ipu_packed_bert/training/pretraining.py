"""A run of pre-training: it learns from a data set of packs, which is built where there is none."""

from __future__ import annotations

import shlex
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Dict, Mapping, Optional, Sequence

from ipu_packed_bert.data.constant_baseline import unigram_baseline
from ipu_packed_bert.data.data_sets import (
    built_otherwise,
    of_the_same_corpus,
    open_evaluation,
    open_or_build,
    packing_factor,
)
from ipu_packed_bert.data.factors import PackingFactor
from ipu_packed_bert.data.global_batches import GlobalBatches, StoredPacks
from ipu_packed_bert.engine import EngineChoice
from ipu_packed_bert.run_files.folder import CONFIG
from ipu_packed_bert.run_files.vocabulary_identity import Identity, agree
from ipu_packed_bert.settings.allowed_changes import SIZES, stated_differences
from ipu_packed_bert.settings.pretraining import Config, check_accumulation
from ipu_packed_bert.settings.reader import shown
from ipu_packed_bert.settings.schema import check_on_ipus
from ipu_packed_bert.settings.shipped import for_one_gpu
from ipu_packed_bert.tasks.pretraining import Pretraining
from ipu_packed_bert.training.run import Beginning, Begun, Prepared, engine_and_batches
from ipu_packed_bert.training.run_folder import data_of
from pack_data.cli.command import typed
from pack_data.store.data_set import Manifest, PackStore

# Of the sizes, those of the network alone; the data set may decide the others.
_NETWORK = sorted(SIZES - {"model.vocabulary_size", "model.max_position_embeddings"})


@dataclass(frozen=True)
class PacksRun(Prepared[Config]):
    """A run that learns from a data set of packs."""

    store: PackStore
    evaluation: Optional[PackStore]  # held-out packs
    factor: PackingFactor

    unit = "step"
    simulated = True

    @classmethod
    def _on_this_machine(cls, config: Config, begun: Begun) -> Config:
        args = begun.args
        if begun.begin.checkpoint:  # what is left out without IPUs was decided when the run began
            config = replace(config, without_ipus=())
        return for_this_machine(config, begun.choice, whole=args.whole)

    @classmethod
    def _nothing_left(cls, config: Config, begin: Beginning) -> Optional[str]:
        if not begin.checkpoint or begin.step < config.run.steps:
            return None
        go_on = _how_to_go_on(begin.folder, config, begin.step)
        return f"{begin.folder} has made its {begin.step:,} updates already; to continue: {go_on}"

    @classmethod
    def make(cls, config: Config, begun: Begun) -> PacksRun:
        """The configuration is completed by the data set."""
        args, processes, begin, choice, opened = begun
        refuse_other_sizes(begin, config, _NETWORK)
        with processes.first_alone():
            config, store = open_or_build(config, build=processes.rank == 0)
        opened.enter_context(store)
        evaluation = open_evaluation(config, store.manifest)
        if evaluation:
            opened.enter_context(evaluation)
        vocabulary = Identity.of_data(store.manifest)
        weights = begin.checkpoint or begin.weights
        if weights:
            vocabulary, note = agree(
                weights.identity, vocabulary, weights_of=begin.folder, data_of=config.data.directory
            )
            if note:
                print(f"note      {note}")
        refuse_other_sizes(begin, config, sorted(SIZES))
        factor = packing_factor(config, store.manifest)
        if choice.kind == "ipu_model":
            config = config.for_simulation(factor.value)
        config = config.with_schedule()
        check_accumulation(config, factor.value)
        task = Pretraining(config, store.schema)
        rows = config.model.vocabulary_size
        packs = StoredPacks(store, seed=config.run.seed, vocabulary=rows)
        held_out = StoredPacks(evaluation, vocabulary=rows) if evaluation else None
        same = {
            "the data set's digest": f"{store.manifest.digest:016x}",
            "the arrangement of its packs": packs.arrangement,
            "the held-out data set's digest": f"{evaluation.manifest.digest:016x}" if evaluation else None,
        }
        made = engine_and_batches(
            config, task, packs, held_out, choice, factor=factor.value, processes=processes, same=same
        )
        return cls(config, task, *made, config.run.steps, vocabulary, store, evaluation, factor)

    def _describe(self, *, resumed: bool) -> None:
        print_data(self.config, self.store.manifest, resumed=resumed)
        _print_batch(self.config, self.factor, self.batches)

    @property
    def _data(self) -> Dict[str, Any]:
        return data_of(self.store.manifest)

    @property
    def _evaluate_every(self) -> int:
        return int(self.config.run.evaluate_every)

    def _go_on(self, folder: Path) -> str:
        return _how_to_go_on(folder, self.config)

    def _baseline(self) -> Mapping[str, float]:
        return unigram_baseline(
            self.store,
            self.evaluation,
            vocabulary=self.config.model.vocabulary_size,
            normalisation=self.config.loss.normalisation,
        )

    def _note_other_data(self, saved: Mapping[str, Any]) -> None:
        """One line where the same sequences are in other packs than those that the checkpoint's epoch began with."""
        if saved.get("packs") and saved.get("arrangement") not in (None, self.batches.state()["arrangement"]):
            print(
                f"note      {self.config.data.named} has the same sequences in other packs than at the checkpoint: "
                "in the rest of this epoch some come again, and as many do not come"
            )


def refuse_other_sizes(begin: Beginning, config: Config, keys: Sequence[str]) -> None:
    """ValueError where the weights that the run begins with are of another network than the configuration's."""
    found = begin.checkpoint or begin.weights
    others = stated_differences(begin.folder, found.config, config, keys) if found else []
    if others:
        way_out = (
            "a run goes on with the sizes it has"
            if begin.checkpoint
            else f"--config {Path(begin.folder, CONFIG)} has its sizes"
        )
        raise ValueError(f"{begin.folder}: {', '.join(others)}; {way_out}")


def for_this_machine(config: Config, choice: EngineChoice, *, whole: bool = False) -> Config:
    """The configuration as it will run here; each setting that the missing IPUs change is printed.

    whole: none is changed.
    """
    config = config.on_engine(choice.kind)
    if choice.kind != "host":
        check_on_ipus(config)
    if choice.hardware or config.engine.offline_export:
        return config
    if whole or not config.without_ipus:
        return replace(config, without_ipus=())
    config, changes = config.applied_without_ipus()
    print(f"{config.path}: its without_ipus block applies ({choice.reason}):")
    for key, before, after in changes:
        print(f"  {key:<42} {shown(before)} -> {shown(after)}")
    name = for_one_gpu(config.name) if choice.cuda else None
    instead = f"--config {name} is made for this GPU; " if name else ""
    print(f"  {instead}--whole leaves the block out; --plan --engine host prints the memory that a step then takes")
    return config


def _how_to_go_on(folder: Any, config: Config, made: int = 0) -> str:
    """The command that continues a run after its last step: to the end of its schedule, else with a longer one.

    made: updates made already, where they may be more than the configuration's.
    """
    made, command = max(made, config.run.steps), f"{typed('pretrain')} --resume {shlex.quote(str(folder))}"
    if made < config.schedule_steps:
        return f"{command} --steps {config.schedule_steps}"
    steps = 2 * made
    longer = "" if config.optimizer.schedule == "constant" else f" --set optimizer.schedule_steps={steps}"
    return f"{command} --steps {steps}{longer}"


def print_data(config: Config, manifest: Manifest, *, resumed: bool) -> None:
    schema = manifest.schema
    print(
        f"data      {config.data.named}: {manifest.sequences:,} sequences in {manifest.packs:,} packs of"
        f" {schema.max_sequence_length} ({manifest.algorithm}, depth {schema.max_sequences_per_pack}),"
        f" {manifest.efficiency:.1%} of the slots are tokens"
    )
    # A run that is resumed has decided for its data set.
    others = [] if resumed else built_otherwise(config, manifest)
    if others:
        same = of_the_same_corpus(config, manifest)
        end = "; delete the folder to build it anew" if same else " and from another corpus; it is used as it is"
        print(f"note      it was built with {', '.join(others)}{end}")


def _print_batch(config: Config, factor: PackingFactor, batches: GlobalBatches) -> None:
    accumulation, unpacked = config.accumulation(factor.value), config.batch.gradient_accumulation
    divided = "" if accumulation == unpacked else f" ({unpacked} / {factor.value:.3f}, rounded up)"
    sequences = config.expected_sequences_per_update(factor.value)
    print(f"packing   factor {factor.value:.3f}, from {factor.source}")
    print(
        f"batch     {batches.packs_per_update:,} packs, about {sequences:,.0f} sequences an update = micro-batch"
        f" {config.batch.micro_batch} x accumulation {accumulation}{divided} x replicas {config.placement.replicas};"
        f" {batches.updates_per_epoch:,} updates an epoch"
    )
    if batches.sharing:
        print(f"ranks     {batches.sharing}")
    if len(batches.packs) < batches.packs_per_update:
        print(
            f"note      the data set has {len(batches.packs):,} packs to train on, fewer than an update: the rest of"
            " each batch is empty"
        )
