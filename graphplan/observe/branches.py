"""What code does with a value that one of its expressions reads: assert it, return it, or compute with it.

A value is asserted if nothing but branches depends on it, and one side of each of them only raises: ``assert``, or
``if bad: raise``, with the message that the raising side puts together. The expression that the interpreter is in is
looked up in the syntax tree of the source. From there the value is followed outwards to the statement, and from a
variable that is assigned to what loads it. Where that leads to anything else, or to where an exception may be caught
(:mod:`graphplan.observe.exits`), and where there is no source, the code computes with the value.
"""

from __future__ import annotations

import ast
import dis
import inspect
import math
from collections.abc import Iterator, Sequence
from contextlib import suppress
from enum import Enum
from types import BuiltinFunctionType, FrameType, FunctionType, ModuleType
from typing import Any

from graphplan.observe.exits import ENDED_IN, ITERATION, Exits, always_raises
from graphplan.observe.syntax import COMPREHENSIONS, PAUSING, has


class Use(Enum):
    """What code does with a value."""

    ASSERTED = "asserted"
    RETURNED = "returned"
    """The caller decides."""
    OTHER = "other"


class _ComputedWith(Exception):
    """The code does something else with the value than to assert or return it."""


_TESTS = ("POP_JUMP_", "JUMP_IF_", "TO_BOOL", "COPY", "NOP", "CACHE", "EXTENDED_ARG")
"""Instructions that ask for the truth of what another one has left, and those that come in between."""
_BRANCHES = (ast.Assert, ast.If, ast.While)
_LOOPS = (ast.For, ast.AsyncFor, ast.While, *COMPREHENSIONS)
_PASSING = (
    ast.Assert, ast.Attribute, ast.BinOp, ast.BoolOp, ast.Compare, ast.Dict, ast.FormattedValue, ast.JoinedStr,
    ast.List, ast.Raise, ast.Set, ast.Slice, ast.Starred, ast.Subscript, ast.Tuple, ast.UnaryOp, ast.keyword,
    *COMPREHENSIONS,
)  # fmt: skip
"""What does no more with a value than to make another one of it, or to raise it."""
_ACTING = (ast.NamedExpr, ast.Await, ast.Yield, ast.YieldFrom, ast.GeneratorExp, *COMPREHENSIONS)
"""Expressions that may do more than to compute a result, beside calls."""
_PAUSED = inspect.CO_GENERATOR | inspect.CO_COROUTINE | inspect.CO_ASYNC_GENERATOR
"""Flags of code that gives values away and goes on."""
_NAMESPACES = frozenset({"locals", "vars", "dir", "eval", "exec", "_getframe", "currentframe"})
"""What reads variables without naming them."""
_SILENT = (*ITERATION, AttributeError)
"""Exceptions that Python itself ends: of iterators where a loop is over, of attributes in ``hasattr``."""
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
"""What arrays and tensors compute under these names, and the modules that are for them, changes nothing."""


class Branches(Exits):
    """The branches of one code object."""

    def __init__(self, frame: FrameType) -> None:
        super().__init__(frame.f_code, frame.f_globals)
        self._uses: dict[int, Use] = {}

    def use_at(self, offset: int) -> Use:
        """What is done with the value that the instruction at ``offset`` reads."""
        if offset not in self._uses:
            self._uses[offset] = self._find_use(offset)
        return self._uses[offset]

    def _find_use(self, offset: int) -> Use:
        code = self.code
        is_paused = code.co_flags & _PAUSED and code.co_name != "<genexpr>"
        if is_paused or code.co_name in ENDED_IN:
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
            # What is found nowhere is in the texts of exceptions at most.
            return Use.RETURNED if Use.RETURNED in found else Use.ASSERTED
        return Use.OTHER

    def _asked(self, node: ast.AST | None) -> list[ast.AST]:
        """The expressions whose values may be read where an instruction belongs to ``node``."""
        if isinstance(node, ast.Assert):
            # pytest writes other statements in its place, with its position.
            parts = [part for part in ast.walk(node.test) if isinstance(self.parents[part], ast.BoolOp)]
            return [part for part in parts if isinstance(part, ast.expr)] or [node.test]
        return [node] if isinstance(node, ast.expr) else []

    def _follow(self, node: ast.AST, found: set[Use]) -> list[ast.AST]:
        """The expressions that depend directly on the value of ``node``."""
        parent = self.parents[node]
        # Of a < b < c, whether c is computed depends on the value.
        last = node.comparators[1:] if isinstance(node, ast.Compare) else []
        if isinstance(node, PAUSING) or not all(map(self._only_computes, last)):
            raise _ComputedWith
        # Before Python 3.12 a comprehension has code of its own, which returns what it makes.
        is_own = isinstance(parent, COMPREHENSIONS) and self.code.co_name.endswith("comp>")
        if is_own or isinstance(parent, ast.Return | ast.Lambda | ast.GeneratorExp):
            found.add(Use.RETURNED)
            return []
        if not self._leaves(node):
            raise _ComputedWith
        if isinstance(parent, _BRANCHES) and node is parent.test:
            if not (self._raises_if(True, node) or self._raises_if(False, node)):
                raise _ComputedWith
            found.add(Use.ASSERTED)
            return []
        if isinstance(parent, ast.Call) and _is_check(self.resolve(parent.func)):
            found.add(Use.ASSERTED)
            return []
        if isinstance(parent, ast.Assign):
            return [load for target in parent.targets for load in self._loads_of(target, parent)]
        if isinstance(parent, ast.AnnAssign | ast.NamedExpr):
            outer = [parent] if isinstance(parent, ast.NamedExpr) else []
            return [*self._loads_of(parent.target, parent), *outer]
        if not self._passes_on(parent, node):
            raise _ComputedWith
        return [] if isinstance(parent, ast.stmt) else [parent]

    def _passes_on(self, parent: ast.AST, node: ast.AST) -> bool:
        """Whether no more is done with the value of ``node`` than to make another one of it, or to raise it."""
        if isinstance(parent, ast.BoolOp) and not self._raises_if(isinstance(parent.op, ast.Or), parent):
            # Whether those behind it are computed depends on the value.
            place = [operand is node for operand in parent.values].index(True)
            return all(map(self._only_computes, parent.values[place + 1 :]))
        if isinstance(parent, ast.Call):
            return self._is_pure_call(parent, node)
        if isinstance(parent, ast.IfExp):
            return node is not parent.test
        return isinstance(parent, _PASSING)

    def _loads_of(self, target: ast.AST, assignment: ast.AST) -> Iterator[ast.AST]:
        """What loads the variables that an assignment stores, but for what can only lead to an exception."""
        around = list(self._around(assignment))
        begin = getattr(assignment, "end_lineno", 0), getattr(assignment, "end_col_offset", 0)
        # A loop comes back to what lies before the assignment.
        begin = min([begin, *(_place(node) for node in around if isinstance(node, _LOOPS))])
        own = {*self.code.co_varnames}.difference(self.code.co_cellvars)
        if any(getattr(node, "id", getattr(node, "attr", "")) in _NAMESPACES for node in ast.walk(around[-1])):
            raise _ComputedWith
        for name in target.elts if isinstance(target, ast.Tuple | ast.List) else [target]:
            if not isinstance(name, ast.Name) or name.id not in own:
                raise _ComputedWith
            same = (node for node in ast.walk(around[-1]) if isinstance(node, ast.Name) and node.id == name.id)
            for load in same:
                is_lost = any(self._only_raises(self._onwards(node)) for node in self._around(load))
                if self._is_load(load) and _place(load) >= begin and not is_lost:
                    yield load

    def _is_load(self, name: ast.Name) -> bool:
        # ``a += 1`` may change in place what a value has selected.
        return isinstance(name.ctx, ast.Load) or isinstance(self.parents[name], ast.AugAssign)

    def _raises_if(self, outcome: bool, node: ast.AST) -> bool:
        """Whether the code raises in every case where the truth of ``node`` comes to ``outcome``."""
        parent = self.parents[node]
        if isinstance(parent, ast.UnaryOp) and isinstance(parent.op, ast.Not):
            return self._raises_if(not outcome, parent)
        if isinstance(parent, ast.BoolOp) and isinstance(parent.op, ast.Or) is outcome:
            return self._raises_if(outcome, parent)
        if isinstance(parent, ast.Assert):
            return not outcome
        if isinstance(parent, ast.While):
            return outcome and self._only_raises(parent.body)
        if isinstance(parent, ast.If) and node is parent.test:
            side = parent.body if outcome else parent.orelse
            return self._only_raises([*side, *self._onwards(parent)[1:]])
        return False

    def _only_raises(self, block: Sequence[ast.stmt]) -> bool:
        """Whether every way through a block ends with an exception that Python itself does not end."""
        raised = [node.exc for part in block for node in ast.walk(part) if isinstance(node, ast.Raise)]
        kinds = [self.resolve(exc.func if isinstance(exc, ast.Call) else exc) for exc in raised]
        silent = (isinstance(kind, type) and issubclass(kind, _SILENT) for kind in kinds)
        return always_raises(block) and not any(silent)

    def _onwards(self, statement: ast.AST) -> list[ast.stmt]:
        """What comes after a statement in the block that it is in, with itself."""
        parent = self.parents.get(statement)
        for block in (getattr(parent, name, None) for name in ("body", "orelse", "finalbody")):
            if isinstance(block, list) and statement in block:
                after = self._onwards(parent)[1:] if isinstance(parent, ast.If) else []
                return [*block[block.index(statement) :], *after]
        return []

    def _only_computes(self, node: ast.AST) -> bool:
        """Whether an expression does no more than to compute a result, as far as the names of what it calls tell."""
        calls = [inner for inner in ast.walk(node) if isinstance(inner, ast.Call)]
        return not has([node], _ACTING) and all(map(self._is_pure_call, calls))

    def _is_pure_call(self, call: ast.Call, node: ast.AST | None = None) -> bool:
        """Whether a call, to which ``node`` leads, does no more than to compute a result, as far as names tell."""
        if isinstance(call.func, ast.Attribute) and call.func.attr in _PURE_METHODS:
            # The value may be given to a function, but to no method of something else.
            return node in (None, call.func) or isinstance(self.resolve(call.func.value), ModuleType)
        function = self.resolve(call.func)
        if f"{type(function).__module__}.{type(function).__name__}" == "numpy.ufunc":
            return True
        with suppress(TypeError):
            return function in _PURE_CALLS
        return False


_KNOWN: dict[int, Branches] = {}
"""By the identity of code, which each holds."""
_MANY = 2**12


def branches_of(frame: FrameType) -> Branches:
    """The branches of the code that runs in ``frame``."""
    known = _KNOWN.get(id(frame.f_code))
    if known is None:
        if len(_KNOWN) >= _MANY:
            _KNOWN.clear()
        known = _KNOWN[id(frame.f_code)] = Branches(frame)
    return known


def _is_check(function: Any) -> bool:
    """Whether it is ``torch._check(condition, message)`` or the like, which does no more than to assert."""
    is_torchs = isinstance(function, FunctionType) and function.__module__ == "torch"
    return is_torchs and function.__name__.startswith("_check")


def _place(node: ast.AST) -> tuple[int, int]:
    return getattr(node, "lineno", 0), getattr(node, "col_offset", 0)
