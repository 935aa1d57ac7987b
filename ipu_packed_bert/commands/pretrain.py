"""Pre-train a packed BERT: python run_pretraining.py --config configs/packed_phase2_pod16.yml"""
import argparse
import contextlib
import json
import sys
from dataclasses import replace
from pathlib import Path

import yaml

from ipu_packed_bert.config import check_accumulation, config_from_tree, load_config
from ipu_packed_bert.configurations import config_file
from ipu_packed_bert.data import built_otherwise, described, open_evaluation, open_or_build, packing_factor
from ipu_packed_bert.processes import refuse_torchrun
from pack_data.command import ArgumentParser, typed

CONFIG = "config.yml"  # in a run's folder


def parse(argv):
    parser = ArgumentParser(prog="run_pretraining.py", description=__doc__,
                            formatter_class=argparse.RawDescriptionHelpFormatter)
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--config", metavar="FILE|NAME",
                      help="a run's settings: a file, or the name of one that comes with the program, such as packed_phase2_pod16")
    what.add_argument("--resume", metavar="RUN", help="continue the run in this folder from its newest checkpoint")
    parser.add_argument("--start-from", metavar="RUN",
                        help="a new run begins with the weights of that run's newest checkpoint (phase 2 after phase 1)")
    parser.add_argument("--engine", choices=("auto", "ipu", "host"), help="where to run; as --set engine.kind=...")
    parser.add_argument("--data", metavar="DIR", help="the packed data set; as --set data.directory=...")
    parser.add_argument("--steps", type=int, metavar="N", help="weight updates of the whole run; as --set run.steps=...")
    parser.add_argument("--out", metavar="RUN", help="folder of a new run; default runs/NAME-TIME")
    parser.add_argument("--set", action="append", default=[], metavar="a.b=c", dest="overrides",
                        help="override one setting, any number of times: --set batch.micro_batch=4")
    parser.add_argument("--packing-factor", type=float, metavar="P",
                        help="sequences per pack for --plan, while the data set is not built yet")
    parser.add_argument("--plan", action="store_true", help="print what would run and where, without a device, and stop")
    parser.add_argument("--show-config", action="store_true", help="print every setting and where it comes from, and stop")
    parser.add_argument("--progress", action="store_true", default=None, help="a live line although stderr is no terminal")
    args = parser.parse_args(argv)
    if args.resume and args.out:
        parser.error("--out names a new run; --resume continues in the run's own folder")
    if args.resume and args.start_from:
        parser.error("--start-from begins a new run; --resume continues with the run's own weights")
    for key, value in (("engine.kind", args.engine), ("data.directory", args.data), ("run.steps", args.steps)):
        if value is not None:
            args.overrides.append("{}={}".format(key, json.dumps(value)))  # JSON is YAML, with texts in quotes
    return args


def resumed_config(folder, overrides):
    """A run's configuration, its schedule as long as it was: more steps alone must not change the rate of the next update."""
    path = Path(folder, CONFIG)
    # A run of before optimizer.schedule_steps has the length of its run.steps.
    return load_config(path, ["optimizer.schedule_steps={}".format(load_config(path).schedule_steps)] + overrides)


def main(argv=None):
    args = parse(argv)
    if not (args.plan or args.show_config):
        refuse_torchrun()
    config = resumed_config(args.resume, args.overrides) if args.resume else load_config(config_file(args.config), args.overrides)
    if args.show_config:
        print(described(config)[0].annotated(), end="")
        return 0
    if args.plan:
        from ipu_packed_bert.plan import print_plan

        return print_plan(*described(config), packing_factor=args.packing_factor)

    # torch loads from here on: a wrong configuration is refused, and a plan printed, without it.
    from ipu_packed_bert.checkpoint import load_checkpoint, newest_checkpoint
    from ipu_packed_bert.engine import build_engine, choose_engine
    from ipu_packed_bert.identity import agree, vocabulary_of_run
    from ipu_packed_bert.loader import GlobalBatches, StoredPacks
    from ipu_packed_bert.optim import schedule_change
    from ipu_packed_bert.runlog import (
        CHECKPOINTS, RunLog, data_of, environment, open_run_folder, print_summary, refuse_a_run_in, saved_in)
    from ipu_packed_bert.tasks.pretraining import Pretraining
    from ipu_packed_bert.train import SilentLog, train

    saved = saved_in(args.resume) if args.resume else ()
    checkpoint = load_checkpoint(newest_checkpoint(Path(args.resume, CHECKPOINTS))) if args.resume else None
    if checkpoint and "optimizer" not in checkpoint.engine:
        raise ValueError("{}: weights that were imported, not a run to resume; --config FILE --start-from {} begins one from them".format(
            args.resume, args.resume))
    begun = load_checkpoint(newest_checkpoint(Path(args.start_from, CHECKPOINTS))) if args.start_from else None
    if not args.resume:
        refuse_a_run_in(args.out)
    if checkpoint and checkpoint.step >= config.run.steps:
        print("{} has made its {:,} updates already; to continue: {}".format(
            args.resume, checkpoint.step, how_to_go_on(args.resume, config)))
        return 0
    choice = choose_engine(config)
    config = for_this_machine(config, choice)
    with contextlib.ExitStack() as opened:
        config, store = open_or_build(config, progress=args.progress)
        opened.enter_context(store)
        evaluation = open_evaluation(config, store.manifest)
        if evaluation:
            opened.enter_context(evaluation)
        vocabulary, weights_of, weights = store.manifest.vocabulary_sha256, args.resume or args.start_from, checkpoint or begun
        if weights:
            vocabulary, note = agree(vocabulary_of_run(Path(weights_of), weights), vocabulary,
                                     weights_of=weights_of, data_of=config.data.directory)
            if note:
                print("note      {}".format(note))
        factor = packing_factor(config, store.manifest, args.packing_factor)
        if choice.kind == "ipu_model":
            config = config.for_simulation(factor.value)
        config = config.with_schedule()
        check_accumulation(config, factor.value)
        task = Pretraining(config, store.schema)
        engine = opened.enter_context(contextlib.closing(
            build_engine(config, task, choice, packing_factor=factor.value)))
        batches = GlobalBatches(
            StoredPacks(store, seed=config.run.seed), task.layout(config, factor.value), share=engine.share,
            held_out=StoredPacks(evaluation) if evaluation else None)
        batches = opened.enter_context(contextlib.closing(engine.feed(batches)))
        print_data(config, store.manifest)
        print_batch(config, factor, batches)
        print("engine    {}".format(engine.description), flush=True)

        engine.compile(batches.first())
        if config.engine.offline_export:
            print("compiled  {}; this program cannot load it yet, poptorch.load can".format(config.engine.offline_export))
            return 0
        if begun:
            engine.load_state({**engine.state(), "model": begun.engine["model"]})
        if checkpoint:
            engine.load_state(checkpoint.engine)
            batches.load_state(checkpoint.batches)
        first_step = checkpoint.step if checkpoint else 0
        if checkpoint:
            before = config_from_tree(yaml.safe_load(checkpoint.config), args.resume)
            change = schedule_change(first_step, before.optimizer, config.optimizer,
                                     steps_before=before.schedule_steps, steps_after=config.schedule_steps)
            if change:
                print("schedule  {}".format(change))
        if engine.share[0]:  # the first process writes for all
            outcome = train(config, engine, batches, SilentLog(), None, first_step=first_step)
            return outcome.status
        folder = opened.enter_context(open_run_folder(
            args.resume or args.out, config, first_step=first_step, saved=saved,
            environment=environment(device=engine.description, seed=config.run.seed, data=data_of(store.manifest),
                                    command=[sys.executable] + sys.argv)))
        print("run       {}{}".format(folder, ", from step {}".format(first_step) if checkpoint else ""), flush=True)
        log = opened.enter_context(contextlib.closing(RunLog(
            folder, steps=config.run.steps, first_step=first_step, log_every=config.run.log_every,
            max_sequence_length=config.data.max_sequence_length, progress=args.progress)))
        outcome = train(config, engine, batches, log, folder / CHECKPOINTS, first_step=first_step, vocabulary=vocabulary)
        log.close()
        print_summary(folder, log.totals, outcome, steps=config.run.steps, max_sequence_length=config.data.max_sequence_length,
                      resume=resume_command(folder), go_on=how_to_go_on(folder, config))
        return outcome.status


def for_this_machine(config, choice):
    """The configuration as it will run here; each setting that the missing IPUs change is printed."""
    # Written down, so that a resumed run goes on where it began.
    config = replace(config, engine=replace(
        config.engine, kind="host" if choice.kind == "host" else "ipu", ipu_model=choice.kind == "ipu_model"))
    if choice.hardware or config.engine.offline_export or not config.without_ipus:
        return config
    config, changes = config.applied_without_ipus()
    print("{}: its without_ipus block applies ({}):".format(config.path, choice.reason))
    for key, before, after in changes:
        print("  {:<42} {} -> {}".format(key, show(before), show(after)))
    return config


def how_to_go_on(folder, config):
    """The command that continues a run which has made all its steps: up to the end of its schedule, else with a longer one."""
    if config.run.steps < config.schedule_steps:
        return f"{resume_command(folder)} --steps {config.schedule_steps}"
    steps = 2 * config.run.steps
    return f"{resume_command(folder)} --steps {steps} --set optimizer.schedule_steps={steps}"


def resume_command(folder):
    return f"{typed('pretrain', 'python run_pretraining.py')} --resume {folder}"


def show(value):
    return str(list(value)) if isinstance(value, tuple) else str(value)


def print_data(config, manifest):
    print("data      {}: {:,} sequences in {:,} packs of {} ({}, depth {}), {:.1%} of the slots are tokens".format(
        config.data.directory, manifest.sequences, manifest.packs, manifest.schema.max_sequence_length, manifest.algorithm,
        manifest.schema.max_sequences_per_pack, manifest.efficiency))
    others = built_otherwise(config, manifest)
    if others:
        print("note      it was built with {}; delete the folder to build it anew".format(", ".join(others)))


def print_batch(config, factor, batches):
    accumulation = config.accumulation(factor.value)
    divided = "" if accumulation == config.batch.gradient_accumulation else " ({} / {:.3f}, rounded up)".format(
        config.batch.gradient_accumulation, factor.value)
    print("packing   factor {:.3f}, from {}".format(factor.value, factor.source))
    print("batch     {:,} packs, about {:,.0f} sequences an update = micro-batch {} x accumulation {}{} x replicas {}; "
          "{:,} updates an epoch".format(
              batches.packs_per_update, config.expected_sequences_per_update(factor.value), config.batch.micro_batch,
              accumulation, divided, config.placement.replicas, batches.updates_per_epoch))
    if len(batches.packs) < batches.packs_per_update:
        print("note      the data set has {:,} packs to train on, fewer than an update: the rest of each batch is empty".format(
            len(batches.packs)))
