"""What code does with a value that one of its expressions reads: assert it, return it, or compute with it.

A value is asserted if nothing but branches depends on it, and one side of each of them only raises: ``assert``, or
``if bad: raise``, with the message that the raising side puts together. The expression that the interpreter is in is
looked up in the syntax tree of the source. From there the value is followed outwards to the statement, and from a
variable that is assigned to what loads it. Where that leads to anything else, and where there is no source, the code
computes with the value.

Needs no torch.
"""

from __future__ import annotations

import ast
import builtins
import dis
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from enum import Enum
from itertools import pairwise
from types import BuiltinFunctionType, CodeType, FrameType, FunctionType, ModuleType
from typing import Any

from graphplan.observe.syntax import COMPREHENSIONS, parse, positions


class Use(Enum):
    """What code does with a value."""

    ASSERTED = "asserted"
    RETURNED = "returned"
    """Or yielded: the caller decides."""
    OTHER = "other"


class _ComputedWith(Exception):
    """The code does something else with the value than to assert or return it."""


_TESTS = ("POP_JUMP_", "JUMP_IF_", "TO_BOOL", "COPY", "NOP", "CACHE", "EXTENDED_ARG")
"""Instructions that ask for the truth of what another one has left, and those that come in between."""
_LOOPS = (ast.For, ast.AsyncFor, ast.While, *COMPREHENSIONS)
_BRANCHES = (ast.Assert, ast.If, ast.While)
_PASSING = (
    ast.Assert, ast.Attribute, ast.BinOp, ast.BoolOp, ast.Compare, ast.Dict, ast.FormattedValue, ast.JoinedStr,
    ast.List, ast.Raise, ast.Set, ast.Slice, ast.Starred, ast.Tuple, ast.UnaryOp, ast.keyword, *COMPREHENSIONS,
)  # fmt: skip
"""What does no more with a value than to make another one of it, or to raise it."""
_ACTING = (ast.NamedExpr, ast.Await, ast.Yield, ast.YieldFrom, ast.GeneratorExp, *COMPREHENSIONS)
"""Expressions that may do more than to compute a result, beside calls."""
_LEAVING = (ast.Return, ast.Break, ast.Continue)
_PAUSING = (ast.Yield, ast.YieldFrom, ast.Await)
_SCOPES = (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda, ast.Module)
_TRIES: tuple[type[Any], ...] = (ast.Try, getattr(ast, "TryStar", ast.Try))
_ANY = frozenset({BaseException})
"""Classes of an exception of which nothing is known."""
_PURE_CALLS: frozenset[Any] = frozenset(
    {bool, int, float, complex, str, abs, len, min, max, sum, any, all, round, repr, isinstance, type}
) | {thing for thing in vars(math).values() if isinstance(thing, BuiltinFunctionType)}
_PURE_METHODS = (
    "abs", "all", "allclose", "amax", "amin", "any", "bool", "cpu", "detach", "dim", "eq", "equal", "float",
    "ge", "gt", "int", "is_complex", "is_floating_point", "isclose", "isfinite", "isin", "isinf", "isnan",
    "item", "le", "logical_and", "logical_not", "logical_or", "long", "lt", "max", "mean", "min", "ndimension",
    "ne", "norm", "numel", "size", "sum", "tolist",
)  # fmt: skip
"""What arrays and tensors compute under these names, and the modules that are for them, changes nothing."""


class Branches:
    """The branches of one code object. ``space`` has its globals."""

    def __init__(self, code: CodeType, space: Mapping[str, Any]) -> None:
        self._code = code
        self._space = space
        self._uses: dict[int, tuple[Use, frozenset[Any]]] = {}
        self._parents: dict[ast.AST, ast.AST] = {}
        for parent in ast.walk(parse(code, space)):
            self._parents.update(dict.fromkeys(ast.iter_child_nodes(parent), parent))

    def use_at(self, offset: int) -> tuple[Use, frozenset[Any]]:
        """What is done with the value that the instruction at ``offset`` reads, and the classes of the exceptions that
        the branches on it raise.
        """
        if offset not in self._uses:
            self._uses[offset] = self._find_use(offset // 2)
        return self._uses[offset]

    def _find_use(self, index: int) -> tuple[Use, frozenset[Any]]:
        names = [dis.opname[number] for number in self._code.co_code[::2]]
        while names[index].startswith(_TESTS):
            index -= 1
        left = [part for node in self._at(index) for part in self._asked(node)]
        found, raised, seen = set[Use](), set[Any](), set[ast.AST]()
        try:
            while left:
                node = left.pop()
                if node not in seen:
                    seen.add(node)
                    left += self._follow(node, found, raised)
        except _ComputedWith:
            found = set()
        use = Use.RETURNED if Use.RETURNED in found else Use.ASSERTED if Use.ASSERTED in found else Use.OTHER
        return use, frozenset(raised)

    def lets_out(self, offset: int, raised: frozenset[Any]) -> tuple[bool, frozenset[Any]]:
        """Whether an exception leaves the code if one of the classes ``raised`` comes out of the instruction at
        ``offset``; and the classes of what leaves it. A ``with`` statement lets it out, but for
        ``contextlib.suppress``.
        """
        # Until Python 3.11 only the source tells.
        if not getattr(self._code, "co_exceptiontable", True):
            return True, raised
        left = [self._leaving(node, raised) for node in self._at(offset // 2)]
        known = [kinds for kinds in left if kinds is not None]
        return bool(left) and len(known) == len(left), raised.union(*known)

    def _at(self, index: int) -> list[ast.expr | ast.stmt]:
        """What an instruction belongs to: the smallest thing around it that ends where it ends. Before Python 3.11 all
        on its line that it may be.
        """
        line, last, column, end = positions(self._code)[index]
        nodes = [node for node in self._parents if isinstance(node, ast.expr | ast.stmt) and node.end_lineno]
        if line is None or column is None:
            acting = (ast.stmt, ast.Call, ast.Compare, ast.BinOp, ast.Subscript)
            deciding = (*_BRANCHES, ast.BoolOp, ast.UnaryOp)
            may_be = [node for node in nodes if isinstance(node, acting) or isinstance(self._parents[node], deciding)]
            there = [node for node in may_be if node.lineno <= (line or 0) <= (node.end_lineno or 0)]
            return [node for node in there if not any(map(self._is_lost, self._around(node)))]
        around = [node for node in nodes if (node.end_lineno, node.end_col_offset) == (last, end)]
        # A method's call begins where its name does.
        around = [node for node in around if (node.lineno, node.col_offset) <= (line, column)]
        return sorted(around, key=lambda node: (node.lineno, node.col_offset))[-1:]

    def _asked(self, node: ast.AST) -> list[ast.AST]:
        """The expressions whose values may be read where an instruction belongs to ``node``."""
        if isinstance(node, ast.Assert):
            # pytest writes other statements in its place, with its position.
            parts = [part for part in ast.walk(node.test) if isinstance(self._parents[part], ast.BoolOp)]
            return [part for part in parts if isinstance(part, ast.expr)] or [node.test]
        return [node] if isinstance(node, ast.expr) else []

    def _follow(self, node: ast.AST, found: set[Use], raised: set[Any]) -> list[ast.AST]:
        """The expressions that depend directly on the value of ``node``."""
        parent = self._parents[node]
        # Of a < b < c, whether c is computed depends on the value.
        last = node.comparators[1:] if isinstance(node, ast.Compare) else []
        if isinstance(node, _PAUSING) or not all(map(self._only_computes, last)):
            raise _ComputedWith
        # Before Python 3.12 a comprehension has code of its own, which returns what it makes.
        is_own = isinstance(parent, COMPREHENSIONS) and self._code.co_name.endswith("comp>")
        if is_own or isinstance(parent, ast.Return | ast.Lambda | ast.GeneratorExp | ast.Yield):
            found.add(Use.RETURNED)
            return []
        if isinstance(parent, _BRANCHES) and node is parent.test:
            kinds = self._raised_if(True, node) or self._raised_if(False, node)
            if kinds is None:
                raise _ComputedWith
            found.add(Use.ASSERTED)
            raised |= kinds
            return []
        if isinstance(parent, ast.Call) and _is_check(self._resolve(parent.func)):
            found.add(Use.ASSERTED)
            raised |= _ANY
            return []
        if isinstance(parent, ast.Assign):
            return [load for target in parent.targets for load in self._loads_of(target, parent)]
        if isinstance(parent, ast.AnnAssign | ast.NamedExpr):
            return [*self._loads_of(parent.target, parent), *([parent] if isinstance(parent, ast.NamedExpr) else [])]
        if not self._passes_on(parent, node):
            raise _ComputedWith
        return [] if isinstance(parent, ast.stmt) else [parent]

    def _passes_on(self, parent: ast.AST, node: ast.AST) -> bool:
        """Whether no more is done with the value of ``node`` than to make another one of it, or to raise it."""
        if isinstance(parent, ast.BoolOp) and self._raised_if(isinstance(parent.op, ast.Or), parent) is None:
            # Whether those behind it are computed depends on the value.
            place = [operand is node for operand in parent.values].index(True)
            return all(map(self._only_computes, parent.values[place + 1 :]))
        if isinstance(parent, ast.Call):
            return self._is_pure_call(parent, node) and not self._may_miss(parent)
        if isinstance(parent, ast.Subscript):
            return not self._may_miss(parent)
        if isinstance(parent, ast.IfExp):
            return node is not parent.test
        return isinstance(parent, _PASSING)

    def _loads_of(self, target: ast.AST, assignment: ast.AST) -> Iterator[ast.AST]:
        """What loads the variables that an assignment stores, unless that can only lead to an exception."""
        around = list(self._around(assignment))
        begin = getattr(assignment, "end_lineno", 0), getattr(assignment, "end_col_offset", 0)
        # A loop comes back to what lies before the assignment.
        begin = min([begin, *(_place(node) for node in around if isinstance(node, _LOOPS))])
        own = {*self._code.co_varnames}.difference(self._code.co_cellvars)
        for name in target.elts if isinstance(target, ast.Tuple | ast.List) else [target]:
            if not isinstance(name, ast.Name) or name.id not in own:
                raise _ComputedWith
            for load in ast.walk(around[-1]):
                is_one = isinstance(load, ast.Name) and load.id == name.id and isinstance(load.ctx, ast.Load)
                if is_one and _place(load) >= begin and not any(map(self._is_lost, self._around(load))):
                    yield load

    def _is_lost(self, node: ast.AST) -> bool:
        """Whether all that can come after a statement is an exception."""
        return self._only_raises(self._onwards(node), node) is not None

    def _raised_if(self, outcome: bool, node: ast.AST) -> frozenset[Any] | None:
        """The classes that are raised in every case where the truth of ``node`` comes to ``outcome``; None if that may
        end otherwise.
        """
        parent = self._parents[node]
        if isinstance(parent, ast.UnaryOp) and isinstance(parent.op, ast.Not):
            return self._raised_if(not outcome, parent)
        if isinstance(parent, ast.BoolOp) and isinstance(parent.op, ast.Or) is outcome:
            return self._raised_if(outcome, parent)
        if isinstance(parent, ast.Assert) and not outcome:
            return self._leaving(parent, frozenset({AssertionError}))
        if isinstance(parent, ast.While) and outcome:
            return self._only_raises(parent.body, parent)
        if isinstance(parent, ast.If) and node is parent.test:
            side = parent.body if outcome else parent.orelse
            return self._only_raises([*side, *self._onwards(parent)[1:]], parent)
        return None

    def _only_raises(self, block: Sequence[ast.stmt], place: ast.AST) -> frozenset[Any] | None:
        """The classes of the exceptions with which a block at ``place`` leaves the code on every way; None if not."""
        return self._leaving(place, self._kinds_in(block) or _ANY) if _always_raises(block) else None

    def _leaving(self, node: ast.AST, raised: frozenset[Any]) -> frozenset[Any] | None:
        """The classes of what leaves the code if one of the classes ``raised`` comes out of ``node``; None if that may
        be caught.
        """
        for inner, outer in pairwise(self._around(node)):
            if isinstance(outer, ast.With | ast.AsyncWith) and self._suppresses(outer, raised):
                return None
            if isinstance(outer, _TRIES):
                if _has(outer.finalbody, _LEAVING):
                    return None
                for handler in outer.handlers if inner in outer.body else ():
                    kinds = handler.type.elts if isinstance(handler.type, ast.Tuple) else [handler.type]
                    if self._catches(kinds, raised):
                        if not _always_raises(handler.body):
                            return None
                        raised |= self._kinds_in(handler.body)
        return raised

    def _catches(self, kinds: Sequence[ast.AST | None], raised: frozenset[Any]) -> bool:
        """Whether what catches the classes ``kinds`` may be for one of the classes ``raised``."""
        return any(issubclass(one, kind) or issubclass(kind, one) for kind in map(self._class, kinds) for one in raised)

    def _suppresses(self, block: ast.With | ast.AsyncWith, raised: frozenset[Any]) -> bool:
        """Whether ``contextlib.suppress`` in a ``with`` statement may end an exception of one of the classes."""
        items = [item.context_expr for item in block.items]
        calls = [item for item in items if isinstance(item, ast.Call) and self._resolve(item.func) is suppress]
        # What else is done with it, as in an ExitStack, is not followed.
        named = [node for node in ast.walk(block) if "suppress" in (getattr(node, "id", ""), getattr(node, "attr", ""))]
        return len(named) > len(calls) or any(self._catches(call.args, raised) for call in calls)

    def _kinds_in(self, block: Sequence[ast.stmt]) -> frozenset[Any]:
        """The classes of exceptions that a block raises, other than what is on its way already."""
        raises = [node for statement in block for node in ast.walk(statement) if isinstance(node, ast.Raise)]
        return frozenset(self._class(node.exc) for node in raises if node.exc is not None)

    def _class(self, node: ast.AST | None) -> Any:
        """The class of an exception that an expression names or makes, as far as that is known."""
        kind = self._resolve(node.func if isinstance(node, ast.Call) else node)
        return kind if isinstance(kind, type) and issubclass(kind, BaseException) else BaseException

    def _may_miss(self, node: ast.AST) -> bool:
        """Whether the code goes on where ``node`` cannot do what it is to do, as with a key that is not there."""
        return self._leaving(node, _ANY) is None

    def _only_computes(self, node: ast.AST) -> bool:
        """Whether an expression does no more than to compute a result, as far as the names of what it calls tell."""
        calls = [inner for inner in ast.walk(node) if isinstance(inner, ast.Call)]
        if _has([node], _ACTING) or not all(map(self._is_pure_call, calls)):
            return False
        return not (_has([node], (ast.Call, ast.Subscript)) and self._may_miss(node))

    def _is_pure_call(self, call: ast.Call, node: ast.AST | None = None) -> bool:
        """Whether a call, to which ``node`` leads, does no more than to compute a result, as far as names tell."""
        if isinstance(call.func, ast.Attribute) and call.func.attr in _PURE_METHODS:
            # The value may be given to a function, but to no method of something else.
            return node in (None, call.func) or isinstance(self._resolve(call.func.value), ModuleType)
        function = self._resolve(call.func)
        if f"{type(function).__module__}.{type(function).__name__}" == "numpy.ufunc":
            return True
        with suppress(TypeError):
            return function in _PURE_CALLS
        return False

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


_KNOWN: dict[int, Branches] = {}
"""By the identity of code, which each holds."""
_MANY = 2**12


def branches_of(frame: FrameType) -> Branches:
    """The branches of the code that runs in ``frame``."""
    known = _KNOWN.get(id(frame.f_code))
    if known is None:
        if len(_KNOWN) >= _MANY:
            _KNOWN.clear()
        known = _KNOWN[id(frame.f_code)] = Branches(frame.f_code, frame.f_globals)
    return known


def _is_check(function: Any) -> bool:
    """Whether it is ``torch._check(condition, message)`` or the like, which does no more than to assert."""
    is_torchs = isinstance(function, FunctionType) and function.__module__ == "torch"
    return is_torchs and function.__name__.startswith("_check")


def _place(node: ast.AST) -> tuple[int, int]:
    return getattr(node, "lineno", 0), getattr(node, "col_offset", 0)


def _has(nodes: Sequence[ast.AST], kinds: tuple[type[ast.AST], ...]) -> bool:
    return any(isinstance(inner, kinds) for node in nodes for inner in ast.walk(node))


def _always_raises(block: Sequence[ast.stmt]) -> bool:
    """Whether every way through a block ends with an exception."""
    for statement in block:
        if isinstance(statement, ast.Raise):
            return True
        if isinstance(statement, ast.If) and _always_raises(statement.body) and _always_raises(statement.orelse):
            return True
        if _has([statement], (*_LEAVING, *_PAUSING)):
            return False
    return False
