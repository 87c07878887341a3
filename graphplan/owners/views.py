"""Dictionary-like views of objects that are not dictionaries: each item is one value that a step may read."""

from __future__ import annotations

import gc
from collections.abc import Callable, Collection, Iterator, MutableMapping, Sequence
from collections.abc import Set as AbstractSet
from itertools import islice
from operator import is_
from types import CellType, FunctionType
from typing import Any

import torch

from graphplan.owners.contents import Unseen, state_of
from graphplan.tensors.records import slots_of

_MOST_ITEMS = 65536
"""Maximum number of items of a list or dictionary that are compared before each replay."""


class ReadOnly:
    """Attributes and properties of an object of torch, Lightning or Python: read and guarded, but never written."""

    def __init__(self, thing: Any, names: Sequence[str] = ()) -> None:
        self.thing = thing
        self.names = names

    def __getitem__(self, name: str) -> Any:
        return getattr(self.thing, name)


class CallNumbers(ReadOnly):
    """Numbers that a step gets as arguments: its code need not load an attribute of this name to read them."""


class Setting(ReadOnly):
    """Settable attributes that a class computes or validates, such as properties."""

    def __setitem__(self, name: str, value: Any) -> None:
        setattr(self.thing, name, value)


class Present:
    """A dictionary whose class defines ``__missing__`` or ``__getitem__``, read without calling these."""

    def __init__(self, items: dict[Any, Any]) -> None:
        self.items = items

    def __getitem__(self, key: Any) -> Any:
        if not dict.__contains__(self.items, key):
            raise KeyError(key)
        return dict.__getitem__(self.items, key)


def present(container: Any) -> Any:
    """Return ``container``, or a view that reads it without running code of its class."""
    kind = type(container)
    is_own = kind is not dict and issubclass(kind, dict)
    reads_itself = is_own and isinstance(kind.__getitem__, FunctionType)
    return Present(container) if is_own and (hasattr(kind, "__missing__") or reads_itself) else container


class Attributes(MutableMapping[str, Any]):
    """Attributes of an object with ``__slots__``, read without running code of its class."""

    def __init__(self, thing: Any) -> None:
        self.thing = thing
        self._slots = slots_of(type(thing))

    def __getitem__(self, name: str) -> Any:
        try:
            return self._slots[name].__get__(self.thing)
        except AttributeError:
            raise KeyError(name) from None

    def __setitem__(self, name: str, value: Any) -> None:
        # Through the slot's descriptor, because ``setattr`` raises for a frozen dataclass.
        self._slots[name].__set__(self.thing, value)

    def __delitem__(self, name: str) -> None:
        self._slots[name].__delete__(self.thing)

    def __iter__(self) -> Iterator[str]:
        return (name for name in self._slots if name in self)

    def __len__(self) -> int:
        return sum(1 for _ in self)


class GroupCounts:
    """Integers in one parameter group that the optimizer's own step changes: state, not hyper-parameters. The group is
    looked up on each access, because loading a checkpoint makes new dictionaries.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, index: int) -> None:
        self._optimizer = optimizer
        self._index = index
        self.keys: set[str] = set()

    @property
    def group(self) -> dict[str, Any]:
        """The parameter group; empty if it no longer exists."""
        groups = self._optimizer.param_groups
        return groups[self._index] if self._index < len(groups) else {}

    def __getitem__(self, key: str) -> Any:
        return self.group[key]

    def __setitem__(self, key: str, value: Any) -> None:
        self.group[key] = value


def attributes_of(thing: Any) -> dict[str, Any] | None:
    """Return the attribute dictionary of ``thing`` without running code of its class; None if it has none."""
    getter: Any = type(thing).__getattribute__
    try:
        inner = (object.__getattribute__ if isinstance(getter, FunctionType) else getter)(thing, "__dict__")
    except AttributeError:
        return None
    return inner if isinstance(inner, dict) else None


class ComputedItem:
    """A read-only item that gives ``read(items)`` to guards: the same object until its value changes."""

    def __init__(self, items: Any, read: Callable[[Any], Any]) -> None:
        self.items = items
        self.read = read
        self._last: Any = None

    def __getitem__(self, key: Any) -> Any:
        now, last = self.read(self.items), self._last
        if not isinstance(now, tuple) or type(last) is not type(now):
            unchanged = type(now) is type(last) and now == last
        else:
            unchanged = len(now) == len(last) and all(map(is_, now, last))
        if not unchanged:
            self._last = now
        return self._last


def extent(items: Any) -> Any:
    """Return the length of a list or deque, or the keys of a dictionary in order."""
    return tuple(items) if isinstance(items, dict) else len(items)


def contents(items: Any) -> Any:
    """Return what a set, buffer or random generator holds, as one value to compare."""
    return frozenset(items) if isinstance(items, AbstractSet) else state_of(items)


def rest(start: int, items: Collection[Any]) -> Any:
    """Return the items of a long list or dictionary from ``start`` on; an :class:`Unseen` if there are too many."""
    if len(items) > _MOST_ITEMS:
        what = f"of {len(items)} items; a container of more than {_MOST_ITEMS} items"
        return Unseen(what, "Keep them in a tensor or a tuple")
    values = items.values() if isinstance(items, dict) else items
    return tuple(islice(values, start, None))


class Cell:
    """A closure cell, used like a dictionary of one item."""

    def __init__(self, cell: CellType) -> None:
        self.cell = cell

    def __getitem__(self, name: str) -> Any:
        try:
            return self.cell.cell_contents
        except ValueError:
            raise KeyError(name) from None

    def __setitem__(self, name: str, value: Any) -> None:
        self.cell.cell_contents = value


class Members:
    """A class's own attributes, used like a writable dictionary. ``space`` is the dictionary behind the read-only
    ``__dict__`` of the class, or that ``__dict__`` where Python does not give access to the dictionary.
    """

    def __init__(self, kind: type) -> None:
        self.kind = kind
        behind = gc.get_referents(vars(kind))
        self.space: Any = behind[0] if len(behind) == 1 and type(behind[0]) is dict else vars(kind)

    def __getitem__(self, name: str) -> Any:
        return self.space[name]

    def __setitem__(self, name: str, value: Any) -> None:
        setattr(self.kind, name, value)


class Inherited(Members):
    """A class's attributes, read through an instance or a subclass. A name is absent while one of the dictionaries
    ``before``, which Python searches first, has it.
    """

    def __init__(self, kind: type, before: Sequence[Any] = ()) -> None:
        super().__init__(kind)
        self.before = before

    def __getitem__(self, name: str) -> Any:
        if any(name in space for space in self.before):
            raise KeyError(name)
        return self.space[name]


def home(container: Any) -> Any:
    """Return the object whose identity must not change if places in ``container`` are to stay valid."""
    if isinstance(container, ComputedItem):
        return container.items
    if isinstance(container, Members):
        return container.kind
    return container.thing if isinstance(container, Attributes) else container
