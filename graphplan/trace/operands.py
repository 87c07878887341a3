"""Numbers for the memory that a traced step's operators get, and which of it holds the same values in each step."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from graphplan.specs.roles import Footprint
from graphplan.tensors.storages import storage_id
from graphplan.trace.memory_watch import Allocations
from graphplan.trace.operator_schemas import OperatorCall

Operand = tuple[str, int]
"""``("external" | "internal", number)``: memory from outside and the step's own are numbered separately."""
NOWHERE: Operand = ("internal", -1)
_UNIFORM = ("aten.rand.default", "aten.rand.generator")
_SPLITTING = ("aten.lt.Scalar", "aten.ge.Scalar")
"""Comparisons whose result is certain where no number from 0 to 1, without 1, lies on one side of the bound."""


class Operands:
    """The operands of one trace, by storage, in which ``device`` computes."""

    def __init__(self, device: torch.device | None) -> None:
        self._device = device
        self._allocations = Allocations()
        self._internals = 0
        self.by_storage: dict[int | None, Operand] = {}
        self.fixed: set[Operand] = set()
        """What is made of Python's numbers alone, or is certain whatever is drawn. It is the same in each step."""
        self.drawn: dict[Operand, torch.dtype] = {}
        """What was drawn on the host from 0 to 1, without 1, with its type, and was not written to since."""

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

    def note_draw(self, name: str, out: Tensor) -> None:
        """Note what a random operator gives."""
        if name in _UNIFORM and out.device.type == "cpu" and out.dtype in (torch.float32, torch.float64):
            self.drawn[self.internal(out)] = out.dtype

    def is_certain(self, call: OperatorCall, operands: Sequence[Operand]) -> bool:
        """Return True if an operator compares a draw, with a certain result: code that leaves out a layer by chance
        draws with a share of 0, too (``torch.rand([]) < share``).
        """
        dtype = self.drawn.get(operands[0]) if call.schema.name in _SPLITTING else None
        if dtype is None:
            return False
        tensor, bound = call.args
        # A view may see the same memory otherwise.
        is_number = tensor.dtype is dtype and not tensor.is_neg() and isinstance(bound, int | float)
        return is_number and (bound <= 0 or bound >= 1)
