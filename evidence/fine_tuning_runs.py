"""The cells of the fine-tuning experiment: scores of trained models, the same updates in several ways, times.

All ways have the network, the optimiser and the scores of the task, and differ only in their passes (`ways.py`).
Without the mask is the packed way in which every token attends to its whole row.
"""

from __future__ import annotations

import math
import operator
import time
from collections import Counter
from functools import partial
from itertools import chain
from typing import Any, Dict, List, NamedTuple, Optional, Sequence

import numpy as np
import torch

from evidence.runner import Row
from evidence.ways import (
    AGAIN,
    INFERENCE,
    LONGEST,
    MAXIMUM,
    NO_MASK,
    PACKED,
    SORTED,
    TRAINING,
    WAYS,
    Passes,
    Ways,
    slots_per_token,
)
from ipu_packed_bert.data.global_batches import Batch
from ipu_packed_bert.engine.host.devices import clock_of
from ipu_packed_bert.model.optimizer import clip, gradient_norm, learning_rate
from ipu_packed_bert.model.packed import PaddingMask, hidden_score
from ipu_packed_bert.tasks.inputs import Inputs, pack_inputs, rows_of
from ipu_packed_bert.tasks.questions import QuestionsTask, gold
from ipu_packed_bert.tasks.scores import score_answer
from ipu_packed_bert.training.examples import ExamplesRun
from pack_data.cli.command import NotFinite
from pack_data.cli.timing import seconds_in_turn, timed
from pack_data.packing.packing import Packing

_Outputs = Sequence[np.ndarray]  # of each sequence
TIMED = (MAXIMUM, LONGEST, SORTED, PACKED, AGAIN)
_SAMPLE_SEED = 9


class Timing(NamedTuple):
    """The amount of timed work, the same updates and sequences in every round."""

    rounds: int
    updates: int
    sequences: int  # of inference


class Learner:
    """Updates and predictions of a task over passes of any shape, with its network and its optimiser."""

    def __init__(self, prepared: ExamplesRun) -> None:
        engine: Any = prepared.engine
        self.task = prepared.task
        self.engine = engine
        self.config = prepared.config
        self.network = engine.model
        self.device = next(self.network.parameters()).device
        self.clock = clock_of(self.device, of_process=True)
        # Without packs, the mask hides the padding of a row only.
        self._padding = PaddingMask(hidden_score(engine.attention.kind))
        self._blocks = self.network.attention_mask

    def _set_mask(self, way: str) -> None:
        """Set the mask of a way."""
        self.network.attention_mask = self._blocks if way in (PACKED, AGAIN) else self._padding

    def ways(self, what: str) -> Ways:
        """Return the ways of the training sequences, or of the held-out ones."""
        task = self.task
        packs = task.training_packs if what == TRAINING else task.evaluation_packs
        assert packs is not None
        return Ways(
            packs.inputs.lengths,
            packs.packing,
            rows_of_pass=self.config.batch.micro_batch,
            rows_of_update=self.config.packs_per_update(task.packs.packing.packing_factor),
            seed=packs.seed,
        )

    def update(self, passes: Passes, rate: float, way: str) -> float:
        """Make one weight update in the same way as the host engine; return its mean loss over the sequences."""
        inputs = self.task.training
        assert inputs is not None
        self.network.train()
        self._set_mask(way)
        share = 1.0 / sum(len(part.sequences) for part in passes)
        dtype = self.network.bert.embeddings.word_embeddings.weight.dtype
        names = [name for name in self.task.fields if name != "scale"]
        total = torch.zeros((), dtype=torch.float64, device=self.device)
        for part in passes:
            batch = rows_of(inputs, part.rows, part.slots)
            fields = self._fields(batch, names)
            fields["scale"] = torch.full((len(part.rows),), share, dtype=dtype, device=self.device)
            loss = self.network(*(fields[name] for name in self.task.fields)).loss
            loss.backward()
            total += loss.detach()

        parameters = self.network.parameters()
        gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
        loss, norm = torch.stack([total, gradient_norm(gradients).to(total)]).tolist()
        if not (math.isfinite(loss) and math.isfinite(norm)):
            raise NotFinite(
                f"the loss is {loss}, the gradient norm {norm}; lower the learning rate of the size"
            )

        bound = self.config.optimizer.max_gradient_norm
        if bound is not None:
            clip(gradients, norm, bound)
        optimizer = self.engine.optimizer
        for group in optimizer.param_groups:
            group["lr"] = rate
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return loss

    def predict(
        self, passes: Passes, way: str, inputs: Optional[Inputs] = None
    ) -> List[np.ndarray]:
        """Return the outputs of every sequence of the passes, in the order of their numbers."""
        inputs = self.task.evaluation if inputs is None else inputs
        assert inputs is not None
        self.network.eval()
        self._set_mask(way)
        outputs: Dict[int, np.ndarray] = {}
        with torch.no_grad():
            for part in passes:
                batch = rows_of(inputs, part.rows, part.slots)
                fields = self._fields(batch, self.task.prediction_fields)
                predictions = self.network.predictions(*fields.values()).cpu().numpy()
                outputs.update(self.task.outputs_of(predictions, batch))
        return [outputs[number] for number in sorted(outputs)]

    def _fields(self, batch: Batch, names: Sequence[str]) -> Dict[str, torch.Tensor]:
        return {name: torch.from_numpy(batch[name]).to(self.device) for name in names}


# ---- scores ----------------------------------------------------------------------------------------------------------


def train(learner: Learner, way: str, *, steps: int) -> List[Row]:
    """Train; return the amounts, the scores, and the score of each example alone in its row.

    A packed run also counts the answers of the same model that change in packs, and in packs without the mask.
    """
    ways = learner.ways(TRAINING)
    counts: Counter[str] = Counter()
    seconds = 0.0
    updates: List[Passes] = []
    for step in range(steps):
        epoch, number = divmod(step, ways.updates_per_epoch)
        if number == 0:
            updates = ways.updates(_laid_out(way), epoch)
        rate = learning_rate(step, learner.config)
        passes = updates[number]
        taken, _ = timed(partial(learner.update, passes, rate, way), learner.clock)
        seconds += taken
        counts.update(_counts(passes, learner.task.training))

    held_out = learner.ways(INFERENCE)
    outputs = learner.predict(held_out.all_passes(SORTED), SORTED)
    scores = learner.task.score(outputs).metrics
    row: Row = {
        **counts,
        "seconds": round(seconds, 2),
        "updates": steps,
        "metrics": {name: value for name, value in scores.items() if isinstance(value, float)},
        "points": points(learner.task, outputs),
    }
    if way == PACKED:
        for name in (PACKED, NO_MASK):
            others = learner.predict(held_out.all_passes(PACKED), name)
            row[f"answered_{name}"] = apart(learner.task, outputs, others)
    return [row]


def _laid_out(way: str) -> str:
    """Return the way whose passes a control has."""
    return PACKED if way in (AGAIN, NO_MASK) else way


def _counts(passes: Passes, inputs: Any) -> Dict[str, int]:
    """Count the sequences, tokens and slots of some passes."""
    numbers = list(chain.from_iterable(part.sequences for part in passes))
    return {
        "sequences": len(numbers),
        "tokens": int(inputs.lengths[numbers].sum()),
        "slots": sum(part.size for part in passes),
    }


def points(task: Any, outputs: _Outputs) -> List[int]:
    """Return the score of each example in whole percent: 0 or 100 for its class, or the F1 of an answer."""
    if isinstance(task, QuestionsTask):
        answers = task.score(outputs).files["predictions.json"]
        wanted = gold(task.windows.questions)
        return [round(100 * score_answer(answers[name], wanted[name]).f1) for name in wanted]
    labels = task.evaluation.targets["labels"]
    return [100 * int(output.argmax() == label) for output, label in zip(outputs, labels)]


def no_model(task: Any) -> float:
    """Return the score of the most frequent answer of training, percent: its class, or for questions its slots."""
    training = task.training
    lengths = task.evaluation.lengths
    if isinstance(task, QuestionsTask):
        counts = []
        for name in ("start_positions", "end_positions"):
            slots = training.slot_targets[name]
            counts.append(np.bincount(slots, minlength=task.max_sequence_length))
        logits = np.stack(counts, axis=1)
        outputs = [logits[:length] for length in lengths]
    else:
        outputs = [np.bincount(training.targets["labels"])] * len(lengths)
    return round(float(np.mean(points(task, outputs))), 3)


def apart(task: Any, outputs: _Outputs, others: _Outputs) -> Row:
    """Count the answers that differ, and return the largest difference of a logit."""
    answers = _answers(task, outputs)
    return {
        "different": sum(map(operator.ne, answers, _answers(task, others))),
        "answers": len(answers),
        "logits": _largest_difference(outputs, others),
    }


def _largest_difference(outputs: _Outputs, others: _Outputs) -> float:
    return max(float(np.abs(first - second).max()) for first, second in zip(outputs, others))


def _answers(task: Any, outputs: _Outputs) -> List[Any]:
    """Return the answers to all questions or texts."""
    predictions = task.score(outputs).files["predictions.json"]
    if isinstance(predictions, dict):
        return list(predictions.values())
    return [prediction["prediction"] for prediction in predictions]


# ---- the same updates ------------------------------------------------------------------------------------------------


def same_updates(learner: Learner, *, updates: int, sequences: int) -> List[Row]:
    """Make the first updates of a run in the ways with equal updates, and without the mask, from the same weights.

    The logits of some held-out sequences alone in their rows are compared with those after packed updates; `start` is
    their distance before all updates.
    """
    inputs = sampled(learner.task.evaluation, sequences)
    passes = _ways_of(learner, inputs).all_passes(SORTED)
    start = learner.engine.state()
    outputs = {"start": learner.predict(passes, SORTED, inputs)}

    ways = learner.ways(TRAINING)
    rate = learner.config.optimizer.learning_rate / 10
    for way in (PACKED, MAXIMUM, LONGEST, NO_MASK):
        learner.engine.load_state(start)
        for update in ways.updates(_laid_out(way))[:updates]:
            learner.update(update, rate, way)
        outputs[way] = learner.predict(passes, SORTED, inputs)
    packed = outputs.pop(PACKED)
    return [{"way": way, "logits": _largest_difference(outputs[way], packed)} for way in outputs]


def sampled(inputs: Any, number: int) -> Inputs:
    """Draw some of the sequences at random, in their order, for predictions."""
    draw = np.random.default_rng(_SAMPLE_SEED).permutation(len(inputs))
    chosen = np.sort(draw[:number])
    sequences = inputs.sequences.take(chosen)
    tokens = dict(sequences.tokens)
    return Inputs(
        sequences.lengths,
        tokens.pop("input_ids"),
        tokens.pop("segment_ids"),
        {name: sequences.scalars[name] for name in inputs.slot_targets},
        {name: values[chosen] for name, values in inputs.targets.items()},
        tokens,
    )


def _ways_of(learner: Learner, inputs: Inputs) -> Ways:
    """Return the ways of other sequences than the learner's."""
    packing = packing_of(learner, inputs)
    return Ways(inputs.lengths, packing, rows_of_pass=learner.config.batch.micro_batch)


def packing_of(learner: Learner, inputs: Inputs) -> Packing:
    """Pack sequences in rows of the learner's configuration."""
    data = learner.config.data
    return pack_inputs(
        inputs,
        max_sequence_length=data.max_sequence_length,
        packer=data.packer,
        max_sequences_per_pack=data.max_sequences_per_pack,
    )


# ---- times -----------------------------------------------------------------------------------------------------------


def times(learner: Learner, timing: Timing) -> List[Row]:
    """Time each way in each round, with the same updates and sequences in every round.

    The ways take turns, so that a disturbance slows all of them down.
    """
    inputs = sampled(learner.task.evaluation, timing.sequences)
    held_out = _ways_of(learner, inputs)
    training = learner.ways(TRAINING)
    updates = {way: training.sample(_laid_out(way), timing.updates) for way in TIMED}
    passes = {way: held_out.all_passes(_laid_out(way)) for way in TIMED}
    rate = 1e-7  # the weights hardly change, and the time of an update does not depend on them

    def once(what: str, way: str) -> None:
        if what == INFERENCE:
            learner.predict(passes[way], way, inputs)
            return
        for update in updates[way]:
            learner.update(update, rate, way)

    for way in (MAXIMUM, PACKED):  # warm up: memory, caches
        learner.update(updates[way][0], rate, way)
        learner.predict(passes[way][:1], way, inputs)

    counts = {}
    for way in TIMED:
        counts[TRAINING, way] = _counts(tuple(chain(*updates[way])), learner.task.training)
    for way in TIMED:
        counts[INFERENCE, way] = _counts(passes[way], inputs)
    sides = {side: partial(once, *side) for side in counts}
    seconds = seconds_in_turn(sides, timing.rounds, learner.clock, warm_up=False)

    rows = []
    for (what, way), rounds in seconds.items():
        side = {"what": what, "way": way}
        for number, value in enumerate(rounds):
            timed_round = {"round": number, "seconds": round(float(value), 5)}
            rows.append({**side, **timed_round, **counts[what, way]})
    return rows


# ---- facts -----------------------------------------------------------------------------------------------------------


def facts(learner: Learner, steps: int) -> Dict[str, Any]:
    """Return facts of the data: amounts, slots per token of every way over all sequences, and the time of packing."""
    task = learner.task
    assert task.training is not None
    data: Dict[str, Any] = {}
    for what in (TRAINING, INFERENCE):
        ways = learner.ways(what)
        slots = {}
        for way in WAYS:
            updates = ways.updates(way) if what == TRAINING else [ways.all_passes(way)]
            slots[way] = round(slots_per_token(updates, ways.lengths), 4)
        data[what] = {
            "sequences": len(ways.lengths),
            "tokens": int(ways.lengths.sum()),
            "packing_factor": round(ways.packing.packing_factor, 4),
            "slots_per_token": slots,
        }
    seconds, _ = timed(partial(packing_of, learner, task.training), time.process_time)
    return {
        "steps": steps,
        "max_sequence_length": task.max_sequence_length,
        **data,
        "updates_per_epoch": learner.ways(TRAINING).updates_per_epoch,
        "no_model": no_model(task),
        "packing_seconds": round(seconds, 3),
        "data": f"{task.packs.digest:016x}",
    }
