"""Calls at capture sizes: pad, run, cut, and now and then compare with the call as it came, whose outcome stands then:
what the padded one did to owners and generators is undone.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from graphplan.effects.allowed import is_allowed
from graphplan.environment.devices import default_generators
from graphplan.errors import HostEffectError, PaddingError, SkipReason
from graphplan.feed.call_arguments import CallArguments
from graphplan.feed.signature import Feed, asks_for_gradients
from graphplan.inference.graphed_options import ServeOptions
from graphplan.observe.source import find_source
from graphplan.owners.slots import Walk
from graphplan.owners.snapshot import Snapshot
from graphplan.owners.walk import walk_owners
from graphplan.program.faults import having_run
from graphplan.program.leases import plain
from graphplan.program.program import Program
from graphplan.step.capture_sizes import distance, tolerance
from graphplan.step.graphed_step import GraphedStep
from graphplan.step.padding import Kind, PaddedCall, Padding
from graphplan.tensors.copying import same_bits
from graphplan.tensors.dtensors import is_imagined, is_wrapped
from graphplan.tensors.trees import flatten_result
from graphplan.trace.operator_schemas import schema_of
from graphplan.verify.copy_placement import find_room


class _UnpaddedError(Exception):
    """A call is better made as it came: the reason, and its wording."""


class Bucketed:
    """Serves the calls of one step at capture sizes."""

    def __init__(self, fn: Callable[..., Any], step: GraphedStep, options: ServeOptions) -> None:
        assert options.buckets is not None
        device = options.step.feed_device
        self.padding = Padding(fn, options.buckets, options.dynamic, options.pad, options.mask, device, step.shapes)
        self._step = step
        self._name = getattr(fn, "__name__", type(fn).__name__)
        self._stats = step.shapes
        self._schedule = options.step.schedule
        self._allow = options.allow

    def call(self, feed: Feed) -> Any:
        """One call of dense tensors. Raises PaddingError if padding changes what comes out."""
        if any(map(asks_for_gradients, feed.leaves)) or self._trains():
            return self._leave(feed, SkipReason.GRADIENT)
        kind = self.padding.kind(feed, self._schedule.after(0))
        if isinstance(kind, str):
            return self._leave(feed, SkipReason.BUCKET, kind)
        self._stats.count(kind.own.values(), kind.staged.values())
        refusal = kind.size.refusal or (kind.size.drawing if kind.is_padded else None)
        if refusal is not None:
            return self._leave(feed, SkipReason.PADDING, str(refusal))
        return self._run(PaddedCall(self.padding, feed, kind))

    def _leave(self, feed: Feed, reason: SkipReason, detail: str = "") -> Any:
        """The call as it came."""
        return self._step.skip(*self.padding.leave(feed), reason, detail)

    def _trains(self) -> bool:
        """Whether gradients could flow to parameters: padded inputs lie in memory that the next call overwrites."""
        if not torch.is_grad_enabled():
            return False
        found = [owner for owner in self._step.machine.managed.owners.values() if isinstance(owner, nn.Module)]
        return any(asks_for_gradients(param) for owner in found for param in owner.parameters())

    def _run(self, call: PaddedCall) -> Any:
        kind, size = call.kind, call.kind.size
        is_padded = kind.is_padded
        effects: _Effects | None = None
        fed: CallArguments | None = None

        def before(program: Program | None, reason: SkipReason | None, detail: str) -> None:
            nonlocal effects, fed
            if program is not None:
                call.leave_lent_memory(program)
            else:
                fed = CallArguments(call.args, call.kwargs).watch()
            if is_padded and reason is not None:
                raise _UnpaddedError(reason, detail)
            if is_padded and self._is_due(kind, program):
                effects = self._watch(call, program)
                size.next_check = self._schedule.after(size.calls)
                if program is None:
                    watched.enter_context(effects.draws)

        with ExitStack() as watched:
            try:
                result = self._step.call(call.args, call.kwargs, before)
            except _UnpaddedError as reason:
                return self._leave(call.feed, *reason.args)
        with having_run(self._name):
            leaves = call.take(result)
            if effects is not None:
                return self._check(call, leaves, effects)
            if fed is not None and (change := fed.change()) is not None:
                # Only the containers that are made for padded tensors are changed; calls as they came have their own.
                size.refusal = HostEffectError(change)
                self._step.machine.refusals.refuse(size.refusal)
            if is_padded and not kind.is_sure:
                # The function gives something else than before: this call's outcome is that without padding.
                size.next_check = size.calls + 1
                return self._leave(call.feed, SkipReason.CHECK)
            call.hand_back()
            return call.cut(leaves)

    def _is_due(self, kind: Kind, program: Program | None) -> bool:
        """Return True if a padded call is compared: Python may do something else than in the last check, and so may
        another program. Without a schedule, programs are compared that may draw random numbers.
        """
        size = kind.size
        if size.calls == size.next_check or not kind.is_sure or program is None:
            return True
        return program not in size.checked and (self._schedule.every != 0 or bool(program.plan.draws))

    def _watch(self, call: PaddedCall, program: Program | None) -> _Effects:
        """What notes the effects of a call; _UnpaddedError without memory for copies of what the owners hold."""
        owners = self._step.machine.managed.owners
        held = {id(t): t.nbytes for slot in walk_owners(owners).slots.values() for t in slot.tensors()}
        where = next((memory.device for memory in call.kind.staged.values()), torch.device("cpu"))
        room, reason = find_room(sum(held.values()), where)
        if room is None:
            raise _UnpaddedError(SkipReason.CHECK, reason)
        return _Effects(owners, self._allow, room, program)

    def _check(self, call: PaddedCall, leaves: list[Any], effects: _Effects) -> Any:
        """Make the call as it came, too, and compare: its outcome stands."""
        kind, size, mutated = call.kind, call.kind.size, call.mutated()
        if effects.program is not None:
            size.checked.add(effects.program)
        kept = [plain(leaf).clone() if isinstance(leaf, Tensor) else leaf for leaf in leaves]
        effects.undo()
        expected = self._leave(call.feed, SkipReason.CHECK)
        self._stats.checked += 1
        if effects.has_drawn:
            return self._refuse_draws(call, effects, expected)
        problems, parts = size.slicer.learn(expected, kept, kind.true)
        for name, own in flatten_result(expected)[0]:
            part = parts.get(name)
            if part is not None and (apart := distance(own, part)) > tolerance(own.dtype):
                problems.append(f"{name} differs by {apart:.2g} of its largest value")
        problems += effects.problems()
        for index in mutated:
            own, part = call.feed.leaves[index], kind.own[index]
            if distance(own.to(part.device), part) > tolerance(own.dtype):
                problems.append(f"{call.feed.names()[index]}, which the function changes, differs")
        if problems:
            size.refusal = PaddingError(
                f"padding from {kind} changes what comes out: {'; '.join(problems[:3])}. Expected the "
                "same as without padding, within rounding: have the function leave the padding out (mask= names an "
                "argument that says what is real), pad with another value (pad=), name the dimensions that may be "
                "padded (dynamic=), or pass shapes='exact'. What came out without padding stands",
                result=expected,
            )
            self._step.machine.refusals.refuse(size.refusal)
        return expected

    def _refuse_draws(self, call: PaddedCall, effects: _Effects, expected: Any) -> Any:
        """Refuse padded calls that draw random numbers: those of another size may draw others."""
        places = effects.program.plan.draws if effects.program is not None else list(effects.draws.places)
        call.kind.size.drawing = PaddingError(
            f"the call draws random numbers {'; '.join(places[:3]) or 'in compiled code'}, and padding from "
            f"{call.kind} may have it draw others, and more of them, than without padding. Expected a function "
            "that draws none: draw outside of it and feed it the numbers, or pass shapes='exact'. Calls of a capture "
            "size are replayed all the same. What came out without padding stands",
            result=expected,
        )
        self._step.machine.refusals.refuse(call.kind.size.drawing)
        return expected


class _Draws(TorchDispatchMode):
    """Notes the lines that draw random numbers, and the first states of generators that are passed to operators."""

    changes_nothing = True

    def __init__(self) -> None:
        super().__init__()
        self.places: dict[str, None] = {}
        self.states: list[tuple[torch.Generator, Tensor]] = []

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Compiled code runs as without it."""
        return True

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if is_wrapped(types):
            return NotImplemented
        if schema_of(func).is_random and not is_imagined():
            self.places[f"at {find_source()}"] = None
            own = kwargs.get("generator")
            if own is not None and all(own is not known for known, _ in self.states):
                self.states.append((own, own.get_state()))
        return func(*args, **kwargs)


class _Effects:
    """What a padded call does to owners and generators. Made before the call.

    Attributes:
        draws: notes what Python draws, once entered.
        has_drawn: after :meth:`undo`, whether the padded call has drawn random numbers.
    """

    def __init__(
        self, owners: Mapping[str, Any], allow: Sequence[str], room: torch.device, program: Program | None
    ) -> None:
        self.program = program
        self.draws = _Draws()
        self._walk: Callable[[], Walk] = lambda: walk_owners(owners)
        self._allow = allow
        self._room = room
        self._start = Snapshot(self._walk(), device=room)
        generators = (*default_generators(), *(program.plan.handles.generators if program is not None else ()))
        self._states = [(generator, generator.get_state()) for generator in generators]
        self._left: dict[str, Tensor] = {}
        self.has_drawn = False

    def undo(self) -> None:
        """After the padded call: keep what it left, and put back what was there before it."""
        self._left = {path: tensor.to(self._room, copy=True) for path, tensor in self._changed()}
        # Whether an operator may draw says nothing: those of attention may, even without dropout.
        states = [*self._states, *self.draws.states]
        self.has_drawn = any(not torch.equal(generator.get_state(), state) for generator, state in states)
        self._start.restore()
        for generator, state in states:
            generator.set_state(state)

    def problems(self) -> list[str]:
        """After the call as it came: what the padded one left otherwise, in words."""
        now = dict(self._changed())
        held = {slot.path: slot.tensors() for slot in self._walk().slots.values()}
        found = []
        for path in dict.fromkeys([*self._left, *now]):
            tensors = held.get(path)
            if is_allowed(path, self._allow) or not tensors:
                continue
            own = now.get(path, tensors[0]).to(self._room)
            before = self._start.value(tensors[0])
            padded = self._left.get(path, own if before is None else before)
            apart = float("inf") if own.shape != padded.shape else distance(own, padded)
            if apart > tolerance(own.dtype):
                found.append(f"{path}, which the function changes, differs by {apart:.2g} of its largest value")
        return found

    def _changed(self) -> list[tuple[str, Tensor]]:
        changed = []
        for slot in self._walk().slots.values():
            for tensor in slot.tensors()[:1] if not slot.is_parameter else ():
                before = self._start.value(tensor)
                if before is None or not same_bits(tensor.to(self._room), before):
                    changed.append((slot.path, tensor.detach()))
        return changed
