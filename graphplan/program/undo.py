"""What undoes the first part of a replay.

A step that branches on a value of the device is recorded in parts: a replay reads the value where the step does, and
goes on if it is the one of the traces. If not, what it has changed until then is put back, and the step runs eagerly.
"""

from __future__ import annotations

import torch
from torch import Tensor

from graphplan.environment.devices import default_generators
from graphplan.owners.slots import Walk
from graphplan.owners.snapshot import is_copied
from graphplan.plan.plan import Plan
from graphplan.tensors.copying import copy_all, write_all
from graphplan.tensors.dtensors import local


class Undo:
    """Copies of what the step changes before it reads the last value that replays compare. ``walk`` is of when the
    recording begins.
    """

    def __init__(self, plan: Plan, walk: Walk) -> None:
        slots = [walk.slots[path] for path in sorted(plan.undone & walk.slots.keys())]
        self._tensors = [local(tensor).detach() for slot in slots for tensor in slot.tensors() if is_copied(tensor)]
        self._copies: list[Tensor] = []
        self._generators = [*default_generators(), *plan.traced.generators] if plan.draws else []
        self._states: list[Tensor] = []

    def copy(self) -> None:
        """Copy the tensors. Recorded as the first work of a replay."""
        self._copies = copy_all(self._tensors)

    def begin(self) -> None:
        """Take the states of random generators, before a replay."""
        self._states = [generator.get_state() for generator in self._generators]

    def undo(self) -> None:
        """Put everything back."""
        with torch.no_grad():
            write_all(self._tensors, self._copies)
        for generator, state in zip(self._generators, self._states, strict=True):
            generator.set_state(state)
