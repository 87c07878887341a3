"""Slots that a step binds to other tensors: carried from step to step, or made anew in each."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import combinations
from typing import Any

from graphplan.effects.trace_pair import TracePair
from graphplan.errors import CarryError, HostEffectError
from graphplan.specs.paths import Of, names
from graphplan.specs.roles import Overlay
from graphplan.trace.changes import Place, Rebinding
from graphplan.trace.records import Trace

AliasedSlots = tuple[tuple[str, Overlay], ...]
"""Slots by path that overlap in one memory, and where each lies there."""


@dataclass(frozen=True, slots=True)
class Rebindings:
    """The slots that every step binds to other tensors, by path.

    Attributes:
        carries: those whose old value the step reads: replays copy the new value into the old storage.
        replaced: those of ``carries`` whose old tensors the step only reads, so that other holders find them
            unchanged.
        moved: those of ``carries`` whose tensors stay, and get other memory.
        fresh: slots that the step rebinds without reading what they held.
        together: slots among these that overlap in memory after the step.
    """

    carries: tuple[str, ...]
    replaced: frozenset[str]
    moved: frozenset[str]
    fresh: tuple[str, ...]
    together: tuple[AliasedSlots, ...]

    @classmethod
    def find(cls, pair: TracePair) -> Rebindings:
        """Slots that both traces rebind alike.

        Raises:
            CarryError: if a carried slot changes shape or dtype.
            HostEffectError: if only one of the steps rebinds a slot, or shares memory that replays could not.
        """
        carries, fresh = [], []
        first, second = pair.both
        used = _used(second)
        for path, one, two in pair.changed("rebindings"):
            # A number in the place of a tensor, as of a device learning rate, is a flag that the step leaves.
            if path in second.changes.flags:
                continue
            if two is None or (one is None and not names(path, Of.GRADIENT)):
                raise HostEffectError(
                    f"the step rebinds {path} on one call and not on the next, which a replay cannot repeat: rebind it "
                    "on every call, or update it in place"
                )
            dropped = names(path, Of.GRADIENT) and two.after is None
            if two.joined is not None:
                raise HostEffectError(
                    f"the step gives {path} other memory ({path}.data = ...), and before or after that it shares "
                    f"memory with {two.joined}; a replay leaves tensors in the memory that they have, so that what one "
                    "of them gets would show in the other, or not. Give each memory of its own, or update it in place: "
                    f"{path}.data.copy_(...)"
                )
            is_read = any(place[0] in used for place in two.before or ())
            if two.moved or (is_read and not dropped):
                _check_carry(two)
                carries.append(path)
            elif two.after is not None or two.before is not None:
                fresh.append(path)
        written = {storage for storage, external in second.externals.items() if external.mutated}
        return cls(
            tuple(carries),
            frozenset(path for path in carries if _is_replaced(second.changes.rebindings[path], written)),
            frozenset(path for path, rebinding in second.changes.rebindings.items() if rebinding.moved),
            tuple(fresh),
            _find_together(first, second, (*carries, *fresh)),
        )

    @property
    def paths(self) -> tuple[str, ...]:
        """All of them."""
        return (*self.carries, *self.fresh)


def _is_replaced(rebinding: Rebinding, written: set[int]) -> bool:
    """Whether the step leaves the old tensors as they are, where ``written`` are the storages that it writes to."""
    kept = written.isdisjoint(place[0] for place in rebinding.before or ())
    return rebinding.plain and not rebinding.moved and kept


def _used(trace: Trace) -> set[int | None]:
    """Storages of what is used: by an operator, as what a slot is bound to, or as a result."""
    bound = {place[0] for rebinding in trace.changes.rebindings.values() for place in rebinding.after or ()}
    return bound | trace.externals.keys() | trace.output_storages


def _check_carry(rebinding: Rebinding) -> None:
    before, after = rebinding.before or (), rebinding.after or ()
    old, new = [(p[2], p[4]) for p in before], [(p[2], p[4]) for p in after]
    if old != new:
        raise CarryError(
            f"the step rebinds {rebinding.path} from {_shapes(old)} to {_shapes(new)}; a replay copies the new value "
            "into the old storage, so shape and dtype must stay. Give it its final shape before the first step, and "
            "cast the new value"
        )


def _shapes(specs: list[tuple[Any, Any]]) -> str:
    return ", ".join(f"{dtype} {list(shape)}" for shape, dtype in specs) or "no tensor"


def _find_together(first: Trace, second: Trace, paths: Iterable[str]) -> tuple[AliasedSlots, ...]:
    """Groups of rebound ``paths`` that overlap in memory after both steps alike, and where in that memory each lies."""
    before = {path: group for group in _groups(first, paths) for path in group}
    groups = (group for group in _groups(second, paths) if all(before.get(path) == group for path in group))
    return tuple(tuple(group.items()) for group in groups)


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
