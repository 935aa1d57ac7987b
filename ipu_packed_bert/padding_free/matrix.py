"""Which families of causal models are right in padding-free batches: a tiny random model of each, measured.

    python -m ipu_packed_bert.padding_free.matrix

Every family is tried with eager, sdpa and our attention, as `use_padding_free` does.  A model is right if the loss of
every token in a row is the one of its example alone, by eager code of a model that nothing here has touched, to 1e-5;
otherwise it must be refused.  The status is 1 if one is neither.
"""

from __future__ import annotations

import difflib
import sys
import warnings
from typing import Any, Dict, List, NamedTuple, Optional, Sequence

import numpy as np
import torch
from torch.nn import functional as F

from ipu_packed_bert.padding_free.attention import NAME
from ipu_packed_bert.padding_free.choice import use_padding_free
from ipu_packed_bert.padding_free.collators import PaddingFreeCollator
from ipu_packed_bert.padding_free.families import FAMILIES, VOCABULARY, build
from ipu_packed_bert.padding_free.models import Choice
from ipu_packed_bert.padding_free.update import without_labels
from pack_data.cli.command import ArgumentParser, run_main
from pack_data.display.table import Column, Table

_ATTENTIONS = ("eager", "sdpa", NAME)
_LENGTHS = (3, 12, 2, 2, 2, 12, 5, 20)  # beyond every window of the tiny models, and within their positions in all
_TOLERANCE = 1e-5  # of the loss of a token, natural logarithm


class _Verdict(NamedTuple):
    """A family with one attention."""

    family: str
    attention: str
    choice: Optional[Choice]  # None where refused
    error: float  # largest difference of a token's loss from that of its example alone
    refusal: str  # why, in one line

    @property
    def right(self) -> bool:
        """Right or refused."""
        return self.choice is None or self.error <= _TOLERANCE

    @property
    def cell(self) -> str:
        if self.choice is None:
            return "refused"
        text = f"{self.error:.0e}" + (" and seq_idx" if self.choice.seq_idx else "")
        text += ", mask" if self.choice.boundaries == "attention_mask" else ""
        return text if self.right else f"**WRONG** {text}"


def _losses_of(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Of the predicted tokens of one row: logits [1, tokens, vocabulary], labels [1, tokens] -> [predicted]."""
    return F.cross_entropy(logits[0, :-1].float(), labels[0, 1:], reduction="none")[labels[0, 1:] != -100]


def measure(family: str, attention: str, seed: int = 0) -> _Verdict:
    """Raises ValueError where the installed Transformers does not have the family."""
    model, reference = build(family, seed=seed), build(family, seed=seed)
    draw = np.random.default_rng(seed)
    examples = [{"input_ids": draw.integers(1, VOCABULARY, length)} for length in _LENGTHS]
    try:
        choice = use_padding_free(model, attention=attention)
    except ValueError as error:
        return _Verdict(family, attention, None, float("nan"), str(error))
    inputs = PaddingFreeCollator(model)(examples)
    with torch.no_grad():
        rows = [torch.from_numpy(example["input_ids"])[None] for example in examples]
        expected = torch.cat([_losses_of(reference(ids).logits, ids) for ids in rows])
        found = _losses_of(model(**without_labels(inputs), use_cache=False).logits, inputs["labels"])
    return _Verdict(family, attention, choice, float((found - expected).abs().max()), "")


def _reason_of(verdicts: Sequence[_Verdict]) -> str:
    """Why a family is refused, in a few words: the layer at fault, the missing package, the setting."""
    text = next((each.refusal for each in reversed(verdicts) if each.choice is None), "")
    for word in ("nstall ", "AttentionInterface", "first in "):
        if word not in text:
            continue
        if word == "AttentionInterface":
            return "its code takes no attention from Transformers"
        after = text.split(word, 1)[1]
        return f"needs {after.split()[0]}" if word == "nstall " else after.split(";")[0].split(":")[0].rstrip(",")
    return ""


def _table(verdicts: Sequence[_Verdict]) -> str:
    """Markdown, a line a family."""
    rows: List[Dict[str, str]] = []
    for family in dict.fromkeys(each.family for each in verdicts):
        mine = [each for each in verdicts if each.family == family]
        refused = all(each.choice is None for each in mine)
        last = mine[-1].choice is None
        cells = {each.attention: each.cell for each in mine}
        rows.append({"family": family, **cells, "reason": _reason_of(mine) if refused or last else ""})
    tried = dict.fromkeys(each.attention for each in verdicts)
    heads = [Column(name, "ours" if name == NAME else name) for name in tried]
    columns = (Column("family", "family"), *heads, Column("reason", "refused because of"))
    return Table("matrix", "", columns, rows).markdown()


def main(arguments: Optional[Sequence[str]] = None) -> int:
    parser = ArgumentParser(prog="python -m ipu_packed_bert.padding_free.matrix", description=__doc__)
    parser.add_argument("families", nargs="*", metavar="FAMILY", help=f"some of: {'; '.join(FAMILIES)}")
    options = parser.parse_args(arguments)
    unknown = [name for name in options.families if name not in FAMILIES]
    if unknown:
        near = difflib.get_close_matches(unknown[0], FAMILIES, n=1)
        meant = f", did you mean {near[0]!r}?" if near else ""
        parser.error(f"{unknown[0]!r} is no family{meant}; a name with a comma or a space is one argument in quotes")
    _quiet()
    verdicts, absent = [], []
    for family in options.families or FAMILIES:
        try:
            verdicts += [measure(family, attention) for attention in _ATTENTIONS]
        except ValueError as error:
            absent.append(f"{family}: {error}")
    print(_table(verdicts))
    for each in absent:
        print(f"left out: {each}")
    wrong = [each for each in verdicts if not each.right]
    counts = [sum(each.choice is not None for each in verdicts if each.attention == name) for name in _ATTENTIONS]
    families = len(verdicts) // len(_ATTENTIONS)
    print(
        f"{families} families; right: {', '.join(f'{n} with {a}' for a, n in zip(_ATTENTIONS, counts))}; "
        f"wrong without an error: {len(wrong)}"
    )
    return 1 if wrong else 0


def _quiet() -> None:
    """Warnings of Transformers about tiny models are no news here."""
    logging: Any = __import__("transformers").logging
    logging.set_verbosity_error()
    warnings.simplefilter("ignore")


if __name__ == "__main__":
    sys.exit(run_main(main))
