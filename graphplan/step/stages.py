"""The stages on the way to a program: eager warm-up, two traces, plan, capture. A further shape takes fewer of them.

Each is a real step on the batch it is given. A trace or a capture that is refused is undone, and so is a capture that
an error ends; a trace that an error of the step's own ends leaves what an eager step leaves.

Longer than most rooms: the stages share what has to be undone where one of them ends early.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack, nullcontext, suppress
from functools import partial
from typing import Any, TypeVar

import torch

from graphplan.backends.backend import is_out_of_memory, refusing_memory
from graphplan.effects.host import check_threads
from graphplan.effects.host_changes import host_changes
from graphplan.errors import GraphPlanError, HostEffectError, LearningRateError, RefusalError, SkipReason
from graphplan.feed.buffers import Buffers
from graphplan.feed.call_arguments import CallArguments
from graphplan.feed.placeholders import ReadSignal, compares_classes
from graphplan.feed.signature import Feed, asks_for_gradients
from graphplan.feed.unread import Placeholders, UnreadValues, with_placeholders
from graphplan.optimizers.first_steps import within_first_steps
from graphplan.owners.slots import Walk, is_optimizer_state
from graphplan.owners.snapshot import Snapshot
from graphplan.plan.alike import build_plan_like
from graphplan.plan.build import build_plan
from graphplan.plan.difference import is_reordered
from graphplan.plan.plan import Plan
from graphplan.program.capture import outdated
from graphplan.program.faults import is_steps_own, refusal_of
from graphplan.program.inputs import MEMORY_IS_FED
from graphplan.step.captures import Captures
from graphplan.step.compiled import Rehearsal, refuse_graphs_within, uncompiled
from graphplan.step.entry import Entry, Line
from graphplan.step.managed import Managed
from graphplan.step.memory_budget import Room
from graphplan.step.omissions import omissions
from graphplan.step.options import Options
from graphplan.step.peers import Peers
from graphplan.step.programs import Programs
from graphplan.step.refusals import Refusals
from graphplan.step.runner import Runner
from graphplan.tensors.trees import flatten_result
from graphplan.trace.records import Trace
from graphplan.trace.run import trace

Walked = TypeVar("Walked")
_NO_ACCIDENT = 2
"""So many steps in a row do not all make something that later ones find there."""
_REORDERED = 5
"""As often traces may differ in the order of autograd's engine, after 4, 8, ... 64 further steps."""
_STRADDLING = 3
"""Pairs of traces in a row that somebody changed something between: it is no longer by chance."""
_OFTEN = 32
"""A key that comes again within so many calls is worth a program at once, where that costs less."""
_TURNS = 2
"""Calls for which a key waits for another one's plan."""


class Stages:
    """Takes the steps on the way to a program, and counts them."""

    def __init__(
        self,
        runner: Runner,
        managed: Managed,
        options: Options,
        *,
        buffers: Buffers,
        refusals: Refusals,
        peers: Peers | None,
        programs: Programs,
        room: Room,
        unread: UnreadValues,
    ) -> None:
        self._peers = peers
        self._unread = unread
        self._programs = programs
        self._room = room
        self._runner = runner
        self._managed = managed
        self._options = options
        self._captures = Captures(runner, managed, options, buffers)
        self._refusals = refusals
        self._stats = runner.stats
        # What first calls in a row, each with a key of its own, changed in containers that they were fed.
        self._changes: list[str] = []
        self._latest: Trace | None = None
        """The latest trace, until there is a plan or a refusal."""
        self._changing = "", 0
        """What was another value in each trace of late than in the one before, of whatever key, and how often."""
        self._keeping = 0
        """Warm-up steps in a row that have made modules or optimizers, and kept them."""

    def is_ready(self, entry: Entry) -> bool:
        """Whether the next call of ``entry`` is traced or captured, and not one more eager step. Asked once for each.

        All shapes of a training step warm up together: one that comes often needs a single eager step of its own. While
        another one has been traced once, this one waits for its second trace, which saves all others theirs;
        unless it was seen that a value changes, of which all traces tell.
        """
        calls = self._stats.calls
        is_often, entry.called = calls - entry.called <= _OFTEN, calls
        enough = self._options.warmup_steps
        if self._options.mode != "train" or not (entry.is_new and self._may_take_one(entry)):
            return entry.warm >= enough
        others = self._programs.other_shapes(entry)
        is_planned = self._programs.is_further(entry)
        waits = not (is_planned or self._changing[1])
        is_begun = waits and any(line.traces for other in others for line in other.lines.values())
        if entry.warm < enough:
            warm = entry.warm + sum(other.warm for other in others)
            if is_begun or not (entry.warm and is_often and (is_planned or warm >= enough)):
                return False
            entry.warm = enough
        entry.waited += is_begun
        return not (is_begun and entry.waited <= _TURNS)

    def _may_take_one(self, entry: Entry) -> bool:
        """Whether one trace may be enough: where the first replay is checked, and no other ranks do something else."""
        return self._peers is None and not entry.takes_two and self._options.schedule.after(0) == 1

    def warm_up(self, entry: Entry, feed: Feed) -> Any:
        """An eager step that takes in the owners that it turns out to use. Where there is a plan of another shape, they
        are known.
        """
        self._runner.settle_backend(feed)
        assert self._runner.backend is not None
        fed = CallArguments.of(feed).watch()
        call = partial(self._runner.call, fed)
        is_planned = self._programs.is_further(entry)
        is_settled = entry.settled or any(other.settled for other in self._programs.other_shapes(entry))
        with self._stats.timed("warmup"), within_first_steps(self._runner.backend.apart):
            if is_planned:
                result = self._runner.run(call)
            else:
                body = partial(self._managed.discover_all, call, fed=fed.objects(), is_settled=is_settled)
                result, walk = self._run(body)
                self._managed.refresh(walk)
                self._keeping = self._keeping + 1 if self._managed.kept else 0
        if not entry.eager_calls:
            change = fed.change()
            self._changes = [] if change is None else [*self._changes, change]
        self._runner.backend.note_eager()
        entry.eager_calls += 1
        self._stats.eager += 1
        self._stats.end_call("eager")
        if self._managed.unborn:
            self._stats.skip(SkipReason.UNBORN)
            return result
        if self._options.autograd and any(asks_for_gradients(leaf) for _, leaf in flatten_result(result)[0]):
            entry.outside = True
            self._stats.skip(SkipReason.GRADIENT)
            return result
        entry.warm += 1
        entry.settled = is_settled or self._managed.is_settled
        if self._stats.captured:
            self._stats.skip(SkipReason.SHAPE)
        return result

    def check_changes(self, entry: Entry) -> None:
        """Refuse a step whose calls are all first ones, and change what they are fed: that has another structure for
        it in the next call, and a trace would never come. So it may be where each call keeps what it has made.

        Raises:
            HostEffectError: naming the container, or what is kept.
        """
        often = max(self._options.warmup_steps, _NO_ACCIDENT)
        if not entry.eager_calls and len(self._changes) >= often:
            raise HostEffectError(self._changes[0])
        if self._keeping >= often:
            self._managed.check_kept()

    def advance(self, entry: Entry, feed: Feed) -> Any:
        """A trace, or with a plan in hand the capture; a refusal that is not raised leads to an eager step."""
        line = entry.lines.setdefault(self._managed.grad_presence(), Line())
        walk = self._managed.walk_of_call()
        gone = next((path for path in line.state if path not in walk.slots), None)
        if gone is not None:
            # A recording would make it anew in every replay.
            self._stats.note(f"traced anew: {gone} is gone, which only an eager step can make")
            del entry.lines[self._managed.grad_presence()]
            return self.warm_up(entry, feed)
        if line.plan is not None and line.plan.shared_leaves(feed, walk) != line.plan.shared:
            return self._runner.eager(feed, SkipReason.FEED, MEMORY_IS_FED)
        assert self._runner.backend is not None
        cramped = None if line.plan is None else self._room.make(entry, line.plan, self._runner.backend)
        if cramped is not None:
            # No fault of the step's: nothing to raise.
            self._refusals.warn(f"graphplan runs this step eagerly: {cramped}")
            return self._runner.refused(feed, cramped)
        try:
            refuse_graphs_within(walk, self._runner.fn, self._runner.device, self._managed.compiled)
            return self._attempt(entry, line, feed, walk)
        except ReadSignal as signal:
            self._unread.mark(feed, signal.indices)
            # Later calls have keys with more in them.
            entry.drop()
            entry.warm = entry.eager_calls = 0
            return self._runner.eager(feed, SkipReason.SHAPE)
        except Exception as error:
            refusal = error if isinstance(error, RefusalError) else refusal_of(error)
            if refusal is None:
                raise
        return self._go_eager(entry, feed, refusal)

    def _go_eager(self, entry: Entry, feed: Feed, refusal: RefusalError) -> Any:
        """Raise, or run eagerly, and calls like this one from now on."""
        self._refusals.refuse(refusal)
        entry.refusal = refusal
        return self._runner.refused(feed, refusal)

    @refusing_memory()
    def _attempt(self, entry: Entry, line: Line, feed: Feed, walk: Walk) -> Any:
        """A trace or a capture as a transaction: one that ends early has not happened, but for what :meth:`_run_traced`
        says.
        """
        backend = self._runner.backend
        assert backend is not None
        with ExitStack() as undo:
            generators = line.plan.generators if line.plan is not None else ()
            changed = line.plan.changed_tensors(walk) if line.plan is not None else []
            extra = [*changed, *(tensor for _, tensor in feed.tensors())]
            snapshot = Snapshot(walk, extra=extra, generators=generators, device=self._room.for_copies(walk, backend))
            compiled = self._managed.runs_compiled(walk)
            hidden, placeholders = with_placeholders(feed)
            fed = CallArguments.of(hidden).watch()
            undo.callback(snapshot.restore)
            undo.callback(fed.restore)
            # Casts of the weights that the caller's autocast remembers would be missing from what is recorded next.
            undo.callback(torch.clear_autocast_cache)
            if line.plan is None or self._is_outdated(entry, line, walk):
                with placeholders or nullcontext():
                    result = self._trace(entry, line, feed, fed, undo, snapshot, rehearses=compiled)
                entry.eager_calls += 1
                self._stats.traced += 1
                self._stats.end_call("traced")
            else:
                if compiled:
                    # Compiled code is made for the classes of what it is called with.
                    hidden, placeholders = feed, None
                result = self._capture(entry, line, hidden, placeholders, snapshot, compiled=compiled)
            undo.pop_all()
            self._runner.outcome = (result,)
            return result

    def _is_outdated(self, entry: Entry, line: Line, walk: Walk) -> bool:
        """Whether the step reads other Python values than in the traces; its plan is dropped then."""
        assert line.plan is not None
        with self._managed.rates:
            changed = outdated(line.plan, walk)
        if changed is not None:
            self._stats.note(f"traced anew: {changed}")
            line.plan = None
            # What changes after each trace is refused by two.
            entry.takes_two |= line.is_like_others
        return changed is not None

    def _trace(
        self,
        entry: Entry,
        line: Line,
        feed: Feed,
        fed: CallArguments,
        undo: ExitStack,
        snapshot: Snapshot,
        *,
        rehearses: bool,
    ) -> Any:
        facts = Trace()
        undo.callback(facts.undo_unowned_writes)
        fn, owners, device = self._runner.fn, self._managed.owners, self._runner.device
        rates = lambda: self._managed.rates.storages  # noqa: E731
        drawn = [generator for before in line.traces for generator in before.generators]

        def body() -> tuple[Any, Walk]:
            return trace(fn, feed, fed, owners=owners, device=device, record=facts, rates=rates, drawn=drawn)

        with self._stats.timed("trace"):
            result, walk = self._run_traced(entry, line, feed, body, undo, rehearses=rehearses)
            if feed.unread and any(compares_classes(code) for code, _ in facts.reads.codes):
                raise ReadSignal(feed.unread)
            rehearses = rehearses or bool(facts.ran.compiled)
            rehearsal = Rehearsal(self._managed.walk, result, self._options.allow) if rehearses else None
            if rehearsal is not None:
                rehearsal.undo(facts, snapshot)
                fed.restore()
                result = self._runner.run(lambda: self._runner.call(CallArguments.of(feed)))
            try:
                if rehearsal is not None and self._runner.backend is not None and self._runner.backend.executes:
                    rehearsal.check(result, fn)
                self._take(entry, line, feed, facts, walk if rehearsal is None else None)
                if self._peers is not None:
                    self._peers.meet(f"trace {self._stats.traced}")
            except LearningRateError:
                raise
            except Exception as failure:
                error = failure if isinstance(failure, RefusalError) else refusal_of(failure)
                if error is None:
                    raise
                # The step is done and is a good eager step: unless the refusal is to be raised, it stands.
                self._refusals.refuse(error)
                entry.refusal = error
                self._stats.skip(error.reason, str(error))
        return result

    def _run_traced(
        self,
        entry: Entry,
        line: Line,
        feed: Feed,
        body: Callable[[], tuple[Any, Walk]],
        undo: ExitStack,
        *,
        rehearses: bool,
    ) -> tuple[Any, Walk]:
        """Run a trace. It is a real step: an error of the step's own leaves what it leaves in an eager one."""
        try:
            with uncompiled():
                return self._run(lambda: self._managed.discover(body), traced=True)
        except BaseException as error:
            if isinstance(error, (GraphPlanError, ReadSignal)) or is_out_of_memory(error):
                raise
            if is_steps_own(error) and not (rehearses or feed.unread):
                undo.pop_all()
                # What it left half done, the next step makes good or trips over: traces come after that.
                line.traces = []
                entry.warm = min(entry.warm, self._options.warmup_steps - 1)
            raise

    def _run(self, body: Callable[[], tuple[Any, Walked]], *, traced: bool = False) -> tuple[Any, Walked]:
        """Run ``body`` as managed steps run. Its result is what the backend knows of, and not the walk beside that."""
        walks: list[Walked] = []

        def run() -> Any:
            result, walk = body()
            walks.append(walk)
            return result

        return self._runner.run(run, traced=traced), walks.pop()

    def _take(self, entry: Entry, line: Line, feed: Feed, facts: Trace, at_end: Walk | None) -> None:
        """Keep a trace, at whose end ``at_end`` was over the owners, if they are still so; with the second one comes
        the plan.
        """
        check_threads(facts, self._options.allow)
        if facts.violation is not None:
            raise facts.violation
        self._managed.check_kept()
        walk = at_end or self._managed.walk()
        if self._managed.take_names(facts.ran, walk):
            # Code ran that had not run before: what it uses was not watched yet.
            line.traces = []
            return
        self._note_change(facts, walk)
        # What turned up for the first time is the step's own, or a name that one more trace will know.
        entry.takes_two |= not self._managed.is_settled
        line.traces.append(facts)
        line.state = [path for path in facts.entry_paths if is_optimizer_state(path)]
        if len(line.traces) == 1:
            line.plan = self._plan_like_others(entry, facts, feed, at_end)
            line.is_like_others = line.plan is not None
        else:
            try:
                line.plan = self._plan_of_pair(line, feed, at_end)
            except RefusalError:
                first, second = line.traces
                line.traces = []
                if not self._may_trace_anew(entry, line, first, second, walk):
                    self._latest = None
                    raise
        if line.plan is None:
            return
        line.traces, self._latest = [], None
        line.straddling = 0
        for text in omissions(facts, self._options.allow):
            self._refusals.warn(text)
        self._runner.plan = line.plan
        for fact in line.plan.assertions:
            self._stats.note(fact)
        assert self._runner.backend is not None
        needed = self._runner.backend.needs(line.plan.footprint, alone=True)
        self._stats.bytes_estimated = max(self._stats.bytes_estimated, needed)
        self._stats.launches_eager += line.plan.launches * (entry.eager_calls + 1)

    def forget(self) -> None:
        """Drop what was found in traces: they hold tensors."""
        self._latest, self._changing, self._changes = None, ("", 0), []

    def _note_change(self, facts: Trace, walk: Walk) -> None:
        """See what has changed since the latest trace, which may be another key's: where batches differ in shape, the
        two of one key are far apart.
        """
        latest, self._latest = self._latest, facts
        if latest is not None:
            changed = host_changes(latest, facts, walk, self._options.allow)
            path = "" if changed is None else changed.split(" was ")[0]
            self._changing = path, self._changing[1] + 1 if path and path == self._changing[0] else int(bool(path))

    def _plan_of_pair(self, line: Line, feed: Feed, at_end: Walk | None) -> Plan:
        """The plan of two traces, the second of which was fed with ``feed``."""
        first, second = line.traces
        with self._managed.rates:
            loose = max(line.straddling, self._changing[1] - 1) >= _STRADDLING - 1
            return build_plan(first, second, feed, walk=at_end, loose=loose, **self._planning)

    def _plan_like_others(self, entry: Entry, facts: Trace, feed: Feed, at_end: Walk | None) -> Plan | None:
        """The plan of one trace, where another key's plan and the check of the first replay make up for the second."""
        if not self._may_take_one(entry):
            return None
        with self._managed.rates, suppress(RefusalError):
            known = self._programs.plans_of_others(entry)
            return build_plan_like(known, facts, feed, walk=at_end, **self._planning)
        return None

    @property
    def _planning(self) -> dict[str, Any]:
        """What plans are made with besides traces."""
        return {
            "owners": lambda: self._managed.owners,
            "function": lambda: self._runner.fn,
            "allow": self._options.allow,
            "rates": self._managed.rates,
        }

    def _may_trace_anew(self, entry: Entry, line: Line, first: Trace, second: Trace, walk: Walk) -> bool:
        """Whether two traces that differ say nothing of the step, which then has others."""
        if self._changing[1] >= _STRADDLING:
            return False
        moved = second.moved_since(first)
        if moved is not None and not line.traced_anew:
            # A checkpoint was loaded, say: the two steps differ by what happened between them.
            line.traced_anew = True
            self._stats.note(f"traced anew: {moved} is not what it was one step before")
            return True
        # Ranks that trace have to do so in the same steps.
        if self._peers is None and line.reordered < _REORDERED and is_reordered(first, second):
            line.reordered += 1
            entry.warm = self._options.warmup_steps - 2 ** (line.reordered + 1)
            self._stats.note("traced anew: autograd's engine ran the same operators in another order one step before")
            return True
        changed = host_changes(first, second, walk, self._options.allow)
        line.straddling += changed is not None
        if changed is not None and line.straddling < _STRADDLING:
            # An epoch ended, say: the second trace may be one of a pair with the next, and this step is its own.
            line.traces = [second]
            self._stats.note(f"traced anew: {changed}")
            return True
        return False

    def _capture(
        self,
        entry: Entry,
        line: Line,
        feed: Feed,
        placeholders: Placeholders | None,
        snapshot: Snapshot,
        *,
        compiled: bool,
    ) -> Any:
        assert line.plan is not None
        program, result = self._captures.take(line.plan, feed, placeholders, snapshot, compiled=compiled)
        line.program = program
        if not line.plan.tells_gradients:
            entry.any_program = program
        self._managed.refresh()
        self._managed.captured()
        self._stats.end_call("captured")
        return result
