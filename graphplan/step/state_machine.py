"""The state machine of a graphed step. Each key goes through eager warm-up, one or two traces, one capture, replays.

A refusal before the first good replay raises and undoes its call. A later one warns once, and calls continue eagerly.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, suppress
from typing import Any

from torch import nn

from graphplan.environment.collector import no_collections
from graphplan.environment.surroundings import changing_mode, surroundings
from graphplan.errors import (
    CaptureError,
    ClosedError,
    EffectError,
    FeedError,
    GuardError,
    OptionError,
    OutcomeError,
    PeerError,
    RefusalError,
    SkipReason,
)
from graphplan.feed.buffers import Buffers
from graphplan.feed.call_arguments import CallArguments
from graphplan.feed.signature import Feed, flatten
from graphplan.feed.unread import UnreadValues
from graphplan.observe.source import find_source, with_users_line
from graphplan.owners.kinds import check_names
from graphplan.program.faults import refusal_of
from graphplan.program.outputs import copy_overwritten
from graphplan.program.program import LATEST_OUTCOMES, Program
from graphplan.step.call_lock import running_step, runs_within_step
from graphplan.step.compiled import CompiledModules
from graphplan.step.entries import Entry
from graphplan.step.gate import Gate, Serve, Timing
from graphplan.step.given_numbers import GivenNumbers
from graphplan.step.lookup import FastPath, Lookup
from graphplan.step.managed import Managed
from graphplan.step.memory_budget import MemoryBudget
from graphplan.step.options import Options
from graphplan.step.peers import Peers
from graphplan.step.programs import EXPECTED, Programs
from graphplan.step.reasons import Call, Reasons
from graphplan.step.replays import Replays
from graphplan.step.runner import Backends, Refusals, Runner, StepContext, to_device
from graphplan.step.stages import Stages
from graphplan.trace.mode import is_traced, refuse_trace

_MOST_WAITS = 8  # After this many consecutive calls that had to wait, skip the lookup for as many unknown calls.
_IDLE = frozenset({SkipReason.SHAPE, SkipReason.MAX_GRAPHS})
_MOST_REFUSED = 8  # Consecutive refused calls after which a step stands down.
_FICKLE, _SHARE = 8, 1 / 4
"""Replays that ended at a changed branch: 8 alike in a row lead to a recapture, 1/4 of all replays to a refusal."""


class StateMachine:
    """The state machine of one step; ``serve`` runs its calls. Raises OptionError for ``compile=`` without a module."""

    def __init__(
        self,
        fn: Callable[..., Any],
        owners: Mapping[str, Any] | Sequence[Any] | None,
        options: Options,
        backends: Backends | None,
        peers: Peers | None,
        *,
        gate: Gate | None,
        is_alone: bool,
        serve: Serve,
    ) -> None:
        is_eager = options.backend == "eager"
        if is_alone:
            check_names(owners)
        prepare, trains = options.prepare_optimizers and not is_eager, options.mode == "train"
        self.options, self.peers = options, peers
        self.managed = Managed(fn, owners, prepare=prepare, fuse=options.fuse_optimizer, trains=trains)
        named = [owner for owner in self.managed.owners.values() if isinstance(owner, nn.Module)]
        if options.compile is not False and not named and is_alone:
            raise OptionError("compile= is given without a module to compile; name it: owners={'model': model, ...}")
        self.compiled = CompiledModules(named, is_alone and not is_eager and options.compile)
        self.buffers = Buffers()
        self.runner = Runner(fn, self.managed, options.backend, backends or Backends())
        self.runner.stats.follow = options.mode == "train"
        self.stats = self.runner.stats
        self.refusals = Refusals(options.on_failure, self.stats, peers)
        # Ranks measure different times, so they would not agree on when a capture may start.
        may_wait = trains and peers is None and options.min_speedup != 0
        self.programs: Programs = Programs(options, self.stats, may_wait=may_wait)
        self.unread = UnreadValues()
        self.given = GivenNumbers(fn, self.managed)
        self._is_alone = peers is None
        # If not `is_alone`, the caller has already made varying numbers a part of its owners.
        self._gives = is_alone and peers is None and not is_eager
        parts = StepContext(options, self.managed, self.runner, self.refusals, self.programs, peers, self.given)
        self.memory = MemoryBudget(parts)
        self.lookup = Lookup(parts)
        self.stages = Stages(parts, self.lookup, self.buffers, self.memory, self.unread)
        self.replays = Replays(parts)
        self.fast_path = FastPath(self.managed)
        self.timing: Timing = Timing(parts, gate=gate, opens=is_alone, serve=serve, stand_down=self.stand_down)
        self.reasons = Reasons(self)
        self.calls = 0
        # The program that the latest call replayed, the reason why it was eager, or None on the way to a program.
        self.latest: Program | SkipReason | None = None
        self.is_closed = False
        self._refused_in_a_row, self._refused_by = (0, 0), ""
        # Consecutive calls that were looked up and had to wait; calls that skip the lookup next; why the latest waited.
        self._consecutive_waits = self._lookups_to_skip = 0
        self._idle_for: tuple[SkipReason | None, str] = (None, "")

    def serve(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run a call that holds the call lock. Replay at once if the call equals an earlier one."""
        self.calls += 1
        if self.given.given:
            args, kwargs = self.given.put(args, kwargs)
        # A closed step finds nothing here, since close() clears the fast path.
        known = None if kwargs else self.fast_path.find(args)
        if known is None:
            return self._serve_any(args, kwargs)
        kind, leaves = known
        self.programs.touch(kind.entry)
        self.latest = kind.program
        try:
            return self.replays.replay(kind.program, leaves)
        except OutcomeError as error:
            outcome = error.with_traceback(None)
        except GuardError:
            if kind.program.fits():
                raise
            # The replay has not started, and the slow path drops the program.
            return self._serve_any(args, kwargs)
        return self._within_call(lambda: self._instead(Call(args, kwargs), kind.entry, kind.program, outcome))

    def _serve_any(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if self.is_closed:
            raise ClosedError("this step was closed; make a new one with graph_step")
        if self._lookups_to_skip and not (kwargs or self.fast_path.knows):
            self._lookups_to_skip -= 1
            self.latest = self._idle_for[0]
            self.programs.count_skipped(limit_reached=self.latest is SkipReason.MAX_GRAPHS)
            return self._within_call(lambda: self.run_unmanaged(Call(args, kwargs), *self._idle_for))
        if self._gives and self.given.learn(args, kwargs):
            args, kwargs = self.given.put(args, kwargs)
        around = None if self.options.backend == "eager" else surroundings()
        if around is not None and self.managed.rates.storages and is_traced():
            refuse_trace(
                CaptureError,
                f"the step calls another graphed step at {with_users_line(find_source())}; a recording cannot contain "
                "another one. Call the original function here, or graph only the parts",
            )
            # Run the function alone: with device learning rates, the outer trace would see this step compute with them.
            return self.runner.call(to_device(self.options.feed_device, args, kwargs))
        if around is not None and changing_mode() is not None and not runs_within_step():
            self.refusals.warn(
                f"graphplan runs calls eagerly while {around} is active, because a replay would ignore it"
            )
        return self._within_call(lambda: self._transit(Call(args, kwargs, around)))

    def _within_call(self, run: Callable[[], Any]) -> Any:
        """Run ``run`` as a part of the step, and end the call."""
        self.runner.outcome = None
        with running_step():
            try:
                result = copy_overwritten(run())
            finally:
                self.managed.end_call()
        self.runner.outcome = None
        return result

    def _transit(self, call: Call) -> Any:
        """Run the call in the way that the table of reasons selects: eager, traced, captured, replayed or checked."""
        try:
            reason, detail, handler = self.reasons.of(call)
        except RefusalError as error:
            self.demote(error)
            reason, detail, handler = error.reason, str(error), self.refused
        self.latest = reason
        self._consecutive_waits = (
            self._consecutive_waits + 1 if reason in _IDLE and handler in (self.wait, self.run_unmanaged) else 0
        )
        # Ranks would skip the lookup in different calls, and then wait for each other in those that look up.
        self._lookups_to_skip = _MOST_WAITS if self._consecutive_waits >= _MOST_WAITS and self._is_alone else 0
        self._idle_for = reason, detail
        result = handler(call, reason, detail)
        self.programs.attempts += call.is_on_way
        return result

    def run_unmanaged(self, call: Call, reason: SkipReason | None, detail: str) -> Any:
        """Run the call eagerly where no program will follow, so learning rates stay Python numbers."""
        return self.runner.eager(self._arguments_of(call), reason, detail)

    def wait(self, call: Call, reason: SkipReason | None, detail: str) -> Any:
        """Run the call eagerly until replays have saved the cost of earlier traces and captures."""
        why = self.programs.why_unpaid()
        if why is not None:
            self.refusals.warn(f"graphplan runs most calls eagerly from now on: {why}. {EXPECTED}")
        return self.run_unmanaged(call, reason, detail)

    def run_managed(self, call: Call, reason: SkipReason | None, detail: str) -> Any:
        """Run the call eagerly under the same conditions as a trace: managed learning rates, the backend's stream."""
        return self.runner.eager(self._arguments_of(call), reason, detail, managed=True)

    def run_stock(self, call: Call, reason: SkipReason | None, detail: str) -> Any:
        """Run the first call that the speed gate times, before optimizers are prepared."""
        self.calls -= 1
        assert self.timing.handler is not None
        return self.timing.handler(call.args, call.kwargs)

    def timed(self, call: Call, reason: SkipReason | None, detail: str) -> Any:
        """Run the function alone, timed by the gate of its key."""
        gate, fed = call.entry.gate, self._arguments_of(call)
        assert gate is not None
        start = gate.begin()
        result = self.runner.call(fed)
        gate.end_eager(start)
        self.runner.count_eager(None)
        return result

    def warm_up(self, call: Call, reason: SkipReason | None, detail: str) -> Any:
        """Run one of the first calls of a key eagerly, and discover the owners that the step uses."""
        self.fast_path.forget()
        entry, known = call.entry, len(self.managed.owners)
        with no_collections():
            result = self.stages.warm_up(entry, call.feed)
            if entry.warm <= 1 or entry.eager_calls <= 1 or len(self.managed.owners) > known:
                self.lookup.keep(call.feed, entry)
        return result

    def _arguments_of(self, call: Call) -> CallArguments:
        """The arguments for an eager call, moved to the step's device if ``device=`` is given."""
        return to_device(self.options.feed_device, call.args, call.kwargs)

    def refused(self, call: Call, reason: SkipReason | None, detail: str) -> Any:
        """Run the call eagerly because of a refusal, and count it."""
        result = self.run_unmanaged(call, reason, detail)
        self._count_refused(reason, detail)
        return result

    def _count_refused(self, reason: SkipReason | None, detail: str, *, is_traced: bool = False) -> None:
        """Stand down after several consecutive refused calls, or after traces of two signatures with the same error."""
        count, before = self._refused_in_a_row
        progress = self.stats.captured + self.stats.replayed
        count = count + 1 if before == progress else 1
        if is_traced:
            count += _MOST_REFUSED * (count > 1 and self._refused_by == detail)
            self._refused_by = detail
        self._refused_in_a_row = count, progress
        if count >= _MOST_REFUSED and self.timing.down_because is None and not self.programs.all():
            self.stand_down(reason, detail)

    def replay(self, call: Call, reason: SkipReason | None, detail: str) -> Any:
        """Replay the call, with a check if one is due, or timed by its gate. Run it eagerly if a branch changed."""
        program = self.latest = call.program
        assert program is not None
        try:
            if self.replays.is_due(program):
                with no_collections():
                    return self._check(call, program)
            if call.entry.gate is not None:
                return self._replay_timed(call, program, call.entry.gate)
            if not call.kwargs and self.options.eager_if is None:
                self.fast_path.remember(call.args, call.feed, call.entry, program)
            return self.replays.replay(program, call.feed.leaves)
        except OutcomeError as error:
            outcome = error.with_traceback(None)
        return self._instead(call, call.entry, program, outcome)

    def _replay_timed(self, call: Call, program: Program, gate: Gate) -> Any:
        entry = call.entry
        start = gate.begin()
        result = self.replays.replay(program, call.feed.leaves)
        self.runner.outcome = (result,)
        pays = gate.end_replay(start)
        if pays is not None:
            entry.gate, entry.is_decided = None, True
            # The result may lie in the program's memory, so only the next call closes the program.
            entry.refusal = self.timing.decide(gate, pays)
        return result

    def _check(self, call: Call, program: Program) -> Any:
        """Replay and compare with the eager step. After a difference, the step stands down."""
        try:
            checked = self.replays.check(program, self.lookup.moved(call.feed))
        except PeerError as refusal:
            self.programs.forget()
            self.demote(refusal)
            self.latest = refusal.reason
            return self.refused(call, refusal.reason, str(refusal))
        if checked is None:
            # Close the program before the eager step: there may be no memory for both.
            self._take_back(call.entry, program)
            self.runner.backend.trim()
            return self.run_managed(call, SkipReason.SHAPE, "")
        self.memory.after_check(self.runner.backend)
        if checked.is_inconclusive:
            self._take_back(call.entry, program, checked.single_trace_error)
            self.runner.count_eager(SkipReason.SHAPE)
        elif checked.error is not None:
            error = checked.error
            self.stats.note(f"invalidated: {error}", "guards")
            self.stand_down(error.reason, str(error))
            self.refusals.refuse(error)
            self.runner.count_eager(error.reason, str(error))
        return checked.result

    def _take_back(self, entry: Entry, program: Program, single_trace_error: RefusalError | None = None) -> None:
        """Close a program that was planned from a single trace. From now on, each plan needs two traces."""
        self.latest = SkipReason.SHAPE
        self.programs.take_back(entry, program)
        entry.single_trace_error = single_trace_error
        self.stages.planner.single_trace_allowed = False

    def _instead(self, call: Call, entry: Entry, program: Program, outcome: OutcomeError) -> Any:
        """Run the step eagerly in place of a replay whose branch changed. Recapture, or refuse, if that is frequent."""
        self.latest = None
        if "feed" not in vars(call):
            call.feed = flatten(call.args, call.kwargs, self.unread.keys)
        result = self.replays.instead(program, self.lookup.moved(call.feed), outcome)
        if program.outcomes_alike >= _FICKLE:
            # The branch seems to have changed for good, for example at the end of a warm-up phase.
            self.programs.drop(entry, str(outcome))
            self.fast_path.forget()
        elif program.outcomes >= max(LATEST_OUTCOMES, program.replays * _SHARE):
            entry.refusal = outcome.refusal
            self.fast_path.forget()
            self.refusals.warn(f"graphplan runs this step eagerly: {outcome.refusal}")
        return result

    def advance(self, call: Call, reason: SkipReason | None, detail: str) -> Any:
        """Trace or capture the call. A capture may evict other programs."""
        self.fast_path.forget()
        captured = self.stats.captured
        with no_collections():
            result = self.stages.advance(call)
            entry = call.entry
            if self.stats.captured == captured:
                if entry.refusal is not None:
                    self._count_refused(entry.refusal.reason, str(entry.refusal), is_traced=True)
                return result
            program = call.line.program
            assert program is not None
            self.replays.begin(program)
            self.programs.count_capture(entry, program)
            self.memory.settle(entry, program, self.runner.backend)
            self.fast_path.forget()
            staged = sum(program.inputs.staged_bytes for program in self.programs.all())
            self.stats.bytes_static = self.buffers.nbytes + self.programs.nbytes + staged
        return result

    def demote(self, error: RefusalError) -> None:
        """Raise ``error``, or warn and stand down. A FeedError concerns its own call only."""
        self.refusals.refuse(error)
        if not isinstance(error, FeedError):
            self.stand_down(error.reason, str(error))

    def refusal_of(self, error: Exception) -> RefusalError | None:
        """The refusal to recover from after ``error``; None if ``error`` has to be raised as it is."""
        if isinstance(error, EffectError):
            self.managed.refusal = CaptureError(str(error))
        refusal = refusal_of(error)
        if refusal is None:
            self.runner.outcome = None
        return refusal

    def recover(self, refusal: RefusalError, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """End a call in which graphplan itself has failed. The step runs exactly once."""
        if self.runner.outcome is None:
            self.refusals.refuse(refusal)
            with suppress(Exception):
                # Standing down ends with the stock function, even if a part of the cleanup raises.
                self.stand_down(refusal.reason, str(refusal))
            try:
                self.refused(Call(*self.timing.leave(args, kwargs)), refusal.reason, str(refusal))
            except Exception:
                if self.runner.outcome is None:
                    raise
        else:
            # The step has already run, so the next call raises the refusal.
            self.managed.refusal = refusal
        outcome, self.runner.outcome = self.runner.outcome, None
        assert outcome is not None
        return outcome[0]

    def find_program(self, args: tuple[Any, ...]) -> tuple[Program, Feed] | None:
        """The program that a call with ``args`` would replay now, and its feed; None without one."""
        if surroundings() is not None:
            return None
        feed = flatten(args, {})
        entry, program = self.lookup.find(feed)
        if program is None or entry.refusal is not None or program.misfit(feed) is not None:
            return None
        return program, self.lookup.moved(feed)

    def stand_down(self, reason: SkipReason | None, detail: str) -> None:
        """Drop programs and buffers, undo the preparation of optimizers, and call the step's function alone."""
        with ExitStack() as parts:
            # Callbacks run in reverse order, and each one runs even if another raises.
            parts.callback(self.timing.be_stock, reason, detail)
            parts.callback(self.managed.stand_down, is_by_time=reason in (SkipReason.BUSY, SkipReason.SLOWER))
            parts.callback(self.buffers.clear)
            self.latest = None
            for part in (self.fast_path, self.stages, self.programs):
                parts.callback(part.forget)

    def forget(self) -> None:
        """Drop every program; the next calls trace and capture again."""
        self.latest = None
        for part in (self.programs, self.fast_path, self.stages):
            part.forget()

    def close(self) -> None:
        """Drop every program, restore the owners' flags, and refuse further calls."""
        self.forget()
        self.buffers.clear()
        self.managed.release()
        self.compiled.undo()
        self.timing.close()
        self.is_closed = True
