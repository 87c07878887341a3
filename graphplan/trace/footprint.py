"""How much memory a traced step takes while it computes."""

from __future__ import annotations

from torch import UntypedStorage

from graphplan.specs.roles import Footprint
from graphplan.trace.memory_watch import WeakStorages, living

_STRIDE = 1.05


class Allocations:
    """Counts the bytes of what operators make, and how much of it is alive at once.

    Storages are only known weakly, since to hold them would change what is counted. Who is gone is looked up only where
    there may be more than ever before, by more than :data:`_STRIDE`: so much too large the peak may be.
    """

    def __init__(self) -> None:
        self._weak = WeakStorages()
        self._living: list[int] = []
        self._current = 0
        self._peak = 0
        self._counted = 0
        self._total = 0

    def add(self, storage: UntypedStorage, *, counts: bool) -> None:
        """Take in a storage that an operator has just made, whose identity then stays its own. ``counts``: whether its
        bytes do.
        """
        held = self._weak.add(storage)
        if not counts:
            return
        nbytes = storage.nbytes()
        self._living.append(held)
        self._current += nbytes
        self._total += nbytes
        if self._current > self._counted * _STRIDE:
            self._count()
            self._counted = max(self._counted, self._current)
        self._peak = max(self._peak, self._current)

    def _count(self) -> None:
        """Forget storages that are gone, and see how large the others are: one may have been resized."""
        alive = [(held, storage) for held in self._living if (storage := living(held)) is not None]
        self._living = [held for held, _ in alive]
        self._current = sum([storage.nbytes() for _, storage in alive])

    @property
    def footprint(self) -> Footprint:
        """What was counted."""
        return Footprint(self._peak, self._total)
