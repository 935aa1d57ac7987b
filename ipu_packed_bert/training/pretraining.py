"""A pre-training run: it trains on a data set of packs, which it builds if it does not exist."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import AbstractSet, Mapping, Optional

from ipu_packed_bert.data.constant_baseline import unigram_baseline
from ipu_packed_bert.data.data_sets import (
    built_otherwise,
    known_packing_factor,
    of_embedded_corpus,
    of_the_same_corpus,
    open_evaluation,
    open_packs,
)
from ipu_packed_bert.data.factors import PackingFactor
from ipu_packed_bert.data.global_batches import GlobalBatches, StoredPacks
from ipu_packed_bert.run_files.folder import CONFIG
from ipu_packed_bert.run_files.vocabulary_identity import Identity, agree
from ipu_packed_bert.settings.allowed_changes import NETWORK, stated_differences
from ipu_packed_bert.settings.config import Config
from ipu_packed_bert.settings.rules import check_accumulation, check_on_ipus
from ipu_packed_bert.settings.schema import SAME_NETWORK
from ipu_packed_bert.settings.shipped import for_one_gpu
from ipu_packed_bert.tasks.pretraining import Pretraining
from ipu_packed_bert.training.prepared import (
    Beginning,
    Begun,
    Prepared,
    engine_and_batches,
    resume_command,
)
from ipu_packed_bert.training.run_folder import data_of
from pack_data.display.facts import number, with_unit
from pack_data.packing.packing import of_at_most
from pack_data.reading.words import counted
from pack_data.store.data_set import Manifest, PackStore

# The data set may determine the other two.
_KNOWN_AT_ONCE = NETWORK - {"model.vocabulary_size", "model.max_position_embeddings"}
_MOST_EPOCHS = 100  # of the embedded corpus; a test of an installation on IPUs needs fewer


@dataclass(frozen=True)
class PacksRun(Prepared):
    """A run that trains on a data set of packs."""

    store: PackStore
    held_out: Optional[PackStore]

    simulated = True

    @classmethod
    def settle(cls, config: Config, begun: Begun) -> Config:
        choice = begun.choice
        if begun.begin.checkpoint:  # the block without_ipus was applied when the run began
            config = replace(config, without_ipus=())
        if choice.kind != "host":
            check_on_ipus(config)
        if choice.hardware or config.engine.offline_export or not config.without_ipus:
            return config
        small, changes = config.applied_without_ipus()
        sections = dict.fromkeys(change.key.partition(".")[0] for change in changes)
        print(f"{config.path}: applies its without_ipus block ({choice.reason})")
        print(f"  it changes {', '.join(sections)}: {CONFIG} of the run has the values")
        name = for_one_gpu(config.name) if choice.cuda else None
        alternative = f"--config {name} is made for this GPU; " if name else ""
        print(
            f"  {alternative}--whole ignores the block; --plan --engine host prints the memory that a step then needs"
        )
        return small

    @classmethod
    def nothing_left(cls, config: Config, begin: Beginning) -> Optional[str]:
        if not begin.checkpoint or begin.step < config.run.steps:
            return None
        longer = f"{resume_command(config, begin.folder)} {_longer(config, begin.step)}"
        return f"{begin.folder} has already made its {counted(begin.step, 'update')}; to continue: {longer}"

    @classmethod
    def make(cls, config: Config, begun: Begun) -> PacksRun:
        """Open the data set, built if it is missing, which completes the configuration."""
        begin = begun.begin
        processes = begun.processes
        _refuse_other_network(begin, config, _KNOWN_AT_ONCE)
        with processes.first_alone():
            build = begun.build if processes.rank == 0 else None
            config, store = open_packs(config, build)
        begun.resources.enter_context(store)
        manifest = store.manifest
        held_out = open_evaluation(config, manifest)
        if held_out:
            begun.resources.enter_context(held_out)
        vocabulary = _vocabulary(begin, config, manifest)
        _refuse_other_network(begin, config, NETWORK)

        factor = _factor_of_program(config, manifest, begun.packing_factor)
        if begun.choice.kind == "ipu_model":
            config = config.for_simulation(factor.value)
        config = config.with_schedule().with_micro_batch(factor.value, ranks=processes.size)
        check_accumulation(config, factor.value)
        rows = config.model.vocabulary_size
        packs = StoredPacks(store, seed=config.run.seed, vocabulary=rows)
        same = {
            "the data set's digest": f"{manifest.digest:016x}",
            "the arrangement of its packs": packs.arrangement,
        }
        held_out_packs = None
        if held_out:
            held_out_packs = StoredPacks(held_out, vocabulary=rows)
            same["the held-out data set's digest"] = f"{held_out.manifest.digest:016x}"
        task = Pretraining(config, store.schema)
        engine, batches = engine_and_batches(
            config, task, packs, held_out_packs, begun, factor=factor.value, same=same
        )
        _print_data(config, manifest, resumed=begin.checkpoint is not None)
        _print_batch(config, factor, manifest, batches)
        if begun.choice.hardware:
            _warn_of_epochs(config, manifest, batches)
        return cls(
            config=config,
            task=task,
            engine=engine,
            batches=batches,
            steps=config.run.steps,
            evaluate_every=config.run.evaluate_every,
            vocabulary=vocabulary,
            data=data_of(manifest),
            longer=_longer(config, config.run.steps),
            store=store,
            held_out=held_out,
        )

    def baseline(self) -> Mapping[str, float]:
        return unigram_baseline(
            self.store,
            self.held_out,
            packs=self.batches.packs.order(0),
            vocabulary=self.config.model.vocabulary_size,
            normalisation=self.config.loss.normalisation,
        )


def _refuse_other_network(begin: Beginning, config: Config, keys: AbstractSet[str]) -> None:
    """Raise ValueError if the weights that the run starts from belong to another network."""
    start = begin.checkpoint or begin.weights
    if not start:
        return
    differences = stated_differences(begin.folder, start.config, config, sorted(keys))
    if differences:
        way_out = SAME_NETWORK
        if not begin.checkpoint:
            way_out = f"--config {Path(begin.folder, CONFIG)} has their network"
        raise ValueError(f"{begin.folder}: {', '.join(differences)}; {way_out}")


def _vocabulary(begin: Beginning, config: Config, manifest: Manifest) -> Identity:
    """Return the identity of the data's vocabulary, completed by that of the weights."""
    vocabulary = Identity.of_data(manifest)
    weights = begin.checkpoint or begin.weights
    if weights:
        vocabulary, note = agree(
            weights.identity, vocabulary, weights_of=begin.folder, data_of=config.data.directory
        )
        if note:
            print(f"note      {note}")
    return vocabulary


def _factor_of_program(config: Config, manifest: Manifest, given: Optional[float]) -> PackingFactor:
    """Return the factor of the data set or, if the program is only compiled here, of the data where it runs."""
    of_data = PackingFactor(manifest.packing_factor, f"the data set in {config.data.named}")
    if config.engine.offline_export is None:
        return of_data
    if given is None and not of_embedded_corpus(manifest):
        return of_data
    return known_packing_factor(config, None, given) or of_data


def _longer(config: Config, step: int) -> str:
    """Return the options that continue a run after update ``step``, to the end of its schedule or with a longer one."""
    if step < config.schedule_steps:
        return f"--steps {config.schedule_steps}"
    options = f"--steps {2 * step}"
    if config.optimizer.schedule != "constant":
        options += f" --set optimizer.schedule_steps={2 * step}"
    return options


def _print_data(config: Config, manifest: Manifest, *, resumed: bool) -> None:
    schema = manifest.schema
    print(
        f"data      {config.data.named}: {counted(manifest.sequences, 'sequence')} in {counted(manifest.packs, 'pack')}"
        f" of {schema.max_sequence_length} ({manifest.algorithm}, depth {schema.max_sequences_per_pack}),"
        f" {number(manifest.efficiency, 'share')} of the slots are tokens"
    )
    if resumed:  # the note was printed when the run began
        return
    differences = built_otherwise(config, manifest)
    if differences:
        consequence = " and from another corpus; it is used unchanged"
        if of_the_same_corpus(config, manifest):
            consequence = "; delete the directory to build it again"
        print(f"note      the data set was built with {', '.join(differences)}{consequence}")


def _print_batch(
    config: Config, factor: PackingFactor, manifest: Manifest, batches: GlobalBatches
) -> None:
    limit = of_at_most(factor.value / manifest.efficiency)
    if config.engine.offline_export is not None:
        limit = f"of {factor.source}"
    print(f"packing   factor {number(factor.value, 'sequences per pack')} {limit}")
    print(
        f"update    {config.update_words(factor.value)};"
        f" {counted(batches.updates_per_epoch, 'update')} an epoch"
    )
    if batches.sharing:
        print(f"ranks     {batches.sharing}")
    if len(batches.packs) < batches.packs_per_update:
        print(
            f"note      the data set has {counted(len(batches.packs), 'pack')}, fewer than an update: the other packs"
            " of each batch are empty"
        )


def _warn_of_epochs(config: Config, manifest: Manifest, batches: GlobalBatches) -> None:
    """Warn of a long run on the embedded corpus."""
    epochs = config.run.steps / batches.updates_per_epoch
    if epochs > _MOST_EPOCHS and of_embedded_corpus(manifest):
        print(
            f"warning   the run makes {with_unit(round(epochs), 'epochs')} of the embedded corpus, which is meant for"
            " tests; name a data set: --data DIR (see docs/how_to/wikipedia.md)",
            flush=True,
        )
