"""Find how code uses containers in which it looks numbers up, and integers from which it makes slices."""

from __future__ import annotations

import ast
from collections.abc import Iterable
from functools import lru_cache
from types import CodeType

from graphplan.observe.syntax import SyntaxTree

_TRIES = (ast.Try, getattr(ast, "TryStar", ast.Try))


def looked_up_in(code: CodeType) -> frozenset[str]:
    """Return the names of containers that ``code`` reads by a single index that is no constant: ``.schedule`` for
    ``self.schedule[step]``. Names of variables have no dot.
    """
    return _uses(code)[0]


def used_otherwise_by(code: CodeType, names: Iterable[str]) -> set[str]:
    """Return the ``names`` that ``code`` uses, or may use, for anything but such reads and ``len``. It may do so if it
    has no source, or contains the name as a string.
    """
    there = {*code.co_names, *code.co_freevars, *code.co_cellvars}
    texts = {each for each in code.co_consts if isinstance(each, str)}
    known = [name for name in names if name.removeprefix(".") in there | texts]
    if not known:
        return set()
    _, others, has_source = _uses(code)
    return {name for name in known if not has_source or name in others or name.removeprefix(".") in texts}


@lru_cache(1024)
def _uses(code: CodeType) -> tuple[frozenset[str], frozenset[str], bool]:
    """Return the names read by an index, the names with any other use, and whether there is source."""
    tree = SyntaxTree(code)
    nodes = tree.own_nodes()
    looked_up, others = set[str](), set[str]()
    for node in nodes:
        if isinstance(node, ast.Attribute) or (isinstance(node, ast.Name) and node.id not in code.co_varnames):
            name = f".{node.attr}" if isinstance(node, ast.Attribute) else node.id
            use = _use(tree, node)
            if use is not None:
                (looked_up if use else others).add(name)
    return frozenset(looked_up), frozenset(others), bool(nodes)


def _use(tree: SyntaxTree, node: ast.AST) -> bool | None:
    """Return True if ``node`` is read by an index, None if it is passed to ``len``, False for any other use."""
    parent = tree.parents[node]
    if isinstance(parent, ast.Subscript) and parent.value is node:
        place = parent.slice.operand if isinstance(parent.slice, ast.UnaryOp) else parent.slice
        is_one = not isinstance(place, ast.Constant | ast.Slice | ast.Tuple)
        return is_one and isinstance(parent.ctx, ast.Load) and not isinstance(tree.parents[parent], ast.AugAssign)
    if isinstance(parent, ast.Call) and isinstance(parent.func, ast.Name) and parent.func.id == "len":
        return None if node is not parent.func else False
    return False


@lru_cache(1024)
def result_begins_slices(code: CodeType, at: int) -> bool:
    """Return True if the result of the call at ``at`` is assigned to a variable, and the code writes to slices
    ``[variable : variable + n]``. None of these slices may be read or lie in a ``try``.
    """
    tree = SyntaxTree(code)
    call = tree.at(at)
    kept = tree.parents.get(call) if isinstance(call, ast.Call) else None
    if not isinstance(kept, ast.Assign) or [type(target) for target in kept.targets] != [ast.Name]:
        return False
    variable = kept.targets[0].id  # type: ignore[attr-defined]
    found = [node for node in tree.own_nodes() if isinstance(node, ast.Slice) and _is_of(variable, node)]
    return bool(found) and all(_is_written(tree, node) for node in found)


def _is_of(variable: str, part: ast.Slice) -> bool:
    upper = part.upper
    ends = [upper.left, upper.right] if isinstance(upper, ast.BinOp) and isinstance(upper.op, ast.Add) else []
    names = [[node.id for node in nodes if isinstance(node, ast.Name)] for nodes in ([part.lower], ends)]
    return all(variable in each for each in names)


def _is_written(tree: SyntaxTree, part: ast.Slice) -> bool:
    around = tree.around(part)
    whole = next(node for node in around if isinstance(node, ast.Subscript))
    is_target = isinstance(whole.ctx, ast.Store) and isinstance(tree.parents[whole], ast.Assign)
    return is_target and not any(isinstance(node, _TRIES) for node in around)
