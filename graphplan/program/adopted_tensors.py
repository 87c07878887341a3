"""The owners' tensors that a program adopts as its fixed storage: which, at which address, and who else uses them.
If an owner rebinds a slot, the new values are copied into the recorded memory, and the new tensor gets that memory.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from itertools import chain
from typing import Any
from weakref import WeakSet

import torch
from torch import Tensor

from graphplan.compare.comparing import facts_of
from graphplan.compare.tensors import geometry
from graphplan.owners.slots import Item, Slot, Walk, holds_plain, item_by_attribute, tensor_leaves
from graphplan.plan.plan import Plan
from graphplan.program.guards import Guards, Place
from graphplan.specs.paths import Path
from graphplan.specs.roles import TensorSpec
from graphplan.tensors.attributes import has_memory
from graphplan.tensors.dtensors import is_sharded, local
from graphplan.tensors.storages import lay, memory_uses, place_of, places, storage_id, with_leaves
from graphplan.trace.changes import same_value

Gradients = tuple[list[Tensor], list[Tensor], list[Tensor], Any]
"""Parameters, the gradients that a recording reads, detached aliases of these, and their geometry."""
_LIVE: WeakSet[AdoptedTensors] = WeakSet()
"""The adopted tensors of all open programs."""


def _geometries(held: Any) -> list[tuple[Any, ...]]:
    return list(map(geometry, tensor_leaves(held)))


def _others(held: Any) -> tuple[Any, ...]:
    """Return the items of a tuple that are no tensors."""
    items = held if isinstance(held, tuple) else ()
    return tuple(_others(item) if isinstance(item, tuple) else item for item in items if not isinstance(item, Tensor))


class AdoptedTensors:
    """The tensors that one program adopted; ``guards`` compare their places. ``copied`` are paths for which the program
    has buffers, ``values`` the Python values that the step read, as they were before it, and ``entry_grads`` the
    gradients that it accumulates into, by the parameter's path.
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
        self._moving: set[str] = set()
        self.uses: dict[int, int] = {}
        self._gradients: Gradients | None = None
        self.put_back: list[Place] = []
        """What :meth:`renew` has replaced, until the replay has run."""
        self.guards = self._guard(walk, values)
        self._places = {path: places(aliases) for path, aliases in self._aliases.items()}
        self._unowned_facts = self._facts_of_unowned()

    def take(self, walk: Walk) -> None:
        """Adopt the owners' tensors at their current places; keep the Python values of the capture."""
        for path in self._plan.reads.values:
            before, now = self.walk.scalars.get(path), walk.scalars.get(path)
            if before is not None and now is not None and before.container is not now.container:
                # A scheduler makes a new list in each step: guards look it up, instead of a walk for each list.
                self._moving |= {path} if isinstance(item_by_attribute(now), Item) else set()
        self.guards = self._guard(walk, self.guards.values, self.guards if walk is self.walk else None)

    def _guard(self, walk: Walk, values: Mapping[str, Any], like: Guards | None = None) -> Guards:
        self.walk = walk
        """The owners when their tensors were adopted."""
        self._gradients = None
        paths = {e.path for e in self._plan.externals if e.path is not None}
        adopted = [walk.slots[path] for path in sorted(paths - self._copied) if path in walk.slots]
        named = {slot.path for slot in adopted} | self._copied
        slots = [*adopted, *self._twins(walk, {id(slot.get()) for slot in adopted}, named)]
        self._slots = {slot.path: slot for slot in slots}
        # Take gradients as they were before the step, which may have replaced them.
        self._held = {slot.path: self._entry_grads.get(slot.path, slot.get()) for slot in slots}
        self._aliases = {path: [tensor.detach() for tensor in tensor_leaves(held)] for path, held in self._held.items()}
        held_alone = (path for path, slot in self._slots.items() if not (slot.is_parameter or slot.param is not None))
        self._by_storage = {storage_id(alias): path for path in held_alone for alias in self._aliases[path]}
        self._geometries = {path: _geometries(held) for path, held in self._held.items()}
        self._plain = [
            (held, self._aliases[path][0], geometry(held), self._aliases[path][0].data_ptr())
            for path, held in self._held.items()
            if isinstance(held, Tensor) and not is_sharded(held) and has_memory(held)
            if self._slots[path].param is None and path not in self._replaced
        ]
        changed = {e.path for e in self._plan.externals if e.mutated}
        self.written = {storage_id(t) for path in self._held.keys() & changed for t in self._aliases[path]}
        self.written |= {storage_id(tensor) for tensor in self._plan.changed_tensors(walk)}
        unowned = [tensor for _, tensor in self._unowned]
        grads = self._entry_grads
        return Guards(slots, walk, self._plan, unowned, values, entry_grads=grads, moving=self._moving, like=like)

    def _twins(self, walk: Walk, held: Collection[int], named: Collection[str]) -> list[Slot]:
        """Return further slots of the adopted tensors: a plan lists only one of several names."""
        others = [slot for path, slot in walk.slots.items() if path not in named]
        return [s for s in others if s.path in self._plan.twins or (s.is_parameter and id(s.get()) in held)]

    def count_uses(self, before: Mapping[int, int]) -> None:
        """Count this program's own uses of the adopted memory, beyond the counts ``before`` the recording."""
        now = memory_uses(alias for aliases in self._aliases.values() for alias in aliases)
        self.uses = {storage: count - before.get(storage, count) for storage, count in now.items()}
        _LIVE.add(self)

    def take_gradients(self) -> bool:
        """Copy gradients of an eager backward pass to the recorded ones. Return False if none is new or one misfits."""
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
        """Describe the first adopted tensor that is no longer at the address that the recording uses."""
        for path, aliases in self._aliases.items():
            if places(aliases) != self._places[path]:
                # An alias shares the storage, whose address only `storage.resize_` changes.
                return f"the memory of {path} was freed (untyped_storage().resize_)"
        for (external, _), fact, now in zip(self._unowned, self._unowned_facts, self._facts_of_unowned(), strict=True):
            if now != fact:
                what = f"{external.name}, which no owner holds, got other memory or another shape"
                return f"{what} ({external.where})"
        return None

    def _facts_of_unowned(self) -> list[Any]:
        tensors = [tensor for _, tensor in self._unowned]
        return list(zip(places(tensors), map(geometry, tensors), strict=True))

    def _lies_where_it_did(self, path: str, held: Any, slot: Slot) -> bool:
        """Return True if a slot's tensors have the memory, geometry and classes that they had at capture."""
        kinds = list(map(type, tensor_leaves(held)))
        known = list(map(place_of, self._aliases[path])), kinds, self._geometries[path]
        now = slot.tensors()
        return (list(map(place_of, now)), list(map(type, now)), _geometries(slot.get())) == known

    def _left(self, paths: Iterable[str]) -> dict[str, list[Any]]:
        """Return, by path, values that any open program found in slots and that lie where this one reads the path."""
        by_places: dict[tuple[int, ...], list[Any]] = {}
        needed = {path: tuple(self._places[path]) for path in paths}
        held = {id(held): held for adopted in _LIVE for held in adopted._held.values()} if needed else {}
        for one in held.values():
            by_places.setdefault(tuple(places(tensor_leaves(one))), []).append(one)
        return {path: by_places.get(where, []) for path, where in needed.items()}

    def renew(self) -> bool:
        """Put the program's objects back in the place of others that the step would replace by new ones, unread: the
        replay that comes next writes to these. Return True if there were any.
        """
        places = [(holder, key, holder.get(key), child) for holder, key, child in self.guards.renewed]
        if any(type(now) is not type(child) for *_, now, child in places):
            return False
        moved = [(holder, key, now) for holder, key, now, child in places if now is not child]
        for holder, key, _, child in places:
            holder[key] = child
        self.put_back = moved or self.put_back
        return bool(moved)

    def undo_renewal(self) -> None:
        """Undo :meth:`renew`, since the step runs eagerly instead of the replay."""
        for holder, key, value in self.put_back:
            holder[key] = value
        self.put_back = []

    def follow_tensors(self) -> bool:
        """:meth:`follow` without a walk, if only tensors have moved. Return True if that was possible."""
        if not self.guards.structure_holds():
            return False
        if self._follow_data():
            return True
        if self.follow(self.walk) is not None:
            return False
        # Tensors that only got other memory (``tensor.data = ...``) are back in place; others need new guards.
        if not self.guards.hold():
            self.take(self.walk)
        return True

    def _follow_data(self) -> bool:
        """:meth:`follow` for tensors that only got other memory (``tensor.data = ...``), if nothing else uses the new
        or the old memory. Return True if the guards hold afterwards.
        """
        moved = [each for each in self._plain if each[0].data_ptr() != each[-1]]
        # The recorded memory may have been freed (``untyped_storage().resize_``).
        if not moved or any(alias.data_ptr() != place for _, alias, _, place in moved):
            return False
        if any(geometry(t) != known or t.device != alias.device for t, alias, known, _ in moved):
            return False
        new, old = [tensor for tensor, *_ in moved], [alias for _, alias, *_ in moved]
        if any(count > 1 for count in memory_uses(new).values()) or any(others_uses(old).values()):
            return False
        with torch.no_grad():
            torch._foreach_copy_(old, [tensor.detach() for tensor in new])
        lay(new, old)
        return self.guards.hold()

    def follow(self, walk: Walk) -> str | None:
        """Copy tensors that moved into the memory that the program reads, and give them that memory. ``walk`` is of
        now. Return None if that was possible, else the reason why not.
        """
        changed = self._plan.reads.changed(walk, self.guards.values)
        if changed is not None:
            return f"{changed}, and the step's code reads it"
        gone = self.guards.changed_structure() or self._lost_memory()
        if gone is not None:
            return gone
        moved: list[tuple[str, Slot]] = []
        sharing = walk.by_storage()
        for path, held in self._held.items():
            slot = walk.slots.get(path)
            if slot is None:
                return f"{path} held a tensor at capture, and does not now"
            lies_there = self._lies_where_it_did(path, held, slot)
            if lies_there and slot.get() is held:
                continue
            reason = self._misfit(path, held, slot)
            is_view = lies_there and slot.param is None and not self._is_replaced(path, slot)
            reason = reason or (None if is_view else self._joined(path, slot, sharing))
            if reason is not None:
                return reason
            if not is_view:
                moved.append((path, slot))
        reason = self._plan.rebindings.parted(walk) or self._parted(walk) or self._shared(moved, walk)
        if reason is not None:
            return reason
        for path, parameter in walk.parameters.values():
            if self._plan.entry_grads.get(path) == "none" and parameter.grad is not None:
                return f"{path}.grad is set, and was not when the step was captured"
        kept = self._kept(moved)
        if kept is not None:
            return kept
        self._copy_in(moved)
        return None

    def _misfit(self, path: str, held: Any, slot: Slot) -> str | None:
        """Return the reason why the slot's new tensors cannot be copied into the old memory; None if they can."""
        statics, current = self._aliases[path], slot.tensors()
        if slot.is_parameter and slot.get() is not held:
            return f"parameter {path} was replaced by another object"
        if slot.is_parameter and is_sharded(held):
            # FSDP2 keeps its own view of the shard, which would not move.
            return f"the shard of {path} has another address"
        if len(statics) != len(current):
            return f"{path} holds {len(current)} tensors, expected {len(statics)}"
        for static, tensor in zip(statics, current, strict=True):
            if not TensorSpec.of(static).fits(TensorSpec.of(tensor)) or static.stride() != tensor.stride():
                return (
                    f"{path} is {TensorSpec.of(tensor)} with strides {tensor.stride()}, expected "
                    f"{TensorSpec.of(static)} with {static.stride()}"
                )
        if not same_value(_others(held), _others(slot.get())):
            return f"{path} holds other values beside its tensors"
        if path in self._replaced and not holds_plain(slot.get()):
            return f"{path} holds a tensor that has attributes of its own"
        if [facts[-1] for facts in _geometries(slot.get())] != [facts[-1] for facts in self._geometries[path]]:
            return f"requires_grad of {path} changed"
        return None

    def _joined(self, path: str, slot: Slot, sharing: Mapping[int, list[Slot]]) -> str | None:
        """Describe another slot that shares the slot's new memory and did not share the old one."""
        is_replaced = self._is_replaced(path, slot)
        own = {storage_id(alias) for alias in self._aliases[path]}
        for tensor in slot.tensors():
            for other in sharing.get(storage_id(tensor) or 0, ()):
                known = self._aliases.get(other.path)
                if known is None:
                    apart = not is_replaced and other.get() is not slot.get()
                else:
                    apart = own.isdisjoint(map(storage_id, known))
                    apart &= not (is_replaced and self._plan.may_share_memory(path, other.path))
                if apart:
                    return f"{path} shares memory with {other.path} now"
        return None

    def _parted(self, walk: Walk) -> str | None:
        """Describe two slots that shared memory and now do not, or at other offsets."""
        firsts: dict[int | None, tuple[str, Any]] = {}
        for path, aliases in self._aliases.items():
            slot = walk.slots[path]
            for alias, tensor in zip(aliases, slot.tensors(), strict=False) if slot.param is None else ():
                moved = (storage_id(tensor), local(tensor).data_ptr() - alias.data_ptr())
                other, how = firsts.setdefault(storage_id(alias), (path, moved))
                if how != moved:
                    return f"{other} and {path} shared memory, and do not in the same way now"
        return None

    def _is_replaced(self, path: str, slot: Slot) -> bool:
        """Return True if the slot holds plain tensors that a step replaces: others with equal values are as good."""
        return holds_plain(slot.get()) and self._has_replaced(path)

    def _has_replaced(self, path: str) -> bool:
        """Return True if replays write to this program's memory for ``path`` where eager steps bind a new tensor: its
        own replays, or those of another program whose step replaces the tensor that this one only reads.
        """
        if path in self._replaced:
            return True
        if not self.written.isdisjoint(map(storage_id, self._aliases[path])):
            return False
        others = (one._slots[other] for one in _LIVE for other in one._replaced if other in one._slots)
        return _place(self._slots[path]) in map(_place, others)

    def has_replaced(self, tensor: Tensor) -> bool:
        """Return True if ``tensor`` lies in memory that replays overwrite where eager steps bind a new tensor."""
        path = self._by_storage.get(storage_id(tensor))
        return path is not None and self._has_replaced(path)

    def _kept(self, moved: list[tuple[str, Slot]]) -> str | None:
        """Describe another user of the old tensors or their memory, which nothing can be copied into then."""
        # Not for gradients: those kept elsewhere get their own memory before a replay. Nor for tensors that the step
        # replaces: they lie in the program's memory.
        replaced = {path for path, slot in moved if path in self._replaced and holds_plain(slot.get())}
        slots = {path: slot for path, slot in moved if slot.param is None and path not in replaced}
        left = self._left(path for path, slot in slots.items() if slot.get() is not self._held[path])
        staying = {id(held): path for path, held in self._held.items() if path not in slots}
        known = [leaf for held in chain.from_iterable(left.values()) for leaf in tensor_leaves(held)]
        known += [leaf for slot in slots.values() for leaf in slot.tensors()]
        own = Counter(storage_id(leaf) for leaf in {id(leaf): leaf for leaf in known}.values())
        for path in slots:
            still = next((staying[id(held)] for held in left.get(path, ()) if id(held) in staying), None)
            if still is not None:
                return f"{path} was replaced, but {still}, which shared its memory, was not"
            if any(count > own[storage] for storage, count in others_uses(self._aliases[path]).items()):
                is_new = slots[path].get() is not self._held[path]
                how = "was replaced by a new tensor (a metric's reset() does that)" if is_new else "lies elsewhere"
                return f"{path} {how}, but something else still uses its old memory"
        return None

    def _shared(self, moved: list[tuple[str, Slot]], walk: Walk) -> str | None:
        """Describe a new tensor whose memory something else uses, too, so that it cannot get the program's memory.
        Tensors in dictionaries that owners have dropped do not count: only the old walk keeps these alive.
        """
        slots = [(path, slot) for path, slot in moved if slot.param is None and not self._is_replaced(path, slot)]
        there = set(map(id, walk.containers))
        gone = [items for items in self.walk.containers if id(items) not in there and isinstance(items, dict)]
        leaves = [leaf for _, slot in slots for leaf in slot.tensors()]
        leaves += [leaf for items in gone for leaf in tensor_leaves(tuple(dict.values(items)))]
        new = Counter(storage_id(leaf) for leaf in {id(leaf): leaf for leaf in leaves}.values())
        for path, slot in slots:
            if any(count > new[storage] for storage, count in others_uses(slot.tensors()).items()):
                return f"{path} got memory that something else uses, too"
        return None

    def _copy_in(self, moved: list[tuple[str, Slot]]) -> None:
        """Copy moved tensors into the fixed storage, and give them that memory. The old tensors get other memory, since
        code may have kept them. Slots that the step replaces get a tensor of the program.
        """
        # Clone all values first, since two slots may have swapped their tensors.
        with torch.no_grad():
            values = [[tensor.detach().clone() for tensor in slot.tensors()] for _, slot in moved]
            olds = [[alias.clone() for alias in self._aliases[path]] for path, _ in moved]
            for (path, _), value_of in zip(moved, values, strict=True):
                for static, value in zip(self._aliases[path], value_of, strict=True):
                    static.copy_(value)
        fresh = {id(leaf) for _, slot in moved for leaf in slot.tensors()}
        left = self._left(path for path, slot in moved if slot.param is None and slot.get() is not self._held[path])
        for (path, slot), old in zip(moved, olds, strict=True):
            held, now, aliases = self._held[path], slot.get(), self._aliases[path]
            is_replaced = self._is_replaced(path, slot)
            if now is held:
                lay(slot.tensors(), aliases)
                continue
            if slot.param is not None or (not is_replaced and any(t.is_inference() for t in slot.tensors())):
                slot.set(held)
                continue
            for leaves in map(tensor_leaves, left[path]):
                if fresh.isdisjoint(map(id, leaves)) and places(leaves) == self._places[path]:
                    lay(leaves, old)
            if not is_replaced:
                lay(slot.tensors(), aliases)
            elif places(slot.tensors()) != self._places[path]:
                slot.set(with_leaves(now, [alias.detach() for alias in aliases]))
        slots = dict(moved)
        for path, partner in self._plan.rebindings.partners.items():
            if path in slots and partner in slots:
                slots[path].set(slots[partner].get())


def others_uses(tensors: Iterable[Tensor]) -> dict[int, int]:
    """Return, by storage, how many tensors outside of programs use the memory behind each of ``tensors``."""
    return {s: count - sum(one.uses.get(s, 0) for one in _LIVE) for s, count in memory_uses(tensors).items()}


def _place(slot: Slot) -> tuple[int, Any]:
    return id(slot.container), slot.key


def is_overwritten(tensor: Tensor) -> bool:
    """Return True if replays write to the memory of ``tensor`` where eager steps bind a new tensor."""
    return any(one.has_replaced(tensor) for one in _LIVE)


def may_overwrite() -> bool:
    """Return True if :func:`is_overwritten` may hold for any tensor."""
    return any(one._replaced for one in _LIVE)


def own_tensors() -> set[int]:
    """Return the ids of values that programs have bound in slots that their steps replace."""
    held = (one._held.get(path) for one in _LIVE for path in one._replaced)
    return {id(value) for value in held if value is not None}
