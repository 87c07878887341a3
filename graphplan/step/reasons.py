"""The table that decides why a call is eager, and how it runs. The first row that applies decides."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from graphplan.environment.collector import no_collections
from graphplan.errors import HostScalarError, NotCapturedError, RefusalError, SkipReason
from graphplan.feed.call_arguments import own_arguments
from graphplan.feed.signature import Feed, asks_for_gradients, flatten
from graphplan.owners.slots import Walk
from graphplan.program.inputs import MEMORY_IS_FED
from graphplan.program.program import Program
from graphplan.step.batch_variants import MOST_GUESSES
from graphplan.step.entries import Entry, Line, Variant
from graphplan.step.gate import Gate
from graphplan.step.runner import ADVICE

if TYPE_CHECKING:
    from graphplan.step.state_machine import StateMachine


_NEVER_AGAIN = 8
"""Untraced ways by needed values after which, if there is no program, a warning explains the eager calls."""
_TOO_LONG = 256  # Eager calls because of needed values before the step may be refused.
_MOSTLY = 4  # Such calls for each replay before the step is refused.


@dataclass
class Call:
    """One call, and the findings about it. ``around`` describes a mode or transform that is active around the call."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    around: str | None = None
    feed: Feed = field(init=False)
    entry: Entry = field(init=False)
    program: Program | None = None
    variant: Variant = ()
    line: Line = field(init=False)
    walk: Walk = field(init=False)
    is_on_way: bool = False


Found = bool | str | RefusalError | None
"""Whether a row applies. A text is the wording for reports; an error's own reason is used."""
Handler = Callable[[Call, SkipReason | None, str], Any]


class Reasons:
    """The table of one ``step``. Each row: a reason (None: the found error's own, or none), a function that returns
    whether the row applies, how the call runs (None: a found error refuses all calls). Rows store findings in the call.
    """

    def __init__(self, step: StateMachine) -> None:
        self._step = step
        options, managed, programs, timing, on = step.options, step.managed, step.programs, step.timing, SkipReason
        may_advance = (lambda is_planned: True) if step.peers is None else step.peers.may_advance
        self._table: tuple[tuple[SkipReason | None, Callable[[Call], Found], Handler | None], ...] = (
            # With `autograd`, gradients may flow through the call. Else run it like the calls before and after it.
            (on.SURROUNDINGS, lambda call: call.around, step.run_unmanaged if options.autograd else step.run_managed),
            (on.BACKEND_EAGER, lambda call: options.backend == "eager", step.run_unmanaged),
            # Rows about the fed arguments.
            (on.GRADIENT, self._asks_for_gradients, step.run_unmanaged),
            (on.EAGER_IF, self._asks_eager, step.run_managed),
            (None, lambda call: timing.begins(call.feed), step.run_stock),
            (None, lambda call: managed.refusal, None),
            # Rows about the call's entry and program. The lookup may set `managed.refusal`, so check that again.
            (on.SHAPE, self._takes_no_known_way, step.run_managed),
            (None, lambda call: managed.refusal, None),
            (on.GRADIENT, lambda call: call.entry.outside, step.run_unmanaged),
            (None, self._is_refused, step.refused),
            (on.HOST_SCALAR, self._computes_with, step.run_managed),
            (None, self._is_timed, step.timed),
            (on.FEED, self._misfit, step.run_managed),
            (None, lambda call: call.program is not None, step.replay),
            # Rows for calls without a program.
            (on.GUARD, lambda call: call.entry.take_pause(), step.run_managed),
            (on.SHAPE, self._is_overdue, step.run_unmanaged),
            (on.MAX_GRAPHS, lambda call: programs.limit_reason(call.entry), step.run_unmanaged),
            (on.SHAPE, self._waits, step.wait),
            (None, lambda call: programs.churn() or step.stages.change(call.entry), None),
            (on.PEERS, lambda call: not may_advance(bool(call.entry.plans)), step.run_managed),
            (None, self._is_cold, step.warm_up),
            (None, lambda call: call.line.plan is None, step.advance),
            (on.SHAPE, self._has_come_once, step.run_managed),
            (on.FEED, self._is_fed_owners_memory, step.run_managed),
            (None, self._is_cramped, step.run_unmanaged),
            (None, lambda call: True, step.advance),
        )

    def of(self, call: Call) -> tuple[SkipReason | None, str, Handler]:
        """Return reason, detail and way of the first row that applies. Raises RefusalError if the step is refused."""
        for reason, find, handler in self._table:
            found = find(call)
            if not found:
                continue
            if isinstance(found, RefusalError):
                if handler is None:
                    raise found
                return found.reason, str(found), handler
            assert handler is not None
            return reason, "" if found is True else str(found), handler
        raise AssertionError("the last row applies to every call")

    def _asks_for_gradients(self, call: Call) -> Found:
        """Flatten the arguments into ``call.feed``. Applies if gradients are wanted for them."""
        call.feed = flatten(call.args, call.kwargs, self._step.unread.keys)
        return self._step.options.autograd and any(map(asks_for_gradients, call.feed.leaves))

    def _asks_eager(self, call: Call) -> bool:
        step = self._step
        return step.options.asks_eager(step.calls, *own_arguments(call.args, call.kwargs))

    def _takes_no_known_way(self, call: Call) -> Found:
        """Find the entry, and perhaps a program. Applies if no batch variant matches, and no new one is traced."""
        lookup = self._step.lookup
        base, call.program = lookup.find(call.feed)
        call.entry = base
        if base.batch is None or base.refusal is not None:
            return None
        programs, moved = self._step.programs, lookup.moved(call.feed)
        variants = programs.variants_of(base)
        feed = base.batch.extend(moved, sum(program.replays for each in variants for program in each.programs()))
        if feed is None:
            waits = bool(programs.all()) and programs.has_spent() and not base.batch.has_turned
            base.batch.miss(programs.progress if waits else None)
            base.refusal = base.batch.refusal
            if base.refusal is not None:
                self._step.refusals.refuse(base.refusal)
                # Each search for a batch variant runs operators. Without programs, no call searches any more.
                for entry in variants:
                    programs.close(entry)
                self._step.fast_path.forget()
                return False
            if base.batch.is_full or waits:
                return (
                    "the step reads values of this batch on the host, and no program has been captured for these values"
                )
            feed = base.batch.guess(moved) if programs.guesses < MOST_GUESSES else None
        if feed is not None:
            entry, program = lookup.find(feed, base)
            if base.batch is not None:
                call.feed, call.entry, call.program = feed, entry, program
        return None

    def _waits(self, call: Call) -> Found:
        """Applies if the call has to wait for savings. If reads have changed for good, none will come: do not wait."""
        has_turned = call.entry.batch is not None and call.entry.batch.has_turned
        return None if has_turned else self._step.programs.waits(call.entry)

    def _is_refused(self, call: Call) -> Found:
        entry = call.entry
        if entry.refusal is not None:
            self._step.programs.close(entry)
        return entry.refusal or entry.code_path.refusal

    def _computes_with(self, call: Call) -> Found:
        """Applies if code needs the value of an owner's number, and this value is new or one of too many. Raises
        HostScalarError if most calls were eager for that reason.
        """
        entry, programs = call.entry, self._step.programs
        if not entry.lacks_value:
            return None
        entry.value_calls += 1
        detail = f"the step's code needs the value of {entry.code_path.where} on the path that these calls take"
        advice = (
            "Use a tensor instead (your own counter, increased in place), keep the value constant, or pass it as an "
            "argument"
        )
        if entry.value_calls > max(_TOO_LONG, _MOSTLY * self._step.stats.replayed):
            raise HostScalarError(f"{detail}: no program exists for the values of {entry.value_calls} calls. {advice}")
        if len(entry.unknown) >= _NEVER_AGAIN and not programs.all():
            others = "calls that take another path may be replayed"
            self._step.refusals.warn(f"graphplan runs some calls eagerly: {detail}; {others}. {advice}")
        return f"{detail}. {advice}"

    def _is_timed(self, call: Call) -> Found:
        """Create the gate of the call's key if replays have to be faster. Applies to calls that measure eager time."""
        entry, step = call.entry, self._step
        if not entry.is_decided and entry.gate is None:
            if step.timing.opens:
                step.runner.settle_backend(step.lookup.moved(call.feed))
                assert step.runner.device is not None
                entry.gate = Gate.of(step.options, step.runner.device, loops=False)
            entry.is_decided = entry.gate is None
        return entry.gate is not None and entry.gate.eager is None

    def _misfit(self, call: Call) -> Found:
        misfit = None if call.program is None else call.program.misfit(call.feed)
        if misfit is not None and call.program is not None and call.program.inputs.adopted:
            self._step.refusals.warn(f"graphplan runs calls eagerly: {misfit}")
        return misfit

    def _is_overdue(self, call: Call) -> Found:
        """Applies if no program was captured in time. Raises NotCapturedError if refusals raise."""
        step = self._step
        call.feed = step.lookup.moved(call.feed)
        overdue = step.programs.check_due(call.feed, step.given.needed)
        if overdue is None:
            return None
        if step.options.on_failure == "raise":
            raise NotCapturedError(f"{overdue}. {ADVICE}")
        step.refusals.warn(f"graphplan runs this step eagerly: {overdue}")
        step.stand_down(SkipReason.SHAPE, str(overdue))
        return str(overdue)

    def _is_cold(self, call: Call) -> Found:
        """Applies to the first calls of a key. For other calls, finds the line."""
        step, entry = self._step, call.entry
        call.is_on_way = True
        if not entry.eager_calls:
            step.programs.count_new()
        if not step.stages.is_ready(entry):
            return True
        call.variant = step.managed.grad_presence()
        with no_collections():
            walk = call.walk = step.managed.walk_of_call()
        entry.relocate(walk.scalars)
        line = call.line = entry.line(call.variant)
        gone = next((path for path in line.state if path not in walk.slots), None)
        if gone is not None:
            # A recording would create this state again in every replay.
            step.stats.note(f"traced anew: {gone} no longer exists, and only an eager step can create it", "traces")
            entry.forget(line)
        return gone is not None

    def _has_come_once(self, call: Call) -> Found:
        """Applies to one of several ways through the step that was traced once: it is captured when it recurs."""
        line, plan = call.line, call.line.plan
        is_rare = plan is not None and plan.single and len(call.entry.code_paths) > 1 and not line.has_come_again
        line.has_come_again = True
        return (
            "the step's code has several paths, and each is captured once it has been taken again" if is_rare else None
        )

    def _is_fed_owners_memory(self, call: Call) -> Found:
        plan = call.line.plan
        is_other = plan is not None and plan.shared_leaf(call.feed, call.walk) is not None
        return MEMORY_IS_FED if is_other else None

    def _is_cramped(self, call: Call) -> Found:
        step, plan = self._step, call.line.plan
        assert plan is not None
        return step.memory.make(call.entry, plan, step.runner.backend)
