"""A whole run: start, task, packs, updates, evaluation, export; the command line and the experiments both go through here."""
from __future__ import annotations

import dataclasses
import importlib.util
import json
import shutil
import signal
import sys
import time
import zlib
from pathlib import Path
from typing import Any, Dict, List, NamedTuple, Optional

import torch
import yaml

from ipu_packed_bert.checkpoint import Checkpoint, load_checkpoint, newest_checkpoint, save_checkpoint
from ipu_packed_bert.config import ConfigError, schedule_too_short
from ipu_packed_bert.finetuning.config import FinetuneConfig, config_from_tree
from ipu_packed_bert.finetuning.metrics import percent
from ipu_packed_bert.finetuning.packing import Inputs, PackedInputs, Schedule
from ipu_packed_bert.finetuning.start import Start, find_start
from ipu_packed_bert.finetuning.tasks import Evaluation, Task, build_task
from ipu_packed_bert.finetuning.trainer import FineTuner, Update, pick_attention, pick_device
from ipu_packed_bert.hugging_face import load_into, write_folder
from ipu_packed_bert.optim import schedule_change
from ipu_packed_bert.identity import agree, vocabulary_of_run
from ipu_packed_bert.runlog import CHECKPOINTS, LOG, append_record, environment, forget_after, open_run_folder, read_log, saved_in
from ipu_packed_bert.train import Interruption, check_loss, check_state
from pack_data.command import progress_bar
from pack_data.files import write_atomically

EVALUATION, MODEL = "evaluation.json", "model"  # in a run's folder


class Prepared(NamedTuple):
    """All that is there before the first update."""

    config: FinetuneConfig
    start: Start
    task: Task
    training: Optional[PackedInputs]
    evaluation: Optional[PackedInputs]
    schedule: Optional[Schedule]
    tuner: FineTuner
    attention: str
    fresh: List[str]  # weights that the checkpoint didn't have


def prepare(config: FinetuneConfig, *, unpacked: bool = False, former: Optional[FinetuneConfig] = None) -> Prepared:
    """`unpacked`: the updates of the packed run, each sequence alone in its row (and evaluation alike).

    `former`: the configuration of the run that is resumed, whose schedule goes on.
    """
    if config.run.export and config.data.training is not None and importlib.util.find_spec("safetensors") is None:
        raise ValueError("run.export is true; that needs the package safetensors: pip install safetensors, or --set run.export=false")
    if config.engine.threads is not None:
        torch.set_num_threads(config.engine.threads)
    start = find_start(config)
    task = build_task(config, start.vocabulary, start.labels)
    device = pick_device()
    attention = pick_attention(config, start.model.attention_dropout, device)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(config.run.seed)
        network = task.network(start.model, attention)
    loaded = load_into(network, start.weights)
    if config.data.training is None and loaded.fresh:
        raise ValueError(f"{config.model.checkpoint}: has no {', '.join(loaded.fresh[:2])}; evaluate a model that was fine-tuned for this task")
    training = _packed(task.training, config)
    schedule = None if training is None else Schedule(
        training, sequences_per_update=config.batch.sequences_per_update, epochs=config.run.epochs, seed=config.run.seed, unpacked=unpacked)
    config = with_schedule(config, former, schedule)
    evaluation = _packed(task.evaluation, config, unpacked=unpacked)
    tuner = FineTuner(network, config, steps=config.optimizer.schedule_steps or 0, device=device)
    return Prepared(config, start, task, training, evaluation, schedule, tuner, attention, list(loaded.fresh) if start.weights else [])


def with_schedule(config: FinetuneConfig, former: Optional[FinetuneConfig], schedule: Optional[Schedule]) -> FinetuneConfig:
    """The length of the learning rate's schedule stated: `former`'s where a run is resumed, else all updates of the run."""
    if schedule is None:
        return config
    steps = config.optimizer.schedule_steps or (former or config).run.epochs * schedule.updates_per_epoch
    if schedule.steps > steps:
        raise ConfigError(f"{config.path}: " + schedule_too_short(
            f"run.epochs is {config.run.epochs}, {schedule.steps} updates", schedule.steps, steps))
    return dataclasses.replace(config, optimizer=dataclasses.replace(config.optimizer, schedule_steps=steps))


def _packed(inputs: Optional[Inputs], config: FinetuneConfig, *, unpacked: bool = False) -> Optional[PackedInputs]:
    if inputs is None:
        return None
    data = config.data
    return PackedInputs(inputs, max_sequence_length=data.max_sequence_length, packer="none" if unpacked else data.packer,
                        max_sequences_per_pack=1 if unpacked else data.max_sequences_per_pack)


class Data(NamedTuple):
    """What environment.json says about the data of a run."""

    digest: int
    packs: int
    sequences: int
    algorithm: str
    vocabulary_sha256: str


class Outcome(NamedTuple):
    step: int
    stopped_by: Optional[int]
    folder: Path
    metrics: Dict[str, Any]

    @property
    def status(self) -> int:
        return 128 + self.stopped_by if self.stopped_by else 0


def fine_tune(prepared: Prepared, out: Optional[str], *, resume: bool = False, progress: Optional[bool] = None) -> Outcome:
    """Train, evaluate, write down and export; `resume` goes on in the folder `out`.

    Ctrl-C and SIGTERM let the update under way finish and save; a second Ctrl-C stops at once.
    """
    step, saved = 0, ()
    if resume:
        saved = saved_in(str(out))
        checkpoint = load_checkpoint(newest_checkpoint(Path(str(out), CHECKPOINTS)))
        agree(vocabulary_of_run(Path(str(out)), checkpoint), prepared.start.vocabulary.sha256,
              weights_of=out, data_of=prepared.start.description)
        prepared.tuner.load_state(checkpoint.engine)
        step = checkpoint.step
        _print_schedule(step, config_from_tree(yaml.safe_load(checkpoint.config), str(out)), prepared)
    with open_run_folder(out, prepared.config, first_step=step, saved=saved, environment=environment(
            device=describe(prepared), seed=prepared.config.run.seed, data=_data(prepared),
            command=[sys.executable] + sys.argv)) as folder:
        print(f"run       {folder}" + (f", from update {step:,}" if step else ""), flush=True)
        return _run_in(folder, prepared, step, progress)


def _print_schedule(step: int, former: FinetuneConfig, prepared: Prepared) -> None:
    if prepared.schedule is not None:
        before = former.optimizer.schedule_steps or former.run.epochs * prepared.schedule.updates_per_epoch
        optimizer = prepared.config.optimizer
        change = schedule_change(step, former.optimizer, optimizer, steps_before=before, steps_after=optimizer.schedule_steps or before)
        if change:
            print(f"schedule  {change}")


def _run_in(folder: Path, prepared: Prepared, step: int, progress: Optional[bool]) -> Outcome:
    """The run in its folder, from the update after `step`."""
    config, schedule = prepared.config, prepared.schedule
    begun = step
    with Interruption() as interruption:
        if schedule is not None and step < schedule.steps:
            step = _train(prepared, folder, step, interruption, progress)
    steps = schedule.steps if schedule else 0
    # The first update warms up caches and allocators: it counts only if it is the only one.
    records = read_log(folder / LOG)
    if records:
        counted = records[1:] or records
        seconds, sequences, tokens = (sum(record[name] for record in counted) for name in ("seconds", "sequences", "tokens"))
        print(f"trained   {len(records):,} updates, loss {records[0]['loss']:.3f} -> {records[-1]['loss']:.3f}, "
              f"{sequences / seconds:,.1f} seq/s, {tokens / seconds:,.0f} tok/s")
    if step < steps:
        print(f"stopped   by {signal.Signals(interruption.signal).name} after update {step:,} of {steps:,}; saved")
        print(f"resume    python -m ipu_packed_bert.finetune --resume {folder}")
        return Outcome(step, interruption.signal, folder, {})
    metrics: Dict[str, Any] = {}
    if prepared.evaluation is not None:
        metrics = evaluate(prepared, folder, step, progress)
    if config.run.export and schedule is not None and (step > begun or not (folder / MODEL).exists()):
        export(prepared, folder / MODEL)
        print(f"model     {folder / MODEL}, as transformers loads it ({prepared.task.architecture})")
    return Outcome(step, None, folder, metrics)


def _train(prepared: Prepared, folder: Path, step: int, interruption: Interruption, progress: Optional[bool]) -> int:
    """Updates `step` + 1 and on; returns the last one made."""
    config, tuner, schedule, run = prepared.config, prepared.tuner, prepared.schedule, prepared.config.run
    forget_after(folder / LOG, step)
    every = max(1, schedule.steps // 20)
    with open(folder / LOG, "a", encoding="utf-8") as log, progress_bar(schedule.steps, "updates", shown=progress, unit="update") as bar:
        bar.update(step)
        while step < schedule.steps and not interruption.signal:
            rate = tuner.learning_rate(step)
            update = tuner.step(schedule.update(step, config.batch.micro_batch), rate)
            step += 1
            epoch = (step - 1) // schedule.updates_per_epoch + 1
            append_record(log, {"step": step, "epoch": epoch, "learning_rate": rate, **update._asdict()})
            check_loss(update.loss, f"update {step}: the loss", folder / CHECKPOINTS)
            bar.set_postfix_str(_line(update), refresh=False)
            bar.update(1)
            last = step == schedule.steps
            # Before the checkpoint, so that an interruption while it evaluates is saved too.
            if run.evaluate_every and not last and step % run.evaluate_every == 0 and not interruption.signal:
                check_state(tuner.state(), step, folder / CHECKPOINTS)
                evaluate(prepared, folder, step, progress)
            if bar.disable and (step == 1 or last or step % every == 0):
                print(f"update {step:>{len(str(schedule.steps))}}/{schedule.steps}  {_line(update)}", flush=True)
            if last or interruption.signal or (run.checkpoint_every and step % run.checkpoint_every == 0):
                state = tuner.state()
                check_state(state, step, folder / CHECKPOINTS)
                saved = Checkpoint(step, state, {}, config.to_yaml(), prepared.start.vocabulary.sha256)
                save_checkpoint(folder / CHECKPOINTS, saved, keep=run.keep_checkpoints)
    return step


def _line(update: Update) -> str:
    return (f"loss {update.loss:.3f}  right {update.accuracy:.1%}  {update.sequences / update.seconds:,.1f} seq/s  "
            f"{update.sequences / update.rows:.2f} in a row")


def evaluate(prepared: Prepared, folder: Path, step: int, progress: Optional[bool]) -> Dict[str, Any]:
    """Outputs of every sequence, the predictions made of them, their scores; written to the folder, whole or not at all."""
    start = time.perf_counter()
    with progress_bar(prepared.evaluation.packing.packs, "evaluation", shown=progress, unit="row") as bar:
        outputs = prepared.tuner.predict(prepared.evaluation, seen=bar.update)
    seconds = time.perf_counter() - start
    found: Evaluation = prepared.task.evaluate(outputs)
    for name, content in found.files.items():
        _write_json(folder / name, content)
    _write_json(folder / EVALUATION, {"step": step, "seconds": seconds, "sequences": len(outputs),
                                      "rows": prepared.evaluation.packing.packs, **found.metrics})
    scores = "  ".join(percent(found.metrics)) or "no labels in the file"
    print(f"evaluated {scores}  ({len(outputs) / seconds:,.1f} seq/s; {folder / 'predictions.json'})", flush=True)
    return found.metrics


def export(prepared: Prepared, folder: Path) -> None:
    """The model as a Hugging Face folder; a former one is replaced when the new one is whole."""
    partial = folder.with_name(folder.name + ".partial")
    shutil.rmtree(partial, ignore_errors=True)
    write_folder(partial, prepared.start.model, prepared.tuner.state()["model"], prepared.start.vocabulary,
                 architecture=prepared.task.architecture, **prepared.task.export_settings())
    shutil.rmtree(folder, ignore_errors=True)
    partial.rename(folder)


def describe(prepared: Prepared) -> str:
    device, threads = pick_device(), torch.get_num_threads()
    name = torch.cuda.get_device_name() if device.type == "cuda" else f"{threads} CPU thread{'' if threads == 1 else 's'}"
    return f"{name}, {prepared.config.engine.precision}, {prepared.attention} attention"


def _data(prepared: Prepared) -> Data:
    packed = prepared.training or prepared.evaluation
    ids = packed.inputs.input_ids
    return Data(zlib.crc32(ids.tobytes()), packed.packing.packs, len(packed.inputs), packed.packing.algorithm, prepared.start.vocabulary.sha256)


def _write_json(path: Path, content: Any) -> None:
    write_atomically(path, (json.dumps(content, indent=1, ensure_ascii=False) + "\n").encode())
