"""What code does with the containers that it loads: appends to them alone, or looks at them.

The syntax tree of the source is followed with what each expression has: containers by the name that they were loaded
by, and how many items deep within that. Whatever is done with them that is not known here looks at them. Of code
without source it is only known what it loads (:mod:`graphplan.observe.names`).
"""

from __future__ import annotations

import ast
import builtins
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from types import CodeType
from typing import Any

from graphplan.observe.names import names_of
from graphplan.observe.syntax import COMPREHENSIONS, nodes_of

_DEEPEST = 8
"""Items within items are told apart so far; a loop may go on without end."""


@dataclass(frozen=True, slots=True)
class Look:
    """Code does something else with a container than to append to it.

    ``name`` is the attribute (with a leading dot) or variable that the container, or one around it, is loaded by;
    ``depth`` how many items deep it lies there. ``whole``: what lies in it may be looked at, too. ``own``: the
    attribute is one of ``self``.
    """

    name: str
    depth: int
    whole: bool
    own: bool
    line: int


@dataclass(frozen=True, slots=True)
class _Value:
    """What was loaded by a ``name`` (kind ``held``), ``self``, or a literal string (``literal``)."""

    kind: str
    name: str = ""
    depth: int = 0
    own: bool = False

    def deeper(self, by: int = 1) -> _Value:
        return replace(self, depth=max(min(self.depth + by, _DEEPEST), -1))


_Entry = frozenset[_Value]
_NOTHING: _Entry = frozenset()

GROWING = frozenset({"append", "extend", "appendleft", "extendleft"})
_SILENT = GROWING | {"clear", "insert", "update", "keys", "rotate"}
"""Methods that tell nothing of what is in the lists that a container has."""
_INTO = {"get": 1, "setdefault": 1, "pop": 1, "popleft": 1, "__getitem__": 1, "values": 0, "items": -1}
"""Methods that lead to items, and how deep."""
_MEASURES = frozenset({"len", "bool"})
_HARMLESS = frozenset({"isinstance", "issubclass", "type", "id", "callable", "hasattr"})


@lru_cache(512)
def looks_of(code: CodeType) -> frozenset[Look]:
    """What ``code`` looks at."""
    nodes = nodes_of(code)
    if nodes:
        return _Follower(code, nodes).follow()
    # Without source: what it loads for more than to append to it.
    found = names_of(code)
    attributes = [f".{name.removesuffix('[:]')}" for name in found.attributes if name.endswith("[:]")]
    return frozenset(Look(name, 0, True, False, code.co_firstlineno) for name in [*attributes, *found.read])


class _Follower:
    """Follows the ``nodes`` that one code object may come from."""

    def __init__(self, code: CodeType, nodes: Sequence[ast.AST]) -> None:
        self._nodes = nodes
        self._names = code.co_names
        self._own = {*code.co_varnames}.difference(code.co_cellvars)
        self._inner: set[str] = set()
        """Variables of comprehensions, which may have the names of others."""
        self._locals: dict[str, _Entry] = {}
        self._looks: set[Look] = set()
        self._misses = any(_catches_misses(inner) for node in nodes for inner in ast.walk(node))
        """Whether an item that is not there tells the code how many there are."""
        self._line = code.co_firstlineno

    def follow(self) -> frozenset[Look]:
        """What is looked at: as often as variables turn out to hold more."""
        known = None
        while known != self._locals:
            known = dict(self._locals)
            for node in self._nodes:
                if isinstance(node, ast.expr):
                    self._look([self._value(node.body if isinstance(node, ast.Lambda) else node)])
                else:
                    self._run(getattr(node, "body", ()))
        return frozenset(self._looks)

    def _look(self, entries: Iterable[_Entry], *, whole: bool = True) -> None:
        for entry in entries:
            for value in entry:
                if value.kind == "held":
                    self._looks.add(Look(value.name, value.depth, whole, value.own, self._line))

    def _look_within(self, entries: Iterable[_Entry]) -> None:
        """Note what only shows something of an item, but not of a list that it might be."""
        for entry in entries:
            self._look([frozenset(value.deeper() for value in entry if value.kind == "held" and value.depth > 0)])

    def _run(self, block: Iterable[ast.AST]) -> None:
        for statement in block:
            self._line = getattr(statement, "lineno", self._line)
            if isinstance(statement, ast.Assign):
                for target in statement.targets:
                    self._assign(target, statement.value)
            elif isinstance(statement, ast.AnnAssign):
                if statement.value is not None:
                    self._assign(statement.target, statement.value)
            elif isinstance(statement, ast.AugAssign):
                self._add(statement)
            elif isinstance(statement, ast.For | ast.AsyncFor):
                self._bind(statement.target, self._items_of(statement.iter))
                self._run([*statement.body, *statement.orelse])
            elif isinstance(statement, ast.If | ast.While):
                self._truth(statement.test)
                self._run([*statement.body, *statement.orelse])
            elif isinstance(statement, ast.Assert):
                self._truth(statement.test)
                self._run([statement.msg] if statement.msg is not None else [])
            elif isinstance(statement, ast.Delete):
                for target in statement.targets:
                    self._bind(target, _NOTHING)
            elif isinstance(statement, ast.Expr):
                self._value(statement.value)
            elif isinstance(statement, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                # What is in it has code of its own.
                arguments = getattr(statement, "args", None)
                self._run([*statement.decorator_list, *([] if arguments is None else [arguments])])
            elif isinstance(statement, ast.withitem):
                self._look([self._value(statement.context_expr)])
                if statement.optional_vars is not None:
                    self._bind(statement.optional_vars, _NOTHING)
            elif isinstance(statement, ast.expr):
                self._look([self._value(statement)])
            else:
                self._run(ast.iter_child_nodes(statement))

    def _assign(self, target: ast.expr, value: ast.expr) -> None:
        if isinstance(target, ast.Tuple) and isinstance(value, ast.Tuple) and len(target.elts) == len(value.elts):
            pairs = [] if _has_stars([*target.elts, *value.elts]) else list(zip(target.elts, value.elts, strict=True))
            for one, other in pairs:
                self._assign(one, other)
            if pairs:
                return
        self._bind(target, self._value(value))

    def _bind(self, target: ast.expr, entry: _Entry) -> None:
        """Note what is stored elsewhere than where it came from."""
        homes: set[str] = set()
        if isinstance(target, ast.Name):
            if target.id in self._own | self._inner:
                self._locals[target.id] = self._locals.get(target.id, _NOTHING) | entry
                return
            homes = {target.id}
        elif isinstance(target, ast.Tuple | ast.List):
            self._look([entry], whole=_has_stars(target.elts))
            for item in target.elts:
                self._bind(item.value if isinstance(item, ast.Starred) else item, _within(entry))
            return
        elif isinstance(target, ast.Attribute):
            self._value(target.value)
            homes = {f".{self._mangled(target.attr)}"}
        elif isinstance(target, ast.Subscript):
            holder = self._value(target.value)
            homes = {held.name for held in holder}
            self._look_within([self._value(target.slice)])
            if isinstance(target.slice, ast.Slice):
                # What that leaves depends on how much there was.
                self._look([holder])
        self._look([frozenset(held for held in entry if held.name not in homes)])

    def _add(self, statement: ast.AugAssign) -> None:
        value = self._value(statement.value)
        left = self._value(statement.target)
        self._look([value] if isinstance(statement.op, ast.Add) else [value, left])
        self._bind(statement.target, left if isinstance(statement.op, ast.Add) else _NOTHING)

    def _items_of(self, node: ast.expr) -> _Entry:
        """An item of what is iterated over."""
        items = self._value(node)
        self._look([items], whole=False)
        return _within(items)

    def _truth(self, node: ast.expr) -> _Entry:
        got = self._value(node)
        self._look_within([got])
        self._look([got], whole=False)
        return got

    def _value(self, node: ast.AST) -> _Entry:
        """What an expression has."""
        self._line = getattr(node, "lineno", self._line)
        if isinstance(node, ast.Name):
            known = self._locals.get(node.id, _NOTHING)
            other = _Value("self") if node.id == "self" else _Value("held", node.id)
            return known if node.id in self._own and node.id != "self" else known | {other}
        if isinstance(node, ast.Constant):
            return frozenset({_Value("literal", node.value)}) if isinstance(node.value, str) else _NOTHING
        if isinstance(node, ast.Attribute):
            return self._attribute(node)
        if isinstance(node, ast.Subscript):
            return self._item(node)
        if isinstance(node, ast.Call):
            return self._call(node)
        if isinstance(node, ast.BoolOp):
            return _NOTHING.union(*map(self._truth, node.values))
        if isinstance(node, ast.IfExp):
            self._truth(node.test)
            return self._value(node.body) | self._value(node.orelse)
        if isinstance(node, ast.NamedExpr):
            entry = self._value(node.value)
            self._bind(node.target, entry)
            return entry
        if isinstance(node, ast.Compare):
            self._compare(node)
        elif isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
            self._truth(node.operand)
        elif isinstance(node, (*COMPREHENSIONS, ast.GeneratorExp)):
            self._comprehend(node)
        elif isinstance(node, ast.Lambda):
            self._run([node.args])
        else:
            self._look(map(self._value, ast.iter_child_nodes(node)))
        return _NOTHING

    def _mangled(self, name: str) -> str:
        """What the compiler makes of a private name within a class."""
        is_private = name.startswith("__") and not name.endswith("__")
        return next((other for other in self._names if is_private and other[0] == "_" and other.endswith(name)), name)

    def _attribute(self, node: ast.Attribute) -> _Entry:
        holder = self._value(node.value)
        is_super = isinstance(node.value, ast.Call) and getattr(node.value.func, "id", "") == "super"
        if node.attr not in GROWING:
            self._look([holder], whole=node.attr.startswith("__"))
        return frozenset({_Value("held", f".{self._mangled(node.attr)}", own=is_super or _is_self(holder))})

    def _item(self, node: ast.Subscript) -> _Entry:
        holder = self._value(node.value)
        if isinstance(node.slice, ast.Slice):
            self._value(node.slice)
            self._look([holder])
            return _NOTHING
        self._look_within([self._value(node.slice)])
        if self._misses:
            self._look([holder], whole=False)
        return _within(holder)

    def _call(self, node: ast.Call) -> _Entry:
        arguments = [self._value(part) for part in (*node.args, *(keyword.value for keyword in node.keywords))]
        if isinstance(node.func, ast.Attribute):
            receiver, name = self._value(node.func.value), node.func.attr
            self._look(arguments)
            if name in _INTO:
                return frozenset(value.deeper(_INTO[name]) for value in receiver if value.kind == "held")
            if name not in _SILENT:
                self._look([receiver])
            return _NOTHING
        called = self._value(node.func)
        names = {value.name for value in called if value.kind == "held"}
        if names & _MEASURES:
            self._look(arguments, whole=False)
        elif "getattr" in names and len(arguments) > 1:
            literals = [value.name for value in arguments[1] if value.kind == "literal"]
            found = frozenset(_Value("held", f".{name}", own=_is_self(arguments[0])) for name in literals)
            return found.union(*arguments[2:])
        elif names & _HARMLESS:
            self._look_within(arguments)
        else:
            self._look(arguments)
            self._look_within([called])
        return _NOTHING

    def _compare(self, node: ast.Compare) -> None:
        sides = [self._value(side) for side in (node.left, *node.comparators)]
        for operator, left, right in zip(node.ops, sides, sides[1:], strict=False):
            if isinstance(operator, ast.Is | ast.IsNot):
                self._look_within([left, right])
            else:
                self._look([left])
                self._look([right], whole=not isinstance(operator, ast.In | ast.NotIn))
                self._look_within([right])

    def _comprehend(self, node: Any) -> None:
        for generator in node.generators:
            entry = self._items_of(generator.iter)
            self._inner.update(name.id for name in ast.walk(generator.target) if isinstance(name, ast.Name))
            self._bind(generator.target, entry)
            for test in generator.ifs:
                self._truth(test)
        parts = [node.key, node.value] if isinstance(node, ast.DictComp) else [node.elt]
        self._look(map(self._value, parts))


def _is_self(entry: _Entry) -> bool:
    return any(value.kind == "self" for value in entry)


def _within(entry: _Entry) -> _Entry:
    """An item of what is there."""
    return frozenset(value.deeper() for value in entry if value.kind == "held")


def _has_stars(nodes: Iterable[ast.AST]) -> bool:
    return any(isinstance(node, ast.Starred) for node in nodes)


def _catches_misses(node: ast.AST) -> bool:
    """Whether code may go on here after an ``IndexError``: by ``except`` or ``contextlib.suppress``."""
    if not isinstance(node, ast.ExceptHandler):
        return "suppress" in (getattr(node, "id", ""), getattr(node, "attr", ""))
    kinds = node.type.elts if isinstance(node.type, ast.Tuple) else [node.type]
    named = [getattr(builtins, getattr(kind, "id", getattr(kind, "attr", "")), None) for kind in kinds]
    known = [kind for kind in named if isinstance(kind, type)]
    return node.type is None or any(issubclass(IndexError, kind) or issubclass(kind, IndexError) for kind in known)
