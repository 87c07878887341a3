"""What undoes the first part of a replay.

A step that branches on a value of the device is recorded in parts: a replay reads the value where the step does, and
goes on if it is the one of the traces. If not, what it has changed until then is put back, and the step runs eagerly.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from graphplan.environment.devices import default_generators, set_generator
from graphplan.owners.slots import Walk
from graphplan.plan.plan import Plan
from graphplan.program.inputs import StaticInputs
from graphplan.tensors.attributes import has_memory, is_freed
from graphplan.tensors.copying import copy_all, write_all
from graphplan.tensors.dtensors import local
from graphplan.tensors.storages import storage_id


class Undo:
    """Copies of what the step changes before it reads the last value that replays compare. ``walk`` is of when the
    recording begins, and ``inputs`` are its inputs.
    """

    def __init__(self, plan: Plan, walk: Walk, inputs: StaticInputs) -> None:
        slots = [walk.slots[path] for path in sorted(plan.undone & walk.slots.keys())]
        changed = [tensor for slot in slots for tensor in slot.tensors()]
        self._memories = _memories([*changed, *inputs.changed_in_place])
        self._copies: list[Tensor] = []
        self._generators = [*default_generators(), *plan.traced.generators] if plan.draws else []
        self._states: list[Tensor] = []
        self._grads: list[Tensor] = []
        self._old_grads: list[Tensor] = []

    def copy(self) -> None:
        """Copy the memory. Recorded as the first work of a replay."""
        self._copies = copy_all(self._memories)

    def begin(self, grads: Sequence[Tensor]) -> None:
        """Before a replay: take the states of random generators, and copy the ``grads`` that lie where the recording
        makes others. The step may keep them in its other branch.
        """
        self._states = [generator.get_state() for generator in self._generators]
        self._grads = [local(grad).detach() for grad in grads]
        self._old_grads = copy_all(self._grads)

    def undo(self) -> None:
        """Put everything back."""
        with torch.no_grad():
            write_all([*self._memories, *self._grads], [*self._copies, *self._old_grads])
        for generator, state in zip(self._generators, self._states, strict=True):
            set_generator(generator, state)

    def end(self) -> None:
        """After a replay: let go of the copies of gradients."""
        self._grads, self._old_grads = [], []


def _memories(tensors: Iterable[Tensor]) -> list[Tensor]:
    """All of the memory behind ``tensors``, each once: they may be views that cannot be written to, or of a part."""
    by_storage = {
        storage_id(tensor): local(tensor) for tensor in tensors if has_memory(tensor) and not is_freed(tensor)
    }
    by_storage.pop(None, None)
    with torch.inference_mode(False), torch.no_grad():
        return [
            torch.empty(0, dtype=tensor.dtype, device=tensor.device).set_(tensor.untyped_storage())
            for tensor in by_storage.values()
        ]
