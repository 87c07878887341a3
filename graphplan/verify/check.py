"""Check one replay: replay a step and run it eagerly from the same state, and keep the eager step's outcome.

If any bits differ, the replay is repeated from the same state, to measure how far replays differ from each other. If
replays are noisy, one more starts from parameters that are changed by a rounding error.
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
from graphplan.program.program import Program
from graphplan.program.shared_buffers import StaticOutput
from graphplan.tensors.copying import copy_all
from graphplan.tensors.dtensors import local
from graphplan.tensors.storages import storage_id
from graphplan.tensors.trees import map_result, named_leaves
from graphplan.verify.checksums import Checksums
from graphplan.verify.compare import Run, describe, differing, differing_values, nudged, unexplained
from graphplan.verify.state import State, collect_tensors, collect_values, tensors_of

Result = TypeVar("Result")
_REPLAYS, _ALIKE = 6, 3
"""Maximum numbers of further replays until they explain a difference, and until two of them differ at all. A single
number, such as the loss, is often equal in a few runs whose last digits are random.
"""


@dataclass(frozen=True, slots=True)
class Verdict:
    """Outcome of a check: the eager step's ``result``, and the differences by path. ``open`` is the reason if these are
    not known. ``seconds`` is the host time of the eager step.
    """

    result: Any
    differences: dict[str, str]
    open: str = ""
    seconds: float = math.inf


class Check:
    """A replay of one call, compared with the eager step. ``feed`` are the call's leaves. Paths in ``allow`` may
    differ. ``place`` returns the device for the next copies, and how many bytes of these stay on the tensors' device
    if that is another one.

    ``on_any`` returns True if its argument is True on any rank: if ranks communicate in the step, all must run it the
    same number of times. A PeerError from it ends the check.
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
        # Only replays use the tensors that are filled with numbers.
        filled = {id(number.tensor) for number in plan.filled}
        rates = plan.handles.rates.storages
        # A device learning rate only holds its group's number, which is compared itself.
        held = {
            e.name: e.tensor
            for e in plan.externals
            if e.path is None and e.tensor is not None and (e.mutated or storage_id(e.tensor) not in rates)
        }
        unowned = {name: tensor for name, tensor in held.items() if id(tensor) not in filled}
        self._unowned_and_fed: dict[str, Tensor] = {**unowned, **fed}
        # Only replays use the values of the batch that are read before the step.
        self._read_before = {f"input {index}" for index, name in enumerate(plan.feed.names()) if BATCH_READS in name}
        # The program's output tensors hold its latest results, which may be arguments of this call.
        self._static_outputs = [(buffer, buffer.version) for buffer in program.outputs.shared]

    def run(self, eager: Callable[[Callable[[], Walk]], Any]) -> Verdict:
        """Replay the program, undo the replay, run ``eager`` and compare. The eager step's outcome stands. ``eager``
        may call its argument for a walk over the owners after the step.

        Raises OutOfMemoryError or PeerError, with all changes undone, if there is no memory for the eager step beside
        the program, or for a copy on another rank. Other errors of ``eager`` are raised with the replay undone. If the
        replay raises an error of the step's own code, that is a difference, unless ``eager`` raises it, too.
        """
        # Update device learning rates before the snapshot copies them. Settle gradients first, too: the check's own
        # references to gradients could not be told from those of other code.
        self._program.plan.handles.rates.push()
        self._program.bindings.settle_grads()
        # The eager step has to find what eager code has left.
        self._program.adopted.undo_renewal()
        self.start()
        raised = ""
        try:
            self.first_replay()
        except Exception as error:
            if isinstance(error, (GraphPlanError, torch.OutOfMemoryError)) or not is_steps_own(error):
                raise
            # Unless the eager step raises it as well, the replay is wrong. Keep only text: the error holds this frame.
            raised = f"a replay raises {type(error).__name__} ({first_line(error)}), and the eager step does not"
        finally:
            hosts = HostGenerators()
            self.undo(self._before)
        walk, start = cache(self._walk), perf_counter()
        try:
            result = eager(walk)
        except torch.OutOfMemoryError:
            # The check needs copies and a second set of activations; without it there was enough memory.
            self.undo(self._before)
            raise
        if raised:
            return Verdict(detached(result), {"result": raised})
        seconds = perf_counter() - start
        drawn = (name for name in hosts.moved() if not self._is_allowed(name))
        found = dict.fromkeys(drawn, "the eager step draws from it, but a replay does not")
        reason = ""
        try:
            found |= self.compare(result, walk)
        except (torch.OutOfMemoryError, PeerError) as error:
            # Do not raise: the eager step has trained on the batch, and the caller must not train on it again.
            reason = first_line(error)
        return Verdict(detached(result), found, reason, seconds)

    def snapshot(self, walk: Walk) -> tuple[Snapshot, dict[str, Tensor]]:
        """Copy all that the step may change, including tensors that only a name leads to; return these by path, too."""
        held = tensors_of(walk)
        untouched = self._program.plan.untouched(walk)
        shared = {buffer.name: buffer.tensor for buffer, _ in self._static_outputs}
        tensors = {**{path: t for path, t in held.items() if path not in untouched}, **self._unowned_and_fed, **shared}
        # Do not copy tensors that the step does not touch (it may be a whole dataset), except those in modules.
        others = [held[path] for path in untouched & held.keys() if id(held[path]) not in walk.found]
        every = [*tensors.values(), *others]
        generators = self._program.plan.traced.generators
        device, beside = self._place()
        return Snapshot(walk, tensors=every, generators=generators, device=device, beside=beside), tensors

    def undo(self, snapshot: Snapshot) -> None:
        """Restore everything, and make the outputs of earlier replays valid again."""
        snapshot.restore(self._program.adopted.written | self._program.bindings.grad_memory)
        for buffer, version in self._static_outputs:
            buffer.version = version

    def start(self) -> None:
        """Copy the state before the replay. It is restored before each further replay."""
        self._owned = self._walk()
        self._before, tensors = self._where_all_have_room(lambda: self.snapshot(self._owned))
        self._old = {path: value for path, t in tensors.items() if (value := self._before.value(t)) is not None}

    def _where_all_have_room(self, copy: Callable[[], Result]) -> Result:
        """Return the result of ``copy``. Raise on all ranks if one has no memory: all go on to communicate, or none."""
        try:
            made = copy()
        except torch.OutOfMemoryError:
            self._on_any(True)
            raise
        if self._on_any(False):
            raise PeerError("another rank has no room for a check")
        return made

    def replay(self) -> State:
        """Replay, and collect the state after it."""
        self._program.adopted.renew()
        result = self._program.run(self._feed, is_settled=True)
        stays = not self._program.adopted.guards.renewed and self._program.bindings.keep_places(self._owned)
        return self.left(self._owned if stays else self._walk(), result)

    def first_replay(self) -> None:
        """Replay, and keep copies of the state after it, or checksums if the device has no memory for copies."""
        left = self.replay()
        self._values = left.values
        device, beside = self._place()
        # Checksums cost another replay if the eager step differs; ranks that communicate must replay equally often.
        differs = self._is_noisy or self._program.differs
        if self._is_beside(device) or self._program.plan.communicates or differs:
            self._keep(left.tensors, device, beside)
        else:
            self._sums = Checksums(left.tensors)

    def _is_beside(self, device: torch.device) -> bool:
        """Return True if copies on ``device`` are fast to make and compare: the step computes there."""
        return device.type == self._program.plan.device.type

    def _keep(self, tensors: Mapping[str, Tensor], device: torch.device, beside: float) -> None:
        self._replayed = dict(zip(tensors, copy_all(list(tensors.values()), device, beside), strict=True))

    @property
    def _is_noisy(self) -> bool:
        """Whether two replays from one state may differ."""
        return self._program.plan.may_reorder or self._program.plan.traced.in_mode

    def _replay_for_copies(self, walk: Walk) -> None:
        """Replay once more to get copies: the checksums of the first replay differ from those of the eager step."""
        self._program.differs = True
        end, _ = self.snapshot(walk)
        try:
            self._go_back()
            self._keep(self.replay().tensors, *self._place())
        finally:
            self.undo(end)

    def compare(self, result: Any, walk: Callable[[], Walk]) -> dict[str, str]:
        """Return the differences between the first replay and the eager step, whose state ``walk()`` leads to."""
        # Collect first: the device still runs the eager step.
        left = self.left(walk(), result)
        differences = differing_values(self._values, left.values)
        if self._sums is not None:
            if not self._sums.differ(Checksums(left.tensors)):
                return differences
            try:
                self._replay_for_copies(walk())
            except OutcomeError:
                # Other last bits led the step to another branch: there is nothing to compare.
                return differences
        sides = self._replayed, left.tensors
        beyond = differing(*sides)
        if not self._on_any(bool(beyond)):
            return differences
        # Copy the eager state: further replays write to the same memory.
        eager, (end, _) = self._where_all_have_room(lambda: (Run.of(*sides, beyond), self.snapshot(walk())))
        try:
            found = self._unexplained(beyond, eager)
        except OutcomeError:
            found = {}
        finally:
            self.undo(end)
        return describe(found, self._old, self._replayed, left.tensors) | differences

    def _unexplained(self, paths: list[str], eager: Run) -> dict[str, float]:
        """Return the ``paths`` that more replays do not explain, with their spread. All ranks replay equally often."""
        again: list[Run] = []
        found = dict.fromkeys(paths, 0.0)
        noisy = self._is_noisy
        explain = partial(unexplained, one=self._replayed, again=again, eager=eager)
        for number in range(1, _REPLAYS + 1):
            again.append(self._repeat(paths if noisy else None))
            noisy = noisy or again[-1].differs
            found = explain(found, noisy=noisy)
            # A few replays may not show rare noise: one from rounded parameters tells how large it may be.
            if self._on_any(noisy and bool(found)):
                found = explain(found, nudged=self._repeat(paths, nudge=True), noisy=True)
            if not self._on_any(bool(found) and (noisy or number < _ALIKE)):
                break
        return found

    def left(self, walk: Walk, result: Any) -> State:
        """Collect the tensors (without copies) and values that can be compared after a step with this ``result``."""
        leaves = named_leaves(result)
        slots = {path: slot.tensors() for path, slot in walk.slots.items()} if self._static_outputs else {}
        left_out = self._program.plan.untouched(walk) | self._overwritten(slots)
        gone = self._overwritten({path: [tensor] for path, tensor in self._unowned_and_fed.items()}) | self._read_before
        tensors = collect_tensors(
            walk,
            leaves,
            {path: tensor for path, tensor in self._unowned_and_fed.items() if path not in gone},
            self._program.plan.traced.generators,
            lambda path: path in left_out or self._is_allowed(path),
        )
        plain = {path: t.plain_memory() if isinstance(t, StaticOutput) else t for path, t in tensors.items()}
        values = collect_values(walk, leaves, self._is_allowed, self._unowned_and_fed)
        return State(plain | self._take_numbers(values), values)

    def _take_numbers(self, values: dict[str, Any]) -> dict[str, Tensor]:
        """Move numbers and arrays that were read from the device out of ``values``: like tensors, they may be noisy."""
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
        taken = {path: values.pop(path) for path in found}
        return {path: torch.as_tensor(v, dtype=dtypes.get(type(v)), device="cpu") for path, v in taken.items()}

    def _overwritten(self, tensors: Mapping[str, list[Tensor]]) -> set[str]:
        """Return the paths of tensors in the program's output memory, which a replay overwrites."""
        if not self._static_outputs:
            return set()
        shared = {storage_id(buffer.tensor) for buffer, _ in self._static_outputs}
        with torch._C.DisableTorchFunctionSubclass():
            return {path for path, parts in tensors.items() if any(storage_id(part) in shared for part in parts)}

    def _go_back(self) -> None:
        """Restore the state before the first replay, for another one."""
        self.undo(self._before)
        if not self._program.fits():
            # The eager step moved tensors to other memory (``tensor.data = ...``), which holds their values now.
            self._program.resync()

    def _repeat(self, beyond: Sequence[str] | None, *, nudge: bool = False) -> Run:
        """Replay once more; with ``nudge``, from parameters with other last bits. Return how far this replay and the
        first one are apart at the paths ``beyond``, or at all paths that differ.
        """
        self._go_back()
        if not nudge:
            return Run.of(self._replayed, self.replay().tensors, beyond)
        params = {path: local(param) for path, param in self._owned.parameters.values()}
        left = nudged(lambda: self.replay().tensors, params, self._before.value, self._program.plan.rounding)
        return Run.of(self._replayed, left, beyond)


def detached(result: Any) -> Any:
    """Return ``result`` without an autograd graph, as after every replay."""
    return map_result(lambda tensor: tensor if tensor.grad_fn is None else tensor.detach(), result)
