"""A further shape of a step that has a plan: one trace is enough if it shows the same step."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

from graphplan.feed.signature import Feed
from graphplan.plan.build import build_plan
from graphplan.plan.difference import form_of
from graphplan.plan.plan import Plan
from graphplan.specs.roles import External, Role
from graphplan.tensors.storages import storage_id
from graphplan.trace.changes import same_value
from graphplan.trace.records import Trace

_SAME = (
    "form", "rebindings", "counters", "appends", "entry_grads", "twins", "shared", "joined", "device",
    "output_structure", "communicates",
)  # fmt: skip
_AS_MANY = ("outputs", "host_reads")
_HANDLES_AS_MANY = ("host_draws", "device_constants", "host_constants")


def build_plan_like(known: Iterable[Plan], trace: Trace, feed: Feed, **options: Any) -> Plan | None:
    """The plan of a step that was traced once, fed with ``feed``, if it is one of the ``known`` ones for other shapes:
    the same operators on the same operands, with the same effects. None if it is another step.

    Two traces of the known plan have told which of its facts change from step to step. What one trace cannot tell are
    numbers and constants that differ from those of the known plan: they may follow from the shapes, or from something
    that will be different in the next step. So the first replay has to be compared with an eager step. Python values
    and tensors that the code reads or looks at need not be the same: guards compare them before each replay.
    """
    form = form_of(trace)
    alike = [plan for plan in known if plan.form == form and not plan.may_reorder]
    if not alike:
        return None
    plan = build_plan(trace, trace, feed, **options)
    like = next((one for one in alike if _is_alike(plan, one)), None)
    if like is None:
        return None
    # Fed memory that two traces have in common is kept alive, and a trace has all of it in common with itself.
    if like.handles.keep_alive:
        return plan
    return replace(plan, handles=replace(plan.handles, keep_alive=()))


def _is_alike(plan: Plan, known: Plan) -> bool:
    return (
        all(getattr(plan, name) == getattr(known, name) for name in _SAME)
        and plan.handles.generators == known.handles.generators
        and all(len(getattr(plan, name)) == len(getattr(known, name)) for name in _AS_MANY)
        and all(len(getattr(plan.handles, name)) == len(getattr(known.handles, name)) for name in _HANDLES_AS_MANY)
        and _outline(plan) == _outline(known)
        and same_value(_values(plan), _values(known))
    )


def _outline(plan: Plan) -> tuple[Any, ...]:
    """What is compared in part: nothing that follows from shapes."""
    outputs = [(output.kind, output.index, output.path, output.marks) for output in plan.outputs]
    restores = [(restore.device, restore.number) for restore in plan.states.restores]
    return [_facts(external) for external in plan.externals], outputs, plan.states.saves, restores


def _facts(external: External) -> tuple[Any, ...]:
    spec = None if external.role is Role.INPUT else external.spec
    memory = None if external.tensor is None else storage_id(external.tensor)
    change = (external.mutated, external.carried)
    return (external.name, external.role, spec, change, external.leaf, external.path, memory)


def _values(plan: Plan) -> tuple[Any, ...]:
    """Python values, whose own comparison is not asked."""
    assigned = tuple((assignment.path, assignment.value) for assignment in plan.assignments)
    return assigned, tuple(plan.left.items())
