"""Docstrings and comments refer to names and files that exist, and docstrings begin with what they are about."""

import ast
import io
import re
import tokenize
from functools import lru_cache

from tests.imports import ROOT, SOURCES, tree_of

TOPS = [
    ROOT / name
    for name in ("pack_data", "ipu_packed_bert", "profiling", "evidence", "tests", "configs", "docs", "examples")
]
NAMES = [str(file) for top in TOPS for file in top.rglob("*")]
FILES = sorted({*SOURCES, *(ROOT / "evidence").rglob("*.py")})
# `name`, `module.name`, :class:`Name`, path/file.py, module.Name: what a reader would search for.
REFERENCES = (
    re.compile(r"`([A-Za-z_][\w./]*)`"),
    re.compile(r"\b([a-z_]+(?:/[a-z_]+)+\.py)\b"),
    re.compile(r"\b([a-z]{4,}_[a-z_]+\.[a-z_]+|[a-z_]{4,}\.[A-Z]\w+)\b"),
)
# Names of other projects, and words.
FOREIGN = {
    "benchmarks/attention_costs.py": "a file of the commit that the comment names",
    "attention_costs.py": "the same",
    "add_.Tensor": "an operator of torch",
    "torch.nn.utils.clip_grad_norm_": "of torch",
    "cls.predictions.product": "a product of the traced graph",
    "fully_shard": "torch's FSDP2",
    "localflock": "an option of Lustre",
    "local_lock": "an option of NFS",
    "nolock": "an option of NFS",
    "tokenizers": "the package",
}


def docstrings_of(source):
    """Yield (line, text) of the docstrings of a source."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef)) and ast.get_docstring(node):
            yield getattr(node, "lineno", 1), ast.get_docstring(node)


def texts_of(source):
    """Yield (line, text) of the docstrings and comments of a source."""
    yield from docstrings_of(source)
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            yield token.start[0], token.string


def names_in(tree):
    """Return every identifier of a source, and every string that could be one: a key, a setting, a column."""
    names = set()
    for node in ast.walk(tree):
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            names.add(node.name)
        elif isinstance(node, ast.Name):
            names.add(node.id)
        elif isinstance(node, ast.arg):
            names.add(node.arg)
        elif isinstance(node, ast.Attribute):
            names.add(node.attr)
        elif isinstance(node, ast.keyword):
            names.add(node.arg)
        elif isinstance(node, ast.alias):
            names.update(node.name.split("."))
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            names.update(re.findall(r"[\w-]+", node.value) if len(node.value) < 60 else ())
    return names


@lru_cache(None)
def modules():
    """Return the names in all files of each module or package name, read once and by one worker only."""
    names = {}
    for file in FILES:
        module = file.parent.name if file.stem == "__init__" else file.stem
        names.setdefault(module, set()).update(names_in(tree_of(file)))
    return names


@lru_cache(None)
def known_names():
    return set().union(*modules().values())


# Settings are written as section.name.
SECTIONS = set("task data model start loss optimizer batch engine placement run".split())
# Placeholders in the spelling of commands.
PLACEHOLDERS = {"NAME", "PACKER"}


def exists(reference, path):
    """Return whether a reference in the file `path` leads somewhere."""
    if reference in FOREIGN or len(reference) < 4:
        return True
    if reference.endswith(("/", ".json", ".jsonl", ".npy", ".txt", ".csv", ".pop", ".png")):
        # Files that programs write.
        return True
    if reference.endswith((".py", ".yml", ".md")) or "/" in reference:
        return (ROOT / reference).exists() or any(name.endswith("/" + reference) for name in NAMES)
    *parents, name = reference.rstrip(".").split(".")
    if name in PLACEHOLDERS or name in modules():
        return True
    if parents and parents[-1] in modules() and parents[-1] not in SECTIONS:
        return name in modules()[parents[-1]]
    return name in known_names()


def names_without_target(text, path):
    """Return the references in a text of the file `path` that lead nowhere."""
    names = [name for pattern in REFERENCES for name in pattern.findall(text)]
    return [name for name in names if not exists(name, path)]


def dangling(path, source):
    """Return the references of a source that lead nowhere, with their lines."""
    if not names_without_target(source, path):
        # The whole file is faster to search than its docstrings and comments.
        return []
    missing = []
    for line, text in texts_of(source):
        missing += [(line, name) for name in names_without_target(text, path)]
    return missing


def test_no_reference_leads_nowhere():
    missing = []
    for path in FILES:
        for line, name in dangling(path, path.read_text(encoding="utf-8")):
            missing.append(f"{path.relative_to(ROOT)}:{line} {name}")
    assert missing == []


def test_a_reference_that_leads_nowhere_is_found():
    source = (
        '"""See `no_such_function` and store/no_such.py."""\n# `PackStore` exists, `data_set.NoSuchClass` does not.\n'
    )
    names = {name for _, name in dangling(ROOT / "pack_data" / "a.py", source)}
    assert names == {"no_such_function", "store/no_such.py", "data_set.NoSuchClass"}


def test_no_docstring_begins_like_a_subordinate_clause():
    begins = re.compile(r"(What|Of|As|Whether|Where|How|Those|So)\b")
    candidate = re.compile(rf"['\"]\s*{begins.pattern}")  # only the files with one are parsed
    tests = (ROOT / "tests").rglob("*.py")
    unwanted = []
    for path in [*FILES, *tests]:
        source = path.read_text(encoding="utf-8")
        if candidate.search(source):
            for line, text in docstrings_of(source):
                if begins.match(text):
                    unwanted.append(f"{path.relative_to(ROOT)}:{line} {text[:60]}")
    assert unwanted == []
