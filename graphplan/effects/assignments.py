"""Python values that a step assigns alike each time."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass
from typing import Any

from graphplan.effects.allowed import is_allowed
from graphplan.owners.slots import Walk
from graphplan.owners.views import Inherited, Numbers, Told
from graphplan.trace.records import Trace


@dataclass(frozen=True, slots=True)
class Assignment:
    """A Python value that the step's code assigns and that is the same after every step; replays assign it again."""

    path: str
    value: Any

    @classmethod
    def find(
        cls, first: Trace, second: Trace, walk: Walk, changed: Collection[str], allow: Iterable[str]
    ) -> tuple[Assignment, ...]:
        """Values that methods of their object may have assigned without a change (a metric's ``_computed = None``).

        The next eager step resets such a value if it was changed between two steps, so a replay resets it too.
        """
        found = []
        for path, scalar in walk.scalars.items():
            is_read_only = isinstance(scalar.container, (Numbers, Inherited, Told, tuple))
            if path in changed or is_allowed(path, allow) or is_read_only:
                continue
            if first.reads.may_store(scalar) and second.reads.may_store(scalar):
                found.append(cls(path, scalar.get()))
        return tuple(found)

    def repeating(self, walk: Walk) -> Callable[[], None] | None:
        """What a replay does where the value lies in ``walk``; None where it is not there."""
        place = walk.place(self.path)
        if place is None:
            return None
        container, key, value = place.container, place.key, self.value

        def assign() -> None:
            container[key] = value

        return assign
