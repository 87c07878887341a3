"""Whether padding changes what a step leaves: it is rehearsed on the batch as it came and on the padded one.

Compared is what the step *changes*, which other kernels may round otherwise:

- by a share of the change itself (:func:`graphplan.step.capture_sizes.tolerance`), which has room for sums of millions.
- by a multiple of what a third rehearsal finds, from parameters with other last bits: where terms cancel, rounding is
  all that is left. (Changes of six kinds of language models on a CPU differed by up to four times that in float32, and
  by half of it in bfloat16.)

Rehearsals have no dropout, which would draw other numbers for a padded batch.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from graphplan.effects.allowed import is_allowed
from graphplan.environment.devices import default_generators
from graphplan.errors import HostEffectError, PaddingError
from graphplan.feed.call_arguments import CallArguments
from graphplan.feed.signature import Feed
from graphplan.observe.source import find_source
from graphplan.observe.watching import Aside
from graphplan.owners.slots import Walk, is_optimizer_state
from graphplan.owners.snapshot import Snapshot, host_generators
from graphplan.step.capture_sizes import tolerance
from graphplan.step.compiled import uncompiled
from graphplan.step.padding import Kind
from graphplan.step.state_machine import StateMachine
from graphplan.tensors.copying import copy_all
from graphplan.tensors.dtensors import local
from graphplan.tensors.storages import storage_id
from graphplan.tensors.trees import map_result
from graphplan.trace.composites import OperatorMode
from graphplan.trace.operator_schemas import OperatorCall, tensors_in
from graphplan.trace.records import Trace
from graphplan.verify.compare import RESPONSES, SPREADS, Run, Sides, describe, differing_values, distances, fits
from graphplan.verify.noise import nudged
from graphplan.verify.state import State, collect_tensors, collect_values, tensors_of

_SHARE = "dropout_p"
"""The argument of attention's operators, and of their derivatives."""
_NOISE, _NATIVE = "aten.bernoulli_.float", "aten.native_dropout.default"
_SIDES = Sides("the padded step", "the unpadded step", "rounding comes to")


class RehearsalMode(OperatorMode):
    """Runs a step without dropout, and notes what it draws, and has ``written`` to that has not been ``copied``."""

    def __init__(self, copied: set[int | None]) -> None:
        super().__init__()
        self._copied = copied
        self._made: set[int | None] = set()
        self.record = Trace()
        """What no snapshot can put back, and the types of all numbers."""
        self._states = self.record.unowned_draws
        self._states += [(generator, generator.get_state()) for generator in default_generators()]
        self._host_states = host_generators()
        self._places: dict[str, None] = {}
        self.written: set[int | None] = set()

    def operate(self, aside: Aside, call: OperatorCall) -> Any:
        """Run an operator, unless it is dropout."""
        if call.schema.may_write:
            self._save(call)
        out = self._run(aside, call)
        for tensor in tensors_in(out):
            self._made.add(storage_id(tensor))
            self.record.dtypes.add(tensor.dtype)
        return out

    def _run(self, aside: Aside, call: OperatorCall) -> Any:
        schema, args, kwargs = call.schema, call.args, call.kwargs
        if schema.name == _NOISE:
            # A mask of what is kept, which is divided by its share: by itself, then.
            share = call.given(1)
            return args[0].fill_(0.5 if share is None else share)
        if schema.name == _NATIVE:
            return args[0].clone(), torch.ones_like(args[0], dtype=torch.bool)
        if _SHARE in schema.arguments:
            at = schema.arguments.index(_SHARE)
            args = (*args[:at], 0.0, *args[at + 1 :]) if at < len(args) else args
            kwargs = kwargs if at < len(args) else {**kwargs, _SHARE: 0.0}
        elif schema.is_random:
            own = kwargs.get("generator")
            if own is not None and all(own is not known for known, _ in self._states):
                self._states.append((own, own.get_state()))
            self._places[f"at {find_source()}"] = None
        return aside.run(schema.operator, args, kwargs)

    def _save(self, call: OperatorCall) -> None:
        """Copy what is about to be written and neither has a copy nor was made by the step."""
        for tensor in call.written():
            storage = storage_id(tensor)
            is_known = storage in self._made or storage in self._copied or storage in self.written
            if storage is not None and not is_known:
                self.written.add(storage)
                whole = torch.empty(0, dtype=tensor.dtype, device=tensor.device).set_(tensor.untyped_storage())
                self.record.unowned_writes.append((whole, whole.clone()))

    @property
    def draws(self) -> list[str]:
        """What has drawn random numbers; empty if no generator was moved."""
        host = host_generators()
        moved = [name for name, state in host.items() if state != self._host_states.get(name, state)]
        if any(not torch.equal(generator.get_state(), state) for generator, state in self._states):
            moved += self._places
        return moved


class PaddingCheck:
    """One comparison with ``feed`` as it came. ``walk`` is over the owners now; copies lie on ``room``."""

    def __init__(self, machine: StateMachine, walk: Walk, feed: Feed, room: torch.device) -> None:
        self._machine, self._walk, self._feed, self._room = machine, walk, feed, room
        self._snapshot = Snapshot(walk, extra=[tensor for _, tensor in feed.tensors()], device=room)
        self._rounding = 0.0

    def run(self, padded: Feed, kind: Kind) -> None:
        """Compare with the step on ``padded``. Raises PaddingError if that leaves something else, or if it cannot be
        told, and HostEffectError if the step changes the containers that it is fed.
        """
        try:
            problems = self._compare(padded, kind)
        except BaseException:
            # Between two rehearsals, parameters have other last bits.
            self._snapshot.restore()
            raise
        if problems:
            first, *others = problems
            names = ", ".join(problem.partition(":")[0] for problem in others[:4])
            more = f" (and {len(others)} more: {names})" if others else ""
            raise PaddingError(
                f"padding from {kind} changes what the step leaves: {first}{more}. Expected the same as without "
                "padding, within rounding: mask what is padding (in the loss, in statistics), pad with another value "
                "(pad=), name the dimensions that may be padded (dynamic=), or pass shapes='exact'"
            )

    def _compare(self, padded: Feed, kind: Kind) -> list[str]:
        names, size = self._feed.names(), kind.size
        expected, came = self._rehearse(self._feed, {names[index]: self._feed.leaves[index] for index in kind.own})
        try:
            result, left = self._rehearse(padded, {names[index]: part for index, part in kind.own.items()})
        except (PaddingError, torch.OutOfMemoryError):
            raise
        except Exception as error:  # noqa: BLE001 - whatever padding makes of the user's code
            return [f"the padded step raises {type(error).__name__}: {error}"]
        problems, pairs = size.learn(expected, size.meet(result, kind.sizes), kind.true)
        problems += map(str, differing_values(left.values, came.values, _SIDES))
        ours = {name: own for name, (own, _) in pairs.items()} | came.tensors
        theirs = {name: part for name, (_, part) in pairs.items()} | left.tensors
        return self._differences(ours, theirs) + problems

    def _differences(self, came: Mapping[str, Tensor], padded: Mapping[str, Tensor]) -> list[str]:
        """Tensors that rounding does not explain, causes first. Raises ArithmeticError if none is finite."""
        live = tensors_of(self._walk)
        old = {path: value for path, t in live.items() if (value := self._snapshot.value(t)) is not None}
        alike = [path for path in came if path in padded and fits(came[path], padded[path])]
        far = Run.of(came, padded).far
        moves, sizes = distances(alike, came, old), distances(alike, came)
        over: dict[str, float] = {}
        for path in alike:
            apart = far.get(path, 0.0)
            excess = apart - tolerance(came[path].dtype) * moves[path] - _last_places(came[path]) * sizes[path]
            if not excess <= 0:
                if not (math.isfinite(apart) or bool(came[path].isfinite().all())):
                    raise ArithmeticError(f"{path} has elements that are infinite or no numbers, without padding too")
                over[path] = excess
        # Without gradients no terms cancel into updates, and other threads may be reading the parameters.
        noise: Mapping[str, float] = {}
        if over and torch.is_grad_enabled():
            params = {path: local(param) for path, param in self._walk.parameters.values()}
            repeat = lambda: self._rehearse(self._feed, {})[1].tensors  # noqa: E731
            again = nudged(repeat, params, self._snapshot.value, self._rounding)
            noise = Run.of(came, again).far
        times = RESPONSES if self._rounding > torch.finfo(torch.float32).eps else SPREADS
        found = {p: n for p, excess in over.items() if not excess <= times * (n := noise.get(p, 0.0))}
        found.update({path: 0.0 for path in [*came, *padded] if path not in alike})
        ranked = {path: found[path] for path in sorted(found, key=self._rank)}
        return list(map(str, describe(ranked, old, padded, came, _SIDES)))

    def _rank(self, path: str) -> int:
        slot = self._walk.slots.get(path)
        if slot is None or slot.param is not None:
            return 1 if slot is None else 2
        return 3 if slot.is_parameter or is_optimizer_state(path) else 0

    def _rehearse(self, feed: Feed, extra: Mapping[str, Tensor]) -> tuple[Any, State]:
        """Run the step without dropout and undo it. Returns its result, and copies of what it left and of ``extra``."""
        fed = CallArguments(*feed.rebuild(feed.leaves)).watch()
        mode, runner = RehearsalMode(self._snapshot.storages), self._machine.runner
        try:
            with uncompiled(), mode:
                result = runner.run(lambda: map_result(lambda tensor: tensor.detach().clone(), runner.call(fed)))
            draws, change = mode.draws, fed.change()
            if draws:
                raise PaddingError(
                    f"the step draws random numbers: {'; '.join(draws[:3])}. For a padded batch it draws others, and "
                    "more of them, so that effects of padding do not show in what it leaves; dropout is left out "
                    "of the comparison, other draws cannot be. Expected a step that draws nothing else: draw outside "
                    "of it and feed it the numbers, or pass shapes='exact'"
                )
            if change is not None:
                raise HostEffectError(change)
            self._rounding = mode.record.rounding
            return result, self._left(extra, mode.written)
        finally:
            mode.record.undo_unowned_writes()
            self._snapshot.restore()
            torch.clear_autocast_cache()

    def _left(self, extra: Mapping[str, Tensor], written: set[int | None]) -> State:
        walk, allow = self._machine.managed.walk(), self._machine.options.allow

        def is_left_out(path: str) -> bool:
            # What only a name leads to may be a whole dataset.
            tensors = walk.slots[path].tensors() if path in walk.slots else []
            untouched = all(id(t) in walk.found and storage_id(t) not in written for t in tensors)
            return (bool(tensors) and untouched) or is_allowed(path, allow)

        left = collect_tensors(walk, (), extra, (), is_left_out)
        copies = dict(zip(left, copy_all(list(left.values()), self._room), strict=True))
        return State(copies, collect_values(walk, (), lambda path: is_allowed(path, allow), {}))


def _last_places(tensor: Tensor) -> float:
    """Two units in the last place."""
    return 2 * torch.finfo(tensor.dtype).eps if tensor.dtype.is_floating_point or tensor.dtype.is_complex else 0.0
