"""Memory of the host that a device copies to by itself: page-locked, and kept for later copies.

torch's own (``pin_memory=True``) comes from the driver page by page: 128 MiB take 60 to 69 ms on the host of an H200.
Huge pages of the system's, touched by several threads and registered then, take 19.
"""

from __future__ import annotations

import mmap
import weakref
from collections.abc import Callable
from contextlib import suppress
from functools import cache, partial
from threading import Lock

import torch
from torch import Tensor

from graphplan.environment.devices import module_of, synchronize

_PAGE = 2**21
"""Bytes of a huge page."""
_LINE = 64  # Bytes: copies begin at multiples of these.
_PORTABLE = 1  # cudaHostRegisterPortable: for all devices.


class PageLocked:
    """Pieces of page-locked memory; a piece is free again when no tensor is left in it. ``lock(address, nbytes)`` and
    ``unlock(address)`` tell whether they could, ``wait()`` waits for what was queued with memory that is free.
    """

    def __init__(
        self, lock: Callable[[int, int], bool], unlock: Callable[[int], bool], wait: Callable[[], None]
    ) -> None:
        self._lock, self._unlock, self._wait = lock, unlock, wait
        self._free: list[_Piece] = []
        self._turns = Lock()
        self._can = hasattr(mmap, "MADV_HUGEPAGE")

    def empty(self, nbytes: int) -> Tensor | None:
        """Uninitialized ``nbytes``, uint8; None for less than a page, or where there is none."""
        if nbytes < _PAGE or not self._can:
            return None
        with self._turns:
            # Others may become free meanwhile, with which something is queued yet.
            free = list(self._free)
            if free:
                self._wait()
            fitting = [piece for piece in free if nbytes <= piece.nbytes]
            piece = min(fitting, key=lambda piece: piece.nbytes) if fitting else self._make(nbytes, free)
            if piece in free:
                self._free.remove(piece)
            return None if piece is None else piece.lend(nbytes, self._free)

    def _make(self, nbytes: int, too_small: list[_Piece]) -> _Piece | None:
        """A new piece, in place of those that have become ``too_small``."""
        for piece in too_small:
            self._free.remove(piece)
            self._can = self._can and self._unlock(piece.address)
        piece = _Piece(-(-nbytes // _PAGE) * _PAGE)
        self._can = self._can and self._lock(piece.address, piece.nbytes)
        return piece if self._can else None


class _Piece:
    """Memory of the process alone, whole huge pages. A process that is forked off does not have it."""

    def __init__(self, nbytes: int) -> None:
        self.nbytes = nbytes
        self._map = mmap.mmap(-1, nbytes + _PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        # A system may have none of either.
        for advice in (mmap.MADV_HUGEPAGE, mmap.MADV_DONTFORK):
            with suppress(OSError):
                self._map.madvise(advice)
        whole = torch.frombuffer(self._map, dtype=torch.uint8)
        self._begin = -whole.data_ptr() % _PAGE
        part = whole[self._begin : self._begin + nbytes]
        self.address = part.data_ptr()
        part.zero_()

    def lend(self, nbytes: int, free: list[_Piece]) -> Tensor:
        """The first ``nbytes``; this is among the ``free`` ones when no tensor has their memory any more."""
        view = memoryview(self._map)[self._begin : self._begin + nbytes]
        weakref.finalize(view, free.append, self).atexit = False
        return torch.frombuffer(view, dtype=torch.uint8)


class HostMemory:
    """Page-locked memory of the host for ``count`` copies of tensors of ``device``, ``nbytes`` in all: to make a large
    piece is several times as fast as to make many.
    """

    def __init__(self, device: torch.device, nbytes: int, count: int) -> None:
        self._left = _pieces_for(device).empty(nbytes + _LINE * count)

    def empty_like(self, tensor: Tensor) -> Tensor:
        """Uninitialized memory for a copy of ``tensor``, a plain one."""
        if self._left is None or not tensor.is_contiguous():
            return torch.empty_like(tensor, device="cpu", pin_memory=True)
        memory, self._left = self._left[: tensor.nbytes], self._left[-(-tensor.nbytes // _LINE) * _LINE :]
        return memory.view(tensor.dtype).view(tensor.shape)


@cache
def _pieces_for(device: torch.device) -> PageLocked:
    module = module_of(device)
    if not hasattr(module, "cudart"):
        return PageLocked(lambda address, nbytes: False, lambda address: False, lambda: None)
    runtime = module.cudart()

    def done(error: int) -> bool:
        if error != 0:
            # The next launch of a kernel would raise it.
            with suppress(RuntimeError):
                torch.ones(1, device=device).add_(1)
        return error == 0

    return PageLocked(
        lambda address, nbytes: done(runtime.cudaHostRegister(address, nbytes, _PORTABLE)),
        lambda address: done(runtime.cudaHostUnregister(address)),
        partial(synchronize, device),
    )
