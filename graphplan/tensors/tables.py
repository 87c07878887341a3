"""Lists, tuples and arrays of numbers in which a step looks one up at a followed place: ``self.schedule[step]``.

Code in C asks a stand-in for its value there. So while such a step is traced or captured, a :class:`Table` lies in the
place of a container with which the step's code does nothing else.
"""

from __future__ import annotations

from typing import Any

from graphplan.tensors.symbolic import SymbolicNumber, has_stand_ins


class LookUp:
    """Gives the number at a place of ``container``, which lies there when it is called."""

    __name__ = "getitem"

    def __init__(self, container: Any) -> None:
        self._container = container

    def __call__(self, place: Any) -> Any:
        """The number there now."""
        return self._container[place]

    def __eq__(self, other: object) -> bool:
        return type(other) is LookUp and other._container is self._container

    def __hash__(self) -> int:
        return id(self._container)


class Table:
    """Stands for ``container``: a number that is looked up in it at a followed place is followed, too."""

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
    """Whether numbers that are looked up in ``value`` have stand-ins."""
    kind = type(value)
    if kind is list or kind is tuple:
        return bool(value) and all(has_stand_ins(type(each)) for each in value)
    if kind.__module__ != "numpy" or kind.__name__ != "ndarray":
        return False
    return value.ndim == 1 and has_stand_ins(value.dtype.type)
