"""docs/run_blocks.py: blocks run as they stand, what is not run has its reason, and a failing block is named."""

import contextlib
import importlib.util
import io
import re
import shlex
import subprocess
import sys

import pytest

from evidence import __main__ as evidence
from ipu_packed_bert import __main__ as packed_bert
from ipu_packed_bert.settings.shipped import config_file, shipped_names
from tests.imports import ROOT

spec = importlib.util.spec_from_file_location("run_blocks", ROOT / "docs" / "run_blocks.py")
run_blocks = importlib.util.module_from_spec(spec)
sys.modules["run_blocks"] = run_blocks
spec.loader.exec_module(run_blocks)

PAGE = """# A page

<!-- first (python):
n = 3
-->
```python
Path = __import__("pathlib").Path
Path("n").write_text(str(n))
```

- in a list

  ```sh
  test "$(cat n)" = 3
  echo 4 > n
  ```

      this line belongs to the list

<!-- ends with 2 -->
```sh
exit 2
```

<!-- not run: needs a moon -->
```sh
fly
```

```python
assert Path("n").read_text() == "4\\n"
```
"""


def run(folder, text, monkeypatch):
    """Exit status of the runner on one page, which lies where its folder is taken for the checkout."""
    (folder / "page.md").write_text(text)
    monkeypatch.setattr(run_blocks, "ROOT", folder)
    # The process of a page is another one: it is this Python, told the same folder.
    starter = folder / "run_blocks.py"
    starter.write_text(
        f"import sys, importlib.util\nfrom pathlib import Path\n"
        f"spec = importlib.util.spec_from_file_location('run_blocks', {str(ROOT / 'docs' / 'run_blocks.py')!r})\n"
        "module = importlib.util.module_from_spec(spec)\nsys.modules['run_blocks'] = module\n"
        f"spec.loader.exec_module(module)\nmodule.ROOT = Path({str(folder)!r})\nraise SystemExit(module.main())\n"
    )
    monkeypatch.setattr(run_blocks, "__file__", str(starter))
    return run_blocks.main([str(folder / "page.md")])


def test_a_block_of_sphinx_and_one_without_end():
    assert run_blocks.blocks_of(
        "```{include} ../CHANGELOG.md\n:relative-docs: docs/\n```\n\n```sh\nx\n```\n", "page.md"
    ) == [run_blocks.Block("page.md", 6, "sh", "x\n")]


def test_blocks_run_in_order_with_the_names_and_files_of_those_before(tmp_path, monkeypatch, capsys):
    assert run(tmp_path, PAGE, monkeypatch) == 0
    printed = capsys.readouterr().out
    assert re.search(r"4 blocks of 1 pages run .*not run:\n +1  needs a moon\n", printed)


@pytest.mark.parametrize(
    "wrong, says",
    [
        ("```python\n\nassert n == 4\n```\n", r'File "page.md", line 36.*AssertionError.*page.md:35: failed'),
        ("```sh\nfalse\ntrue\n```\n", r"page.md:35: ended with 1, not 0"),
        ("<!-- ends with 3 -->\n```sh\nexit 2\n```\n", r"page.md:36: ended with 2, not 3"),
        ("```python\nraise SystemExit\n```\n", r"page.md:35: failed"),
    ],
)
def test_a_failing_block_fails_the_page(tmp_path, monkeypatch, capsys, wrong, says):
    assert run(tmp_path, PAGE + "\n" + wrong, monkeypatch) == 1
    assert re.search(says, capsys.readouterr().err, re.S)


@pytest.mark.parametrize(
    "text, says",
    [
        ("text\n\n    python -m nothing\n", "page.md:3: a block of language ''"),
        ("```\ncode\n```\n", "page.md:2: a block of language ''"),
        ("```bash\ncode\n```\n", "page.md:2: a block of language 'bash'"),
        ("```sh\ncode\n", "page.md:1: this block has no end"),
        ("<!-- not run: -->\n```sh\nx\n```\n", "page.md:1: no such mark"),
        ("<!-- not run: needs a moon -->\ntext\n```sh\nx\n```\n", "page.md:1: this mark stands above text"),
        ("<!-- not run: needs a moon -->\n", "page.md:1: this mark stands above no block"),
        ("<!-- not run: needs a moon -->\n```text\nx\n```\n", "page.md:3: a block of text is never run"),
        ("<!-- first (perl):\nx\n-->\n", "page.md:1: first (perl)"),
    ],
)
def test_a_block_without_language_and_a_mark_that_is_none_are_refused(text, says):
    with pytest.raises(ValueError, match=re.escape(says)):
        run_blocks.blocks_of(text, "page.md")


@pytest.mark.parametrize("page", run_blocks.all_pages())
def test_what_a_page_links_to_is_there(page):
    """Sphinx checks the pages that it builds, README.md is none of them; a git host needs files."""
    text = (ROOT / page).read_text(encoding="utf-8")
    for target in re.findall(r"\]\(([^)#\s]+)[^)]*\)", re.sub(r"`[^`\n]*`", "", text)):
        assert "://" in target or ((ROOT / page).parent / target).exists(), target


OWN = (
    "packed-bert ",
    "python -m pack_data.",
    "python -m ipu_packed_bert.",
    "python -m evidence ",
    "python run_pretraining.py ",
)


def commands_not_run():
    """The lines of all blocks that are not run which type a command of this project, each once."""
    commands = {}
    for page in run_blocks.all_pages():
        for block in run_blocks.blocks_of((ROOT / page).read_text(encoding="utf-8"), page):
            if block.not_run and block.language == "sh":
                for line in block.code.replace("\\\n", " ").splitlines():
                    words = re.sub(r"^(\S*=\S* |torchrun .*?(?=run_pretraining)|cat \S+ \| )", "", line.strip())
                    words = re.sub(r"^(\S*/srun --ipus=\d+|poprun .*?(?=python)) *", "", words)
                    words = re.sub(r"^run_pretraining.py", "python run_pretraining.py", words)
                    if words.startswith(OWN):
                        commands[" ".join(shlex.split(words, comments=True))] = None
    return list(commands)


@pytest.fixture(scope="module")
def help_of():
    """a command's words -> its help; in this process where packed-bert has the command, too"""
    known = {}

    def text(*words):
        if words not in known:
            door = words[-1].replace("ipu_packed_bert.", "ipu_packed_bert.commands.")
            modules = {command.module: name for name, command in packed_bert.COMMANDS.items()}
            name = words[1] if words[0] == "packed-bert" else modules.get(words[-1], modules.get(door))
            main, more = (evidence.main, words[3:]) if words[2:3] == ("evidence",) else (packed_bert.main, (name,))
            if all(more):
                with io.StringIO() as out, contextlib.redirect_stdout(out):
                    with contextlib.suppress(SystemExit):
                        main([*more, "--help-all"])
                    known[words] = out.getvalue()
            else:
                for option in ("--help-all", "--help"):  # a parser that is Python's own has only the second
                    asked = [sys.executable, *words[1:], option]
                    done = subprocess.run(asked, cwd=str(ROOT), stdout=subprocess.PIPE, text=True)
                    if not done.returncode:
                        break
                assert not done.returncode
                known[words] = done.stdout
        return known[words]

    return text


def test_there_are_commands_that_are_not_run():
    assert len(commands_not_run()) > 10


@pytest.mark.parametrize("line", commands_not_run())
def test_each_command_that_is_not_run_is_one_with_its_options(line, help_of):
    words = line.split()
    place = 3 if words[:2] == ["python", "-m"] else 2
    if words[2:3] == ["evidence"]:
        place = 4  # each has options of its own
    command = words[:place]
    rest = words[place:]
    if command == ["python", "run_pretraining.py"]:
        command = ["packed-bert", "pretrain"]
    assert command[0] != "packed-bert" or command[1] in packed_bert.COMMANDS
    for option in (word for word in rest if word.startswith("--")):
        assert re.search(rf"(?<![\w-]){option}(?![\w-])", help_of(*command)), option
    for option, value in zip(rest, rest[1:]):
        if option == "--config" and "/" not in value and value.startswith(("packed", "unpacked", "finetune")):
            assert config_file(value).stem in shipped_names()


def test_links_and_the_sidebar_show_titles():
    """A link shows words, not the name of a file; a page begins with its title, which the sidebar shows."""
    names = re.compile(r"\[`?[\w/.-]+\.(?:md|py)`?\]\(")
    for page in run_blocks.all_pages():
        text = (ROOT / page).read_text(encoding="utf-8")
        assert names.findall(text) == [], page
        first = text.lstrip().splitlines()[0]
        assert re.match(r"# \w", first) or "{include}" in text, f"{page} begins with {first!r}"
    assert names.findall("see [a.md](a.md), [words](a.md)") == ["[a.md]("]
