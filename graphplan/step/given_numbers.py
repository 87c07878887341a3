"""Numbers among a step's arguments that vary (an annealed weight, the epoch). They become owners' numbers, which have
stand-ins. If code needs a number's value, it stays a part of the key, and each value has a program of its own.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection
from contextlib import suppress
from typing import Any

from graphplan.owners.views import CallNumbers
from graphplan.specs.paths import free_name
from graphplan.step.managed import Managed
from graphplan.tensors.symbolic import has_stand_ins
from graphplan.tensors.trees import GivenNumber

_DIFFERENT = 3  # Number of different values after which an argument counts as varying.
_Place = int | str
"""The position of an argument, or its keyword."""


class _Arguments:
    """The varying numbers of the current call, as attributes."""


class GivenNumbers:
    """The varying numbers among the arguments of one step ``fn``."""

    def __init__(self, fn: Callable[..., Any], managed: Managed) -> None:
        self._managed = managed
        self._owner = free_name("arguments", managed.owners)
        self._names: list[str] = []
        # Functions in C may have no signature. A wrapped function may have other arguments than its wrapper.
        with suppress(TypeError, ValueError):
            parameters = inspect.signature(fn, follow_wrapped=False).parameters.items()
            self._names = [name for name, kind in parameters if kind.kind <= kind.POSITIONAL_OR_KEYWORD]
        self._held = _Arguments()
        self._seen: dict[_Place, set[Any]] = {}
        self._literal: set[_Place] = set()  # CallNumbers whose values code needs.
        self.needed: list[str] = []
        """Descriptions of the arguments whose values code needs."""
        self.given: dict[_Place, str] = {}
        """The varying arguments, with the unique attribute names that hold their numbers."""
        self._made: dict[tuple[str, type], GivenNumber] = {}

    def _name(self, place: _Place) -> str:
        name = place if isinstance(place, str) else self._names[place] if place < len(self._names) else f"args[{place}]"
        # All objects have attributes with double underscores, so such a keyword needs another name.
        return free_name(f"kwargs[{name}]" if name.startswith("__") else name, self.given.values())

    def put(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return the arguments with each varying number replaced by a :class:`GivenNumber`, and store the numbers."""
        if not self.given:
            return args, kwargs
        own = [self._one(place, value) for place, value in enumerate(args)]
        return tuple(own), {name: self._one(name, value) for name, value in kwargs.items()}

    def _one(self, place: _Place, value: Any) -> Any:
        name = self.given.get(place)
        if name is None or not has_stand_ins(type(value)):
            return value
        setattr(self._held, name, value)
        # Reuse the object in each call, since it is compared by identity.
        key = name, type(value)
        if key not in self._made:
            self._made[key] = GivenNumber((self._held, *key))
        return self._made[key]

    def learn(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        """Record the numbers among the arguments of a call without a program. Return True if a further one varies."""
        fresh: list[_Place] = []
        places: list[_Place] = [*range(len(args)), *kwargs]
        for place, value in zip(places, (*args, *kwargs.values()), strict=True):
            if has_stand_ins(type(value)) and place not in self._literal and place not in self.given:
                seen = self._seen.setdefault(place, set())
                seen.add(value)
                if len(seen) >= _DIFFERENT:
                    fresh.append(place)
        for place in fresh:
            self.given[place] = self._name(place)
        if fresh:
            self._managed.owners[self._owner] = CallNumbers(self._held, tuple(self.given.values()))
        return bool(fresh)

    def give_up(self, paths: Collection[str], told: Callable[[str], str] = str) -> list[str]:
        """Put the arguments at ``paths`` back into the key, since code needs their values. Return them as ``told``."""
        places = {place: f"{self._owner}.{name}" for place, name in self.given.items()}
        places = {place: path for place, path in places.items() if path in paths}
        self._literal |= places.keys()
        self.given = {place: name for place, name in self.given.items() if place not in places}
        found = list(map(told, places.values()))
        self.needed += found
        return found

    @property
    def paths(self) -> set[str]:
        """The paths of the varying arguments."""
        return {f"{self._owner}.{name}" for name in self.given.values()}
