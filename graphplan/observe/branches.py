"""What code does with a value that one of its expressions reads: assert it, return it, or compute with it.

A value is asserted if nothing but branches depends on it, and one side of each of them only raises: ``assert``, or
``if bad: raise``, with the message that the raising side puts together. The expression that the interpreter is in is
looked up in the syntax tree of the source. From there the value is followed outwards to the statement, and from a
variable that is assigned to what loads it. Where that leads to anything else, and where there is no source, the code
computes with the value. What else an expression may raise for some values counts as raised
(:mod:`graphplan.observe.exits` tells what comes of it).
"""

from __future__ import annotations

import ast
import dis
import inspect
import math
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from enum import Enum
from types import BuiltinFunctionType, CodeType, FrameType, FunctionType, ModuleType
from typing import Any

from graphplan.observe.exits import ANY, BRANCHES, Exits
from graphplan.observe.syntax import COMPREHENSIONS, PAUSING, has


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
_PASSING = (
    ast.Assert, ast.Attribute, ast.BinOp, ast.BoolOp, ast.Compare, ast.Dict, ast.FormattedValue, ast.JoinedStr,
    ast.List, ast.Raise, ast.Set, ast.Slice, ast.Starred, ast.Tuple, ast.UnaryOp, ast.keyword, *COMPREHENSIONS,
)  # fmt: skip
"""What does no more with a value than to make another one of it, or to raise it."""
_ACTING = (ast.NamedExpr, ast.Await, ast.Yield, ast.YieldFrom, ast.GeneratorExp, *COMPREHENSIONS)
"""Expressions that may do more than to compute a result, beside calls."""
_PAUSED = inspect.CO_GENERATOR | inspect.CO_COROUTINE | inspect.CO_ASYNC_GENERATOR
"""Flags of code that gives values away and goes on."""
_NAMESPACES = (locals, vars, dir, eval, exec, sys._getframe, inspect.currentframe)
"""What reads variables without naming them."""
_DIVIDING = (ast.Div, ast.FloorDiv, ast.Mod, ast.Pow, ast.LShift, ast.RShift)
_MATH = [function for function in vars(math).values() if isinstance(function, BuiltinFunctionType)]
_CONVERTING: tuple[Any, ...] = (int, float, complex, round, sum, min, max, *_MATH)
"""What does not take all numbers or lists."""
_CHECKS: dict[str, type[BaseException]] = {
    "_check": RuntimeError,
    "_check_index": IndexError,
    "_check_is_size": RuntimeError,
    "_check_not_implemented": NotImplementedError,
    "_check_tensor_all": RuntimeError,
    "_check_type": TypeError,
    "_check_value": ValueError,
}
"""torch's functions that do no more than to assert, and what they raise."""
_PURE_CALLS: frozenset[Any] = frozenset(
    {bool, int, float, complex, str, abs, len, min, max, sum, any, all, round, repr, isinstance, type, *_MATH}
)
_PURE_METHODS = (
    "abs", "all", "allclose", "amax", "amin", "any", "bool", "cpu", "detach", "dim", "eq", "equal", "float",
    "ge", "gt", "int", "is_complex", "is_floating_point", "isclose", "isfinite", "isin", "isinf", "isnan",
    "item", "le", "logical_and", "logical_not", "logical_or", "long", "lt", "max", "mean", "min", "ndimension",
    "ne", "norm", "numel", "size", "sum", "tolist",
)  # fmt: skip
"""What arrays and tensors compute under these names, and the modules that are for them, changes nothing."""


class Branches(Exits):
    """The branches of one code object. ``space`` has its globals."""

    def __init__(self, code: CodeType, space: Mapping[str, Any]) -> None:
        super().__init__(code, space)
        self._uses: dict[int, tuple[Use, frozenset[Any]]] = {}

    def use_at(self, offset: int) -> tuple[Use, frozenset[Any]]:
        """What is done with the value that the instruction at ``offset`` reads, and the classes of the exceptions
        that the branches on it raise, and what is computed from it.
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
            if any(isinstance(node, ast.Subscript) for node in seen):
                # What a value has selected may be of any type.
                for node in seen:
                    self._may_raise(node, frozenset({TypeError, AttributeError}), raised)
        except _ComputedWith:
            found = set()
        use = Use.RETURNED if Use.RETURNED in found else Use.ASSERTED if Use.ASSERTED in found else Use.OTHER
        return use, frozenset(raised)

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
        self._may_raise(node, self._failures_of(node), raised)
        # Of a < b < c, whether c is computed depends on the value.
        last = node.comparators[1:] if isinstance(node, ast.Compare) else []
        if isinstance(node, PAUSING) or not all(map(self._only_computes, last)):
            raise _ComputedWith
        # Before Python 3.12 a comprehension has code of its own, which returns what it makes.
        is_own = isinstance(parent, COMPREHENSIONS) and self._code.co_name.endswith("comp>")
        if is_own or isinstance(parent, ast.Return | ast.Lambda | ast.GeneratorExp | ast.Yield):
            found.add(Use.RETURNED)
            return []
        if isinstance(parent, BRANCHES) and node is parent.test:
            sides = [kinds for kinds in map(self._raised_if, (True, False), (node, node)) if kinds is not None]
            kinds = frozenset[Any]().union(*sides)
            if not sides or self._is_silent(kinds):
                raise _ComputedWith
            found.add(Use.ASSERTED)
            raised |= kinds
            return []
        if isinstance(parent, ast.Call) and _is_check(function := self._resolve(parent.func)):
            self._may_raise(parent, frozenset({_CHECKS.get(function.__name__, BaseException)}), raised)
            found.add(Use.ASSERTED)
            return []
        if isinstance(parent, ast.Assign):
            return [load for target in parent.targets for load in self._loads_of(target, parent, raised)]
        if isinstance(parent, ast.AnnAssign | ast.NamedExpr):
            outer = [parent] if isinstance(parent, ast.NamedExpr) else []
            return [*self._loads_of(parent.target, parent, raised), *outer]
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

    def _may_raise(self, node: ast.AST, kinds: frozenset[Any], raised: set[Any]) -> None:
        """Add to ``raised`` what leaves the code if ``node`` raises one of the classes ``kinds``."""
        if kinds:
            left = self._leaving(node, kinds)
            if left is None:
                raise _ComputedWith
            raised |= left

    def _failures_of(self, node: ast.AST) -> frozenset[Any]:
        """The classes of what an expression, or what unpacks it, raises for some values of what it is made of."""
        kinds = set[Any]()
        parent = self._parents[node]
        if isinstance(parent, ast.Assign) and any(isinstance(part, ast.Tuple | ast.List) for part in parent.targets):
            kinds |= {ValueError, TypeError}
        if isinstance(node, ast.BinOp) and isinstance(node.op, _DIVIDING):
            kinds |= {ArithmeticError, ValueError}
        elif isinstance(node, ast.Subscript):
            kinds |= {LookupError, TypeError}
        elif isinstance(node, ast.Attribute):
            kinds |= {AttributeError}
        elif isinstance(node, ast.Call) and any(self._resolve(node.func) is function for function in _CONVERTING):
            kinds |= {ArithmeticError, ValueError, TypeError}
        return frozenset(kinds)

    def _loads_of(self, target: ast.AST, assignment: ast.AST, raised: set[Any]) -> Iterator[ast.AST]:
        """What loads the variables that an assignment stores. Of what can only lead to an exception, the classes of
        that are added to ``raised``.
        """
        around = list(self._around(assignment))
        begin = getattr(assignment, "end_lineno", 0), getattr(assignment, "end_col_offset", 0)
        # A loop comes back to what lies before the assignment.
        begin = min([begin, *(_place(node) for node in around if isinstance(node, _LOOPS))])
        own = {*self._code.co_varnames}.difference(self._code.co_cellvars)
        names: Sequence[ast.AST] = target.elts if isinstance(target, ast.Tuple | ast.List) else [target]
        if self._reads_namespaces(around[-1]) or self._gives_away(names, around[-1]):
            raise _ComputedWith
        for name in names:
            if not isinstance(name, ast.Name) or name.id not in own:
                raise _ComputedWith
            for load in ast.walk(around[-1]):
                if isinstance(load, ast.Name) and load.id == name.id and self._is_load(load) and _place(load) >= begin:
                    lost = [kinds for kinds in map(self._lost, self._around(load)) if kinds is not None]
                    kinds = frozenset[Any]().union(*lost)
                    raised |= kinds
                    if not lost or self._is_silent(kinds):
                        yield load

    def _is_load(self, name: ast.Name) -> bool:
        # ``a += 1`` may change in place what a value has selected.
        return isinstance(name.ctx, ast.Load) or isinstance(self._parents[name], ast.AugAssign)

    def _reads_namespaces(self, function: ast.AST) -> bool:
        """Whether variables of the function may be read without their names."""
        named = [self._resolve(node) for node in ast.walk(function) if isinstance(node, ast.Name | ast.Attribute)]
        return any(one is reading for one in named for reading in _NAMESPACES)

    def _gives_away(self, names: Sequence[ast.AST], function: ast.AST) -> bool:
        """Whether a generator or coroutine yields or returns one of the variables: what it is resumed by later may do
        something else with it than what has resumed it now.
        """
        if not self._code.co_flags & _PAUSED:
            return False
        given = [node for node in ast.walk(function) if isinstance(node, (*PAUSING, ast.Return))]
        loaded = {part.id for node in given for part in ast.walk(node) if isinstance(part, ast.Name)}
        return not loaded.isdisjoint(name.id for name in names if isinstance(name, ast.Name))

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

    def _may_miss(self, node: ast.AST) -> bool:
        """Whether the code goes on where ``node`` cannot do what it is to do, as with a key that is not there."""
        return self._leaving(node, ANY) is None

    def _only_computes(self, node: ast.AST) -> bool:
        """Whether an expression does no more than to compute a result, as far as the names of what it calls tell."""
        calls = [inner for inner in ast.walk(node) if isinstance(inner, ast.Call)]
        if has([node], _ACTING) or not all(map(self._is_pure_call, calls)):
            return False
        return not (has([node], (ast.Call, ast.Subscript)) and self._may_miss(node))

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
