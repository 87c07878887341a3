"""Paths: places in a step's owners, written as Python code would reach them, and what of such a place is meant.

A path is a string, so that it can be printed, sorted and used as a key as it is. What it names is a fact of its own and
is never parsed from the text: an attribute may be called ``grad``, too.
"""

from __future__ import annotations

from collections.abc import Container
from enum import Enum
from itertools import count


class Of(Enum):
    """What a path names of the place that it begins with."""

    VALUE = "value"
    """What lies there."""
    GRADIENT = "gradient"
    """The gradient of the parameter that lies there."""
    LENGTH = "length"
    """How many items the container that lies there has."""
    PRESENCE = "presence"
    """Whether the object that lies there has an attribute."""
    MEMBERS = "members"
    """The parameters of the group of an optimizer that lies there."""


class Path(str):
    """A path with what it names.

    Examples:
        >>> Path.gradient("model.weight"), Path.gradient("model.weight").place
        ('model.weight.grad', 'model.weight')

    Attributes:
        place: the path of the place, a string of its own.
        of: what of it is named.
    """

    __slots__ = ("of", "place")
    place: str
    of: Of

    @classmethod
    def gradient(cls, place: str) -> Path:
        """The gradient of a parameter."""
        return cls._of(f"{place}.grad", place, Of.GRADIENT)

    @classmethod
    def length(cls, place: str) -> Path:
        """The length of a container."""
        return cls._of(f"len({place})", place, Of.LENGTH)

    @classmethod
    def presence(cls, place: str, name: str) -> Path:
        """Whether an object has an attribute."""
        return cls._of(f"hasattr({place}, {name!r})", place, Of.PRESENCE)

    @classmethod
    def members(cls, place: str) -> Path:
        """The parameters of an optimizer's group."""
        return cls._of(f"{place}['params']", place, Of.MEMBERS)

    @classmethod
    def _of(cls, text: str, place: str, of: Of) -> Path:
        path = cls(text)
        path.place, path.of = place, of
        return path


def names(path: str, of: Of) -> bool:
    """Return True if ``path`` names ``of``; a plain string names the value."""
    return (path.of if isinstance(path, Path) else Of.VALUE) is of


def free_name(name: str, taken: Container[str]) -> str:
    """``name``, or ``name_2``, ``name_3``, … if it is taken."""
    if name not in taken:
        return name
    return next(other for number in count(2) if (other := f"{name}_{number}") not in taken)
