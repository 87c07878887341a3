"""One replay, checked: the same step is replayed and run eagerly from one state, and eager's outcome stays.

The order is: copy what the step may change, replay, keep what it left, put everything back, run the step eagerly,
compare. Eager runs once, so its Python effects happen once, as they would have without the check. Only if something is
not the same bit by bit is the replay run a second time, from the same state, to see how far two replays lie apart; if
that does not explain it, a few times more; and where replays are noisy, once from parameters that are off by what
rounding does to them. Once a check has measured that, only if something is further apart than it was then.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, partial
from typing import Any, TypeVar

import torch
from torch import Tensor

from graphplan.backends.backend import first_line
from graphplan.effects.allowed import is_allowed
from graphplan.errors import PeerError
from graphplan.owners.slots import Walk
from graphplan.owners.snapshot import Snapshot, host_generators
from graphplan.owners.walk import walk_owners
from graphplan.program.leases import StaticOutput
from graphplan.program.program import Program
from graphplan.tensors.attributes import is_freed
from graphplan.tensors.copying import copy_all
from graphplan.tensors.dtensors import local
from graphplan.tensors.storages import storage_id
from graphplan.tensors.trees import flatten_result, map_result
from graphplan.verify.compare import Difference, Differing, Run, describe, differing_values
from graphplan.verify.noise import Beyond, Moves, Noise, beyond_spread, nudged
from graphplan.verify.state import Leaves, State, are_same, collect_tensors, collect_values, tensors_of

Result = TypeVar("Result")


@dataclass(frozen=True, slots=True)
class Verdict:
    """Outcome of a check: the eager step's ``result``, and where the replay was otherwise (nowhere, one hopes).

    ``open`` says why that could not be found out, if so.
    """

    result: Any
    differences: list[Difference]
    open: str = ""


@dataclass(frozen=True, slots=True)
class _Start:
    """Where everything lies before the replay and after each ``snapshot.restore()``: places, and ``old``, what tensors
    held, by path.
    """

    walk: Walk
    old: dict[str, Tensor]
    snapshot: Snapshot


def _is_never(path: str) -> bool:
    return False


class _Check:
    def __init__(
        self,
        program: Program,
        feed: Sequence[Any],
        allow: Sequence[str],
        place: Callable[[], torch.device],
        on_any: Callable[[bool], bool],
        noise: Noise,
    ) -> None:
        self._program = program
        self._noise = noise
        self._on_any = on_any
        self._feed = feed
        # Asked for each of hundreds of paths.
        self.is_allowed: Callable[[str], bool] = partial(is_allowed, allow=tuple(allow)) if allow else _is_never
        self._place = place
        plan = program.plan
        self._home = plan.device
        fed = {f"input {index}": leaf for index, leaf in enumerate(feed) if isinstance(leaf, Tensor)}
        unowned = {e.name: e.tensor for e in plan.externals if e.path is None and e.tensor is not None}
        self._extra: dict[str, Tensor] = {**unowned, **fed}
        # What the program lends holds its latest results, which may be what is fed.
        self._lent = [(lease, lease.number) for lease in program.outputs.lent]

    def walk(self) -> Walk:
        return walk_owners(self._program.plan.handles.owners())

    def snapshot(self, walk: Walk) -> tuple[Snapshot, dict[str, Tensor]]:
        """Copies of all that the step may change, also of what only a name leads to, since code that is not seen may
        write anywhere; and where that is.
        """
        held = tensors_of(walk)
        untouched = self._program.plan.untouched(walk)
        lent = {lease.name: lease.tensor for lease, _ in self._lent}
        tensors = {**{path: t for path, t in held.items() if path not in untouched}, **self._extra, **lent}
        # What the step has nothing to do with may be a whole dataset, unless a module holds it.
        others = [held[path] for path in untouched & held.keys() if id(held[path]) not in walk.found]
        every = [*tensors.values(), *others]
        generators = self._program.plan.handles.generators
        return Snapshot(walk, tensors=every, generators=generators, device=self._place()), tensors

    def undo(self, snapshot: Snapshot) -> None:
        """Put everything back, and have the results that were lent before be good again."""
        snapshot.restore(self._program.changed_memory)
        for lease, number in self._lent:
            lease.number = number

    def start(self) -> _Start:
        """What is there before the replay."""
        return self._where_all_have_room(self._copied)

    def _where_all_have_room(self, copy: Callable[[], Result]) -> Result:
        """What ``copy`` makes. What comes next communicates: all ranks do it, or none."""
        try:
            made = copy()
        except torch.OutOfMemoryError:
            self._on_any(True)
            raise
        if self._on_any(False):
            raise PeerError("another rank has no room for a check")
        return made

    def _copied(self) -> _Start:
        walk = self.walk()
        snapshot, tensors = self.snapshot(walk)
        old = {path: value for path, t in tensors.items() if (value := snapshot.value(t)) is not None}
        return _Start(walk, old, snapshot)

    def replay(self, walk: Walk) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """Tensors and values that a replay leaves. ``walk`` is from before it."""
        result = self._program.run(self._feed, is_settled=True)
        walk = walk if self._program.bindings.keep_places(walk) else self.walk()
        leaves, _ = flatten_result(result)
        return self.left(walk, leaves), collect_values(walk, leaves, self.is_allowed, self._extra)

    def first_replay(self, start: _Start) -> tuple[State, Moves | None]:
        """Copies of what a replay leaves, and how far it has moved everything, where that tells noise."""
        left, values = self.replay(start.walk)
        replayed = State(dict(zip(left, copy_all(list(left.values()), self._place()), strict=True)), values)
        moves = Moves.of(start.old, replayed.tensors, self._home) if self._noise.is_known else None
        return replayed, moves

    def compare(
        self, start: _Start, replayed: State, moves: Moves | None, result: Any, walk: Callable[[], Walk]
    ) -> list[Difference]:
        """Differences between ``replayed`` and what is there now, after the eager step that ``start`` preceded, to
        which ``walk()`` leads.
        """
        # The device compares while owners are looked at, most likely the tensors that are there afterwards.
        leaves, _ = flatten_result(result)
        likely = self.left(start.walk, leaves)
        comparison = self.guessed(replayed, moves, likely)
        left = self.left(walk(), leaves)
        if comparison is None or not are_same(left, likely):
            comparison = self.compared(replayed, moves, left)
        differences = differing_values(replayed.values, collect_values(walk(), leaves, self.is_allowed, self._extra))
        beyond = comparison.paths()
        if not self._on_any(bool(beyond)):
            return differences
        # More replays write where the eager step has.
        eager, (end, _) = self._where_all_have_room(lambda: (Run.of(replayed.tensors, left), self.snapshot(walk())))
        try:
            plan = self._program.plan
            may_reorder = plan.may_reorder or plan.derives_otherwise
            found = beyond_spread(
                beyond, start.old, replayed.tensors, eager,
                repeat=lambda nudge: self._repeat(start, replayed, nudge=nudge),
                on_any=self._on_any, noise=self._noise, may_reorder=may_reorder, device=self._home,
            )  # fmt: skip
        finally:
            self.undo(end)
        return describe(found, start.old, replayed.tensors, left) + differences

    def left(self, walk: Walk, result: Leaves) -> dict[str, Tensor]:
        """The tensors that can be compared, where they are now."""
        slots = {path: slot.tensors() for path, slot in walk.slots.items()} if self._lent else {}
        left_out = self._program.plan.untouched(walk) | self._overwritten(slots)
        gone = self._overwritten({path: [tensor] for path, tensor in self._extra.items()})
        found = collect_tensors(
            walk,
            result,
            {path: tensor for path, tensor in self._extra.items() if path not in gone},
            self._program.plan.handles.generators,
            lambda path: path in left_out or self.is_allowed(path),
        )
        return {path: t.plain_memory() if isinstance(t, StaticOutput) else t for path, t in found.items()}

    def _overwritten(self, tensors: Mapping[str, list[Tensor]]) -> set[str]:
        """Paths of what lies where the program lends its results: a replay puts new ones there, which are compared as
        results, and what was there before it cannot be used.
        """
        if not self._lent:
            return set()
        lent = {storage_id(lease.tensor) for lease, _ in self._lent}
        with torch._C.DisableTorchFunctionSubclass():
            return {path for path, parts in tensors.items() if any(storage_id(part) in lent for part in parts)}

    def compared(self, replayed: State, moves: Moves | None, left: Mapping[str, Tensor]) -> Differing | Beyond:
        """The comparison of what the replay left with what the eager step did."""
        if moves is None:
            return Differing(replayed.tensors, left)
        return Beyond(self._noise, moves, replayed.tensors, left)

    def guessed(self, replayed: State, moves: Moves | None, likely: Mapping[str, Tensor]) -> Differing | Beyond | None:
        """:meth:`compared`, or None: tensors that the owners have given up need not be fit to be read."""
        if any(map(is_freed, likely.values())):
            return None
        try:
            return self.compared(replayed, moves, likely)
        except RuntimeError:
            return None

    def _repeat(self, start: _Start, replayed: State, *, nudge: bool) -> Run:
        """One more replay beside the first one; with ``nudge``, of parameters with other last bits."""
        self.undo(start.snapshot)
        if not self._program.fits():
            # The eager step gave tensors other memory (``tensor.data = ...``), which has their values now.
            self._program.resync()
        replay = lambda: self.replay(start.walk)[0]  # noqa: E731
        if not nudge:
            return Run.of(replayed.tensors, replay())
        params = {path: local(param) for path, param in start.walk.parameters.values()}
        left = nudged(replay, params, start.snapshot.value, self._program.plan.rounding)
        return Run.of(replayed.tensors, left)


def detached(result: Any) -> Any:
    """``result`` without an autograd graph, as after every replay."""
    return map_result(lambda tensor: tensor if tensor.grad_fn is None else tensor.detach(), result)


def check_replay(
    program: Program,
    leaves: Sequence[Any],
    eager: Callable[[Callable[[], Walk]], Any],
    *,
    allow: Sequence[str],
    place: Callable[[], torch.device],
    on_any: Callable[[bool], bool] = bool,
    noise: Noise | None = None,
) -> Verdict:
    """Replay ``program`` on ``leaves``, undo that, run ``eager`` and compare. What eager leaves stays.

    Args:
        program: whose guards hold.
        leaves: the call's flat arguments, on the step's device.
        eager: the same call of the step itself; it may ask for a walk over what its owners hold afterwards.
        allow: paths that replays may leave out, so that they may differ.
        place: gives the device that the next copies go to.
        on_any: whether something is so on any rank, told whether it is on this one: where ranks communicate in the
            step, all of them have to run it as often. A PeerError from it ends the check.
        noise: what earlier checks of ``program`` have shown of it, to which this one adds.

    Raises:
        torch.OutOfMemoryError, PeerError: with everything as it was, if there is no room for the eager step beside the
            program, or on another rank for a copy.
        Exception: what else ``eager`` raises, with what it has done until then; what the replay did is undone.
    """
    check = _Check(program, leaves, allow, place, on_any, noise or Noise())
    # Device learning rates are among what is put back: they have to be up to date first. And the check keeps gradients,
    # which are no longer to be told from those that other code keeps.
    program.plan.handles.rates.push()
    program.bindings.settle_grads()
    start = check.start()
    hosts = host_generators()
    try:
        replayed, moves = check.first_replay(start)
    finally:
        check.undo(start.snapshot)
    walk = cache(check.walk)
    try:
        result = eager(walk)
    except torch.OutOfMemoryError:
        # The copies and a second set of activations are the check's doing; without it there was room.
        check.undo(start.snapshot)
        raise
    found = [
        Difference(name, "the eager step draws from it, which a replay does not")
        for name, state in host_generators().items()
        if state != hosts.get(name, state) and not is_allowed(name, allow)
    ]
    reason = ""
    try:
        found += check.compare(start, replayed, moves, result, walk)
    except (torch.OutOfMemoryError, PeerError) as error:
        # The batch has been trained on: the caller must not go on as if it had not.
        reason = first_line(error)
    return Verdict(detached(result), found, reason)
