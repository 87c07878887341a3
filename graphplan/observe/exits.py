"""Whether an exception leaves the code that it is raised in.

Every handler of a ``try`` statement may end it, unless the handler raises, too, or is for exceptions that no assertion
raises: torch's and Lightning's own, and those that end an iteration. So may every context manager, other than those of
torch, Lightning and the standard library; ``contextlib.suppress`` as a handler does. A manager that the source of a
library or an installed package does not tell (``with self.profiler.profile(name)``) is taken to end none.
"""

from __future__ import annotations

import ast
import contextlib
from collections.abc import Iterator, Sequence
from inspect import unwrap
from itertools import pairwise
from types import BuiltinFunctionType, CodeType, FunctionType
from typing import Any

from graphplan.environment.origin import is_library, is_librarys, is_users_file
from graphplan.observe.syntax import LEAVING, SyntaxTree, has

_SCOPES = (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda, ast.Module)
_TRIES: tuple[Any, ...] = (ast.Try, getattr(ast, "TryStar", ast.Try))
ITERATION = (StopIteration, StopAsyncIteration, GeneratorExit)
"""Exceptions that Python itself ends, where a loop is over."""
ENDED_IN = frozenset({"__getitem__", "__len__", "__length_hint__", "__next__", "__anext__", "__getattr__", "__del__"})
"""Methods whose exceptions Python itself may end: they say that an iterator is over, or that there is nothing."""


class Exits(SyntaxTree):
    """The exits of one code object."""

    def lets_out(self, offset: int) -> bool:
        """Whether an exception that comes out of the instruction at ``offset`` leaves the code, and is not ended by
        Python itself.
        """
        if self.code.co_name in ENDED_IN:
            return False
        if not getattr(self.code, "co_exceptiontable", True):
            return True
        node = self.at(offset)
        return node is not None and self._leaves(node)

    def _leaves(self, node: ast.AST) -> bool:
        """Whether any exception that comes out of ``node`` leaves the code."""
        for inner, outer in pairwise(self._around(node)):
            if isinstance(outer, ast.With | ast.AsyncWith):
                if not all(self._passes_manager(item.context_expr) for item in outer.items):
                    return False
            elif isinstance(outer, _TRIES):
                handlers = outer.handlers if inner in outer.body else ()
                if has(outer.finalbody, LEAVING) or not all(map(self._passes_handler, handlers)):
                    return False
        return True

    def _passes_handler(self, handler: ast.ExceptHandler) -> bool:
        kinds = handler.type.elts if isinstance(handler.type, ast.Tuple) else [handler.type]
        return always_raises(handler.body) or not any(map(self._may_be_asserted, kinds))

    def _may_be_asserted(self, node: ast.AST | None) -> bool:
        """Whether an expression names a class of exceptions that an assertion may raise, as far as that is known."""
        kind = self.resolve(node)
        if not isinstance(kind, type):
            return True
        return not issubclass(kind, ITERATION) and (kind.__module__ == "builtins" or not is_librarys(kind))

    def _passes_manager(self, item: ast.expr) -> bool:
        made = self.resolve(item.func if isinstance(item, ast.Call) else item)
        if made is None:
            return not is_users_file(self.code.co_filename) and self.code.co_filename != contextlib.__file__
        if made is contextlib.nullcontext or isinstance(made, BuiltinFunctionType):
            return True
        if made is contextlib.suppress and isinstance(item, ast.Call):
            return not any(map(self._may_be_asserted, item.args))
        if isinstance(made, FunctionType):
            # What ``@contextmanager`` has made of a generator.
            return _is_trusted(getattr(unwrap(made), "__code__", None))
        if isinstance(item, ast.Call) and not isinstance(made, type):
            return False
        kind = made if isinstance(made, type) else type(made)
        leave = getattr(kind, "__exit__", None) or getattr(kind, "__aexit__", None)
        return _is_trusted(leave.__code__) if isinstance(leave, FunctionType) else is_librarys(kind)

    def _around(self, node: ast.AST) -> Iterator[ast.AST]:
        """``node`` and what it is part of, up to the function that runs it."""
        inner = None
        while True:
            yield node
            body = getattr(node, "body", None)
            if isinstance(node, _SCOPES) and (inner is body or (isinstance(body, list) and inner in body)):
                return
            inner, node = node, self.parents[node]


def _is_trusted(code: CodeType | None) -> bool:
    return code is not None and is_library(code.co_filename) and code.co_filename != contextlib.__file__


def always_raises(block: Sequence[ast.stmt]) -> bool:
    """Whether every way through a block ends with an exception."""
    for statement in block:
        if isinstance(statement, ast.Raise):
            return True
        if isinstance(statement, ast.If) and always_raises(statement.body) and always_raises(statement.orelse):
            return True
        if has([statement], (*LEAVING, ast.Yield, ast.YieldFrom, ast.Await)):
            return False
    return False
