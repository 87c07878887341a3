"""The syntax trees that code objects come from."""

from __future__ import annotations

import ast
import linecache
import sys
from collections.abc import Mapping
from contextlib import suppress
from types import CodeType
from typing import Any
from warnings import catch_warnings, simplefilter

COMPREHENSIONS = (ast.ListComp, ast.SetComp, ast.DictComp)
_KINDS: dict[str, type[ast.AST]] = {
    "<lambda>": ast.Lambda, "<genexpr>": ast.GeneratorExp, "<listcomp>": ast.ListComp, "<setcomp>": ast.SetComp,
    "<dictcomp>": ast.DictComp, "<module>": ast.Module,
}  # fmt: skip
_NAMED = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)


def parse(code: CodeType, space: Mapping[str, Any] | None = None) -> ast.Module:
    """The syntax tree of the lines that ``code`` comes from, or of its whole file where these make no statement; empty
    where there is no source. ``space`` are the code's globals.
    """
    lines = linecache.getlines(code.co_filename, dict(space or {}))
    first, end = code.co_firstlineno, max(last or line or 0 for line, last, _, _ in positions(code))
    for start, part in ((first, lines[first - 1 : end]), (1, lines)):
        is_inner = bool(part) and part[0][:1].isspace()
        with suppress(SyntaxError, ValueError), catch_warnings():
            # Python has warned of a string such as "\\d" when it compiled the code.
            simplefilter("ignore")
            tree = ast.parse("if True:\n" * is_inner + "".join(part))
            ast.increment_lineno(tree, start - 1 - is_inner)
            return tree
    return ast.Module([], [])


def positions(code: CodeType) -> list[tuple[int | None, ...]]:
    """Line, last line, column, and column at the end of each instruction; since Python 3.11 more than its line."""
    if sys.version_info >= (3, 11):
        return [(line, last, column, end) for line, last, column, end in code.co_positions()]
    return [(line, line, None, None) for start, end, line in code.co_lines() for _ in range(start, end, 2)]


def nodes_of(code: CodeType) -> list[ast.AST]:
    """What ``code`` may come from: its function, or each lambda or comprehension that begins on its line."""
    found: list[ast.AST] = []
    for node in ast.walk(parse(code)):
        decorators = getattr(node, "decorator_list", ())
        line = min(getattr(part, "lineno", code.co_firstlineno) for part in (node, *decorators))
        is_one = isinstance(node, _NAMED) and node.name == code.co_name
        if line == code.co_firstlineno and (is_one or isinstance(node, _KINDS.get(code.co_name, ()))):
            found.append(node)
    return found
