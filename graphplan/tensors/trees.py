"""Dataclass instances, partial functions and objects with tensors as nodes of a tree: the tensors in them are leaves.

pytree takes them for leaves. What a step is called with and what it returns are flattened by way of these.
"""

from __future__ import annotations

import weakref
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, fields, is_dataclass
from enum import Enum
from functools import lru_cache, partial
from types import MemberDescriptorType, SimpleNamespace
from typing import Any

from torch import Tensor
from torch.nn import Module, Parameter
from torch.utils import _pytree as pytree

from graphplan.tensors.containers import NODES
from graphplan.tensors.deferred import DeferredNumber

_PARTIAL = ("func", "args", "keywords", "__dict__")
"""What a partial function is made of."""
_ITEMS = "[]"
"""The name of what an object holds as a dict or a list."""
_BASES: tuple[Any, ...] = (OrderedDict, dict, list, SimpleNamespace)
_HEAP_TYPE = 1 << 9
"""The flag of a class that was not defined in C before the interpreter began."""
_MOST_OBJECTS = 10_000
"""Objects among which tensors are looked for."""
_ATOMS = frozenset({str, bytes, int, float, bool, complex, type(None)})
_LEAVES = _ATOMS | {Tensor}


@dataclass
class _Record:
    """A dataclass instance, a partial function or another object, opened for flattening."""

    kind: type
    values: dict[str, Any]


@dataclass
class _Outer:
    """A reference from within a record to the one that is ``level`` records further out, perhaps a weak one."""

    level: int
    weak: bool


class _AttributeKey(pytree.GetAttrKey):
    """The name of an attribute of an object that is no dataclass instance."""

    def __str__(self) -> str:
        return "" if self.name == _ITEMS else super().__str__()


def _flatten_record(record: _Record) -> tuple[list[Any], Any]:
    return list(record.values.values()), (record.kind, tuple(record.values))


def _unflatten_record(values: Iterable[Any], context: Any) -> _Record:
    return _Record(context[0], dict(zip(context[1], values, strict=True)))


NODES[_Record] = lambda record: (record.values.values(), (record.kind, *record.values))
NODES[_Outer] = lambda outer: ((), (outer.level, outer.weak))


def _flatten_record_with_keys(record: _Record) -> tuple[list[tuple[Any, Any]], Any]:
    values, context = _flatten_record(record)
    key = pytree.GetAttrKey if record.kind is partial or is_dataclass(record.kind) else _AttributeKey
    return [(key(name), value) for name, value in zip(context[1], values, strict=True)], context


pytree.register_pytree_node(_Record, _flatten_record, _unflatten_record, flatten_with_keys_fn=_flatten_record_with_keys)
pytree.register_pytree_node(
    _Outer,
    lambda outer: ([], (outer.level, outer.weak)),
    lambda _, context: _Outer(*context),
    flatten_with_keys_fn=lambda outer: ([], (outer.level, outer.weak)),
)


def is_record(leaf: Any) -> bool:
    """Return True if :func:`open_records` opens it."""
    return _is_plain_record(leaf) or (base_of(type(leaf)) is not None and _is_batch(leaf))


def _is_plain_record(leaf: Any) -> bool:
    return type(leaf) is partial or is_dataclass(type(leaf))


def _find_base(kind: type) -> Any:
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


base_of: Callable[[Any], Any] = lru_cache(1024)(_find_base)
"""The builtin class by which an object of a class can be made without that one's own code; None if by none."""


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
        elif _is_plain_record(node) or base_of(kind) is not None:
            left += record_values(node).values()
    return found and not left


def record_values(record: Any) -> dict[str, Any]:
    """What a record is made of, by name."""
    if type(record) is partial:
        return {name: getattr(record, name) for name in _PARTIAL}
    values: dict[str, Any] = {}
    if is_dataclass(record):
        values = {field.name: getattr(record, field.name) for field in fields(record) if hasattr(record, field.name)}
    elif isinstance(record, dict):
        values[_ITEMS] = dict(dict.items(record))
    elif isinstance(record, list):
        values[_ITEMS] = list.copy(record)
    for name, slot in _slots(type(record)).items():
        if name not in values:
            try:
                values[name] = slot.__get__(record)
            except AttributeError:
                continue
    return values | getattr(record, "__dict__", {})


def _find_slots(kind: type) -> dict[str, MemberDescriptorType]:
    members = [item for base in reversed(kind.__mro__) for item in vars(base).items()]
    return {name: member for name, member in members if type(member) is MemberDescriptorType and name != "__dict__"}


_slots: Callable[[Any], dict[str, Any]] = lru_cache(1024)(_find_slots)


def literal_values(thing: Any) -> dict[str, Any] | None:
    """What an object without tensors is made of, by name; None for what is no such object."""
    return record_values(thing) if base_of(type(thing)) is not None else None


def has_attributes(node: Any) -> bool:
    """Whether ``node`` is a container that is taken apart and put together again, and attributes that were set
    on it would be lost by that.
    """
    is_rebuilt = type(node) is OrderedDict or (isinstance(node, tuple) and hasattr(node, "_fields"))
    return is_rebuilt and bool(getattr(node, "__dict__", None))


def open_records(tree: Any) -> Any:
    """``tree`` with records as nodes, so that tensors in them are leaves. What :func:`has_attributes` stays a leaf."""
    return _opened(tree, is_record, ())


def _opened(tree: Any, opens: Callable[[Any], bool], outer: tuple[Any, ...]) -> Any:
    """``tree`` with nodes for the records that ``opens``. ``outer`` are those that it is a part of, innermost last."""
    # Pytree takes its time to say that one of these is a leaf, and to take plain containers apart.
    kind = type(tree)
    if kind in _LEAVES:
        return tree
    if kind is dict:
        return {key: _opened(value, opens, outer) for key, value in tree.items()}
    if kind is list or kind is tuple:
        return kind([_opened(value, opens, outer) for value in tree])

    def opened(leaf: Any) -> Any:
        target = _referent(leaf)
        for level, record in enumerate(reversed(outer)):
            if record is target and type(record) is not partial:
                return _Outer(level, weak=leaf is not target)
        if not opens(leaf) and not (outer and refers_to(leaf, outer)):
            return leaf
        values = record_values(leaf)
        return _Record(type(leaf), {name: _opened(value, opens, (*outer, leaf)) for name, value in values.items()})

    return pytree.tree_map(opened, tree, is_leaf=has_attributes)


def refers_to(leaf: Any, outer: tuple[Any, ...]) -> bool:
    """Return True if an object refers to one that it is a part of: in a copy of that one, it has to be a copy, too."""
    if base_of(type(leaf)) is None:
        return False
    values = map(_referent, record_values(leaf).values())
    return any(value is record for value in values for record in outer)


def _referent(value: Any) -> Any:
    return value() if issubclass(type(value), weakref.ref) else value


def _holds_tensors(leaf: Any) -> bool:
    return is_record(leaf) and any(map(_leads_to_tensors, record_values(leaf).values()))


def _leads_to_tensors(value: Any) -> bool:
    if type(value) in _ATOMS:
        return False
    return any(isinstance(leaf, Tensor) or _holds_tensors(leaf) for leaf in pytree.tree_leaves(value))


def _open_tensors(tree: Any) -> Any:
    """:func:`open_records` for what a step returns: a record without tensors stays the object that it is."""
    return _opened(tree, _holds_tensors, ())


def close_records(tree: Any) -> Any:
    """``tree`` with the records that :func:`open_records` opened."""
    return _closed(tree, ())


def _closed(tree: Any, outer: tuple[Any, ...]) -> Any:
    def closed(node: Any) -> Any:
        if isinstance(node, _Outer):
            record = outer[-1 - node.level]
            return weakref.ref(record) if node.weak else record
        if not isinstance(node, _Record):
            return node
        if node.kind is partial:
            values = {name: _closed(value, (*outer, None)) for name, value in node.values.items()}
            function = partial(values["func"], *values["args"], **values["keywords"])
            vars(function).update(values["__dict__"])
            return function
        record = (base_of(node.kind) or object).__new__(node.kind)
        fill_record(record, {name: _closed(value, (*outer, record)) for name, value in node.values.items()})
        return record

    return pytree.tree_map(closed, tree, is_leaf=lambda node: isinstance(node, (_Record, _Outer)))


def fill_record(record: Any, values: dict[str, Any]) -> None:
    """Let ``record`` hold ``values`` by name, past what its class says of assignments."""
    own, slots = getattr(record, "__dict__", {}), _slots(type(record))
    for name, value in values.items():
        if name == _ITEMS:
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
