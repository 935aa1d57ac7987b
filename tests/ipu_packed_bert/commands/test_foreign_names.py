"""Names in foreign files are escaped in all lines: they could control a terminal."""

import json

import pytest

from ipu_packed_bert.__main__ import main

NASTY = "a\x1b]0;pwned\x07\n\u202e"
COMMANDS = (
    "build --from IN --out OUT --max-sequence-length 8 --skip-bad 1",
    "convert IN OUT.jsonl --skip-bad 1",
)


@pytest.mark.parametrize("command", COMMANDS)
def test_names_of_files_and_columns_print_no_control_characters(tmp_path, capfd, command):
    lines = [
        json.dumps({"input_ids": [1, 2], NASTY: "text"}),
        json.dumps({"input_ids": [3], NASTY: "text"}),
    ]
    texts = {}
    for kind in ("plain", "nasty"):
        folder = tmp_path / kind
        folder.mkdir()
        text = "\n".join(lines) + ("\n{" if "--skip-bad" in command else "\n")
        text = text.replace(
            json.dumps(NASTY),
            json.dumps("plain" if kind == "plain" else NASTY),
        )
        (folder / f"{'x' if kind == 'plain' else NASTY}.jsonl").write_text(text)
        arguments = (
            command.replace("IN", str(folder))
            .replace(
                "OUT",
                str(tmp_path / f"out-{kind}"),
            )
            .split()
        )
        assert main(arguments) == 0
        texts[kind] = "".join(capfd.readouterr())
    nasty = texts["nasty"]
    assert "pwned" in nasty
    assert all(character.isprintable() or character == "\n" for character in nasty)
    assert nasty.count("\n") == texts["plain"].count("\n")
