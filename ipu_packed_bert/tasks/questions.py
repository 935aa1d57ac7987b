"""Question answering on paragraphs (SQuAD 1.1 and 2).

Questions are divided into windows, the sequences of packs. The network predicts start and end of the answer in each
window, and the windows of a question give one answer.

As in BERT's procedure, a paragraph that is too long for a row is divided into overlapping windows. The label of a
window without the whole answer is [CLS]. A token is scored in the window with most of its context. The answer is the
best span over all windows.
Suffixes as in `model/bert.py`: B rows, S slots, D places for sequences, H hidden size.
"""

from __future__ import annotations

import unicodedata
from functools import partial
from typing import Any, Callable, Dict, List, NamedTuple, Optional, Sequence, Set, Tuple

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F

from ipu_packed_bert.model.bert import initialise
from ipu_packed_bert.model.loss import at_least_float32, correct
from ipu_packed_bert.model.packed import PackedBert, hidden_score
from ipu_packed_bert.settings.config import Config
from ipu_packed_bert.settings.finetuning import SquadConfig
from ipu_packed_bert.settings.placement import PlacedPart
from ipu_packed_bert.settings.schema import ModelConfig
from ipu_packed_bert.tasks.examples import ExampleTask, LossAndCorrect, Scored
from ipu_packed_bert.tasks.files import ExampleSource, Faults, TableRow, plain_text, read_records
from ipu_packed_bert.tasks.inputs import Inputs, Tokenizer, Tokens
from ipu_packed_bert.tasks.scores import best_threshold, score_answers
from pack_data.display.facts import with_unit
from pack_data.reading.account import Account
from pack_data.reading.fields import Fields, named, said_of, shown
from pack_data.reading.words import counted

_MOST_OF_QUESTION = 64  # tokens; longer questions are truncated, as in BERT's procedure
_JOINERS = "\u200c\u200d"
_N_BEST = 20  # candidate answers per question, as in BERT's procedure


def _span_log_probabilities(logits_BS, input_mask_BS, present_BD, hidden: float) -> torch.Tensor:
    """Return log-probabilities of the slots of each sequence, [B, D, S]: a softmax over that sequence's slots.

    The additive mask is 0 on the slots of sequence d and ``hidden`` on all others, as in attention
    (`model.packed.hidden_score`), so that their probability is exactly 0. An absent sequence has no mask, because an
    empty softmax would be NaN: its values are finite but meaningless.
    """
    numbers_D = torch.arange(
        1, present_BD.shape[1] + 1, dtype=input_mask_BS.dtype, device=input_mask_BS.device
    )
    other_BDS = input_mask_BS.unsqueeze(1) != numbers_D.view(1, -1, 1)
    seen = torch.zeros((), dtype=logits_BS.dtype, device=logits_BS.device)
    mask_BDS = torch.where(other_BDS & present_BD.unsqueeze(2), torch.full_like(seen, hidden), seen)
    return torch.log_softmax(logits_BS.unsqueeze(1) + mask_BDS, dim=2)


class _PackedBertForQuestionAnswering(PackedBert):
    """A packed BERT with the weight names of Hugging Face's BertForQuestionAnswering."""

    def __init__(self, model: ModelConfig, *, attention: str = "eager"):
        super().__init__(model, attention=attention, pooler=False)
        self.span_hidden = hidden_score(attention)
        self.qa_outputs = nn.Linear(model.hidden_size, 2)
        initialise(self, model.initializer_range)

    def predictions(
        self, input_ids_BS, input_mask_BS, segment_ids_BS, positions_BS
    ) -> torch.Tensor:
        """Compute logits of every slot as start and end of its sequence's answer, [B, S, 2], at least float32."""
        logits_BS2 = self.qa_outputs(
            self.hidden(input_ids_BS, input_mask_BS, segment_ids_BS, positions_BS)
        )
        return at_least_float32(logits_BS2)

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
        loss_BD = torch.zeros_like(weight_BD)
        correct_BD = present_BD
        for end, position_BD in enumerate((start_positions_BD, end_positions_BD)):
            log_BDS = _span_log_probabilities(
                logits_BS2[:, :, end], input_mask_BS, present_BD, self.span_hidden
            )
            # nll_loss instead of gather: the gradient of a gather is a scatter on IPUs.
            targets = position_BD.to(torch.int64).flatten()
            losses = F.nll_loss(log_BDS.flatten(0, 1), targets, reduction="none")
            loss_BD = loss_BD + 0.5 * losses.view(position_BD.shape)
            correct_BD = correct_BD & correct(log_BDS, position_BD)
        # The loss of an absent sequence is finite, and its weight is 0.
        loss = ((loss_BD * weight_BD).sum(1) * scale_B).sum()
        return LossAndCorrect(loss, correct_BD.to(weight_BD.dtype).sum())


class QuestionsTask(ExampleTask):
    """Questions divided into windows, with one answer per question."""

    name = "squad"
    architecture = "BertForQuestionAnswering"
    fields = (
        *ExampleTask.prediction_fields,
        "sequence_numbers",
        "start_positions",
        "end_positions",
        "scale",
    )
    heads: Tuple[PlacedPart, ...] = (PlacedPart("answer head", "qa_outputs"),)
    of_slots = True
    windows: Windows  # of the questions to evaluate or predict

    @property
    def _squad(self) -> SquadConfig:
        return self.config.of_task(SquadConfig)

    @classmethod
    def read(cls, source: ExampleSource, config: Config, *, labels: bool) -> List[Question]:
        """Read a SQuAD file, version 1.1 or 2, or JSONL with a question and its context on each line."""
        reader = _QuestionReader(source, labels)
        if source.format in ("jsonl", "parquet"):
            read_records(source, reader.add_record, what="question")
        else:
            reader.add_squad()
        return reader.questions

    @staticmethod
    def texts_of(example: Question) -> Sequence[str]:
        return (example.paragraph, example.text)

    def begin(self, read: Dict[str, List[Question]], labels: Optional[Sequence[str]]) -> None:
        for what, questions in read.items():
            unplaced = sum(question.unplaced for question in questions)
            if unplaced:
                self.notes.append(
                    f"{self.sources[what]}: {unplaced:,} answers with answer_start -1 are left out"
                )
        if "training" in read:
            self._keep(
                read,
                "training",
                lambda question: question.labelled or not question.unplaced,
                "with answer_start -1",
                "all questions have answer_start -1; correct the file",
            )
        if not self._squad.null_answers and self.asked is None:
            for what in read:
                self._keep(
                    read,
                    what,
                    lambda question: bool(question.answers) or not question.labelled,
                    "without an answer (task.null_answers is false)",
                    "no question has an answer; use the file with --set task.null_answers=true",
                )
        training = read.get("training", ())
        unlabelled = [question.id for question in training if not question.labelled]
        if unlabelled:
            raise ValueError(
                f"{self.sources['training']}: {len(unlabelled)} of {len(training)} questions have neither answers nor "
                f"is_impossible, so they cannot be used for training: {', '.join(map(named, unlabelled[:5]))}; add one"
                " of the two"
            )
        if self._squad.drop_seen_paragraphs and "evaluation" in read:
            seen = {question.paragraph for question in training}
            self._keep(
                read,
                "evaluation",
                lambda question: question.paragraph not in seen,
                "on paragraphs of the training file",
                f"all its paragraphs are also in {self.sources['training']}; evaluate on other paragraphs, or set"
                " task.drop_seen_paragraphs=false",
            )

    def _keep(
        self,
        read: Dict[str, List[Question]],
        what: str,
        test: Callable[[Question], bool],
        reason: str,
        problem: str,
    ) -> None:
        """Keep the questions that pass a test, count the others, and raise ValueError if none passes."""
        kept = list(filter(test, read[what]))
        if not kept:
            raise ValueError(f"{self.sources[what]}: {problem}")
        self.left_out[what][reason] = len(read[what]) - len(kept)
        read[what] = kept

    def inputs(self, examples: Sequence[Question], what: str) -> Inputs:
        with said_of(str(self.sources[what])):
            self.windows = _make_windows(
                examples,
                self.tokenizer,
                self._squad,
                self.max_sequence_length,
                training=what == "training",
            )
        inputs = self.windows.inputs
        self.notes.append(
            f"{what}: {counted(inputs.records or 0, 'question')} in {counted(len(inputs), 'window')} "
            f"of {with_unit(inputs.lengths.mean(), 'tokens')}"
        )
        unheld = self.windows.unheld
        if what == "training":
            self.left_out[what]["with an answer longer than a window"] = unheld
        pairs = zip(self.windows.windows, inputs.slot_targets["start_positions"])
        held = {window.question for window, start in pairs if start}
        count = sum(bool(question.answers) for question in examples)
        answers = Account(count, len(held), {"whole in a window": unheld})
        self.accounts[what] = {"answers": answers, **self.windows.accounts}
        return inputs

    @property
    def scores(self) -> Tuple[str, ...]:
        if self._squad.null_answers:
            return ("exact", "f1", "best_exact", "best_f1")
        return ("exact", "f1")

    @staticmethod
    def has_label(example: Question) -> bool:
        return example.labelled

    def network(self, attention: str) -> PackedBert:
        return _PackedBertForQuestionAnswering(self.model, attention=attention)

    def score(self, outputs: Sequence[np.ndarray]) -> Scored:
        null_answers = self._squad.null_answers
        predictions = _answer_questions(self.windows, outputs, self._squad)
        answers = {name: prediction.text for name, prediction in predictions.items()}
        odds = {name: prediction.null_odds for name, prediction in predictions.items()}
        metrics: Dict[str, Any] = {}
        if self.scorable:
            gold_answers = _gold([self.examples[number] for number in self.scored])
            metrics = score_answers(answers, gold_answers)
            if null_answers:
                texts = {name: predictions[name].best_text for name in gold_answers}
                odds_of_scored = {name: odds[name] for name in gold_answers}
                for of in ("exact", "f1"):
                    best = best_threshold(texts, odds_of_scored, gold_answers, of=of)
                    metrics[f"best_{of}"] = best.score
                    metrics[f"best_{of}_threshold"] = best.threshold

        n_best = {}
        records = []
        for name, prediction in predictions.items():
            n_best[name] = [candidate._asdict() for candidate in prediction.candidates]
            probabilities = {
                candidate.text: candidate.probability for candidate in prediction.candidates
            }
            record = {
                "id": name,
                "prediction": prediction.text,
                "probability": probabilities.get(prediction.text, 0.0),
            }
            if null_answers:
                record["null_odds"] = prediction.null_odds
            records.append(record)
        files: Dict[str, Any] = {"predictions.json": answers, "nbest_predictions.json": n_best}
        if null_answers:
            files["null_odds.json"] = odds
        return Scored(metrics, files, records)


# ---- files ---------------------------------------------------------------------------------------------------------


class Answer(NamedTuple):
    """An answer in a file."""

    text: str
    start: int  # character of the paragraph


class Question(NamedTuple):
    """A question on a paragraph."""

    id: str
    text: str
    paragraph: str
    answers: Tuple[Answer, ...]  # empty if there is no answer, or if it is not known
    labelled: bool  # True if the file has answers, or states that there are none
    unplaced: int = 0  # answers without a position in the paragraph, which are left out


class _QuestionReader:
    """The questions read so far, with distinct ids; answers are read if ``labels`` is True."""

    def __init__(self, source: ExampleSource, labels: bool):
        self.source = source
        self.labels = labels
        self.questions: List[Question] = []
        self._ids: Set[str] = set()

    def add_record(self, record: TableRow, where: str) -> None:
        """Add a line of JSONL; a question without an id gets the number of its line."""
        entry = Fields.of(
            record.values, where, "a line has question, context, and may have id and answers"
        )
        name = str(record.line) if entry.optional("id", Fields.any) is None else _id(entry)
        self._add(entry, name, _text(entry, "context"), where)

    def add_squad(self) -> None:
        """Add the questions of a SQuAD file."""
        faults = Faults(self.source)
        where = str(self.source)
        way_out = "a SQuAD file has data > paragraphs > context, qas > id, question, answers > text, answer_start"
        for article in Fields.of(self.source.json(), where, way_out).list_of("data", Fields.object):
            with faults.of_record():
                for paragraph in article.list_of("paragraphs", Fields.object):
                    with faults.of_record():
                        context = _text(paragraph, "context")
                        for entry in paragraph.list_of("qas", Fields.object):
                            with faults.of_record():
                                self._add(entry, _id(entry), context, where)
        faults.refuse()
        if not self.questions:
            raise ValueError(f"{where}: has no questions; pass a file with at least one")

    def _add(self, entry: Fields, name: str, context: str, where: str) -> None:
        if name in self._ids:
            raise ValueError(
                f"{where}: question {named(name)} occurs twice; make the ids of all questions distinct"
            )
        self._ids.add(name)
        answers: Tuple[Answer, ...] = ()
        is_impossible = False
        unplaced = 0
        found = None
        if self.labels:
            found = self.source.label(partial(_answers, entry, name, context, where))
        if found is not None:
            all_answers, is_impossible = found
            answers = tuple(answer for answer in all_answers if answer.start >= 0)
            unplaced = len(all_answers) - len(answers)
        labelled = bool(answers) or is_impossible
        if is_impossible:
            answers = ()
        text = _text(entry, "question")
        self.questions.append(Question(name, text, context, answers, labelled, unplaced))


def _id(entry: Fields) -> str:
    return str(entry.integer("id")) if type(entry.any("id")) is int else _text(entry, "id")


def _text(fields: Fields, key: str) -> str:
    """Return a text of any length and any characters."""
    value = fields.any(key)
    if not plain_text(value):
        raise fields.error(key, "must be a text")
    return value


def _answers(entry: Fields, name: str, context: str, where: str) -> Tuple[Tuple[Answer, ...], bool]:
    """Return the answers of a question, and True if the file states that there are none.

    An answer that is not in its context has the start -1, as in CMRC2018.
    """
    entries: List[Fields] = []
    if isinstance(entry.tree.get("answers"), dict):
        lists = entry.object("answers")  # the format of Hugging Face data sets
        texts = lists.list_of("text", Fields.any)
        starts = lists.list_of("answer_start", Fields.any)
        if len(texts) != len(starts):
            raise lists.error("text", f"must have {len(starts)} entries, like answer_start")
        if not texts:
            return (), True
        for number, (text, start) in enumerate(zip(texts, starts)):
            values = {"text": text, "answer_start": start}
            entries.append(Fields(lists.source, values, lists.way_out, f"{lists.where}[{number}]"))
    elif "answers" in entry:
        entries = entry.list_of("answers", Fields.object)

    answers = []
    for fields in entries:
        text = _text(fields, "text")
        start = fields.integer("answer_start", least=-1, most=len(context))
        if start == -1:
            answers.append(Answer(text, start))
            continue
        actual = context[start : start + len(text)]
        if actual != text or not text:
            raise ValueError(
                f"{where}: question {named(name)}: the text at character {start} is {shown(actual)} instead of the "
                f"answer {shown(text)}; correct answer_start"
            )
        answers.append(Answer(text, start))
    return tuple(answers), "is_impossible" in entry and entry.boolean("is_impossible")


def _gold(questions: Sequence[Question]) -> Dict[str, List[str]]:
    """Return the texts of the correct answers, by question."""
    return {question.id: [answer.text for answer in question.answers] for question in questions}


# ---- windows -------------------------------------------------------------------------------------------------------


class Window(NamedTuple):
    """A part of a paragraph with its question."""

    question: int  # index
    first: int  # first token in the paragraph
    tokens: int  # number of tokens
    offset: int  # slot of the first token in the sequence


class Windows(NamedTuple):
    """The sequences of a list of questions."""

    questions: Sequence[Question]
    paragraphs: Dict[str, Tokens]
    windows: List[Window]
    inputs: Inputs
    unheld: int  # answers that no window contains whole
    accounts: Dict[str, Account]  # of questions and tokens


def _make_windows(
    questions: Sequence[Question],
    tokenizer: Tokenizer,
    settings: SquadConfig,
    max_sequence_length: int,
    *,
    training: bool,
) -> Windows:
    """Make the windows of all questions, those of a question one after another.

    The targets `start_positions` and `end_positions` are the slots of the first answer, or 0, the slot of [CLS], in a
    window that does not contain all of it. In training, an answer that no window contains gets a further window, and a
    question whose answer is longer than a window has no windows, because all of them would teach that it has no answer.
    Windows to evaluate do not depend on the answers.
    """
    texts = list(dict.fromkeys(question.paragraph for question in questions))
    paragraphs = dict(zip(texts, tokenizer.encode(texts)))
    template = tokenizer.template(2)
    room_for_texts = max_sequence_length - len(template.tokens)
    special_tokens = len(template.before) + len(template.between)  # before a paragraph
    # Leaves room for a token of the paragraph.
    most_of_question = min(_MOST_OF_QUESTION, room_for_texts - 1)
    windows: List[Window] = []
    ids: List[np.ndarray] = []
    segments: List[np.ndarray] = []
    targets: List[Tuple[int, int]] = []
    unheld = 0
    encoded = tokenizer.encode([question.text for question in questions])
    for number, (question, question_tokens) in enumerate(zip(questions, encoded)):
        query = question_tokens.ids[:most_of_question]
        paragraph = paragraphs[question.paragraph]
        answer = _answer_tokens(question, paragraph, required=training)
        offset = special_tokens + len(query)
        room = room_for_texts - len(query)
        parts = _cut(len(paragraph.ids), room, _stride(settings, room))
        unheld += answer is None and bool(question.answers)
        if answer is not None and not any(_holds(part, answer) for part in parts):
            if training:
                parts = _with_answer(parts, answer, len(paragraph.ids), room)
            unheld += len(answer) > room or not training
        for part in parts:
            row, kinds = tokenizer.joined([query, paragraph.ids[part.start : part.stop]])
            windows.append(Window(number, part.start, len(part), offset))
            ids.append(row)
            segments.append(kinds)
            target = (0, 0)
            if answer is not None and _holds(part, answer):
                shift = offset - part.start
                target = (answer[0] + shift, answer[-1] + shift)
            targets.append(target)
    if not windows:
        raise ValueError("all answers are longer than a window; raise data.max_sequence_length")
    starts, ends = np.array(targets, np.int64).reshape(-1, 2).T
    places = {"start_positions": starts, "end_positions": ends}
    records = len({window.question for window in windows})
    inputs = Inputs.of(ids, np.concatenate(segments), slot_targets=places, records=records)
    kept = {window.question: window.offset - special_tokens for window in windows}
    counts = [len(tokens.ids) for tokens in encoded]
    accounts = _accounts(counts, kept, most_of_question)
    accounts["context tokens"] = _account_of_contexts(questions, paragraphs, windows)
    return Windows(questions, paragraphs, windows, inputs, unheld, accounts)


_NO_WINDOW = "of questions without a window"


def _accounts(counts: List[int], kept: Dict[int, int], most: int) -> Dict[str, Account]:
    """Account for the tokens of all questions, of which those with windows keep at most ``most``."""
    whole = sum(counts[number] == tokens for number, tokens in kept.items())
    beyond = [counts[number] - most for number in kept if counts[number] > most]
    absent = [count for number, count in enumerate(counts) if number not in kept]
    reasons = {f"beyond {most} in a question": sum(beyond), _NO_WINDOW: sum(absent)}
    return {
        "questions": Account(len(kept), whole, {f"cut to {most} tokens": len(beyond)}),
        "question tokens": Account(sum(counts), sum(kept.values()), reasons),
    }


def _account_of_contexts(
    questions: Sequence[Question], paragraphs: Dict[str, Tokens], windows: Sequence[Window]
) -> Account:
    """Account for the tokens of paragraphs, each counted once."""
    in_windows: Dict[str, np.ndarray] = {}
    for window in windows:
        text = questions[window.question].paragraph
        part = in_windows.setdefault(text, np.zeros(len(paragraphs[text].ids), bool))
        part[window.first : window.first + window.tokens] = True
    used = sum(int(part.sum()) for part in in_windows.values())
    unread = [len(tokens.ids) for text, tokens in paragraphs.items() if text not in in_windows]
    total = sum(len(tokens.ids) for tokens in paragraphs.values())
    return Account(total, used, {_NO_WINDOW: sum(unread)})


def _stride(settings: SquadConfig, room: int) -> int:
    """Return the tokens between the starts of windows with ``room`` tokens of the paragraph.

    The configured stride is reduced so that windows overlap: every span of `max_answer_length` tokens, or of half a
    window if that is shorter, is whole in one of them. At 384 slots the default values need no reduction.
    """
    overlap = min(settings.max_answer_length - 1, room // 2)
    return min(settings.stride, room - overlap)


def _cut(tokens: int, room: int, stride: int) -> List[range]:
    """Return the tokens of windows that begin every ``stride`` tokens, at most ``room`` tokens long, up to the end."""
    starts = range(0, max(0, tokens - room) + stride, stride)
    return [range(first, min(tokens, first + room)) for first in starts]


def _with_answer(parts: List[range], answer: range, tokens: int, room: int) -> List[range]:
    """Add a window with the answer, which no window holds, in its middle; return none if it is longer than one."""
    if len(answer) > room:
        return []
    before = (room - len(answer)) // 2
    # Above 0: the first window holds an answer that begins within its first `before` tokens.
    first = min(answer.start - before, tokens - room)
    return [*parts, range(first, min(tokens, first + room))]


def _holds(part: range, answer: range) -> bool:
    return part.start <= answer.start and answer.stop <= part.stop


def _answer_tokens(question: Question, paragraph: Tokens, *, required: bool) -> Optional[range]:
    """Return the tokens that overlap the first answer; None without an answer.

    An answer without a token raises ValueError if it is ``required``.
    """
    if not question.answers:
        return None
    answer = question.answers[0]
    starts, ends = paragraph.spans.T
    inside = np.flatnonzero((ends > answer.start) & (starts < answer.start + len(answer.text)))
    if not len(inside):
        if not required:
            return None
        raise ValueError(
            f"question {named(question.id)}: the answer {shown(answer.text)} has no token; correct the file"
        )
    return range(int(inside[0]), int(inside[-1]) + 1)


# ---- answers -------------------------------------------------------------------------------------------------------


def _max_context(windows: Sequence[Window], tokens: int) -> np.ndarray:
    """Return the window with most context of each token, bool [windows, tokens], with one True per token.

    Context is BERT's: the smaller of the numbers of tokens to the left and right, plus a hundredth of the window's
    length. Of equals the first window counts.
    """
    scores = np.full((len(windows), tokens), -np.inf)
    for number, window in enumerate(windows):
        left = np.arange(window.tokens)
        context = np.minimum(left, left[::-1]) + 0.01 * window.tokens
        scores[number, window.first : window.first + window.tokens] = context
    return np.argmax(scores, axis=0) == np.arange(len(windows))[:, None]


class _Candidate(NamedTuple):
    """A candidate answer; "" for no answer."""

    text: str
    score: float  # sum of the two logits
    probability: float  # among the candidates of its question


class _Prediction(NamedTuple):
    text: str  # "" for no answer
    best_text: str  # the best answer, also if `text` is empty
    candidates: Tuple[_Candidate, ...]  # best first
    null_odds: float  # score of no answer minus score of the best answer


def _answer_questions(
    windows: Windows, logits: Sequence[np.ndarray], settings: SquadConfig
) -> Dict[str, _Prediction]:
    """Return the prediction of each question from the logits [length, 2] of all windows."""
    by_question: Dict[int, List[int]] = {}
    for number, window in enumerate(windows.windows):
        by_question.setdefault(window.question, []).append(number)
    predictions = {}
    for number, question in enumerate(windows.questions):
        spans = windows.paragraphs[question.paragraph].spans
        indices = by_question[number]
        predictions[question.id] = _answer(
            question.paragraph,
            spans,
            [windows.windows[index] for index in indices],
            [logits[index].astype(np.float64) for index in indices],
            settings,
        )
    return predictions


def _answer(
    paragraph: str,
    spans: np.ndarray,
    windows: Sequence[Window],
    logits: Sequence[np.ndarray],
    settings: SquadConfig,
) -> _Prediction:
    """Return the prediction of a question from its windows; ``spans`` [n, 2] are the characters of tokens."""
    null = min(float(values[0].sum()) for values in logits)
    best = _best_texts(paragraph, spans, windows, logits, settings)
    odds = null - max(best.values(), default=null)  # a paragraph without tokens has no span
    best_text = next(iter(best), "")
    text = best_text
    if settings.null_answers and odds > settings.null_score_threshold:
        text = ""

    scores = {**best, "": null} if settings.null_answers else best
    ranked = sorted(scores.items(), key=lambda item: -item[1])
    values = np.array([score for _, score in ranked])
    weights = np.exp(values - values.max(initial=-np.inf))
    candidates = []
    for (candidate, score), weight in zip(ranked, weights):
        candidates.append(_Candidate(candidate, score, float(weight / weights.sum())))
    return _Prediction(text, best_text, tuple(candidates), odds)


def _best_texts(
    paragraph: str,
    spans: np.ndarray,
    windows: Sequence[Window],
    logits: Sequence[np.ndarray],
    settings: SquadConfig,
) -> Dict[str, float]:
    """Return the scores of the best texts, best first."""
    scored: List[Tuple[float, int, int]] = []
    for window, counts, values in zip(windows, _max_context(windows, len(spans)), logits):
        scored += _best_spans(window, counts, values, settings)
    best: Dict[str, float] = {}
    for score, first, last in sorted(scored, key=lambda span: (-span[0], span[1], span[2])):
        end = _end_of_grapheme(paragraph, int(spans[last, 1]))
        best.setdefault(paragraph[spans[first, 0] : end], score)
        if len(best) == _N_BEST:
            break
    return best


def _end_of_grapheme(text: str, end: int) -> int:
    """Return the end of the marks after ``end``: accents and vowel signs, which the tokenizer may strip or divide.

    A joiner after a virama (combining class 9) belongs to it.
    """
    while end < len(text):
        is_mark = unicodedata.category(text[end]) in ("Mn", "Mc", "Me")
        joins = text[end] in _JOINERS and end > 0 and unicodedata.combining(text[end - 1]) == 9
        if not (is_mark or joins):
            break
        end += 1
    return end


def _best_spans(
    window: Window, counts: np.ndarray, logits: np.ndarray, settings: SquadConfig
) -> List[Tuple[float, int, int]]:
    """Return the best spans of a window as (score, first token, last token), best first.

    A span is in the window, is not longer than allowed, and begins with a token that is scored in this window, so that
    spans in several windows are scored once.
    """
    starts, ends = logits[window.offset : window.offset + window.tokens].T
    length = min(settings.max_answer_length, window.tokens)
    if not length:
        return []
    # Row i, column k: the span of tokens i..i + k.
    padded = np.concatenate([ends, np.full(length - 1, -np.inf)])
    scores = starts[:, None] + np.lib.stride_tricks.sliding_window_view(padded, length)
    scores[~counts[window.first : window.first + window.tokens]] = -np.inf
    # More spans than texts, because several spans may have the same text.
    order = np.argsort(-scores, axis=None, kind="stable")[: 4 * _N_BEST]
    firsts, extras = np.divmod(order[scores.flat[order] > -np.inf], length)
    return [
        (float(scores[first, extra]), window.first + first, window.first + first + extra)
        for first, extra in zip(firsts.tolist(), extras.tolist())
    ]
