"""Every sentence of the pages that promises equality, or that nothing changes, names a test that holds it."""

import re

from tests.imports import ROOT

# Words with which a page promises that two things are equal or that something does not happen.
PROMISING = re.compile(
    r"\bequals?\b|\bsame\b|\bidentical\b|\bexactly\b|\bno effect\b|\bdoes not change\b"
    r"|\bchanges? (?:nothing|no)\b|\bbit for bit\b|\bnever\b|\bevery bit\b",
    re.I,
)
# These pages report results of runs, former behaviour or the help of commands, not what the program promises.
OF_NO_PROMISE = {"evidence.md", "upgrading.md", "commands.md", "paper_tables.md"}
# Sentences with such words that state a condition, a comparison, a result or what a user has to do.
NOT_PROMISED = """
Packed and unpacked training make the same updates; The same holds on Wikipedia; the same answer in a pack
if the same sequences are in other packs; with a schedule of the same length; needs the same `batch.micro_batch`
start the same torchrun command; the same on each machine; equals `placement.replicas`
the same, once the others have stopped; the others name the rank; data sets of the same slots
The same code runs on both; never the model; that two runs are equal; have the same sequences in each update
the same keys; the same on eight; Never load a whole file; in the same directory; never at the first slot
that of the same sequences alone; at the same paths; takes the same step; with the same example alone
what stays the same; one of the same kind; same = number; attention_mask=same; #why-packed-updates-equal
## Why packed updates equal
for the same network; use the same `tokenizer.json`; derived in the same way; of the same file
the same number of micro-batches.; of the same `format`; that it packs exactly these; the same for a data set
the same in 200 lines; the same terms; has the same scores; needs the same workers; *Equal* means; all equal
logs equal; results equal; results were equal; the same after the fix; is never called
rank 0 saves; nearly the same work
"""


def promises():
    """Return the phrases of promises and the tests that hold them, from the list on the page on reliability."""
    page = (ROOT / "docs" / "reliability.md").read_text(encoding="utf-8")
    return dict(re.findall(r'^- "(.+)": `(tests/\S+::test_\w+)`$', page, re.M))


def hand_written(page):
    """Return the hand-written sentences and cells of a page, without the list of promises."""
    text = page.read_text(encoding="utf-8")
    if "generated page" in text[:400] or page.name in OF_NO_PROMISE:
        return []
    text = re.sub(r"<!-- generated\b.*?<!-- end of generated\b", "", text, flags=re.DOTALL)
    text = re.sub(r'^- ".+": `tests/.+$', "", text, flags=re.M)
    return [part.strip() for part in re.split(r"(?<=[.;:])\s+|\n|\|", text)]


def test_every_promise_of_the_pages_names_a_test_that_holds_it():
    pages = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
    sentences = [(page.name, sentence) for page in pages for sentence in hand_written(page)]
    held = set(promises())
    others = [phrase.strip() for phrase in re.split(r";|\n", NOT_PROMISED.strip())]
    faults = []
    for page, sentence in sentences:
        # A cell of two words refers to the cell above it.
        if not PROMISING.search(sentence) or len(sentence) < 10:
            continue
        is_named = "tests/" in sentence or any(phrase in sentence for phrase in held)
        if not is_named and not any(phrase in sentence for phrase in others):
            faults.append(f"{page}: {sentence}")
    for phrase in held:
        if not any(phrase in sentence for _, sentence in sentences):
            faults.append(f"docs/reliability.md: no page promises {phrase!r}")
    assert len(held) > 20
    assert faults == []


def test_every_test_that_a_page_names_exists():
    missing = []
    named = 0
    for page in [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]:
        for file, test in re.findall(r"`(tests/[\w/]+\.py)(?:::(test_\w+))?`", page.read_text(encoding="utf-8")):
            named += 1
            path = ROOT / file
            if not path.exists() or f"def {test}(" not in path.read_text(encoding="utf-8") and test:
                missing.append(f"{page.name}: {file}::{test}")
    assert named > 20
    assert missing == []
