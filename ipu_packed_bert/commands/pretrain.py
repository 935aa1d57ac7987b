"""Pre-train a packed BERT: python run_pretraining.py --config configs/packed_phase2_pod16.yml"""

from __future__ import annotations

import argparse
import contextlib
import shlex
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, List, Mapping, NamedTuple, Optional, Sequence, Tuple

from ipu_packed_bert.commands.run_options import (
    add_run_options,
    add_which_run,
    compiled_words,
    options_without_plan,
    parse_run,
    resumes_there,
)
from ipu_packed_bert.data.data_sets import (
    built_otherwise,
    described,
    of_the_same_corpus,
    open_evaluation,
    open_or_build,
    packing_factor,
)
from ipu_packed_bert.engine import instances
from ipu_packed_bert.processes.ranks import Processes, flat, joined
from ipu_packed_bert.run_files.folder import ALLOWED, CHECKPOINTS, CONFIG, allowed_before
from ipu_packed_bert.settings.allowed_changes import SIZES, Changes, check_allowed, compare, stored_config
from ipu_packed_bert.settings.pretraining import Config, check_accumulation, load_config
from ipu_packed_bert.settings.reader import DEFAULT, FILE, parse_yaml, peek, shown
from ipu_packed_bert.settings.schema import check_on_ipus
from ipu_packed_bert.settings.shipped import config_file, for_one_gpu, refuse_no_run
from pack_data.cli.command import ArgumentParser, typed
from pack_data.lengths.factors import PackingFactor
from pack_data.reading.fields import said_of
from pack_data.store.data_set import Manifest, PackStore

if TYPE_CHECKING:
    from ipu_packed_bert.data.global_batches import GlobalBatches
    from ipu_packed_bert.engine import EngineChoice
    from ipu_packed_bert.engine.base import Engine
    from ipu_packed_bert.run_files.checkpoints import Checkpoint
    from ipu_packed_bert.run_files.vocabulary_identity import Identity


def parse(argv: Optional[Sequence[str]]) -> argparse.Namespace:
    parser = ArgumentParser(prog=typed("pretrain"), description=__doc__)
    add_which_run(parser, named="packed_phase2_pod16")
    parser.add_argument(
        "--start-from",
        metavar="RUN",
        help="a new run begins with the weights of that run's newest checkpoint (phase 2 after phase 1)",
    )
    parser.add_argument("--data", metavar="DIR", help="the packed data set; as --set data.directory=...")
    parser.add_argument(
        "--steps", type=int, metavar="N", help="weight updates of the whole run; as --set run.steps=..."
    )
    parser.add_argument(
        "--whole",
        action="store_true",
        help="where there are no IPUs, run the configuration in full, without its without_ipus block; prints first how "
        "much memory and time that takes",
    )
    parser.add_argument(
        "--packing-factor",
        type=float,
        metavar="P",
        help="sequences per pack for --plan, while the data set is not built yet",
    )
    parser.add_argument(
        "--plan", action="store_true", help="print what would run and where, without a device, and stop"
    )
    add_run_options(parser, setting="batch.micro_batch=4")
    args = parse_run(parser, argv, {"data": "data.directory", "steps": "run.steps"})
    if args.resume and args.whole:
        parser.error("--whole begins a new run; --resume continues a run as it was begun")
    if args.resume and args.start_from:
        parser.error("--start-from begins a new run; --resume continues with the run's own weights")
    return args


def main(argv: Optional[Sequence[str]] = None) -> int:
    with joined(instances=instances) as processes:
        return begun(parse(argv), processes)


def begun(args: argparse.Namespace, processes: Processes) -> int:
    processes.refuse_differences({"the command line": " ".join(sys.argv[1:])})
    if resumes_there(args, processes):
        # What the file says in place of an option, where no IPUs are, the run has settled when it began.
        settled = {key for key, _ in load_config(config_file(args.config)).without_ipus}
        args.overrides = [each for each in args.overrides if each.partition("=")[0].strip() not in settled]
        args.start_from = None
    if args.resume or args.start_from:
        processes.of_first(_refuse_no_runs, args)
    if args.resume:
        config = processes.of_first(resumed_config, args.resume, args.overrides)
    else:
        config = load_config(config_file(args.config), args.overrides)
    if args.show_config:
        print(described(config)[0].annotated(), end="")
        return 0
    if args.plan:
        from ipu_packed_bert.planning.plan import print_plan

        return print_plan(*described(config), packing_factor=args.packing_factor, options=options_without_plan(args))
    return run(config, args, processes)


def _refuse_no_runs(args: argparse.Namespace) -> None:
    for option, folder in (("--resume", args.resume), ("--start-from", args.start_from)):
        if folder:
            refuse_no_run(option, folder)


def resumed_config(folder: str, overrides: List[str]) -> Config:
    """A run's configuration; it states the length of the schedule, so that more steps do not change the next rate."""
    return load_config(Path(folder, CONFIG), overrides)


# Of the sizes, those of the network alone; the data set may decide the others.
_NETWORK = sorted(SIZES - {"model.vocabulary_size", "model.max_position_embeddings"})


class _Beginning(NamedTuple):
    """What a run begins with: a checkpoint of its own, the weights of another run, or neither."""

    checkpoint: Optional[Checkpoint]
    weights: Optional[Checkpoint]
    saved: Tuple[Tuple[str, int], ...]  # runlog.saved_in, before the checkpoint was read
    allowed: Mapping[str, Any]  # run_folder.allowed_before of the checkpoint

    @property
    def step(self) -> int:
        """Updates made already."""
        return self.checkpoint.step if self.checkpoint else 0

    def changes(self, config: Config, allowed: Sequence[str], run: str) -> Changes:
        """How the configuration differs from the checkpoint's. Raises ConfigError where that is refused."""
        if self.checkpoint is None:
            return Changes()
        return compare(run, self.checkpoint.config, config, allowed=allowed, before=self.allowed)

    def refuse_other_sizes(self, config: Config, keys: Sequence[str], run: str) -> None:
        """ValueError where the weights, in the folder `run`, are of another network than the configuration's."""
        found = self.checkpoint or self.weights
        there = parse_yaml(found.config, run) if found else None
        others = []
        for key in keys:
            section, name = key.split(".")
            theirs, ours = peek(key, there, ()), getattr(getattr(config, section), name)
            if theirs not in (None, ours):
                origin = config.origins.get(key, FILE)
                by = f"in {config.path}" if origin == FILE or origin.startswith(DEFAULT) else f"by {origin}"
                others.append(f"{key} is {shown(theirs)} there, {shown(ours)} {by}")
        if others:
            way_out = (
                "a run goes on with the sizes it has"
                if self.checkpoint
                else f"--config {Path(run, CONFIG)} has its sizes"
            )
            raise ValueError(f"{run}: {', '.join(others)}; {way_out}")


def beginning(resume: Optional[str], start_from: Optional[str]) -> _Beginning:
    """Raises ValueError where there is no checkpoint, or one that cannot be resumed."""
    from ipu_packed_bert.run_files.checkpoints import load_newest
    from ipu_packed_bert.training.log import saved_in

    saved = saved_in(resume) if resume else ()
    found = load_newest(Path(resume, CHECKPOINTS)) if resume else None
    if found and "optimizer" not in found.engine:
        raise ValueError(
            f"{resume}: weights that were imported, not a run to resume; --config FILE --start-from {resume} begins one"
            " from them"
        )
    weights = load_newest(Path(start_from, CHECKPOINTS)) if start_from else None
    return _Beginning(found, weights, saved, allowed_before(resume, found.step) if resume and found else {})


def _first_look(args: argparse.Namespace) -> _Beginning:
    """What the run begins with. Raises ValueError where its folder holds another run, or another process writes it."""
    from ipu_packed_bert.training.log import refuse_a_run_in, refuse_a_run_under_way

    if args.resume:
        refuse_a_run_under_way(args.resume)
    found = beginning(args.resume, args.start_from)
    if not args.resume:
        refuse_a_run_in(args.out)
    return found


class _Ready(NamedTuple):
    """All that is there before the first update."""

    config: Config
    store: PackStore
    evaluation: Optional[PackStore]  # held-out packs
    vocabulary: Identity  # of the data set
    factor: PackingFactor
    engine: Engine
    global_batches: GlobalBatches
    batches: Any  # the same, read as it suits the engine


def run(config: Config, args: argparse.Namespace, processes: Processes) -> int:
    """Trains, and writes the run down; the exit status."""
    # torch loads from here on: a wrong configuration is refused, and a plan printed, without it.
    from ipu_packed_bert.engine import choose_engine
    from ipu_packed_bert.training.loop import SilentLog, train

    begin = processes.of_first(_first_look, args)
    if begin.checkpoint:  # what is left out without IPUs was decided when the run began
        config = replace(config, without_ipus=())
    choice = choose_engine(config)
    config = for_this_machine(config, choice, whole=args.whole, packing_factor=args.packing_factor)
    weights_of = args.resume or args.start_from
    changes = begin.changes(config, check_allowed(args.allow_change, config.sections), weights_of)
    if begin.checkpoint and begin.step >= config.run.steps:
        go_on = _how_to_go_on(args.resume, config, begin.step)
        print(f"{args.resume} has made its {begin.step:,} updates already; to continue: {go_on}")
        return 0
    for line in changes.lines:
        print(line)
    begin.refuse_other_sizes(config, _NETWORK, weights_of)
    with contextlib.ExitStack() as opened:
        ready = _make_ready(config, args, processes, begin, choice, opened)
        config, engine, batches = ready.config, ready.engine, ready.batches
        print_data(config, ready.store.manifest, resumed=begin.checkpoint is not None)
        _print_batch(config, ready.factor, batches)
        print(f"engine    {engine.description}", flush=True)

        engine.compile(batches.first())
        if config.engine.offline_export:
            print(f"compiled  {compiled_words(config.engine.offline_export, processes)}")
            return 0
        load(begin, ready, args, same_batch=not changes.other_batch)
        if engine.share[0]:  # the first process writes for all
            outcome = train(config, engine, batches, SilentLog(), None, steps=config.run.steps, first_step=begin.step)
            return outcome.status
        return _train_and_write(ready, args, begin, changes)


def _make_ready(
    config: Config,
    args: argparse.Namespace,
    processes: Processes,
    begin: _Beginning,
    choice: EngineChoice,
    opened: contextlib.ExitStack,
) -> _Ready:
    """Data, engine and batches; they are closed with ``opened``. The configuration is completed by the data set."""
    import torch

    from ipu_packed_bert.data.global_batches import GlobalBatches, StoredPacks
    from ipu_packed_bert.engine import build_engine
    from ipu_packed_bert.run_files.vocabulary_identity import Identity, agree
    from ipu_packed_bert.tasks.pretraining import Pretraining

    with processes.first_alone():
        config, store = open_or_build(config, progress=args.progress, build=processes.rank == 0)
    opened.enter_context(store)
    evaluation = open_evaluation(config, store.manifest)
    if evaluation:
        opened.enter_context(evaluation)
    vocabulary = Identity.of_data(store.manifest)
    weights, weights_of = begin.checkpoint or begin.weights, args.resume or args.start_from
    if weights:
        vocabulary, note = agree(weights.identity, vocabulary, weights_of=weights_of, data_of=config.data.directory)
        if note:
            print(f"note      {note}")
    begin.refuse_other_sizes(config, sorted(SIZES), weights_of)
    factor = packing_factor(config, store.manifest, args.packing_factor)
    if choice.kind == "ipu_model":
        config = config.for_simulation(factor.value)
    config = config.with_schedule()
    check_accumulation(config, factor.value)
    task = Pretraining(config, store.schema)
    rows = config.model.vocabulary_size
    packs = StoredPacks(store, seed=config.run.seed, vocabulary=rows)
    processes.refuse_differences(
        {
            **flat(config.as_dict()),
            "the data set's digest": f"{store.manifest.digest:016x}",
            "the arrangement of its packs": packs.arrangement,
            "the held-out data set's digest": f"{evaluation.manifest.digest:016x}" if evaluation else None,
            "torch": torch.__version__,
        }
    )
    engine = build_engine(config, task, choice, packing_factor=factor.value, processes=processes)
    opened.enter_context(contextlib.closing(engine))
    global_batches = GlobalBatches(
        packs,
        task.layout(config, factor.value),
        share=engine.share,
        held_out=StoredPacks(evaluation, vocabulary=rows) if evaluation else None,
    )
    batches = opened.enter_context(contextlib.closing(engine.feed(global_batches)))
    return _Ready(config, store, evaluation, vocabulary, factor, engine, global_batches, batches)


def load(begin: _Beginning, ready: _Ready, args: argparse.Namespace, *, same_batch: bool) -> None:
    """Weights, and for a run that is resumed all else, into engine and batches. ValueError where they do not fit."""
    from ipu_packed_bert.training.finetuning_run import print_other_ranks, refuse_other_weights

    engine = ready.engine
    if begin.weights:
        with said_of(str(args.start_from)):
            engine.load_state({**engine.state(), "model": begin.weights.engine["model"]})
    if begin.checkpoint:
        with said_of(args.resume):
            engine.load_state(begin.checkpoint.engine)
            ready.batches.load_state(begin.checkpoint.batches, same_batch=same_batch)
            _note_other_packs(begin.checkpoint.batches, ready)
        _print_schedule(begin.checkpoint, ready.config)
        print_other_ranks(begin.checkpoint, engine.processes)
    refuse_other_weights(engine)


def _note_other_packs(saved: Mapping[str, Any], ready: _Ready) -> None:
    """One line where the same sequences are in other packs than those that the checkpoint's epoch was begun with."""
    if saved.get("packs") and saved.get("arrangement") not in (None, ready.batches.state()["arrangement"]):
        print(
            f"note      {ready.config.data.directory} has the same sequences in other packs than at the checkpoint: in "
            "the rest of this epoch some come again, and as many do not come"
        )


def _train_and_write(ready: _Ready, args: argparse.Namespace, begin: _Beginning, changes: Changes) -> int:
    """The updates, in a run's folder; the exit status."""
    from ipu_packed_bert.data.constant_baseline import unigram_baseline
    from ipu_packed_bert.training.log import RunLog, data_of, environment, open_run_folder
    from ipu_packed_bert.training.loop import train
    from ipu_packed_bert.training.summary import RunEnd

    config, engine = ready.config, ready.engine
    written = environment(
        device=engine.description,
        seed=config.run.seed,
        data=data_of(ready.store.manifest),
        command=[sys.executable, *sys.argv],
    )
    if changes.allowed:
        written[ALLOWED] = changes.allowed_values
    with open_run_folder(
        args.resume or args.out, config, first_step=begin.step, saved=begin.saved, environment=written
    ) as folder:
        print(f"run       {folder}{f', from step {begin.step}' if begin.checkpoint else ''}", flush=True)
        log = RunLog(
            folder,
            steps=config.run.steps,
            first_step=begin.step,
            log_every=config.run.log_every,
            max_sequence_length=config.data.max_sequence_length,
            progress=args.progress,
        )
        end = RunEnd(
            folder,
            config,
            engine,
            ready.global_batches,
            log,
            config.run.steps,
            _command(),
            go_on=_how_to_go_on(folder, config),
            begin=f" --start-from {shlex.quote(args.start_from)}" if args.start_from else "",
            baseline=partial(
                unigram_baseline,
                ready.store,
                ready.evaluation,
                vocabulary=config.model.vocabulary_size,
                normalisation=config.loss.normalisation,
            ),
            progress=args.progress,
        )
        with contextlib.closing(log), end.if_not_finite():
            outcome = train(
                config,
                engine,
                ready.batches,
                log,
                folder / CHECKPOINTS,
                steps=config.run.steps,
                first_step=begin.step,
                vocabulary=ready.vocabulary,
            )
        end.finish(outcome)
        return outcome.status


def for_this_machine(
    config: Config, choice: EngineChoice, *, whole: bool = False, packing_factor: Optional[float] = None
) -> Config:
    """The configuration as it will run here; each setting that the missing IPUs change is printed.

    whole: none is changed, and what the run takes is printed; `packing_factor`: of the data set, where that is not yet
    there.
    """
    # Written down, so that a resumed run goes on where it began.
    kind = "host" if choice.kind == "host" else "ipu"
    config = replace(config, engine=replace(config.engine, kind=kind, ipu_model=choice.kind == "ipu_model"))
    if kind == "ipu":
        check_on_ipus(config)
    if choice.hardware or config.engine.offline_export:
        return config
    if whole:
        config = replace(config, without_ipus=())
        print(f"{config.path}: in full ({choice.reason}):")
        print("\n".join(_what_it_takes(config, choice, packing_factor)), flush=True)
        return config
    if not config.without_ipus:
        return config
    config, changes = config.applied_without_ipus()
    print(f"{config.path}: its without_ipus block applies ({choice.reason}):")
    for key, before, after in changes:
        print(f"  {key:<42} {shown(before)} -> {shown(after)}")
    name = for_one_gpu(config.name) if choice.cuda else None
    instead = f"--config {name} is made for this GPU; " if name else ""
    print(f"  {instead}--whole leaves the block out, once it has printed the memory and the hours that the run takes")
    return config


def _what_it_takes(config: Config, choice: EngineChoice, packing_factor: Optional[float]) -> List[str]:
    if choice.kind != "host":
        return ["  memory and time of a simulated device are not computed; without hardware a whole run takes months"]
    from ipu_packed_bert.engine.host.devices import find_device
    from ipu_packed_bert.engine.host.estimate import product_rate, whole_lines
    from ipu_packed_bert.planning.plan import plan

    made = plan(*described(config), packing_factor=packing_factor)
    device = find_device(config.engine)
    return whole_lines(made, device, rate=product_rate(device, config.engine))


def _print_schedule(checkpoint: Checkpoint, config: Config) -> None:
    """One line where the run goes on with other learning rates than it had."""
    from ipu_packed_bert.model.optimizer import schedule_change

    before = stored_config("the checkpoint", checkpoint.config, config)
    change = schedule_change(
        checkpoint.step,
        before.optimizer,
        config.optimizer,
        steps_before=before.schedule_steps,
        steps_after=config.schedule_steps,
    )
    if change:
        print(f"schedule  {change}")


def _how_to_go_on(folder: Any, config: Config, made: int = 0) -> str:
    """The command that continues a run after its last step: to the end of its schedule, else with a longer one.

    made: updates made already, where they may be more than the configuration's.
    """
    made = max(made, config.run.steps)
    if made < config.schedule_steps:
        return f"{resume_command(folder)} --steps {config.schedule_steps}"
    steps = 2 * made
    longer = "" if config.optimizer.schedule == "constant" else f" --set optimizer.schedule_steps={steps}"
    return f"{resume_command(folder)} --steps {steps}{longer}"


def resume_command(folder: Any) -> str:
    return f"{_command()} --resume {shlex.quote(str(folder))}"


def _command() -> str:
    return typed("pretrain")


def print_data(config: Config, manifest: Manifest, *, resumed: bool) -> None:
    schema = manifest.schema
    print(
        f"data      {config.data.directory}: {manifest.sequences:,} sequences in {manifest.packs:,} packs of"
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
