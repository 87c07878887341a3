"""Dataclass instances and partial functions as nodes of a tree, so that the tensors in them are leaves.

pytree takes both for leaves. What a step is called with and what it returns are flattened by way of these.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable
from dataclasses import dataclass, fields, is_dataclass
from functools import partial
from typing import Any

from torch import Tensor
from torch.utils import _pytree as pytree

_PARTIAL = ("func", "args", "keywords", "__dict__")
"""What a partial function is made of."""


@dataclass
class _Record:
    """A dataclass instance, or a partial function, opened for flattening."""

    kind: type
    values: dict[str, Any]


def _flatten_record(record: _Record) -> tuple[list[Any], Any]:
    return list(record.values.values()), (record.kind, tuple(record.values))


def _unflatten_record(values: Iterable[Any], context: Any) -> _Record:
    return _Record(context[0], dict(zip(context[1], values, strict=True)))


def _flatten_record_with_keys(record: _Record) -> tuple[list[tuple[Any, Any]], Any]:
    values, context = _flatten_record(record)
    return [(pytree.GetAttrKey(name), value) for name, value in zip(context[1], values, strict=True)], context


pytree.register_pytree_node(_Record, _flatten_record, _unflatten_record, flatten_with_keys_fn=_flatten_record_with_keys)


def is_record(leaf: Any) -> bool:
    """Whether :func:`open_records` opens it."""
    return type(leaf) is partial or (is_dataclass(leaf) and not isinstance(leaf, type))


def _names_in(record: Any) -> Iterable[str]:
    """The fields of a record, and what else somebody has set on it."""
    if type(record) is partial:
        return _PARTIAL
    return dict.fromkeys([*(field.name for field in fields(record)), *getattr(record, "__dict__", ())])


def record_values(record: Any) -> dict[str, Any]:
    """What a record is made of, by name."""
    return {name: getattr(record, name) for name in _names_in(record) if hasattr(record, name)}


def has_attributes(node: Any) -> bool:
    """Whether ``node`` is a container that is taken apart and put together again, and attributes that somebody has set
    on it would be lost by that.
    """
    is_rebuilt = type(node) is OrderedDict or (isinstance(node, tuple) and hasattr(node, "_fields"))
    return is_rebuilt and bool(getattr(node, "__dict__", None))


def open_records(tree: Any) -> Any:
    """``tree`` with dataclass instances and partial functions as nodes, so that the tensors in them are leaves. What
    :func:`has_attributes` stays a leaf.
    """

    def opened(leaf: Any) -> Any:
        if not is_record(leaf):
            return leaf
        names = _names_in(leaf)
        return _Record(type(leaf), {name: open_records(getattr(leaf, name)) for name in names})

    return pytree.tree_map(opened, tree, is_leaf=has_attributes)


def _holds_tensors(leaf: Any) -> bool:
    if not is_record(leaf):
        return False
    names = _names_in(leaf)
    return any(_leads_to_tensors(getattr(leaf, name)) for name in names)


def _leads_to_tensors(value: Any) -> bool:
    # Most fields are plain values, and pytree takes its time to say that each is one leaf.
    if value is None or isinstance(value, (str, bool, int, float)):
        return False
    return any(isinstance(leaf, Tensor) or _holds_tensors(leaf) for leaf in pytree.tree_leaves(value))


def _open_tensors(tree: Any) -> Any:
    """:func:`open_records` for what a step returns: a record without tensors stays the object that it is."""
    opened = lambda leaf: open_records(leaf) if _holds_tensors(leaf) else leaf  # noqa: E731
    return pytree.tree_map(opened, tree, is_leaf=has_attributes)


def close_records(tree: Any) -> Any:
    """``tree`` with the dataclass instances and partial functions that :func:`flatten_result` opened."""

    def closed(node: Any) -> Any:
        if not isinstance(node, _Record):
            return node
        values = {name: close_records(value) for name, value in node.values.items()}
        if node.kind is partial:
            function = partial(values["func"], *values["args"], **values["keywords"])
            vars(function).update(values["__dict__"])
            return function
        record: Any = object.__new__(node.kind)
        for name, value in values.items():
            object.__setattr__(record, name, value)
        return record

    return pytree.tree_map(closed, tree, is_leaf=lambda node: isinstance(node, _Record))


def with_paths(tree: Any) -> list[tuple[Any, Any]]:
    """The leaves of ``tree`` with their paths; with their numbers where a container's type tells no keys."""
    try:
        return pytree.tree_flatten_with_path(tree, is_leaf=has_attributes)[0]
    except ValueError:
        leaves = pytree.tree_leaves(tree, is_leaf=has_attributes)
        return [((pytree.SequenceKey(number),), leaf) for number, leaf in enumerate(leaves)]


def flatten_result(result: Any) -> tuple[list[tuple[str, Any]], Any]:
    """Flatten what a step returns, dataclass instances with tensors too: named leaves, and the structure to rebuild it
    with. What :func:`has_attributes` is a leaf.
    """
    leaves, structure = pytree.tree_flatten(result, is_leaf=has_attributes)
    if any(map(_holds_tensors, leaves)):
        result = _open_tensors(result)
        structure = pytree.tree_structure(result, is_leaf=has_attributes)
    return [("result" + pytree.keystr(path), leaf) for path, leaf in with_paths(result)], structure


def map_result(function: Callable[[Tensor], Any], result: Any) -> Any:
    """What a step returned, with ``function`` of each tensor in its place."""
    if not any(map(_holds_tensors, pytree.tree_leaves(result))):
        return pytree.tree_map_only(Tensor, function, result)
    return close_records(pytree.tree_map_only(Tensor, function, _open_tensors(result)))
