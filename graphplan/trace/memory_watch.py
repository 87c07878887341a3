"""Storages that a traced step must not lose sight of, and whether it leaves a tensor's memory alone."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

from torch import Tensor, UntypedStorage

living: Callable[[int], UntypedStorage | None] = UntypedStorage._new_with_weak_ptr
"""A storage that is held weakly, unless it is gone."""


class WeakStorages:
    """Keeps the identities of storages from being handed out again while it is there, but not their memory.

    Does for many at once what torch's ``StorageWeakRef`` does for one.
    """

    def __init__(self) -> None:
        self._held: list[int] = []
        self._free = UntypedStorage._free_weak_ref

    def add(self, storage: UntypedStorage) -> int:
        """Hold a storage; returns what :data:`living` takes."""
        held: int = storage._weak_ref()  # type: ignore[assignment]
        self._held.append(held)
        return held

    def __del__(self) -> None:
        for held in self._held:
            self._free(held)


class MemoryWatch:
    """Tells whether a tensor's memory is what it was when the watch began. Keeps it alive.

    Args:
        tensor: a dense tensor.
        writes: how often the trace saw each storage written to; goes on counting.
    """

    def __init__(self, tensor: Tensor, writes: Counter[int | None]) -> None:
        self._storage = tensor.untyped_storage()
        self._writes = writes
        self._before = writes[self._storage._cdata]
        self.nbytes = self._storage.nbytes()

    @property
    def is_intact(self) -> bool:
        """Whether the memory is still there, and was not written to."""
        return self._storage.nbytes() == self.nbytes and self._writes[self._storage._cdata] == self._before
