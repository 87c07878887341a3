"""Whether a traced step leaves a tensor's memory alone."""

from __future__ import annotations

from collections import Counter

from torch import Tensor


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
        """Whether the memory is still there, and nobody has written to it."""
        return self._storage.nbytes() == self.nbytes and self._writes[self._storage._cdata] == self._before
