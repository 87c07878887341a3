"""The stages on the way to a program: eager warm-up, two traces, capture. A further shape takes fewer of them.

Each is a real step on the batch it is given. A trace or a capture that is refused is undone, and so is a capture that
an error ends.
"""

from __future__ import annotations

from collections import ChainMap
from contextlib import ExitStack, nullcontext
from functools import partial
from typing import Any
from weakref import WeakSet

import torch

from graphplan.backends.backend import refusing_memory
from graphplan.compare.building import build_later
from graphplan.errors import HostEffectError, RefusalError, SkipReason
from graphplan.feed.buffers import Buffers
from graphplan.feed.call_arguments import CallArguments
from graphplan.feed.placeholders import ReadSignal
from graphplan.feed.signature import Feed, asks_for_gradients
from graphplan.feed.unread import UnreadValues, with_placeholders
from graphplan.optimizers.first_steps import within_first_steps
from graphplan.owners.snapshot import Snapshot
from graphplan.program.capture import capture_program
from graphplan.program.faults import refusal_of
from graphplan.program.program import Program
from graphplan.step.call import Call
from graphplan.step.compiled import refuse_beside_compiled, refuse_graphs_within, uncompiled
from graphplan.step.memory_budget import Room
from graphplan.step.programs import Entry
from graphplan.step.runner import Parts
from graphplan.step.traces import Traces
from graphplan.tensors.trees import flatten_result

_NO_ACCIDENT = 2
"""Steps in a row that are no coincidence."""
_OFTEN = 32
"""A key that comes again within so many calls gets its program early, if that costs less than usual."""
_TURNS = 2
"""Calls for which a key waits for another one's plan."""


class Stages:
    """Takes the steps on the way to a program, and counts them."""

    def __init__(self, parts: Parts, buffers: Buffers, room: Room, unread: UnreadValues) -> None:
        self._runner, self._managed, self._options = parts.runner, parts.managed, parts.options
        self._refusals, self._programs, self._stats = parts.refusals, parts.programs, parts.runner.stats
        self._buffers, self._room, self._unread = buffers, room, unread
        self._traces = Traces(parts)
        self._captured: WeakSet[Program] = WeakSet()
        self._changes: list[str] = []
        """What first calls in a row, each with a key of its own, changed in containers that they were fed."""
        self._keeping = 0
        """Warm-up steps in a row that have made modules or optimizers, and kept them."""

    def forget(self) -> None:
        """Let go of what traces hold."""
        self._traces.forget()
        self._changes = []

    def is_ready(self, entry: Entry) -> bool:
        """Whether the next call of ``entry`` is traced or captured instead of one more eager step. Asked once for each.

        All shapes of a training step warm up together, so a shape that comes often needs one eager step of its own. If
        another shape was traced once, this one waits for its plan, which saves the second trace of all others; unless
        some value is known to change, which all traces report.
        """
        calls = self._stats.calls
        is_often, entry.called = calls - entry.called <= _OFTEN, calls
        enough = self._options.warmup_steps
        if self._options.mode != "train" or not (entry.is_new and self._traces.may_take_one(entry)):
            return entry.warm >= enough
        others = self._programs.other_shapes(entry)
        is_planned = self._programs.is_further(entry)
        waits = not (is_planned or self._traces.has_changed)
        is_begun = waits and any(line.traces for other in others for line in other.lines.values())
        if entry.warm < enough:
            warm = entry.warm + sum(other.warm for other in others)
            if is_begun or not (entry.warm and is_often and (is_planned or warm >= enough)):
                return False
            entry.warm = enough
        entry.waited += is_begun
        return not (is_begun and entry.waited <= _TURNS)

    def warm_up(self, entry: Entry, feed: Feed) -> Any:
        """An eager step that takes in the owners that it uses; they are known if another shape has a plan."""
        self._runner.settle_backend(feed)
        fed = CallArguments.of(feed).watch()
        call = partial(self._runner.call, fed)
        is_settled = entry.settled or any(other.settled for other in self._programs.other_shapes(entry))
        with self._stats.timed("warmup"), within_first_steps(self._runner.backend.apart):
            if self._programs.is_further(entry):
                result = self._runner.run(call)
            else:
                body = partial(self._managed.discover, call, fed=fed.objects(), is_settled=is_settled)
                result, walk = self._runner.run_walked(body)
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
        elif self._options.autograd and any(asks_for_gradients(leaf) for _, leaf in flatten_result(result)[0]):
            entry.outside = True
            self._stats.skip(SkipReason.GRADIENT)
        else:
            entry.warm += 1
            entry.settled = is_settled or self._managed.is_settled
            if self._stats.captured:
                self._stats.skip(SkipReason.SHAPE)
        return result

    def check_changes(self, entry: Entry) -> None:
        """Raise HostEffectError for a step that changes what it is fed, or keeps what it makes, in each call."""
        often = max(self._options.warmup_steps, _NO_ACCIDENT)
        if not entry.eager_calls and len(self._changes) >= often:
            raise HostEffectError(self._changes[0])
        if self._keeping >= often:
            self._managed.check_kept()

    def advance(self, call: Call) -> Any:
        """A trace, or with a plan in hand the capture; a refusal that is not raised leads to an eager step."""
        entry, feed = call.entry, call.feed
        try:
            refuse_graphs_within(call.walk, self._runner.fn, self._runner.device, self._managed.compiled)
            return self._attempt(call)
        except ReadSignal as signal:
            self._unread.mark(feed, signal.indices)
            # Later calls have keys with more in them.
            entry.drop()
            entry.warm = entry.eager_calls = 0
            return self._runner.eager(CallArguments.of(feed), SkipReason.SHAPE, managed=True)
        except Exception as error:
            refusal = error if isinstance(error, RefusalError) else refusal_of(error)
            if refusal is None:
                raise
        self._refusals.refuse(refusal)
        entry.refusal = refusal
        return self._runner.eager(CallArguments.of(feed), refusal.reason, str(refusal))

    @refusing_memory()
    def _attempt(self, call: Call) -> Any:
        """A trace or a capture as a transaction; see :class:`Traces` for the exception."""
        walk, feed, plan = call.walk, call.feed, call.line.plan
        with ExitStack() as undo:
            generators = plan.handles.generators if plan is not None else ()
            changed = plan.changed_tensors(walk) if plan is not None else []
            extra = [*changed, *(tensor for _, tensor in feed.tensors())]
            device = self._room.for_copies(walk, self._runner.backend)
            snapshot = Snapshot(walk, extra=extra, generators=generators, device=device)
            undo.callback(snapshot.restore)
            # What is recorded next must not lack the casts of weights that the caller's autocast has cached.
            undo.callback(torch.clear_autocast_cache)
            self._traces.drop_outdated(call)
            result = (self._trace if call.line.plan is None else self._capture)(call, undo, snapshot)
            undo.pop_all()
            self._runner.outcome = (result,)
            return result

    def _trace(self, call: Call, undo: ExitStack, snapshot: Snapshot) -> Any:
        hidden, placeholders = with_placeholders(call.feed)
        fed = CallArguments.of(hidden).watch()
        undo.callback(fed.restore)
        with placeholders or nullcontext():
            result = self._traces.trace(call, fed, undo, snapshot)
        call.entry.eager_calls += 1
        self._stats.traced += 1
        self._stats.end_call("traced")
        return result

    def _capture(self, call: Call, undo: ExitStack, snapshot: Snapshot) -> Any:
        """Capture a call, and give it its results. Raises ReadSignal if a placeholder was used."""
        options, backend, plan = self._options, self._runner.backend, call.line.plan
        assert plan is not None
        compiled = self._managed.runs_compiled(call.walk)
        if compiled and not backend.executes:
            refuse_beside_compiled(plan)
        # Compiled code is made for the classes of its arguments, so it gets no placeholders.
        feed, placeholders = (call.feed, None) if compiled else with_placeholders(call.feed)
        undo.callback(CallArguments.of(feed).watch().restore)
        with self._stats.timed("capture"):
            with self._managed.rates, uncompiled() if backend.executes and compiled else nullcontext():
                program = capture_program(
                    plan,
                    feed,
                    policy=options.roles,
                    backend=backend,
                    buffers=self._buffers,
                    homes=ChainMap(*(dict(program.bindings.homes) for program in self._captured if program.is_open)),
                    lends=options.outputs == "static",
                    watches=options.debug,
                )
            try:
                if placeholders is not None:
                    placeholders.check()
            except BaseException:
                program.close()
                raise
            if options.debug_eager and not backend.executes:
                # The step's Python runs again, so what it did in the capture is undone.
                snapshot.restore()
                result = self._runner.run(lambda: program.run_eagerly(feed.leaves))
            else:
                result = program.run_recorded(feed.leaves, executed=backend.executes)
        if options.debug:
            program.wait("its capture")
        if options.prefetch and options.feed_device is not None:
            program.inputs.stage()
        program.next_check = options.schedule.after(0)
        self._captured.add(program)
        build_later()
        self._keep(call, program)
        return result

    def _keep(self, call: Call, program: Program) -> None:
        """Count a capture, and have its entry serve calls with it."""
        self._stats.captured += 1
        self._stats.launches_eager += program.plan.launches
        call.line.program = program
        if not program.plan.tells_gradients:
            call.entry.any_program = program
        self._managed.refresh()
        self._managed.captured()
        self._stats.end_call("captured")
