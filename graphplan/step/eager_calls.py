"""Why a call of a step is eager, and how it runs then: one table, in the order in which the reasons are looked at."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from graphplan.environment.collector import no_collections
from graphplan.errors import GraphPlanError, RefusalError, SkipReason
from graphplan.feed.call_arguments import call_step
from graphplan.feed.signature import Feed, asks_for_gradients, flatten
from graphplan.owners.slots import Walk
from graphplan.program.bindings import settle_companions
from graphplan.program.inputs import MEMORY_IS_FED
from graphplan.program.program import Program
from graphplan.step.programs import Entry, Line

if TYPE_CHECKING:
    from graphplan.step.state_machine import StateMachine

Before = Callable[[Program | None, SkipReason | None, str], None]
"""Told what is about to run: a program, or Python (None), and if that does not lead to a program, why."""
Found = bool | str | RefusalError | tuple[SkipReason, str] | None
Run = Callable[["StateMachine", "Call", SkipReason | None, str], Any]


class BeforeError(GraphPlanError):
    """Holds what a :data:`Before` has raised, past what handles other errors."""


@dataclass(slots=True)
class Call:
    """One call, and what is found out about it on the way."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    before: Before | None = None
    around: str | None = None
    is_flat: bool = False
    feed: Feed = field(init=False)
    entry: Entry = field(init=False)
    program: Program | None = None
    line: Line = field(init=False)
    walk: Walk = field(init=False)
    is_on_way: bool = False

    def tell(self, program: Program | None, reason: SkipReason | None = None, detail: str = "") -> None:
        """Before anything runs."""
        if self.before is None:
            return
        try:
            self.before(program, reason, detail)
        except Exception as error:
            raise BeforeError(error) from error


def plainly(machine: StateMachine, call: Call, reason: SkipReason | None, detail: str) -> Any:
    """With no program to come, so learning rates are numbers."""
    return machine.runner.eager(machine.arguments_of(call), reason, detail)


def _as_traced(machine: StateMachine, call: Call, reason: SkipReason | None, detail: str) -> Any:
    """As the steps that programs are compared with."""
    return machine.runner.eager(machine.arguments_of(call), reason, detail, managed=True)


def _surrounded(machine: StateMachine, call: Call, reason: SkipReason | None, detail: str) -> Any:
    """Gradients may flow through calls for results; others are as their neighbours are."""
    return (plainly if machine.options.autograd else _as_traced)(machine, call, reason, detail)


def _untouched(machine: StateMachine, call: Call, reason: SkipReason | None, detail: str) -> Any:
    """The function and nothing else."""
    result = call_step(machine.runner.fn, call.args, call.kwargs)
    machine.runner.count_eager(reason)
    return result


def _as_stock(machine: StateMachine, call: Call, reason: SkipReason | None, detail: str) -> Any:
    """The first call that is timed, before anything of the step's is prepared."""
    machine.calls -= 1
    assert machine.timing.way is not None
    return machine.timing.way(call.args, call.kwargs)


def _timed(machine: StateMachine, call: Call, reason: SkipReason | None, detail: str) -> Any:
    """The function alone, timed by the gate of its key."""
    gate, fed = call.entry.gate, machine.arguments_of(call)
    assert gate is not None
    start = gate.begin()
    result = machine.runner.call(fed)
    gate.end_eager(start)
    machine.runner.count_eager(None)
    return result


def _warming_up(machine: StateMachine, call: Call, reason: SkipReason | None, detail: str) -> Any:
    """The first calls of a key, which take in the owners that the step uses."""
    machine.fast_path.forget()
    entry, known = call.entry, len(machine.managed.owners)
    with no_collections():
        result = machine.stages.warm_up(entry, call.feed)
        if entry.warm <= 1 or entry.eager_calls <= 1 or len(machine.managed.owners) > known:
            machine.lookup.keep(call.feed, entry)
    return result


def _cannot_be_flattened(machine: StateMachine, call: Call) -> Found:
    settle_companions()
    call.feed, call.is_flat = flatten(call.args, call.kwargs, machine.unread.keys), True
    return None


def _asks_for_gradients(machine: StateMachine, call: Call) -> Found:
    return any(map(asks_for_gradients, call.feed.leaves))


def _is_asked_for(machine: StateMachine, call: Call) -> Found:
    return machine.options.asks_eager(machine.calls, call.args, call.kwargs)


def _is_turned_away(machine: StateMachine, call: Call) -> Found:
    return machine.programs.turns_away(machine.lookup.geometry(call.feed))


def _is_refused(machine: StateMachine, call: Call) -> Found:
    if machine.managed.refusal is not None:
        raise machine.managed.refusal
    return None


def _cannot_be_looked_up(machine: StateMachine, call: Call) -> Found:
    call.entry, call.program = machine.lookup.find(call.feed)
    return _is_refused(machine, call)


def _has_refused_key(machine: StateMachine, call: Call) -> Found:
    if call.entry.refusal is not None:
        machine.programs.close(call.entry)
    return call.entry.refusal


def _is_timed(machine: StateMachine, call: Call) -> Found:
    entry = call.entry
    if machine.timing.opens and not entry.is_decided and entry.gate is None:
        entry.gate = machine.timing.gate_of_calls(machine.lookup.moved(call.feed))
        entry.is_decided = entry.gate is None
    return entry.gate is not None and entry.gate.eager is None


def _fits_no_buffer(machine: StateMachine, call: Call) -> Found:
    misfit = None if call.program is None else call.program.misfit(call.feed)
    if misfit is not None and call.program is not None and call.program.inputs.adopted:
        machine.refusals.warn(f"graphplan runs calls eagerly: {misfit}")
    return misfit


def _is_overdue(machine: StateMachine, call: Call) -> Found:
    call.feed = machine.lookup.moved(call.feed)
    overdue = machine.programs.check_due(call.feed)
    if overdue is None:
        return None
    if machine.options.on_failure == "raise":
        raise overdue
    machine.refusals.warn(f"graphplan runs this step eagerly: {overdue}")
    machine.stand_down(SkipReason.SHAPE, str(overdue))
    return str(overdue)


def _waits_for_peers(machine: StateMachine, call: Call) -> Found:
    machine.programs.check_churn()
    machine.stages.check_changes(call.entry)
    return machine.peers is not None and not machine.peers.may_advance(is_planned=bool(call.entry.plans))


def _is_cold(machine: StateMachine, call: Call) -> Found:
    entry, call.is_on_way = call.entry, True
    if not entry.eager_calls:
        machine.programs.count_new()
    if not machine.stages.is_ready(entry):
        return True
    variant = machine.managed.grad_presence()
    line = call.line = entry.lines.setdefault(variant, Line())
    with no_collections():
        walk = call.walk = machine.managed.walk_of_call()
    gone = next((path for path in line.state if path not in walk.slots), None)
    if gone is not None:
        # A recording would make it anew in every replay.
        machine.stats.note(f"traced anew: {gone} is gone, which only an eager step can make", "traces")
        del entry.lines[variant]
    return gone is not None


def _feeds_owned_memory(machine: StateMachine, call: Call) -> Found:
    plan = call.line.plan
    is_fed = plan is not None and plan.shared_leaves(call.feed, call.walk) != plan.shared
    return MEMORY_IS_FED if is_fed else None


def _has_no_memory(machine: StateMachine, call: Call) -> Found:
    plan = call.line.plan
    cramped = None if plan is None else machine.room.make(call.entry, plan, machine.runner.backend)
    if cramped is None:
        return None
    # No fault of the step's: nothing to raise.
    machine.refusals.warn(f"graphplan runs this step eagerly: {cramped}")
    return cramped.reason, str(cramped)


EAGER: tuple[tuple[SkipReason | None, Callable[[StateMachine, Call], Found], Run | None], ...] = (
    (SkipReason.SURROUNDINGS, lambda machine, call: call.around, _surrounded),
    (SkipReason.BACKEND_EAGER, lambda machine, call: True, _untouched),
    (SkipReason.FEED, _cannot_be_flattened, plainly),
    (SkipReason.GRADIENT, _asks_for_gradients, plainly),
    (SkipReason.EAGER_IF, _is_asked_for, _as_traced),
    (None, lambda machine, call: machine.timing.begins(call.feed), _as_stock),
    (SkipReason.CAPTURE, _is_refused, plainly),
    (SkipReason.MAX_GRAPHS, _is_turned_away, plainly),
    (SkipReason.FEED, _cannot_be_looked_up, plainly),
    (SkipReason.GRADIENT, lambda machine, call: call.entry.outside, plainly),
    (SkipReason.CAPTURE, _has_refused_key, plainly),
    (None, _is_timed, _timed),
    (SkipReason.FEED, _fits_no_buffer, _as_traced),
    (None, lambda machine, call: call.program is not None, None),
    (SkipReason.SHAPE, _is_overdue, plainly),
    (SkipReason.MAX_GRAPHS, lambda machine, call: not machine.programs.has_room(call.entry), plainly),
    (SkipReason.PEERS, _waits_for_peers, _as_traced),
    (None, _is_cold, _warming_up),
    (SkipReason.FEED, _feeds_owned_memory, _as_traced),
    (SkipReason.MEMORY, _has_no_memory, plainly),
)
"""Why a call is eager, in this order: the reason, whether it applies (True, or the reason's wording), and how the call
runs; None: it is not eager. A condition may find out more of the call for those below it. One that raises refuses all
calls of the step; one that gives a refusal, calls like this one; one that gives a pair has another reason."""
