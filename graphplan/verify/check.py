"""One replay, checked: the same step is replayed and run eagerly from one state, and eager's outcome stays.

If something is not the same bit by bit, the replay is repeated from the same state, to see how far replays lie apart,
and where they are noisy, once from parameters that are off by rounding.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, partial
from time import perf_counter
from typing import Any, TypeVar

import torch
from torch import Tensor

from graphplan.backends.backend import first_line
from graphplan.effects.allowed import allowed_by
from graphplan.errors import GraphPlanError, OutcomeError, PeerError
from graphplan.feed.call_arguments import BATCH_READS
from graphplan.owners.generators import HostGenerators
from graphplan.owners.slots import Walk
from graphplan.owners.snapshot import Snapshot
from graphplan.program.faults import is_steps_own
from graphplan.program.leases import StaticOutput
from graphplan.program.program import Program
from graphplan.tensors.copying import copy_all
from graphplan.tensors.dtensors import local
from graphplan.tensors.storages import storage_id
from graphplan.tensors.trees import map_result, named_leaves
from graphplan.verify.checksums import Checksums
from graphplan.verify.compare import Run, describe, differing, differing_values, nudged, unexplained
from graphplan.verify.state import State, collect_tensors, collect_values, tensors_of

Result = TypeVar("Result")
_REPLAYS = 3  # The most replays that are made until two of them differ.


@dataclass(frozen=True, slots=True)
class Verdict:
    """Outcome of a check: the eager step's ``result``, and where the replay differed; ``open`` says why that could not
    be found out, if so. ``seconds`` are those of the host for the eager step.
    """

    result: Any
    differences: dict[str, str]
    open: str = ""
    seconds: float = math.inf


class Check:
    """A replay of one call, compared with the eager step. ``feed`` are its leaves, paths in ``allow`` may differ,
    ``place`` gives the device that the next copies go to, and how many bytes of them stay beside the tensors if that is
    another one.

    ``on_any`` tells whether something is so on any rank: where ranks communicate in the step, all of them have to run
    it as often. A PeerError from it ends the check.
    """

    def __init__(
        self,
        program: Program,
        feed: Sequence[Any],
        *,
        allow: Sequence[str],
        place: Callable[[], tuple[torch.device, float]],
        on_any: Callable[[bool], bool],
    ) -> None:
        self._program = program
        self._on_any = on_any
        self._sums: Checksums | None = None
        self._feed = feed
        self._is_allowed = allowed_by(tuple(allow))
        self._place = place
        plan = program.plan
        self._walk = plan.handles.walk
        fed = {f"input {index}": leaf for index, leaf in enumerate(feed) if isinstance(leaf, Tensor)}
        # What replays are filled with, eager steps do not have.
        filled = {id(number.tensor) for number in plan.filled}
        rates = plan.handles.rates.storages
        # A device learning rate only holds the number of its group, which is compared itself.
        held = {
            e.name: e.tensor
            for e in plan.externals
            if e.path is None and e.tensor is not None and (e.mutated or storage_id(e.tensor) not in rates)
        }
        unowned = {name: tensor for name, tensor in held.items() if id(tensor) not in filled}
        self._extra: dict[str, Tensor] = {**unowned, **fed}
        # What was read before the step is there for replays alone.
        self._read_before = {f"input {index}" for index, name in enumerate(plan.feed.names()) if BATCH_READS in name}
        # What the program lends holds its latest results, which may be what is fed.
        self._lent = [(lease, lease.number) for lease in program.outputs.lent]

    def run(self, eager: Callable[[Callable[[], Walk]], Any]) -> Verdict:
        """Replay the program, undo that, run ``eager`` and compare. What eager leaves stays. It may ask for a walk over
        what its owners hold afterwards.

        Raises OutOfMemoryError and PeerError, with everything as it was, if there is no room for the eager step beside
        the program, or on another rank for a copy; and what else ``eager`` raises, with what the replay did undone. An
        error of the step's own that the replay raises is a difference, unless ``eager`` raises it as well.
        """
        # Device learning rates are among what is put back: they have to be up to date first. And the check keeps
        # gradients, which are no longer to be told from those that other code keeps.
        self._program.plan.handles.rates.push()
        self._program.bindings.settle_grads()
        self.start()
        raised = ""
        try:
            self.first_replay()
        except Exception as error:
            if isinstance(error, (GraphPlanError, torch.OutOfMemoryError)) or not is_steps_own(error):
                raise
            # The eager step raises it as well, or the replay is wrong. The error itself would hold this frame.
            raised = f"a replay raises {type(error).__name__} ({first_line(error)}), and the eager step does not"
        finally:
            hosts = HostGenerators()
            self.undo(self._before)
        walk, start = cache(self._walk), perf_counter()
        try:
            result = eager(walk)
        except torch.OutOfMemoryError:
            # The copies and a second set of activations are the check's doing; without it there was room.
            self.undo(self._before)
            raise
        if raised:
            return Verdict(detached(result), {"result": raised})
        seconds = perf_counter() - start
        drawn = (name for name in hosts.moved() if not self._is_allowed(name))
        found = dict.fromkeys(drawn, "the eager step draws from it, which a replay does not")
        reason = ""
        try:
            found |= self.compare(result, walk)
        except (torch.OutOfMemoryError, PeerError) as error:
            # The batch has been trained on: the caller must not go on as if it had not.
            reason = first_line(error)
        return Verdict(detached(result), found, reason, seconds)

    def snapshot(self, walk: Walk) -> tuple[Snapshot, dict[str, Tensor]]:
        """Copies of all that the step may change, also of what only a name leads to; and these tensors by path."""
        held = tensors_of(walk)
        untouched = self._program.plan.untouched(walk)
        lent = {lease.name: lease.tensor for lease, _ in self._lent}
        tensors = {**{path: t for path, t in held.items() if path not in untouched}, **self._extra, **lent}
        # What the step has nothing to do with may be a whole dataset, unless a module holds it.
        others = [held[path] for path in untouched & held.keys() if id(held[path]) not in walk.found]
        every = [*tensors.values(), *others]
        generators = self._program.plan.traced.generators
        device, beside = self._place()
        return Snapshot(walk, tensors=every, generators=generators, device=device, beside=beside), tensors

    def undo(self, snapshot: Snapshot) -> None:
        """Put everything back, and have the results that were lent before be good again."""
        snapshot.restore(self._program.adopted.written | self._program.bindings.grad_memory)
        for lease, number in self._lent:
            lease.number = number

    def start(self) -> None:
        """Copy what is there before the replay, which is put back before each further one."""
        self._owned = self._walk()
        self._before, tensors = self._where_all_have_room(lambda: self.snapshot(self._owned))
        self._old = {path: value for path, t in tensors.items() if (value := self._before.value(t)) is not None}

    def _where_all_have_room(self, copy: Callable[[], Result]) -> Result:
        """Return what ``copy`` makes. All ranks go on to what communicates, or none."""
        try:
            made = copy()
        except torch.OutOfMemoryError:
            self._on_any(True)
            raise
        if self._on_any(False):
            raise PeerError("another rank has no room for a check")
        return made

    def replay(self) -> State:
        """Replay, and collect what that leaves."""
        result = self._program.run(self._feed, is_settled=True)
        return self.left(self._owned if self._program.bindings.keep_places(self._owned) else self._walk(), result)

    def first_replay(self) -> None:
        """Keep copies of what a replay leaves, or where they have no room on the device, sums of that."""
        left = self.replay()
        self._values = left.values
        device, beside = self._place()
        # All ranks replay as often. Where a replay and the eager step differ, sums do not do.
        differs = self._is_noisy or self._program.differs
        if self._is_beside(device) or self._program.plan.communicates or differs:
            self._keep(left.tensors, device, beside)
        else:
            self._sums = Checksums(left.tensors)

    def _is_beside(self, device: torch.device) -> bool:
        """Whether copies on ``device`` are made and compared fast: that is where the step computes."""
        return device.type == self._program.plan.device.type

    def _keep(self, tensors: Mapping[str, Tensor], device: torch.device, beside: float) -> None:
        self._replayed = dict(zip(tensors, copy_all(list(tensors.values()), device, beside), strict=True))

    @property
    def _is_noisy(self) -> bool:
        """Whether two replays from one state may differ."""
        return self._program.plan.may_reorder or self._program.plan.traced.in_mode

    def _replay_for_copies(self, walk: Walk) -> None:
        """Replay once more: the eager step has left something else than the first replay, of which there are sums."""
        self._program.differs = True
        end, _ = self.snapshot(walk)
        try:
            self._go_back()
            self._keep(self.replay().tensors, *self._place())
        finally:
            self.undo(end)

    def compare(self, result: Any, walk: Callable[[], Walk]) -> dict[str, str]:
        """Differences between what the first replay left and what the eager step did, to which ``walk()`` leads."""
        # The device runs the eager step meanwhile.
        left = self.left(walk(), result)
        differences = differing_values(self._values, left.values)
        if self._sums is not None:
            if not self._sums.differ(Checksums(left.tensors)):
                return differences
            try:
                self._replay_for_copies(walk())
            except OutcomeError:
                # From other last bits, the step goes another way: there is nothing to compare.
                return differences
        sides = self._replayed, left.tensors
        beyond = differing(*sides)
        if not self._on_any(bool(beyond)):
            return differences
        # More replays write where the eager step has.
        eager, (end, _) = self._where_all_have_room(lambda: (Run.of(*sides, beyond), self.snapshot(walk())))
        try:
            found = self._unexplained(beyond, eager)
        except OutcomeError:
            found = {}
        finally:
            self.undo(end)
        return describe(found, self._old, self._replayed, left.tensors) | differences

    def _unexplained(self, paths: list[str], eager: Run) -> dict[str, float]:
        """The ``paths`` that more replays do not explain, and how far these are apart. All ranks repeat as often."""
        again: list[Run] = []
        found = dict.fromkeys(paths, 0.0)
        noisy = self._is_noisy
        explain = partial(unexplained, one=self._replayed, again=again, eager=eager)
        for _ in range(_REPLAYS):
            again.append(self._repeat(paths if noisy else None))
            noisy = noisy or again[-1].differs
            found = explain(found, noisy=noisy)
            if not self._on_any(bool(found) and not noisy):
                break
        # Noise that is rare has not been seen in a few replays: what rounding does says how large it may be.
        if self._on_any(noisy and bool(found)):
            found = explain(found, nudged=self._repeat(paths, nudge=True), noisy=True)
        return found

    def left(self, walk: Walk, result: Any) -> State:
        """Collect what can be compared after a step with this ``result``: tensors, where they are now, and values."""
        leaves = named_leaves(result)
        slots = {path: slot.tensors() for path, slot in walk.slots.items()} if self._lent else {}
        left_out = self._program.plan.untouched(walk) | self._overwritten(slots)
        gone = self._overwritten({path: [tensor] for path, tensor in self._extra.items()}) | self._read_before
        tensors = collect_tensors(
            walk,
            leaves,
            {path: tensor for path, tensor in self._extra.items() if path not in gone},
            self._program.plan.traced.generators,
            lambda path: path in left_out or self._is_allowed(path),
        )
        plain = {path: t.plain_memory() if isinstance(t, StaticOutput) else t for path, t in tensors.items()}
        values = collect_values(walk, leaves, self._is_allowed, self._extra)
        return State(plain | self._take_numbers(values), values)

    def _take_numbers(self, values: dict[str, Any]) -> dict[str, Tensor]:
        """Take numbers and arrays that were read from the device out of ``values``: they are as noisy as it."""
        plan = self._program.plan
        if not plan.defers:
            return {}
        paths = set(plan.numbers)
        within = tuple(f"{path}[" for path in plan.appends)
        found = [
            path
            for path, value in values.items()
            if (type(value) is float or hasattr(value, "__array_interface__"))
            and (path in paths or path.startswith(("result", *within)))
        ]
        dtypes = {float: torch.float64}
        return {
            path: torch.as_tensor(value, dtype=dtypes.get(type(value)), device="cpu")
            for path, value in ((path, values.pop(path)) for path in found)
        }

    def _overwritten(self, tensors: Mapping[str, list[Tensor]]) -> set[str]:
        """Paths of what lies where the program lends its results, which a replay overwrites."""
        if not self._lent:
            return set()
        lent = {storage_id(lease.tensor) for lease, _ in self._lent}
        with torch._C.DisableTorchFunctionSubclass():
            return {path for path, parts in tensors.items() if any(storage_id(part) in lent for part in parts)}

    def _go_back(self) -> None:
        """Put back what was before the first replay, for another one."""
        self.undo(self._before)
        if not self._program.fits():
            # The eager step gave tensors other memory (``tensor.data = ...``), which has their values now.
            self._program.resync()

    def _repeat(self, beyond: Sequence[str] | None, *, nudge: bool = False) -> Run:
        """One more replay beside the first one; with ``nudge``, of parameters with other last bits. How far they are
        apart at the paths ``beyond``, or wherever they differ.
        """
        self._go_back()
        if not nudge:
            return Run.of(self._replayed, self.replay().tensors, beyond)
        params = {path: local(param) for path, param in self._owned.parameters.values()}
        left = nudged(lambda: self.replay().tensors, params, self._before.value, self._program.plan.rounding)
        return Run.of(self._replayed, left, beyond)


def detached(result: Any) -> Any:
    """``result`` without an autograd graph, as after every replay."""
    return map_result(lambda tensor: tensor if tensor.grad_fn is None else tensor.detach(), result)
