"""Traces of a step, and the plan that two of them, or for a further shape one, lead to.

A trace is a real step. Unless it ends with an error of the step's own, it is undone where it is refused.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, suppress
from functools import partial
from typing import Any

from graphplan.backends.backend import is_out_of_memory
from graphplan.effects.allowed import is_allowed
from graphplan.effects.host import check_threads
from graphplan.effects.host_changes import host_changes
from graphplan.errors import GraphPlanError, LearningRateError, RefusalError
from graphplan.feed.call_arguments import CallArguments
from graphplan.feed.placeholders import ReadSignal, compares_classes
from graphplan.owners.slots import Walk, is_optimizer_state
from graphplan.owners.snapshot import Snapshot
from graphplan.plan.build import build_plan, build_plan_like
from graphplan.plan.difference import is_reordered
from graphplan.plan.plan import Plan
from graphplan.program.capture import outdated
from graphplan.program.faults import is_steps_own, refusal_of
from graphplan.step.call import Call
from graphplan.step.compiled import Rehearsal, uncompiled
from graphplan.step.programs import Entry, Line
from graphplan.step.runner import Parts
from graphplan.trace.records import Trace, collect

_REORDERED = 5
"""Maximum retraces for operators that autograd's engine reordered, after 4, 8, ... 64 further steps."""
_STRADDLING = 3
"""Pairs of traces in a row between which host code changed something: it is no coincidence any more."""


class Traces:
    """Traces one step and builds its plans."""

    def __init__(self, parts: Parts) -> None:
        self._runner, self._managed, self._options = parts.runner, parts.managed, parts.options
        self._refusals, self._peers, self._programs = parts.refusals, parts.peers, parts.programs
        self._stats = parts.runner.stats
        self._latest: Trace | None = None
        """The latest trace, until there is a plan or a refusal."""
        self._changing = "", 0
        """The path whose value differs between consecutive traces of any key, and how often in a row."""

    @property
    def has_changed(self) -> bool:
        """Whether a value differs between the latest traces, of whatever key."""
        return bool(self._changing[1])

    def forget(self) -> None:
        """Let go of what was traced."""
        self._latest, self._changing = None, ("", 0)

    def may_take_one(self, entry: Entry) -> bool:
        """Whether one trace may be enough: the first replay is checked, and no other ranks train along."""
        return self._peers is None and not entry.takes_two and self._options.schedule.after(0) == 1

    def drop_outdated(self, call: Call) -> None:
        """Drop a plan whose Python values have changed since its traces."""
        entry, line = call.entry, call.line
        if line.plan is None:
            return
        with self._managed.rates:
            changed = outdated(line.plan, call.walk)
        if changed is not None:
            self._stats.note(f"traced anew: {changed}", "traces")
            line.plan = None
            # Two traces refuse what changes after each trace.
            entry.takes_two |= line.is_like_others

    def trace(self, call: Call, fed: CallArguments, undo: ExitStack, snapshot: Snapshot) -> Any:
        """Trace a call, and keep the trace. A step that runs compiled code is rehearsed: the trace is undone, and the
        step run again. ``undo`` is called back by the caller if this raises.

        Raises:
            RefusalError: if the step cannot be replayed correctly, and refusals are raised.
            ReadSignal: if the step reads a value that its key leaves out.
        """
        facts, feed = Trace(), call.feed
        rehearses = self._managed.runs_compiled(call.walk)
        undo.callback(facts.undo_unowned_writes)
        with self._stats.timed("trace"):
            result, walk = self._run(call, fed, facts, undo, rehearses=rehearses)
            if feed.unread and any(compares_classes(code) for code, _ in facts.reads.codes):
                raise ReadSignal(feed.unread)
            rehearsal = None
            if rehearses or facts.ran.compiled:
                rehearsal = Rehearsal(self._managed.walk, result, self._options.allow)
                rehearsal.undo(facts, snapshot)
                fed.restore()
                result = self._runner.run(lambda: self._runner.call(CallArguments.of(feed)))
            try:
                if rehearsal is not None and self._runner.backend.executes:
                    rehearsal.check(result, self._runner.fn)
                self._take(call, facts, walk if rehearsal is None else None)
                if self._peers is not None:
                    self._peers.meet(f"trace {self._stats.traced}")
            except LearningRateError:
                raise
            except Exception as failure:
                error = failure if isinstance(failure, RefusalError) else refusal_of(failure)
                if error is None:
                    raise
                # The traced step is a good eager step, and stands unless the refusal raises.
                self._refusals.refuse(error)
                call.entry.refusal = error
                self._stats.skip(error.reason, str(error))
        return result

    def _run(
        self, call: Call, fed: CallArguments, facts: Trace, undo: ExitStack, *, rehearses: bool
    ) -> tuple[Any, Walk]:
        """Run the step under the trace. An error of the step's own leaves what it leaves in an eager step."""
        entry, line, feed = call.entry, call.line, call.feed
        device, before = self._runner.device, line.traces[-1] if line.traces else None
        body = partial(self._managed.trace, feed, fed, facts, device, before)
        try:
            with uncompiled():
                return self._runner.run_walked(body, traced=True)
        except BaseException as error:
            if isinstance(error, (GraphPlanError, ReadSignal)) or is_out_of_memory(error):
                raise
            if is_steps_own(error) and not (rehearses or feed.unread):
                undo.pop_all()
                # The next step makes good what this one left half done, or fails again; traces come after it.
                line.traces = []
                entry.warm = min(entry.warm, self._options.warmup_steps - 1)
            raise

    def _take(self, call: Call, facts: Trace, at_end: Walk | None) -> None:
        """Keep a trace, and plan if there are enough. ``at_end`` is its last walk, if still valid."""
        entry, line = call.entry, call.line
        check_threads(facts, self._options.allow)
        if facts.violation is not None:
            raise facts.violation
        self._managed.check_kept()
        walk = at_end or self._managed.walk()
        if self._managed.take_names(facts.ran, walk):
            # Code ran for the first time: what it uses was not watched yet.
            line.traces = []
            return
        self._note_change(facts, walk)
        # What turned up for the first time is the step's own, or a name that one more trace will know.
        entry.takes_two |= not self._managed.is_settled
        line.traces.append(facts)
        line.state = [path for path in facts.entry_paths if is_optimizer_state(path)]
        plan = line.plan = self._plan(call, walk, at_end)
        if plan is None:
            return
        line.traces, self._latest = [], None
        line.straddling = 0
        for text in _omissions(facts, self._options.allow):
            self._refusals.warn(text)
        self._runner.plan = plan
        for fact in plan.assertions:
            self._stats.note(fact)
        needed = self._runner.backend.needs(plan.footprint, alone=True)
        self._stats.bytes_estimated = max(self._stats.bytes_estimated, needed)
        self._stats.launches_eager += plan.launches * (entry.eager_calls + 1)

    def _note_change(self, facts: Trace, walk: Walk) -> None:
        before, self._latest = self._latest, facts
        if before is not None:
            changed = host_changes(before, facts, walk, self._options.allow)
            path = "" if changed is None else changed.split(" was ")[0]
            self._changing = path, self._changing[1] + 1 if path and path == self._changing[0] else int(bool(path))

    def _plan(self, call: Call, walk: Walk, at_end: Walk | None) -> Plan | None:
        """The plan of two traces; or of one, if another key has a plan like it and the first replay is checked."""
        entry, line, feed = call.entry, call.line, call.feed
        planning: dict[str, Any] = {
            "owners": lambda: self._managed.owners,
            "function": lambda: self._runner.fn,
            "allow": self._options.allow,
            "rates": self._managed.rates,
            "walk": at_end,
        }
        first, *others = line.traces
        if not others:
            line.is_like_others = False
            if self.may_take_one(entry):
                with self._managed.rates, suppress(RefusalError):
                    plan = build_plan_like(self._programs.plans_of_others(entry), first, feed, **planning)
                    line.is_like_others = plan is not None
                    return plan
            return None
        (second,) = others
        loose = max(line.straddling, self._changing[1] - 1) >= _STRADDLING - 1
        try:
            with self._managed.rates:
                return self._build(first, second, feed, loose=loose, **planning)
        except RefusalError:
            line.traces = []
            if self._may_trace_anew(entry, line, first, second, walk):
                return None
            self._latest = None
            raise

    def _build(self, *traces_and_feed: Any, allow: Sequence[str], **planning: Any) -> Plan:
        """The plan of two traces. While refusals are collected, what may be allowed is, to find the next one."""
        while True:
            try:
                return build_plan(*traces_and_feed, allow=allow, **planning)
            except RefusalError as error:
                if error.path is None or error.path in allow or not collect(error):
                    raise
                allow = (*allow, error.path)

    def _may_trace_anew(self, entry: Entry, line: Line, first: Trace, second: Trace, walk: Walk) -> bool:
        """Whether two traces differ by what happened between them, so that further ones may be alike."""
        if self._changing[1] >= _STRADDLING:
            return False
        moved = second.moved_since(first)
        if moved is not None and not line.traced_anew:
            # For example, a checkpoint was loaded.
            line.traced_anew = True
            self._stats.note(f"traced anew: {moved} is not what it was one step before", "traces")
            return True
        # Ranks have to trace in the same steps.
        if self._peers is None and line.reordered < _REORDERED and is_reordered(first, second):
            line.reordered += 1
            entry.warm = self._options.warmup_steps - 2 ** (line.reordered + 1)
            self._stats.note(
                "traced anew: autograd's engine ran the same operators in another order one step before", "traces"
            )
            return True
        changed = host_changes(first, second, walk, self._options.allow)
        line.straddling += changed is not None
        if changed is not None and line.straddling < _STRADDLING:
            # For example, an epoch ended: the second trace is the first of the next pair.
            line.traces = [second]
            self._stats.note(f"traced anew: {changed}", "traces")
            return True
        return False


def _omissions(facts: Trace, allow: Sequence[str]) -> Iterator[str]:
    """Warnings of what replays leave out although no number changes: prints, writes, calls of extension modules."""
    if facts.prints and not is_allowed("print", allow):
        yield (
            f"the step prints at {facts.prints[0]}, and a replay runs no Python: only eager calls will "
            "print. Print what the step returns, outside it, or pass allow=('print',)"
        )
    for name, source in facts.ran.writers.items():
        if not is_allowed(name, allow):
            yield (
                f"the step calls {name} at {source}, and a replay runs no Python: only eager calls will write. Write "
                f"after the step what it returns (in a Trainer: self.log, or a hook), or pass allow=({name!r},)"
            )
    for name, source in facts.ran.extensions.items():
        if not is_allowed(name, allow):
            yield (
                f"the step calls {name}, a function of an extension module, at {source}: what it remembers is "
                "compared by checks alone, and what it does to memory or on the host is not in a replay unless it "
                "launches kernels. Register it as a torch operator (torch.library), or, if its results follow from "
                f"its arguments, pass allow=({name!r},)"
            )
