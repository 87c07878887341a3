"""Following what a program adopted: values go to where the recording reads, and what was put there lies there."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from graphplan.owners.slots import Slot, Walk, holds_plain, tensor_leaves
from graphplan.program.adopted_tensors import AdoptedTensors, geometries, others_uses
from graphplan.specs.roles import TensorSpec
from graphplan.tensors.dtensors import is_sharded, local
from graphplan.tensors.storages import lay, places, storage_id, with_leaves
from graphplan.trace.changes import same_value


def _others(held: Any) -> tuple[Any, ...]:
    """What a tuple holds beside tensors."""
    items = held if isinstance(held, tuple) else ()
    return tuple(_others(item) if isinstance(item, tuple) else item for item in items if not isinstance(item, Tensor))


def _what_became_of(slot: Slot) -> str:
    """What was done to a slot in which there is no tensor any more."""
    if slot.param is not None:
        return "was there at capture and is None now"
    try:
        now = slot.container[slot.key]
    except (KeyError, IndexError):
        return "was there at capture and is gone"
    if isinstance(now, Tensor):
        # Nothing leads to its container any more.
        return "was there at capture and is gone"
    kind = "Parameter" if slot.is_parameter else "tensor"
    return f"was a {kind} at capture and is {'None' if now is None else f'a {type(now).__name__}'} now"


class AdoptedState(AdoptedTensors):
    """What one program adopted, and follows when it moves."""

    def follow_tensors(self) -> bool:
        """:meth:`follow`, where nothing but tensors has moved, which takes no walk; whether it was possible."""
        if not self.guards.structure_holds() or self.follow(self._walk) is not None:
            return False
        self.take(self._walk)
        return True

    def follow(self, walk: Walk) -> str | None:
        """Copy the values of tensors that moved to where the program reads them, and bind that back. ``walk`` leads to
        what the owners hold now.

        Returns:
            None if that was possible, else why not.
        """
        changed = self.guards.changed_value(walk)
        if changed is not None:
            return f"the step's code reads {changed}"
        gone = self.guards.changed_structure() or self._lost_memory()
        if gone is not None:
            return gone
        moved: list[tuple[str, Slot]] = []
        sharing = walk.by_storage()
        for path, held in self._held.items():
            slot = walk.slots.get(path)
            if slot is None:
                return f"{path} {_what_became_of(self._slots[path])}"
            if self._has_moved(path, held, slot):
                reason = self._misfit(path, held, slot) or self._joined(path, slot, sharing)
                if reason is not None:
                    return reason
                moved.append((path, slot))
        parted = self._parted(walk)
        if parted is not None:
            return parted
        for path, parameter in walk.parameters.values():
            if self._plan.entry_grads.get(path) == "none" and parameter.grad is not None:
                return f"{path}.grad is set, and was not when the step was captured"
        kept = self._kept(moved)
        if kept is not None:
            return kept
        self._copy_in(moved)
        return None

    def _misfit(self, path: str, held: Any, slot: Slot) -> str | None:
        """Why the slot's new tensors cannot be copied to where the old ones lie."""
        statics, current = self._aliases[path], slot.tensors()
        if slot.is_parameter and slot.get() is not held:
            return f"parameter {path} was replaced by another object"
        if slot.is_parameter and is_sharded(held):
            # FSDP2 has its own view of the shard, which would stay where it is.
            return f"the shard of {path} lies elsewhere"
        if len(statics) != len(current):
            return f"{path} holds {len(current)} tensors, expected {len(statics)}"
        for static, tensor in zip(statics, current, strict=True):
            if not TensorSpec.of(static).fits(TensorSpec.of(tensor)) or static.stride() != tensor.stride():
                return (
                    f"{path} is {TensorSpec.of(tensor)} with strides {tensor.stride()}, expected "
                    f"{TensorSpec.of(static)} "
                    f"with {static.stride()}"
                )
        if not same_value(_others(held), _others(slot.get())):
            return f"{path} holds other values beside its tensors"
        if path in self._replaced and not holds_plain(slot.get()):
            return f"{path} holds a tensor that has attributes of its own"
        if [facts[-1] for facts in geometries(slot.get())] != [facts[-1] for facts in self._geometries[path]]:
            return f"requires_grad of {path} changed"
        return None

    def _joined(self, path: str, slot: Slot, sharing: Mapping[int, list[Slot]]) -> str | None:
        """Why the slot's new memory must stay what it is: another slot, which lay elsewhere, lies there too."""
        is_replaced = self._is_replaced(path, slot)
        own = {storage_id(alias) for alias in self._aliases[path]}
        for tensor in slot.tensors():
            for other in sharing.get(storage_id(tensor) or 0, ()):
                known = self._aliases.get(other.path)
                if known is None:
                    apart = not is_replaced and other.get() is not slot.get()
                else:
                    apart = not self._plan.go_apart(path, other.path) and own.isdisjoint(map(storage_id, known))
                if apart:
                    return f"{path} shares memory with {other.path} now"
        return None

    def _parted(self, walk: Walk) -> str | None:
        """Two slots that lay in one memory, and do not lie in one in the same way now, described."""
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
        """Whether the step only reads what is in the slot, and puts other tensors there: others are as good to it."""
        return path in self._replaced and holds_plain(slot.get())

    def _kept(self, moved: list[tuple[str, Slot]]) -> str | None:
        """Why nothing can be copied to where old tensors lie: something else has that memory, or them."""
        # Gradients that are kept elsewhere get memory of their own before a replay; what steps replace is overwritten.
        slots = {path: slot for path, slot in moved if slot.param is None and not self._is_replaced(path, slot)}
        left = {path: self._held[path] for path, slot in slots.items() if slot.get() is not self._held[path]}
        staying = {id(held): path for path, held in self._held.items() if path not in slots}
        known = [leaf for path in left for held in self._left(path) for leaf in tensor_leaves(held)]
        known += [leaf for slot in slots.values() for leaf in slot.tensors()]
        own = Counter(storage_id(leaf) for leaf in {id(leaf): leaf for leaf in known}.values())
        for path in slots:
            still = next((staying[id(held)] for held in self._left(path) if id(held) in staying), None)
            if path in left and still is not None:
                return f"{path} was replaced, and {still}, which lay there too, is still what it was"
            if any(count > own[storage] for storage, count in others_uses(self._aliases[path]).items()):
                return f"{path} lies elsewhere, and something else has the memory where it was"
        return None

    def _copy_in(self, moved: list[tuple[str, Slot]]) -> None:
        """Copy what moved into the fixed storage, and have it lie there: values first, since two slots may have
        swapped. What was there before goes on with memory of its own, since other code may have kept it.
        """
        with torch.no_grad():
            values = [[tensor.detach().clone() for tensor in slot.tensors()] for _, slot in moved]
            olds = [[alias.clone() for alias in self._aliases[path]] for path, _ in moved]
            for (path, _), value_of in zip(moved, values, strict=True):
                for static, value in zip(self._aliases[path], value_of, strict=True):
                    static.copy_(value)
        fresh = {id(leaf): leaf for _, slot in moved for leaf in slot.tensors()}
        new = Counter(map(storage_id, fresh.values()))
        shared = {path for path, slot in moved if any(n > new[s] for s, n in others_uses(slot.tensors()).items())}
        places_of: dict[int, set[int]] = {}
        for path, slot in moved:
            for leaf, place in zip(slot.tensors(), self._places[path], strict=True):
                places_of.setdefault(id(leaf), set()).add(place)
        for (path, slot), old in zip(moved, olds, strict=True):
            held, now = self._held[path], slot.get()
            is_replaced = self._is_replaced(path, slot)
            if now is held:
                lay(slot.tensors(), self._aliases[path])
            elif slot.param is not None or (not is_replaced and any(t.is_inference() for t in slot.tensors())):
                slot.set(held)
            else:
                for leaves in map(tensor_leaves, self._left(path)):
                    if not any(id(leaf) in fresh for leaf in leaves):
                        lay(leaves, old)
                self._sources.pop(path, None)
                # One tensor cannot lie in two places.
                in_two = any(len(places_of[id(leaf)]) > 1 for leaf in slot.tensors())
                if is_replaced or in_two or self._is_home(slot):
                    self._stand_in(path, slot)
                else:
                    self._put_in(path, slot, shared=path in shared)
        self._versions = [source._version for source in self._sources.values()]

    def _is_home(self, slot: Slot) -> bool:
        """Whether what was put in the slot lies where replays write what a step puts elsewhere."""
        homes = {storage_id(alias) for path in self._replaced for alias in self._aliases.get(path, ())}
        return not homes.isdisjoint(map(storage_id, slot.tensors()))

    def _stand_in(self, path: str, slot: Slot) -> None:
        """Put tensors of the program's own in the slot: what was put there stays what it is."""
        if places(slot.tensors()) != self._places[path]:
            slot.set(with_leaves(slot.get(), [alias.detach() for alias in self._aliases[path]]))

    def _put_in(self, path: str, slot: Slot, *, shared: bool) -> None:
        """Have what was put in the slot lie in the fixed storage; if other tensors share its memory, a tensor in
        its place: later writes to that memory are meant for the step.
        """
        now = slot.get()
        if shared and isinstance(now, Tensor) and places(slot.tensors()) != self._places[path]:
            self._sources[path] = local(now)
            slot.set(self._aliases[path][0].detach())
        else:
            lay(slot.tensors(), self._aliases[path])
