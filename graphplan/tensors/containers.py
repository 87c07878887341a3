"""Tensors and literals in tuples, lists and dicts, flattened and put together again without pytree's detours.

A replay of a small step takes less time than pytree does for its arguments and results.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Hashable, Sequence
from operator import is_not
from typing import Any

from torch import Tensor
from torch.utils import _pytree as pytree


class Literals(tuple[Any, ...]):
    """Literals that are fed as one leaf, told apart by equality: True is 1, and 0.0 is -0.0."""

    __slots__ = ()


PLAIN_LEAVES = frozenset({Tensor, bool, int, float, complex, str, bytes, type(None), Literals})
"""Types of tensors and of immutable literals."""
NODES: dict[type, Callable[[Any], tuple[Any, Hashable]]] = {
    defaultdict: lambda tree: (tree.values(), (tree.default_factory, *tree))
}
"""Further types of nodes that are plain, each with a function that gives what is in one, and all that else tells it."""
_MAX_STRUCTURES = 1024
_structures: dict[Hashable, pytree.TreeSpec] = {}
"""Structures of plain containers, by what :func:`_sketch` says of them."""


def _sketch(tree: Any, leaves: list[Any]) -> Hashable:
    """Add the leaves of plain containers to ``leaves``, and say how they were nested. TypeError for others."""
    kind = type(tree)
    if kind in PLAIN_LEAVES or kind is type:
        leaves.append(tree)
        return None
    if kind is tuple or kind is list:
        return (kind, *[_sketch(item, leaves) for item in tree])
    if kind is dict:
        return (kind, *tree, *[_sketch(item, leaves) for item in tree.values()])
    if kind in NODES:
        items, context = NODES[kind](tree)
        return (kind, context, *[_sketch(item, leaves) for item in items])  # type: ignore[arg-type]
    raise TypeError(kind)


def flatten_plain(tree: Any) -> tuple[Hashable, list[Any], pytree.TreeSpec]:
    """Flatten ``tree``: something hashable that two trees share if they have one structure, leaves, the structure.
    Raises TypeError where it is not only tensors, literals and classes in tuples, lists, dicts and :data:`NODES`.
    """
    leaves: list[Any] = []
    sketch = _sketch(tree, leaves)
    structure = _structures.get(sketch)
    if structure is None:
        if len(_structures) >= _MAX_STRUCTURES:
            _structures.clear()
        known, structure = pytree.tree_flatten(tree)
        if any(map(is_not, known, leaves)):
            raise TypeError(type(tree))
        _structures[sketch] = structure
    return sketch, leaves, structure


def rebuilder(
    structure: pytree.TreeSpec, finish: Callable[[Any], Any] = lambda tree: tree
) -> Callable[[Sequence[Any]], Any]:
    """A function that makes a tree of ``structure`` from its leaves, without pytree where the containers are plain;
    where they are not, ``finish`` is applied to it.
    """
    keys: list[Any] = []
    try:
        source = _source(pytree.tree_unflatten(list(range(structure.num_leaves)), structure), keys)
        # One display of the whole tree, as named tuples make their methods: a function call per container takes longer.
        built: Callable[[Sequence[Any]], Any] = eval(f"lambda leaves: {source}", {"keys": keys})
    except (TypeError, SyntaxError):
        # Other containers, or more of them in each other than Python reads.
        return lambda leaves: finish(pytree.tree_unflatten(list(leaves), structure))
    return built


def _source(tree: Any, keys: list[Any]) -> str:
    """An expression for ``tree``, of leaves' indices; ``keys`` gets the keys of dicts. TypeError for others."""
    kind = type(tree)
    if kind is int:
        return f"leaves[{tree}]"
    if kind is dict:
        items = []
        for key, item in tree.items():
            keys.append(key)
            items.append(f"keys[{len(keys) - 1}]: {_source(item, keys)}")
        return "{" + ", ".join(items) + "}"
    if kind is not tuple and kind is not list:
        raise TypeError(kind)
    parts = "".join(_source(item, keys) + ", " for item in tree)
    return f"[{parts}]" if kind is list else f"({parts})"
