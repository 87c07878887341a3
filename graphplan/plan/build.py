"""Build a plan from two traces."""

from __future__ import annotations

import collections
from collections.abc import Collection, Sequence
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from graphplan.backends.backend import TracedValues
from graphplan.effects.appended_lists import find_appends
from graphplan.effects.changed_values import find_assignments, find_counters, find_left_flags, find_numbers
from graphplan.effects.host import check_draws, check_generators, check_gradients, check_threads
from graphplan.effects.host_changes import joined_slots
from graphplan.effects.reads import Reads, check_used
from graphplan.effects.rebindings import Rebindings
from graphplan.effects.trace_pair import TracePair
from graphplan.errors import ControlFlowError, HostSyncError, OutputError
from graphplan.feed.signature import Feed
from graphplan.owners.slots import Walk
from graphplan.plan.classify import classify
from graphplan.plan.difference import check_difference, check_marks, form_of
from graphplan.plan.plan import DRAWS, Handles, Output, Plan
from graphplan.specs.paths import Fact, Path, names
from graphplan.specs.roles import External
from graphplan.tensors.deferred import NumberForm
from graphplan.tensors.records import has_attributes
from graphplan.tensors.storages import place_of
from graphplan.tensors.trees import text_of
from graphplan.trace.changes import same_value
from graphplan.trace.collectives import is_collective
from graphplan.trace.operator_schemas import UNORDERED
from graphplan.trace.records import OutputTensor, Trace

_LAST = 8
"""Number of last operators that an error of the device lists."""


def find_device(walk: Walk, feed: Feed) -> torch.device:
    """Return the device of a step: the first accelerator among its owners' and its feed's tensors, else the CPU."""
    held = [tensor for slot in walk.slots.values() for tensor in slot.tensors()]
    fed = [tensor for _, tensor in feed.tensors()]
    for tensor in [*held, *fed]:
        if tensor.device.type not in ("cpu", "meta"):
            return tensor.device
    return torch.device("cpu")


def build_plan(
    first: Trace,
    second: Trace,
    feed: Feed,
    handles: Handles,
    *,
    allow: Sequence[str] = (),
    walk: Walk | None = None,
    loose: bool = False,
) -> Plan:
    """Build a plan from the traces of two consecutive steps, or from one passed twice (:func:`one_trace_suffices`).
    ``feed`` is that of the second; ``walk``, if given, was made at its end. ``loose``: see :meth:`Reads.find`.
    """
    pair = TracePair(first, second, walk or handles.walk(), allow)
    # Errors should name a flag, not a value that it is computed from; a list of changed length, not its numbers.
    left = find_left_flags(pair)
    _check(pair, feed)
    appends, numbers, counters = find_appends(pair), find_numbers(pair), find_counters(pair)
    rebindings, device_rates = Rebindings.find(pair), handles.rates.storages
    changed, launched = {*numbers, *counters}, [operator for operator in second.operators if operator.launches]
    externals = classify(first, second, feed, pair.walk, rebindings=rebindings, device_rates=device_rates)
    assert second.device is not None
    return Plan(
        name=getattr(step := handles.function(), "__qualname__", type(step).__name__),
        form=form_of(second),
        feed=Feed([], feed.key),
        externals=externals,
        rebindings=rebindings,
        counters=MappingProxyType(counters),
        numbers=MappingProxyType(numbers),
        appends=MappingProxyType(appends),
        left=MappingProxyType(left),
        assignments=MappingProxyType(find_assignments(pair, changed)),
        outputs=tuple(_outputs(first, second, {*rebindings.paths} - rebindings.moved)),  # For errors, before `reads`.
        output_structure=second.output_structure,
        entry_grads=MappingProxyType(_entry_grads(second, pair.walk) if _uses_grads(first, second, pair.walk) else {}),
        operators=MappingProxyType(collections.Counter(operator.name for operator in launched)),
        footprint=first.footprint.merge(second.footprint),
        traced=_traced_values(second),
        device=second.device,
        reads=Reads.find(pair, changed, loose=loose),
        twins=_twins(second, externals, device_rates),
        joined=tuple(joined_slots(second, second.entry_slots)),
        host_facts=tuple(_host_facts(second)),
        communicates=any(is_collective(op.name) for op in second.operators),
        rounding=second.rounding,
        may_reorder=first.graph_elsewhere or second.graph_elsewhere or _adds_in_any_order(second),
        undone=frozenset(slot.path for storage in second.undone for slot in second.entry_slots.get(storage, ())),
        defers=bool(second.deferred),
        integer_places=second.deferred.integer_places,
        renewed=_renewed(pair, rebindings),
        tables=frozenset(name for _, _, name in second.symbolic.tables),
        symbolic=MappingProxyType(second.symbolic.kinds),
        filled=tuple(second.symbolic.given.values()),
        drawn=tuple(second.symbolic.draws),
        last_operators=tuple(f"{operator.name} at {operator.source}" for operator in launched[-_LAST:]),
        kept=_shared(first, second),
        single=first is second,
        handles=handles,
    )


def _renewed(pair: TracePair, rebindings: Rebindings) -> frozenset[str]:
    one, other = ((t.changes.renewed - t.read_before) | t.changes.renewed_slots for t in pair.both)
    return frozenset() if pair.first is pair.second else frozenset((one & other).difference(rebindings.carries))


def _check(pair: TracePair, feed: Feed) -> None:
    """Refuse a step for reasons that the two traces alone show."""
    check_used(pair)
    for trace in pair.both:
        # Before other violations: random draws of another thread look like a generator seek.
        check_threads(trace, pair.allow)
    try:
        check_difference(*pair.both)
    except (ControlFlowError, HostSyncError):
        # A host draw may have chosen the path (random.shuffle), or made the value (a mask of NumPy's): report the draw.
        if all(trace.violation is None for trace in pair.both):
            check_generators(pair)
        raise
    _check_branches(pair.second)
    check_marks(feed, *pair.both)
    check_draws(pair)
    check_gradients(pair)


def _traced_values(trace: Trace) -> TracedValues:
    return TracedValues(
        reads=tuple(trace.host_reads),
        states=trace.states,
        generators=trace.generators,
        device_constants=trace.device_constants,
        transfers=trace.transfers,
        host_program=trace.host_program,
        in_mode=trace.derives_otherwise,
        derives=trace.derives_here,
    )


def _check_branches(trace: Trace) -> None:
    """Refuse branches on values in a step with collectives: if one rank ended a replay, the others would wait."""
    error = next((read.error for read in trace.host_reads if read.error is not None), None)
    if error is not None and any(is_collective(operator.name) for operator in trace.operators):
        raise error


def _outputs(first: Trace, second: Trace, rebound: set[str]) -> list[Output]:
    if first.output_structure != second.output_structure:
        raise OutputError(
            f"the step returns {text_of(first.output_structure)} on one call and "
            f"{text_of(second.output_structure)} on the next; a replay returns one structure: return the same one "
            "each time"
        )
    outputs = []
    for number, (old, new) in enumerate(zip(first.output_leaves, second.output_leaves, strict=True)):
        if isinstance(new, OutputTensor):
            # Each eager step binds a new tensor to a rebound slot, so the caller gets a copy.
            owned = new.path is not None and new.path not in rebound
            kind = "read" if new.is_copied else "input" if new.leaf is not None else "owned" if owned else "tensor"
            path = new.path if owned else None
            marks = _marks(old, new, second.output_names[number])
            outputs.append(Output(kind, index=new.leaf, path=path, spec=new.spec, marks=marks))
        elif has_attributes(new):
            raise OutputError(
                f"{second.output_names[number]}, which the step returns, is of type {type(new).__name__} and has "
                f"additional attributes ({', '.join(sorted(vars(new)))}); a replay builds the object without them: "
                "return their values separately"
            )
        elif not same_value(old, new):
            if isinstance(old, NumberForm) and isinstance(new, NumberForm):
                raise OutputError(
                    f"{second.output_names[number]}, which the step returns, is computed from a value that the step "
                    "reads from the device and from a Python number that differs from call to call; a replay would "
                    "keep the first number. Keep that number in a tensor, or compute the result outside the step"
                )
            raise OutputError(
                f"{second.output_names[number]}, which the step returns, is {old!r} on one call and {new!r} on the "
                "next; a replay would always return the first. Return a tensor, or compute it outside the step"
            )
        else:
            outputs.append(Output("read" if isinstance(new, NumberForm) else "literal", value=new))
    return outputs


def _marks(old: Any, new: OutputTensor, name: str) -> tuple[tuple[str, Any], ...]:
    """Return the attributes that the step sets on a result; each replay sets them on its own result."""
    before = old.marks if isinstance(old, OutputTensor) else ()
    if not same_value(before, new.marks) or any(isinstance(value, type) for _, value in new.marks):
        raise OutputError(
            f"{', '.join(mark for mark, _ in new.marks or before)} is an attribute of {name}, which the step returns, "
            "but is not a plain value or differs from call to call; a replay would set the first value each time. "
            "Return it beside the tensor"
        )
    return new.marks


def _twins(trace: Trace, externals: Sequence[External], device_rates: Collection[int]) -> frozenset[str]:
    """Return the paths of slots that share an external's memory but are no externals: each may be rebound."""
    known = {external.path for external in externals}
    used = (slot for storage in trace.externals.keys() - device_rates for slot in trace.entry_slots.get(storage, ()))
    return frozenset(slot.path for slot in used if slot.path not in known and slot.param is None)


def _adds_in_any_order(trace: Trace) -> bool:
    """Return True if a device may sum in another order on each run; a few replays need not show a difference."""
    is_fixed = torch.are_deterministic_algorithms_enabled() or trace.device is None or trace.device.type == "cpu"
    return not is_fixed and any(operator.name.startswith(UNORDERED) for operator in trace.operators)


def _host_facts(trace: Trace) -> list[str]:
    """Return host work that a reader of the plan should know: random draws, constants, each source line once."""
    facts: dict[str, None] = {}
    for operator in trace.operators:
        if operator.random:
            facts[f"{DRAWS}at {operator.source}"] = None
        if operator.constant is not None:
            facts[f"makes a constant from Python values at {operator.source}"] = None
    return list(facts)


def _uses_grads(first: Trace, second: Trace, walk: Walk) -> bool:
    """Return True if the step may depend on gradients; a prediction during another step's training does not."""
    if torch.is_grad_enabled() or walk.optimizers or "torch.is_grad_enabled()" in second.changes.flags:
        return True
    for facts in (first, second):
        names_grad = "grad" in facts.reads.by_users.attributes or "grad" in facts.reads.by_packages
        if names_grad or any(names(path, Fact.GRADIENT) for path in facts.changes.rebindings):
            return True
        if any(slot.param is not None for storage in facts.externals for slot in facts.entry_slots.get(storage, ())):
            return True
    return False


def _entry_grads(trace: Trace, walk: Walk) -> dict[str, str]:
    """Return what each gradient must be on entry. A gradient that the step replaces unread is left out."""
    needed: dict[str, str] = {}
    groups = [group for optimizer in walk.optimizers.values() for group in optimizer.param_groups]
    zeroed = {id(parameter) for group in groups for parameter in group["params"]}
    for path, parameter in walk.parameters.values():
        slot = Path.gradient(path)
        rebinding = trace.changes.rebindings.get(slot)
        kept = () if parameter.grad is None else (place_of(parameter.grad),)
        before = kept if rebinding is None else rebinding.before
        if not before:
            # `zero_grad` also drops gradients of frozen parameters, which a trace without such gradients does not show.
            # A parameter whose `requires_grad` the step changes requires gradients at some time.
            asks = parameter.requires_grad or f"{path}.requires_grad" in trace.changes.flags
            if asks or id(parameter) in zeroed:
                needed[path] = "none"
        elif any(place[0] in trace.externals for place in before):
            needed[path] = "kept"
    return needed


def _shared(first: Trace, second: Trace) -> tuple[Tensor, ...]:
    """Return fed tensors with the same storage in both traces: the step may read that storage under another name."""
    shared = set(first.leaf_storages.values()) & set(second.leaf_storages.values())
    return tuple(second.externals[storage].tensor for storage in shared if storage in second.externals)
