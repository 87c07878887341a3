"""Lists, tuples and arrays of numbers that a step indexes with a symbolic number: ``self.schedule[step]``.

Indexing is C code, which would read the value of a stand-in. So while such a step is traced or captured, a
:class:`Table` replaces a container that the step's code only indexes.
"""

from __future__ import annotations

from typing import Any

from graphplan.tensors.symbolic import SymbolicNumber, has_stand_ins


class LookUp:
    """A function that returns the number at an index of ``container``, at the time of the call."""

    __name__ = "getitem"

    def __init__(self, container: Any) -> None:
        self._container = container

    def __call__(self, place: Any) -> Any:
        """Return the number there now."""
        return self._container[place]

    def __eq__(self, other: object) -> bool:
        return type(other) is LookUp and other._container is self._container

    def __hash__(self) -> int:
        return id(self._container)


class Table:
    """Replaces ``container``: indexing it with a symbolic number returns a symbolic number."""

    __slots__ = ("__weakref__", "_container")

    def __init__(self, container: Any) -> None:
        self._container = container

    def __getitem__(self, place: Any) -> Any:
        if type(place) is SymbolicNumber:
            return place.apply(LookUp(self._container), (place,))
        return self._container[place]

    def __len__(self) -> int:
        return len(self._container)


def is_table(value: Any) -> bool:
    """Return True if numbers that are looked up in ``value`` have stand-ins."""
    kind = type(value)
    if kind is list or kind is tuple:
        return bool(value) and all(has_stand_ins(type(each)) for each in value)
    if kind.__module__ != "numpy" or kind.__name__ != "ndarray":
        return False
    return value.ndim == 1 and has_stand_ins(value.dtype.type)
