"""Numbers for the memory that a traced step's operators use, and the memory with the same values in each step."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, UntypedStorage
from torch.multiprocessing.reductions import StorageWeakRef

from graphplan.specs.roles import Footprint
from graphplan.tensors.storages import storage_id
from graphplan.trace.operator_schemas import OperatorCall

Operand = tuple[str, int]
"""``("external" | "internal", number)``: memory from outside and memory that the step makes have separate numbers."""
NOWHERE: Operand = ("internal", -1)
_STRIDE = 1.1
"""Recount living memory once the total exceeds the largest recount by this factor, which bounds the peak's error."""
_UNIFORM = ("aten.rand.default", "aten.rand.generator")
_SPLITTING = ("aten.lt.Scalar", "aten.ge.Scalar")
"""Comparisons whose result is certain if all numbers in [0, 1) lie on one side of the bound."""
_FILLING = ("aten.uniform_.default", "aten.normal_.default", "aten.random_.default", "aten.random_.from")
"""Draws that write their first argument without reading it."""


class Operands:
    """The operands of one trace, by storage. The step computes on ``device``."""

    def __init__(self, device: torch.device | None) -> None:
        self._device = device
        self._held: list[StorageWeakRef] = []
        """Storages that the step made, held weakly: no others get their ids, and those alive can be counted."""
        self._counting: list[StorageWeakRef] = []
        self._current = self._peak = self._counted = self._total = 0
        self.by_storage: dict[int | None, Operand] = {}
        self.fixed: set[Operand] = set()
        """Memory computed from Python numbers alone, or certain whatever is drawn: it is the same in each step."""
        self.drawn: dict[Operand, torch.dtype] = {}
        """Uniform draws on the host from [0, 1) that were not written since, with their dtype."""

        self.chances: dict[Operand, float] = {}
        """Comparisons of such draws with numbers, and the probability that an element is True."""

        self.random: set[Operand] = set()
        """Memory drawn in the step, or computed from draws and Python numbers alone."""

    @property
    def footprint(self) -> Footprint:
        """The bytes that the step makes on its device: the most alive at once, and all together."""
        return Footprint(self._peak, self._total)

    def internal(self, tensor: Tensor) -> Operand:
        """Return the operand of memory that the step made; ``NOWHERE`` for other memory."""
        operand = self.by_storage.get(storage_id(tensor), NOWHERE)
        return operand if operand[0] == "internal" else NOWHERE

    def add(self, tensor: Tensor) -> bool:
        """Number memory that the step made. Return False if it is known (a view, or a result written in place)."""
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
            # The step may have resized one.
            self._current = sum([storage.nbytes() for _, storage in living if storage is not None])
            self._counted = max(self._counted, self._current)
        self._peak = max(self._peak, self._current)

    def add_constant(self, tensor: Tensor) -> None:
        """Number memory whose contents are the same in each step."""
        self.add(tensor)
        self.fixed.add(self.internal(tensor))

    def fix(self, tensor: Tensor) -> None:
        """Note that the contents of ``tensor`` are known from here on, if the step made its memory for it alone."""
        operand = self.internal(tensor)
        if operand != NOWHERE and _fills(tensor):
            self.fixed.add(operand)

    def note_draw(self, name: str, out: Tensor) -> None:
        """Record the result of a random operator if it is a uniform draw on the host."""
        if name in _UNIFORM and out.device.type == "cpu" and out.dtype in (torch.float32, torch.float64):
            self.drawn[self.internal(out)] = out.dtype

    def follow_draws(self, call: OperatorCall, operands: Sequence[Operand], made: Sequence[Tensor]) -> None:
        """Record the results of an operator that depend on draws and Python numbers alone."""
        name = call.schema.name
        if call.schema.is_random and ("_like." in name or (name in _FILLING and _fills(call.args[0]))):
            # It uses only the shape of its argument.
            operands = ()
        draws = call.schema.is_random or not self.random.isdisjoint(operands)
        if draws and (self.random | self.fixed).issuperset(operands):
            self.random.update(map(self.internal, made))

    def is_certain(self, call: OperatorCall, operands: Sequence[Operand], made: Sequence[Tensor]) -> bool:
        """Return True if an operator compares a draw with a certain result: code that drops a layer at random also
        draws if the probability is 0 (``torch.rand([]) < share``). Otherwise record the probability.
        """
        dtype = self.drawn.get(operands[0]) if call.schema.name in _SPLITTING else None
        if dtype is None:
            return False
        tensor, bound = call.args
        # A view may interpret the same memory differently.
        if tensor.dtype is not dtype or tensor.is_neg() or not isinstance(bound, int | float):
            return False
        below = min(1.0, max(0.0, bound))
        self.chances[self.internal(made[0])] = below if call.schema.name == _SPLITTING[0] else 1 - below
        return below in (0, 1)


def _fills(tensor: Tensor) -> bool:
    """Return True if no element of the tensor's memory lies outside it."""
    # An expanded tensor has as many elements as memory that it does not reach.
    return tensor.is_contiguous() and tensor.nbytes == tensor.untyped_storage().nbytes()
