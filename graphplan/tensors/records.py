"""Records: dataclass instances and objects that hold tensors. pytree treats them as leaves."""

from __future__ import annotations

import weakref
from collections import OrderedDict, deque
from collections.abc import Callable
from dataclasses import fields, is_dataclass
from enum import Enum
from functools import lru_cache
from types import MemberDescriptorType, SimpleNamespace
from typing import Any

from torch import Tensor
from torch.nn import Module, Parameter
from torch.utils import _pytree as pytree

from graphplan.tensors.deferred import DeferredNumber

ITEMS = "[]"
"""The name for the items of a record that is also a dict or a list."""
_BASES: tuple[Any, ...] = (OrderedDict, dict, list, SimpleNamespace)
_HEAP_TYPE = 1 << 9
"""``Py_TPFLAGS_HEAPTYPE``: the class is not a static type defined in C."""
_MOST_OBJECTS = 10_000
"""Maximum number of objects to search for tensors."""
_remembered: Callable[[Callable[[Any], Any]], Callable[[Any], Any]] = lru_cache(1024)
_ATOMS = frozenset({str, bytes, int, float, bool, complex, type(None)})


def is_record(leaf: Any) -> bool:
    """Return True if ``leaf`` is flattened when it is fed."""
    return is_dataclass(type(leaf)) or (base_of(type(leaf)) is not None and _is_batch(leaf))


@_remembered
def base_of(kind: Any) -> Any:
    """Return the builtin class whose ``__new__`` makes a ``kind`` without running code of ``kind``, or None."""
    closed = issubclass(kind, (Tensor, Module, Enum, type, DeferredNumber)) or hasattr(kind, "__del__")
    in_c = kind not in _BASES and not kind.__flags__ & _HEAP_TYPE
    if closed or in_c or kind in pytree.SUPPORTED_NODES:
        return None
    base = next((base for base in _BASES if issubclass(kind, base)), object)
    if kind.__getattribute__ is not base.__getattribute__:
        return None
    try:
        base.__new__(kind)
    except TypeError:
        # The class has another builtin's memory layout, or is abstract.
        return None
    return base


def _is_batch(thing: Any) -> bool:
    """Return True if ``thing`` is data: it leads to tensors, but to no parameters or modules."""
    left, found = [thing], False
    seen: set[int] = set()
    while left and len(seen) < _MOST_OBJECTS:
        node = left.pop()
        kind = type(node)
        if kind in _ATOMS or id(node) in seen:
            continue
        seen.add(id(node))
        if issubclass(kind, (Parameter, Module)):
            return False
        if issubclass(kind, Tensor):
            found = True
        elif issubclass(kind, dict):
            left += dict.values(node)
        elif kind in (list, tuple, deque):
            left += node
        elif kind in pytree.SUPPORTED_NODES:
            left += pytree.SUPPORTED_NODES[kind].flatten_fn(node)[0]
        elif is_dataclass(kind) or base_of(kind) is not None:
            left += record_values(node).values()
    return found and not left


def record_values(record: Any) -> dict[str, Any]:
    """Return the items and attributes of a record, by name."""
    values: dict[str, Any] = {}
    if is_dataclass(record):
        values = {field.name: getattr(record, field.name) for field in fields(record) if hasattr(record, field.name)}
    elif isinstance(record, dict):
        values[ITEMS] = dict(dict.items(record))
    elif isinstance(record, list):
        values[ITEMS] = list.copy(record)
    for name, slot in slots_of(type(record)).items():
        if name not in values:
            try:
                values[name] = slot.__get__(record)
            except AttributeError:
                continue
    return values | getattr(record, "__dict__", {})


@_remembered
def slots_of(kind: Any) -> dict[str, Any]:
    """Return the ``__slots__`` of ``kind`` and its bases: names and their member descriptors."""
    spaces = [vars(base).items() for base in reversed(kind.__mro__) if "__slots__" in vars(base)]
    members = {name: member for space in spaces for name, member in space if type(member) is MemberDescriptorType}
    return {name: member for name, member in members.items() if not name.startswith("__")}


def has_attributes(node: Any) -> bool:
    """Return True for a container that has attributes, which flattening and rebuilding would lose."""
    is_rebuilt = type(node) is OrderedDict or (issubclass(type(node), tuple) and hasattr(node, "_fields"))
    return is_rebuilt and bool(getattr(node, "__dict__", None))


def refers_to(leaf: Any, outer: tuple[Any, ...]) -> bool:
    """Return True if ``leaf`` refers to a record that contains it: a copy of the record then needs a copy of it."""
    if base_of(type(leaf)) is None:
        return False
    values = map(_referent, record_values(leaf).values())
    return any(value is record for value in values for record in outer)


def _referent(value: Any) -> Any:
    return value() if issubclass(type(value), weakref.ref) else value


def level_of(value: Any, outer: tuple[Any, ...]) -> int | None:
    """Return how many records further out ``value``, or its weak referent, is found in ``outer``; None if nowhere."""
    target = _referent(value)
    levels = (n for n, record in enumerate(reversed(outer)) if record is target)
    return next(levels, None)


def holds_tensors(leaf: Any) -> bool:
    """Return True if ``leaf`` is flattened when it is returned: a record without tensors stays the same object."""
    return is_record(leaf) and any(map(_leads_to_tensors, record_values(leaf).values()))


def _leads_to_tensors(value: Any) -> bool:
    if type(value) in _ATOMS:
        return False
    return any(isinstance(leaf, Tensor) or holds_tensors(leaf) for leaf in pytree.tree_leaves(value))


def fill_record(record: Any, values: dict[str, Any]) -> None:
    """Set ``values`` in ``record`` by name, bypassing any ``__setattr__`` or ``__setitem__`` of its class."""
    own, slots = getattr(record, "__dict__", {}), slots_of(type(record))
    for name, value in values.items():
        if name == ITEMS:
            base = base_of(type(record))
            if base is list:
                list.extend(record, value)
            else:
                for key, item in value.items():
                    base.__setitem__(record, key, item)
        elif name in slots:
            object.__setattr__(record, name, value)
        else:
            own[name] = value
