"""Python values as parts of a key: whatever they are, they can be compared and hashed."""

from __future__ import annotations

from typing import Any

from graphplan.feed.signature import Identity
from graphplan.owners.contents import has_contents, state_of
from graphplan.owners.kinds import PLAIN
from graphplan.trace.changes import same_value


class Own(Identity):
    """A function that stands on an instance before its class's."""

    __slots__ = ()

    def __repr__(self) -> str:
        return repr(self.thing)


class _Odd:
    """A hyper-parameter of a type that may have its own mind of equality, or none of hashing."""

    __slots__ = ("value",)

    def __init__(self, value: Any) -> None:
        self.value = value

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Odd) and same_value(self.value, other.value)

    def __hash__(self) -> int:
        return hash(type(self.value))

    def __repr__(self) -> str:
        return repr(self.value)


def frozen(value: Any) -> Any:
    """What can be compared and hashed in the place of ``value``, with what a list (checkpoints bring betas in one), a
    dictionary or a buffer holds, which may be changed in place.
    """
    if isinstance(value, dict):
        return tuple((frozen(key), frozen(item)) for key, item in value.items())
    if isinstance(value, (list, tuple)):
        return tuple(map(frozen, value))
    if type(value) in PLAIN:
        return value
    return state_of(value) if has_contents(value) else _Odd(value)


def stays(value: Any) -> bool:
    """Whether a hyper-parameter is what it was as long as it is the same object."""
    if type(value) is tuple:
        return all(map(stays, value))
    return not isinstance(value, (list, dict)) and not has_contents(value)
