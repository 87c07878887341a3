"""Lists and deques that a step appends to."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from torch.utils import _pytree as pytree

from graphplan.effects.allowed import is_allowed, shorten
from graphplan.errors import HostEffectError
from graphplan.owners.slots import Walk
from graphplan.trace.changes import same_value, told_apart
from graphplan.trace.records import Trace


@dataclass(frozen=True, slots=True)
class Append:
    """A list or deque that every step appends ``count`` items to; replays append copies of the tensors."""

    path: str
    count: int

    @classmethod
    def find(cls, first: Trace, second: Trace, allow: Iterable[str]) -> tuple[Append, ...]:
        """Lists and deques that grew alike in both traces.

        Raises:
            HostEffectError: for one that shrank, or grew differently or elsewhere.
        """
        appends = []
        for path, (old, new) in {**first.changes.moved, **second.changes.moved}.items():
            if not is_allowed(path, allow):
                what = "shortens" if new < old else "adds to other places than the end of"
                raise HostEffectError(
                    f"the step {what} {path}, from {old} to {new} items, which a replay cannot repeat: append, "
                    f"clear it outside the step, or pass allow=({path!r},)",
                    path=path,
                )
        for path in {**first.changes.appended, **second.changes.appended}:
            if is_allowed(path, allow):
                continue
            before, after = first.changes.appended.get(path), second.changes.appended.get(path)
            if before is None or after is None or len(before) != len(after) or not _alike(before, after):
                what = " and then ".join(
                    told_apart(before, after, lambda items: "nothing" if items is None else shorten(items))
                )
                raise HostEffectError(
                    f"the step appends {what} to {path}; expected tensors, or the same values each time, since a "
                    f"replay repeats them. Append tensors, or pass allow=({path!r},)",
                    path=path,
                )
            appends.append(cls(path, len(after)))
        return tuple(appends)

    def record(self, after: Walk, own: Callable[[Any], Any]) -> list[Any]:
        """What the recorded step has appended, each item as ``own`` gives it."""
        return [own(item) for item in list(after.lists[self.path])[-self.count :]]

    def repeating(self, walk: Walk, items: list[Any], copy: Callable[[Any], Any]) -> Callable[[], None]:
        """What a replay does: append a copy of each of ``items``, which the recording writes."""
        into = walk.lists[self.path]

        def append() -> None:
            into.extend(map(copy, items))

        return append


def _alike(before: list[Any], after: list[Any]) -> bool:
    (old, shape), (new, other) = pytree.tree_flatten(before), pytree.tree_flatten(after)
    return shape == other and all(map(same_value, old, new))
