"""The texts in the sources of the program."""

import ast
from functools import lru_cache

from tests.imports import SOURCES, tree_of


def text_of(node):
    """A text of a source, with NUL where a value goes; None for another expression."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value
    if isinstance(node, ast.JoinedStr):
        return "".join(text_of(part) or "\0" for part in node.values)
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        return (text_of(node.left) or "\0") + (text_of(node.right) or "\0")
    return None


def texts_of(tree):
    text = text_of(tree)
    if text is not None:
        return [text]
    return [text for node in ast.iter_child_nodes(tree) for text in texts_of(node)]


@lru_cache(None)
def texts_of_the_program():
    """(file, text), in the order of the files."""
    return [(path, text) for path in SOURCES for text in texts_of(tree_of(path))]
