"""The state machine of a graphed step: eager warm-up, two traces, one capture, then replays; per key.

Each of these is a real step on the batch it is given. A refusal before the first good replay raises and undoes its
call; after it, the step goes on eagerly with one warning. :data:`EAGER` has all reasons for which a call is eager.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, suppress
from typing import Any, NamedTuple

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
    PeerError,
    RefusalError,
    SkipReason,
)
from graphplan.feed.buffers import Buffers
from graphplan.feed.call_arguments import CallArguments
from graphplan.feed.signature import Feed, flatten
from graphplan.feed.unread import UnreadValues
from graphplan.program.faults import refusal_of
from graphplan.program.program import Program
from graphplan.step.call_lock import running_step, runs_within_step
from graphplan.step.compiled import CompiledModules
from graphplan.step.eager_calls import EAGER, Before, Call, Run, plainly
from graphplan.step.gate import Gate
from graphplan.step.lookup import FastPath, Lookup
from graphplan.step.managed import Managed
from graphplan.step.memory_budget import Room
from graphplan.step.options import Options
from graphplan.step.peers import Peers
from graphplan.step.programs import Programs
from graphplan.step.replays import Replays
from graphplan.step.runner import Backends, Parts, Refusals, Runner, brought_to
from graphplan.step.stages import Stages
from graphplan.step.timing import Serve, Timing

_FRUITLESS = 8
"""Refused calls in a row after which a step stands down."""


class Skip(NamedTuple):
    """Why a call is eager, and how it runs. With an ``error``, calls like it may never have a program."""

    reason: SkipReason | None
    detail: str
    run: Run
    error: RefusalError | None = None


class StateMachine:
    """Runs, traces, captures, replays or checks each call of one step. ``serve`` makes a call with the step's turn; for
    the other arguments see :class:`GraphedStep`. Raises OptionError if there is no module to compile.
    """

    def __init__(
        self,
        fn: Callable[..., Any],
        owners: Mapping[str, Any] | Sequence[Any] | None,
        options: Options,
        backends: Backends | None,
        peers: Peers | None,
        *,
        compiles: bool,
        gate: Gate | None,
        opens_gate: bool,
        serve: Serve,
    ) -> None:
        is_eager = options.backend == "eager"
        prepare, trains = options.prepare_optimizers and not is_eager, options.mode == "train"
        self.options, self.peers = options, peers
        self.managed = Managed(fn, owners, prepare=prepare, fuse=options.fuse_optimizer, trains=trains)
        named = [owner for owner in self.managed.owners.values() if isinstance(owner, nn.Module)]
        if options.compile is not False and not named and compiles:
            raise OptionError("compile= is given without a module to compile; name it: owners={'model': model, ...}")
        self.compiled = CompiledModules(named, compiles and not is_eager and options.compile)
        self.buffers = Buffers()
        self.runner = Runner(fn, self.managed, options.backend, backends or Backends())
        self.runner.stats.follow = options.mode == "train"
        self.stats = self.runner.stats
        self.refusals = Refusals(options.on_failure, self.stats, peers)
        self.programs: Programs = Programs(options, self.stats)
        self.room = Room(options, self.programs, peers)
        self.unread = UnreadValues()
        parts = Parts(options, self.managed, self.runner, self.refusals, self.programs, peers)
        self.stages = Stages(parts, self.buffers, self.room, self.unread)
        self.replays = Replays(parts)
        self.lookup = Lookup(parts)
        self.fast_path = FastPath(self.managed, moved=self.lookup.is_moved)
        self.timing: Timing = Timing(parts, gate=gate, opens=opens_gate, serve=serve, stand_down=self.stand_down)
        # Reasons that only options can give.
        asked = {
            SkipReason.BACKEND_EAGER: is_eager,
            SkipReason.GRADIENT: options.autograd,
            SkipReason.EAGER_IF: options.eager_if is not None,
        }
        self._rows = [row for row in EAGER if row[0] is None or asked.get(row[0], True)]
        self.calls = 0
        self.is_closed = False
        self._fruitless = (0, 0)

    def serve(self, args: tuple[Any, ...], kwargs: dict[str, Any], before: Before | None = None) -> Any:
        """Make a call that has the turn: a replay at once if it is like an earlier one."""
        self.calls += 1
        # A step that is closed knows no call.
        known = None if kwargs else self.fast_path.find(args)
        if known is None:
            return self._serve_any(Call(args, kwargs, before))
        kind, leaves = known
        self.programs.touch(kind.entry)
        if before is not None:
            Call(args, kwargs, before).tell(kind.program)
        try:
            return self.replays.replay(kind.program, leaves)
        except GuardError:
            if kind.program.fits():
                raise
            # Nothing has run, and the program is going to be dropped.
            return self._serve_any(Call(args, kwargs, before))

    def _serve_any(self, call: Call) -> Any:
        if self.is_closed:
            raise ClosedError("this step was closed; make a new one with graph_step")
        if self.options.backend != "eager":
            around = call.around = surroundings()
            if around is not None and changing_mode() is not None and not runs_within_step():
                self.refusals.warn(f"graphplan runs calls eagerly while {around} is active, which no replay would heed")
        self.runner.outcome = None
        with running_step():
            try:
                result = self._transit(call)
            finally:
                self.managed.end_call()
        self.runner.outcome = None
        return result

    def _transit(self, call: Call) -> Any:
        """Run, trace, capture, replay or check."""
        skip = self._why_eager(call)
        if skip is None and call.program is not None:
            return self._replay(call, call.program)
        result = self._advance(call) if skip is None else self._run_eager(call, skip)
        self.programs.attempts += call.is_on_way
        return result

    def _why_eager(self, call: Call) -> Skip | None:
        """The first row of :data:`EAGER` that applies to the call."""
        try:
            for reason, applies, run in self._rows:
                found = applies(self, call)
                if not found:
                    continue
                if run is None:
                    return None
                if isinstance(found, RefusalError):
                    return Skip(found.reason, str(found), run, found)
                if isinstance(found, tuple):
                    return Skip(*found, run)
                return Skip(reason, found if isinstance(found, str) else "", run)
        except RefusalError as error:
            self.demote(error)
            return Skip(error.reason, str(error), plainly, error)
        return None

    def _run_eager(self, call: Call, skip: Skip) -> Any:
        call.tell(None, skip.reason, skip.detail)
        if skip.error is not None:
            return self._run_refused(skip.error, self.arguments_of(call), call.feed if call.is_flat else None)
        return skip.run(self, call, skip.reason, skip.detail)

    def arguments_of(self, call: Call) -> CallArguments:
        """What Python is called with: on the step's device, if ``device=`` is given."""
        if not call.is_flat:
            return brought_to(self.options.feed_device, call.args, call.kwargs)
        return CallArguments.of(self.lookup.moved(call.feed))

    def _run_refused(self, error: RefusalError, fed: CallArguments, feed: Feed | None = None) -> Any:
        """An eager call because of ``error``; after several in a row, the step stands down."""
        progress = self.stats.traced + self.stats.captured + self.stats.replayed
        count = self._fruitless[0] + 1 if self._fruitless[1] == progress else 1
        self._fruitless = count, progress
        result = self.runner.eager(fed, error.reason, str(error))
        if count >= _FRUITLESS and self.timing.down_because is None:
            if feed is None:
                serves_others = bool(self.programs.all())
            else:
                serves_others = self.programs.turn_away(self.lookup.geometry(feed), error)
            if not serves_others:
                self.stand_down(error.reason, str(error))
        return result

    def _replay(self, call: Call, program: Program) -> Any:
        entry, feed = call.entry, call.feed
        call.tell(program)
        if self.replays.is_due(program):
            with no_collections():
                return self._check(call, program)
        if entry.gate is not None:
            return self._replay_timed(call, program, entry.gate)
        if not call.kwargs and self.options.eager_if is None:
            self.fast_path.remember(call.args, feed, entry, program)
        return self.replays.replay(program, feed.leaves)

    def _replay_timed(self, call: Call, program: Program, gate: Gate) -> Any:
        """A replay while it is open whether those of its key pay."""
        entry, feed = call.entry, call.feed
        found = None if call.kwargs else self.fast_path.seconds(call.args, feed, entry, program)
        start = gate.begin() - (found or 0.0)
        result = self.replays.replay(program, feed.leaves)
        self.runner.outcome = (result,)
        pays = gate.end_replay(start)
        if pays is not None:
            entry.gate, entry.is_decided = None, True
            # A result may lie in the program's memory, so the next call closes that.
            entry.refusal = self.timing.decide(gate, pays)
        return result

    def _check(self, call: Call, program: Program) -> Any:
        """A replay that is checked against eager. After a difference, the step stands down."""
        is_needed = not program.replays and call.entry.is_like_others(program)
        try:
            result, error = self.replays.check(program, self.lookup.moved(call.feed), is_needed=is_needed)
        except PeerError as refusal:
            self.programs.forget()
            self.demote(refusal)
            return self._run_eager(call, Skip(refusal.reason, str(refusal), plainly, refusal))
        self.room.after_check(self.runner.backend)
        if error is not None and is_needed:
            # One trace could not tell; two will, and name the culprit.
            self.stats.note(f"traced anew: {error}", "traces")
            self.programs.close(call.entry)
            self.fast_path.forget()
            call.entry.takes_two = True
            self.runner.count_eager(None)
        elif error is not None:
            self.stats.note(f"invalidated: {error}", "guards")
            self.stand_down(error.reason, str(error))
            self.refusals.refuse(error)
            self.runner.count_eager(error.reason, str(error))
        return result

    def _advance(self, call: Call) -> Any:
        """A trace or a capture, which may close programs that are too many, or whose inputs are too small."""
        call.tell(None)
        self.fast_path.forget()
        entry, captured = call.entry, self.stats.captured
        with no_collections():
            result = self.stages.advance(entry, call.line, call.feed, call.walk)
            if self.stats.captured == captured:
                return result
            self.programs.count_capture(entry, self.lookup.geometry(call.feed))
            cramped = self.room.settle(entry, self.runner.backend)
            if cramped is not None:
                self.refusals.warn(f"graphplan runs this step eagerly: {cramped}")
            self.fast_path.forget()
            program = entry.select(self.managed.grad_presence)
            if program is not None:
                program.leave()
            self.stats.bytes_static = self.buffers.nbytes + self.programs.nbytes + self.programs.staged_bytes
        return result

    def demote(self, error: RefusalError) -> None:
        """Raise, or stand down; a feed's fault is its own call's only."""
        self.refusals.refuse(error)
        if not isinstance(error, FeedError):
            self.stand_down(error.reason, str(error))

    def refusal_of(self, error: Exception) -> RefusalError | None:
        """What ``error`` comes to if the call is to be recovered; None if it is to come out."""
        if isinstance(error, EffectError):
            self.managed.refusal = CaptureError(str(error))
        refusal = refusal_of(error)
        if refusal is None:
            self.runner.outcome = None
        return refusal

    def recover(self, refusal: RefusalError, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """End a call in which graphplan itself has failed, with the step done once."""
        if self.runner.outcome is None:
            self.refusals.refuse(refusal)
            with suppress(Exception):
                # The step is stock, whatever else fails in this.
                self.stand_down(refusal.reason, str(refusal))
            try:
                own = (args, kwargs) if self.timing.leave is None else self.timing.leave(args, kwargs)
                self._run_refused(refusal, brought_to(self.options.feed_device, *own))
            except Exception:
                if self.runner.outcome is None:
                    raise
        else:
            # The next call is told.
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

    def stand_down(self, reason: SkipReason, detail: str, **options: Any) -> None:
        """Take everything away that is not the user's own: programs, buffers, what optimizers were prepared with."""
        with ExitStack() as parts:
            # Whichever of them raises, the step is stock in the end.
            parts.callback(self.timing.be_stock, reason, detail, **options)
            parts.callback(self.managed.stand_down, is_by_time=reason in (SkipReason.BUSY, SkipReason.SLOWER))
            parts.callback(self.buffers.clear)
            for part in (self.fast_path, self.stages, self.programs):
                parts.callback(part.forget)

    def forget(self) -> None:
        """Drop every program; the next calls trace and capture again."""
        for part in (self.programs, self.fast_path, self.stages):
            part.forget()

    def close(self) -> None:
        """Drop every program and put the owners back as they were, for good."""
        self.forget()
        self.buffers.clear()
        self.managed.release()
        self.compiled.undo()
        self.timing.close()
        self.is_closed = True
