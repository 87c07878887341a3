"""Record a program. A capture is a transaction: if it fails, owners stay as they were."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from contextlib import nullcontext
from contextvars import ContextVar
from dataclasses import replace
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from graphplan.backends.backend import Backend, Recording
from graphplan.compare.tensors import geometry
from graphplan.errors import FeedError, GuardError, HostEffectError
from graphplan.feed.buffers import Buffers
from graphplan.feed.call_arguments import CallArguments, call_step
from graphplan.feed.signature import Feed
from graphplan.observe.capture_state import presenting_capture
from graphplan.observe.source import runs_step
from graphplan.owners.flags import Flags
from graphplan.owners.sharding import Sharding, reshard_and_walk
from graphplan.owners.slots import Walk, holds_plain
from graphplan.plan.plan import Plan
from graphplan.program.adopted_tensors import own_tensors
from graphplan.program.bindings import Bindings
from graphplan.program.inputs import MEMORY_IS_FED, HostInputs, StaticInputs
from graphplan.program.outputs import Outputs, check_result, share_outputs
from graphplan.program.program import Program
from graphplan.program.statics import CopiedOwned, check_policy
from graphplan.program.undo import Undo
from graphplan.specs.paths import Path
from graphplan.specs.policy import Policy
from graphplan.specs.roles import Role
from graphplan.tensors.attributes import with_class_and_attributes
from graphplan.tensors.storages import copier, memory_uses, overlaps, storage_id, with_leaves
from graphplan.tensors.symbolic import has_stand_ins
from graphplan.trace.batch_reads import answers_in
from graphplan.trace.deferred_reads import DeferredReads
from graphplan.trace.derivatives import own_derivatives
from graphplan.trace.symbolic_numbers import NumberTensor, SymbolicNumbers

_IS_RECORDED = ContextVar("is_recorded", default=False)


def is_recorded() -> bool:
    """Return True while this thread records a step."""
    return _IS_RECORDED.get()


def capture_program(
    plan: Plan,
    feed: Feed,
    *,
    policy: Policy,
    backend: Backend,
    buffers: Buffers,
    homes: Mapping[str, Any] = MappingProxyType({}),
    lends: bool = False,
) -> Program:
    """Record ``plan``'s step on ``feed`` under ``policy``; :meth:`Program.run_recorded` then finishes the call.
    ``homes`` are the values that other programs of the step have bound in carried slots, by path. ``lends``: results
    are the program's own memory.
    """
    check_policy(plan, policy)
    sharding, walk = reshard_and_walk(plan.handles.owners())
    changed = outdated(plan, walk)
    if changed is not None:
        raise GuardError(f"the plan of {plan.name} is out of date: {changed}; compile another one with compile_plan")
    # Read the values before the step, which may change them (a deque becomes full).
    values = {path: value.get() for path in plan.reads.values if (value := walk.value(path)) is not None}
    inputs = StaticInputs(plan, feed, buffers, copies=Role.INPUT in policy.copy_roles)
    copied = CopiedOwned(plan, policy, buffers, walk)
    _check_shared(plan, feed, walk, inputs)
    _make_homes(plan, feed, walk, homes, copied.stand_ins)
    flags = Flags(walk)
    found = {path: value for path, value in flags.read().items() if path in plan.left}
    before = memory_uses(tensor for slot in walk.slots.values() for tensor in slot.tensors())
    bindings = Bindings(plan, walk, copied.stand_ins)
    # A backend that executes while it records also records the host's part.
    host = None if backend.executes or plan.traced.host_program is None else HostInputs(plan.traced, walk)
    undo = Undo(plan, walk, inputs) if plan.branches else None
    parts = inputs, copied, bindings
    recording, after, outputs = _record(plan, feed, walk, backend, *parts, undo, sharding=sharding, lends=lends)
    bindings.bind_back(after)
    # Guards compare flags with those at the beginning of a call: restore these for now.
    flags.assign(found)
    is_as_recorded = not (plan.rebindings.carries or plan.appends or plan.left or plan.defers or copied.stand_ins)
    walk = after if is_as_recorded else plan.handles.walk()
    program = Program(plan, policy, recording, *parts, outputs, undo, host, walk=walk, values=values)
    flags.assign(bindings.leave(plan.left))
    program.adopted.count_uses(before)
    return program


def _record(
    plan: Plan,
    feed: Feed,
    walk: Walk,
    backend: Backend,
    inputs: StaticInputs,
    copied: CopiedOwned,
    bindings: Bindings,
    undo: Undo | None,
    *,
    sharding: Sharding,
    lends: bool,
) -> tuple[Recording, Walk, Outputs]:
    """Record the step with the backend, then the copies at its end."""
    leaves = [
        with_class_and_attributes(inputs.by_leaf.get(index, leaf), leaf) for index, leaf in enumerate(feed.leaves)
    ]
    fed = CallArguments(*feed.rebuild(leaves)).watch()
    outside = {storage_id(inputs.by_leaf.get(index, leaf)) for index, leaf in feed.tensors()} | set(walk.by_storage())
    shared = share_outputs(plan) if lends else {}

    @presenting_capture()
    @runs_step
    def body() -> tuple[Walk, Outputs, Iterable[tuple[NumberTensor, Any]]]:
        token = _IS_RECORDED.set(True)
        try:
            if undo is not None:
                undo.copy()
            numbers, places = _stand_ins(plan, walk, backend), plan.integer_places
            deferring = DeferredReads(fills=False, defers=plan.defers, symbolic=numbers, integer_places=places)
            with own_derivatives() if plan.traced.derives else nullcontext(), deferring as deferred:
                result = call_step(plan.handles.function(), fed.args, fed.kwargs)
            bindings.numbers.copies, bindings.numbers.are_kept = deferred.copies, deferred.are_kept
            bindings.numbers.take_drawn(numbers.drawn)
        finally:
            _IS_RECORDED.reset(token)
        sharding.settle()
        change = fed.change()
        if change is not None:
            raise HostEffectError(change)
        check_result(plan, result)
        after = plan.handles.walk()
        with torch.no_grad():
            outputs = Outputs(plan, result, bindings.numbers, overwritten=bindings.targets, shared=shared)
            bindings.close_step(after, outside)
        return after, outputs, numbers.pending

    torch.clear_autocast_cache()  # Weight casts in the caller's cache would be missing from the recording.
    copied.load({}, walk)
    with copied.swapped_in(walk):
        recording, (after, outputs, pending) = backend.record(
            body, replace(plan.traced, answers=answers_in(fed.kwargs))
        )
    for tensor, value in pending:
        tensor.hold(value)
    return recording, after, outputs


def _stand_ins(plan: Plan, walk: Walk, backend: Backend) -> SymbolicNumbers:
    """Return the stand-ins for owners' and drawn numbers with which the step is recorded."""
    places = {path: walk.scalars[path] for path, kind in plan.symbolic.items() if has_stand_ins(kind)}
    return SymbolicNumbers(
        places, plan.device, filled=plan.filled, expected=plan.drawn,
        follows={draw.generator for draw in plan.drawn}, may_fill=backend.executes,
        questions=plan.reads.questions.keys() if plan.single else None, tables=walk.tables(plan.tables),
    )  # fmt: skip


def outdated(plan: Plan, walk: Walk) -> str | None:
    """Describe the first Python value or slot that has changed since the traces."""
    # If a path now holds a container of its own, instead of one that also lay elsewhere, only its length is found.
    there = lambda path: walk.value(path) is not None or Path.length(path) in walk.objects  # noqa: E731
    values = {path: value for path, value in plan.reads.values.items() if there(path)}
    changed = plan.reads.changed(walk, values, " when the step was traced")
    if changed is not None:
        return changed
    for path, kind in plan.symbolic.items():
        place = walk.scalars.get(path)
        if place is None or type(place.get()) is not kind:
            return f"{path} held a number of class {kind.__name__} when the step was traced, and does not now"
    for path in plan.numbers.keys() - walk.scalars.keys():
        return f"{path} held a number when the step was traced, and is gone"
    for path in plan.rebindings.replaced & walk.slots.keys():
        if not holds_plain(walk.slots[path].get()):
            return f"{path} holds a tensor that asks for gradients, or has attributes, and did not in the traces"
    return plan.rebindings.parted(walk) or _joined(plan, walk)


def _joined(plan: Plan, walk: Walk) -> str | None:
    """Describe the first two slots that share memory now and did not in the traces, if the step depends on it."""
    holders: dict[int | None, str] = {}
    for path in {external.path: None for external in plan.externals if external.path is not None}:
        slot = walk.slots.get(path)
        for tensor in slot.tensors() if slot is not None and slot.param is None else ():
            other = holders.setdefault(storage_id(tensor), path)
            joined = other == path or any({(other, 0), (path, 0)} <= together for together in plan.joined)
            if not joined and not plan.may_share_memory(other, path):
                return f"{other} and {path} share memory, and did not when the step was traced"
    return None


def _move_in(plan: Plan, feed: Feed, walk: Walk, homes: Mapping[str, Any]) -> None:
    """Bind carried slots to other programs' tensors if no code can tell; else each change of program copies them."""
    sharing, partners = walk.by_storage(), plan.rebindings.partners
    taken = {storage_id(leaf) for _, leaf in feed.tensors()} | sharing.keys()
    for path in filter(homes.__contains__, plan.rebindings.carries):
        slot, home = walk.slots[path], homes[path]
        now = slot.get()
        if type(home) is not Tensor or type(now) is not Tensor or now is home:
            continue
        if path in partners and walk.slots[partners[path]].get() is home:
            slot.set(home)
            continue
        alike = (*geometry(home), home.device) == (*geometry(now), now.device)
        alone = path in plan.rebindings.replaced or sharing.get(storage_id(now) or 0) == [slot]
        alone = alone and storage_id(home) not in taken
        plain = not (home.requires_grad or home.is_inference() or now.is_inference() or vars(now) or vars(home))
        if alike and alone and plain:
            home.copy_(now)
            slot.set(home)
            taken.add(storage_id(home))


def _make_homes(plan: Plan, feed: Feed, walk: Walk, homes: Mapping[str, Any], bound: Collection[str]) -> None:
    """Bind carried slots that the step only replaces to new tensors of the program, which replays write to, so that the
    old tensors (the initial zeros of a hidden state) stay unchanged.
    """
    if not plan.rebindings.carries:
        return
    gone = next((path for path in plan.rebindings.carries if path not in walk.slots), None)
    if gone is not None:
        raise HostEffectError(
            f"the step found a tensor at {gone} in its traces, but there is none now: a replay would read its own old "
            "one. Put a tensor there that has the same effect (zeros, for a hidden state)"
        )
    _move_in(plan, feed, walk, {path: home for path, home in homes.items() if path not in bound})
    sharing, own = walk.by_storage(), own_tensors() | set(map(id, homes.values()))
    partners = plan.rebindings.partners
    for path in plan.rebindings.carries:
        slot = walk.slots[path]
        others = {other.path for tensor in slot.tensors() for other in sharing.get(storage_id(tensor) or 0, ())}
        others = {other for other in others if partners.get(other, other) != partners.get(path, path)}
        if path in bound or path in plan.rebindings.moved or (id(slot.get()) in own and not others):
            continue
        if path in plan.rebindings.replaced and holds_plain(slot.get()):
            with torch.inference_mode(False):
                is_first = path not in partners
                tensors = list(map(_home_like, slot.tensors())) if is_first else walk.slots[partners[path]].tensors()
                slot.set(with_leaves(slot.get(), tensors))
        elif others:
            raise HostEffectError(
                f"the step assigns a new tensor to {path}, which starts as the same tensor as {min(others)}: a replay "
                f"would write the new values into that tensor. Start with a copy: {path} = "
                f"{min(others)}.detach().clone()"
            )


def _home_like(tensor: Tensor) -> Tensor:
    """Return a copy with the layout of ``tensor``, but without elements that share memory: replays write to each."""
    return tensor.clone() if overlaps(tensor.shape, tensor.stride()) else copier(tensor)()


def _check_shared(plan: Plan, feed: Feed, walk: Walk, inputs: StaticInputs) -> None:
    """Refuse leaves that share memory with tensors that the step changes, or that are adopted and require gradients."""
    shared = plan.shared_leaf(feed, walk)
    if shared is not None:
        raise FeedError(f"{plan.feed.names()[shared]}: {MEMORY_IS_FED}")
    asking = next((index for index in inputs.adopted if feed.leaves[index].requires_grad), None)
    if asking is not None:
        raise FeedError(
            f"{plan.feed.names()[asking]} requires gradients, but copy_roles lacks input, so the gradients would stay "
            "on the captured call's tensor. Pass it detached, or add input to copy_roles"
        )
