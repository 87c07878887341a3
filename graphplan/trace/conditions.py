"""The conditions under which a frame came to the line that it is at, read from its source.

``if``, ``elif``, ``else``, conditional expressions, ``and``, ``or``, ``while``, and earlier ``if``s of the same block
that leave it. Values are read from variables and instance dictionaries only, so that no foreign code runs; what is no
Python number, string, bool or None counts as unknown.
"""

from __future__ import annotations

import ast
import inspect
import operator
import sys
from collections.abc import Callable, Iterator, Mapping
from itertools import pairwise
from types import FrameType
from typing import Any, NamedTuple

from graphplan.observe.syntax import parse, positions

_PLAIN = (bool, type(None), str, int, float)
_COMPARISONS: dict[type[ast.cmpop], Callable[[Any, Any], Any]] = {
    ast.Is: operator.is_, ast.IsNot: operator.is_not, ast.Eq: operator.eq, ast.NotEq: operator.ne, ast.Lt: operator.lt,
    ast.LtE: operator.le, ast.Gt: operator.gt, ast.GtE: operator.ge, ast.In: lambda one, many: one in many,
    ast.NotIn: lambda one, many: one not in many,
}  # fmt: skip
_LEAVING = (ast.Return, ast.Continue, ast.Break)
_UNKNOWN = object()


class Condition(NamedTuple):
    """A test that came out as ``outcome`` on the way to where a frame is."""

    test: ast.expr
    outcome: bool


def is_plain(value: Any) -> bool:
    """Return True for a Python number, string, bool or None, none of a class derived from these."""
    return type(value) in _PLAIN


def path_to(frame: FrameType) -> list[ast.AST]:
    """The syntax nodes around what ``frame`` executes, outermost first; before Python 3.11, down to the statement only.
    None where there is no source.
    """
    tree = parse(frame.f_code, frame.f_globals)
    line, end_line, start, end = positions(frame.f_code)[frame.f_lasti // 2]
    if line is None or end_line is None or start is None or end is None:
        nodes = _around(tree, (frame.f_lineno, sys.maxsize), (frame.f_lineno, 0))
        path: list[ast.AST] = [node for node in nodes if isinstance(node, ast.stmt)]
    else:
        path = _around(tree, (line, start), (end_line, end))
    if path and isinstance(path[-1], (ast.If, ast.While)):
        # The jump has the place of the whole statement. What it reads is the only part of the test that is unknown.
        truth = truth_in(frame)
        unknown: list[Any] = [leaf for leaf in leaves_of(path[-1].test) if truth(leaf) is None]
        for leaf in unknown if len(unknown) == 1 else ():
            return path + _around(path[-1].test, (leaf.lineno, leaf.col_offset), (leaf.end_lineno, leaf.end_col_offset))
    return path


def _around(tree: ast.AST, start: tuple[int, int], end: tuple[int, int]) -> list[ast.AST]:
    """The nodes of ``tree`` that contain a place, outermost first."""
    placed: list[Any] = [node for node in ast.walk(tree) if hasattr(node, "lineno")]
    return [n for n in placed if (n.lineno, n.col_offset) <= start and end <= (n.end_lineno, n.end_col_offset)]


def conditions_of(path: list[ast.AST]) -> list[Condition]:
    """What came out how on the way to the end of ``path``, in the innermost function there; the nearest first."""
    found: list[Condition] = []
    for parent, child in pairwise(path):
        if isinstance(parent, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda, ast.ClassDef)):
            found = []  # It runs later.
        for block in (value for _, value in ast.iter_fields(parent) if isinstance(value, list)):
            if child in block and isinstance(child, ast.stmt):
                found += [one for before in block[: block.index(child)] for one in _passed(before)]
        found += _decided(parent, child)
    return found[::-1]


def comparisons_at(path: list[ast.AST]) -> list[ast.Compare]:
    """The comparison that is read at the end of ``path``, or those that the variables there were assigned."""
    if not path or not isinstance(path[-1], ast.expr):
        return []
    if isinstance(path[-1], ast.Compare):
        return [path[-1]]
    read = {name.id for name in names_in(path[-1]) if isinstance(name, ast.Name)}
    function = next((node for node in path[::-1] if isinstance(node, ast.FunctionDef)), path[-1])
    assigned = [
        node.value
        for node in ast.walk(function)
        if isinstance(node, ast.Assign) and any(isinstance(to, ast.Name) and to.id in read for to in node.targets)
    ]
    return [part for value in assigned for part in ast.walk(value) if isinstance(part, ast.Compare)]


def _decided(parent: Any, child: ast.AST) -> Iterator[Condition]:
    """What ``parent`` has tested before it comes to its part ``child``."""
    if isinstance(parent, (ast.If, ast.IfExp, ast.While)) and child is not parent.test:
        body, orelse = (part if isinstance(part, list) else [part] for part in (parent.body, parent.orelse))
        other = orelse if child in body else body
        if not (other and isinstance(other[-1], ast.Raise)):
            yield Condition(parent.test, child in body)
    elif isinstance(parent, ast.BoolOp):
        is_and = isinstance(parent.op, ast.And)
        yield from (Condition(value, is_and) for value in parent.values[: parent.values.index(child)])  # type: ignore[arg-type]


def _passed(statement: ast.stmt) -> Iterator[Condition]:
    """How the tests of ``statement`` came out where code goes on after it."""
    while isinstance(statement, ast.If):
        if statement.orelse and isinstance(statement.orelse[-1], _LEAVING):
            yield Condition(statement.test, True)
        if not isinstance(statement.body[-1], _LEAVING):
            return
        yield Condition(statement.test, False)
        if len(statement.orelse) != 1:
            return
        statement = statement.orelse[0]


def value_of(node: ast.AST, frame: FrameType) -> Any:
    """What a name or attribute is in ``frame``, or something that is not plain where only running code could tell."""
    if isinstance(node, ast.Name):
        return frame.f_locals.get(node.id, frame.f_globals.get(node.id, _UNKNOWN))
    if isinstance(node, ast.Attribute):
        owner = value_of(node.value, frame)
        return _UNKNOWN if owner is _UNKNOWN else attribute_of(owner, node.attr)
    return _UNKNOWN


def same(first: Any, second: Any) -> bool:
    """Return True if both are plain and equal."""
    return is_plain(first) and type(first) is type(second) and first == second


def space_of(thing: Any) -> Mapping[str, Any]:
    """The attributes of an instance, and a module's children."""
    try:
        space = object.__getattribute__(thing, "__dict__")
    except AttributeError:
        return {}
    modules = space.get("_modules")
    return {**space, **modules} if type(modules) is dict else space


def attribute_of(owner: Any, name: str) -> Any:
    """An attribute of an instance or its class; no descriptor is asked."""
    space = space_of(owner)
    return space[name] if name in space else inspect.getattr_static(owner, name, _UNKNOWN)


def names_in(leaf: ast.expr) -> list[ast.expr]:
    """The whole names and attributes of an expression that is no ``and``, ``or`` or ``not``."""
    if isinstance(leaf, (ast.Name, ast.Attribute)):
        return [leaf]
    return [name for child in ast.iter_child_nodes(leaf) if isinstance(child, ast.expr) for name in names_in(child)]


def leaves_of(test: ast.expr) -> list[ast.expr]:
    """The parts that ``and``, ``or`` and ``not`` put together."""
    if isinstance(test, ast.BoolOp):
        return [leaf for value in test.values for leaf in leaves_of(value)]
    if isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not):
        return leaves_of(test.operand)
    return [test]


def outcome(test: Any, truth: Callable[[ast.expr], bool | None]) -> bool | None:
    """How ``test`` comes out where its leaves do as ``truth`` says; None if that leaves it open."""
    if isinstance(test, ast.BoolOp):
        decides = isinstance(test.op, ast.Or)
        parts = [outcome(value, truth) for value in test.values]
        return decides if decides in parts else None if None in parts else not decides
    if isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not):
        part = outcome(test.operand, truth)
        return None if part is None else not part
    return truth(test)


def truth_in(frame: FrameType) -> Callable[[ast.expr], bool | None]:
    """How leaves come out in ``frame``: None for one with a tensor, a call or anything else but plain values in it."""

    def truth(leaf: ast.expr) -> bool | None:
        value = _evaluate(leaf, frame)
        return None if value is _UNKNOWN else bool(value)

    return truth


def _evaluate(node: ast.expr, frame: FrameType) -> Any:
    if isinstance(node, ast.Constant):
        value = node.value
    elif isinstance(node, (ast.Tuple, ast.List, ast.Set)):
        items = [_evaluate(item, frame) for item in node.elts]
        return _UNKNOWN if any(item is _UNKNOWN for item in items) else tuple(items)
    elif isinstance(node, ast.Compare) and len(node.ops) == 1:
        left, right = _evaluate(node.left, frame), _evaluate(node.comparators[0], frame)
        if left is _UNKNOWN or right is _UNKNOWN:
            return _UNKNOWN
        try:
            return _COMPARISONS[type(node.ops[0])](left, right)
        except TypeError:
            return _UNKNOWN
    else:
        value = value_of(node, frame)
    return value if is_plain(value) else _UNKNOWN
