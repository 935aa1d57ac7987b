"""Families of models: right to 1e-5 or refused.  `python -m ipu_packed_bert.padding_free.matrix` measures all."""

from __future__ import annotations

import pytest

from ipu_packed_bert.padding_free import choice, matrix
from ipu_packed_bert.padding_free.matrix import FAMILIES
from pack_data.cli.command import run_main
from tests.padding_free_models import transformers

RIGHT = ["Mistral, window", "Llama 4, chunks", "GPT-2", "DeepSeek-V3", "gpt-oss, window and sinks"]
RIGHT += ["Gemma 2, window and soft cap", "Llama", "Qwen2, window", "Qwen3-MoE", "Phi", "OLMo 3, window", "Mixtral"]
RIGHT += ["Cohere 2, window", "DeepSeek-V2", "GPT-NeoX", "EXAONE 4, window", "OPT"]
REFUSED = ["LFM2", "BLOOM", "Mamba", "Llama, dynamic positions"]


def test_there_are_enough_families():
    assert len(FAMILIES) >= 35
    assert sum(hasattr(transformers, family.configuration) for family in FAMILIES.values()) >= 35


@pytest.mark.parametrize("family", RIGHT + REFUSED)
def test_a_family_is_right_or_refused(family):
    try:
        found = [matrix.measure(family, attention) for attention in ("eager", "padding_free")]
    except ValueError as error:
        pytest.skip(str(error))
    assert all(each.right for each in found)
    assert (found[-1].choice is not None) == (family in RIGHT)
    assert all("\n" not in each.refusal for each in found)


def test_the_matrix_sees_what_is_wrong_without_an_error(monkeypatch, capsys):
    """Without the probe, a hybrid model would be taken."""
    monkeypatch.setattr(choice, "check_no_leak", lambda model, longest, row: None)
    assert matrix.main(["LFM2", "Llama"]) == 1
    text = capsys.readouterr().out
    assert "| **WRONG** " in text and "wrong without an error: 3" in text


def test_the_command_prints_a_line_a_family(capsys):
    assert matrix.main(["Llama", "RWKV"]) == 0
    text = capsys.readouterr().out
    assert text.count("e-0") == 3 and text.count("; ones wrong") == 2  # eager and sdpa with an all-ones mask
    assert text.count("refused |") == 3 and "2 families; right: 1 with eager, 1 with sdpa, 1 with padding_free" in text
    assert run_main(matrix.main, ["Lama"]) == 2
    printed = capsys.readouterr()
    assert "did you mean 'Llama'?" in printed.err and printed.err.count("\n") == 1 and not printed.out
