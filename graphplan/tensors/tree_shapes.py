"""The containers and records of an earlier call, and the leaves of a call that has the same ones.

To compare containers with known ones, and take their leaves, needs a small part of the time that it takes to describe
them anew (:func:`graphplan.tensors.trees.open_records`). A batch of transformers or torch-geometric is a record.
"""

from __future__ import annotations

import weakref
from collections import OrderedDict
from collections.abc import Collection
from functools import partial
from typing import Any, NamedTuple

from graphplan.tensors.trees import has_attributes, is_record, record_values, refers_to


class TreeShape(NamedTuple):
    """The class of a value, and of a container or record what it has inside.

    Attributes:
        kind: the class.
        label: keys of a dict, names of a record's values, or the length of a sequence; None for a leaf.
        parts: shapes of what is inside; None if that is leaves alone.
        level: for a reference to a record that the value is a part of, how many records that one is further out.
    """

    kind: type
    label: Any = None
    parts: list[TreeShape] | None = None
    level: int | None = None


def _is_sequence(kind: type) -> bool:
    return kind is list or kind is tuple or (issubclass(kind, tuple) and hasattr(kind, "_fields"))


def _is_mapping(kind: type) -> bool:
    return kind is dict or kind is OrderedDict


def _level_of(value: Any, outer: tuple[Any, ...]) -> int | None:
    """How many records further out the one lies that ``value`` is, or weakly refers to; None if it is none of them."""
    target = value() if issubclass(type(value), weakref.ref) else value
    return next((level for level, record in enumerate(reversed(outer)) if record is target), None)


def _inside(value: Any) -> tuple[Any, Collection[Any]]:
    """The label of a container or a record, and what is inside."""
    kind = type(value)
    if _is_mapping(kind):
        return tuple(value), value.values()
    if _is_sequence(kind):
        return len(value), value
    values = record_values(value)
    return tuple(values), values.values()


def shape_of(value: Any, outer: tuple[Any, ...] = ()) -> TreeShape:
    """The shape of ``value``, which is a part of the records ``outer``, the innermost of them last."""
    kind = type(value)
    level = _level_of(value, outer)
    if level is not None:
        return TreeShape(kind, level=level)
    if _is_mapping(kind) or _is_sequence(kind):
        if has_attributes(value):
            return TreeShape(kind)
        within = outer
    elif kind is not partial and (is_record(value) or (outer and refers_to(value, outer))):
        within = (*outer, value)
    else:
        return TreeShape(kind)
    label, items = _inside(value)
    parts = [shape_of(item, within) for item in items]
    is_nested = any(part.label is not None or part.level is not None for part in parts)
    return TreeShape(kind, label, parts if is_nested else None)


def take_leaves(value: Any, shape: TreeShape, leaves: list[Any], outer: tuple[Any, ...] = ()) -> bool:
    """Add the leaves of ``value`` to ``leaves``, of which the caller compares the classes.

    Returns:
        Whether the containers and records of ``value`` are those of ``shape``.
    """
    kind, label, parts, level = shape
    if level is not None:
        return type(value) is kind and _level_of(value, outer) == level
    if label is None:
        if outer and _level_of(value, outer) is not None:
            return False
        leaves.append(value)
        return True
    if type(value) is not kind:
        return False
    found, items = _inside(value)
    if not (_is_mapping(kind) or _is_sequence(kind)):
        outer = (*outer, value)
    if found != label or has_attributes(value):
        return False
    if parts is None and outer and any(_level_of(item, outer) is not None for item in items):
        return False
    if parts is None:
        leaves += items
        return True
    return all(take_leaves(item, part, leaves, outer) for item, part in zip(items, parts, strict=True))
