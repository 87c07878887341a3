"""Records: dataclass instances and objects that hold tensors, which pytree takes for leaves."""

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
"""The name of what an object holds as a dict or a list."""
_BASES: tuple[Any, ...] = (OrderedDict, dict, list, SimpleNamespace)
_HEAP_TYPE = 1 << 9
"""The flag of a class that was not defined in C before the interpreter began."""
_MOST_OBJECTS = 10_000
"""Objects among which tensors are looked for."""
_remembered: Callable[[Callable[[Any], Any]], Callable[[Any], Any]] = lru_cache(1024)
_ATOMS = frozenset({str, bytes, int, float, bool, complex, type(None)})


def is_record(leaf: Any) -> bool:
    """Return True if ``leaf`` is taken apart where it is fed."""
    return is_dataclass(type(leaf)) or (base_of(type(leaf)) is not None and _is_batch(leaf))


@_remembered
def base_of(kind: Any) -> Any:
    """The builtin class that makes objects of class ``kind`` without that one's own code; None if none can."""
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
        # Another builtin's memory, or an abstract class.
        return None
    return base


def _is_batch(thing: Any) -> bool:
    """Return True if ``thing`` leads to tensors, and to no parameters or modules: it is data."""
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
    """What a record is made of, by name."""
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
    """What ``kind`` and its bases have in ``__slots__``: names and the descriptors that read them."""
    spaces = [vars(base).items() for base in reversed(kind.__mro__) if "__slots__" in vars(base)]
    members = {name: member for space in spaces for name, member in space if type(member) is MemberDescriptorType}
    return {name: member for name, member in members.items() if not name.startswith("__")}


def has_attributes(node: Any) -> bool:
    """Return True for a container that has attributes, which would be lost where it is flattened and rebuilt."""
    is_rebuilt = type(node) is OrderedDict or (issubclass(type(node), tuple) and hasattr(node, "_fields"))
    return is_rebuilt and bool(getattr(node, "__dict__", None))


def refers_to(leaf: Any, outer: tuple[Any, ...]) -> bool:
    """Return True if an object refers to one that it is a part of: in a copy of that one, it has to be a copy, too."""
    if base_of(type(leaf)) is None:
        return False
    values = map(_referent, record_values(leaf).values())
    return any(value is record for value in values for record in outer)


def _referent(value: Any) -> Any:
    return value() if issubclass(type(value), weakref.ref) else value


def level_of(value: Any, outer: tuple[Any, ...]) -> int | None:
    """How many records further out the one lies that ``value`` is, or weakly refers to; None if it is none of them."""
    target = _referent(value)
    levels = (n for n, record in enumerate(reversed(outer)) if record is target)
    return next(levels, None)


def holds_tensors(leaf: Any) -> bool:
    """Return True if ``leaf`` is taken apart where it is returned: a record without tensors stays the object it is."""
    return is_record(leaf) and any(map(_leads_to_tensors, record_values(leaf).values()))


def _leads_to_tensors(value: Any) -> bool:
    if type(value) in _ATOMS:
        return False
    return any(isinstance(leaf, Tensor) or holds_tensors(leaf) for leaf in pytree.tree_leaves(value))


def fill_record(record: Any, values: dict[str, Any]) -> None:
    """Let ``record`` hold ``values`` by name, past what its class says of assignments."""
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
