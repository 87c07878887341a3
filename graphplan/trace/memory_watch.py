"""Memory during a traced step: how much is alive at once, and whether the step leaves a tensor's alone."""

from __future__ import annotations

from collections import defaultdict

from torch import Tensor, UntypedStorage
from torch.multiprocessing.reductions import StorageWeakRef

from graphplan.specs.roles import Footprint

_STRIDE = 1.1


class MemoryWatch:
    """Tells whether a dense tensor's memory is as it was, and keeps it alive. ``writes`` counts writes by storage."""

    def __init__(self, tensor: Tensor, writes: defaultdict[int | None, int]) -> None:
        self._storage = tensor.untyped_storage()
        self._writes = writes
        self._before = writes[self._storage._cdata]
        self.nbytes = self._storage.nbytes()

    @property
    def is_intact(self) -> bool:
        """Whether the memory is still there, and was not written to."""
        return self._storage.nbytes() == self.nbytes and self._writes[self._storage._cdata] == self._before


class Allocations:
    """Counts the bytes of what operators make, and how much of it is alive at once.

    Storages are held weakly, since to keep them alive would change what is counted. Which of them are gone is looked up
    only when there may be more than ever before by :data:`_STRIDE`; the peak may be too large by that factor.
    """

    def __init__(self) -> None:
        self._held: list[StorageWeakRef] = []
        """All of them: no other storage gets their identities meanwhile."""
        self._counting: list[StorageWeakRef] = []
        self._current = 0
        self._peak = 0
        self._counted = 0
        self._total = 0

    def add(self, storage: UntypedStorage, *, counts: bool) -> None:
        """Take in a storage that an operator has just made, and its bytes if it ``counts``."""
        held = StorageWeakRef(storage)
        self._held.append(held)
        if not counts:
            return
        nbytes = storage.nbytes()
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

    @property
    def footprint(self) -> Footprint:
        """What was counted."""
        return Footprint(self._peak, self._total)
