"""The state machine of a graphed step: eager warm-up, two traces, one capture, then replays; per key.

Every one of these is a real step on the batch it is given: nothing is run twice. A refusal before the first good replay
raises and undoes its call; after it the key is demoted to eager with one warning, so that nobody loses a run.

Longer than most rooms: the ways that a call can take are told apart here and nowhere else.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, suppress
from types import MethodType
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
    PeerError,
    RefusalError,
    SkipReason,
)
from graphplan.feed.buffers import Buffers
from graphplan.feed.call_arguments import CallArguments
from graphplan.feed.signature import Feed, asks_for_gradients, flatten
from graphplan.feed.unread import UnreadValues
from graphplan.program.companions import settle_companions
from graphplan.program.faults import refusal_of
from graphplan.program.program import Program
from graphplan.step.call_lock import CallLock, running_step, runs_within_step
from graphplan.step.compiling import CompiledModules
from graphplan.step.entry import Entry
from graphplan.step.fast_path import FastPath
from graphplan.step.gate import Gate
from graphplan.step.gated import Gated
from graphplan.step.lookup import Lookup
from graphplan.step.managed import Managed
from graphplan.step.memory_budget import Room
from graphplan.step.methods import Method, check_form, owners_of
from graphplan.step.options import Options
from graphplan.step.peers import Peers
from graphplan.step.programs import Programs
from graphplan.step.refusals import Refusals
from graphplan.step.replays import Replays
from graphplan.step.runner import Backends, Runner, brought_to
from graphplan.step.stages import Stages

_REFUSED = 8
"""Calls in a row that come to nothing, after which a step stands down."""


class GraphedStep(Method, CallLock, Gated):
    """A step that replays itself. Made by :func:`graph_step`. In a class it is a method: each instance has a step, and
    programs, of its own. Steps that are given the same ``backends`` share memory;
    ``peers`` are other ranks that capture if this one does. Without ``compiles``, whoever makes the step sees to
    ``options.compile``. A ``gate`` that knows the eager time decides whether replays pay; without one, the step's first
    calls are eager and timed where its options ask for that, unless ``opens_gate`` is false.

    Raises:
        OptionError: if ``fn`` cannot be called, or only begins something when it is.
    """

    def __init__(
        self,
        fn: Callable[..., Any],
        owners: Mapping[str, Any] | Sequence[Any] | None,
        options: Options,
        backends: Backends | None = None,
        peers: Peers | None = None,
        *,
        compiles: bool = True,
        gate: Gate | None = None,
        opens_gate: bool = True,
    ) -> None:
        super().__init__()
        if not callable(fn):
            raise OptionError(f"the step is a {type(fn).__name__}; expected a function or another callable")
        check_form(fn)
        self._be_method(fn)
        self._options, self._owners = options, owners
        prepare = options.prepare_optimizers and options.backend != "eager"
        trains = options.mode == "train"
        self._managed = Managed(fn, owners, prepare=prepare, fuse=options.fuse_optimizer, trains=trains)
        named = [owner for owner in self._managed.owners.values() if isinstance(owner, nn.Module)]
        if options.compile is not False and not named and compiles:
            raise OptionError("compile= is given without a module to compile; name it: owners={'model': model, ...}")
        self._compiled = CompiledModules(named, compiles and options.backend != "eager" and options.compile)
        self._buffers = Buffers()
        self._runner = Runner(fn, self._managed, options.backend, backends or Backends())
        self._refusals = Refusals(options.on_failure, self.stats, peers)
        self._peers = peers
        self._programs: Programs = Programs(options, self.stats)
        self._room = Room(options, self._programs, peers)
        self._unread = UnreadValues()
        self._stages = Stages(
            self._runner, self._managed, options,
            buffers=self._buffers, refusals=self._refusals, peers=peers,
            programs=self._programs, room=self._room, unread=self._unread,
        )  # fmt: skip
        self._replays = Replays(self._runner, options, peers)
        self._lookup = Lookup(self._runner, self._managed, self._programs, options)
        self._short = FastPath(self._managed, moved=self._lookup.is_moved)
        self._fruitless = (0, 0)
        self._take_gate(gate, opens=opens_gate)
        self._calls = 0
        self._closed = False

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the step: eagerly, traced, captured or replayed. Same results whichever it is.

        Raises:
            ClosedError: after :meth:`close`.
            BusyError: while another call is going on, in another thread or around this one.
            RefusalError: if the step cannot be replayed correctly (see ``on_failure``); the call is undone.
        """
        way = self._way
        return self._call(args, kwargs) if way is None else way(args, kwargs)

    def _bound_to(self, instance: Any) -> GraphedStep:
        method = MethodType(self._fn, instance)
        return type(self)(method, owners_of(method, self._owners), self._options)

    def _call(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if not self._turn.acquire(False):
            self._check_turn()
        try:
            return self._serve(args, kwargs)
        except Exception as error:
            refusal = self._refusal_of(error)
            if refusal is None:
                raise
            return self._recover(refusal, args, kwargs)
        finally:
            self._turn.release()

    def _serve(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """A call that has the turn."""
        self._calls += 1
        # Where the step is closed, no call is known.
        known = None if kwargs else self._short.find(args)
        if known is None:
            return self._look_up(args, kwargs)
        call, leaves = known
        self._programs.touch(call.entry)
        self._tell(call.program)
        try:
            return self._replays.replay(call.program, leaves)
        except GuardError:
            if call.program.fits():
                raise
            # Nothing has run; on the long way the program is dropped.
            return self._look_up(args, kwargs)

    def _refusal_of(self, error: Exception) -> RefusalError | None:
        """What ``error`` comes to if the call is to be recovered; None if it is to come out."""
        if isinstance(error, EffectError):
            self._managed.refusal = CaptureError(str(error))
        refusal = refusal_of(error)
        if refusal is None:
            self._runner.outcome = None
        return refusal

    def _recover(self, refusal: RefusalError, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """End a call in which graphplan itself has failed, with the step done once."""
        if self._runner.outcome is None:
            self._refusals.refuse(refusal)
            with suppress(Exception):
                # The step is stock, whatever else fails in this.
                self._stand_down(refusal.reason, str(refusal))
            try:
                self._fruitlessly(refusal, brought_to(self._options.feed_device, args, kwargs))
            except Exception:
                if self._runner.outcome is None:
                    raise
        else:
            # The next call is told.
            self._managed.refusal = refusal
        outcome, self._runner.outcome = self._runner.outcome, None
        assert outcome is not None
        return outcome[0]

    def _look_up(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """A call, the long way."""
        if self._closed:
            raise ClosedError("this step was closed; make a new one with graph_step")
        around = surroundings() if self._options.backend != "eager" else None
        if around is not None and changing_mode() is not None and not runs_within_step():
            self._refusals.warn(f"graphplan runs calls eagerly while {around} is active, which no replay would heed")
        self._runner.outcome = None
        with running_step():
            if around is not None:
                result = self._runner.surrounded(args, kwargs, around, self._options)
            else:
                try:
                    result = self._find_way(args, kwargs)
                finally:
                    self._managed.end_call()
        self._runner.outcome = None
        return result

    def _find_way(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run, trace, capture or replay."""
        if self._options.backend == "eager":
            return self._runner.untouched(args, kwargs)
        settle_companions()
        try:
            feed = flatten(args, kwargs, self._unread.keys)
        except FeedError as error:
            self._refusals.refuse(error)
            return self._fruitlessly(error, CallArguments(args, kwargs))
        if self._options.autograd and any(map(asks_for_gradients, feed.leaves)):
            return self._outside(feed)
        if self._options.asks_eager(self._calls, args, kwargs):
            return self._runner.eager(self._lookup.moved(feed), SkipReason.EAGER_IF)
        if self._opens_gate and self._options.mode == "train" and self._begin_timing(feed):
            self._calls -= 1
            assert self._way is not None
            return self._way(args, kwargs)
        if self._managed.refusal is not None:
            self._demote(self._managed.refusal)
            return self._refused(feed, self._managed.refusal)
        why = self._programs.turns_away(self._lookup.geometry(feed))
        if why is not None:
            return self._turned_away(feed, *why)
        try:
            entry, program = self._lookup.find(feed)
            if self._managed.refusal is not None:
                raise self._managed.refusal
        except RefusalError as error:
            self._demote(error)
            return self._refused(feed, error)
        if entry.outside:
            return self._outside(feed)
        if entry.refusal is not None:
            self._programs.close(entry)
            return self._refused(feed, entry.refusal)
        if self._opens_gate and not entry.is_decided and entry.gate is None:
            entry.gate = self._gate_of_calls(self._lookup.moved(feed))
            entry.is_decided = entry.gate is None
        if entry.gate is not None and entry.gate.eager is None:
            self._tell(None)
            return self._eagerly_timed(entry.gate, CallArguments.of(self._lookup.moved(feed)))
        if program is not None:
            misfit = program.misfit(feed)
            if misfit is not None:
                if program.adopted_inputs:
                    self._refusals.warn(f"graphplan runs calls eagerly: {misfit}")
                self._tell(None, SkipReason.FEED, misfit)
                return self._runner.eager(self._lookup.moved(feed), SkipReason.FEED, misfit)
            self._tell(program)
            if self._replays.is_due(program):
                with no_collections():
                    return self._check(entry, program, self._lookup.moved(feed))
            if entry.gate is not None:
                return self._replay_timed(entry, program, feed, args, kwargs)
            if not kwargs and self._options.eager_if is None:
                self._short.remember(args, feed, entry, program)
            return self._replays.replay(program, feed.leaves)
        with no_collections():
            return self._advance(entry, self._lookup.moved(feed))

    def _replay_timed(
        self, entry: Entry, program: Program, feed: Feed, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """A replay while it is open whether those of ``entry`` pay."""
        gate = entry.gate
        assert gate is not None
        found = None if kwargs else self._short.seconds(args, feed, entry, program)
        start = gate.begin() - (found or 0.0)
        result = self._replays.replay(program, feed.leaves)
        self._runner.outcome = (result,)
        pays = gate.end_replay(start)
        if pays is not None:
            entry.gate, entry.is_decided = None, True
            # A result may lie in the program's memory: that is closed with the next call.
            entry.refusal = self._decide(gate, pays)
        return result

    def _tell(self, program: Program | None, reason: SkipReason | None = None, detail: str = "") -> None:
        """Before anything runs: ``program`` will, or Python; that comes to no program if there is a ``reason``."""

    def _outside(self, feed: Feed) -> Any:
        """A call through which gradients flow."""
        self._tell(None, SkipReason.GRADIENT)
        return self._runner.outside(CallArguments.of(self._lookup.moved(feed)), SkipReason.GRADIENT)

    def decide_refusals(self, escalates: Callable[[RefusalError], bool]) -> None:
        """Let ``escalates(error)`` say which refusals raise; the others demote with a warning."""
        self._refusals.escalates = escalates

    def _refused(self, feed: Feed, error: RefusalError) -> Any:
        self._tell(None, error.reason, str(error))
        return self._fruitlessly(error, CallArguments.of(self._lookup.moved(feed)), feed)

    def _fruitlessly(self, error: RefusalError, fed: CallArguments, feed: Feed | None = None) -> Any:
        """An eager call because of ``error``. After several in a row, the step stands down, unless it has programs for
        other calls than those like ``feed``.
        """
        stats = self._runner.stats
        progress = stats.traced + stats.captured + stats.replayed
        count = self._fruitless[0] + 1 if self._fruitless[1] == progress else 1
        self._fruitless = count, progress
        result = self._runner.plain(fed, error.reason, str(error))
        if count >= _REFUSED and not self.is_down and not self._serves_others(error, feed):
            self._stand_down(error.reason, str(error))
        return result

    def _serves_others(self, error: RefusalError, feed: Feed | None) -> bool:
        if feed is None:
            return bool(self._programs.all())
        return self._programs.turn_away(self._lookup.geometry(feed), error)

    def _turned_away(self, feed: Feed, reason: SkipReason, detail: str) -> Any:
        """A call of a signature for which there will be no program."""
        self._tell(None, reason, detail)
        fed = CallArguments.of(self._lookup.moved(feed))
        if self._options.autograd:
            return self._runner.outside(fed, reason, detail)
        return self._runner.plain(fed, reason, detail)

    def _stand_down(self, reason: SkipReason, detail: str, **options: Any) -> None:
        """Take everything away that is not the user's own: programs, buffers, what optimizers were prepared with."""
        with ExitStack() as parts:
            # The step is stock, whichever of them raises.
            parts.callback(self._be_stock, reason, detail, **options)
            parts.callback(self._managed.stand_down, is_by_time=reason in (SkipReason.BUSY, SkipReason.SLOWER))
            parts.callback(self._buffers.clear)
            parts.callback(self._short.forget)
            parts.callback(self._stages.forget)
            parts.callback(self._programs.forget)

    def _check(self, entry: Entry, program: Program, feed: Feed) -> Any:
        """A replay that is checked against eager. After a difference, the step stands down."""
        is_needed = not program.replays and entry.is_like_others(program)
        try:
            result, error = self._replays.check(program, feed, is_needed=is_needed)
        except PeerError as refusal:
            self._programs.forget()
            self._demote(refusal)
            return self._refused(feed, refusal)
        assert self._runner.backend is not None
        self._room.after_check(self._runner.backend)
        if error is not None and is_needed:
            # What one trace could not tell; two will, with a word about the culprit.
            self.stats.note(f"traced anew: {error}")
            self._programs.close(entry)
            self._short.forget()
            entry.takes_two = True
            self._runner.count_eager(None)
        elif error is not None:
            self.stats.note(f"invalidated: {error}")
            self._stand_down(error.reason, str(error))
            self._refusals.refuse(error)
            self._runner.count_eager(error.reason, str(error))
        return result

    def _advance(self, entry: Entry, feed: Feed) -> Any:
        """One step on the way to a program, which closes others that are too many, or whose inputs are too small."""
        self._tell(None)
        self._short.forget()
        overdue = self._programs.check_due(feed)
        if overdue is not None:
            if self._options.on_failure == "raise":
                raise overdue
            self._refusals.warn(f"graphplan runs this step eagerly: {overdue}")
            self._stand_down(SkipReason.SHAPE, str(overdue))
            assert self._way is not None
            return self._runner.outside(CallArguments.of(feed), SkipReason.SHAPE, str(overdue))
        if not self._programs.has_room(entry):
            return self._turned_away(feed, SkipReason.MAX_GRAPHS, "")
        try:
            self._programs.check_churn()
            self._stages.check_changes(entry)
            is_planned = any(line.plan is not None for line in entry.lines.values())
            if self._peers is not None and not self._peers.may_advance(is_planned):
                return self._runner.eager(feed, SkipReason.PEERS)
            if not entry.eager_calls:
                self._programs.count_new()
        except RefusalError as error:
            self._demote(error)
            return self._refused(feed, error)
        if self._stages.is_ready(entry):
            captured = self.stats.captured
            result = self._stages.advance(entry, feed)
            self._programs.count_attempt()
            if self.stats.captured > captured:
                self._programs.count_capture(entry, self._lookup.geometry(feed))
                self._settle(entry)
                self._short.forget()
                program = entry.select(self._managed.grad_presence)
                if program is not None:
                    program.leave()
                self.stats.bytes_static = self._buffers.nbytes + self._programs.nbytes + self._programs.staged_bytes
            return result
        known = len(self._managed.owners)
        result = self._stages.warm_up(entry, feed)
        self._programs.count_attempt()
        if entry.warm <= 1 or entry.eager_calls <= 1 or len(self._managed.owners) > known:
            self._lookup.keep(feed, entry)
        return result

    def _settle(self, entry: Entry) -> None:
        """See to it that the programs, with the new one, take no more memory than they may."""
        assert self._runner.backend is not None
        cramped = self._room.settle(entry, self._runner.backend)
        if cramped is not None:
            self._refusals.warn(f"graphplan runs this step eagerly: {cramped}")

    def _demote(self, error: RefusalError) -> None:
        """Raise, or stand down; a feed's fault is its own call's only."""
        self._refusals.refuse(error)
        if not isinstance(error, FeedError):
            self._stand_down(error.reason, str(error))

    def _forget(self) -> None:
        self._programs.forget()
        self._short.forget()
        self._stages.forget()

    def invalidate(self, why: str) -> None:
        """Drop every program; the next calls trace and capture again. ``why`` goes into the report.

        Raises:
            BusyError: while a call is going on.
        """
        with self._alone():
            self.stats.note(f"invalidated: {why}")
            self._forget()

    def close(self) -> None:
        """Drop every program and put the optimizers' flags back. The step cannot be called again.

        Raises:
            BusyError: while a call is going on.
        """
        with self._alone():
            self._forget()
            self._buffers.clear()
            self._managed.release()
            if self._gate is not None:
                self._gate.cancel()
            self._compiled.undo()
            self._take_counts()
            self._way = self.stock = None
            self._closed = True
