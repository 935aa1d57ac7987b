"""Question answering on paragraphs (SQuAD 1.1 and 2): a start and an end of an answer in every sequence of a pack.

Letters as in `model/bert.py`: B rows, S slots, D places for sequences, H hidden size.
"""

from __future__ import annotations

from typing import Any, Dict, List, NamedTuple, Optional, Sequence, Tuple

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F

from ipu_packed_bert.model.bert import initialise
from ipu_packed_bert.model.loss import correct
from ipu_packed_bert.model.packed import PackedBert, hidden_score
from ipu_packed_bert.settings.finetuning import FinetuneConfig, SquadConfig
from ipu_packed_bert.settings.placement import PlacedPart
from ipu_packed_bert.settings.schema import ModelConfig
from ipu_packed_bert.tasks import squad
from ipu_packed_bert.tasks.examples import Asked, ExampleTask, Scored
from ipu_packed_bert.tasks.files import ExampleSource
from ipu_packed_bert.tasks.scores import best_threshold, score_answers
from ipu_packed_bert.tasks.tokenizer import Tokenizer
from pack_data.reading.fields import said_of


class _QuestionsOutput(NamedTuple):
    """Scalars over a micro-batch."""

    loss: torch.Tensor  # sum over its sequences, times the scale
    correct: torch.Tensor  # sequences whose answer is right at both ends


def span_log_probabilities(logits_BS, input_mask_BS, present_BD, hidden: float) -> torch.Tensor:
    """Log-probabilities of each sequence's slots, [B, D, S]: a softmax over the slots of the sequence alone.

    The mask is added to the logits: 0 on the slots of sequence d, `hidden` on all others, as in the attention
    (`model.packed.hidden_score`), so that their probability is exactly 0.  A sequence that is not there sees every
    slot: its values are finite and mean nothing, where an empty softmax would be NaN.
    """
    numbers_D = torch.arange(1, present_BD.shape[1] + 1, dtype=input_mask_BS.dtype, device=input_mask_BS.device)
    other_BDS = input_mask_BS.unsqueeze(1) != numbers_D.view(1, -1, 1)
    seen = torch.zeros((), dtype=logits_BS.dtype, device=logits_BS.device)
    mask_BDS = torch.where(other_BDS & present_BD.unsqueeze(2), torch.full_like(seen, hidden), seen)
    return torch.log_softmax(logits_BS.unsqueeze(1) + mask_BDS, dim=2)


class _PackedBertForQuestionAnswering(PackedBert):
    """Start and end of an answer in every sequence; names of weights as in Hugging Face's BertForQuestionAnswering."""

    def __init__(self, model: ModelConfig, *, attention: str = "eager"):
        super().__init__(model, attention=attention, pooler=False)
        self.span_hidden = hidden_score(attention)
        self.qa_outputs = nn.Linear(model.hidden_size, 2)
        initialise(self, model.initializer_range)

    def predictions(self, input_ids_BS, input_mask_BS, segment_ids_BS, positions_BS) -> torch.Tensor:
        """[B, S, 2]: of every slot to be the start and the end of its sequence's answer; at least float32."""
        logits_BS2 = self.qa_outputs(self.hidden(input_ids_BS, input_mask_BS, segment_ids_BS, positions_BS))
        return logits_BS2 if logits_BS2.dtype == torch.float64 else logits_BS2.float()

    def forward(
        self,
        input_ids_BS,
        input_mask_BS,
        segment_ids_BS,
        positions_BS,
        sequence_numbers_BD,
        start_positions_BD,
        end_positions_BD,
        scale_B,
    ) -> _QuestionsOutput:
        logits_BS2 = self.predictions(input_ids_BS, input_mask_BS, segment_ids_BS, positions_BS)
        present_BD = sequence_numbers_BD > 0
        weight_BD = present_BD.to(logits_BS2.dtype)
        loss_BD, right_BD = torch.zeros_like(weight_BD), present_BD
        for end, position_BD in enumerate((start_positions_BD, end_positions_BD)):
            log_BDS = span_log_probabilities(logits_BS2[:, :, end], input_mask_BS, present_BD, self.span_hidden)
            # Not a gather, whose gradient would be a scatter on IPUs.
            wrong = F.nll_loss(log_BDS.flatten(0, 1), position_BD.to(torch.int64).flatten(), reduction="none")
            loss_BD = loss_BD + 0.5 * wrong.view(position_BD.shape)
            right_BD = right_BD & correct(log_BDS, position_BD)
        # A sequence that is not there has a finite loss (its slot 0 is seen), and weighs nothing.
        loss = ((loss_BD * weight_BD).sum(1) * scale_B).sum()
        return _QuestionsOutput(loss, right_BD.to(weight_BD.dtype).sum())


class QuestionsTask(ExampleTask):
    """Questions cut into windows, and one answer for each question."""

    name = "squad"
    architecture = "BertForQuestionAnswering"
    fields = (
        "input_ids",
        "input_mask",
        "segment_ids",
        "positions",
        "sequence_numbers",
        "start_positions",
        "end_positions",
        "scale",
    )
    heads: Tuple[PlacedPart, ...] = (PlacedPart("answer head", "qa_outputs"),)
    of_slots = True

    def __init__(
        self,
        config: FinetuneConfig,
        tokenizer: Tokenizer,
        model: ModelConfig,
        labels: Any = None,
        asked: Optional[Asked] = None,
    ):
        super().__init__(config, tokenizer, model, asked)
        self._squad = config.of_task(SquadConfig)
        seen = set()
        training, evaluation = self.file("training"), self.file("evaluation")
        if training is not None:
            questions = self._read(training)
            unlabelled = sum(not question.labelled for question in questions)
            if unlabelled:
                raise ValueError(
                    f"{training}: {unlabelled} of {len(questions)} questions have neither answers nor "
                    "is_impossible; "
                    "nothing can be learnt from them"
                )
            seen = {question.paragraph for question in questions}
            self.training = self._windows(questions, "training").inputs
        if evaluation is not None:
            questions = self._read(evaluation)
            if self._squad.drop_seen_paragraphs:
                kept = [question for question in questions if question.paragraph not in seen]
                self.notes.append(
                    f"{evaluation}: {len(questions) - len(kept):,} questions on paragraphs of the training file "
                    "are left out"
                )
                if not kept:
                    raise ValueError(f"{evaluation}: all its paragraphs are in {training}; evaluate on others")
                questions = kept
            self.windows = self._windows(questions, "evaluation")
            self.evaluation = self.windows.inputs
        self.pack()

    def _read(self, name: ExampleSource) -> List[squad.Question]:
        questions = squad.read_squad(name, labels=self.reads_labels)
        if self._squad.null_answers or self.asked is not None:
            return questions
        kept = [question for question in questions if question.answers or not question.labelled]
        if len(kept) < len(questions):
            self.notes.append(
                f"{name}: {len(questions) - len(kept):,} questions without an answer are left out "
                "(task.null_answers is false)"
            )
        if not kept:
            raise ValueError(f"{name}: no question has an answer; use them with --set task.null_answers=true")
        return kept

    def _windows(self, questions: Sequence[squad.Question], what: str) -> squad.Windows:
        questions = self.drawn(questions, what)
        with said_of(str(self.file(what))):
            windows = squad.make_windows(questions, self.tokenizer, self._squad, self.max_sequence_length)
        lengths = windows.inputs.lengths
        self.notes.append(
            f"{what}: {len(questions):,} questions in {len(lengths):,} windows of {lengths.mean():.0f} tokens"
        )
        return windows

    @staticmethod
    def texts(config: FinetuneConfig) -> List[str]:
        questions = squad.read_squad(str(config.data.training))
        return list(
            dict.fromkeys([question.paragraph for question in questions] + [question.text for question in questions])
        )

    @property
    def scores(self) -> Tuple[str, ...]:
        return ("exact", "f1", "best_exact", "best_f1") if self._squad.null_answers else ("exact", "f1")

    @property
    def scorable(self) -> bool:
        return all(question.labelled for question in self.windows.questions)

    def network(self, attention: str) -> PackedBert:
        return _PackedBertForQuestionAnswering(self.model, attention=attention)

    def score(self, outputs: Sequence[np.ndarray]) -> Scored:
        predictions = squad.answer_questions(self.windows, outputs, self._squad)
        metrics: Dict[str, Any] = {}
        if self.scorable:
            answers = squad.gold(self.windows.questions)
            metrics = score_answers({name: each.text for name, each in predictions.items()}, answers)
            if self._squad.null_answers:
                texts = {name: each.best_text for name, each in predictions.items()}
                odds = {name: each.null_odds for name, each in predictions.items()}
                for of in ("exact", "f1"):
                    best = best_threshold(texts, odds, answers, of=of)
                    metrics.update({f"best_{of}": best.score, f"best_{of}_threshold": best.threshold})
        null_answers = self._squad.null_answers
        return Scored(
            metrics,
            squad.prediction_files(predictions, null_answers=null_answers),
            [squad.answer_line(name, each, null_answers=null_answers) for name, each in predictions.items()],
        )
