"""Two traces of consecutive steps: what they changed and may have read, except at paths that replays may ignore."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from graphplan.effects.allowed import is_allowed
from graphplan.observe.profile import Reads
from graphplan.owners.slots import Scalar, Walk
from graphplan.owners.tensor_metadata import ABSENT
from graphplan.owners.views import CallNumbers
from graphplan.trace.changes import same_value
from graphplan.trace.records import Trace

_NUMBERS = (bool, int, float)


@dataclass(frozen=True)
class TracePair:
    """Two traces, a walk over the owners after the second one, and the paths that ``allow`` names."""

    first: Trace
    second: Trace
    walk: Walk
    allow: Iterable[str]

    @cached_property
    def either(self) -> Reads:
        """What code may have read in either trace."""
        return self.first.reads if self.first is self.second else self.first.reads | self.second.reads

    @property
    def both(self) -> tuple[Trace, Trace]:
        """Both traces."""
        return self.first, self.second

    def allows(self, path: str) -> bool:
        """Return True if replays may ignore the value at ``path``."""
        return is_allowed(path, self.allow)

    def changed(self, kind: str) -> Iterator[tuple[str, Any, Any]]:
        """Yield each path with a ``kind`` of change in either trace, and both traces' changes; None for no change."""
        first, second = (getattr(trace.changes, kind) for trace in self.both)
        for path in {**first, **second}:
            if not self.allows(path):
                yield path, first.get(path), second.get(path)

    def reads(self, scalar: Scalar) -> bool:
        """Return True if the step's code may have read ``scalar`` by its name."""
        return self.either.covers(scalar)

    def may_read(self, scalar: Scalar) -> bool:
        """Return True if the step's code may have read ``scalar`` by a computed name."""
        return self.either.may_cover(scalar)

    def uses(self, path: str, scalar: Scalar) -> bool:
        """Return True if code needed the value of a number with a stand-in, or of an argument without one."""
        is_given = type(scalar.container) is CallNumbers
        return any(path in t.symbolic.used or (is_given and path not in t.symbolic.places) for t in self.both)

    def tracks(self, path: str) -> bool:
        """Return True if all uses of the number at ``path`` are known in both traces."""
        return all(trace.symbolic.tracks(path) for trace in self.both)

    def remakes(self, path: str) -> bool:
        """Return True if both steps make the container of ``path`` anew, with one value, and never read the old one."""
        if not all(path in trace.changes.renewed and path not in trace.read_before for trace in self.both):
            return False
        return same_value(*self._left_at(path))

    def replaces(self, path: str) -> bool:
        """Return True if both steps leave one constant in the place of the number at ``path``, whose value before the
        step no code needs: stand-ins have recorded all that the step has done with that.
        """
        is_changed = any(path in trace.changes.scalars for trace in self.both)
        if not is_changed or not self.tracks(path) or any(path in trace.symbolic.counted for trace in self.both):
            return False
        one, other = self._left_at(path)
        return type(one) in _NUMBERS and same_value(one, other)

    def _left_at(self, path: str) -> list[Any]:
        """Return the Python value that each trace left at ``path``."""
        entries = ((trace.changes.scalars, trace.entry_scalars.get(path)) for trace in self.both)
        return [changes.get(path, (None, entry))[1] for changes, entry in entries]

    def at_entry(self, path: str) -> tuple[Any, Any]:
        """Return what was at ``path`` when each trace began: a tensor's metadata, or a Python value."""
        old, new = (trace.entry_metadata.get(path, trace.entry_scalars.get(path, ABSENT)) for trace in self.both)
        return old, new
