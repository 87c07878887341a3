"""What one step left changed in its owners: rebound slots, changed Python values, grown lists."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from graphplan.dtensors import local
from graphplan.owners import Numbers, Slot, Walk, storage_id, tensor_leaves, walk_owners

Place = tuple[int | None, int, tuple[int, ...], tuple[int, ...], torch.dtype]
"""Storage identity, offset, shape, strides, dtype: two tensors in one place are the same memory seen alike."""


def place_of(tensor: Tensor) -> Place:
    """Where ``tensor`` lies."""
    tensor = local(tensor)
    if tensor.layout is not torch.strided:
        return (None, id(tensor), tuple(tensor.shape), (), tensor.dtype)
    return (storage_id(tensor), int(tensor.storage_offset()), tuple(tensor.shape), tuple(tensor.stride()), tensor.dtype)


@dataclass(frozen=True, slots=True)
class Rebinding:
    """A slot that holds other memory after the step than before it. ``None`` places mean that it held no tensor."""

    path: str
    before: tuple[Place, ...] | None
    after: tuple[Place, ...] | None


@dataclass(slots=True)
class Changes:
    """Differences between an owner walk before a step and one after it."""

    rebindings: dict[str, Rebinding] = field(default_factory=dict)
    scalars: dict[str, tuple[Any, Any]] = field(default_factory=dict)
    appended: dict[str, list[Any]] = field(default_factory=dict)
    shrunk: dict[str, tuple[int, int]] = field(default_factory=dict)


class Recorder:
    """Notes what owners hold now, and what has changed when asked again.

    Only weak storage references are kept: a strong one would keep last step's gradients alive through the step.
    """

    def __init__(self, owners: Mapping[str, Any]) -> None:
        self._owners = owners
        self.walk = walk_owners(owners)
        self._weak: list[StorageWeakRef] = []
        self.places = {path: self._note(slot.tensors()) for path, slot in self.walk.slots.items()}
        self.scalars = {path: scalar.get() for path, scalar in self.walk.scalars.items()}
        self.objects = {path: scalar.get() for path, scalar in self.walk.objects.items()}
        self.lengths = {path: (items, len(items)) for path, items in self.walk.lists.items()}

    def _note(self, tensors: list[Tensor]) -> tuple[Place, ...]:
        for tensor in tensors:
            if storage_id(tensor) is not None:
                self._weak.append(StorageWeakRef(tensor.untyped_storage()))
        return tuple(place_of(tensor) for tensor in tensors)

    def entry_slots(self) -> dict[int, list[Slot]]:
        """Slots by the storage that they held when this recorder was made."""
        groups: dict[int, list[Slot]] = {}
        for path, places in self.places.items():
            for place in places:
                if place[0] is not None:
                    groups.setdefault(place[0], []).append(self.walk.slots[path])
        return groups

    def changes(self) -> tuple[Changes, Walk]:
        """What differs now, and the walk that found it."""
        now = walk_owners(self._owners)
        found = Changes()
        for path, items in now.lists.items():
            self._compare_list(found, path, items)
        grown = tuple(f"{path}[" for path in found.appended)
        for path in {**self.places, **dict.fromkeys(now.slots, ())}:
            before = self.places.get(path)
            slot = now.slots.get(path)
            after = tuple(place_of(t) for t in tensor_leaves(slot.get())) if slot else None
            if before != after and (before or after) and not (grown and path.startswith(grown)):
                found.rebindings[path] = Rebinding(path, before or None, after or None)
        for path, scalar in now.scalars.items():
            if isinstance(scalar.container, Numbers):
                continue
            value = scalar.get()
            old = self.scalars.get(path, _ABSENT)
            if not same_value(old, value) and not (grown and path.startswith(grown)):
                found.scalars[path] = (old, value)
        for path in self.scalars.keys() - now.scalars.keys() - found.rebindings.keys():
            found.scalars[path] = (self.scalars[path], _ABSENT)
        return found, now

    def _compare_list(self, found: Changes, path: str, items: list[Any]) -> None:
        old = self.lengths.get(path)
        if old is None or old[0] is not items or len(items) == old[1]:
            return
        if len(items) > old[1]:
            found.appended[path] = list(items[old[1] :])
        else:
            found.shrunk[path] = (old[1], len(items))


class _Absent:
    def __repr__(self) -> str:
        return "nothing"


_ABSENT = _Absent()


def same_value(first: Any, second: Any) -> bool:
    """Whether two Python values are interchangeable: same type, and equal (0.0 is not -0.0) or both NaN."""
    if first is second:
        return True
    if type(first) is not type(second) or isinstance(first, Tensor):
        return False
    if isinstance(first, tuple):
        return len(first) == len(second) and all(map(same_value, first, second))
    if isinstance(first, float) and first == 0.0 == second:
        return math.copysign(1.0, first) == math.copysign(1.0, second)
    try:
        return bool(first == second) or (first != first and second != second)
    except (TypeError, ValueError, RuntimeError):
        return False
