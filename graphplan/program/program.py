"""The program. A replay copies inputs in, launches the recording, repeats Python effects and returns results."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor

from graphplan.backends.backend import Backend, Recording, first_line, is_out_of_memory
from graphplan.compare.comparing import Row
from graphplan.environment.devices import synchronize
from graphplan.environment.surroundings import check_surroundings
from graphplan.errors import (
    ClosedError,
    DeviceFault,
    FeedError,
    GraphPlanError,
    GuardError,
    HostEffectError,
    OutcomeError,
)
from graphplan.feed.call_arguments import hands_over
from graphplan.feed.signature import Feed, check_match, flatten
from graphplan.owners.flags import Flags
from graphplan.owners.generators import HostGenerators
from graphplan.owners.slots import Walk
from graphplan.plan.plan import Plan
from graphplan.program.adopted_tensors import AdoptedTensors
from graphplan.program.bindings import Bindings
from graphplan.program.faults import lost
from graphplan.program.fingerprint import Conditions
from graphplan.program.inputs import MEMORY_IS_FED, HostInputs, StaticInputs
from graphplan.program.outputs import Outputs
from graphplan.program.statics import CopiedOwned
from graphplan.program.undo import Undo
from graphplan.specs.policy import Policy
from graphplan.specs.roles import Role
from graphplan.tensors.dtensors import local
from graphplan.tensors.storages import storage_id
from graphplan.tensors.trees import flatten_result
from graphplan.trace.operands import Operand
from graphplan.trace.records import Operator
from graphplan.trace.symbolic_numbers import NumberTensor

NO_CHECK = 2**62
"""A replay number that is never reached."""
LATEST_OUTCOMES = 10
"""How many of the replays that ended early at a branch are kept; if most end alike, the value may have changed."""


@hands_over
def _launch(recording: Recording) -> None:
    recording.replay()


class ReplayCount:
    """Replay count shared by programs of all shapes that are checked in turn: from ``due`` on, the next is checked."""

    def __init__(self, due: int = NO_CHECK) -> None:
        self.replays = 0
        self.due = due


class Program:
    """One recorded step. Made by :func:`graphplan.capture` and by :class:`graphplan.GraphedStep`.

    Examples:
        >>> import torch
        >>> from graphplan import Policy, capture, compile_plan
        >>> x = torch.ones(3)
        >>> program = capture(compile_plan(torch.sin, x), feed=(x,), policy=Policy.inference())
        >>> torch.equal(program.replay((x * 2,)), torch.sin(x * 2))
        True
        >>> program.close()
    """

    def __init__(
        self,
        plan: Plan,
        policy: Policy,
        recording: Recording,
        inputs: StaticInputs,
        copied: CopiedOwned,
        bindings: Bindings,
        outputs: Outputs,
        undo: Undo | None,
        host: HostInputs | None,
        *,
        walk: Walk,
        values: Mapping[str, Any],
    ) -> None:
        self.plan = plan
        self.policy = policy
        self._push_rates = plan.handles.rates.push
        self._recording: Recording | None = recording
        self.is_open = True
        self.inputs = inputs
        self._copied = copied
        self.bindings = bindings
        self.outputs = outputs
        self._undo, self._host = undo, host
        self._draws_from = {draw.generator for draw in plan.drawn}
        self.outcomes = 0
        """Number of replays that ended early, at a branch with another value than in the traces."""
        self._latest_outcomes: deque[str] = deque(maxlen=LATEST_OUTCOMES)
        self.differs = False
        """Whether a check found other bits than the eager step's, perhaps noise: later ones keep copies to compare."""
        self._replays_before_outcome = 0
        self._flags = Flags(walk) if plan.left else None
        asking = {f"{name}.requires_grad": index for index, name in enumerate(plan.feed.names())}
        self._asking = [(asking[path], value) for path, value in plan.left.items() if path in asking]
        self.adopted = AdoptedTensors(plan, copied.stand_ins, walk, values, bindings.entry_grads)
        self.bytes_per_replay = inputs.nbytes
        self.nbytes = recording.nbytes
        self.generation = recording.generation
        bindings.share_memory(recording.generation)
        self.replays = 0
        self.paused_at: int | None = None
        """The number of replays before the latest eager step that replaced one of them."""
        self.conditions: Conditions | None = None
        """What a replay compares with the plan's conditions, if no state machine has done that."""
        self.replay_count = ReplayCount()
        self.expected: Sequence[Operator] = ()
        """Operators of the single trace behind the plan, until a replay has been compared with an eager step."""
        self.numbers: Mapping[Operand, NumberTensor] = {}
        """Operands of these operators that stand for numbers."""

    def count_state_bytes(self) -> int:
        """Return the bytes of the owners' dense tensors, without those that the step does not use."""
        untouched = self.plan.untouched(self.adopted.walk)
        slots = [slot for path, slot in self.adopted.walk.slots.items() if path not in untouched]
        tensors = {id(t): t for slot in slots for t in slot.tensors()}
        return sum(tensor.nbytes for tensor in tensors.values() if tensor.layout is torch.strided)

    @property
    def needs_first_check(self) -> bool:
        """Whether no replay has yet been compared with an eager step, which should run the ``expected`` operators."""
        return bool(self.expected)

    @property
    def has_paused(self) -> bool:
        """Whether it was not replayed since it was last replaced by an eager step."""
        return self.replays == self.paused_at

    def fits(self) -> bool:
        """Return True if guards hold, if necessary after moved tensors were copied back into the recorded memory."""
        if self._is_spoiled or self.bindings.lost_memory() is not None:
            return False
        if self.adopted.guards.hold() or (self.adopted.take_gradients() and self.adopted.guards.hold()):
            return True
        if self.adopted.renew() and self.adopted.guards.hold():
            return True
        if self.adopted.follow_tensors():
            self.bindings.move_homes(self.adopted.walk)
            if self.adopted.guards.hold():
                return True
        self.adopted.undo_renewal()
        return False

    def row(self) -> Row:
        """Return a comparison that holds while the program is open and has its present guards."""
        values = [self.is_open, self._is_spoiled, self.adopted.guards]
        return ("same_attributes", [self, self, self.adopted], ["is_open", "_is_spoiled", "guards"], values)

    @property
    def _is_spoiled(self) -> bool:
        return self._recording is not None and self._recording.is_spoiled

    def misfit(self, feed: Feed) -> str | None:
        """Return why the program cannot run on the feed: a leaf shares memory with tensors that the step changes, or a
        leaf that is not copied has another address. None if it can.
        """
        written = self.adopted.written
        if any(storage_id(leaf) in written for _, leaf in feed.tensors()):
            return MEMORY_IS_FED
        return self.inputs.misfit(feed)

    @property
    def written(self) -> set[Any] | None:
        """The owners' storages that the step writes to; None if it also writes to inputs."""
        return None if self.inputs.mutated else self.adopted.written

    def run(
        self,
        leaves: Sequence[Any],
        given: Mapping[Role, Mapping[str, Tensor]] | None = None,
        *,
        is_settled: bool = False,
    ) -> Any:
        """Copy in, launch, repeat effects, return results. Callers check guards first. ``is_settled``: no other code
        has kept a reference to a gradient since :meth:`Bindings.settle_grads`.
        """
        if self._recording is None:
            raise ClosedError(f"the program of {self.plan.name} was closed; capture it again")
        if self._copied.externals or given:
            self._copied.load(given or {}, self.adopted.walk)
        self._push_rates()
        self.bindings.settle_grads(are_kept=not is_settled)
        drawn_from = HostGenerators(self._draws_from) if self._draws_from else None
        try:
            self.bindings.numbers.start()
            self.inputs.load(leaves)
            self.outputs.mark_overwritten()
            self._launch()
        except Exception:
            if drawn_from is not None:
                drawn_from.restore()
            raise
        try:
            self.bindings.repeat()
            if self._copied.externals:
                self._copied.give_back()
            result = self.collect(leaves)
            if self._flags is not None:
                self._flags.assign(self.bindings.leave(self.plan.left))
            return result
        except Exception as error:
            if isinstance(error, GraphPlanError) or is_out_of_memory(error):
                raise
            raise lost(error, self.plan.name) from error

    def _launch(self, *, is_recorded: bool = False) -> None:
        """Replay. ``is_recorded``: this finishes the recorded call, which has already run the host's part."""
        assert self._recording is not None
        self.bindings.rescue_gradients()
        undoing = nullcontext() if self._undo is None else self._undo.undoing(self.bindings.grads_in_place())
        try:
            with undoing:
                if self._host is not None:
                    self._host.load(is_recorded=is_recorded)
                _launch(self._recording)
            if self.adopted.put_back:
                self.adopted.put_back = []
        except OutcomeError as outcome:
            self.adopted.undo_renewal()
            self.outcomes += 1
            if self.replays != self._replays_before_outcome:
                self._latest_outcomes.clear()
            self._replays_before_outcome = self.replays
            self._latest_outcomes.append(str(outcome))
            raise

    @property
    def outcomes_alike(self) -> int:
        """How many of the latest ``outcomes``, with no complete replay between them, were the same."""
        return max(Counter(self._latest_outcomes).values(), default=0)

    def wait(self, when: str) -> None:
        """Synchronize with the device, so that a failure by ``when`` is raised now."""
        try:
            synchronize(self.plan.device)
        except RuntimeError as error:
            raise DeviceFault(
                f"the device failed in the program of {self.plan.name} (fed {self.plan.feed}) by {when}: "
                f"{first_line(error)}. Its last operators: {', '.join(self.plan.last_operators)}. Run with "
                "backend='eager' to see whether the step itself fails"
            ) from error

    def run_between(
        self, backend: Backend, leaves: Sequence[Any], walk: Callable[[], Walk], body: Callable[[], Any]
    ) -> Any:
        """Run ``body``, the step fed with ``leaves``, between two replays. ``walk`` walks the owners afterwards."""
        assert self._recording is not None
        if self.plan.communicates:
            # Do not use the recording's memory: one rank might then have to recapture, and another not.
            return backend.run(body)

        def left(result: Any) -> Iterator[Tensor]:
            self.bindings.take_grads()
            for slot in walk().slots.values():
                yield from map(local, slot.tensors())
            for leaf in [*leaves, *flatten_result(result)[0]]:
                if isinstance(leaf, Tensor):
                    yield local(leaf)
                    if leaf.is_leaf and leaf.grad is not None:
                        yield local(leaf.grad)

        return backend.run_between(body, self._recording, self.plan.footprint.peak, left)

    def run_recorded(self, leaves: Sequence[Any], *, executed: bool) -> Any:
        """Finish the recorded call: execute it unless the recording did, and return its results. Raises EffectError if
        that fails once the step has run and cannot be undone (:meth:`MemoryBudget.snapshot`).
        """
        if not executed:
            self._launch(is_recorded=True)
        try:
            self._copied.give_back()
            self.bindings.replace_recorded()
            # Not after two traces: walks may still refer to tuples whose numbers were replaced in lists.
            if self.plan.single and self.bindings.numbers.are_kept():
                raise HostEffectError(
                    "the step keeps a number that it reads from the device in a place where it kept none in its "
                    "traces; a replay would not update it. Keep it in the same place in each step, return it, or read "
                    "it after the step"
                )
            self.bindings.numbers.are_kept = bool
            return self.collect(leaves)
        except Exception as error:
            if executed or self.plan.defers:
                raise
            raise lost(error, self.plan.name) from error

    def collect(self, leaves: Sequence[Any]) -> Any:
        """Return results of the last run, after copying changed inputs and input gradients to the caller's tensors."""
        self.inputs.give_back(leaves, self.outputs.shared)
        for index, asks in self._asking:
            leaves[index].requires_grad_(asks)
        return self.outputs.build(leaves, self.adopted.walk)

    def replay(
        self,
        args: tuple[Any, ...],
        *,
        params: Mapping[str, Tensor] | None = None,
        state: Mapping[str, Tensor] | None = None,
    ) -> Any:
        """Run the recorded step on new inputs.

        Args:
            args: positional arguments with the planned structure, shapes, dtypes and devices.
            params: values for all parameters by name (a ``state_dict``), if the policy copies that role; otherwise the
                owners' own values are copied.
            state: the same for state. State that the step changes is written back to the given tensors.

        Raises:
            FeedError: if an input does not fit, or shares memory with a tensor that the step changes.
            SurroundingsError: if a mode, a transform or forward-mode AD is active.
            GuardError: if an adopted tensor, or a gradient that the program writes, is no longer at its address, or if
                modes, flags, hooks or hyper-parameters have changed.
            OutcomeError: if the step branches on a value that differs from that of the traces; all changes are undone.
            ClosedError: after :meth:`close`.
        """
        check_surroundings("a program is replayed")
        feed = flatten(args, {})
        check_match(feed, self.plan.feed)
        reason = None if self.conditions is None else self.conditions.change(self.plan.conditions)
        if reason is None and not self.fits():
            reason = self.resync()
        if reason is not None:
            raise GuardError(f"the program of {self.plan.name} no longer fits: {reason}; capture it again")
        misfit = self.misfit(feed)
        if misfit is not None:
            raise FeedError(f"{self.plan.name}: {misfit}")
        return self.run(feed.leaves, {Role.PARAM: params or {}, Role.STATE: state or {}})

    def resync(self, walk: Walk | None = None) -> str | None:
        """Copy the values of tensors that moved into the fixed storage, and bind that again.

        Args:
            walk: the owners as they are now, if the caller has just walked them.

        Returns:
            None if the program fits again, else why it cannot.
        """
        if self._is_spoiled:
            return "something that an eager step keeps is in memory that replays overwrite"
        walk = self.plan.handles.walk() if walk is None else walk
        reason = self.bindings.lost_memory() or self.adopted.follow(walk)
        if reason is not None:
            return reason
        self.plan.handles.rates.attach(walk.optimizers.values())
        self.bindings.follow(walk)
        lost = self.bindings.lost_place()
        if lost is not None:
            return f"{lost} is gone, and so is the object that held it"
        self.bindings.move_homes(walk)
        self._flags = Flags(walk) if self.plan.left else None
        self.adopted.take(walk)
        return None if self.adopted.guards.hold() else "something that the step depends on has changed"

    def close(self) -> None:
        """Release the recording's memory."""
        self.is_open = False
        self.adopted.uses = {}
        self.inputs.unstage()
        if self._recording is not None:
            self._recording.reset()
            self._recording = None
