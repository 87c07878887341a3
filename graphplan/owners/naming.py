"""Names for owners that were given without one."""

from __future__ import annotations

from collections.abc import Container, Mapping, Sequence
from itertools import count
from typing import Any

from graphplan.errors import OwnersError
from graphplan.owners.kinds import unwrapped


def name_owners(owners: Mapping[str, Any] | Sequence[Any] | None) -> dict[str, Any]:
    """Owners by name: a mapping as it is, a sequence under its types' names, nothing as nothing.

    Raises:
        OwnersError: for anything else, and for what calls itself an optimizer and is none.
    """
    if owners is None:
        return {}
    if isinstance(owners, Mapping):
        return {name: unwrapped(owner) for name, owner in owners.items()}
    if isinstance(owners, Sequence) and not isinstance(owners, str):
        named: dict[str, Any] = {}
        for owner in owners:
            named[free_name(type(owner).__name__.lower(), named)] = unwrapped(owner)
        return named
    raise OwnersError(f"owners is a {type(owners).__name__}; expected a mapping from name to object, or a sequence")


def free_name(name: str, taken: Container[str]) -> str:
    """``name``, or ``name_2``, ``name_3``, … if it is taken."""
    if name not in taken:
        return name
    return next(other for number in count(2) if (other := f"{name}_{number}") not in taken)
