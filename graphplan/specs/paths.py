"""Paths: places in a step's owners, written as Python expressions, and the fact about the place that is meant.

A path is a string, so that it can be printed, sorted and used as a key. The fact is stored separately and never parsed
from the text: an attribute may be called ``grad``, too.
"""

from __future__ import annotations

from collections.abc import Container
from enum import Enum
from itertools import count


class Fact(Enum):
    """The fact that a path names about its place."""

    VALUE = "value"
    """The value at the place."""
    GRADIENT = "gradient"
    """The gradient of the parameter at the place."""
    LENGTH = "length"
    """The number of items of the container at the place."""
    PRESENCE = "presence"
    """Whether the object at the place has an attribute."""
    MEMBERS = "members"
    """The parameters of the optimizer's parameter group at the place."""


class Path(str):
    """A path and the fact that it names.

    Examples:
        >>> Path.gradient("model.weight"), Path.gradient("model.weight").place
        ('model.weight.grad', 'model.weight')

    Attributes:
        place: the path of the place alone.
        of: the fact about the place.
    """

    __slots__ = ("of", "place")
    place: str
    of: Fact

    @classmethod
    def gradient(cls, place: str) -> Path:
        """Return the path of a parameter's gradient."""
        return cls._of(f"{place}.grad", place, Fact.GRADIENT)

    @classmethod
    def length(cls, place: str) -> Path:
        """Return the path of a container's length."""
        return cls._of(f"len({place})", place, Fact.LENGTH)

    @classmethod
    def presence(cls, place: str, name: str) -> Path:
        """Return the path for whether an object has the attribute ``name``."""
        return cls._of(f"hasattr({place}, {name!r})", place, Fact.PRESENCE)

    @classmethod
    def members(cls, place: str) -> Path:
        """Return the path of the parameters in an optimizer's parameter group."""
        return cls._of(f"{place}['params']", place, Fact.MEMBERS)

    @classmethod
    def _of(cls, text: str, place: str, of: Fact) -> Path:
        path = cls(text)
        path.place, path.of = place, of
        return path


def names(path: str, of: Fact) -> bool:
    """Return True if ``path`` names the fact ``of``. A plain string names the value."""
    return (path.of if isinstance(path, Path) else Fact.VALUE) is of


def free_name(name: str, taken: Container[str]) -> str:
    """Return ``name``; if it is taken, the first free one of ``name_2``, ``name_3``, …"""
    if name not in taken:
        return name
    return next(other for number in count(2) if (other := f"{name}_{number}") not in taken)
