"""The program: what a replay does, in order: copy in, launch, repeat Python effects, hand out results."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from operator import attrgetter
from sys import getrefcount
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from graphplan.backend import Recording
from graphplan.buffers import distinct
from graphplan.errors import ClosedError, GuardError
from graphplan.guards import Guards
from graphplan.owners import Slot, Walk, storage_id, tensor_leaves, walk_owners
from graphplan.plan import Plan
from graphplan.policy import Policy
from graphplan.program.bindings import Bindings
from graphplan.program.outputs import Outputs
from graphplan.program.statics import CopiedOwned
from graphplan.roles import Role, TensorSpec
from graphplan.signature import Feed, check_match, flatten, shared_leaf

_get_version = attrgetter("_version")
_OWN_REFERENCES = 3
"""A container, a local variable and the counting itself refer to a tensor that nobody else keeps."""
NO_CHECK = -1
"""No replay has this number."""


def _sharing(walk: Walk) -> Mapping[int | None, list[Slot]]:
    return {storage: slots for storage, slots in walk.by_storage().items() if len(slots) > 1}


class Program:
    """One recorded step. Made by :func:`graphplan.capture` and by :class:`graphplan.GraphedStep`."""

    def __init__(
        self,
        plan: Plan,
        policy: Policy,
        *,
        recording: Recording,
        inputs: Mapping[int, Tensor],
        copied: CopiedOwned,
        bindings: Bindings,
        outputs: Outputs,
        walk: Walk,
        feed: Feed,
    ) -> None:
        self.plan = plan
        # Without the leaves: a program must not keep a batch alive.
        self._rebuild = Feed([], feed.structure, feed.key).rebuild
        self.policy = policy
        self._recording: Recording | None = recording
        self._indices = list(inputs)
        self._statics = list(inputs.values())
        self._targets = [distinct(static.detach()) for static in self._statics]
        self._shared = {index for index, static in inputs.items() if distinct(static) is not static}
        mutated = {external.leaf for external in plan.inputs if external.mutated}
        self._write_back = [(index, static) for index, static in inputs.items() if index in mutated]
        self._wants_grad = [(index, static) for index, static in inputs.items() if static.grad is not None]
        self._copied = copied
        self._bindings = bindings
        self._outputs = outputs
        self._sources: dict[str, Tensor] = {}
        self._versions: list[int] = []
        self._adopt(walk, None)
        self.bytes_per_replay = sum(s.numel() * s.element_size() for s in self._statics)
        self.nbytes = recording.nbytes
        self.replays = 0
        self.next_check = NO_CHECK

    @property
    def state_bytes(self) -> int:
        """Bytes of all tensors that the owners hold."""
        tensors = {id(t): t for slot in self._walk.slots.values() for t in slot.tensors()}
        return sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())

    def _adopt(self, walk: Walk, values: list[Any] | None) -> None:
        """Take the owners' tensors as they lie now for this program's fixed storage."""
        self._walk = walk
        paths = {e.path for e in self.plan.externals if e.path is not None}
        adopted = [walk.slots[path] for path in sorted(paths - self._copied.paths) if path in walk.slots]
        # Tied weights have several names, of which a plan lists one: the others must go on holding the same tensor.
        same = {id(slot.get()) for slot in adopted}
        named = {slot.path for slot in adopted} | self._copied.paths
        twins = [s for s in walk.slots.values() if s.is_parameter and s.path not in named and id(s.get()) in same]
        self._slots = adopted + twins
        self._held = {slot.path: slot.get() for slot in self._slots}
        self._aliases = {slot.path: [t.detach() for t in slot.tensors()] for slot in self._slots}
        unowned = [e.tensor for e in self.plan.externals if e.path is None and e.tensor is not None]
        self.guards = Guards(self._slots, walk, self.plan, unowned, values)

    def takes(self, feed: Feed) -> bool:
        """Whether static copies can stand for the feed's tensors: not where the step writes to one that another one
        shares memory with.
        """
        return not self._write_back or shared_leaf(feed, [index for index, _ in self._write_back]) is None

    def load(self, leaves: Sequence[Any]) -> None:
        """Copy the feed's tensors into the static inputs, in one call."""
        sources = [leaves[index] for index in self._indices]
        if self._shared:
            pairs = zip(sources, self._indices, strict=True)
            sources = [distinct(source) if index in self._shared else source for source, index in pairs]
        with torch.no_grad():
            if len(sources) == 1:
                self._targets[0].copy_(sources[0], non_blocking=True)
            elif sources:
                torch._foreach_copy_(self._targets, sources, non_blocking=True)

    def run(self, leaves: Sequence[Any], given: Mapping[Role, Mapping[str, Tensor]] | None = None) -> Any:
        """Copy in, launch, repeat effects, return results. Guards are the caller's affair.

        Raises:
            ClosedError: after :meth:`close`.
        """
        if self._recording is None:
            raise ClosedError(f"the program of {self.plan.name} was closed; capture it again")
        back = self._copied.load(given or {}) if self._copied.externals or given else ()
        self.plan.rates.push()
        self._bindings.settle_grads()
        if self._sources and list(map(_get_version, self._sources.values())) != self._versions:
            self._follow_sources()
        self.load(leaves)
        self._recording.replay()
        self._bindings.repeat()
        for static, source in back:
            with torch.no_grad():
                source.copy_(static)
        return self.collect(leaves)

    def run_eagerly(self, leaves: Sequence[Any]) -> Any:
        """:meth:`run` with the step itself in place of the recording: same copies in and out, no replay."""
        self._bindings.settle_grads()
        self.load(leaves)
        statics = dict(zip(self._indices, self._statics, strict=True))
        stands_for = {id(static): leaves[index] for index, static in statics.items()}
        args, kwargs = self._rebuild([statics.get(index, leaf) for index, leaf in enumerate(leaves)])
        result = self.plan.function()(*args, **kwargs)
        self._give_back(leaves)
        return pytree.tree_map_only(Tensor, lambda tensor: stands_for.get(id(tensor), tensor.detach()), result)

    def run_recorded(self, leaves: Sequence[Any], *, executed: bool) -> Any:
        """Finish the call that was recorded: execute it unless recording did, and hand out its results."""
        assert self._recording is not None
        if not executed:
            self._recording.replay()
        self._copied.give_back()
        self._bindings.replace_recorded()
        return self.collect(leaves)

    def collect(self, leaves: Sequence[Any]) -> Any:
        """Results of the last run, with mutated inputs and input gradients given to the caller's tensors."""
        self._give_back(leaves)
        with torch.no_grad():
            return self._outputs.build(leaves, self._walk)

    def _give_back(self, leaves: Sequence[Any]) -> None:
        with torch.no_grad():
            for index, static in self._write_back:
                leaves[index].copy_(static)
            for index, static in self._wants_grad:
                assert static.grad is not None
                leaves[index].grad = static.grad.detach().clone()

    def replay(
        self,
        args: tuple[Any, ...],
        *,
        params: Mapping[str, Tensor] | None = None,
        state: Mapping[str, Tensor] | None = None,
    ) -> Any:
        """Run the recorded step on new inputs.

        Args:
            args: positional arguments with the planned structure, shapes, dtypes and devices.
            params: values for all parameters by name (a ``state_dict``), where the policy copies that role; without it
                the owners' own values are copied.
            state: likewise for state. State that the step changes is written back to the given tensors.

        Raises:
            FeedError: if something does not fit.
            GuardError: if a tensor that the program adopted is no longer where it was.
            ClosedError: after :meth:`close`.
        """
        feed = flatten(args, {})
        check_match(feed, self.plan.feed)
        if not self.guards.hold():
            reason = self.resync()
            if reason is not None:
                raise GuardError(f"the program of {self.plan.name} no longer fits: {reason}; capture it again")
        return self.run(feed.leaves, {Role.PARAM: params or {}, Role.STATE: state or {}})

    def resync(self) -> str | None:
        """Follow tensors that moved: copy new values into the fixed storage and bind it back.

        Returns:
            None if the program fits again, else why it cannot.
        """
        walk = walk_owners(self.plan.owners())
        changed = self.guards.changed_value(walk)
        if changed is not None:
            return f"the step's code reads {changed}"
        structure = self.guards.changed_structure()
        if structure is not None:
            return structure
        moved: list[tuple[str, Slot]] = []
        sharing = _sharing(walk)
        for path, held in self._held.items():
            slot = walk.slots.get(path)
            if slot is None:
                return f"{path} is gone"
            if self._has_moved(path, held, slot):
                reason = self._misfit(path, held, slot) or self._joined(path, slot, sharing)
                if reason is not None:
                    return reason
                moved.append((path, slot))
        for path, parameter in walk.parameters.values():
            if self.plan.entry_grads.get(path) == "none" and parameter.grad is not None:
                return f"{path}.grad is set, and was not when the step was captured"
        self._note_sources(moved)
        self._copy_in(moved)
        walk = walk_owners(self.plan.owners())
        self.plan.rates.attach(walk.optimizers.values())
        self._copied.follow(walk)
        self._bindings.follow(walk)
        self._adopt(walk, self.guards.values)
        return None if self.guards.hold() else "a tensor that nobody owns has moved"

    def _has_moved(self, path: str, held: Any, slot: Slot) -> bool:
        now = slot.get()
        pairs = zip(self._aliases[path], tensor_leaves(now), strict=False)
        return now is not held or any(a.data_ptr() != b.data_ptr() or a.stride() != b.stride() for a, b in pairs)

    def _misfit(self, path: str, held: Any, slot: Slot) -> str | None:
        """Why the slot's new tensors cannot be copied to where the old ones lie."""
        statics, current = self._aliases[path], slot.tensors()
        if slot.is_parameter and slot.get() is not held:
            return f"parameter {path} was replaced by another object"
        if len(statics) != len(current):
            return f"{path} holds {len(current)} tensors, expected {len(statics)}"
        for static, tensor in zip(statics, current, strict=True):
            if not TensorSpec.of(static).fits(TensorSpec.of(tensor)) or static.stride() != tensor.stride():
                return (
                    f"{path} is {TensorSpec.of(tensor)} with strides {tensor.stride()}, expected "
                    f"{TensorSpec.of(static)} "
                    f"with {static.stride()}"
                )
        return None

    def _note_sources(self, moved: list[tuple[str, Slot]]) -> None:
        """Remember what was put in place by somebody who still has it: later writes to it are meant for the step."""
        ours = set(map(id, self._held.values()))
        for path, slot in moved:
            self._sources.pop(path, None)
            now = slot.get()
            new = isinstance(now, Tensor) and id(now) not in ours and not now.is_inference()
            if new and getrefcount(now) > _OWN_REFERENCES:
                self._sources[path] = now
        self._versions = [source._version for source in self._sources.values()]

    def _follow_sources(self) -> None:
        """Copy what was written to such a tensor since."""
        self._versions = [source._version for source in self._sources.values()]
        with torch.no_grad():
            for path, source in self._sources.items():
                self._aliases[path][0].copy_(source)

    def _joined(self, path: str, slot: Slot, sharing: Mapping[int | None, list[Slot]]) -> str | None:
        """Why the slot's new memory must stay what it is: another tensor, which lay elsewhere, lies there too."""
        now = slot.get()
        own = {storage_id(alias) for alias in self._aliases[path]}
        for tensor in slot.tensors():
            for other in sharing.get(storage_id(tensor), ()):
                apart = own.isdisjoint(storage_id(alias) for alias in self._aliases.get(other.path, ()))
                if other.get() is not now and apart:
                    return f"{path} shares memory with {other.path} now"
        return None

    def _copy_in(self, moved: list[tuple[str, Slot]]) -> None:
        """Copy what moved into the fixed storage and bind it back: values first, since two slots may have swapped."""
        with torch.no_grad():
            values = [[tensor.detach().clone() for tensor in slot.tensors()] for _, slot in moved]
            for (path, _), new in zip(moved, values, strict=True):
                for static, value in zip(self._aliases[path], new, strict=True):
                    static.copy_(value)
        for path, slot in moved:
            held, now = self._held[path], slot.get()
            if now is held:
                for static, tensor in zip(self._aliases[path], slot.tensors(), strict=True):
                    tensor.data = static
            else:
                slot.set(held)

    def close(self) -> None:
        """Give the recording's memory back."""
        if self._recording is not None:
            self._recording.reset()
            self._recording = None
