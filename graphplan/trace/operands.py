"""Numbers for the memory that a traced step's operators get, and which of it holds the same values in each step."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, UntypedStorage
from torch.multiprocessing.reductions import StorageWeakRef

from graphplan.specs.roles import Footprint
from graphplan.tensors.storages import storage_id
from graphplan.trace.operator_schemas import OperatorCall

Operand = tuple[str, int]
"""``("external" | "internal", number)``: memory from outside and the step's own are numbered separately."""
NOWHERE: Operand = ("internal", -1)
_STRIDE = 1.1
"""Freed memory is subtracted once the count exceeds the largest so far by this factor, as the peak may be too large."""
_UNIFORM = ("aten.rand.default", "aten.rand.generator")
_SPLITTING = ("aten.lt.Scalar", "aten.ge.Scalar")
"""Comparisons whose result is certain where no number from 0 to 1, without 1, lies on one side of the bound."""


class Operands:
    """The operands of one trace, by storage, in which ``device`` computes."""

    def __init__(self, device: torch.device | None) -> None:
        self._device = device
        self._held: list[StorageWeakRef] = []
        """All that the step made: no other storage gets their identities, and what is alive can be counted."""
        self._counting: list[StorageWeakRef] = []
        self._current = self._peak = self._counted = self._total = 0
        self.by_storage: dict[int | None, Operand] = {}
        self.fixed: set[Operand] = set()
        """What is made of Python's numbers alone, or is certain whatever is drawn. It is the same in each step."""
        self.drawn: dict[Operand, torch.dtype] = {}
        """What was drawn on the host from 0 to 1, without 1, with its type, and was not written to since."""

        self.random: set[Operand] = set()
        """What was drawn in the step, or is computed of that and of Python's numbers alone."""

    @property
    def footprint(self) -> Footprint:
        """The bytes that the step makes, and how many are alive at once."""
        return Footprint(self._peak, self._total)

    def internal(self, tensor: Tensor) -> Operand:
        """The number of memory that the step made; ``NOWHERE`` for other memory."""
        operand = self.by_storage.get(storage_id(tensor), NOWHERE)
        return operand if operand[0] == "internal" else NOWHERE

    def add(self, tensor: Tensor) -> bool:
        """Number memory that the step made; False if it was known (a view, or a result written in place)."""
        storage = storage_id(tensor)
        if storage is None or storage in self.by_storage:
            return False
        self.by_storage[storage] = ("internal", len(self._held))
        memory = tensor.untyped_storage()
        self._held.append(StorageWeakRef(memory))
        if tensor.device == self._device:
            self._count(self._held[-1], memory.nbytes())
        return True

    def _count(self, held: StorageWeakRef, nbytes: int) -> None:
        self._counting.append(held)
        self._current += nbytes
        self._total += nbytes
        if self._current > self._counted * _STRIDE:
            living = [(held, UntypedStorage._new_with_weak_ptr(held.cdata)) for held in self._counting]
            self._counting = [held for held, storage in living if storage is not None]
            # One may have been resized.
            self._current = sum([storage.nbytes() for _, storage in living if storage is not None])
            self._counted = max(self._counted, self._current)
        self._peak = max(self._peak, self._current)

    def add_constant(self, tensor: Tensor) -> None:
        """Number memory whose contents are always the same."""
        self.add(tensor)
        self.fixed.add(self.internal(tensor))

    def note_draw(self, name: str, out: Tensor) -> None:
        """Note what a random operator gives."""
        if name in _UNIFORM and out.device.type == "cpu" and out.dtype in (torch.float32, torch.float64):
            self.drawn[self.internal(out)] = out.dtype

    def follow_draws(self, call: OperatorCall, operands: Sequence[Operand], made: Sequence[Tensor]) -> None:
        """Note what an operator has ``made`` of draws alone."""
        if call.schema.is_random and "_like." in call.schema.name:
            # Of what it is given only the shape counts.
            operands = ()
        draws = call.schema.is_random or not self.random.isdisjoint(operands)
        if draws and (self.random | self.fixed).issuperset(operands):
            self.random.update(map(self.internal, made))

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
