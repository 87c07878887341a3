"""Views of what cannot be used like a dictionary: one item of each is one thing that a step may read.

Longer than most rooms: a small class for each kind of such places, which :func:`home` tells apart.
"""

from __future__ import annotations

import gc
from abc import ABCMeta, get_cache_token
from collections import deque
from collections.abc import Collection, Iterable, Iterator, Mapping, MutableMapping, Sized
from collections.abc import Set as AbstractSet
from contextvars import ContextVar
from importlib import import_module
from itertools import islice
from operator import is_
from types import CellType
from typing import Any
from weakref import ref

from graphplan.owners.contents import Unseen, state_of

_registry_of: Any = getattr(import_module("_abc"), "_get_dump")  # noqa: B009
"""What an abstract class remembers; its registry comes first."""
_MOST_RESULTS = 4096
"""Results of a cached function that are compared before each replay."""
_MOST_ITEMS = 65536
"""Items of a list or dictionary that are compared before each replay."""


class Numbers:
    """Python values that some object shows as attributes, properties included: read, guarded, never written.

    ``via`` is an attribute on the way to the object.
    """

    def __init__(self, thing: Any, names: Iterable[str], *, via: str | None = None) -> None:
        self.thing = thing
        self.names = tuple(names)
        self.via = via

    def __getitem__(self, name: str) -> Any:
        return getattr(self.thing, name)


class Present:
    """A dictionary that makes what it lacks, asked for what is in it: reading what has gone makes nothing anew."""

    def __init__(self, items: Mapping[Any, Any]) -> None:
        self.items = items

    def __getitem__(self, key: Any) -> Any:
        if key not in self.items:
            raise KeyError(key)
        return self.items[key]


def present(container: Any) -> Any:
    """``container``, or what reads it without making anything."""
    return Present(container) if hasattr(type(container), "__missing__") else container


class Current:
    """What a context variable holds here and now: read and guarded, never written."""

    def __init__(self, variable: ContextVar[Any]) -> None:
        self.variable = variable

    def __getitem__(self, key: str) -> Any:
        return self.variable.get(None)


class Attributes(MutableMapping[str, Any]):
    """Attributes of an object that keeps them in ``__slots__``."""

    def __init__(self, thing: Any) -> None:
        self.thing = thing
        self._names = slots_of(type(thing))

    def __getitem__(self, name: str) -> Any:
        try:
            return getattr(self.thing, name)
        except AttributeError:
            raise KeyError(name) from None

    def __setitem__(self, name: str, value: Any) -> None:
        # A frozen dataclass refuses to be assigned to.
        object.__setattr__(self.thing, name, value)

    def __delitem__(self, name: str) -> None:
        object.__delattr__(self.thing, name)

    def __iter__(self) -> Iterator[str]:
        return (name for name in self._names if hasattr(self.thing, name))

    def __len__(self) -> int:
        return sum(1 for _ in self)


def slots_of(kind: type) -> tuple[str, ...]:
    """Names that ``kind`` and its bases have in ``__slots__``."""
    names: list[str] = []
    for base in kind.__mro__:
        own = vars(base).get("__slots__", ())
        names += [own] if isinstance(own, str) else own
    return tuple(name for name in names if not name.startswith("__"))


class _Seen:
    """A value that is made anew for each look, and is the same object while it did not change."""

    def __init__(self) -> None:
        self._last: Any = None

    def same(self, now: Any) -> Any:
        last = self._last
        if not isinstance(now, tuple) or type(last) is not type(now):
            unchanged = type(now) is type(last) and now == last
        else:
            unchanged = len(now) == len(last) and all(map(is_, now, last))
        if not unchanged:
            self._last = now
        return self._last


class Extent(_Seen):
    """How many items a list or deque has, or a dictionary's keys in order, as an item of it: read, never written."""

    def __init__(self, items: Sized) -> None:
        super().__init__()
        self.items = items

    def __getitem__(self, key: str) -> Any:
        return self.same(tuple(self.items)) if isinstance(self.items, dict) else len(self.items)


class Length:
    """How many items a loader or sampler says that it has, which may ask the user's dataset: read, never written."""

    def __init__(self, items: Sized) -> None:
        self.items = items

    def __getitem__(self, key: str) -> int | None:
        try:
            return len(self.items)
        except Exception:  # noqa: BLE001 - whatever a dataset raises that has no length
            return None


class Room:
    """Whether a deque drops an item for each one that it gets: read and guarded, never written."""

    def __init__(self, items: deque[Any]) -> None:
        self.items = items

    def __getitem__(self, key: str) -> bool:
        return len(self.items) == self.items.maxlen


class Contents(_Seen):
    """What a set, buffer or random generator holds, as one value to compare: read and guarded, never written."""

    def __init__(self, items: Any) -> None:
        super().__init__()
        self.items = items

    def __getitem__(self, key: str) -> Any:
        items = self.items
        if isinstance(items, AbstractSet):
            return self.same(frozenset(items))
        return self.same(state_of(items))


class Registered(_Seen):
    """The types and functions that a generic function chooses from, as an item of it: read and guarded."""

    def __init__(self, registry: Mapping[Any, Any]) -> None:
        super().__init__()
        self.items = registry

    def __getitem__(self, key: str) -> Any:
        return self.same((*self.items.keys(), *self.items.values()))


class Virtual(_Seen):
    """The classes that count as subclasses of an abstract one because somebody registered them, with it or with what
    counts as one of its subclasses, as an item of it: read and guarded.
    """

    def __init__(self, kind: ABCMeta) -> None:
        super().__init__()
        self.items = kind
        self._token: object = None

    def __getitem__(self, key: str) -> Any:
        # It is another one after each registration, with whatever class.
        token = get_cache_token()
        if token == self._token:
            return self._last
        self._token = token
        return self.same(_Registrations(_registered(self.items)))


class _Registrations(frozenset[Any]):
    """Weak references to registered classes."""

    __slots__ = ()

    def __repr__(self) -> str:
        return f"{len(self)} registered classes"


def _registered(kind: ABCMeta) -> set[Any]:
    found: set[Any] = set()
    left: list[type[Any]] = [kind]
    seen: set[type[Any]] = {kind}
    while left:
        here = left.pop()
        registry = _registry_of(here)[0]
        found |= registry
        for other in (*(reference() for reference in registry), *type.__subclasses__(here)):
            if isinstance(other, ABCMeta) and other not in seen:
                seen.add(other)
                left.append(other)
    return found


class Alive:
    """Whether what a weak reference leads to is there: read and guarded, never written."""

    def __init__(self, reference: ref[Any]) -> None:
        self.items = reference

    def __getitem__(self, key: str) -> bool:
        return self.items() is not None


class Weakly:
    """The attributes of what a weak reference leads to, which stays weak: read and guarded, never written."""

    def __init__(self, reference: ref[Any]) -> None:
        self.items = reference

    def __getitem__(self, name: str) -> Any:
        # Of what is gone, nothing is there.
        return getattr(self.items(), "__dict__", {})[name]


class Rest(_Seen):
    """The items of a long list or dictionary from ``start`` on: read and guarded, never written."""

    def __init__(self, items: Collection[Any], start: int) -> None:
        super().__init__()
        self.items = items
        self._start = start

    def __getitem__(self, key: str) -> Any:
        if len(self.items) > _MOST_ITEMS:
            what = f"of {len(self.items)} items; what has more than {_MOST_ITEMS}"
            return Unseen(what, "Hold them in a tensor or a tuple")
        values = self.items.values() if isinstance(self.items, dict) else self.items
        return self.same(tuple(islice(values, self._start, None)))


class Remembered(_Seen):
    """The arguments and results that a function under ``functools.lru_cache`` remembers, in no order, as an item of it.

    Read and guarded, never written.
    """

    def __init__(self, cached: Any) -> None:
        super().__init__()
        self.items = cached

    def __getitem__(self, key: str) -> Any:
        if self.items.cache_info().currsize > _MOST_RESULTS:
            what = f"which remembers {self.items.cache_info().currsize} results; what has more than {_MOST_RESULTS}"
            return Unseen(what, f"Bound it (lru_cache(maxsize={_MOST_RESULTS}))")
        # Of a bounded cache, the results themselves are among these; of an unbounded one, the dictionary is.
        held = gc.get_referents(self.items)
        own = vars(self.items)
        results = [result for each in held if type(each) is dict and each is not own for result in each.values()]
        return self.same(_Results(sorted([*held, *results], key=id)))


class _Results(tuple[Any, ...]):
    """What a cached function remembers."""

    __slots__ = ()

    def __repr__(self) -> str:
        return f"{len(self)} remembered things"


class Cell:
    """A closure's variable, used like a dictionary of one item."""

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
    """What a class holds, used like a dictionary: other than ``vars`` of the class it can be written to."""

    def __init__(self, kind: type) -> None:
        self.kind = kind

    def __getitem__(self, name: str) -> Any:
        return vars(self.kind)[name]

    def __setitem__(self, name: str, value: Any) -> None:
        setattr(self.kind, name, value)


_OF_ITEMS = (Contents, Extent, Length, Rest, Registered, Remembered, Room, Alive, Virtual, Weakly)


def home(container: Any) -> Any:
    """What has to stay for a place in ``container`` to be where it is."""
    if isinstance(container, _OF_ITEMS):
        return container.items
    return container.thing if isinstance(container, Attributes) else container
