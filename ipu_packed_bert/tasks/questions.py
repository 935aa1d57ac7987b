"""Question answering on paragraphs (SQuAD 1.1 and 2): files to windows, a start and an end of an answer in every
sequence of a pack, and the logits of windows to one answer for each question.

As in BERT's own procedure: a paragraph that is too long for a row is cut into overlapping windows, the label of a
window that does not hold the whole answer is [CLS], a token's score counts in the one window that shows most of its
surroundings, and the answer is the best span over all windows.
Letters as in `model/bert.py`: B rows, S slots, D places for sequences, H hidden size.
"""

from __future__ import annotations

import unicodedata
from typing import Any, Dict, List, NamedTuple, Optional, Sequence, Set, Tuple

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F

from ipu_packed_bert.model.bert import initialise
from ipu_packed_bert.model.loss import correct
from ipu_packed_bert.model.packed import PackedBert, hidden_score
from ipu_packed_bert.settings.config import Config
from ipu_packed_bert.settings.finetuning import SquadConfig
from ipu_packed_bert.settings.placement import PlacedPart
from ipu_packed_bert.settings.schema import ModelConfig
from ipu_packed_bert.tasks.examples import ExampleTask, Inputs, LossAndCorrect, Scored, Tokenizer, Tokens
from ipu_packed_bert.tasks.files import ExampleSource, Faults, TableRow, plain_text, read_records
from ipu_packed_bert.tasks.scores import best_threshold, score_answers
from pack_data.reading.fields import Fields, named, said_of, shown


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
    ) -> LossAndCorrect:
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
        return LossAndCorrect(loss, right_BD.to(weight_BD.dtype).sum())


class QuestionsTask(ExampleTask):
    """Questions cut into windows, and one answer for each question."""

    name = "squad"
    architecture = "BertForQuestionAnswering"
    fields = (*ExampleTask.prediction_fields, "sequence_numbers", "start_positions", "end_positions", "scale")
    heads: Tuple[PlacedPart, ...] = (PlacedPart("answer head", "qa_outputs"),)
    of_slots = True
    windows: Windows  # of the questions that are evaluated or asked

    @property
    def _squad(self) -> SquadConfig:
        return self.config.of_task(SquadConfig)

    @classmethod
    def read(cls, source: ExampleSource, config: Config, *, labels: bool) -> List[Question]:
        """Of a SQuAD file, version 1.1 or 2; or of JSONL, a question and its context a line."""
        found = _Questions(source, labels)
        if source.format == "jsonl":
            read_records(source, found.add_record, what="question")
        else:
            found.add_squad()
        return found.questions

    @staticmethod
    def texts_of(example: Question) -> Sequence[str]:
        return (example.paragraph, example.text)

    def begin(self, read: Dict[str, List[Question]], labels: Optional[Sequence[str]]) -> None:
        for what, questions in read.items():
            if not self._squad.null_answers and self.asked is None:
                kept = [question for question in questions if question.answers or not question.labelled]
                self._keep(read, what, kept, "without an answer are left out (task.null_answers is false)")
                if not kept:
                    raise ValueError(
                        f"{self.sources[what]}: no question has an answer; use them with --set task.null_answers=true"
                    )
        training = read.get("training", ())
        unlabelled = sum(not question.labelled for question in training)
        if unlabelled:
            raise ValueError(
                f"{self.sources['training']}: {unlabelled} of {len(training)} questions have neither answers nor "
                "is_impossible; nothing can be learnt from them"
            )
        if self._squad.drop_seen_paragraphs and "evaluation" in read:
            seen = {question.paragraph for question in training}
            kept = [question for question in read["evaluation"] if question.paragraph not in seen]
            self._keep(read, "evaluation", kept, "on paragraphs of the training file are left out")
            if not kept:
                raise ValueError(
                    f"{self.sources['evaluation']}: all its paragraphs are in {self.sources['training']}; evaluate on "
                    "others"
                )

    def _keep(self, read: Dict[str, List[Question]], what: str, kept: List[Question], why: str) -> None:
        if len(kept) < len(read[what]):
            self.notes.append(f"{self.sources[what]}: {len(read[what]) - len(kept):,} questions {why}")
        read[what] = kept

    def inputs(self, examples: Sequence[Question], what: str) -> Inputs:
        with said_of(str(self.sources[what])):
            self.windows = _make_windows(examples, self.tokenizer, self._squad, self.max_sequence_length)
        lengths = self.windows.inputs.lengths
        self.notes.append(
            f"{what}: {len(examples):,} questions in {len(lengths):,} windows of {lengths.mean():.0f} tokens"
        )
        return self.windows.inputs

    @property
    def scores(self) -> Tuple[str, ...]:
        return ("exact", "f1", "best_exact", "best_f1") if self._squad.null_answers else ("exact", "f1")

    @property
    def scorable(self) -> bool:
        return all(question.labelled for question in self.examples)

    def network(self, attention: str) -> PackedBert:
        return _PackedBertForQuestionAnswering(self.model, attention=attention)

    def score(self, outputs: Sequence[np.ndarray]) -> Scored:
        predictions = _answer_questions(self.windows, outputs, self._squad)
        metrics: Dict[str, Any] = {}
        if self.scorable:
            answers = gold(self.windows.questions)
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
            _prediction_files(predictions, null_answers=null_answers),
            [_answer_line(name, each, null_answers=null_answers) for name, each in predictions.items()],
        )


# ---------------------------------------------------------------------------------------- files, windows and answers

_MOST_OF_QUESTION = 64  # tokens; what is longer is cut
_N_BEST = 20  # answers kept for each question


class Answer(NamedTuple):
    text: str
    start: int  # character of the paragraph


class Question(NamedTuple):
    id: str
    text: str
    paragraph: str
    answers: Tuple[Answer, ...]  # none: it has no answer, or the file doesn't tell
    labelled: bool


class _Questions:
    """Those read so far, each id once. labels: False leaves the answers unread, and whether there is one."""

    def __init__(self, source: ExampleSource, labels: bool):
        self.source, self.labels = source, labels
        self.questions: List[Question] = []
        self._ids: Set[str] = set()

    def add_record(self, record: TableRow, where: str) -> None:
        entry = Fields.of(record.values, where, "a line has question, context, and may have id and answers")
        self.add(entry, _text(entry, "context"), where, str(record.line))

    def add_squad(self) -> None:
        faults, where = Faults(self.source), str(self.source)
        way_out = "a SQuAD file has data > paragraphs > context, qas > id, question, answers > text, answer_start"
        for article in Fields.of(self.source.json(), where, way_out).list_of("data", Fields.object):
            with faults.of_record():
                for paragraph in article.list_of("paragraphs", Fields.object):
                    with faults.of_record():
                        context = _text(paragraph, "context")
                        for entry in paragraph.list_of("qas", Fields.object):
                            with faults.of_record():
                                self.add(entry, context, where)
        faults.refuse()
        if not self.questions:
            raise ValueError(f"{where}: holds no question")

    def add(self, entry: Fields, context: str, where: str, otherwise: Optional[str] = None) -> None:
        """otherwise: the id of a question that has none of its own."""
        if otherwise is not None and entry.optional("id", Fields.any) is None:
            name = otherwise
        else:
            name = str(entry.integer("id")) if type(entry.any("id")) is int else _text(entry, "id")
        if name in self._ids:
            raise ValueError(f"{where}: question {named(name)} stands there twice; answers go by its id")
        self._ids.add(name)
        answers, impossible = self._answers(entry, name, context, where) if self.labels else ((), False)
        labelled = bool(answers) or impossible
        self.questions.append(
            Question(name, _text(entry, "question"), context, () if impossible else answers, labelled)
        )

    def _answers(self, entry: Fields, name: str, context: str, where: str) -> Tuple[Tuple[Answer, ...], bool]:
        given: List[Fields] = []
        if isinstance(entry.values.get("answers") if isinstance(entry.values, dict) else None, dict):
            lists = entry.object("answers")  # as the data sets of Hugging Face write it
            texts, starts = lists.list_of("text", Fields.any), lists.list_of("answer_start", Fields.any)
            if len(texts) != len(starts):
                raise lists.error("text", f"must be as many as answer_start, {len(starts)}")
            if not texts:
                return (), True
            given = [
                Fields(lists.source, {"text": text, "answer_start": start}, lists.way_out, f"{lists.where}[{number}]")
                for number, (text, start) in enumerate(zip(texts, starts))
            ]
        elif "answers" in entry:
            given = entry.list_of("answers", Fields.object)
        answers = tuple(
            Answer(_text(each, "text"), each.integer("answer_start", least=0, most=len(context))) for each in given
        )
        _check_answers(where, name, context, answers)
        return answers, "is_impossible" in entry and entry.boolean("is_impossible")


def _text(fields: Fields, key: str) -> str:
    """A text of any length and any characters."""
    value = fields.any(key)
    if not plain_text(value):
        raise fields.error(key, "must be a text")
    return value


def _check_answers(where: str, name: str, paragraph: str, answers: Sequence[Answer]) -> None:
    for answer in answers:
        found = paragraph[answer.start : answer.start + len(answer.text)]
        if found != answer.text or not answer.text:
            raise ValueError(
                f"{where}: question {named(name)}: the answer {shown(answer.text)} should stand at character "
                f"{answer.start}, {shown(found)} does; correct the file"
            )


class Window(NamedTuple):
    """A part of a paragraph beside its question: which of its tokens, and where they begin in the sequence."""

    question: int
    first: int  # token of the paragraph
    tokens: int
    offset: int  # slot of the first of them


class Windows(NamedTuple):
    """The sequences of a list of questions."""

    questions: Sequence[Question]
    paragraphs: Dict[str, Tokens]
    windows: List[Window]
    inputs: Inputs


def _make_windows(
    questions: Sequence[Question], tokenizer: Tokenizer, settings: SquadConfig, max_sequence_length: int
) -> Windows:
    """All windows of all questions, those of a question one after another.

    Targets `start_positions` and `end_positions` are those of the first answer, and 0, the place of [CLS], for a
    window that doesn't hold all of it.
    """
    texts = list(dict.fromkeys(question.paragraph for question in questions))
    paragraphs = dict(zip(texts, tokenizer.encode(texts)))
    asked = tokenizer.encode([question.text for question in questions])
    windows: List[Window] = []
    ids: List[np.ndarray] = []
    segments: List[np.ndarray] = []
    targets: List[Tuple[int, int]] = []
    for number, (question, asked_tokens) in enumerate(zip(questions, asked)):
        query = asked_tokens.ids[: min(_MOST_OF_QUESTION, max_sequence_length - 4)]  # a token of the paragraph remains
        paragraph = paragraphs[question.paragraph]
        answer = _answer_tokens(question, paragraph)
        offset, room = len(query) + 2, max_sequence_length - len(query) - 3
        for first, count in _cut(len(paragraph.ids), room, settings.stride):
            row, kinds = tokenizer.joined([query, paragraph.ids[first : first + count]])
            windows.append(Window(number, first, count, offset))
            ids.append(row)
            segments.append(kinds)
            if answer is not None and first <= answer[0] and answer[1] < first + count:
                targets.append((answer[0] - first + offset, answer[1] - first + offset))
            else:
                targets.append((0, 0))
    starts_ends = np.array(targets, np.int64).reshape(-1, 2)
    places = {"start_positions": starts_ends[:, 0], "end_positions": starts_ends[:, 1]}
    inputs = Inputs.of(ids, np.concatenate(segments), slot_targets=places)
    return Windows(questions, paragraphs, windows, inputs)


def _cut(tokens: int, room: int, stride: int) -> List[Tuple[int, int]]:
    """First token and number of tokens of each window: a new one every `stride` tokens until the end is in one."""
    found = []
    first = 0
    while True:
        count = min(tokens - first, room)
        found.append((first, count))
        if first + count == tokens:
            return found
        first += min(count, stride)


def _answer_tokens(question: Question, paragraph: Tokens) -> Optional[Tuple[int, int]]:
    """First and last token that overlap the first answer; None where there is none."""
    if not question.answers:
        return None
    answer = question.answers[0]
    inside = np.flatnonzero(
        (paragraph.spans[:, 1] > answer.start) & (paragraph.spans[:, 0] < answer.start + len(answer.text))
    )
    if not len(inside):
        raise ValueError(
            f"question {named(question.id)}: the answer {shown(answer.text)} has no token; correct the file"
        )
    return int(inside[0]), int(inside[-1])


def _max_context(windows: Sequence[Window], tokens: int) -> np.ndarray:
    """Which window shows most of a token's surroundings, bool [windows, tokens]; exactly one for each token.

    By BERT's rule: the smaller of the numbers of tokens left and right of it, plus a hundredth of the window's length;
    the first of equals.
    """
    place = np.arange(tokens)
    scores = np.full((len(windows), tokens), -np.inf)
    for number, window in enumerate(windows):
        inside = slice(window.first, window.first + window.tokens)
        left = place[inside] - window.first
        scores[number, inside] = np.minimum(left, window.tokens - 1 - left) + 0.01 * window.tokens
    return np.argmax(scores, axis=0) == np.arange(len(windows))[:, None]


class _Candidate(NamedTuple):
    """A possible answer; "" for none."""

    text: str
    score: float  # sum of the two logits
    probability: float  # among the candidates of its question


class _Prediction(NamedTuple):
    text: str
    best_text: str  # the best answer, also where none is given
    candidates: Tuple[_Candidate, ...]  # best first
    null_odds: float  # score of no answer minus that of the best one


def _answer_questions(windows: Windows, logits: Sequence[np.ndarray], settings: SquadConfig) -> Dict[str, _Prediction]:
    """One prediction for each question, in their order.  logits: for each window its sequence's [length, 2]."""
    of_question: Dict[int, List[int]] = {}
    for number, window in enumerate(windows.windows):
        of_question.setdefault(window.question, []).append(number)
    return {
        question.id: _answer(
            question,
            windows,
            [windows.windows[each] for each in of_question[number]],
            [logits[each] for each in of_question[number]],
            settings,
        )
        for number, question in enumerate(windows.questions)
    }


def _answer(
    question: Question, windows: Windows, own: Sequence[Window], logits: Sequence[np.ndarray], settings: SquadConfig
) -> _Prediction:
    spans = windows.paragraphs[question.paragraph].spans
    best: Dict[str, float] = {}
    found: List[Tuple[float, int, int]] = []
    for window, counts, values in zip(own, _max_context(own, len(spans)), logits):
        found += _best_spans(window, counts, values.astype(np.float64), settings)
    for score, first, last in sorted(found, key=lambda each: (-each[0], each[1], each[2])):
        end = int(spans[last, 1])
        while end < len(question.paragraph) and unicodedata.combining(question.paragraph[end]):
            end += 1  # an accent that the vocabulary strips
        text = question.paragraph[spans[first, 0] : end]
        if text not in best:
            best[text] = score
            if len(best) == _N_BEST:
                break
    null = min(float(values[0].astype(np.float64).sum()) for values in logits)
    top = max(best.values(), default=null)  # a paragraph without a token has no span
    ranked = sorted(best.items(), key=lambda each: -each[1])
    if settings.null_answers:
        ranked = sorted(ranked + [("", null)], key=lambda each: -each[1])
    scores = np.array([score for _, score in ranked])
    weights = np.exp(scores - scores.max()) if len(scores) else scores
    candidates = tuple(
        _Candidate(text, score, float(weight / weights.sum())) for (text, score), weight in zip(ranked, weights)
    )
    odds = null - top
    unanswered = not best or (settings.null_answers and odds > settings.null_score_threshold)
    best_text = next(iter(best), "")
    return _Prediction("" if unanswered else best_text, best_text, candidates, odds)


def _best_spans(
    window: Window, counts: np.ndarray, logits: np.ndarray, settings: SquadConfig
) -> List[Tuple[float, int, int]]:
    """The n best (score, first token, last token) of a window.

    A span's first token is one that counts here (so a span seen in several windows is scored once), its last one is in
    the window too, and it is not longer than allowed.
    """
    inside = slice(window.offset, window.offset + window.tokens)
    starts, ends = logits[inside, 0], logits[inside, 1]
    length = min(settings.max_answer_length, window.tokens)
    if not length:
        return []
    # Row i, column k: the span of tokens i..i + k.
    padded = np.concatenate([ends, np.full(length - 1, -np.inf)])
    scores = starts[:, None] + np.lib.stride_tricks.sliding_window_view(padded, length)
    scores[~counts[window.first : window.first + window.tokens]] = -np.inf
    # Different spans may have one text, of which the best counts: some more than asked for.
    order = np.argsort(-scores, axis=None, kind="stable")[: 4 * _N_BEST]
    return [
        (
            float(scores.flat[each]),
            window.first + int(each) // length,
            window.first + int(each) // length + int(each) % length,
        )
        for each in order
        if scores.flat[each] > -np.inf
    ]


def gold(questions: Sequence[Question]) -> Dict[str, List[str]]:
    """The answers that count, by question."""
    return {question.id: [answer.text for answer in question.answers] for question in questions}


def _prediction_files(predictions: Dict[str, _Prediction], *, null_answers: bool) -> Dict[str, Any]:
    """What is written, by file name: the answers in the order of the questions, the n best, and in version 2 the
    odds.
    """
    files: Dict[str, Any] = {
        "predictions.json": {name: each.text for name, each in predictions.items()},
        "nbest_predictions.json": {
            name: [candidate._asdict() for candidate in each.candidates] for name, each in predictions.items()
        },
    }
    if null_answers:
        files["null_odds.json"] = {name: each.null_odds for name, each in predictions.items()}
    return files


def _answer_line(name: str, prediction: _Prediction, *, null_answers: bool) -> Dict[str, Any]:
    """Plain values for one question: the answer, "" for none, and its probability among the n best."""
    own = [each.probability for each in prediction.candidates if each.text == prediction.text]
    line: Dict[str, Any] = {"id": name, "prediction": prediction.text, "probability": own[0] if own else 0.0}
    return {**line, "null_odds": prediction.null_odds} if null_answers else line
