"""Find whether code only appends to the containers that it loads, or looks at their contents.

Each load of an attribute or variable is followed in the syntax tree, through items (``self.log["loss"]``), to its use.
Any use that is not known here counts as a look, such as binding the container to another name. For code without source,
only its loads are known (:mod:`graphplan.observe.names`).
"""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from types import CodeType

from graphplan.observe.names import names_of
from graphplan.observe.syntax import SyntaxTree


@dataclass(frozen=True, slots=True)
class ContainerUse:
    """A use of a container other than appending to it.

    ``name`` is the attribute (with a leading dot) or variable from which the container, or one around it, is loaded;
    ``depth`` is the number of item accesses from there. ``whole``: its contents may be looked at, too. ``own``: the
    attribute is one of ``self``. ``keys``: the keys of the first item accesses; None for a key that is no literal.
    ``adds``: the use is ``+=`` on an item, which shows no list to the code, but the sum depends on a number.
    """

    name: str
    depth: int
    whole: bool
    own: bool
    line: int
    keys: tuple[str | None, ...] = ()
    adds: bool = False


_GROWING = frozenset({"append", "extend", "appendleft", "extendleft"})
_SILENT = _GROWING | {"clear", "insert", "update", "keys", "rotate"}
"""Methods that reveal nothing about the contents of the lists in a container."""
_INTO = {"get": 1, "setdefault": 1, "pop": 1, "popleft": 1, "__getitem__": 1, "values": 0, "items": -1}
"""Methods that lead to items, and the depth that each adds."""


@lru_cache(512)
def container_uses(code: CodeType) -> frozenset[ContainerUse]:
    """Return the looks of ``code``."""
    tree = SyntaxTree(code)
    nodes = tree.own_nodes()
    if nodes:
        # With an exception handler, a missing item may tell the code how many items there are.
        misses = any(isinstance(node, ast.ExceptHandler) for node in nodes) or "suppress" in code.co_names
        looks = (look for node in nodes for look in _looks_at(tree, node, misses))
        return frozenset([*_looks_by_name(code, nodes), *looks])
    # Without source, each load other than for an append counts.
    found = names_of(code)
    attributes = [f".{name.removesuffix('[:]')}" for name in found.attributes if name.endswith("[:]")]
    return frozenset(ContainerUse(name, 0, True, False, code.co_firstlineno) for name in [*attributes, *found.read])


def _looks_by_name(code: CodeType, nodes: Iterable[ast.AST]) -> Iterator[ContainerUse]:
    """Yield looks at each attribute that ``getattr`` may take. The compiler joins literals (``"lo" + "gs"``)."""
    if "getattr" in code.co_names:
        calls = [node.lineno for node in nodes if isinstance(node, ast.Name) and node.id == "getattr"]
        for text in {text for text in code.co_consts if type(text) is str}:
            yield from (ContainerUse(f".{text}", 0, True, False, line) for line in calls or [code.co_firstlineno])


def _looks_at(tree: SyntaxTree, node: ast.AST, misses: bool) -> Iterator[ContainerUse]:
    """Yield the looks that start at ``node``, if it loads an attribute or variable."""
    code, line = tree.code, getattr(node, "lineno", tree.code.co_firstlineno)
    if not isinstance(node, ast.Name | ast.Attribute) or not tree.is_load(node):
        return
    name, own, depth = getattr(node, "id", ""), isinstance(node, ast.Attribute) and _is_self(node.value), 0
    keys: tuple[str | None, ...] = ()
    if isinstance(node, ast.Attribute):
        # In a class, the compiler mangles private names.
        is_private = node.attr.startswith("__") and not node.attr.endswith("__")
        mangled = (other for other in code.co_names if is_private and other[0] == "_" and other.endswith(node.attr))
        name = f".{next(mangled, node.attr)}"
    elif name == "self" or (name in code.co_varnames and name not in code.co_cellvars):
        return
    while (found := _leads_on(tree, node)) is not None:
        if misses and isinstance(found[0], ast.Subscript):
            yield ContainerUse(name, depth, False, own, line, keys)
        # After a view (values, items), the levels that keys belong to are unknown.
        keys += (_key(found[0]),) if found[1] == 1 and len(keys) == depth else ()
        node, depth = found[0], max(depth + found[1], -1)
    whole = _is_whole(tree, node)
    if whole is not None:
        yield ContainerUse(name, depth, whole, own, line, keys)
    elif depth > 0 and _shows_itself(tree.parents[node], node):
        yield ContainerUse(name, depth + 1, True, own, line, keys)
    elif isinstance(item := tree.parents[node], ast.Subscript) and isinstance(tree.parents[item], ast.AugAssign):
        keys += (_key(item),) if len(keys) == depth else ()
        yield ContainerUse(name, depth + 1, False, own, line, keys, adds=True)


def _leads_on(tree: SyntaxTree, node: ast.AST) -> tuple[ast.AST, int] | None:
    """Return the expression that accesses an item of ``node``, and the depth that it adds; None for other uses."""
    parent = tree.parents[node]
    if isinstance(parent, ast.Subscript) and node is parent.value and tree.is_load(parent):
        return None if isinstance(parent.slice, ast.Slice) else (parent, 1)
    if isinstance(parent, ast.Attribute) and parent.attr in _INTO:
        call = tree.parents[parent]
        return (call, _INTO[parent.attr]) if isinstance(call, ast.Call) and call.func is parent else None
    return None


def _key(item: ast.AST) -> str | None:
    """Return the key of ``item`` (``d["loss"]``, ``d.get("loss")``) if it is a literal string; else None."""
    spelt = item.slice if isinstance(item, ast.Subscript) else next(iter(getattr(item, "args", ())), None)
    return spelt.value if isinstance(spelt, ast.Constant) and type(spelt.value) is str else None


def _is_whole(tree: SyntaxTree, node: ast.AST) -> bool | None:
    """Return True if the use of ``node`` may look at its contents, False if only at itself, None if it is no look."""
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
    # A test for a key reveals nothing about the value at the key.
    return not all(isinstance(operator, ast.In | ast.NotIn) for operator in parent.ops)


def _shows_itself(parent: ast.AST, node: ast.AST) -> bool:
    """Return True if ``node`` is only called, used as a key, or compared by identity: no look at a container."""
    if isinstance(parent, ast.Compare):
        return all(isinstance(operator, ast.Is | ast.IsNot) for operator in parent.ops)
    return (isinstance(parent, ast.Call) and node is parent.func) or (
        isinstance(parent, ast.Subscript) and node is parent.slice
    )


def _is_self(node: ast.AST) -> bool:
    name = node.func if isinstance(node, ast.Call) else node
    return isinstance(name, ast.Name) and name.id == ("super" if isinstance(node, ast.Call) else "self")
