"""The owners' tensors that a program takes for its fixed storage: which, where they lie, and who else has them."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from operator import attrgetter
from typing import Any
from weakref import WeakSet

import torch
from torch import Tensor

from graphplan.compare.comparing import facts_of
from graphplan.compare.tensors import geometry
from graphplan.guards.guards import Guards
from graphplan.owners.slots import Slot, Walk, tensor_leaves
from graphplan.plan.plan import Plan
from graphplan.specs.paths import Path
from graphplan.tensors.storages import memory_uses, places, storage_id

_get_version = attrgetter("_version")
Gradients = tuple[list[Tensor], list[Tensor], list[Tensor], Any]
"""Parameters, the gradients that a recording reads, those as plain tensors, and what they are like."""
_LIVE: WeakSet[AdoptedTensors] = WeakSet()
"""What open programs have adopted."""


def geometries(held: Any) -> list[tuple[Any, ...]]:
    """Shape, strides and the like of each tensor in ``held``."""
    return list(map(geometry, tensor_leaves(held)))


class AdoptedTensors:
    """What one program adopted. ``guards`` say whether it is still where it was.

    Args:
        plan: names the externals.
        copied: paths that buffers of the program stand for.
        walk: the owners as they are now.
        values: the Python values that the step read, by path, as they were before it.
        entry_grads: by parameter path, the gradients that the step expects and accumulates into.
    """

    def __init__(
        self,
        plan: Plan,
        copied: Collection[str],
        walk: Walk,
        values: Mapping[str, Any],
        entry_grads: Mapping[str, Tensor | None],
    ) -> None:
        self._plan = plan
        self._entry_grads: dict[str, Tensor | None] = {Path.gradient(path): grad for path, grad in entry_grads.items()}
        self._unowned = [(e, e.tensor) for e in plan.externals if e.path is None and e.tensor is not None]
        self._copied = set(copied)
        self._replaced = plan.rebindings.replaced.difference(copied)
        self._sources: dict[str, Tensor] = {}
        self._versions: list[int] = []
        self.uses: dict[int, int] = {}
        self._gradients: Gradients | None = None
        self.guards = self._guard(walk, values)
        self._places = {path: places(aliases) for path, aliases in self._aliases.items()}
        self._unowned_facts = self._facts_of_unowned()

    def take(self, walk: Walk) -> None:
        """Take the owners' tensors as they lie now; the Python values of the capture are still those that count."""
        self.guards = self._guard(walk, self.guards.values)

    def _guard(self, walk: Walk, values: Mapping[str, Any]) -> Guards:
        self._walk = walk
        self._gradients = None
        paths = {e.path for e in self._plan.externals if e.path is not None}
        adopted = [walk.slots[path] for path in sorted(paths - self._copied) if path in walk.slots]
        named = {slot.path for slot in adopted} | self._copied
        slots = [*adopted, *self._twins(walk, {id(slot.get()) for slot in adopted}, named)]
        self._slots = {slot.path: slot for slot in slots}
        # After the step, a gradient need not be what it was before it.
        self._held = {slot.path: self._entry_grads.get(slot.path, slot.get()) for slot in slots}
        self._aliases = {path: [tensor.detach() for tensor in tensor_leaves(held)] for path, held in self._held.items()}
        self._geometries = {path: geometries(held) for path, held in self._held.items()}
        changed = {e.path for e in self._plan.externals if e.mutated}
        self.written = {storage_id(t) for path in self._held.keys() & changed for t in self._aliases[path]}
        self.written |= {storage_id(tensor) for tensor in self._plan.changed_tensors(walk)}
        unowned = [tensor for _, tensor in self._unowned]
        return Guards(slots, walk, self._plan, unowned, values, entry_grads=self._entry_grads)

    def _twins(self, walk: Walk, held: Collection[int], named: Collection[str]) -> list[Slot]:
        """Other slots of what is held: a plan lists one of several names, and all must go on leading to it."""
        others = [slot for path, slot in walk.slots.items() if path not in named]
        return [s for s in others if s.path in self._plan.twins or (s.is_parameter and id(s.get()) in held)]

    def refresh(self) -> None:
        """Copy what was written since to tensors that were put in place of adopted ones, and are still used."""
        if not self._sources or list(map(_get_version, self._sources.values())) == self._versions:
            return
        self._versions = [source._version for source in self._sources.values()]
        with torch.no_grad():
            for path, source in self._sources.items():
                self._aliases[path][0].copy_(source)

    def count_uses(self, before: Mapping[int, int]) -> None:
        """Note how many references to the adopted memory are this program's: all that there are now beyond ``before``,
        as :func:`memory_uses` found them before the recording.
        """
        now = memory_uses(alias for aliases in self._aliases.values() for alias in aliases)
        self.uses = {storage: count - before.get(storage, count) for storage, count in now.items()}
        _LIVE.add(self)

    def take_gradients(self) -> bool:
        """Copy gradients that were made since the last replay to those that the recording reads, and bind these back:
        an eager backward pass makes new ones for each step. False if none is new, or one does not fit.
        """
        if self._gradients is None:
            self._gradients = self._find_gradients()
        params, held, aliases, facts = self._gradients
        now = [param.grad for param in params]
        moved = [number for number, (grad, known) in enumerate(zip(now, held, strict=True)) if grad is not known]
        own = set(map(storage_id, aliases)) if moved else set()
        given = [grad for grad in now if grad is not None]
        if not moved or len(given) < len(now) or not facts.fit(given):
            return False
        if any(storage_id(given[number]) in own for number in moved):
            return False
        with torch.no_grad():
            torch._foreach_copy_([aliases[number] for number in moved], [given[number] for number in moved])
        for number in moved:
            params[number].grad = held[number]
        return True

    def _find_gradients(self) -> Gradients:
        slots = [(slot.param, self._held[path]) for path, slot in self._slots.items() if slot.param is not None]
        pairs = [(param, grad) for param, grad in slots if param is not None and type(grad) is Tensor]
        held = [grad for _, grad in pairs]
        return [param for param, _ in pairs], held, [grad.detach() for grad in held], facts_of(held, placed=False)

    def _lost_memory(self) -> str | None:
        """What no longer lies where the recording reads and writes it, described: values cannot be copied there."""
        for path, aliases in self._aliases.items():
            if places(aliases) != self._places[path]:
                # An alias shares the storage, and only storage.resize_ changes where that lies.
                return f"the memory of {path} was given back (untyped_storage().resize_)"
        for (external, _), fact, now in zip(self._unowned, self._unowned_facts, self._facts_of_unowned(), strict=True):
            if now != fact:
                what = f"{external.name}, which no owner holds, was given other memory or another shape"
                return f"{what} ({external.where})"
        return None

    def _facts_of_unowned(self) -> list[Any]:
        tensors = [tensor for _, tensor in self._unowned]
        return list(zip(places(tensors), map(geometry, tensors), strict=True))

    def _has_moved(self, path: str, held: Any, slot: Slot) -> bool:
        now = slot.get()
        pairs = zip(self._aliases[path], tensor_leaves(now), strict=False)
        if now is not held or geometries(now) != self._geometries[path]:
            return True
        return any(alias.data_ptr() != tensor.data_ptr() for alias, tensor in pairs)

    def _left(self, path: str) -> list[Any]:
        """What programs have found in a slot, and what still lies where this one reads ``path``."""
        held = {id(held): held for adopted in _LIVE for held in adopted._held.values()}
        return [one for one in held.values() if places(tensor_leaves(one)) == self._places[path]]


def others_uses(tensors: Iterable[Tensor]) -> dict[int, int]:
    """How many tensors that are not the programs' have the memory behind each of ``tensors``, by storage."""
    return {s: count - sum(one.uses.get(s, 0) for one in _LIVE) for s, count in memory_uses(tensors).items()}


def own_tensors() -> set[int]:
    """Identities of what programs have bound where their steps replace what they find."""
    held = (one._held.get(path) for one in _LIVE for path in one._replaced)
    return {id(value) for value in held if value is not None}
