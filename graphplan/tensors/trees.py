"""Flatten a step's arguments and results to leaves and a structure, and rebuild them.

Tuples, lists and dicts are handled here, since pytree takes longer than a replay of a small step.
"""

from __future__ import annotations

import weakref
from collections import namedtuple
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import suppress
from functools import partial
from itertools import count
from typing import Any

from torch import Tensor
from torch.nn import Module
from torch.utils import _pytree as pytree

from graphplan.tensors.records import (
    ITEMS,
    base_of,
    fill_record,
    has_attributes,
    holds_tensors,
    is_record,
    level_of,
    record_values,
    refers_to,
)

Structure = Any
"""None for a leaf; for a node its class, its label (a dict's keys, a sequence's length, ...), and its parts."""


class Literals(tuple[Any, ...]):
    """Literals that are fed as one leaf and compared by equality: True equals 1, and 0.0 equals -0.0."""

    __slots__ = ()


class GivenNumber(Literals):
    """Stands for a number among the arguments of a step: its holder, its name in the holder, and its class."""

    __slots__ = ()

    @property
    def value(self) -> Any:
        """The number, or its stand-in in a trace."""
        return getattr(self[0], self[1])


PLAIN_LEAVES = frozenset({Tensor, bool, int, float, complex, str, bytes, type(None), Literals, GivenNumber})
"""Types of tensors and of immutable literals."""
_CONTAINERS = (dict, tuple, list)
_MOST_RECORDS = 1000  # Maximum number of objects to search for a module.


class _Reference:
    """A record's reference to an enclosing record. Label: how many records further out, and whether it is weak."""


class _Context:
    """The label of a pytree node: ``value`` is pytree's context; ``keys`` name the items in messages."""

    __slots__ = ("keys", "value")

    def __init__(self, value: Any, keys: Sequence[str] = ()) -> None:
        self.value, self.keys = value, keys

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Context) and bool(self.value == other.value)

    def __hash__(self) -> int:
        # The context of a user-registered node may be unhashable.
        return 0


def _node_of(kind: type) -> Any:
    """Return pytree's node definition of a class; None if its objects are leaves."""
    is_named = issubclass(kind, tuple) and hasattr(kind, "_fields")
    named: Any = namedtuple
    return pytree.SUPPORTED_NODES.get(named if is_named else kind)


class _Flattening:
    """Flattens a tree to ``leaves``. Records for which ``opens`` is True are nodes; nodes that ``keeps`` are leaves."""

    def __init__(self, opens: Callable[[Any], bool], keeps: Callable[[Any], bool]) -> None:
        self.leaves: list[Any] = []
        self._opens, self._keeps = opens, keeps

    def add(self, value: Any, outer: tuple[Any, ...] = ()) -> Structure:
        """Return the structure of ``value``, which is inside the records ``outer``, innermost last."""
        kind = type(value)
        if kind in PLAIN_LEAVES or kind is type:
            self.leaves.append(value)
            return None
        if kind is tuple or kind is list:
            return kind, len(value), tuple([self.add(item, outer) for item in value])
        if kind is dict:
            return kind, tuple(value), tuple([self.add(item, outer) for item in value.values()])
        return self._add_other(value, kind, outer)

    def _add_other(self, value: Any, kind: type, outer: tuple[Any, ...]) -> Structure:
        level = level_of(value, outer)
        if level is not None:
            return _Reference, (level, isinstance(value, weakref.ref)), ()
        label: Any
        items: Collection[Any]
        node = None if self._keeps(value) else _node_of(kind)
        if node is not None and node.flatten_with_keys_fn is not None:
            pairs, context = node.flatten_with_keys_fn(value)
            label, items = _Context(context, [str(key) for key, _ in pairs]), [item for _, item in pairs]
        elif node is not None:
            items, context = node.flatten_fn(value)
            label = _Context(context, [f"[{number}]" for number in range(len(items))])
        elif self._opens(value) or (outer and refers_to(value, outer)):
            label, items, outer = *_inside(value, kind), (*outer, value)
        else:
            self.leaves.append(value)
            return None
        return kind, label, tuple([self.add(item, outer) for item in items])


def _inside(value: Any, kind: type) -> tuple[Any, Collection[Any]]:
    """Return the label and the items of a node."""
    if kind is dict:
        return tuple(value), value.values()
    if kind is tuple or kind is list:
        return len(value), value
    node = _node_of(kind)
    if node is not None:
        items, context = node.flatten_fn(value)
        return _Context(context), items
    values = record_values(value)
    return tuple(values), values.values()


def _flatten(
    tree: Any, opens: Callable[[Any], bool], keeps: Callable[[Any], bool] = has_attributes
) -> tuple[list[Any], Structure]:
    flattening = _Flattening(opens, keeps)
    structure = flattening.add(tree)
    return flattening.leaves, structure


def flatten_arguments(arguments: Any) -> tuple[list[Any], Structure]:
    """Flatten a step's arguments; return leaves and structure. A container that :func:`has_attributes` is a leaf."""
    return _flatten(arguments, is_record)


def path_of_module(thing: Any) -> str | None:
    """Return the path from ``thing`` to the first module in it; None if there is none, or flattening fails."""
    left = iter(range(_MOST_RECORDS))
    with suppress(Exception):
        leaves, structure = _flatten(
            thing, lambda node: base_of(type(node)) is not None and next(left, None) is not None
        )
        return next(
            (path for path, leaf in zip(names_of(structure, ""), leaves, strict=True) if isinstance(leaf, Module)), None
        )
    return None


def flatten_result(result: Any) -> tuple[list[Any], Structure]:
    """Flatten a step's result like :func:`flatten_arguments`, except that records without tensors are leaves."""
    return _flatten(result, holds_tensors)


def named_leaves(result: Any) -> list[tuple[str, Any]]:
    """Return the leaves of a step's result with their paths."""
    leaves, structure = flatten_result(result)
    return list(zip(names_of(structure, "result"), leaves, strict=True))


def map_result(function: Callable[[Tensor], Any], result: Any) -> Any:
    """Return a step's result with each tensor replaced by ``function`` of it."""
    leaves, structure = _flatten(result, holds_tensors, lambda node: False)
    return rebuild(structure, [function(leaf) if isinstance(leaf, Tensor) else leaf for leaf in leaves])


def _keys_of(structure: Structure) -> Sequence[str]:
    """Return the key or attribute of each item of a node, as code writes it."""
    kind, label, parts = structure
    if isinstance(label, _Context):
        return label.keys
    if kind is dict:
        return [f"[{key!r}]" for key in label]
    if kind is tuple or kind is list:
        return [f"[{number}]" for number in range(len(parts))]
    return ["" if name == ITEMS else f".{name}" for name in label if kind is not _Reference]


def names_of(structure: Structure, name: str) -> list[str]:
    """Return the paths of a structure's leaves, each beginning with ``name``."""
    if structure is None:
        return [name]
    pairs = zip(_keys_of(structure), structure[2], strict=True)
    return [path for key, part in pairs for path in names_of(part, name + key)]


def text_of(structure: Structure) -> str:
    """Return a structure as text for a message, with a star for each leaf: ``({'x': *}, *)``."""
    if structure is None:
        return "*"
    kind, label, parts = structure
    texts = list(map(text_of, parts))
    if kind is dict:
        return "{" + ", ".join(f"{key!r}: {text}" for key, text in zip(label, texts, strict=True)) + "}"
    if kind is list or kind is tuple:
        return f"[{', '.join(texts)}]" if kind is list else f"({', '.join(texts)})"
    pairs = zip(_keys_of(structure), texts, strict=True)
    return f"{kind.__name__}({', '.join(f'{key}={text}' for key, text in pairs)})"


def rebuild(structure: Structure, leaves: Sequence[Any]) -> Any:
    """Return the tree with this structure and these leaves."""
    return _rebuild(structure, iter(leaves), ())


def _rebuild(structure: Structure, leaves: Iterator[Any], outer: tuple[Any, ...]) -> Any:
    if structure is None:
        return next(leaves)
    kind, label, parts = structure
    if kind is _Reference:
        level, is_weak = label
        record = outer[-1 - level]
        return weakref.ref(record) if is_weak else record
    if kind is tuple or kind is list:
        return kind([_rebuild(part, leaves, outer) for part in parts])
    if kind is dict:
        return {key: _rebuild(part, leaves, outer) for key, part in zip(label, parts, strict=True)}
    if isinstance(label, _Context):
        node = _node_of(kind).unflatten_fn([_rebuild(part, leaves, outer) for part in parts], label.value)
        # pytree rebuilds a torch.Size as a plain tuple.
        return kind(node) if type(node) is tuple and issubclass(kind, tuple) else node
    record = (base_of(kind) or object).__new__(kind)
    values = {name: _rebuild(part, leaves, (*outer, record)) for name, part in zip(label, parts, strict=True)}
    fill_record(record, values)
    return record


def rebuilder(structure: Structure) -> Callable[[Sequence[Any]], Any]:
    """Return a fast :func:`rebuild` for one structure: plain containers are built without a call for each node."""
    keys: list[Any] = []
    try:
        # Generate one expression for the whole tree, as namedtuple generates its methods.
        source = f"lambda leaves: {_source(structure, keys, count())}"
        built: Callable[[Sequence[Any]], Any] = eval(source, {"keys": keys})
    except (TypeError, SyntaxError):
        # Other containers, or nesting too deep for Python's parser.
        return partial(rebuild, structure)
    return built


def _source(structure: Structure, keys: list[Any], numbers: Iterator[int]) -> str:
    """Return an expression for a tree of plain containers; append dict keys to ``keys``. Raise TypeError for others."""
    if structure is None:
        return f"leaves[{next(numbers)}]"
    kind, label, parts = structure
    items = [_source(part, keys, numbers) + ", " for part in parts]
    if kind is dict:
        first = len(keys)
        keys.extend(label)
        return "{" + "".join(f"keys[{number}]: {item}" for number, item in enumerate(items, first)) + "}"
    if kind is not tuple and kind is not list:
        raise TypeError(kind)
    return f"[{''.join(items)}]" if kind is list else f"({''.join(items)})"


def take_leaves(value: Any, structure: Structure, leaves: list[Any], outer: tuple[Any, ...] = ()) -> bool:
    """Append the leaves of ``value`` to ``leaves``; return True if its nodes match ``structure``. The caller compares
    the classes of leaves. This takes a small part of the time of flattening.
    """
    if structure is None:
        leaves.append(value)
        return True
    kind, label, parts = structure
    if kind is _Reference:
        return (level_of(value, outer), isinstance(value, weakref.ref)) == label
    if type(value) is not kind or has_attributes(value):
        return False
    found, items = _inside(value, kind)
    if found != label or len(items) != len(parts):
        return False
    if not any(parts):
        leaves += items
        return True
    if kind not in _CONTAINERS and not isinstance(label, _Context):
        outer = (*outer, value)
    return all(take_leaves(item, part, leaves, outer) for item, part in zip(items, parts, strict=True))
