"""The stages on the way to a program: eager warm-up, traces, capture. What is refused of these is undone."""

from __future__ import annotations

from collections import ChainMap
from collections.abc import Callable, Collection
from contextlib import ExitStack, nullcontext
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import _get_current_dispatch_mode

from graphplan.backends.backend import is_out_of_memory, refusing_memory
from graphplan.compare.building import build_later
from graphplan.effects.host import LEAVES_OUT, check_threads, omissions, taken_item
from graphplan.errors import (
    CaptureMemoryError,
    ControlFlowError,
    GraphPlanError,
    HostEffectError,
    LearningRateError,
    OutcomeError,
    RecaptureError,
    RefusalError,
    SkipReason,
    UncoveredRoleError,
)
from graphplan.feed.buffers import Buffers
from graphplan.feed.call_arguments import CallArguments
from graphplan.feed.placeholders import ReadSignal
from graphplan.feed.signature import Feed, asks_for_gradients
from graphplan.feed.unread import Placeholders, UnreadValues
from graphplan.owners.slots import Walk, is_optimizer_state
from graphplan.owners.snapshot import Snapshot
from graphplan.program.accumulators import renew_accumulators
from graphplan.program.capture import capture_program, outdated
from graphplan.program.faults import is_steps_own, refusal_of
from graphplan.specs.policy import Policy
from graphplan.step.batch_variants import reads_of
from graphplan.step.compiled import Rehearsal, name_compiled, refuse_beside_compiled, refuse_graphs_within, uncompiled
from graphplan.step.entries import Entry, Line
from graphplan.step.found_reads import FoundReads
from graphplan.step.lookup import Lookup
from graphplan.step.memory_budget import MemoryBudget
from graphplan.step.planner import FICKLE_TRACES, Planner
from graphplan.step.programs import EXPECTED
from graphplan.step.reasons import Call
from graphplan.step.runner import Parts
from graphplan.tensors.storages import storage_id
from graphplan.tensors.trees import flatten_result, named_leaves
from graphplan.trace.deferred_reads import DeferredReads
from graphplan.trace.records import Trace

_NO_ACCIDENT = 2  # Steps in a row that are no coincidence.
_RENAMED = 8  # Traces in a row that use new names, after which no other one is made.
_WELL_KNOWN = 4  # First calls of keys in a row that were watched for nothing, after which those of others are not.
_OFTEN = 32  # A key that comes again within so many calls gets its program early, if that costs less than usual.


class Stages:
    """Takes the steps on the way to a program, and counts them."""

    def __init__(
        self, parts: Parts, lookup: Lookup, buffers: Buffers, memory: MemoryBudget, unread: UnreadValues
    ) -> None:
        self._runner, self._managed, self._options = parts.runner, parts.managed, parts.options
        self._refusals, self._programs, self._stats = parts.refusals, parts.programs, parts.runner.stats
        self._buffers, self._memory, self._unread, self._peers = buffers, memory, unread, parts.peers
        self._given, self._reads = parts.given, FoundReads(parts, lookup)
        self._changes: list[str] = []  # What first calls in a row, each of a new key, changed in what they were fed.
        self._learnt_nothing = 0  # First calls of keys in a row.
        self._keeping = 0  # Warm-up steps in a row that have made modules or optimizers, and kept them.
        self._has_begun = False
        self._defers = True  # Reads of numbers wait until values are needed.
        self._latest: Trace | None = None  # The latest trace until a capture, even if it was thrown away.
        self._planner = Planner(parts)

    def forget(self) -> None:
        """Let go of what was traced."""
        self._changes, self._latest = [], None
        self._planner.forget()

    def is_ready(self, entry: Entry) -> bool:
        """Whether the next call of ``entry`` is traced or captured. All shapes of a training step warm up together, so
        one that comes often needs a single eager step of its own. Asked once for each call.
        """
        calls = self._stats.calls
        is_often, entry.called = calls - entry.called <= _OFTEN, calls
        enough = self._options.warmup_steps
        # Ranks have to trace in the same steps.
        may_share = self._options.mode == "train" and self._peers is None
        if may_share and is_often and entry.is_new and 0 < entry.warm < enough:
            warm = entry.warm + sum(other.warm for other in self._programs.other_shapes(entry))
            if warm >= enough or self._programs.is_further(entry):
                entry.warm = enough
        return entry.warm >= enough

    def warm_up(self, entry: Entry, feed: Feed) -> Any:
        """An eager step that takes in the owners that it uses; they are known if another shape has a plan."""
        self._runner.settle_backend(feed)
        if not self._has_begun and not self._runner.backend.executes:
            # Steps before this one ran on another stream.
            renew_accumulators(param for _, param in self._managed.walk_before().parameters.values())
        self._has_begun = True
        if not entry.eager_calls:
            self._managed.take_fed(feed.leaves)
        fed = CallArguments.of(feed).watch()
        call = partial(self._runner.call, fed)
        with self._stats.timed("warmup"):
            if self._programs.is_further(entry):
                result = self._runner.run(call)
            else:
                self._planner.note_numbers(self._managed.walk_before())
                # Further calls of one more key are watched, before it is traced, until one shows nothing new.
                is_first_known = not entry.eager_calls and self._learnt_nothing >= _WELL_KNOWN
                is_well_known = is_first_known or (entry.warm > 1 and not self._managed.has_learnt)
                result = self._runner.run(call if is_well_known else partial(self._watch, call, fed, entry))
                if self._managed.has_learnt or self._managed.is_outdated:
                    self._managed.refresh()
        if not entry.eager_calls:
            change = fed.change()
            self._changes = [] if change is None else [*self._changes, change]
        self._runner.backend.note_eager()
        entry.eager_calls += 1
        self._runner.count_eager(None)
        if self._managed.scaled_steps.unborn:
            self._stats.skip(SkipReason.UNBORN)
        elif self._options.autograd and any(map(asks_for_gradients, flatten_result(result)[0])):
            entry.outside = True
            self._stats.skip(SkipReason.GRADIENT)
        else:
            self._watch_results(entry, result)
            entry.warm += 1
            if self._stats.captured:
                self._stats.skip(SkipReason.SHAPE)
        return result

    def _watch(self, call: Callable[[], Any], fed: CallArguments, entry: Entry) -> Any:
        result = self._managed.discover(call, fed=fed.objects())
        is_first = not entry.eager_calls
        self._learnt_nothing = 0 if self._managed.has_learnt else self._learnt_nothing + is_first
        self._keeping = self._keeping + 1 if self._managed.kept else 0
        return result

    def _watch_results(self, entry: Entry, result: Any) -> None:
        """Note if a backward pass outside the step comes to what it has returned."""
        call = entry.eager_calls
        for name, leaf in named_leaves(result):
            if isinstance(leaf, Tensor) and leaf.grad_fn is not None:
                leaf.register_hook(partial(_note_flow, entry.flows_out, call, name))

    def change(self, entry: Entry) -> HostEffectError | None:
        """The error for a step whose results gradients flow through, or that changes what it is fed in each first call.
        Raises it for what the step keeps.
        """
        if len(entry.flows_out) >= min(_NO_ACCIDENT, self._options.warmup_steps):
            name = next(iter(entry.flows_out.values()))
            return HostEffectError(
                f"a backward pass outside the step reaches {name}, which the step returns; a replay returns it "
                "without an autograd graph. Put the whole training step into the function: forward pass, backward "
                "pass and optimizer step"
            )
        often = max(self._options.warmup_steps, _NO_ACCIDENT)
        if not entry.eager_calls and len(self._changes) >= often:
            return HostEffectError(self._changes[0])
        if self._keeping >= often:
            self._managed.check_kept()
        return None

    def advance(self, call: Call) -> Any:
        """A trace, or with a plan in hand the capture; a refusal that is not raised leads to an eager step."""
        entry, feed = call.entry, call.feed
        is_single = call.line.plan is not None and call.line.plan.single
        try:
            refuse_graphs_within(call.walk, self._runner.fn, self._runner.device, self._managed.compiled)
            taken = taken_item(call.walk, self._managed.names.iterated, self._options.allow)
            if taken is not None:
                raise taken
            return self._attempt(call)
        except ReadSignal as signal:
            if signal.indices:
                self._unread.mark(feed, signal.indices)
                # Later calls have keys with more in them.
                entry.drop()
                entry.warm = entry.eager_calls = 0
            else:
                call.line.traces = []
                entry.warm = min(entry.warm, self._options.warmup_steps - 1)
            # An error of the step's own comes out here, too.
            result = self._runner.eager(CallArguments.of(feed), SkipReason.SHAPE, managed=True)
            if signal.indices or self._planner.drop_tables() or self._reads.stop_waiting():
                return result
            if signal.symbolic is None:
                self._defers = False
            elif not self._give_up(signal.symbolic or self._given.paths):
                self._planner.replace_less(signal.symbolic, call.walk)
                entry.need(signal.symbolic, call.walk.scalars)
            return result
        except Exception as error:
            refusal = error if isinstance(error, RefusalError) else refusal_of(error)
            if refusal is None:
                # A mode of the caller's around the step may raise what it likes.
                call.line.outcomes += call.line.plan is not None and _get_current_dispatch_mode() is None
                if call.line.outcomes > 1 or is_single:
                    # A capture is undone. Where its state leads to the error each time, an eager step gets beyond that.
                    # The trace with which one of a single trace is compared is gone by then.
                    call.line.plan = None
                    entry.warm = min(entry.warm, self._options.warmup_steps - 1)
                raise
        # No second trace changes what room there is, nor a policy.
        if is_single and not isinstance(refusal, (CaptureMemoryError, UncoveredRoleError)):
            self._stats.note(f"traced anew: {refusal}", "traces")
            call.line.plan = None
            self.distrust()
            return self._runner.eager(CallArguments.of(feed), SkipReason.SHAPE, managed=True)
        if isinstance(refusal, OutcomeError):
            # It would keep the frames of the recorded step.
            refusal.__traceback__ = None
            call.line.outcomes += 1
            if call.line.outcomes < FICKLE_TRACES:
                return self._runner.eager(CallArguments.of(feed), refusal.reason, str(refusal), managed=True)
            refusal = refusal.refusal
        self._refuse(entry, refusal)
        return self._runner.eager(CallArguments.of(feed), refusal.reason, str(refusal))

    def distrust(self) -> None:
        """Trace all calls twice from here on: one trace did not tell all of some."""
        self._planner.distrust()

    def _refuse(self, entry: Entry, error: RefusalError) -> None:
        if self._peers is None and entry.may_refuse_way():
            self._refusals.refuse(error, "graphplan runs such calls eagerly")
            entry.way.refusal = error
        else:
            self._refusals.refuse(error)
            entry.refusal = error

    @refusing_memory()
    def _attempt(self, call: Call) -> Any:
        """A trace or a capture as a transaction; see :meth:`_run_traced` for the exception."""
        walk, feed, plan = call.walk, call.feed, call.line.plan
        with ExitStack() as undo:
            generators = plan.traced.generators if plan is not None else ()
            changed = plan.changed_tensors(walk) if plan is not None else []
            extra = [*changed, *(tensor for _, tensor in feed.tensors())]
            device = self._memory.for_copies(walk, self._runner.backend)
            snapshot = Snapshot(walk, extra=extra, generators=generators, device=device)
            undo.callback(snapshot.restore)
            # What is recorded next must not lack the casts of weights that the caller's autocast has cached.
            undo.callback(torch.clear_autocast_cache)
            self._drop_outdated(call)
            result = self._trace(call, undo, snapshot) if call.line.plan is None else self._capture(call, undo)
            undo.pop_all()
            self._runner.outcome = (result,)
            return result

    def _drop_outdated(self, call: Call) -> None:
        """Drop a plan if Python values have changed since its traces, or what is read before the step is elsewhere.
        Raises RecaptureError where that is so time and again.
        """
        line, found = call.line, reads_of(call.feed)
        if found is not None:
            found.is_outdated |= not found.is_in(call.walk.slots)
        if line.plan is None:
            return
        with self._managed.rates:
            changed = outdated(line.plan, call.walk)
        if found is not None and found.is_outdated:
            changed = changed or "the values that are read before the step are in other containers"
        if changed is not None:
            # A single trace is the first of two now.
            line.outdated += not line.plan.single
            self._planner.take_numbers(line.plan)
            line.plan = None
            most = self._options.max_recaptures
            if line.outdated >= most:
                raise RecaptureError(
                    f"{line.outdated} plans in a row were out of date at their capture: {changed}. {EXPECTED}; or "
                    f"raise max_recaptures (now {most})"
                )
            self._stats.note(f"traced anew: {changed}", "traces")

    def _trace(self, call: Call, undo: ExitStack, snapshot: Snapshot) -> Any:
        """Trace a call, and keep the trace. A step that runs compiled code is undone, and run again. Raises
        RefusalError, or ReadSignal if the step reads a value that its key leaves out, or one whose read cannot wait.
        """
        facts, feed = Trace(), call.feed
        rehearses = self._managed.runs_compiled(call.walk)
        facts.expects = not rehearses and self._peers is None
        if facts.expects:
            facts.batch = self._reads.recorder_of(feed)
        symbolic = self._planner.make_symbolic(call.walk, self._runner.device, arguments_alone=rehearses)
        defers, whole = self._defers and not rehearses, self._reads.waiting
        facts.deferred = DeferredReads(defers=defers, symbolic=symbolic, whole=whole)
        placeholders = Placeholders(feed, feed.unread)
        fed = CallArguments.of(placeholders.feed).watch()
        undo.callback(fed.restore)
        undo.callback(facts.undo_unowned_writes)
        with placeholders, self._stats.timed("trace"):
            result, walk = self._run_traced(call, fed, facts, undo, rehearses=rehearses)
            # Not what the trace holds beside: batches, and copies of tensors that no owner has.
            self._latest = Trace(operators=facts.operators, drawings=facts.drawings)
            result = placeholders.settled(result)
            if feed.unread and facts.reads.may_tell(tuple({type(feed.leaves[index]) for index in feed.unread})):
                raise ReadSignal(feed.unread)
            rehearsal, taken = None, taken_item(call.walk, facts.executed.iterated, self._options.allow)
            if taken is None and (rehearses or facts.executed.compiled):
                rehearsal = Rehearsal(self._managed.walk, result, self._options.allow)
                facts.undo_unowned_writes()
                snapshot.restore()
                torch.clear_autocast_cache()
                fed.restore()
                result = self._runner.run(lambda: self._runner.call(CallArguments.of(feed)))
            try:
                if taken is not None:
                    raise taken
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
                if rehearses:
                    name_compiled(error)
                # Calls that take this way are known by what it has asked.
                call.entry.learn(facts, call.walk.scalars)
                # The traced step is a good eager step, and stands unless the refusal raises.
                self._refuse(call.entry, error)
                self._stats.skip(error.reason, str(error))
        call.entry.eager_calls += 1
        self._stats.traced += 1
        self._stats.end_call("traced")
        return result

    def _run_traced(
        self, call: Call, fed: CallArguments, facts: Trace, undo: ExitStack, *, rehearses: bool
    ) -> tuple[Any, Walk]:
        """Run the step under the trace. An error of the step's own leaves what it leaves in an eager step."""
        entry, line, feed = call.entry, call.line, call.feed
        device, before = self._runner.device, self._latest
        walks: list[Walk] = []

        def body() -> Any:
            result, walk = self._managed.trace(feed, fed, facts, device, before)
            walks.append(walk)
            return result

        try:
            with uncompiled():
                return self._runner.run(body, traced=True), walks.pop()
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
        line = call.line
        check_threads(facts, self._options.allow)
        if self._managed.rates.stepped_newcomers:
            # Later steps run other kernels.
            line.traces = []
            return
        if facts.is_to_be_repeated:
            line.traces = []
            if facts.batch is not None and facts.violation is None and not facts.batch.is_to_be_repeated:
                # Replays compare some of the reads; the others can be made before the step from now on.
                self._reads.take(call, facts.batch, facts, may_turn=False)
            return
        if self._managed.take_leaves(facts.leaves):
            # Their gradients had no places yet.
            line.traces = []
            return
        if facts.violation is not None:
            raise facts.violation
        self._managed.check_kept()
        walk = at_end or self._managed.walk()
        if self._managed.take_names(facts.executed, walk):
            # Code ran for the first time: what it uses was not watched yet.
            line.traces = []
            self._count_renamed(line)
            return
        if self._managed.take_states(facts.own_states):
            walk = self._managed.walk()
            at_end = at_end and walk
            facts.find_owned(facts.own_states, walk)
        may_turn, batch = self._planner.may_be_single, facts.batch
        learns = batch is not None and not self._reads.take(call, batch, facts, may_turn=may_turn)
        learns = learns or self._planner.take_tables(facts, walk)
        if learns or self._give_up(facts.symbolic.used, facts.symbolic.told):
            line.traces = []
            return
        has_turned, line = line is not call.line, call.line
        self._planner.note(facts, walk)
        self._planner.take_truths(facts, walk)
        call.entry.learn(facts, walk.scalars)
        if call.entry.too_many is not None:
            raise call.entry.too_many
        line.traces.append(facts)
        line.state = [path for path in facts.entry_paths if is_optimizer_state(path)]
        plan = line.plan = self._planner.plan(call, walk, at_end)
        if plan is None:
            if has_turned:
                # Others are traced with what was read before.
                line.traces = []
            return
        for text in omissions(facts, self._options.allow):
            self._refusals.warn(f"{LEAVES_OUT}{text}")
            self._stats.note(f"left out of replays: {text}")
        self._runner.plan = plan
        for fact in plan.host_reads:
            self._stats.note(fact)
        needed = self._runner.backend.needs(plan.footprint, alone=True)
        self._stats.bytes_estimated = max(self._stats.bytes_estimated, needed)

    def _count_renamed(self, line: Line) -> None:
        line.renamed += 1
        if line.renamed >= _RENAMED:
            name = next(reversed(self._managed.names.entries), "none")
            raise ControlFlowError(
                f"in {line.renamed} steps in a row, the step's code used new names or objects (the latest name is "
                f"{name}). This happens if each step creates new code (exec, eval, a class or a function that it "
                "keeps). Create the code once, outside the step"
            )

    def _give_up(self, paths: Collection[str], told: Callable[[str], str] = str) -> bool:
        """Have arguments at ``paths`` in the key again, since code needs their values. Return True if there are any."""
        given = self._given.give_up(paths, told)
        for value in given:
            self._stats.note(f"each value needs its own program: the step's code needs {value}", "traces")
        if given:
            self._programs.begin_anew()
        return bool(given)

    def _capture(self, call: Call, undo: ExitStack) -> Any:
        """Capture a call and return its result. Raises ReadSignal if a placeholder was used."""
        options, backend, plan = self._options, self._runner.backend, call.line.plan
        assert plan is not None
        # The trace itself is let go before the capture, and with it what it was fed.
        expected = call.line.traces[-1].repeated() if plan.single else ((), {})
        if plan.single:
            # Most of what one trace was fed is gone by now.
            fed = {storage_id(leaf) for _, leaf in call.feed.tensors()}
            kept = tuple(tensor for tensor in plan.kept if storage_id(tensor) in fed)
            plan = call.line.plan = self._runner.plan = replace(plan, kept=kept)
        self._planner.settle(call, plan)
        self._latest = None
        compiled = self._managed.runs_compiled(call.walk)
        if compiled and not backend.executes:
            refuse_beside_compiled(plan)
        # Compiled code is made for the classes of its arguments, so it gets no placeholders.
        placeholders = Placeholders(call.feed, () if compiled else call.feed.unread)
        feed = placeholders.feed
        undo.callback(CallArguments.of(feed).watch().restore)
        with self._stats.timed("capture"):
            with self._managed.rates, uncompiled() if backend.executes and compiled else nullcontext():
                program = capture_program(
                    plan,
                    feed,
                    policy=options.policy or Policy.of_mode(options.mode),
                    backend=backend,
                    buffers=self._buffers,
                    homes=ChainMap(*(program.bindings.homes_in_place() for program in self._programs.all())),
                    lends=options.outputs == "static",
                )
            try:
                placeholders.check()
                result = program.run_recorded(call.feed.leaves, executed=backend.executes)
            except BaseException:
                program.close()
                raise
        if options.debug:
            program.wait("its capture")
        if options.prefetch and options.feed_device is not None:
            program.inputs.stage()
        build_later()
        self._stats.captured += 1
        program.expected, program.numbers = expected
        call.line.program = program
        self._managed.refresh(program.adopted.walk)
        self._managed.churn = 0
        self._stats.end_call("captured")
        return result


def _note_flow(found: dict[int, str], call: int, name: str, gradient: Tensor) -> None:
    found.setdefault(call, name)
