"""Which values of a traced step are the same in each step."""

from __future__ import annotations

from collections.abc import Iterable

from torch import Tensor

from graphplan.owners.slots import Slot, is_optimizer_state
from graphplan.trace.uniform import Operand

Sources = frozenset[int]
NUMBERS: Sources = frozenset()
"""Of what is computed from Python's numbers alone."""


class Constancy:
    """What follows from Python's numbers, or is certain whatever is drawn, and from tensors that owners hold and the
    step does not write: other values of it would be another program's.
    """

    def __init__(self) -> None:
        self._sources: dict[Operand, Sources] = {}

    def sources(self, operands: Iterable[Operand]) -> Sources | None:
        """The storages of owners' tensors that all of ``operands`` follow from; None if something else decides."""
        found = NUMBERS
        for operand in operands:
            known = self._sources.get(operand)
            if known is None:
                return None
            if known:
                found |= known
        return found

    def add(self, operands: Iterable[Operand], sources: Sources = NUMBERS) -> None:
        """Take in what follows from ``sources``."""
        for operand in operands:
            self._sources[operand] = sources

    def discard(self, operand: Operand) -> None:
        """Something else was written there."""
        self._sources.pop(operand, None)

    def __contains__(self, operand: Operand) -> bool:
        """Whether it follows from Python's numbers alone."""
        return self._sources.get(operand) == NUMBERS


def is_steady(tensor: Tensor, slots: Iterable[Slot]) -> bool:
    """Whether a tensor in ``slots`` of owners may stay as it is from step to step, and tells where it does not: its
    version goes up. Parameters, and what optimizers work with, change.
    """
    if tensor.requires_grad or tensor.is_inference():
        return False
    return not any(is_optimizer_state(slot.path) or ".param_groups[" in slot.path for slot in slots)
