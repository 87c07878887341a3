"""Sort externals into input, param and state: each external has exactly one role."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import replace

import torch

from graphplan.effects.rebindings import Rebindings
from graphplan.errors import FeedError, HostSyncError, UnownedTensorError
from graphplan.feed.signature import Feed, shared_leaf
from graphplan.owners.slots import Slot, Walk, is_optimizer_state
from graphplan.specs.roles import External, Role, TensorSpec
from graphplan.tensors.attributes import is_freed
from graphplan.tensors.storages import storage_id
from graphplan.trace.operator_schemas import LIKE_OPERATORS
from graphplan.trace.records import Trace, TracedExternal


def classify(
    first: Trace, second: Trace, feed: Feed, walk: Walk, *, rebindings: Rebindings, device_rates: frozenset[int]
) -> tuple[External, ...]:
    """Return the externals of the second trace with their roles: feed leaves are inputs; tensors in owners' slots are
    params (parameters, and buffers that are only read) or state. ``device_rates``: storages of device learning rates.
    """
    found = [
        _input(index, name, feed, second) for index, name in enumerate(feed.names()) if index in second.leaf_storages
    ]
    slots = second.entry_slots
    earlier = list(first.externals)
    fed = set(second.leaf_storages.values())
    unowned = 0
    # Most externals share a source: format each source once.
    sources = {id(external.source): external.source for external in second.externals.values()}
    places = {number: str(source) for number, source in sources.items()}
    for position, (storage, external) in enumerate(second.externals.items()):
        owned = _distinct(slots.get(storage, ()))
        for slot in owned:
            carried, where = slot.path in rebindings.carries, places[id(external.source)]
            found.append(_owned(slot, storage, external, where, carried=carried))
            if storage in device_rates:
                # A device learning rate is in its slot only during a step: keep the tensor instead of the slot.
                found[-1] = replace(found[-1], path=None, tensor=external.tensor)
        if not owned and storage not in fed and not external.is_temporary:
            number = second.symbolic.given.get(id(external.tensor))
            unchanged = number is not None or (position < len(earlier) and earlier[position] == storage)
            unchanged |= _is_only_like(second, position)
            name = f"unowned[{unowned}]" if number is None else " and ".join(number.paths)
            found.append(_unowned(external, name, second, unchanged=unchanged))
            unowned += 1
    named = {external.path for external in found}
    found += [_passed_on(walk.slots[path]) for path in rebindings.carries if path not in named]
    covered = frozenset[str]() if second.host_program is None else second.host_program.covers
    _check_devices([each for each in found if each.mutated or each.path not in covered], second.device)
    _check_shared(feed, found, second, rebindings.replaced)
    return tuple(sorted(found, key=lambda external: list(Role).index(external.role)))


def _is_only_like(trace: Trace, number: int) -> bool:
    """Return True if operators use only the geometry of an external (``zeros_like``) and read none of its values."""
    operators = [operator for operator in trace.operators if ("external", number) in operator.operands]
    return bool(operators) and all(operator.name in LIKE_OPERATORS for operator in operators)


def _distinct(slots: Iterable[Slot]) -> list[Slot]:
    """Return one slot per tensor, without its further names (tied weights)."""
    kept: dict[int, Slot] = {}
    for slot in slots:
        kept.setdefault(id(slot.get()), slot)
    return list(kept.values())


def _input(index: int, name: str, feed: Feed, trace: Trace) -> External:
    tensor = feed.leaves[index]
    traced = trace.externals.get(trace.leaf_storages[index])
    # If an owner also holds the tensor, the step changes it through the owner; the leaf only supplies values.
    owned = trace.leaf_storages[index] in trace.entry_slots
    mutated = traced is not None and traced.mutated and not owned
    return External(name, Role.INPUT, TensorSpec.of(tensor), mutated, leaf=index)


def _owned(slot: Slot, storage: int, traced: TracedExternal, where: str, *, carried: bool) -> External:
    # A slot that the step rebound no longer holds the old tensor: take that from the trace.
    tensor = next((t for t in slot.tensors() if storage_id(t) == storage), traced.tensor)
    changes = traced.mutated or carried
    is_of_optimizer = is_optimizer_state(slot.path) or ".param_groups[" in slot.path
    is_state = not slot.is_parameter and (changes or slot.param is not None or is_of_optimizer)
    role = Role.STATE if is_state else Role.PARAM
    return External(slot.path, role, TensorSpec.of(tensor), changes, carried, path=slot.path, where=where)


def _passed_on(slot: Slot) -> External:
    """Return a carry that no operator reads: another slot is bound to its old value, or its tensor object stays."""
    spec = TensorSpec.of(slot.tensors()[0])
    role = Role.PARAM if slot.is_parameter else Role.STATE
    return External(slot.path, role, spec, True, True, path=slot.path)


def _earlier_graph(trace: Trace) -> str | None:
    """Return the path of a tensor of the step whose autograd graph was made before the step; None if there is none."""
    used = (storage for storage, traced in trace.externals.items() if traced.tensor.grad_fn is not None)
    return next((slot.path for storage in used for slot in trace.entry_slots.get(storage, ())), None)


def _unowned(traced: TracedExternal, name: str, trace: Trace, *, unchanged: bool) -> External:
    spec = TensorSpec.of(traced.tensor)
    if is_freed(traced.tensor):
        raise UnownedTensorError(
            f"the memory of a {spec} tensor that reaches {traced.operator} at {traced.source} is freed before the "
            "step ends (storage.resize_(0)), so its contents are unknown, but a replay would still use it. Keep it "
            "allocated",
            component=traced.source.component,
        )
    if traced.mutated and not (unchanged and traced.is_buffer_of_collective):
        raise UnownedTensorError(
            f"{traced.mutated_by} at {traced.mutated_at} changes a {spec} tensor that belongs to no owner; graphplan "
            "can neither guard nor restore it. Name the object that holds it in owners= (for a gradient, its tensor), "
            "or pass it as an argument",
            component=traced.source.component,
        )
    if traced.tensor.grad_fn is not None:
        raise UnownedTensorError(
            f"a {spec} tensor that was computed outside the step (by {traced.tensor.grad_fn.name()}) reaches "
            f"{traced.operator} at {traced.source}, and gradients would flow out of the step; a replay would keep "
            "reading the old tensor. Compute it in the step. If it is a cast of a weight from autocast's cache, enter "
            "torch.autocast in the step in each call, or pass cache_enabled=False to it",
            component=traced.source.component,
        )
    if not unchanged:
        graph = _earlier_graph(trace)
        instead = "Pass it as an argument of the step, or name the object that holds it in owners="
        if graph is not None:
            instead = (
                f"The autograd graph of {graph} was made before the step and may hold it: compute both in the step"
            )
        raise UnownedTensorError(
            f"a {spec} tensor that is neither an argument nor part of an owner reaches {traced.operator} at "
            f"{traced.source}, and each step uses another one; a replay would keep reading the old tensor. {instead}",
            component=traced.source.component,
        )
    where = str(traced.source)
    role = Role.STATE if traced.mutated else Role.PARAM
    return External(name, role, spec, traced.mutated, tensor=traced.tensor, where=where)


def _check_devices(externals: Sequence[External], device: torch.device | None) -> None:
    if device is None or device.type == "cpu":
        return
    for external in externals:
        if external.role is not Role.INPUT and external.spec.device.type != device.type:
            raise HostSyncError(
                f"{external.name} is on {external.spec.device} while the step computes on {device} (first used at "
                f"{external.where}); a graph would keep the value it had at capture. Move it to {device}",
                component="optimizer" if is_optimizer_state(external.name) else "step",
            )


def _check_shared(feed: Feed, externals: Sequence[External], trace: Trace, replaced: Collection[str]) -> None:
    changed = {external.path for external in externals if external.mutated and external.path not in replaced}
    for index, storage in trace.leaf_storages.items():
        path = next((slot.path for slot in trace.entry_slots.get(storage, ()) if slot.path in changed), None)
        if path is not None:
            raise FeedError(
                f"{feed.names()[index]} shares memory with {path}, which the step changes; a replay uses a copy of "
                "the argument, which the change would not reach. Pass a clone, or let the step use the owner's tensor"
            )
    written = [e.leaf for e in externals if e.role is Role.INPUT and e.mutated and e.leaf is not None]
    shared = shared_leaf(feed, written)
    if shared is not None:
        names = feed.names()
        raise FeedError(
            f"the step changes {names[shared[0]]}, which shares memory with {names[shared[1]]}; a replay uses a copy "
            "of each, so the change would not reach the other. Clone one of them before the call"
        )
