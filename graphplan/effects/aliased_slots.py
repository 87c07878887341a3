"""Slots that a step binds to one memory: a tensor under two names, a tensor and a view of it."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator
from itertools import combinations

from graphplan.specs.roles import Overlay
from graphplan.trace.changes import Place
from graphplan.trace.records import Trace

AliasedSlots = tuple[tuple[str, Overlay], ...]
"""Slots by path that overlap in one memory, and where each lies there."""


def find_together(first: Trace, second: Trace, paths: Iterable[str]) -> tuple[AliasedSlots, ...]:
    """Those of the rebound ``paths`` that overlap in memory after the step, in groups, and where in that memory each
    lies. A group that another step leaves otherwise is none.
    """
    before = {path: group for group in _groups(first, paths) for path in group}
    found = []
    for group in _groups(second, paths):
        if all(before.get(path) == group for path in group):
            found.append(tuple(group.items()))
    return tuple(found)


def _groups(trace: Trace, paths: Iterable[str]) -> Iterator[dict[str, Overlay]]:
    """Overlapping slots by path, counted from where the first of them begins."""
    held: defaultdict[int, dict[str, Place]] = defaultdict(dict)
    for path in paths:
        rebinding = trace.changes.rebindings.get(path)
        after = rebinding.after if rebinding is not None and not rebinding.moved else None
        if after is not None and len(after) == 1 and isinstance(after[0][0], int) and not any(after[0][5:]):
            held[after[0][0]][path] = after[0]
    for places in held.values():
        begin = min(place[1] for place in places.values())
        spread = {path: Overlay(place[1] - begin, place[2], place[3], place[4]) for path, place in places.items()}
        spread = {path: overlay for path, overlay in spread.items() if overlay.is_apart}
        joined = {path for pair in combinations(spread, 2) if spread[pair[0]].meets(spread[pair[1]]) for path in pair}
        if joined:
            yield {path: overlay for path, overlay in spread.items() if path in joined}
