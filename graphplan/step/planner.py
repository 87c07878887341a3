"""From traces to a plan, and what follows where two traces of a step do not give one.

They may differ by what the host did between them, or because the calls take two ways through the step's code. Then
others follow, and the calls of each way have a plan of their own; else the step is refused.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from graphplan.effects.compared_numbers import find_comparisons
from graphplan.effects.host_changes import host_changes
from graphplan.effects.reads import names_changing
from graphplan.effects.trace_pair import TracePair
from graphplan.errors import ControlFlowError, HostEffectError, HostScalarError, OutcomeError, RefusalError
from graphplan.observe.comparisons import come_out_alike
from graphplan.owners.slots import Walk
from graphplan.plan.build import build_plan
from graphplan.plan.difference import is_reordered
from graphplan.plan.plan import Plan
from graphplan.step.programs import Entry, Line
from graphplan.step.reasons import Call
from graphplan.step.runner import Parts
from graphplan.trace.records import Trace, collect

FICKLE_TRACES = 3
"""Traces and captures of one line that may come to another value than a trace before, where the step branches on it."""
_REORDERED = 5
"""Maximum retraces for operators that autograd's engine reordered, after 4, 8, ... 64 further steps."""
_STRADDLING = 3
"""Pairs of traces in a row between which host code changed something: it is no coincidence any more."""


class Planner:
    """Makes plans of one step's traces.

    Attributes:
        covers: whether traces leave out what code names and does not come to.
    """

    def __init__(self, parts: Parts) -> None:
        self._managed, self._options, self._peers = parts.managed, parts.options, parts.peers
        self._stats = parts.runner.stats
        self.covers = False
        self._latest: Trace | None = None
        """The latest trace, until there is a plan or a refusal."""
        self._changing = "", 0
        """The path whose value differs between consecutive traces of any key, and how often in a row."""

    def forget(self) -> None:
        """Let go of what was traced."""
        self._latest, self._changing = None, ("", 0)

    def note(self, facts: Trace, walk: Walk) -> None:
        """Note a trace, and what has changed since the one before, of whatever key."""
        before, self._latest = self._latest, facts
        if before is not None:
            changed = host_changes(TracePair(before, facts, walk, self._options.allow))
            path = "" if changed is None else changed.split(" was ")[0]
            self._changing = path, self._changing[1] + 1 if path and path == self._changing[0] else int(bool(path))

    def plan(self, call: Call, walk: Walk, at_end: Walk | None) -> Plan | None:
        """The plan of the line's traces, which it then lets go of; None if others have to follow. ``at_end`` is a walk
        that is still valid.

        Raises:
            RefusalError: if no others would lead to a plan.
        """
        plan = self._plan(call, walk, at_end)
        if plan is not None:
            call.line.traces, call.line.straddling, self._latest = [], 0, None
        return plan

    def _plan(self, call: Call, walk: Walk, at_end: Walk | None) -> Plan | None:
        entry, line, feed = call.entry, call.line, call.feed
        handles = self._managed.handles
        planning: dict[str, Any] = {"allow": self._options.allow, "walk": at_end}
        if len(line.traces) < 2:
            return None
        first, second = line.traces
        loose = max(line.straddling, self._changing[1] - 1) >= _STRADDLING - 1
        try:
            with self._managed.rates:
                return self._build(first, second, feed, handles, loose=loose, **planning)
        except RefusalError as error:
            line.traces = []
            if isinstance(error, OutcomeError):
                line.outcomes += 1
                if line.outcomes >= FICKLE_TRACES:
                    raise error.refusal from None
                line.traces = [second]
                self._stats.note(f"traced anew: {error}", "traces")
                return None
            pair = TracePair(first, second, walk, self._options.allow)
            may_cover = self._may_cover(error, pair)
            if self._tells_apart(entry, pair, only_compared=may_cover):
                line.traces = [second]
                return None
            if may_cover:
                self.covers = True
                self._stats.note(f"traced anew, with a look at what code comes to: {error}", "traces")
                return None
            if self._may_trace_anew(entry, line, pair):
                return None
            self._latest = None
            raise

    def _may_cover(self, error: RefusalError, pair: TracePair) -> bool:
        """Whether traces that leave out what code does not come to may do: a number that changes stands in the way, or
        what is done in the branch of which it decides.
        """
        if self.covers:
            return False
        if isinstance(error, HostScalarError):
            return error.is_named
        is_effect = isinstance(error, (HostEffectError, ControlFlowError))
        return is_effect and names_changing(pair)

    def _build(self, *parts: Any, allow: Sequence[str], **planning: Any) -> Plan:
        """The plan of two traces. While refusals are collected, what may be allowed is, to find the next one."""
        while True:
            try:
                return build_plan(*parts, allow=allow, **planning)
            except RefusalError as error:
                if error.path is None or error.path in allow or not collect(error):
                    raise
                allow = (*allow, error.path)

    def _tells_apart(self, entry: Entry, pair: TracePair, *, only_compared: bool) -> bool:
        """Whether the traces are for other outcomes of comparisons with owners' numbers, as calls are from now on: of
        both traces, or of one, after whose outcome code does no more with the number. ``only_compared``: not of numbers
        with which code computes after an outcome, since it may not come to that.
        """
        alone = [replace(pair, first=trace, second=trace) for trace in pair.both] if self.covers else []
        for traces in (pair, *alone):
            compared = {
                path: (pair.walk.scalars[path], comparisons)
                for path, comparisons in find_comparisons(traces).items()
                if not come_out_alike(comparisons, *(trace.entry_scalars.get(path) for trace in pair.both))
            }
            computes = any(made.computes is not None for _, comparisons in compared.values() for made in comparisons)
            if compared and not (computes and only_compared):
                entry.compare(compared, pair.second.entry_scalars)
                return True
        return False

    def _may_trace_anew(self, entry: Entry, line: Line, pair: TracePair) -> bool:
        """Whether two traces differ by what happened between them, so that further ones may be alike."""
        if self._changing[1] >= _STRADDLING:
            return False
        moved = pair.second.moved_since(pair.first)
        # For example, a checkpoint was loaded.
        changed = None if moved is None else f"{moved} is not what it was one step before"
        # Ranks have to trace in the same steps.
        may_reorder = changed is None and self._peers is None and line.reordered < _REORDERED
        if may_reorder and is_reordered(*pair.both):
            line.reordered += 1
            entry.warm = self._options.warmup_steps - 2 ** (line.reordered + 1)
            self._stats.note(
                "traced anew: autograd's engine ran the same operators in another order one step before", "traces"
            )
            return True
        changed = changed or host_changes(pair)
        line.straddling += changed is not None
        if changed is None or line.straddling >= _STRADDLING:
            return False
        # For example, an epoch ended: the second trace is the first of the next pair.
        line.traces = [pair.second]
        self._stats.note(f"traced anew: {changed}", "traces")
        return True
