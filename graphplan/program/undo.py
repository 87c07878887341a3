"""Undo the first part of a replay.

A step that branches on a device value is recorded in parts. A replay reads the value where the step does, and continues
if it equals that of the traces. If not, all changes up to there are restored, and the step runs eagerly.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from graphplan.environment.devices import default_generators, set_generator
from graphplan.errors import OutcomeError
from graphplan.owners.slots import Walk
from graphplan.plan.plan import Plan
from graphplan.program.inputs import StaticInputs
from graphplan.tensors.attributes import has_memory, is_freed
from graphplan.tensors.copying import copy_all, copy_into
from graphplan.tensors.storages import storage_id, whole_storage


class Undo:
    """Copies of the memory that the step changes before it reads the last value that replays compare."""

    def __init__(self, plan: Plan, walk: Walk, inputs: StaticInputs) -> None:
        slots = [walk.slots[path] for path in sorted(plan.undone & walk.slots.keys())]
        changed = [tensor for slot in slots for tensor in slot.tensors()]
        self._memories = _memories([*changed, *inputs.changed_in_place])
        self._copies: list[Tensor] = []
        self._generators = [*default_generators(), *plan.traced.generators] if plan.draws else []

    def copy(self) -> None:
        """Copy the memory. This is recorded as the first work of a replay."""
        self._copies = copy_all(self._memories)

    @contextmanager
    def undoing(self, grads: Sequence[Tensor]) -> Iterator[None]:
        """Undo the replay in the block if it raises OutcomeError. ``grads`` is gradient memory that the recording
        overwrites: the step's other branch may keep these gradients.
        """
        states = [generator.get_state() for generator in self._generators]
        copies = copy_all(grads)
        try:
            yield
        except OutcomeError:
            with torch.no_grad():
                copy_into([*self._memories, *grads], [*self._copies, *copies])
            for generator, state in zip(self._generators, states, strict=True):
                set_generator(generator, state)
            raise


def _memories(tensors: Iterable[Tensor]) -> list[Tensor]:
    """Return one flat tensor per storage of ``tensors``, which may be partial views or views that forbid writes."""
    by_storage = {storage_id(tensor): tensor for tensor in tensors if has_memory(tensor) and not is_freed(tensor)}
    by_storage.pop(None, None)
    with torch.inference_mode(False), torch.no_grad():
        return list(map(whole_storage, by_storage.values()))
