"""What code does with the containers that it loads: appends to them alone, or looks at them.

In the syntax tree of the source, each load of an attribute or a variable is followed outwards, with how many items deep
within it an expression lies, and from a variable of the function's own to what loads that. Whatever is done with a
container that is not known here looks at it. Of code without source it is only known what it loads
(:mod:`graphplan.observe.names`).
"""

from __future__ import annotations

import ast
from dataclasses import dataclass, replace
from functools import lru_cache
from types import CodeType

from graphplan.observe.names import names_of
from graphplan.observe.syntax import SyntaxTree, walk

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
class _Held:
    """What an expression has of what was loaded by a name."""

    name: str
    own: bool = False
    depth: int = 0

    def deeper(self, by: int = 1) -> _Held:
        return replace(self, depth=max(min(self.depth + by, _DEEPEST), -1))


_GROWING = frozenset({"append", "extend", "appendleft", "extendleft"})
_SILENT = _GROWING | {"clear", "insert", "update", "keys", "rotate"}
"""Methods that tell nothing of what is in the lists that a container has."""
_INTO = {"get": 1, "setdefault": 1, "pop": 1, "popleft": 1, "__getitem__": 1, "values": 0, "items": -1}
"""Methods that lead to items, and how deep."""
_MEASURES = frozenset({"len", "bool"})
_HARMLESS = frozenset({"isinstance", "issubclass", "type", "id", "callable", "hasattr"})


@lru_cache(512)
def looks_of(code: CodeType) -> frozenset[Look]:
    """What ``code`` looks at."""
    follower = _Follower(code)
    if follower.nodes:
        return frozenset(follower.follow())
    # Without source: what it loads for more than to append to it.
    found = names_of(code)
    attributes = [f".{name.removesuffix('[:]')}" for name in found.attributes if name.endswith("[:]")]
    return frozenset(Look(name, 0, True, False, code.co_firstlineno) for name in [*attributes, *found.read])


class _Follower(SyntaxTree):
    """Follows what the code loads."""

    def __init__(self, code: CodeType) -> None:
        super().__init__(code)
        self.nodes = self.own_nodes()
        variables = {*code.co_varnames}.difference(code.co_cellvars)
        inner = [node.target for node in self.nodes if isinstance(node, ast.comprehension)]
        # Variables of comprehensions, which may have the names of others.
        bound = {name.id for target in inner for name in walk(target) if isinstance(name, ast.Name)}
        self._locals, self._own = variables, variables | bound
        self._looks: set[Look] = set()
        self._met: set[tuple[ast.AST, _Held]] = set()
        self._misses = any(isinstance(node, ast.ExceptHandler) for node in self.nodes) or "suppress" in code.co_names
        """Whether an item that is not there may tell the code how many there are."""

    def follow(self) -> set[Look]:
        """What is looked at."""
        for node in self.nodes:
            held = self._loaded(node)
            if held is not None:
                self._climb(node, held)
        return self._looks

    def _loaded(self, node: ast.AST) -> _Held | None:
        """What a node loads by a name, if it does. A string may be the name that ``getattr`` is given."""
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and "getattr" in self.code.co_names:
            self._look(node, _Held(f".{node.value}"))
        if not isinstance(node, ast.Name | ast.Attribute) or not self.is_load(node):
            return None
        if isinstance(node, ast.Attribute):
            return _Held(self._name_of(node), _is_self(node.value))
        return None if node.id in self._locals or node.id == "self" else _Held(node.id)

    def _name_of(self, target: ast.AST) -> str:
        """The attribute, with a leading dot, or variable that an expression is of, or an item of."""
        while isinstance(target, ast.Subscript):
            target = target.value
        if not isinstance(target, ast.Attribute):
            return getattr(target, "id", "")
        # What the compiler makes of a private name within a class.
        name, names = target.attr, self.code.co_names
        is_private = name.startswith("__") and not name.endswith("__")
        mangled = (other for other in names if is_private and other[0] == "_" and other.endswith(name))
        return f".{next(mangled, name)}"

    def _look(self, node: ast.AST, held: _Held, *, whole: bool = True) -> None:
        line = getattr(node, "lineno", self.code.co_firstlineno)
        self._looks.add(Look(held.name, held.depth, whole, held.own, line))

    def _look_within(self, node: ast.AST, held: _Held) -> None:
        """Note what only shows something of an item, but not of a list that it might be."""
        if held.depth > 0:
            self._look(node, held.deeper())

    def _measure(self, node: ast.AST, held: _Held) -> None:
        """Note what shows how many items there are, or whether there are any."""
        self._look(node, held, whole=False)
        self._look_within(node, held)

    def _climb(self, node: ast.AST, held: _Held) -> None:
        """Follow what is done with ``node``, an expression that has ``held``."""
        if (node, held) in self._met:
            return
        self._met.add((node, held))
        parent = self.parents[node]
        if isinstance(parent, ast.Attribute):
            self._take_attribute(parent, node, held)
        elif isinstance(parent, ast.Subscript):
            self._take_item(parent, node, held)
        elif isinstance(parent, ast.Call):
            self._pass(parent, node, held)
        elif isinstance(parent, ast.Compare):
            self._compare(parent, node, held)
        elif isinstance(parent, ast.Assign):
            for target in parent.targets:
                self._bind(target, node, held)
        elif isinstance(parent, ast.AnnAssign):
            self._bind(parent.target, node, held)
        elif isinstance(parent, ast.For | ast.AsyncFor | ast.comprehension) and node is parent.iter:
            self._look(node, held, whole=False)
            self._bind(parent.target, node, held.deeper())
        elif isinstance(parent, ast.BoolOp):
            self._measure(node, held)
            self._climb(parent, held)
        elif isinstance(parent, ast.IfExp) and node is not parent.test:
            self._climb(parent, held)
        elif _asks_for_truth(parent):
            self._measure(node, held)
        elif isinstance(parent, ast.AugAssign) and node is parent.target and isinstance(parent.op, ast.Add):
            return
        elif not isinstance(parent, ast.Expr):
            self._look(node, held)

    def _take_attribute(self, parent: ast.Attribute, node: ast.AST, held: _Held) -> None:
        call, name = self.parents[parent], parent.attr
        if not (isinstance(call, ast.Call) and call.func is parent):
            if name not in _GROWING:
                self._look(node, held, whole=name.startswith("__"))
        elif name in _INTO:
            self._climb(call, held.deeper(_INTO[name]))
        elif name not in _SILENT:
            self._look(node, held)

    def _take_item(self, parent: ast.Subscript, node: ast.AST, held: _Held) -> None:
        if node is parent.slice:
            self._look_within(node, held)
        elif isinstance(parent.slice, ast.Slice):
            # What that leaves depends on how much there was, too.
            self._look(node, held)
        elif self.is_load(parent):
            if self._misses:
                self._look(node, held, whole=False)
            self._climb(parent, held.deeper())

    def _pass(self, call: ast.Call, node: ast.AST, held: _Held) -> None:
        """Follow what is called, or is an argument."""
        name = getattr(call.func, "id", "")
        if node is call.func or (name in _HARMLESS and name not in self._locals):
            self._look_within(node, held)
        elif not (name == "getattr" and node is call.args[0]):
            self._look(node, held, whole=name not in _MEASURES or name in self._locals)

    def _compare(self, parent: ast.Compare, node: ast.AST, held: _Held) -> None:
        if all(isinstance(operator, ast.Is | ast.IsNot) for operator in parent.ops):
            self._look_within(node, held)
        elif node is not parent.left and all(isinstance(operator, ast.In | ast.NotIn) for operator in parent.ops):
            self._measure(node, held)
        else:
            self._look(node, held)

    def _bind(self, target: ast.AST, node: ast.AST, held: _Held) -> None:
        """Follow a variable; what is stored elsewhere than where it came from is looked at."""
        if isinstance(target, ast.Tuple | ast.List):
            self._look(node, held, whole=any(isinstance(item, ast.Starred) for item in target.elts))
            for item in target.elts:
                self._bind(item.value if isinstance(item, ast.Starred) else item, node, held.deeper())
        elif isinstance(target, ast.Name) and target.id in self._own:
            for load in self.nodes:
                if isinstance(load, ast.Name) and load.id == target.id and self.is_load(load):
                    self._climb(load, held)
        elif self._name_of(target) != held.name:
            self._look(node, held)


def _is_self(node: ast.AST) -> bool:
    """Whether an expression is ``self`` or ``super()``."""
    name = node.func if isinstance(node, ast.Call) else node
    return isinstance(name, ast.Name) and name.id == ("super" if isinstance(node, ast.Call) else "self")


def _asks_for_truth(parent: ast.AST) -> bool:
    """Whether an expression, one of ``parent``, is asked for its truth."""
    is_not = isinstance(parent, ast.UnaryOp) and isinstance(parent.op, ast.Not)
    return is_not or isinstance(parent, ast.If | ast.While | ast.IfExp | ast.Assert | ast.comprehension)
