"""Find whether code asserts a value that one of its expressions reads, returns it, or computes with it.

A value is asserted if only branches depend on it, and one side of each branch always raises. The expression is followed
in the syntax tree to its statement, and from a variable to its loads. Any other use counts as computing.

A ``try`` may catch the exception unless its handlers raise, or only catch other kinds, or only exceptions that torch or
Lightning define. ``suppress`` and context managers may catch it, too, except those of torch, Lightning and the standard
library. A manager in a library's code that cannot be resolved (``with self.profiler.profile(name)``) is assumed not to.
"""

from __future__ import annotations

import ast
import contextlib
import dis
import inspect
import math
from collections.abc import Iterator, Sequence
from contextlib import suppress
from enum import Enum
from itertools import pairwise
from types import BuiltinFunctionType, CodeType, FrameType, FunctionType, ModuleType
from typing import Any

from graphplan.environment.origin import is_library, is_librarys, is_users_file
from graphplan.observe.source import PAUSED
from graphplan.observe.syntax import COMPREHENSIONS, SyntaxTree, has


class Use(Enum):
    """How code uses a value."""

    ASSERTED = "asserted"
    RETURNED = "returned"
    """The caller's use of the result decides."""
    OTHER = "other"


class _ComputedWith(Exception):
    """The code neither asserts nor returns the value."""


_TESTS = ("POP_JUMP_", "JUMP_IF_", "TO_BOOL", "COPY", "NOP", "CACHE", "EXTENDED_ARG")
"""Prefixes of instructions that test the truth of a result, and of those in between."""
_LEAVING = (ast.Return, ast.Break, ast.Continue)
_PAUSING = (ast.Yield, ast.YieldFrom, ast.Await)
_TRIES: tuple[Any, ...] = (ast.Try, getattr(ast, "TryStar", ast.Try))
_BRANCHES = (ast.Assert, ast.If)
_PASSING = (
    ast.Assert, ast.Attribute, ast.BinOp, ast.BoolOp, ast.Compare, ast.Dict, ast.FormattedValue, ast.JoinedStr,
    ast.List, ast.Raise, ast.Set, ast.Slice, ast.Starred, ast.Subscript, ast.Tuple, ast.UnaryOp, ast.keyword,
    *COMPREHENSIONS,
)  # fmt: skip
"""Nodes that only compute a new value from a value, or raise it."""
_ACTING = (ast.NamedExpr, *_PAUSING, ast.GeneratorExp, *COMPREHENSIONS)
"""Expressions, besides calls, that may do more than compute a result."""
Kinds = tuple[type[BaseException], ...]
_ALL: Kinds = (BaseException,)
_ENDED_IN = frozenset({"__getitem__", "__len__", "__length_hint__", "__next__", "__anext__", "__getattr__", "__del__"})
"""Methods whose exceptions Python itself may catch: they signal the end of an iterator, or a missing item."""
_PURE_CALLS: frozenset[Any] = frozenset(
    {bool, int, float, complex, str, abs, len, min, max, sum, any, all, round, repr, isinstance, type}
    | {function for function in vars(math).values() if isinstance(function, BuiltinFunctionType)}
)
_PURE_METHODS = (
    "abs", "all", "allclose", "amax", "amin", "any", "bool", "cpu", "detach", "dim", "eq", "equal", "float",
    "ge", "gt", "int", "is_complex", "is_floating_point", "isclose", "isfinite", "isin", "isinf", "isnan",
    "item", "le", "logical_and", "logical_not", "logical_or", "long", "lt", "max", "mean", "min", "ndimension",
    "ne", "norm", "numel", "size", "sum", "tolist",
)  # fmt: skip
"""Names without side effects, as methods of arrays and tensors and as functions of their modules."""


class Branches(SyntaxTree):
    """The branches of one code object, and the exceptions that leave it."""

    def __init__(self, frame: FrameType) -> None:
        super().__init__(frame.f_code, frame.f_globals)
        self._uses: dict[int, Use] = {}

    def use_at(self, offset: int) -> Use:
        """Return how the code uses the value that the instruction at ``offset`` reads."""
        if offset not in self._uses:
            self._uses[offset] = self._find_use(offset)
        return self._uses[offset]

    def lets_out(self, offset: int, kinds: Kinds = _ALL) -> Kinds:
        """Return the kinds of exception that leave the code if the instruction at ``offset`` raises one of ``kinds``:
        all kinds if a handler raises another one, none if the code or Python itself may catch it.
        """
        if self.code.co_name in _ENDED_IN:
            return ()
        if not getattr(self.code, "co_exceptiontable", True):
            return kinds
        node = self.at(offset)
        return () if node is None else self._leaves(node, kinds)

    def _find_use(self, offset: int) -> Use:
        code = self.code
        is_paused = code.co_flags & PAUSED and code.co_name != "<genexpr>"
        if is_paused or code.co_name in _ENDED_IN:
            return Use.OTHER
        while dis.opname[code.co_code[offset]].startswith(_TESTS):
            offset -= 2
        left = self._asked(self.at(offset))
        found, seen = set[Use](), set[ast.AST]()
        if not left:
            return Use.OTHER
        with suppress(_ComputedWith):
            while left:
                node = left.pop()
                if node not in seen:
                    seen.add(node)
                    left += self._follow(node, found)
            # With no use found, the value is at most in the text of an exception.
            return Use.RETURNED if Use.RETURNED in found else Use.ASSERTED
        return Use.OTHER

    def _asked(self, node: ast.AST | None) -> list[ast.AST]:
        """Return the expressions whose values an instruction of ``node`` may read."""
        if isinstance(node, ast.Assert):
            # pytest replaces an assertion by statements with the same position.
            parts = [part for part in ast.walk(node.test) if isinstance(self.parents[part], ast.BoolOp)]
            return [part for part in parts if isinstance(part, ast.expr)] or [node.test]
        return [node] if isinstance(node, ast.expr) else []

    def _follow(self, node: ast.AST, found: set[Use]) -> list[ast.AST]:
        """Return the expressions that depend directly on the value of ``node``."""
        parent = self.parents[node]
        # In a < b < c, the value decides whether c is computed.
        last = node.comparators[1:] if isinstance(node, ast.Compare) else []
        if isinstance(node, _PAUSING) or not all(map(self._only_computes, last)):
            raise _ComputedWith
        # Before Python 3.12 a comprehension is a code object, which returns its result.
        is_own = isinstance(parent, COMPREHENSIONS) and self.code.co_name.endswith("comp>")
        if is_own or isinstance(parent, ast.Return | ast.Lambda | ast.GeneratorExp):
            found.add(Use.RETURNED)
            return []
        if not self._leaves(node):
            raise _ComputedWith
        is_test = isinstance(parent, _BRANCHES) and node is parent.test
        if is_test and not (self._raises_if(True, node) or self._raises_if(False, node)):
            raise _ComputedWith
        if is_test:
            found.add(Use.ASSERTED)
            return []
        if isinstance(parent, ast.Assign | ast.AnnAssign):
            targets = parent.targets if isinstance(parent, ast.Assign) else [parent.target]
            return [load for target in targets for load in self._loads_of(target)]
        if not self._passes_on(parent, node):
            raise _ComputedWith
        return [] if isinstance(parent, ast.stmt) else [parent]

    def _passes_on(self, parent: ast.AST, node: ast.AST) -> bool:
        """Return True if ``parent`` only computes another value from that of ``node``, or raises it."""
        if isinstance(parent, ast.BoolOp) and not self._raises_if(isinstance(parent.op, ast.Or), parent):
            # The value decides whether the operands after it are computed.
            place = [operand is node for operand in parent.values].index(True)
            return all(map(self._only_computes, parent.values[place + 1 :]))
        if isinstance(parent, ast.Call):
            return self._is_pure_call(parent, node)
        if isinstance(parent, ast.IfExp):
            return node is not parent.test
        return isinstance(parent, _PASSING)

    def _loads_of(self, target: ast.AST) -> Iterator[ast.AST]:
        """Yield the loads of the variables that an assignment stores, except loads that only lead to an exception."""
        own = {*self.code.co_varnames}.difference(self.code.co_cellvars)
        for name in target.elts if isinstance(target, ast.Tuple | ast.List) else [target]:
            if not isinstance(name, ast.Name) or name.id not in own:
                raise _ComputedWith
            for load in ast.walk(self.around(target)[-1]):
                is_load = isinstance(load, ast.Name) and load.id == name.id and self.is_load(load)
                if is_load and not any(_always_raises(self._onwards(node)) for node in self.around(load)):
                    yield load

    def _raises_if(self, outcome: bool, node: ast.AST) -> bool:
        """Return True if the code always raises when the truth value of ``node`` is ``outcome``."""
        parent = self.parents[node]
        if isinstance(parent, ast.UnaryOp) and isinstance(parent.op, ast.Not):
            return self._raises_if(not outcome, parent)
        if isinstance(parent, ast.BoolOp) and isinstance(parent.op, ast.Or) is outcome:
            return self._raises_if(outcome, parent)
        if isinstance(parent, ast.Assert):
            return not outcome
        if isinstance(parent, ast.If) and node is parent.test:
            side = parent.body if outcome else parent.orelse
            return _always_raises([*side, *self._onwards(parent)[1:]])
        return False

    def _onwards(self, statement: ast.AST) -> list[ast.stmt]:
        """Return the statement and those that follow it in its block, and after an ``if`` around that."""
        parent = self.parents.get(statement)
        for block in (getattr(parent, name, None) for name in ("body", "orelse", "finalbody")):
            if isinstance(block, list) and statement in block:
                after = self._onwards(parent)[1:] if isinstance(parent, ast.If) else []
                return [*block[block.index(statement) :], *after]
        return []

    def _only_computes(self, node: ast.AST) -> bool:
        """Return True if an expression only computes a result, judged by the names that it calls."""
        calls = [inner for inner in ast.walk(node) if isinstance(inner, ast.Call)]
        return not has([node], _ACTING) and all(map(self._is_pure_call, calls))

    def _is_pure_call(self, call: ast.Call, node: ast.AST | None = None) -> bool:
        """Return True if a call that uses ``node`` only computes a result, judged by the names that it calls."""
        if isinstance(call.func, ast.Attribute) and call.func.attr in _PURE_METHODS:
            # The value may be an argument of a module's function, but not of another object's method.
            return node in (None, call.func) or isinstance(self.resolve(call.func.value), ModuleType)
        function = self.resolve(call.func)
        if f"{type(function).__module__}.{type(function).__name__}" == "numpy.ufunc":
            return True
        with suppress(TypeError):
            return function in _PURE_CALLS
        return False

    def _leaves(self, node: ast.AST, kinds: Kinds = _ALL) -> Kinds:
        """Return the kinds that leave the code if ``node`` raises one of ``kinds``; none if it may be caught."""
        for inner, outer in pairwise(self.around(node)):
            if isinstance(outer, ast.With | ast.AsyncWith):
                if not all(self._passes_manager(item.context_expr, kinds) for item in outer.items):
                    return ()
            elif isinstance(outer, _TRIES):
                handlers = outer.handlers if inner in outer.body else ()
                catching = [handler for handler in handlers if not self._is_for_others(handler, kinds)]
                if has(outer.finalbody, _LEAVING) or not all(_always_raises(handler.body) for handler in catching):
                    return ()
                if catching or has(outer.finalbody, (ast.Raise,)):
                    # The handler may raise an exception of any kind.
                    kinds = _ALL
        return kinds

    def _is_for_others(self, handler: ast.ExceptHandler, kinds: Kinds) -> bool:
        parts = handler.type.elts if isinstance(handler.type, ast.Tuple) else [handler.type]
        caught = list(map(self.resolve, parts))
        # Assertions do not raise exception classes that torch or Lightning define.
        are_librarys = all(isinstance(kind, type) and kind.__module__ != "builtins" for kind in caught)
        return (are_librarys and all(map(is_librarys, caught))) or _are_others(caught, kinds)

    def _passes_manager(self, item: ast.expr, kinds: Kinds) -> bool:
        made = self.resolve(item.func if isinstance(item, ast.Call) else item)
        if made is suppress and isinstance(item, ast.Call):
            return _are_others(list(map(self.resolve, item.args)), kinds)
        if made is None:
            return not is_users_file(self.code.co_filename) and self.code.co_filename != contextlib.__file__
        if made is contextlib.nullcontext:
            return True
        if isinstance(made, FunctionType):
            # A generator function with ``@contextmanager``.
            return _is_trusted(getattr(inspect.unwrap(made), "__code__", None))
        if isinstance(item, ast.Call) and not isinstance(made, type):
            return False
        kind = made if isinstance(made, type) else type(made)
        leave = getattr(kind, "__exit__", None) or getattr(kind, "__aexit__", None)
        return _is_trusted(leave.__code__) if isinstance(leave, FunctionType) else is_librarys(kind)


_KNOWN: dict[int, Branches] = {}
"""By the id of the code, which each value keeps alive."""
_MANY = 2**12


def branches_of(frame: FrameType) -> Branches:
    """Return the branches of the code that runs in ``frame``."""
    known = _KNOWN.get(id(frame.f_code))
    if known is None:
        if len(_KNOWN) >= _MANY:
            _KNOWN.clear()
        known = _KNOWN[id(frame.f_code)] = Branches(frame)
    return known


def _is_trusted(code: CodeType | None) -> bool:
    return code is not None and is_library(code.co_filename) and code.co_filename != contextlib.__file__


def _are_others(caught: Sequence[Any], kinds: Kinds) -> bool:
    """Return True if handlers of the ``caught`` classes catch none of ``kinds``; None in ``caught`` is any class."""
    known = [each for each in caught if type(each) is type]
    return len(known) == len(caught) and not any(issubclass(a, b) or issubclass(b, a) for a in known for b in kinds)


def _always_raises(block: Sequence[ast.stmt]) -> bool:
    """Return True if every path through a block ends with an exception."""
    for statement in block:
        if isinstance(statement, ast.Raise):
            return True
        if isinstance(statement, ast.If) and _always_raises(statement.body) and _always_raises(statement.orelse):
            return True
        if has([statement], (*_LEAVING, *_PAUSING)):
            return False
    return False
