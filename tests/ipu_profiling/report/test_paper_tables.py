"""Every command of docs/paper_tables.md runs and prints the values of the page; run as a module, it writes them."""

import contextlib
import io
import json
import re
import shlex
import shutil
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple

import pytest

from evidence import figures as evidence_figures
from ipu_packed_bert import __main__ as packed_bert
from pack_data.cli.command import run_main
from tests.imports import ROOT
from tests.tiers import slow

PAGE = ROOT / "docs" / "paper_tables.md"
BEGIN = "<!-- generated: one row per item -->\n"
END = "<!-- end of generated -->"
EVIDENCE = "python -m evidence.figures"


# Columns of the tables of the evidence.
MASKED_RIGHT = 3
MASKED_LOSS = 7


class Item(NamedTuple):
    """A row.

    value: finds ours in what the command printed.
    kind: of ours; that of seconds differs in each run.
    same_quantity: False if the paper's number is of other data or of another quantity, so that no difference is told.
    """

    name: str
    command: str
    paper: str
    value: object
    kind: str = "computed"
    same_quantity: bool = True


def cells(table, label, *columns):
    """Cells of the JSON row that has all labels, in the forms that follow the keys: "efficiency:.2f"."""

    def find(text):
        (rows,) = [item["rows"] for item in json.loads(text)["tables"] if item["name"] == table]
        (row,) = [row for row in rows if set(label) <= {str(value) for value in row.values()}]
        return ", ".join(format(row[key], form) for key, form in (column.split(":") for column in columns))

    return find


def lengths(name, paper, same_quantity=True):
    return Item(
        f"Figure 1, {name}: speed-up without padding",
        "packed-bert report --figure 1",
        paper,
        cells("figure1", [name], "speed_up:.2f"),
        same_quantity=same_quantity,
    )


def achieved(name, paper):
    def factors(text):
        packing = json.loads(text)
        return f"{packing['packing_factor']:.3f} of {packing['theoretical_speedup']:.3f}"

    return Item(
        f"Section 2, {name}: packing factor of at most the speed-up without padding",
        f"packed-bert pack --histogram {name}",
        paper,
        factors,
        "computed, the proven optimum",
    )


def lengths_of_wikipedia(text):
    """Return the share of sequences that fill their row, and the slots and the padding in billions."""
    facts = {row["what"]: row for row in json.loads(text)["tables"]["lengths"]}
    full = re.match(r"[\d.]+", facts["longest"]["about"])[0]
    slots = facts["sequences"]["value"] * facts["max_sequence_length"]["value"]
    padding = slots - facts["tokens"]["value"]
    return f"{float(full):.1f}, {slots / 1e9:.2f}, {padding / 1e9:.2f}"


def table1(algorithm, depth, paper):
    columns = ("efficiency:.1f", "packing_factor:.2f", "papers_overhead:.3f", "papers_realised:.3f")
    return Item(
        f"Table 1, {algorithm}, depth {depth}: EFF, p, OH, speed-up",
        "packed-bert report --table 1",
        paper,
        cells("table1", [algorithm, depth], *columns),
        "computed; OH fitted at depth 2" if depth == "2" else "computed",
    )


def table2(model, length, paper):
    return Item(
        f"Table 2, {model} at {length}: speed-up",
        "packed-bert report --table 2",
        paper,
        cells("table2", [model, length], "papers_realised:.2f"),
    )


def seconds(lengths, options, paper="-"):
    return Item(
        f"Section 3.1, seconds of SPFHP and NNLSHP at depth 3, {lengths}",
        f"packed-bert compare --packers spfhp,nnlshp --depths 3{options}",
        paper,
        lambda text: ", ".join(f"{row['solve_seconds']:.3f}" for row in json.loads(text)[0]["rows"]),
        "measured in seconds",
    )


def evidence_row(name, arm, column):
    """A cell of a generated page of evidence: of the row that begins with the arm."""

    def find(text):
        (row,) = [line for line in text.split(f"\n# {name}\n")[1].split("\n# ")[0].splitlines() if arm in line[:60]]
        return row.split("|")[column].strip()

    return find


ITEMS = (
    lengths("wikipedia_mixed_128", "1.2"),
    lengths("wikipedia_mixed_384", "1.7"),
    lengths("wikipedia_512", "2.0"),
    lengths("squad_1_1_384", "2.2"),
    lengths("glue_cola_train_128", "9.1"),
    lengths("glue_sst2_train_128", "-"),
    lengths("glue_mrpc_train_128", "-"),
    lengths("glue_stsb_train_128", "-"),
    lengths("glue_qnli_dev_128", "-"),
    lengths("glue_rte_train_128", "-"),
    lengths("glue_wnli_train_128", "-"),
    lengths("librispeech_text_chars", "-"),
    lengths("librispeech_audio_40ms", "1.6", same_quantity=False),
    lengths("qm9_atoms", "1.6"),
    Item(
        "Section 2, Wikipedia at 512: full rows in %, billions of slots and of padding",
        "packed-bert look wikipedia_512",
        "23.5, 8.33, 4.17",
        lengths_of_wikipedia,
    ),
    achieved("glue_cola_train_128", "close to the maximum"),
    achieved("squad_1_1_384", "close to the maximum"),
    achieved("qm9_atoms", "close to the maximum"),
    Item(
        "Figure 2, pairs of slots that attend",
        "packed-bert report --figure 2",
        "-",
        lambda text: str(
            sum(value for row in json.loads(text)["tables"][0]["rows"] for value in row.values() if value in (0, 1))
        ),
    ),
    table1("NONE", "1", "50.0, 1.00, 0.000, 1.000"),
    table1("SPFHP", "2", "80.5, 1.61, 4.283, 1.544"),
    table1("SPFHP", "3", "89.4, 1.79, 4.287, 1.716"),
    table1("NNLSHP", "3", "99.7, 2.00, 4.287, 1.913"),
    table1("SPFHP", "4", "93.9, 1.88, 4.294, 1.803"),
    table1("SPFHP", "8", "98.9, 1.98, 4.481, 1.895"),
    table1("SPFHP", "max (16)", "99.6, 1.99, 4.477, 1.905"),
    table1("GREEDY", "max (10)", "78, 1.6, 4.48, 1.5"),
    Item(
        "Table 1, SORT: EFF, p",
        "packed-bert report --table 1",
        "99.9, 2.00",
        cells("table1", ["SORT"], "efficiency:.1f", "packing_factor:.2f"),
    ),
    Item(
        "Table 1, NNLSHP, depth 3, this engine's graph: OH, speed-up",
        "packed-bert report",
        "4.287, 1.913",
        lambda text: ", ".join(f"{row['ours']:.3f}" for row in json.loads(text)["tables"][0]["rows"][:2]),
    ),
    seconds("16.3 million sequences", "", "0.03, 28.4"),
    seconds("1 million sequences", " --synthetic sample:wikipedia_512,n=1000000"),
    seconds("128 slots", " --synthetic uniform:max=128,n=1000000"),
    Item(
        "Section 3.3, betas at p = 2",
        "packed-bert plan --config packed_phase2_pod16 --packing-factor 2 --set optimizer.packing_adjustment=betas",
        "0.81, 0.998",
        lambda text: ", ".join(re.search(r"betas ([\d.]+) and ([\d.]+)", text).groups()),
    ),
    Item(
        "Section 3.3 and 4.2, micro-batches of an update",
        "packed-bert plan --config packed_phase2_pod16 --packing-factor 2",
        "1024",
        lambda text: re.search(r"accumulation ([\d,]+)", text)[1].replace(",", ""),
    ),
    Item(
        "Figure 3 left, same sequences in an update, Wikipedia: loss, packed - unpacked, nats",
        EVIDENCE,
        "-",
        evidence_row("updates_wikipedia", "| packed  ", 6),
        "measured",
    ),
    Item(
        "Figure 3 middle, betas to the power of p: loss, packed - unpacked, nats",
        EVIDENCE,
        "-",
        evidence_row("updates_figure_4", "| betas ** p", 6),
        "measured; the paper's claim is not reproduced here",
    ),
    Item(
        "Figure 3 right, speed-up of the run",
        "packed-bert report",
        "above 2",
        lambda text: f"{json.loads(text)['tables'][0]['rows'][2]['ours']:.3f}",
    ),
    Item(
        "Figure 4, without the mask, Wikipedia: loss of masked tokens - unpacked, nats",
        EVIDENCE,
        "worse",
        evidence_row("updates_wikipedia", "| without the mask ", MASKED_LOSS),
        "measured",
    ),
    Item(
        "Figure 4, with and without the mask, Wikipedia: masked tokens that are right, %",
        EVIDENCE,
        "worse",
        lambda text: " and ".join(
            evidence_row("updates_wikipedia", arm, MASKED_RIGHT)(text) for arm in ("| packed  ", "| without the mask ")
        ),
        "measured",
    ),
    Item(
        "Figure 4, without the position reset, synthetic topics: loss - unpacked, nats",
        EVIDENCE,
        "accuracy 71.8 of 72.1 %",
        evidence_row("updates_figure_4", "| without the position reset", 6),
        "measured",
    ),
    table2("base", "128", "1.15"),
    table2("base", "384", "1.68"),
    table2("large", "128", "1.15"),
    table2("large", "384", "1.69"),
    Item(
        "Table 3, in its place: answers that differ packed and alone, SQuAD",
        EVIDENCE,
        "F1 88.32 (base), 90.65 (large)",
        lambda text: re.search(r"packed +\| +(0 of 2,550) ", text)[1],
        "measured",
    ),
    Item(
        "Figure 5 and section 4.4, un-padding on 1 accelerator",
        "packed-bert report --figure 5",
        "2.013",
        cells("figure5", ["1"], "un_padding_64:.3f"),
        "computed; the paper's number bounds packing",
        same_quantity=False,
    ),
    Item(
        "Figure 5, un-padding on 2,048, 1, 4, 16, 64 sequences each",
        "packed-bert report --figure 5",
        "-",
        cells("figure5", ["2048"], *(f"un_padding_{number}:.2f" for number in (1, 4, 16, 64))),
    ),
    Item(
        "Figure 5, packing on any number",
        "packed-bert report --figure 5",
        "2.00",
        cells("figure5", ["2048"], "packing:.2f"),
    ),
)


def difference(paper, ours):
    """Relative differences of all numbers, in percent."""
    if re.search("[^0-9., ]", paper):
        return "-"
    pairs = zip(paper.split(", "), ours.split(", "))
    return ", ".join(f"{100 * (float(b) / float(a) - 1):+.1f} %" if float(a) else "exact" for a, b in pairs)


@lru_cache(None)
def printed(command, folder):
    """Run a command; return its output, as JSON if it can print that, or all pages of the evidence."""
    out = io.StringIO()
    if command == EVIDENCE:
        root = Path(folder)
        (root / "docs" / "evidence").mkdir(parents=True)
        shutil.copy(ROOT / evidence_figures.PAGE, root / evidence_figures.PAGE)
        shutil.copytree(ROOT / evidence_figures.COMMITTED, root / evidence_figures.COMMITTED)
        with contextlib.redirect_stdout(out):
            assert evidence_figures.main(["--root", str(root)]) == 0
        pages = sorted((root / "docs" / "evidence").glob("*.md"))
        return "".join(f"\n# {page.stem}\n{page.read_text(encoding='utf-8')}" for page in pages)
    arguments = shlex.split(command)[1:]
    if arguments[0] in ("report", "compare", "look", "pack"):
        arguments.append("--json")
    with contextlib.redirect_stdout(out):
        assert run_main(packed_bert.main, arguments) == 0, command
    return out.getvalue()


HEAD = ["| item | command | paper | here | difference | here is |", "| --- | --- | --- | --- | --- | --- |"]


def table(folder, values=None):
    return "".join(f"{line}\n" for line in [*HEAD, *(row_of(item, folder, values) for item in ITEMS)])


def row_of(item, folder, values=None):
    ours = item.value(printed(item.command, str(folder)))
    if item.kind == "measured in seconds" and values is not None:
        ours = values[item.name]
    compared = difference(item.paper, ours) if item.same_quantity else "-"
    return f"| {item.name} | `{item.command}` | {item.paper} | {ours} | {compared} | {item.kind} |"


def rows_of_page(text):
    generated = text.split(BEGIN)[1].split(END)[0]
    rows = [line.strip("| \n").split(" | ") for line in generated.strip().splitlines()[2:]]
    return generated.strip() + "\n", {row[0]: row[3] for row in rows}


def test_the_page_has_a_row_for_each_item():
    generated, values = rows_of_page(PAGE.read_text(encoding="utf-8"))
    assert generated.splitlines()[:2] == HEAD
    assert list(values) == [item.name for item in ITEMS]
    assert len(ITEMS) > 40


COMMANDS = dict.fromkeys(item.command for item in ITEMS)
# These pack whole data sets or draw all committed results; test_overhead_report.py has the tables in make test.
LONG = re.compile("--table|compare|evidence")


@pytest.mark.parametrize("command", [slow(each) if LONG.search(each) else each for each in COMMANDS])
def test_a_command_of_the_page_runs_and_the_page_has_its_values(command, cached_cycles, monkeypatch, tmp_path):
    monkeypatch.setattr(evidence_figures, "write", lambda *picture: None)
    monkeypatch.setattr(evidence_figures.Shown, "draw", lambda self, folder, prefix: [])
    printed.cache_clear()
    generated, values = rows_of_page(PAGE.read_text(encoding="utf-8"))
    actual = [row_of(item, tmp_path / "evidence", values) for item in ITEMS if item.command == command]
    assert [row for row in actual if row not in generated.splitlines()] == []
    assert actual


if __name__ == "__main__":
    import tempfile

    before, rest = PAGE.read_text(encoding="utf-8").split(BEGIN)
    evidence_figures.write = lambda *picture: None
    evidence_figures.Shown.draw = lambda self, folder, prefix: []
    PAGE.write_text(f"{before}{BEGIN}\n{table(tempfile.mkdtemp())}\n{END}{rest.split(END)[1]}", encoding="utf-8")
