"""The cells of the fine-tuning experiment: scores of trained models, the same updates in several ways, times.

Every way runs the task's own network, optimiser and scores over the passes that `ways.py` lays out; nothing else parts
the ways. Without the mask is the packed way in which every token sees its whole row.
"""

from __future__ import annotations

import math
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

TIMED = (MAXIMUM, LONGEST, SORTED, PACKED, AGAIN)
_SAMPLE_SEED = 9


class Timing(NamedTuple):
    """The amount that is timed: the same updates and sequences in every round."""

    rounds: int
    updates: int
    sequences: int  # of inference


class Learner:
    """Updates and predictions of a task over passes of any shape, with its network and its optimiser."""

    def __init__(self, prepared: ExamplesRun) -> None:
        self.task, self.engine = prepared.task, prepared.engine
        self.config: Any = prepared.config  # a schedule takes that of any task
        self.network, self.optimizer = self.engine.model, self.engine.optimizer  # type: ignore[attr-defined]
        self.device = next(self.network.parameters()).device
        self.clock = clock_of(self.device, of_process=True)
        own = self.network.attention_mask
        padding = PaddingMask(hidden_score(self.engine.attention.kind))  # type: ignore[attr-defined]
        # The mask of a row of one sequence is that of its padding, as people have it without packs.
        self._masks = {
            way: own if way in (PACKED, AGAIN) else padding for way in (*WAYS, AGAIN, NO_MASK)
        }

    def ways(self, what: str) -> Ways:
        """Return the ways of the training sequences, or of those that are scored."""
        task, batch = self.task, self.config.batch
        packs = task.training_packs if what == TRAINING else task.evaluation_packs
        assert packs is not None
        return Ways(
            packs.inputs.lengths,
            packs.packing,
            rows_of_pass=batch.micro_batch,
            rows_of_update=self.config.packs_per_update(task.packs.packing.packing_factor),
            seed=packs.seed,
        )

    def update(self, passes: Passes, rate: float, way: str) -> float:
        """Make one weight update, as the host engine does; return its loss, the mean over its sequences."""
        inputs = self.task.training
        assert inputs is not None
        self.network.train()
        self.network.attention_mask = self._masks[way]
        share = 1.0 / sum(len(each.sequences) for each in passes)
        total = torch.zeros((), dtype=torch.float64, device=self.device)
        for each in passes:
            batch = rows_of(inputs, each.rows, each.slots)
            fields = self._fields(
                batch, tuple(name for name in self.task.fields if name != "scale")
            )
            dtype = self.network.bert.embeddings.word_embeddings.weight.dtype
            fields["scale"] = torch.full((len(each.rows),), share, dtype=dtype, device=self.device)
            loss = self.network(*(fields[name] for name in self.task.fields)).loss
            loss.backward()
            total += loss.detach()
        gradients = [
            parameter.grad for parameter in self.network.parameters() if parameter.grad is not None
        ]
        loss, norm = torch.stack([total, gradient_norm(gradients).to(total)]).tolist()
        if not (math.isfinite(loss) and math.isfinite(norm)):
            raise NotFinite(
                f"the loss is {loss}, the gradient norm {norm}; lower the learning rate of the size"
            )
        if self.config.optimizer.max_gradient_norm is not None:
            clip(gradients, norm, self.config.optimizer.max_gradient_norm)
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return loss

    def predict(
        self, passes: Passes, way: str, inputs: Optional[Inputs] = None
    ) -> List[np.ndarray]:
        """Return the outputs of every sequence of the passes, in the order of their numbers."""
        inputs = self.task.evaluation if inputs is None else inputs
        assert inputs is not None
        self.network.eval()
        self.network.attention_mask = self._masks[way]
        found: Dict[int, np.ndarray] = {}
        with torch.no_grad():
            for each in passes:
                batch = rows_of(inputs, each.rows, each.slots)
                fields = self._fields(batch, self.task.prediction_fields)
                predictions = self.network.predictions(*fields.values()).cpu().numpy()
                found.update(self.task.outputs_of(predictions, batch))
        return [found[number] for number in sorted(found)]

    def _fields(self, batch: Batch, names: Sequence[str]) -> Dict[str, torch.Tensor]:
        return {name: torch.from_numpy(batch[name]).to(self.device) for name in names}


# ---- scores ----------------------------------------------------------------------------------------------------------


def train(learner: Learner, way: str, *, steps: int) -> List[Row]:
    """Train; return the amounts, the scores, and the score of each example, each alone in its row.

    A packed run also counts the answers that change if the same model answers in packs, and in packs without the mask.
    """
    ways, seconds = learner.ways(TRAINING), 0.0
    counts: Counter[str] = Counter()
    updates: List[Passes] = []
    for step in range(steps):
        epoch, number = divmod(step, ways.updates_per_epoch)
        if number == 0:
            updates = ways.updates(PACKED if way == NO_MASK else way, epoch)
        rate = learning_rate(step, learner.config)
        seconds += timed(partial(learner.update, updates[number], rate, way), learner.clock)[0]
        counts.update(_counts(updates[number], learner.task.training))
    passes = learner.ways(INFERENCE)
    outputs = learner.predict(passes.all_passes(SORTED), SORTED)
    found = learner.task.score(outputs)
    metrics = {name: value for name, value in found.metrics.items() if isinstance(value, float)}
    row: Row = {**counts, "seconds": round(seconds, 2), "updates": steps, "metrics": metrics}
    row["points"] = points(learner.task, outputs)
    if way == PACKED:
        for name in (PACKED, NO_MASK):
            others = learner.predict(passes.all_passes(PACKED), name)
            row[f"answered_{name}"] = apart(learner.task, outputs, others)
    return [row]


def _counts(passes: Passes, inputs: Any) -> Dict[str, int]:
    numbers = [number for each in passes for number in each.sequences]
    return {
        "sequences": len(numbers),
        "tokens": int(inputs.lengths[numbers].sum()),
        "slots": sum(each.size for each in passes),
    }


def points(task: Any, outputs: Sequence[np.ndarray]) -> List[int]:
    """Return the score of each example, whole percent: its class is right, or the F1 of the answer to a question."""
    if isinstance(task, QuestionsTask):
        answers = task.score(outputs).files["predictions.json"]
        wanted = gold(task.windows.questions)
        return [round(100 * score_answer(answers[name], wanted[name]).f1) for name in wanted]
    labels = task.evaluation.targets["labels"]
    return [100 * int(output.argmax() == label) for output, label in zip(outputs, labels)]


def no_model(task: Any) -> float:
    """Return the score of the most frequent answer of training, percent: its class, or for questions its slots."""
    training, held_out = task.training, task.evaluation
    if isinstance(task, QuestionsTask):
        ends = [training.slot_targets[name] for name in ("start_positions", "end_positions")]
        counts = np.stack(
            [np.bincount(each, minlength=task.max_sequence_length) for each in ends], axis=1
        )
        outputs = [counts[:length] for length in held_out.lengths]
    else:
        outputs = [np.bincount(training.targets["labels"])] * len(held_out.lengths)
    return round(float(np.mean(points(task, outputs))), 3)


def apart(task: Any, outputs: Sequence[np.ndarray], others: Sequence[np.ndarray]) -> Row:
    """Count the answers that differ, and return the largest difference of a logit."""
    mine, theirs = (
        _answers(task.score(each).files["predictions.json"]) for each in (outputs, others)
    )
    logits = max(float(np.abs(first - second).max()) for first, second in zip(outputs, others))
    return {
        "different": sum(a != b for a, b in zip(mine, theirs)),
        "answers": len(mine),
        "logits": logits,
    }


def _answers(predictions: Any) -> List[Any]:
    if isinstance(predictions, dict):
        return list(predictions.values())
    return [each["prediction"] for each in predictions]


# ---- the same updates ------------------------------------------------------------------------------------------------


def same_updates(learner: Learner, *, updates: int, sequences: int) -> List[Row]:
    """Make the first updates of a run in each way that has the same ones, and without the mask, all from one start.

    Compared are the outputs of some held-out sequences, each alone in its row, with those after packed updates;
    `start` says how far the updates have moved them.
    """
    inputs = sampled(learner.task.evaluation, sequences)
    own = Ways(
        inputs.lengths, packing_of(learner, inputs), rows_of_pass=learner.config.batch.micro_batch
    )
    start = learner.engine.state()
    ways = learner.ways(TRAINING)
    found: Dict[str, List[np.ndarray]] = {}
    for way in (PACKED, MAXIMUM, LONGEST, NO_MASK):
        learner.engine.load_state(start)
        if not found:
            found["start"] = learner.predict(own.all_passes(SORTED), SORTED, inputs)
        for passes in ways.updates(PACKED if way == NO_MASK else way)[:updates]:
            learner.update(passes, learner.config.optimizer.learning_rate / 10, way)
        found[way] = learner.predict(own.all_passes(SORTED), SORTED, inputs)
    return [
        {
            "way": way,
            "logits": max(float(np.abs(a - b).max()) for a, b in zip(outputs, found[PACKED])),
        }
        for way, outputs in found.items()
        if way != PACKED
    ]


def sampled(inputs: Any, number: int) -> Inputs:
    """Draw some of the sequences at random, in their order, for predictions: without the fields that are learnt."""
    count = len(inputs)
    chosen = np.sort(np.random.default_rng(_SAMPLE_SEED).permutation(count)[:number])
    taken = inputs.sequences.take(chosen)
    tokens = dict(taken.tokens)
    ids, segments = tokens.pop("input_ids"), tokens.pop("segment_ids")
    targets = {name: taken.scalars[name] for name in inputs.slot_targets}
    return Inputs(
        taken.lengths,
        ids,
        segments,
        targets,
        {name: each[chosen] for name, each in inputs.targets.items()},
        tokens,
    )


def packing_of(learner: Learner, inputs: Inputs) -> Packing:
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

    The ways take turns, so that what disturbs them disturbs all.
    """
    inputs = sampled(learner.task.evaluation, timing.sequences)
    held_out = Ways(
        inputs.lengths, packing_of(learner, inputs), rows_of_pass=learner.config.batch.micro_batch
    )
    training = learner.ways(TRAINING)
    updates = {way: training.sample(_laid_out(way), timing.updates) for way in TIMED}
    passes = {way: held_out.all_passes(_laid_out(way)) for way in TIMED}
    rate = 1e-7  # the weights hardly move: how long an update takes does not depend on them

    def once(what: str, way: str) -> None:
        if what == INFERENCE:
            learner.predict(passes[way], way, inputs)
            return
        for update in updates[way]:
            learner.update(update, rate, way)

    for way in (MAXIMUM, PACKED):  # warm up: memory, caches
        learner.update(updates[way][0], rate, way)
        learner.predict(passes[way][:1], way, inputs)
    counts = {
        **{
            (TRAINING, way): _counts(tuple(chain(*updates[way])), learner.task.training)
            for way in TIMED
        },
        **{(INFERENCE, way): _counts(passes[way], inputs) for way in TIMED},
    }
    sides = {side: partial(once, *side) for side in counts}
    return [
        {
            "what": what,
            "way": way,
            "round": number,
            "seconds": round(float(each), 5),
            **counts[what, way],
        }
        for (what, way), found in seconds_in_turn(
            sides, timing.rounds, learner.clock, warm_up=False
        ).items()
        for number, each in enumerate(found)
    ]


def _laid_out(way: str) -> str:
    return PACKED if way == AGAIN else way


# ---- facts -----------------------------------------------------------------------------------------------------------


def facts(learner: Learner, steps: int) -> Dict[str, Any]:
    """Return facts of the data: amounts, slots per token of every way over all sequences, and the time of packing."""
    found: Dict[str, Any] = {
        "steps": steps,
        "max_sequence_length": learner.task.max_sequence_length,
    }
    for what in (TRAINING, INFERENCE):
        ways = learner.ways(what)
        laid_out = {
            way: ways.updates(way) if what == TRAINING else [ways.all_passes(way)] for way in WAYS
        }
        found[what] = {
            "sequences": len(ways.lengths),
            "tokens": int(ways.lengths.sum()),
            "packing_factor": round(ways.packing.packing_factor, 4),
            "slots_per_token": {
                way: round(slots_per_token(each, ways.lengths), 4) for way, each in laid_out.items()
            },
        }
        if what == TRAINING:
            found["updates_per_epoch"] = ways.updates_per_epoch
    found["no_model"] = no_model(learner.task)
    assert learner.task.training is not None
    seconds, _ = timed(partial(packing_of, learner, learner.task.training), time.process_time)
    found["packing_seconds"] = round(seconds, 3)
    found["data"] = f"{learner.task.packs.digest:016x}"
    return found
