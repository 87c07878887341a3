"""Make a plan from traces, and decide what follows if two traces do not give one: further traces, or a refusal."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Sequence
from contextvars import ContextVar
from typing import Any

import torch
from torch.nn import Module

from graphplan.effects.allowed import is_allowed
from graphplan.effects.host_changes import host_changes
from graphplan.effects.trace_pair import TracePair
from graphplan.environment.origin import is_librarys, is_users
from graphplan.errors import ControlFlowError, HostEffectError, HostScalarError, OutcomeError, RefusalError
from graphplan.feed.signature import Feed
from graphplan.observe.host_draws import DRAWN
from graphplan.observe.subscripts import looked_up_in
from graphplan.owners.generators import NUMPYS, PYTHONS
from graphplan.owners.slots import Namespace, Scalar, Walk
from graphplan.owners.views import CallNumbers, ReadOnly
from graphplan.plan.build import build_plan
from graphplan.plan.difference import is_reordered
from graphplan.plan.plan import Plan
from graphplan.plan.single import one_trace_suffices
from graphplan.step.entries import Entry, Line, value_at
from graphplan.step.reasons import Call
from graphplan.step.runner import StepContext
from graphplan.tensors.symbolic import has_stand_ins
from graphplan.trace.changes import same_value
from graphplan.trace.records import Trace, collect
from graphplan.trace.symbolic_numbers import SymbolicNumbers, may_be_symbolic
from graphplan.verify.schedule import next_check

FICKLE_TRACES = 3
"""Traces and captures of one line in which a branch may change before the step is refused."""
ALWAYS_TWO_TRACES = ContextVar("twice", default=False)
"""Whether steps that are created in this context need two traces: only two traces can name the line that differs."""
_REORDERED = 5  # Maximum retraces for reordered autograd; back off 4, 8, ... 64 steps.
_REPLACED = (
    CallNumbers,
    ReadOnly,
)  # Containers whose numbers have stand-ins even before they are known to change.
_STRADDLING = 3  # Consecutive pairs of traces between which host code changed a value before the step is refused.


class Planner:
    """The planner of one step: makes plans from traces, and selects the numbers that have stand-ins in traces."""

    def __init__(self, parts: StepContext) -> None:
        self._managed, self._options, self._peers = parts.managed, parts.options, parts.peers
        self._stats = parts.runner.stats
        self._follows_draws = True
        self._replaces = True  # False once code needed a real number and it is unknown which one.
        self._kept: set[str] = set()  # Paths of numbers whose real values code needs.
        self._numbers: dict[str, Any] = {}  # Numbers that the step's code names, as before the latest call.
        self._tables: set[str] = set()  # Names of containers in which the step only looks up numbers.
        self._looks_up = True  # False once code needed a real container.
        self._changing_numbers: set[str] = set()  # Paths of numbers that have changed between calls.
        self._read: dict[str, Any] = {}  # The numbers for which the latest plan is valid, by path.
        self._latest: Trace | None = None  # The latest trace, until there is a plan or a refusal.
        self._times_changed: Counter[str] = Counter()  # How often the value at a path differed between traces.
        self._changing = "", 0  # The path that differs between consecutive traces, and how often in a row.
        # A single trace needs a check of the first replay, and ranks have to trace in the same steps.
        is_checked = next_check(self._options.check_every, 0) == 1
        self.single_trace_allowed = is_checked and self._peers is None and not ALWAYS_TWO_TRACES.get()
        """Whether a plan may be made from a single trace: not once such a plan or its capture has missed something."""

    def forget(self) -> None:
        """Drop the latest trace."""
        self._latest, self._changing = None, ("", 0)

    def note(self, facts: Trace, walk: Walk) -> None:
        """Record a trace, and the first value that has changed since the previous trace, of any key."""
        before, self._latest = self._latest, facts
        if before is not None:
            changed = host_changes(TracePair(before, facts, walk, self._options.allow))
            path = "" if changed is None else changed.split(" was ")[0]
            self._times_changed[path] += 1
            self._changing = path, self._changing[1] + 1 if path and path == self._changing[0] else int(bool(path))

    def note_numbers(self, walk: Walk) -> None:
        """Record which of the numbers that the step's code names have changed since the previous call."""
        named = {path: place for path, place in walk.scalars.items() if self._may_replace(path, place)}
        numbers = {path: value for path, place in named.items() if _may_vary(value := value_at(place))}
        before = self._numbers
        changed = (path for path in numbers.keys() & before.keys() if not same_value(before[path], numbers[path]))
        self._changing_numbers.update(changed)
        self._numbers = numbers

    def _may_replace(self, path: str, place: Scalar, *, is_named: bool = False) -> bool:
        names = self._managed.names
        is_named |= path in self._changing_numbers or place.is_called(names.attributes)
        # Methods of a package's metrics and averages may read the counters that these objects keep.
        is_named |= place.attribute in names.mentioned and _is_of_package(type(place.owner))
        # A package's module reads the Trainer's counters through properties of Lightning's base class.
        is_named |= type(place.container) is ReadOnly and place.attribute in names.beyond_libraries
        is_named |= type(place.container) is CallNumbers or isinstance(place.owner, Namespace)
        return is_named and may_be_symbolic(place) and not is_allowed(path, self._options.allow)

    def make_symbolic(self, walk: Walk, device: torch.device | None, *, arguments_alone: bool) -> SymbolicNumbers:
        """Make stand-ins for the next trace, for arguments that vary, the Trainer's counters and changing numbers."""
        self._learn_changed(walk)
        self.note_numbers(walk)
        kinds = _REPLACED[: 1 if arguments_alone else 2] if self._replaces else ()
        replaced = {
            path: walk.scalars[path]
            for path, value in self._numbers.items()
            if has_stand_ins(type(value)) and path not in self._kept and self._changes(path, walk.scalars[path], kinds)
        }
        tables = walk.tables(self._tables) if replaced else []
        held = {id(space[key]) for space, key, _ in tables}
        # A container's stand-in covers its items, so they have no stand-ins of their own.
        replaced = {path: place for path, place in replaced.items() if id(place.container) not in held}
        follows = [name for name in (PYTHONS, NUMPYS) if not is_allowed(name, self._options.allow)]
        may_follow = self._follows_draws and self._replaces and not arguments_alone
        return SymbolicNumbers(
            replaced, device, follows=follows if may_follow else (), is_shared=self._peers is not None,
            tables=tables,
        )  # fmt: skip

    def take_tables(self, facts: Trace, walk: Walk) -> bool:
        """Record the containers in which the step only looks up numbers. Return True if one has no stand-in yet."""
        if not self._looks_up or self._managed.names.computes:
            return False
        looked_up = {
            name for code in facts.symbolic.indexing_code.values() for name in looked_up_in(code)
        } - self._tables
        found = walk.tables(looked_up - facts.reads.misused(looked_up))
        changing = {id(walk.scalars[path].container) for path in self._changing_numbers & walk.scalars.keys()}
        self._tables.update(name for space, key, name in found if id(space[key]) not in changing)
        return bool(found) and not self._tables.isdisjoint(looked_up)

    def drop_tables(self) -> bool:
        """Use no stand-ins for containers from now on. Return True if there were any."""
        had, self._looks_up = bool(self._tables), self._looks_up and not self._tables
        self._tables = set()
        return had

    def _learn_changed(self, walk: Walk) -> None:
        """Record which numbers have changed since the latest plan, which is valid for their old values."""
        for path, value in self._read.items():
            place = walk.scalars.get(path)
            is_other = place is not None and not same_value(value_at(place), value)
            if place is not None and is_other and self._may_replace(path, place, is_named=True):
                self._changing_numbers.add(path)

    def replace_less(self, paths: frozenset[str], walk: Walk) -> None:
        """Use real numbers at ``paths``, since code needs their values. Without paths, use real numbers for all that
        were seen to change, or if there are none, everywhere.
        """
        if not paths:
            places = {path: walk.scalars[path] for path in self._changing_numbers & walk.scalars.keys() - self._kept}
            paths = frozenset(path for path, place in places.items() if type(place.container) not in _REPLACED)
        self._kept |= paths
        self._follows_draws &= not any(path.startswith(DRAWN) for path in paths)
        self._replaces &= bool(paths)

    def _changes(self, path: str, place: Scalar, kinds: Sequence[type] = _REPLACED) -> bool:
        return type(place.container) in kinds or (len(kinds) > 1 and path in self._changing_numbers)

    def take_truths(self, facts: Trace, walk: Walk) -> None:
        """Record a question for each changing truth value that the step's code may have read."""
        for path, value in self._numbers.items():
            place = walk.scalars.get(path)
            if type(value) is bool and place is not None and self._changes(path, place) and facts.reads.covers(place):
                facts.symbolic.ask_truth(path, value)

    def plan(self, call: Call, walk: Walk, at_end: Walk | None) -> Plan | None:
        """Make the plan of the line's traces; None if more are needed. Raises RefusalError if more would not help."""
        plan = self._plan(call, walk, at_end) if len(call.line.traces) > 1 else self._plan_single(call, at_end)
        single_trace_error = call.entry.single_trace_error
        if plan is not None and single_trace_error is not None:
            call.line.traces, call.entry.single_trace_error = [], None
            raise single_trace_error
        if plan is not None and not plan.single:
            self.settle(call, plan)
        return plan

    def settle(self, call: Call, plan: Plan) -> None:
        """Drop the traces of a plan that two traces gave or that is captured next, and reset their counters."""
        call.line.traces, call.line.straddling, call.line.renamed, self._latest = [], 0, 0, None
        self.take_numbers(plan)

    def take_numbers(self, plan: Plan) -> None:
        """Record the numbers for which a plan is valid. If one has changed by the next trace, it gets a stand-in."""
        self._read = {path: value for path, value in plan.reads.values.items() if _may_vary(value)}

    def _plan_single(self, call: Call, at_end: Walk | None) -> Plan | None:
        """Make a plan from one trace, which is kept: it is the first of two if the plan is outdated at the capture."""
        (trace,) = call.line.traces
        single_trace_allowed = self.single_trace_allowed and self._managed.knows_all and at_end is not None
        if not (single_trace_allowed and one_trace_suffices(trace, self._managed.rates.storages)):
            return None
        try:
            with self._managed.rates:
                handles = self._managed.handles
                plan = build_plan(trace, trace, call.feed, handles, allow=self._options.allow, walk=at_end)
        except RefusalError:
            # The refusal after a second trace is more specific.
            return None
        # A single trace needs a check of the first replay, which is not certain if the step communicates.
        return None if plan.communicates else plan

    def _plan(self, call: Call, walk: Walk, at_end: Walk | None) -> Plan | None:
        entry, line, feed = call.entry, call.line, call.feed
        first, second = line.traces
        loose = max(line.straddling, self._changing[1] - 1) >= _STRADDLING - 1
        try:
            with self._managed.rates:
                return self._build(first, second, feed, loose=loose, walk=at_end)
        except RefusalError as error:
            line.traces, entry.single_trace_error = [], None
            if isinstance(error, OutcomeError):
                line.outcomes += 1
                if line.outcomes >= FICKLE_TRACES:
                    raise error.refusal from None
                line.traces = [second]
                self._stats.note(f"traced anew: {error}", "traces")
                return None
            pair = TracePair(first, second, walk, self._options.allow)
            if self._learns(error, pair):
                return None
            if self._may_trace_anew(entry, line, pair) or self._is_newly_followed(line, pair):
                return None
            self._latest = None
            raise

    def _build(self, first: Trace, second: Trace, feed: Feed, *, loose: bool, walk: Walk | None) -> Plan:
        """Make the plan of two traces. While refusals are collected, allow each refused path, to find the next one."""
        allow, handles = self._options.allow, self._managed.handles
        while True:
            try:
                return build_plan(first, second, feed, handles, allow=allow, walk=walk, loose=loose)
            except RefusalError as error:
                if error.path is None or error.path in allow or not collect(error):
                    raise
                allow = (*allow, error.path)

    def _learns(self, error: RefusalError, pair: TracePair) -> bool:
        """Return True if numbers changed without stand-ins, which may have caused ``error``: they get stand-ins now."""
        if not isinstance(error, (HostScalarError, HostEffectError, ControlFlowError)) or not self._replaces:
            return False
        before, now = (trace.entry_scalars for trace in pair.both)
        changed = {path for path in before.keys() & now.keys() if not same_value(before[path], now[path])}
        numbers = (path for path in changed & pair.walk.scalars.keys() if _may_vary(now[path]))
        places = {path: pair.walk.scalars[path] for path in numbers if path not in self._changing_numbers}
        # If only a library's code names a number, one change from outside is no pattern (a layer's probability).
        again = {path for path, times in self._times_changed.items() if times > 1}
        counted = {path for path, _, new in pair.changed("scalars") if new is not None}
        again |= counted
        shown = counted if any(trace.symbolic.behind for trace in pair.both) else set()
        named = {path: path in again and (path in shown or pair.reads(place)) for path, place in places.items()}
        new = {path for path, place in places.items() if self._may_replace(path, place, is_named=named[path])}
        self._changing_numbers |= new
        self._note_followed(new)
        return bool(new)

    def _may_trace_anew(self, entry: Entry, line: Line, pair: TracePair) -> bool:
        """Return True if two traces differ because of an event between them, so that further traces may be alike."""
        if self._changing[1] >= _STRADDLING:
            return False
        moved = pair.second.moved_since(pair.first)
        # For example, a checkpoint was loaded.
        changed = None if moved is None else f"{moved} has changed since the step before"
        # Ranks have to trace in the same steps.
        may_reorder = changed is None and self._peers is None and line.reordered < _REORDERED
        if may_reorder and is_reordered(*pair.both):
            line.reordered += 1
            entry.warm = self._options.warmup_steps - 2 ** (line.reordered + 1)
            self._stats.note(
                "traced anew: autograd's engine ran the same operators in another order one step before", "traces"
            )
            return True
        changed = changed or host_changes(pair) or _settled(pair)
        line.straddling += changed is not None
        if changed is None or line.straddling >= _STRADDLING:
            return False
        # For example, an epoch ended: the second trace is the first of the next pair.
        line.traces = [pair.second]
        self._stats.note(f"traced anew: {changed}", "traces")
        return True

    def _is_newly_followed(self, line: Line, pair: TracePair) -> bool:
        """Return True if a number got its stand-in only in the second trace, after it was seen to change."""
        late = pair.second.symbolic.places.keys() - pair.first.symbolic.places.keys()
        if not late:
            return False
        line.traces = [pair.second]
        self._note_followed(late)
        return True

    def _note_followed(self, paths: Collection[str]) -> None:
        if paths:
            what = f"{min(paths)} was seen to change, and has a stand-in from now on: replays follow its value"
            self._stats.note(f"traced anew: {what}", "traces")


def _is_of_package(kind: type) -> bool:
    """Return True for a class of an installed package, torchmetrics' modules included. torch's layers count nothing."""
    is_module = issubclass(kind, Module) and not str(kind.__module__).startswith("torch.")
    return not is_users(kind) and (is_module or not is_librarys(kind))


def _may_vary(value: Any) -> bool:
    """Return True for a truth value, or a number that may have a stand-in."""
    return type(value) is bool or has_stand_ins(type(value))


def _settled(pair: TracePair) -> str | None:
    """Describe a number that the step changed in the first trace but not in the second, as at an upper bound."""
    settled = (path for path, old, new in pair.changed("scalars") if old is not None and new is None)
    path = next((path for path in settled if path in pair.second.symbolic.places), None)
    return None if path is None else f"the step does not change {path}, but the step before did"
