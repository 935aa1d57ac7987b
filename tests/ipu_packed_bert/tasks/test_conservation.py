"""In = out + said for tasks: answers in windows, records in predictions, labels in sequences."""

import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pack_data.text.vocabulary import SPECIAL_TOKENS, Vocabulary
from tests.fine_tuning_files import KINDS, WORDS, json_lines, tiny_task
from tests.refusals import refused


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("conservation")


def questions(folder, entries, **settings):
    """The task of (paragraph, first word, one after the last word) of questions; one word is one token."""
    paragraphs = []
    for number, (words, first, end) in enumerate(entries):
        start = len(" ".join([*words[:first], ""]))
        answers = [{"text": " ".join(words[first:end]), "answer_start": start}]
        entry = {
            "id": str(number),
            "question": "river stone",
            "answers": answers,
        }
        paragraphs.append({"context": " ".join(words), "qas": [entry]})
    file = folder / "q.json"
    file.write_text(json.dumps({"data": [{"paragraphs": paragraphs}]}))
    return tiny_task("squad", file, file, **settings)


def counts_of(account):
    return account.came_in, account.goes_out


@st.composite
def _spans(draw):
    entries = []
    for _ in range(draw(st.integers(1, 4))):
        words = draw(st.integers(1, 60))
        first = draw(st.integers(0, words - 1))
        end = draw(st.integers(first + 1, words))
        entries.append((np.resize(WORDS, words).tolist(), first, end))
    return entries


@given(_spans(), st.integers(8, 40), st.integers(1, 200), st.integers(1, 40))
def test_an_answer_that_fits_is_whole_in_a_window_and_no_other_is_trained(folder, entries, slots, stride, longest):
    settings = {
        "slots": slots,
        "stride": stride,
        "max_answer_length": longest,
    }
    room = slots - 5  # [CLS] river stone [SEP] ... [SEP]
    lengths = [end - first for _, first, end in entries]
    wanted = {number for number, length in enumerate(lengths) if length <= room}
    if not wanted:
        with pytest.raises(ValueError, match="longer than a window.*max_sequence_length"):
            questions(folder, entries, **settings)
        return
    task = questions(folder, entries, **settings)
    # The sequences of the training file; the windows kept are those to evaluate.
    assert int((task.training.slot_targets["start_positions"] > 0).sum()) >= len(wanted)
    left_out = len(entries) - len(wanted)
    accounts = task.accounts["training"]
    assert counts_of(accounts["answers"]) == (len(entries), len(wanted))
    assert counts_of(accounts["records"]) == (
        len(entries),
        len(entries) - left_out,
    )
    # The windows to evaluate hold every answer that may be predicted, and do not depend on the answers.
    held = {
        window.question
        for window, start in zip(
            task.windows.windows,
            task.evaluation.slot_targets["start_positions"],
        )
        if start
    }
    assert held >= {number for number in wanted if lengths[number] <= min(longest, room // 2)}
    moved = [(words, 0, 1) for words, _, _ in entries]
    assert questions(folder, moved, **settings).windows.windows == task.windows.windows


_LONGEST_QUESTION = 64  # tokens


@given(
    st.lists(st.integers(0, 100), min_size=1, max_size=4),
    st.integers(8, 128),
    st.booleans(),
)
def test_cut_questions_and_their_tokens_are_counted(folder, lengths, slots, training):
    """Only 64 of the 100 words of a question reached the network, and nothing said so. Each word is one token."""
    context = " ".join(np.resize(WORDS, 40))
    lines = []
    for words in lengths:
        answer = {"text": WORDS[0], "answer_start": 0}
        question = " ".join(np.resize(WORDS, words))
        lines.append({"question": question, "context": context, "answers": [answer]})
    # An answer of all 41 tokens, which short windows do not hold.
    lines[-1]["context"] = answer["text"] = f"{context} {WORDS[0]}"
    files = {"training" if training else "evaluation": json_lines(folder / "long.jsonl", *lines)}
    most = min(_LONGEST_QUESTION, slots - 4)
    kept = [min(words, most) for words in lengths]
    used = list(range(len(lengths)))
    if training and slots - 3 - kept[-1] < 41:
        used.pop()
    if not used:
        with refused("max_sequence_length"):
            tiny_task("squad", slots=slots, **files)
        return
    (accounts,) = tiny_task("squad", slots=slots, **files).accounts.values()
    cut = sum(lengths[number] > most for number in used)
    assert accounts["questions"].came_in == len(used)
    assert accounts["questions"].left_out == {f"cut to {most} tokens": cut}
    tokens = sum(kept[number] for number in used)
    assert counts_of(accounts["question tokens"]) == (sum(lengths), tokens)
    others = 40 if len(lengths) > 1 else 0
    last = 41 if used[-1] == len(lengths) - 1 else 0
    assert counts_of(accounts["context tokens"]) == (
        others + 41,
        others + last,
    )


# A text, and what its label is: valid, unknown to the model, invalid, or none.
_RECORDS = st.lists(
    st.tuples(
        st.integers(0, 40),
        st.sampled_from(["valid", "unknown", "invalid", "none"]),
    ),
    min_size=1,
    max_size=8,
)
_LABELS = {
    "single_label": {"valid": "a", "unknown": "c", "invalid": ""},
    "multi_label": {
        "valid": ["a", "b"],
        "unknown": ["a", "c"],
        "invalid": ["a", "a"],
    },
    "regression": {"valid": 1.5, "invalid": "much"},
    "squad": {
        "valid": [],
        "invalid": [{"text": "x", "answer_start": 0}],
        "unknown": [{"text": "x", "answer_start": -1}],
    },
}


def record_of(kind, number, words, label):
    """A line of JSONL, with a valid label or not."""
    text = " ".join([*WORDS, *WORDS, *WORDS][:words])
    if kind == "tokens":
        count = max(1, words)  # one empty word
        labels = {
            "valid": ["a"] * count,
            "unknown": ["c"] * count,
            "invalid": ["a"] * (count + 1),
        }
        return {"words": text.split(" "), "labels": labels.get(label)}
    record = {"text": text} if kind != "squad" else {"id": f"q{number}", "question": "stone", "context": text}
    if kind == "squad" and label == "valid":
        record["is_impossible"] = True
    if label in _LABELS[kind]:
        record["answers" if kind == "squad" else "label"] = _LABELS[kind][label]
    return record


@given(_RECORDS, st.sampled_from(KINDS), st.integers(8, 64))
def test_every_record_is_predicted_in_its_place_and_scored_or_counted(folder, drawn, kind, slots):
    lines = [record_of(kind, number, words, label) for number, (words, label) in enumerate(drawn)]
    settings = {"null_answers": True} if kind == "squad" else {}
    file = json_lines(folder / "r.jsonl", *lines)
    task = tiny_task(kind, asked=file, slots=slots, labels=["a", "b"], **settings)
    accounts = task.accounts["evaluation"]
    assert accounts["records"].goes_out == len(lines)
    # The outputs of the network: 2 of each slot or sequence, or 1.
    inputs = task.evaluation
    outputs = [np.ones((length, 2) if task.of_slots else 1 + (kind != "regression")) for length in inputs.lengths]
    scored = task.score(outputs)
    assert len(scored.answers) == len(lines)
    name = {"tokens": "words", "squad": "id"}.get(kind)
    assert [answer.get(name) for answer in scored.answers] == [line.get(name) for line in lines]
    known = sum(label == "valid" for _, label in drawn)
    assert counts_of(accounts["scored"]) == (
        len(lines),
        known,
    )
    assert task.scorable == bool(known)
    assert scored.metrics.get("questions", scored.metrics.get("texts", known)) == known
    # Tokens of texts and words of sentences: those of the records, and of the sequences.
    counts = [words for words, _ in drawn]
    used = sum(min(words, slots - 2) for words in counts)
    if "tokens" in accounts:
        assert counts_of(accounts["tokens"]) == (sum(counts), used)
    if "words" in accounts:
        assert accounts["words"].goes_out == used
    empty = counts.count(0)
    assert any(f"{empty:,} of the records have an empty text" in note for note in task.notes) == bool(empty)


_TREEBANK = """# sent_id = 1
# text = river'll stone
1-2\triver'll\t_\t_\t_\t_\t_\t_\t_\t_
1\triver\triver\tNOUN\tNN\t_\t2\tnsubj\t_\t_
2\tnew york\twill\tAUX\tMD\t_\t0\troot\t_\tSpaceAfter=No
2.1\tmissing\t_\tVERB\t_\t_\t_\t_\t_\t_

# sent_id = 2
1\t#\t#\tSYM\tNN\t_\t0\troot\t_\t_
"""


@pytest.mark.parametrize("name", ["a.conllu", "a.conll"])
def test_conllu_is_read_by_its_columns(folder, name):
    for column, labels in (
        ("upos", ["AUX", "NOUN", "SYM"]),
        ("xpos", ["MD", "NN"]),
    ):
        (folder / name).write_text(_TREEBANK)
        task = tiny_task("tokens", folder / name, labels_column=column)
        assert task.texts(task.config) == ["river new york", "#"]
        assert task.labels == labels
        assert "2 multiword ranges and empty nodes" in task.notes[0]


@pytest.mark.parametrize(
    "answer",
    [
        "हिन्दी",
        "पशु",
        "की",
        "คือ",
        "ที่",
        "น้ำ",
        "ന്\u200d",
        "वाक्\u200c",
        "e\u0301te\u0301",
        "שלוֹ",
        "Vér, (S",
    ],
)
def test_an_answer_ends_behind_its_vowel_signs(folder, answer):
    paragraph = f"river {answer} stone"
    letters = sorted(set(paragraph.lower()))
    vocabulary = Vocabulary(
        (
            *SPECIAL_TOKENS,
            *WORDS,
            *letters,
            *(f"##{letter}" for letter in letters),
        )
    )
    answers = [{"text": answer, "answer_start": 6}]
    file = json_lines(
        folder / "q.jsonl",
        {"question": "river", "context": paragraph, "answers": answers},
    )
    task = tiny_task("squad", evaluation=file, slots=40, vocabulary=vocabulary)
    logits = np.zeros((int(task.evaluation.lengths[0]), 2))
    for place, name in enumerate(("start_positions", "end_positions")):
        logits[task.evaluation.slot_targets[name][0], place] = 9.0
    scored = task.score([logits])
    assert scored.answers[0]["prediction"] == answer
    assert scored.metrics["exact"] == 100.0


def test_tables_are_read_by_name_from_every_form(folder):
    parquet = pytest.importorskip("pyarrow.parquet")
    table = pytest.importorskip("pyarrow").table
    rows = {"label": [1, 0], "text": ["river stone", "castle"]}
    parquet.write_table(table(rows), folder / "t.parquet")
    (folder / "t.csv").write_text("label, text\n1, river stone\n0, castle\n")
    tasks = [tiny_task("single_label", folder / name) for name in ("t.parquet", "t.csv")]
    assert [task.training.targets["labels"].tolist() for task in tasks] == [[1, 0]] * 2
    assert tasks[0].packs.digest == tasks[1].packs.digest
    parquet.write_table(table({**rows, "text": ["river", None]}), folder / "t.parquet")
    with refused("t.parquet record 1", "text"):
        tiny_task("single_label", folder / "t.parquet")


def test_texts_that_the_vocabulary_cannot_spell_are_counted_in_characters(
    folder,
):
    """A file in another script, read as training and as held-out data: the line that `build` prints, once."""
    lines = [
        {"text": "Ελληνικά γράμματα", "label": "a"},
        {"text": "river", "label": "b"},
    ]
    path = json_lines(folder / "other.jsonl", *lines)
    task = tiny_task("single_label", path, path)
    # 8 + 8 Greek letters of 16 + 5 characters, in each of the two readings.
    (line,) = [note for note in task.notes if "[UNK]" in note]
    assert line.startswith(f"{16 / 21:.0%} of the text's characters")
