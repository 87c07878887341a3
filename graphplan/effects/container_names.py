"""Names that the step's code has for containers, and its uses of these."""

from __future__ import annotations

from collections import OrderedDict, UserDict, UserList, defaultdict, deque
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from graphplan.effects.trace_pair import TracePair
from graphplan.environment.origin import is_library
from graphplan.observe.container_uses import ContainerUse, container_uses
from graphplan.observe.source import Source
from graphplan.owners.slots import Scalar
from graphplan.owners.views import Cell, home

_BY_KEY = frozenset({dict, OrderedDict, defaultdict})
"""Mappings in which a string key leads to the item of that key; other classes may look up another key."""
_PLAIN = frozenset({*_BY_KEY, list, deque})
ANY_DEPTH = 99
"""A depth of nested items that is greater than any that code can read."""


@dataclass(frozen=True, slots=True)
class ContainerName:
    """A name that code has for a container or item, or for a container that holds it ``depth`` items deep. ``owner`` is
    the id of the attribute's owner, or 0. ``keys`` lead from there to it; None for a key that code may write
    differently.
    """

    name: str
    depth: int
    owner: int = 0
    keys: tuple[str | None, ...] = ()

    def fits(self, look: ContainerUse, owner: int) -> bool:
        """Return True if ``look``, in a method of ``owner``, reads the container or an item of it."""
        if look.name != self.name or (look.own and self.owner not in (0, owner)):
            return False
        if any(None not in keys and keys[0] != keys[1] for keys in zip(self.keys, look.keys, strict=False)):
            return False
        return look.whole or look.depth >= self.depth or self.depth == ANY_DEPTH

    def is_seen(self, look: ContainerUse) -> bool:
        """Return True if a ``look`` that fits reads the container itself, not only an item."""
        return look.depth <= self.depth

    def item(self, key: Any) -> ContainerName:
        """Return the name of the container's item at ``key``."""
        return ContainerName(self.name, self.depth + 1, self.owner, (*self.keys, key if type(key) is str else None))


class ContainerNames:
    """The names of the containers in a walk, and the looks at them in the code of two traces."""

    def __init__(self, pair: TracePair) -> None:
        self._pair = pair
        self._dynamic = pair.either.by_users.dynamic

    @cached_property
    def holders(self) -> dict[int, list[tuple[Any, Any]]]:
        """The containers that hold a value, each with the key, by the value's id."""
        found: dict[int, list[tuple[Any, Any]]] = {}
        for container, key, value in self._pair.walk.links:
            found.setdefault(id(value), []).append((container, key))
        return found

    @cached_property
    def owners(self) -> dict[int, Any]:
        """The objects by the ids of the dictionaries of their attributes."""
        return {id(inner): thing for thing, inner in self._pair.walk.attributes}

    def names_of(self, thing: Any) -> Iterator[ContainerName]:
        """Yield the names of a container."""
        yield from self._names_of(thing, 0, set())

    def looks(self, names: Collection[ContainerName]) -> Iterator[tuple[ContainerUse, list[ContainerName], Source]]:
        """Yield the looks of code, each with those of the ``names`` that fit it and its line."""
        words = {name.name.removeprefix(".") for name in names}
        for code, owner in dict.fromkeys(self._pair.either.codes):
            spelt = (code.co_names, code.co_freevars, code.co_cellvars, code.co_consts)
            if not any(word in place for place in spelt for word in words):
                continue
            for look in sorted(container_uses(code), key=lambda look: look.line):
                fitting = [name for name in names if name.fits(look, owner)]
                if fitting:
                    yield look, fitting, Source(code.co_filename, look.line, code.co_name, "step")

    def only_writes(self, scalar: Scalar) -> bool:
        """Return True if code has names for the list or dictionary that holds ``scalar``, and only writes that item."""
        container = home(scalar.container)
        if self._dynamic or type(container) not in _PLAIN or id(container) in self.owners:
            return False
        names = {name.item(scalar.key) for name in self.names_of(container)}
        methods = ((name, code) for name in names for code in self._pair.either.methods_on.get(name.owner, ()))
        is_librarys = any(is_library(code.co_filename) and name.name[1:] in code.co_names for name, code in methods)
        return bool(names) and not is_librarys and next(self.looks(names), None) is None

    def _names_of(
        self, thing: Any, depth: int, met: set[int], keys: tuple[str | None, ...] = ()
    ) -> Iterator[ContainerName]:
        if id(thing) in met:
            return
        for container, key in self.holders.get(id(thing), ()):
            owner = self.owners.get(id(container))
            if owner is not None:
                yield ContainerName(f".{key}", depth, 0 if self._dynamic else id(owner), keys)
                if isinstance(owner, UserDict | UserList):
                    yield from self._names_of(owner, depth, met | {id(thing)}, (None, *keys[1:]))
                continue
            outermost = id(container) not in self.holders
            if isinstance(key, str) and outermost:
                yield ContainerName(key, depth, keys=keys)
            if isinstance(key, str) and type(container) is not Cell and (outermost or type(container) not in _BY_KEY):
                # An attribute of a class, a module, or a dictionary that exposes its keys as attributes.
                yield ContainerName(f".{key}", depth, keys=keys)
            spelt = key if type(key) is str and type(container) in _BY_KEY else None
            yield from self._names_of(container, depth + 1, met | {id(thing)}, (spelt, *keys))
