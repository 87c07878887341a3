"""The syntax trees of code objects."""

from __future__ import annotations
import __future__

import ast
import builtins
import linecache
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import lru_cache, reduce
from operator import or_
from types import CodeType, ModuleType
from typing import Any
from warnings import catch_warnings, simplefilter

from graphplan.environment.origin import is_installed, is_library

COMPREHENSIONS = (ast.ListComp, ast.SetComp, ast.DictComp)
_KINDS: dict[str, type[ast.AST]] = {
    "<lambda>": ast.Lambda, "<genexpr>": ast.GeneratorExp, "<listcomp>": ast.ListComp, "<setcomp>": ast.SetComp,
    "<dictcomp>": ast.DictComp, "<module>": ast.Module,
}  # fmt: skip
_NAMED = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
_SCOPES = (*_NAMED, ast.Lambda, ast.Module)
"""Nodes whose body is a code object of its own."""
_FUTURES: int = reduce(or_, (getattr(__future__, name).compiler_flag for name in __future__.all_feature_names))
"""Flags of code that was compiled under ``from __future__ import``."""
_REWRITTEN = ("@py_", "@pytest_")
"""Prefixes of the names that pytest adds to functions with assertions."""


def parse(code: CodeType, space: Mapping[str, Any] | None = None) -> ast.Module:
    """Return the syntax tree of the lines of ``code``, or of its whole file if these lines do not parse alone; an empty
    tree if there is no source, or it was edited since. ``space`` are the code's globals.
    """
    lines = _lines_of(code, dict(space or {}))
    ends = [line for _, _, line in code.co_lines()] + [last for _, last, _, _ in _positions(code)]
    first, end = code.co_firstlineno, max(line or 0 for line in ends)
    for start, part in ((first, lines[first - 1 : end]), (1, lines)):
        # Empty lines keep the line numbers right: to parse them is faster than to renumber the nodes.
        is_inner = start > 1 and bool(part) and part[0][:1].isspace()
        before = "\n" * (start - 1 - is_inner) + "if True:\n" * is_inner
        with suppress(SyntaxError, ValueError), catch_warnings():
            # Python already warned of strings such as "\\d" when it compiled the code.
            simplefilter("ignore")
            return ast.parse(before + "".join(part))
    return ast.Module([], [])


def _lines_of(code: CodeType, space: dict[str, Any]) -> list[str]:
    """Return the lines of the file of ``code``; none if they do not compile to it."""
    lines = linecache.getlines(code.co_filename, space)
    if is_library(code.co_filename) or is_installed(code.co_filename) or _is_made_of(code, lines):
        # Do not compile files of packages to compare them: it is the slowest part, and such files do not change.
        return lines
    # The module may have been reloaded, and linecache may have its old lines.
    linecache.checkcache(code.co_filename)
    lines = linecache.getlines(code.co_filename, space)
    return lines if _is_made_of(code, lines) else []


def _is_made_of(code: CodeType, lines: list[str]) -> bool:
    """Return True if the lines of a file compile to ``code``, or to code that pytest rewrote into it."""
    compiled = _compile(code.co_filename, "".join(lines), code.co_flags & _FUTURES)
    same = compiled.get((code.co_firstlineno, code.co_name), ())
    return code in same or (bool(same) and _is_rewritten(code))


@lru_cache(128)
def _compile(filename: str, source: str, flags: int) -> dict[tuple[int, str], list[CodeType]]:
    """Return the code objects that a file compiles to, by first line and name."""
    found: dict[tuple[int, str], list[CodeType]] = {}
    with suppress(SyntaxError, ValueError), catch_warnings():
        simplefilter("ignore")
        left = [compile(source, filename, "exec", flags, dont_inherit=True)]
        while left:
            one = left.pop()
            found.setdefault((one.co_firstlineno, one.co_name), []).append(one)
            left += [part for part in one.co_consts if isinstance(part, CodeType)]
    return found


def _is_rewritten(code: CodeType) -> bool:
    names = (*code.co_names, *code.co_varnames)
    inner = (part for part in code.co_consts if isinstance(part, CodeType))
    return any(name.startswith(_REWRITTEN) for name in names) or any(map(_is_rewritten, inner))


def _positions(code: CodeType) -> list[tuple[int | None, ...]]:
    """Return line, last line, column and end column of each instruction; all None before Python 3.11."""
    find: Any = getattr(code, "co_positions", None)
    return [(None, None, None, None)] * (len(code.co_code) // 2) if find is None else list(find())


def has(nodes: Sequence[ast.AST], kinds: tuple[type[ast.AST], ...]) -> bool:
    """Return True if a node of one of the ``kinds`` is in the syntax trees."""
    return any(isinstance(inner, kinds) for node in nodes for inner in ast.walk(node))


class SyntaxTree:
    """The syntax tree of one code object; empty if there is no source. ``space`` are the code's globals."""

    def __init__(self, code: CodeType, space: Mapping[str, Any] | None = None) -> None:
        self.code = code
        self.parents: dict[ast.AST, ast.AST] = {}
        self._space = space or {}
        self._tree = parse(code, space)
        left: list[ast.AST] = [self._tree]
        while left:
            parent = left.pop()
            children = list(ast.iter_child_nodes(parent))
            self.parents.update(dict.fromkeys(children, parent))
            left += children

    def own_nodes(self) -> list[ast.AST]:
        """Return the nodes of the code itself. For a lambda or comprehension, of all that start on its line."""
        found: list[ast.AST] = []
        for root in filter(self._may_be_root, ast.walk(self._tree)):
            scope = root if isinstance(root, _SCOPES) else self.around(root)[-1]
            found += [node for node in ast.walk(root) if node in self.parents and self.around(node)[-1] is scope]
        return found

    def _may_be_root(self, node: ast.AST) -> bool:
        name, first = self.code.co_name, self.code.co_firstlineno
        line = min(getattr(part, "lineno", first) for part in (node, *getattr(node, "decorator_list", ())))
        is_one = isinstance(node, _NAMED) and node.name == name
        return line == first and (is_one or isinstance(node, _KINDS.get(name, ())))

    def around(self, node: ast.AST) -> list[ast.AST]:
        """Return ``node`` and its parents, up to the function, class or module whose body runs it."""
        found = [node]
        while len(found) == 1 or not _runs(node, found[-2]):
            node = self.parents[node]
            found.append(node)
        return found

    def is_load(self, node: ast.Name | ast.Attribute | ast.Subscript) -> bool:
        """Return True if ``node`` is loaded. The target of ``a += b`` is, and may be changed in place."""
        return isinstance(node.ctx, ast.Load) or isinstance(self.parents[node], ast.AugAssign)

    def at(self, offset: int) -> ast.expr | ast.stmt | None:
        """Return the smallest node around the instruction at ``offset`` with the same end; None before Python 3.11."""
        line, last, column, end = _positions(self.code)[offset // 2]
        if line is None or column is None:
            return None
        nodes = (node for node in self.parents if isinstance(node, ast.expr | ast.stmt))
        # The instruction that calls a method starts at the method's name, not at the object.
        ending = [node for node in nodes if (node.end_lineno, node.end_col_offset) == (last, end)]
        around = [node for node in ending if (node.lineno, node.col_offset) <= (line, column)]
        return max(around, key=lambda node: (node.lineno, node.col_offset), default=None)

    def resolve(self, node: ast.AST | None) -> Any:
        """Return the global, builtin or attribute of a module that an expression names; else None."""
        if isinstance(node, ast.Attribute):
            # Only modules: an attribute of another object could run code.
            holder = self.resolve(node.value)
            return vars(holder).get(node.attr) if isinstance(holder, ModuleType) else None
        code = self.code
        if not isinstance(node, ast.Name) or node.id in (*code.co_varnames, *code.co_cellvars, *code.co_freevars):
            return None
        return self._space.get(node.id, getattr(builtins, node.id, None))


def _runs(node: ast.AST, inner: ast.AST) -> bool:
    """Return True if ``node`` is a function, class or module, and ``inner`` is in its body."""
    body = getattr(node, "body", None)
    return isinstance(node, _SCOPES) and (inner is body or (isinstance(body, list) and inner in body))
