"""Numbers for the memory that a traced step's operators get, and which of it holds the same values in each step."""

from __future__ import annotations

import torch
from torch import Tensor

from graphplan.specs.roles import Footprint
from graphplan.tensors.storages import storage_id
from graphplan.trace.memory_watch import Allocations

Operand = tuple[str, int]
"""``("external" | "internal", number)``: memory from outside and the step's own are numbered separately."""
NOWHERE: Operand = ("internal", -1)


class Operands:
    """The operands of one trace, by storage, in which ``device`` computes."""

    def __init__(self, device: torch.device | None) -> None:
        self._device = device
        self._allocations = Allocations()
        self._internals = 0
        self.by_storage: dict[int | None, Operand] = {}
        self.fixed: set[Operand] = set()
        """What is made of Python's numbers alone, or is certain whatever is drawn. It is the same in each step."""

    @property
    def footprint(self) -> Footprint:
        """The memory that the step makes."""
        return self._allocations.footprint

    def internal(self, tensor: Tensor) -> Operand:
        """The number of memory that the step made; ``NOWHERE`` for other memory."""
        operand = self.by_storage.get(storage_id(tensor), NOWHERE)
        return operand if operand[0] == "internal" else NOWHERE

    def is_internal(self, tensor: Tensor | None) -> bool:
        """Return True if the step has made a tensor's memory."""
        return tensor is not None and self.internal(tensor) is not NOWHERE

    def add(self, tensor: Tensor) -> bool:
        """Number memory that the step made; False if it was known (a view, or a result written in place)."""
        storage = storage_id(tensor)
        if storage is None or storage in self.by_storage:
            return False
        self.by_storage[storage] = ("internal", self._internals)
        self._internals += 1
        self._allocations.add(tensor.untyped_storage(), counts=tensor.device == self._device)
        return True

    def add_constant(self, tensor: Tensor) -> None:
        """Number memory whose contents are always the same."""
        self.add(tensor)
        self.fixed.add(self.internal(tensor))
