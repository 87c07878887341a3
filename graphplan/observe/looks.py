"""What code does with the containers that it loads: appends to them alone, or looks at them.

In the syntax tree of the source, each load of an attribute or a variable is followed through items
(``self.log["loss"]``) to what is done there. Whatever is not known here looks at the container: to bind it to another
name does. Of code without source it is only known what it loads (:mod:`graphplan.observe.names`).
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from types import CodeType

from graphplan.observe.names import names_of
from graphplan.observe.syntax import SyntaxTree


@dataclass(frozen=True, slots=True)
class Look:
    """Code does something else with a container than to append to it.

    ``name`` is the attribute (with a leading dot) or variable that the container, or one around it, is loaded by;
    ``depth`` how many items deep it lies there. ``whole``: what lies in it may be looked at, too. ``own``: the
    attribute is one of ``self``. ``keys``: those of the first items on the way; None for one that is not spelt.
    """

    name: str
    depth: int
    whole: bool
    own: bool
    line: int
    keys: tuple[str | None, ...] = ()


_GROWING = frozenset({"append", "extend", "appendleft", "extendleft"})
_SILENT = _GROWING | {"clear", "insert", "update", "keys", "rotate"}
"""Methods that tell nothing of what is in the lists that a container has."""
_INTO = {"get": 1, "setdefault": 1, "pop": 1, "popleft": 1, "__getitem__": 1, "values": 0, "items": -1}
"""Methods that lead to items, and how deep."""


@lru_cache(512)
def looks_of(code: CodeType) -> frozenset[Look]:
    """What ``code`` looks at."""
    tree = SyntaxTree(code)
    nodes = tree.own_nodes()
    if nodes:
        # An item that is not there may tell the code how many there are.
        misses = any(isinstance(node, ast.ExceptHandler) for node in nodes) or "suppress" in code.co_names
        return frozenset(look for node in nodes for look in _looks_at(tree, node, misses))
    # Without source: what it loads for more than to append to it.
    found = names_of(code)
    attributes = [f".{name.removesuffix('[:]')}" for name in found.attributes if name.endswith("[:]")]
    return frozenset(Look(name, 0, True, False, code.co_firstlineno) for name in [*attributes, *found.read])


def _looks_at(tree: SyntaxTree, node: ast.AST, misses: bool) -> Iterator[Look]:
    """What is looked at where ``node`` loads something by a name, if it does."""
    code, line = tree.code, getattr(node, "lineno", tree.code.co_firstlineno)
    if isinstance(node, ast.Constant) and isinstance(node.value, str) and "getattr" in code.co_names:
        yield Look(f".{node.value}", 0, True, False, line)
    if not isinstance(node, ast.Name | ast.Attribute) or not tree.is_load(node):
        return
    name, own, depth = getattr(node, "id", ""), isinstance(node, ast.Attribute) and _is_self(node.value), 0
    keys: tuple[str | None, ...] = ()
    if isinstance(node, ast.Attribute):
        # What the compiler makes of a private name within a class.
        is_private = node.attr.startswith("__") and not node.attr.endswith("__")
        mangled = (other for other in code.co_names if is_private and other[0] == "_" and other.endswith(node.attr))
        name = f".{next(mangled, node.attr)}"
    elif name == "self" or (name in code.co_varnames and name not in code.co_cellvars):
        return
    while (found := _leads_on(tree, node)) is not None:
        if misses and isinstance(found[0], ast.Subscript):
            yield Look(name, depth, False, own, line, keys)
        # After views (values, items), it is not known which key leads to which level.
        keys += (_key(found[0]),) if found[1] == 1 and len(keys) == depth else ()
        node, depth = found[0], max(depth + found[1], -1)
    whole = _is_whole(tree, node)
    if whole is not None:
        yield Look(name, depth, whole, own, line, keys)
    elif depth > 0 and _shows_itself(tree.parents[node], node):
        yield Look(name, depth + 1, True, own, line, keys)


def _leads_on(tree: SyntaxTree, node: ast.AST) -> tuple[ast.AST, int] | None:
    """The expression of an item of what ``node`` is, and how many items deeper that lies, if ``node`` is used so."""
    parent = tree.parents[node]
    if isinstance(parent, ast.Subscript) and node is parent.value and tree.is_load(parent):
        return None if isinstance(parent.slice, ast.Slice) else (parent, 1)
    if isinstance(parent, ast.Attribute) and parent.attr in _INTO:
        call = tree.parents[parent]
        return (call, _INTO[parent.attr]) if isinstance(call, ast.Call) and call.func is parent else None
    return None


def _key(item: ast.AST) -> str | None:
    """The text that ``item`` (``d["loss"]``, ``d.get("loss")``) is looked up by, if it is spelt."""
    spelt = item.slice if isinstance(item, ast.Subscript) else next(iter(getattr(item, "args", ())), None)
    return spelt.value if isinstance(spelt, ast.Constant) and type(spelt.value) is str else None


def _is_whole(tree: SyntaxTree, node: ast.AST) -> bool | None:
    """Whether the code that uses ``node`` may look at what lies in it, too; None if it does not look at it."""
    parent = tree.parents[node]
    if isinstance(parent, ast.Attribute):
        is_called = isinstance(call := tree.parents[parent], ast.Call) and call.func is parent
        known = parent.attr in (_SILENT if is_called else _GROWING)
        return None if known else is_called or parent.attr.startswith("__")
    if isinstance(parent, ast.Subscript) and node is parent.value and not isinstance(parent.slice, ast.Slice):
        return None
    if isinstance(parent, ast.AugAssign) and node is parent.target and isinstance(parent.op, ast.Add):
        return None
    if isinstance(parent, ast.Expr) or _shows_itself(parent, node):
        return None
    if not isinstance(parent, ast.Compare) or node is parent.left:
        return True
    # Whether a key is there says nothing about what lies at the key.
    return not all(isinstance(operator, ast.In | ast.NotIn) for operator in parent.ops)


def _shows_itself(parent: ast.AST, node: ast.AST) -> bool:
    """Whether ``node`` is only called, an item's key, or compared by identity: of a container this tells nothing."""
    if isinstance(parent, ast.Compare):
        return all(isinstance(operator, ast.Is | ast.IsNot) for operator in parent.ops)
    return (isinstance(parent, ast.Call) and node is parent.func) or (
        isinstance(parent, ast.Subscript) and node is parent.slice
    )


def _is_self(node: ast.AST) -> bool:
    name = node.func if isinstance(node, ast.Call) else node
    return isinstance(name, ast.Name) and name.id == ("super" if isinstance(node, ast.Call) else "self")
