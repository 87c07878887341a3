"""Memory during a traced step: how much is alive at once."""

from __future__ import annotations

from collections.abc import Callable

from torch import UntypedStorage

from graphplan.specs.roles import Footprint

_living: Callable[[int], UntypedStorage | None] = UntypedStorage._new_with_weak_ptr
"""A storage that is held weakly, unless it is gone."""
_STRIDE = 1.1


class WeakStorages:
    """Holds storages weakly: no other one gets their identities meanwhile. As ``StorageWeakRef``, for many at once."""

    def __init__(self) -> None:
        self._held: list[int] = []
        self._free = UntypedStorage._free_weak_ref

    def add(self, storage: UntypedStorage) -> int:
        """Hold a storage; returns what :data:`_living` takes."""
        held: int = storage._weak_ref()  # type: ignore[assignment]
        self._held.append(held)
        return held

    def __del__(self) -> None:
        for held in self._held:
            self._free(held)


class Allocations:
    """Counts the bytes of what operators make, and how much of it is alive at once.

    Storages are held weakly, since to keep them alive would change what is counted. Which of them are gone is looked up
    only when there may be more than ever before by :data:`_STRIDE`; the peak may be too large by that factor.
    """

    def __init__(self) -> None:
        self._weak = WeakStorages()
        self._living: list[int] = []
        self._current = 0
        self._peak = 0
        self._counted = 0
        self._total = 0

    def add(self, storage: UntypedStorage, *, counts: bool) -> None:
        """Take in a storage that an operator has just made, and its bytes if it ``counts``."""
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
        alive = [(held, storage) for held in self._living if (storage := _living(held)) is not None]
        self._living = [held for held, _ in alive]
        self._current = sum([storage.nbytes() for _, storage in alive])

    @property
    def footprint(self) -> Footprint:
        """What was counted."""
        return Footprint(self._peak, self._total)
