"""Which exceptions leave one code object, and which may be ended on their way.

A ``try`` statement is judged by its handlers, a ``with`` statement by its context managers: ``contextlib.suppress`` by
the classes that it is given, a function under ``@contextmanager`` by its generator, a class by what its ``__exit__``
returns. torch, Lightning and the standard library are trusted to make no context manager that ends an exception, other
than those of ``contextlib``. A manager that the source does not tell may end every exception in the user's own code; in
that of libraries and installed packages (``with self.profiler.profile(name)``) it is taken to end none.
"""

from __future__ import annotations

import ast
import builtins
import contextlib
from collections.abc import Iterator, Mapping, Sequence
from inspect import unwrap
from itertools import pairwise
from types import BuiltinFunctionType, CodeType, FunctionType, ModuleType
from typing import Any

from graphplan.environment.origin import is_library, is_librarys, is_users_file
from graphplan.observe.syntax import LEAVING, always_raises, has, parse, positions

BRANCHES = (ast.Assert, ast.If, ast.While)
ANY = frozenset({BaseException})
"""Classes of an exception of which nothing is known."""
_SCOPES = (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda, ast.Module)
_TRY_STAR: type[Any] = getattr(ast, "TryStar", ast.Try)
_HAS_TRY_STAR = _TRY_STAR is not ast.Try
_SILENT = (StopIteration, StopAsyncIteration, GeneratorExit, AttributeError)
"""Exceptions that Python itself ends: of iterators where a loop is over, of attributes in ``hasattr``."""
_SILENT_IN: dict[str, tuple[type[BaseException], ...]] = {
    "__getitem__": (IndexError,),
    "__len__": (TypeError,),
    "__length_hint__": (TypeError,),
    "__del__": (BaseException,),
}
"""Exceptions that Python itself ends where a method of that name raises them."""


class Exits:
    """The exits of one code object. ``space`` has its globals."""

    def __init__(self, code: CodeType, space: Mapping[str, Any]) -> None:
        self._code = code
        self._space = space
        self._parents: dict[ast.AST, ast.AST] = {}
        for parent in ast.walk(parse(code, space)):
            self._parents.update(dict.fromkeys(ast.iter_child_nodes(parent), parent))

    def lets_out(self, offset: int, raised: frozenset[Any]) -> tuple[bool, frozenset[Any]]:
        """Whether an exception leaves the code, and is not ended by Python itself, if one of the classes ``raised``
        comes out of the instruction at ``offset``; and the classes of what leaves it.
        """
        if _related(_SILENT_IN.get(self._code.co_name, ()), raised):
            return False, raised
        # Until Python 3.11 only the source tells.
        if not getattr(self._code, "co_exceptiontable", True):
            return True, raised
        left = [self._leaving(node, raised) for node in self._at(offset // 2)]
        known = [kinds for kinds in left if kinds is not None]
        return bool(left) and len(known) == len(left), raised.union(*known)

    def _past_yields(self, raised: frozenset[Any]) -> frozenset[Any] | None:
        """The classes of what leaves a generator if one of the classes ``raised`` is thrown into it; None if that may
        be caught.
        """
        if has([*self._parents], (ast.YieldFrom,)):
            return None
        left = [self._leaving(node, raised) for node in self._parents if isinstance(node, ast.Yield)]
        known = [kinds for kinds in left if kinds is not None]
        return frozenset().union(*known) if left and len(known) == len(left) else None

    def _past_exit(self, raised: frozenset[Any]) -> frozenset[Any] | None:
        """The classes of what leaves a ``with`` statement whose manager has this code for its ``__exit__``; None if
        that may return something true.
        """
        returned = [node.value for node in self._parents if isinstance(node, ast.Return) and node.value is not None]
        returned += [node.body for node in self._parents if isinstance(node, ast.Lambda)]
        if not self._parents or not all(isinstance(value, ast.Constant) and not value.value for value in returned):
            return None
        return raised | self._kinds_in([node for node in self._parents if isinstance(node, ast.Raise)])

    def _at(self, index: int) -> list[ast.expr | ast.stmt]:
        """What an instruction belongs to: the smallest thing around it that ends where it ends. Before Python 3.11 all
        on its line that it may be.
        """
        line, last, column, end = positions(self._code)[index]
        nodes = [node for node in self._parents if isinstance(node, ast.expr | ast.stmt) and node.end_lineno]
        if line is None or column is None:
            acting = (ast.stmt, ast.Call, ast.Compare, ast.BinOp, ast.Subscript)
            deciding = (*BRANCHES, ast.BoolOp, ast.UnaryOp)
            may_be = [node for node in nodes if isinstance(node, acting) or isinstance(self._parents[node], deciding)]
            there = [node for node in may_be if node.lineno <= (line or 0) <= (node.end_lineno or 0)]
            return [node for node in there if all(self._lost(around) is None for around in self._around(node))]
        around = [node for node in nodes if (node.end_lineno, node.end_col_offset) == (last, end)]
        # A method's call begins where its name does.
        around = [node for node in around if (node.lineno, node.col_offset) <= (line, column)]
        return sorted(around, key=lambda node: (node.lineno, node.col_offset))[-1:]

    def _lost(self, node: ast.AST) -> frozenset[Any] | None:
        """The classes of what is raised if all that can come after a statement is an exception; None if not."""
        return self._only_raises(self._onwards(node), node)

    def _only_raises(self, block: Sequence[ast.stmt], place: ast.AST) -> frozenset[Any] | None:
        """The classes of the exceptions with which a block at ``place`` leaves the code on every way; None if not."""
        if not always_raises(block):
            return None
        again = any(isinstance(node, ast.Raise) and node.exc is None for part in block for node in ast.walk(part))
        return self._leaving(place, self._kinds_in(block) | (ANY if again else frozenset()) or ANY)

    def _is_silent(self, raised: frozenset[Any]) -> bool:
        """Whether Python itself ends one of the classes where this code raises it."""
        silent: tuple[type[BaseException], ...] = (*_SILENT, *_SILENT_IN.get(self._code.co_name, ()))
        return any(issubclass(kind, silent) for kind in raised)

    def _leaving(self, node: ast.AST, raised: frozenset[Any]) -> frozenset[Any] | None:
        """The classes of what leaves the code if one of the classes ``raised`` comes out of ``node``; None if that may
        be caught.
        """
        for inner, outer in pairwise(self._around(node)):
            if isinstance(outer, ast.With | ast.AsyncWith):
                left = self._past_managers(outer, raised)
            elif isinstance(outer, ast.Try | _TRY_STAR):
                left = self._past_handlers(outer, inner, raised)
            else:
                continue
            if left is None:
                return None
            raised = left
        return raised

    def _past_handlers(self, block: Any, inner: ast.AST, raised: frozenset[Any]) -> frozenset[Any] | None:
        """The classes of what leaves a ``try`` statement if one of the classes ``raised`` comes out of the part
        ``inner``; None if that may be caught.
        """
        if has(block.finalbody, LEAVING):
            return None
        for handler in block.handlers if inner in block.body else ():
            kinds = handler.type.elts if isinstance(handler.type, ast.Tuple) else [handler.type]
            # ``except*`` catches groups, too, for what is in them.
            if self._catches(kinds, raised) or (_HAS_TRY_STAR and isinstance(block, _TRY_STAR)):
                if not always_raises(handler.body):
                    return None
                raised |= self._kinds_in(handler.body)
        return raised | self._kinds_in(block.finalbody)

    def _catches(self, kinds: Sequence[ast.AST | None], raised: frozenset[Any]) -> bool:
        """Whether what catches the classes ``kinds`` may be for one of the classes ``raised``."""
        return _related(map(self._class, kinds), raised)

    def _past_managers(self, block: ast.With | ast.AsyncWith, raised: frozenset[Any]) -> frozenset[Any] | None:
        """The classes of what leaves a ``with`` statement if one of the classes ``raised`` comes out of its block; None
        if a context manager may end that.
        """
        managers = [manager for item in reversed(block.items) for manager in self._managers_of(item.context_expr)]
        judged = {getattr(manager, "func", None) for manager in managers}
        named = [node for node in ast.walk(block) if "suppress" in (getattr(node, "id", ""), getattr(node, "attr", ""))]
        # What else is done with it, as in an ExitStack, is not followed.
        if not judged.issuperset(named):
            return None
        for manager in managers:
            left = self._past_manager(manager, raised)
            if left is None:
                return None
            raised = left
        return raised

    def _managers_of(self, item: ast.expr) -> list[ast.expr]:
        """The expressions one of which is the context manager ``item``, which may be a variable."""
        if isinstance(item, ast.IfExp):
            return [*self._managers_of(item.body), *self._managers_of(item.orelse)]
        parameters = self._code.co_argcount + self._code.co_kwonlyargcount
        if not isinstance(item, ast.Name) or item.id not in self._code.co_varnames[parameters:]:
            return [item]
        same = [node for node in self._parents if isinstance(node, ast.Name) and node.id == item.id]
        stores = [self._parents[node] for node in same if isinstance(node.ctx, ast.Store)]
        values = [store.value for store in stores if isinstance(store, ast.Assign)]
        if not values or len(values) < len(stores) or any(isinstance(value, ast.Name) for value in values):
            return [item]
        return [manager for value in values for manager in self._managers_of(value)]

    def _past_manager(self, item: ast.expr, raised: frozenset[Any]) -> frozenset[Any] | None:
        """The classes of what leaves a ``with`` statement that has one context manager; None if it may end that."""
        made = self._resolve(item.func if isinstance(item, ast.Call) else item)
        filename = self._code.co_filename
        if made is None:
            return None if is_users_file(filename) or filename == contextlib.__file__ else raised
        if made is contextlib.suppress and isinstance(item, ast.Call):
            return None if self._catches(item.args, raised) else raised
        if isinstance(made, BuiltinFunctionType):
            return raised
        if isinstance(made, FunctionType):
            inner = unwrap(made)
            code = getattr(inner, "__code__", None)
            if code is None or code is self._code:
                return None
            if _is_trusted(code):
                return raised
            # The function that @contextmanager makes of a generator.
            is_generators = made.__code__.co_filename == contextlib.__file__ and vars(made).get("__wrapped__") is inner
            return Exits(code, inner.__globals__)._past_yields(raised) if is_generators else None
        if isinstance(item, ast.Call) and not isinstance(made, type):
            return None
        return _past_class(made if isinstance(made, type) else type(made), raised)

    def _kinds_in(self, block: Sequence[ast.stmt]) -> frozenset[Any]:
        """The classes of exceptions that a block raises, other than what is on its way already."""
        raises = [node for statement in block for node in ast.walk(statement) if isinstance(node, ast.Raise)]
        return frozenset(self._class(node.exc) for node in raises if node.exc is not None)

    def _class(self, node: ast.AST | None) -> Any:
        """The class of an exception that an expression names or makes, as far as that is known."""
        kind = self._resolve(node.func if isinstance(node, ast.Call) else node)
        return kind if isinstance(kind, type) and issubclass(kind, BaseException) else BaseException

    def _resolve(self, node: ast.AST | None) -> Any:
        """The global, builtin or attribute of a module that an expression names, or None."""
        if isinstance(node, ast.Attribute):
            # Of modules only: to ask other objects could run code.
            holder = self._resolve(node.value)
            return vars(holder).get(node.attr) if isinstance(holder, ModuleType) else None
        code = self._code
        if not isinstance(node, ast.Name) or node.id in (*code.co_varnames, *code.co_cellvars, *code.co_freevars):
            return None
        return self._space.get(node.id, getattr(builtins, node.id, None))

    def _onwards(self, statement: ast.AST) -> list[ast.stmt]:
        """What comes after a statement in the block that it is in, with itself."""
        parent = self._parents.get(statement)
        for block in (getattr(parent, name, None) for name in ("body", "orelse", "finalbody")):
            if isinstance(block, list) and statement in block:
                after = self._onwards(parent)[1:] if isinstance(parent, ast.If) else []
                return [*block[block.index(statement) :], *after]
        return []

    def _around(self, node: ast.AST) -> Iterator[ast.AST]:
        """``node`` and what it is part of, up to the function that runs it."""
        inner = None
        while True:
            yield node
            body = getattr(node, "body", None)
            if isinstance(node, _SCOPES) and (inner is body or (isinstance(body, list) and inner in body)):
                return
            inner, node = node, self._parents[node]


def _related(kinds: Any, raised: frozenset[Any]) -> bool:
    """Whether an exception of the classes ``raised`` may be one of the classes ``kinds``."""
    return any(issubclass(one, kind) or issubclass(kind, one) for kind in kinds for one in raised)


def _is_trusted(code: CodeType) -> bool:
    """Whether context managers that the code makes end no exception: a library's, other than ``contextlib``."""
    return is_library(code.co_filename) and code.co_filename != contextlib.__file__


def _past_class(kind: type, raised: frozenset[Any]) -> frozenset[Any] | None:
    """The classes of what leaves a ``with`` statement whose manager is of class ``kind``; None if it may end that."""
    leave = getattr(kind, "__exit__", None) or getattr(kind, "__aexit__", None)
    if not isinstance(leave, FunctionType):
        return raised if leave is not None and is_librarys(kind) else None
    if _is_trusted(leave.__code__):
        return raised
    return Exits(leave.__code__, leave.__globals__)._past_exit(raised)
