"""Changes that one step left in its owners: rebound slots, changed Python values, grown lists and deques."""

from __future__ import annotations

import math
import weakref
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from itertools import islice
from operator import is_
from types import FunctionType
from typing import Any

from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from graphplan.environment.origin import is_librarys
from graphplan.owners.flags import COMPUTED, Flags
from graphplan.owners.kinds import SCALARS
from graphplan.owners.slots import Items, Scalar, Walk, holds_plain, tensor_leaves
from graphplan.owners.tensor_metadata import ABSENT, EXISTS, difference, is_there, metadata_of
from graphplan.owners.walk import walk_owners
from graphplan.tensors.storages import MemoryView, place_of


@dataclass(frozen=True, slots=True)
class Rebinding:
    """A slot that holds other memory after the step than before it. ``None`` places mean that it held no tensor.

    ``plain``: other tensors with the same values could replace those that it held (:func:`holds_plain`). ``moved``: it
    holds the same tensors, to which the step gave other memory (``tensor.data = ...``). ``joined`` is the path of a
    tensor that shares memory with them before or after the step in a way that no replay repeats. ``follows`` is the
    path of a tensor to which the step gives the memory of the new tensor here (``p.data = state["old"]``). ``objects``
    are the ids of the slot's value before and after the step, to compare with other slots in the same step.
    """

    path: str
    before: tuple[MemoryView, ...] | None
    after: tuple[MemoryView, ...] | None
    moved: bool = False
    joined: str | None = None
    follows: str | None = None
    plain: bool = False
    objects: tuple[int, int] = (0, 0)


@dataclass(slots=True)
class Changes:
    """Differences between an owner walk before a step and one after. ``moved`` has the lengths before and after of
    lists and deques that lost items, or got some elsewhere than at the end. ``flags`` are those in a program's key.
    ``renewed`` are paths of values whose container is a new object in the place of another one.
    """

    rebindings: dict[str, Rebinding] = field(default_factory=dict)
    scalars: dict[str, tuple[Any, Any]] = field(default_factory=dict)
    appended: dict[str, list[Any]] = field(default_factory=dict)
    moved: dict[str, tuple[int, int]] = field(default_factory=dict)
    flags: dict[str, tuple[Any, Any]] = field(default_factory=dict)
    renewed: set[str] = field(default_factory=set)
    renewed_slots: set[str] = field(default_factory=set)
    """Paths of slots whose container is a new object in the place of another one."""


class Recorder:
    """A record of what owners hold now, as ``walk`` has just found it, to find later changes. ``fed`` are the fed
    tensors, by name. Storages in slots are held weakly, so that the last step's gradients can be freed.
    """

    def __init__(self, owners: Mapping[str, Any], walk: Walk, fed: Mapping[str, Tensor]) -> None:
        self._owners = owners
        self.walk = walk
        self._weak: list[StorageWeakRef] = []
        self.places: dict[str, tuple[MemoryView, ...]] = {}
        self.metadata: dict[str, Any] = {}
        self._held: dict[str, list[weakref.ref[Tensor]]] = {}
        self._plain: set[str] = set()
        self._objects: dict[str, int] = {}
        for path, slot in walk.slots.items():
            value = slot.get()
            tensors = tensor_leaves(value)
            self._objects[path] = id(value)
            self.places[path] = tuple(map(place_of, tensors))
            for tensor, place in zip(tensors, self.places[path], strict=True):
                if place[0] is not None:
                    self._weak.append(StorageWeakRef(tensor.untyped_storage()))
            self.metadata[path] = metadata_of(value)
            # Gradients are other tensors in each step, which may reuse the memory of earlier ones.
            if slot.param is None:
                self._held[path] = list(map(weakref.ref, tensors))
                if holds_plain(value):
                    self._plain.add(path)
        self.scalars = {path: scalar.get() for path, scalar in self.walk.scalars.items()}
        self.objects = {path: scalar.get() for path, scalar in self.walk.objects.items()}
        places = (*self.walk.scalars.values(), *self.walk.slots.values())
        self._containers = {id(place.container) for place in places}
        self.items = {path: (items, tuple(items)) for path, items in self.walk.lists.items()}
        self._flags = Flags(walk, fed)
        self._found = self._flags.read()

    def kept(self, now: Walk) -> Iterator[tuple[Tensor, str]]:
        """Yield the tensors that slots hold ``now`` and held before, and their paths; of a tuple, each item."""
        for path, slot in now.slots.items():
            value = slot.get() if slot.param is None and self._is_held(path, now) else None
            items = enumerate(value) if isinstance(value, tuple) else ()
            yield from ((item, f"{path}[{number}]") for number, item in items if isinstance(item, Tensor))
            if isinstance(value, Tensor):
                yield value, path

    def changes(self, used: Collection[int | None]) -> tuple[Changes, Walk]:
        """Return the changes, and the walk that found them. ``used`` are storages that the step read or returned."""
        now = walk_owners(self._owners)
        found = Changes(flags=self._changed_flags())
        slots = now.slots.keys() & self.walk.slots.keys()
        found.renewed_slots = {path for path in slots if self._is_new(now.slots[path])}
        for path, items in now.lists.items():
            self._compare_list(found, path, items, used)
        grown = tuple(f"{path}[" for path in found.appended)
        places = {path: tuple(map(place_of, slot.tensors())) for path, slot in now.slots.items()}
        moved: list[str] = []
        for path in {**self.places, **places}:
            before, after = self.places.get(path), places.get(path)
            if before != after and (before or after) and not path.startswith(grown):
                objects = self._objects.get(path, 0), id(now.slots[path].get()) if path in now.slots else 0
                found.rebindings[path] = Rebinding(
                    path, before or None, after or None, plain=path in self._plain, objects=objects
                )
                if self._is_held(path, now):
                    moved.append(path)
        if moved:
            self._note_moved(found, moved, places, now)
        for path, scalar in now.scalars.items():
            if not scalar.is_stored_here:
                continue
            known = self.walk.scalars.get(path)
            is_hidden = known is not None and not known.is_stored_here
            if self._is_new(scalar) and known is not None and not is_hidden:
                found.renewed.add(path)
            value = scalar.get()
            # A new attribute of an object hides the attribute of its class, whose value has not changed.
            old = ABSENT if is_hidden else self.scalars.get(path, EXISTS if path in self.places else ABSENT)
            if not same_value(old, value) and not path.startswith(grown):
                found.scalars[path] = (old, value)
        for path in self.scalars.keys() - now.scalars.keys() - found.rebindings.keys():
            if not path.startswith(grown):
                found.scalars[path] = (self.scalars[path], ABSENT)
        return found, now

    def _is_new(self, place: Scalar) -> bool:
        return isinstance(place.container, (dict, list)) and id(place.container) not in self._containers

    def _changed_flags(self) -> dict[str, tuple[Any, Any]]:
        """Return the changed flags, without tensors in parameter groups and numbers that an optimizer counts with."""
        now = self._flags.read()
        pairs = {path: (self._found.get(path, ABSENT), now.get(path, ABSENT)) for path in {**self._found, **now}}
        counted = self.walk.counted
        return {
            path: (EXISTS if isinstance(old, Tensor) else old, new)
            for path, (old, new) in pairs.items()
            if not (isinstance(new, Tensor) or new is COMPUTED or path in counted or same_value(old, new))
        }

    def _is_held(self, path: str, now: Walk) -> bool:
        held = self._held.get(path, [])
        tensors = now.slots[path].tensors() if path in now.slots else []
        return len(held) == len(tensors) > 0 and all(known() is t for known, t in zip(held, tensors, strict=True))

    def _note_moved(
        self, found: Changes, moved: list[str], places: Mapping[str, tuple[MemoryView, ...]], now: Walk
    ) -> None:
        """Mark rebindings at ``moved``: replays do not move tensors, so those that share memory must move together."""
        before, after = _sharing(self.places, moved), _sharing(places, moved)
        for path in moved:
            old, new = before[path], after[path]
            others = (old.keys() | new.keys()) - {path}
            if old == new:
                others -= set(moved)
            fresh = sorted(others.difference(moved))
            for other in fresh if len(fresh) == 1 else ():
                is_gradient = other in now.slots and now.slots[other].param is not None
                if not is_gradient and self._follows(other, path, found, places):
                    found.rebindings[other] = replace(found.rebindings[other], follows=path)
                    others.discard(other)
            joined = min(others, default=None)
            found.rebindings[path] = replace(found.rebindings[path], moved=True, joined=joined)

    def _follows(self, path: str, moved: str, found: Changes, places: Mapping[str, tuple[MemoryView, ...]]) -> bool:
        """Return True if ``path`` got the memory that ``moved`` has now, and before had all of its memory or none."""
        is_like_it = path in found.rebindings and places.get(path) == places[moved]
        storages = {place[0] for place in self.places[moved]}
        was_apart = storages.isdisjoint(place[0] for place in self.places.get(path, ()))
        return is_like_it and (was_apart or self.places[path] == self.places[moved])

    def _compare_list(self, found: Changes, path: str, items: Items, used: Collection[int | None]) -> None:
        held, old = self.items.get(path, (None, ()))
        if held is not items:
            return
        # A full deque moves each item when it drops some. If the step reads the items, this is more than an append.
        inner = (places for place, places in self.places.items() if place.startswith(f"{path}["))
        drops = getattr(items, "maxlen", None) is not None
        may_drop = drops and not any(place[0] in used for places in inner for place in places)
        new = _new_items(old, items, may_drop=may_drop)
        if new:
            found.appended[path] = new
        elif new is None and len(items) != len(old):
            found.moved[path] = (len(old), len(items))


def _sharing(
    places: Mapping[str, tuple[MemoryView, ...]], paths: Iterable[str]
) -> dict[str, dict[str, tuple[Any, ...]]]:
    """Return, for each of ``paths``, the paths in the same storages, itself included, with their places in these."""
    wanted = {place[0] for path in paths for place in places[path]} - {None}
    within: defaultdict[int | None, list[str]] = defaultdict(list)
    for path, there in places.items():
        for storage in {place[0] for place in there} & wanted:
            within[storage].append(path)
    others = {path: {other for place in places[path] for other in within[place[0]]} for path in paths}
    return {path: {other: tuple(p[1:] for p in places[other]) for other in found} for path, found in others.items()}


def _new_items(old: tuple[Any, ...], items: Items, *, may_drop: bool) -> list[Any] | None:
    """Return what was appended to ``items``, which held ``old``; None if anything else happened. A full deque drops as
    many items as it gets: assume the fewest that explain its contents. A rotated deque got no items.
    """
    now = list(items)
    is_full = len(now) == getattr(items, "maxlen", None)
    for dropped in range(len(old) + 1 if is_full and may_drop else 1):
        kept = len(old) - dropped
        if kept > len(now) or not all(map(is_, islice(old, dropped, None), now)):
            continue
        known = {id(item) for item in old if not isinstance(item, SCALARS)} if dropped else set()
        return None if any(id(item) in known for item in now[kept:]) else now[kept:]
    return None


def is_alike(known: Any, metadata: Any) -> bool:
    """Return True if the current ``metadata`` of a place equal those that are ``known``, as far as these matter."""
    return is_there(metadata) if known is EXISTS else same_value(known, metadata)


def told_apart(first: Any, second: Any, tell: Callable[[Any], str] = repr) -> tuple[str, str]:
    """Return texts of two values that are not the same. The texts always differ."""
    one, other = tell(first), tell(second)
    if one != other:
        return one, other
    if type(first) is not type(second):
        return f"{one} ({type(first).__name__})", f"{other} ({type(second).__name__})"
    return one, f"another one that reads {other}"


def told(path: str, old: Any, new: Any, when: str = "") -> str:
    """Describe a change at ``path``: the value, or a tensor's metadata, was ``old`` (``when``), and is ``new``."""
    what, was, now = difference(path, old, new)
    before = "was not set" if old is ABSENT else f"was {was}"
    return f"{what} {before}{when} and {is_now(new, now)}"


def is_now(value: Any, text: str = "") -> str:
    """Describe what a place holds now: by ``text``, or by the value's ``repr``."""
    return "is gone" if value is ABSENT else f"is {text or repr(value)}"


def same_value(first: Any, second: Any) -> bool:
    """Return True if two Python values are interchangeable: same type, and equal (0.0 is not -0.0) or both NaN. Return
    False for values whose comparison raises, or is the user's own code, which must not run here.
    """
    if first is second:
        return True
    if type(first) is not type(second) or isinstance(first, Tensor):
        return False
    if isinstance(first, tuple):
        ones, others = tuple.__iter__(first), tuple.__iter__(second)
        return tuple.__len__(first) == tuple.__len__(second) and all(map(same_value, ones, others))
    if type(first) is weakref.ref:
        # If each step makes the referent anew, both references are dead, and equal.
        return first() is second()
    if isinstance(first, float) and first == 0.0 == second:
        return math.copysign(1.0, first) == math.copysign(1.0, second)
    if isinstance(first, complex):
        return same_value((first.real, first.imag), (second.real, second.imag))
    if isinstance(type(first).__eq__, FunctionType) and not is_librarys(type(first)):
        return False
    try:
        return bool(first == second) or (first != first and second != second)
    except Exception:  # noqa: BLE001 - whatever the user's own comparison raises
        return False
