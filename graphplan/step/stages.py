"""The stages on the way to a program: eager warm-up, traces, capture. A refused trace or capture is undone."""

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
from graphplan.step.runner import StepContext
from graphplan.tensors.storages import storage_id
from graphplan.tensors.trees import flatten_result, named_leaves
from graphplan.trace.batch_recorder import recorder_of
from graphplan.trace.deferred_reads import DeferredReads
from graphplan.trace.records import Trace

_NO_ACCIDENT = 2  # Consecutive steps that show the same behaviour before it counts as a rule.
_RENAMED = 8  # Consecutive traces that use new names before the step is refused.
_WELL_KNOWN = 4  # Consecutive first calls of keys without a discovery, after which first calls are no longer watched.
_OFTEN = 32  # A key that recurs within this many calls may share the warm-up of other shapes.


class Stages:
    """Runs and counts the calls on the way to a program: warm-up, traces, captures."""

    def __init__(
        self, parts: StepContext, lookup: Lookup, buffers: Buffers, memory: MemoryBudget, unread: UnreadValues
    ) -> None:
        self._runner, self._managed, self._options = parts.runner, parts.managed, parts.options
        self._refusals, self._programs, self._stats = parts.refusals, parts.programs, parts.runner.stats
        self._buffers, self._memory, self._unread, self._peers = buffers, memory, unread, parts.peers
        self._given, self._reads = parts.given, FoundReads(parts, lookup)
        self._changes: list[str] = []  # Changes of fed containers in consecutive first calls, each of a new key.
        self._learnt_nothing = 0  # Consecutive first calls of keys that discovered no owner or name.
        self._keeping = 0  # Consecutive warm-up steps that made modules or optimizers and kept them.
        self._has_begun = False
        self._defers = True  # Traces defer reads of numbers until code needs the values.
        self._latest: Trace | None = None  # The latest trace until a capture, even if it was discarded.
        self.planner = Planner(parts)

    def forget(self) -> None:
        """Drop everything that traces have left here."""
        self._changes, self._latest = [], None
        self.planner.forget()

    def is_ready(self, entry: Entry) -> bool:
        """Return True if the next call of ``entry`` is traced or captured. All shapes of a training step warm up
        together, so a frequent one needs a single eager step of its own. Called once per call of the step.
        """
        calls = self._stats.calls
        is_often, entry.called = calls - entry.called <= _OFTEN, calls
        enough = self._options.warmup_steps
        # Ranks have to trace in the same steps, but their batches may differ in shape.
        may_share = self._options.mode == "train" and self._peers is None
        if may_share and is_often and entry.is_new and 0 < entry.warm < enough:
            warm = entry.warm + sum(other.warm for other in self._programs.other_shapes(entry))
            if warm >= enough or self._programs.is_further(entry):
                entry.warm = enough
        return entry.warm >= enough

    def warm_up(self, entry: Entry, feed: Feed) -> Any:
        """Run an eager step and discover the owners that it uses, unless a plan of another shape already knows them."""
        self._runner.settle_backend(feed)
        if not self._has_begun and not self._runner.backend.executes:
            # Accumulation nodes of earlier steps belong to another stream, for which a capture could not wait.
            renew_accumulators(param for _, param in self._managed.walk_before().parameters.values())
            self._memory.begin(self._managed.walk_before(), self._runner.backend, is_timed=bool(self._stats.measured))
        self._has_begun = True
        if not entry.eager_calls:
            self._managed.add_fed(feed.leaves)
        fed = CallArguments.of(feed).watch()
        call = partial(self._runner.call, fed)
        with self._stats.timed("warmup"):
            if self._programs.is_further(entry):
                result = self._runner.run(call)
            else:
                self.planner.note_numbers(self._managed.walk_before())
                # Watch the warm-up calls of a further key until one of them discovers nothing new.
                is_first_known = not entry.eager_calls and self._learnt_nothing >= _WELL_KNOWN
                is_well_known = is_first_known or (entry.warm > 1 and not self._managed.has_learnt)
                result = self._runner.run(call if is_well_known else partial(self._watch, call, fed, entry))
                if self._managed.has_learnt or self._managed.is_outdated:
                    self._managed.refresh()
        if not entry.eager_calls:
            change = fed.change()
            self._changes = [] if change is None else [*self._changes, change]
        self._memory.after_warm_up(self._runner.backend)
        entry.eager_calls += 1
        self._runner.count_eager(None)
        if self._managed.scaled_steps.skipped_without_state:
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
        """Note if a backward pass outside the step reaches its results."""
        call = entry.eager_calls
        for name, leaf in named_leaves(result):
            if isinstance(leaf, Tensor) and leaf.grad_fn is not None:
                leaf.register_hook(partial(_note_flow, entry.outer_backward, call, name))

    def change(self, entry: Entry) -> HostEffectError | None:
        """The error for a step whose results take part in an outer backward pass, or that changes fed containers in all
        first calls. Raises HostEffectError for modules or optimizers that the step makes and keeps.
        """
        if len(entry.outer_backward) >= min(_NO_ACCIDENT, self._options.warmup_steps):
            name = next(iter(entry.outer_backward.values()))
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
        """Trace the call, or capture it if there is a plan. A refusal that is not raised leads to an eager step."""
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
                # The value that was read is a part of later keys, which find other entries.
                entry.drop()
                entry.warm = entry.eager_calls = 0
            else:
                call.line.traces = []
                entry.warm = min(entry.warm, self._options.warmup_steps - 1)
            # The trace was undone, so this is the call's only run. It raises the step's own error, too.
            result = self._runner.eager(CallArguments.of(feed), SkipReason.SHAPE, managed=True)
            if signal.indices or self.planner.drop_tables() or self._reads.earlier.stop_waiting():
                return result
            if signal.symbolic is None:
                self._defers = False
            elif not self._give_up(signal.symbolic or self._given.paths):
                self.planner.replace_less(signal.symbolic, call.walk)
                entry.need(signal.symbolic, call.walk.scalars)
            return result
        except Exception as error:
            refusal = error if isinstance(error, RefusalError) else refusal_of(error)
            if refusal is None:
                # Under a dispatch mode of the caller's, the error may be that mode's, so it does not count.
                call.line.outcomes += call.line.plan is not None and _get_current_dispatch_mode() is None
                if call.line.outcomes > 1 or is_single:
                    # A capture is undone, so the same state may raise again and again: an eager step changes the state.
                    # A plan of a single trace has lost the trace that its first replay would be compared with.
                    call.line.plan = None
                    entry.warm = min(entry.warm, self._options.warmup_steps - 1)
                raise
        # Lack of memory and an uncovered role do not depend on the trace, so a second trace would not help.
        if is_single and not isinstance(refusal, (CaptureMemoryError, UncoveredRoleError)):
            self._stats.note(f"traced anew: {refusal}", "traces")
            call.line.plan = None
            self.planner.single_trace_allowed = False
            return self._runner.eager(CallArguments.of(feed), SkipReason.SHAPE, managed=True)
        if isinstance(refusal, OutcomeError):
            # The traceback would keep the frames of the recorded step alive.
            refusal.__traceback__ = None
            call.line.outcomes += 1
            if call.line.outcomes < FICKLE_TRACES:
                return self._runner.eager(CallArguments.of(feed), refusal.reason, str(refusal), managed=True)
            refusal = refusal.refusal
        self._refuse(entry, refusal)
        return self._runner.eager(CallArguments.of(feed), refusal.reason, str(refusal))

    def _refuse(self, entry: Entry, error: RefusalError) -> None:
        if self._peers is None and entry.may_refuse_path():
            self._refusals.refuse(error, "graphplan runs such calls eagerly")
            entry.code_path.refusal = error
        else:
            self._refusals.refuse(error)
            entry.refusal = error

    @refusing_memory()
    def _attempt(self, call: Call) -> Any:
        """Trace or capture the call, and undo it after an error; see :meth:`_run_traced` for the exception."""
        self._drop_outdated(call)
        with ExitStack() as undo:
            snapshot = self._snapshot(call, is_traced=not self._managed.runs_compiled(call.walk))
            undo.callback(snapshot.restore)
            # A later recording must contain its casts of weights, so autocast must not reuse cached ones.
            undo.callback(torch.clear_autocast_cache)
            result = self._trace(call, undo, snapshot) if call.line.plan is None else self._capture(call, undo)
            undo.pop_all()
            self._runner.outcome = (result,)
            return result

    def _snapshot(self, call: Call, *, is_traced: bool) -> Snapshot:
        return self._memory.snapshot(call.walk, call.feed, call.line.plan, self._runner.backend, is_traced=is_traced)

    def _drop_outdated(self, call: Call) -> None:
        """Drop a plan if Python values have changed since its traces, or if tensors that are read before the step were
        replaced. Raises RecaptureError after ``max_recaptures`` such plans in a row.
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
            # A single trace does not count: it becomes the first of two.
            line.outdated += not line.plan.single
            self.planner.take_numbers(line.plan)
            line.plan = None
            most = self._options.max_recaptures
            if line.outdated >= most:
                raise RecaptureError(
                    f"{line.outdated} plans in a row were out of date at their capture: {changed}. {EXPECTED}; or "
                    f"raise max_recaptures (now {most})"
                )
            self._stats.note(f"traced anew: {changed}", "traces")

    def _trace(self, call: Call, undo: ExitStack, snapshot: Snapshot) -> Any:
        """Trace a call and keep the trace. If the step runs compiled code, undo the traced run and run it again. Raises
        RefusalError, or ReadSignal if the step reads a value that the key leaves out or that cannot be deferred.
        """
        facts, feed = Trace(), call.feed
        rehearses = self._managed.runs_compiled(call.walk)
        facts.expects = not rehearses and self._peers is None
        if facts.expects:
            facts.batch = recorder_of(feed, self._reads.earlier)
        symbolic = self.planner.make_symbolic(call.walk, self._runner.device, arguments_alone=rehearses)
        defers, integer_places = self._defers and not rehearses, frozenset(self._reads.earlier.deferred_places)
        facts.deferred = DeferredReads(defers=defers, symbolic=symbolic, integer_places=integer_places)
        placeholders = Placeholders(feed, feed.unread)
        fed = CallArguments.of(placeholders.feed).watch()
        undo.callback(fed.restore)
        undo.callback(facts.undo_uncopied_writes)
        with placeholders, self._stats.timed("trace"):
            result, walk = self._run_traced(call, fed, facts, undo, rehearses=rehearses)
            # Keep only these parts: the trace also references batches and copies of tensors without an owner.
            self._latest = Trace(operators=facts.operators, operator_draws=facts.operator_draws)
            result = placeholders.settled(result)
            if feed.unread and facts.reads.detects(tuple({type(feed.leaves[index]) for index in feed.unread})):
                raise ReadSignal(feed.unread)
            rehearsal, taken = None, taken_item(call.walk, facts.reads.by_users.iterated, self._options.allow)
            if taken is None and (rehearses or facts.executed.compiled):
                rehearsal = Rehearsal(self._managed.walk, result, self._options.allow)
                facts.undo_uncopied_writes()
                snapshot.restore()
                torch.clear_autocast_cache()
                fed.restore()
                undo.callback(self._snapshot(call, is_traced=False).restore)
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
                # Record the questions of this trace, so that later calls on this way are recognised and stay eager.
                call.entry.learn(facts, call.walk.scalars)
                # The traced step is a correct eager step. It is undone only if the refusal raises.
                self._refuse(call.entry, error)
                self._stats.skip(error.reason, str(error))
        call.entry.eager_calls += 1
        self._stats.traced += 1
        self._stats.end_call("traced")
        return result

    def _run_traced(
        self, call: Call, fed: CallArguments, facts: Trace, undo: ExitStack, *, rehearses: bool
    ) -> tuple[Any, Walk]:
        """Run the step under the trace. After an error of the step's own, nothing is undone, as in an eager step."""
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
                # Run the next call eagerly before tracing again: this one may have left state half changed.
                line.traces = []
                entry.warm = min(entry.warm, self._options.warmup_steps - 1)
            raise

    def _take(self, call: Call, facts: Trace, at_end: Walk | None) -> None:
        """Keep a trace, and make a plan if there are enough. ``at_end`` is its last walk, if that is still valid."""
        line = call.line
        check_threads(facts, self._options.allow)
        if self._managed.rates.stepped_newcomers:
            # Stock kernels ran for parameters that are new to the optimizer. Later steps run other kernels.
            line.traces = []
            return
        if facts.needs_another_trace:
            line.traces = []
            if facts.batch is not None and facts.violation is None and not facts.batch.needs_another_trace:
                # Replays compare some of the reads. The others can run before the step from now on.
                self._reads.take(call, facts.batch, facts, may_turn=False)
            return
        if self._managed.add_leaves(facts.leaves):
            # In this trace, the gradients of these tensors were not owned yet.
            line.traces = []
            return
        if facts.violation is not None:
            raise facts.violation
        self._managed.check_kept()
        walk = at_end or self._managed.walk()
        if self._managed.add_names(facts.executed, walk):
            # Code ran for the first time, and this trace did not watch the objects that it uses.
            line.traces = []
            self._count_renamed(line)
            return
        if self._managed.add_states(facts.own_states):
            walk = self._managed.walk()
            at_end = at_end and walk
            facts.find_owned(facts.own_states, walk)
        may_turn, batch = self.planner.single_trace_allowed, facts.batch
        learns = batch is not None and not self._reads.take(call, batch, facts, may_turn=may_turn)
        learns = learns or self.planner.take_tables(facts, walk)
        if learns or self._give_up(facts.symbolic.used, facts.symbolic.told):
            line.traces = []
            return
        has_turned, line = line is not call.line, call.line
        self.planner.note(facts, walk)
        self.planner.take_truths(facts, walk)
        call.entry.learn(facts, walk.scalars)
        if call.entry.too_many is not None:
            raise call.entry.too_many
        line.traces.append(facts)
        line.state = [path for path in facts.entry_paths if is_optimizer_state(path)]
        plan = line.plan = self.planner.plan(call, walk, at_end)
        if plan is None:
            if has_turned:
                # The next traces make these reads before the step, and this one did not.
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
        """Make arguments at ``paths`` a part of the key again, since code needs their values. Return True if any is."""
        given = self._given.give_up(paths, told)
        for value in given:
            self._stats.note(f"each value needs its own program: the step's code needs {value}", "traces")
        if given:
            self._programs.begin_anew()
        return bool(given)

    def _capture(self, call: Call, undo: ExitStack) -> Any:
        """Capture a call and return its result. Raises ReadSignal if code used a placeholder."""
        options, backend, plan = self._options, self._runner.backend, call.line.plan
        assert plan is not None
        # The capture needs memory, so the trace and the batch that it references are dropped before it.
        expected = call.line.traces[-1].repeated() if plan.single else ((), {})
        if plan.single:
            # Most tensors that the single trace was fed are gone by now: keep only those that this call is fed, too.
            fed = {storage_id(leaf) for _, leaf in call.feed.tensors()}
            kept = tuple(tensor for tensor in plan.kept if storage_id(tensor) in fed)
            plan = call.line.plan = self._runner.plan = replace(plan, kept=kept)
        self.planner.settle(call, plan)
        self._latest = None
        compiled = self._managed.runs_compiled(call.walk)
        if compiled and not backend.executes:
            refuse_beside_compiled(plan)
        # Compiled code is specialized on the classes of its arguments, so it gets no placeholders.
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
