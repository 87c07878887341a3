"""Memory for programs and for the copies of checks: decide whether they fit into the budget and on the device."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from graphplan.backends.backend import Backend
from graphplan.environment.devices import free_bytes, is_accelerator
from graphplan.errors import MemoryBudgetError
from graphplan.feed.signature import Feed
from graphplan.owners.slots import Walk, is_optimizer_state
from graphplan.owners.snapshot import Snapshot
from graphplan.plan.plan import Plan
from graphplan.program.program import Program
from graphplan.step.entries import Entry
from graphplan.step.runner import StepContext
from graphplan.tensors.attributes import PLAIN_KINDS
from graphplan.tensors.storages import is_memory_shared

_COPIES = 3  # Copies alive at once: from before the step, after the replay, and after the eager step in a repetition.
_MARGIN = 1.2  # Factor that leaves memory for fragmentation and temporaries.
_GROUPS = 4  # A group of programs that share memory ends at 1/4 of the budget, since only whole groups can be evicted.


class MemoryBudget:
    """The memory of one step's programs, estimated from the traces before a capture."""

    def __init__(self, parts: StepContext) -> None:
        self._budget = parts.options.memory_budget
        self._programs, self._peers, self._refusals = parts.programs, parts.peers, parts.refusals
        self._warmed = 0  # Steps on the stream of captures so far.
        self._is_eager_known = False

    def begin(self, walk: Walk, backend: Backend, *, is_timed: bool) -> None:
        """Before the first step on the stream of captures, free what steps on the caller's stream have left unused: as
        much as a step takes, and of no use to another stream. If these were timed, they are the eager steps to compare
        with.
        """
        self._is_eager_known = is_timed
        backend.note_eager()
        self._compact(walk, backend)

    def after_warm_up(self, backend: Backend) -> None:
        """After an eager step on the stream of captures: note its memory, and free gradients of the steps before it."""
        self._warmed += 1
        if not self._is_eager_known:
            backend.note_eager()
        elif self._warmed == 1:
            backend.trim()

    def _compact(self, walk: Walk, backend: Backend) -> None:
        """Move gradients and optimizer state that lie scattered over the memory of eager steps."""
        slots = [slot for slot in walk.slots.values() if slot.param is not None or is_optimizer_state(slot.path)]
        # Gradients come last: the next step replaces them, which would leave gaps between the others.
        slots.sort(key=lambda slot: slot.param is not None)
        moved = [tensor for slot in slots for tensor in slot.tensors() if not is_memory_shared(tensor)]
        # Several ranks may communicate through the memory of gradients.
        backend.compact(moved if self._peers is None else [])

    def make(self, entry: Entry, plan: Plan, backend: Backend) -> MemoryBudgetError | None:
        """Make room for a program of ``plan``, on every rank or on none. Return the error if that is impossible."""
        error = self._find(entry, plan, backend)
        if self._peers is not None and self._budget is not None and plan.communicates:
            all_can = self._peers.vote(f"memory {self._programs.attempts}", error is None)
            if all_can is False and error is None:
                error = MemoryBudgetError(
                    "another rank has no memory for a program of this step, so no rank captures it"
                )
        return None if error is None else self._give_up(entry, error)

    def _find(self, entry: Entry, plan: Plan, backend: Backend) -> MemoryBudgetError | None:
        needed = backend.needs(plan.footprint, alone=True)
        beside = partial(backend.needs, plan.footprint, alone=False)
        if self._budget is not None:
            while needed <= self._budget < self._programs.nbytes + beside():
                if not self._programs.evict_for_memory(entry):
                    break
            if max(needed, self._programs.nbytes + beside()) > self._budget:
                return _refusal(plan, f"is estimated to take {_mib(needed)}", self._bound())
        free = free_bytes(plan.device)
        if free is not None and beside() > free:
            return _refusal(plan, f"is estimated to take {_mib(beside())}", f"{plan.device} has {_mib(free)} free")
        return None

    def _bound(self) -> str:
        assert self._budget is not None
        taken = self._programs.nbytes
        others = f", of which the step's other programs take {_mib(taken)}" if taken else ""
        return f"memory_budget allows {_mib(self._budget)}{others}"

    def _give_up(self, entry: Entry, error: MemoryBudgetError) -> MemoryBudgetError:
        self._programs.close(entry)
        entry.refusal = error
        # The step is correct, so a lack of memory only warns.
        self._refusals.warn(f"graphplan runs this step eagerly: {error}")
        return error

    def settle(self, entry: Entry, latest: Program, backend: Backend) -> None:
        """After the ``latest`` capture, drop programs that exceed the budget in fact, and release unused memory."""
        if self._budget is not None:
            while self._programs.nbytes > self._budget and self._programs.evict_for_memory(entry):
                pass
            group = sum(program.nbytes for program in self._programs.all() if program.generation == latest.generation)
            if group > self._budget:
                what = f"takes {_mib(latest.nbytes)} in fact"
                self._give_up(entry, _refusal(latest.plan, what, self._bound()))
            if group > self._budget // _GROUPS:
                backend.begin_generation()
        backend.trim()

    def after_check(self, backend: Backend) -> None:
        """Release memory that the eager step of a check took, if there is a budget or if it took much."""
        if self._budget is not None or not backend.may_take(0):
            backend.trim()

    def snapshot(
        self, walk: Walk, feed: Feed, plan: Plan | None, backend: Backend, *, is_traced: bool = True
    ) -> Snapshot:
        """Return a snapshot for undoing a capture of ``plan``, or an eager run if that is None.

        Copies are in host memory if they are large. There are none of gradients if the run ``is_traced``: it copies
        those that it is about to write, and most steps replace them. Stream capture executes nothing, so tensors on its
        device need no copies either, unless numbers that exist only after the first replay may refuse the program.
        """
        extra = [*([] if plan is None else plan.changed_tensors(walk)), *(tensor for _, tensor in feed.tensors())]
        slots = [(slot, tensor) for slot in walk.slots.values() for tensor in slot.tensors()]
        every = [*(tensor for _, tensor in slots), *extra]
        gradients = [tensor for slot, tensor in slots if slot.param is not None]
        if plan is not None:
            self._compact(walk, backend)
        uncopied: list[Tensor] = []
        if plan is None and is_traced:
            uncopied = gradients
        elif plan is not None and not (backend.executes or plan.defers):
            uncopied = [tensor for tensor in every if tensor.device == plan.device]
        uncopied = [tensor for tensor in uncopied if type(tensor) in PLAIN_KINDS]
        left_out, sizes = set(map(id, uncopied)), {id(t): t.nbytes for t in every if is_accelerator(t.device)}
        needed = sum(nbytes for tensor, nbytes in sizes.items() if tensor not in left_out)
        # A trace keeps the gradients, too, beside those that it makes.
        room = backend.room() - (0 if plan is not None else sum(sizes.get(tensor, 0) for tensor in left_out))
        device, beside = (None, 0.0) if needed <= room else (torch.device("cpu"), max(0.0, room))
        generators = () if plan is None else plan.traced.generators
        return Snapshot(walk, extra=extra, generators=generators, device=device, beside=beside, uncopied=uncopied)


def _mib(nbytes: int) -> str:
    return f"{nbytes / 2**20:.1f} MiB"


def _refusal(plan: Plan, what: str, bound: str) -> MemoryBudgetError:
    return MemoryBudgetError(
        f"a program of {plan.name} {what}, but {bound}. Make the batch smaller, or raise memory_budget= or free "
        "device memory and call invalidate(). Until then, such steps run eagerly"
    )


def room_beside(device: torch.device, backend: Backend, taken: int, rest: int) -> float:
    """Bytes of copies for which ``device`` has room, if it cannot hold all. ``taken`` bytes more are reserved in any
    case, and ``rest`` have to stay free.
    """
    free, room = free_bytes(device), backend.room() - taken
    return max(0, room if free is None else min(room, free - rest)) / _MARGIN


def find_room(
    nbytes: int, device: torch.device, may_take: Callable[[int], bool] = lambda nbytes: True, copies: int = _COPIES
) -> tuple[torch.device | None, str]:
    """Find a place for ``copies`` of ``nbytes`` of state: ``device`` if ``may_take``, the host, or None and why."""
    needed = int(nbytes * copies * _MARGIN)
    host = torch.device("cpu")
    for place in dict.fromkeys((device, host)):
        # A query of the device's driver takes a millisecond, so ask `may_take` first.
        if place != host and not may_take(needed):
            continue
        free = free_bytes(place)
        if free is None or needed <= free:
            return place, ""
    return None, (
        f"a check needs {needed / 2**20:.0f} MiB for copies of parameters and state, and neither {device} nor the host "
        "has that much free"
    )
