"""Page-locked (pinned) host memory for asynchronous device-to-host copies, kept for later copies.

``pin_memory=True`` gets memory from the driver page by page: 128 MiB take 60 to 69 ms on the host of an H200. Huge
pages that several threads touch and that are registered then take 19 ms.
"""

from __future__ import annotations

import mmap
import weakref
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import cache, partial
from threading import Lock

import torch
from torch import Tensor

from graphplan.environment.devices import module_of, synchronize
from graphplan.tensors.attributes import is_plain

_PAGE = 2**21
"""Bytes of a huge page."""
_SPARE_BITS = 3  # A piece is up to a fourth larger than requested.
_LINE = 64  # Alignment of copies, in bytes.
_WIPE_ON_FORK = 18  # Linux's MADV_WIPEONFORK, which Python's mmap module lacks.
_PORTABLE = 1  # cudaHostRegisterPortable: pinned for all devices.


class PageLocked:
    """Pieces of page-locked memory. A piece is free again when no tensor uses it. ``lock(address, nbytes)`` and
    ``unlock(address)`` return True on success; ``wait()`` waits for copies that are still queued for free memory.
    """

    def __init__(
        self, lock: Callable[[int, int], bool], unlock: Callable[[int], bool], wait: Callable[[], None]
    ) -> None:
        self._lock, self._unlock, self._wait = lock, unlock, wait
        self._free: list[_Piece] = []
        self._turns = Lock()
        self._can = hasattr(mmap, "MADV_HUGEPAGE")

    def empty(self, nbytes: int) -> Tensor | None:
        """Return ``nbytes`` of uninitialized memory as uint8; None for less than a huge page, or if none can be had."""
        if nbytes < _PAGE:
            return None
        with self._turns:
            # Pieces that become free during the wait may still have queued copies: use only those free before it.
            free = list(self._free)
            if free:
                self._wait()
            fitting = [piece for piece in free if nbytes <= piece.nbytes]
            piece = min(fitting, key=lambda piece: piece.nbytes) if fitting else self._make(nbytes, free)
            if piece in free:
                self._free.remove(piece)
            return None if piece is None else piece.lend(nbytes, self._free)

    def _make(self, nbytes: int, too_small: list[_Piece]) -> _Piece | None:
        """Return a new piece. Free the pieces that are ``too_small`` first."""
        for piece in too_small if self._can else ():
            self._free.remove(piece)
            # `piece` keeps the memory mapped until it is unlocked.
            self._can &= self._unlock(piece.address)
        if not self._can:
            return None
        # Round up: later copies need as many bytes, or a few more.
        unit = max(_PAGE, 2 ** (nbytes.bit_length() - _SPARE_BITS))
        with suppress(OSError):
            piece = _Piece(-(-nbytes // unit) * unit)
            if self._lock(piece.address, piece.nbytes):
                return piece
        self._can = False
        return None


class _Piece:
    """A private mapping of whole huge pages, which forked processes see zero-filled. Raises OSError if the system
    cannot map it.
    """

    def __init__(self, nbytes: int) -> None:
        self.nbytes = nbytes
        self._map = mmap.mmap(-1, nbytes + _PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        self._map.madvise(_WIPE_ON_FORK)
        with suppress(OSError):
            self._map.madvise(mmap.MADV_HUGEPAGE)
        whole = torch.frombuffer(self._map, dtype=torch.uint8)
        self._begin = -whole.data_ptr() % _PAGE
        part = whole[self._begin : self._begin + nbytes]
        self.address = part.data_ptr()
        part.zero_()

    def lend(self, nbytes: int, free: list[_Piece]) -> Tensor:
        """Return the first ``nbytes``. When no tensor uses the memory any more, append this piece to ``free``."""
        view = memoryview(self._map)[self._begin : self._begin + nbytes]
        weakref.finalize(view, free.append, self).atexit = False
        return torch.frombuffer(view, dtype=torch.uint8)


class HostMemory:
    """Page-locked memory for host copies of ``tensors`` of one ``device``, all of which :func:`fits_host_memory`.
    One large piece is made several times as fast as many small ones.
    """

    def __init__(self, device: torch.device, tensors: Sequence[Tensor]) -> None:
        with _TURNS:
            pieces = _pieces_for(device)
        self._left = pieces.empty(sum(tensor.nbytes for tensor in tensors) + _LINE * len(tensors))

    def empty_like(self, tensor: Tensor) -> Tensor:
        """Return an uninitialized host tensor for a copy of ``tensor``."""
        if self._left is None:
            return torch.empty_like(tensor, device="cpu", pin_memory=True)
        memory, self._left = self._left[: tensor.nbytes], self._left[-(-tensor.nbytes // _LINE) * _LINE :]
        return memory.view(tensor.dtype).as_strided(tensor.shape, tensor.stride())


_FORMATS = {4: torch.channels_last, 5: torch.channels_last_3d}


def fits_host_memory(tensor: Tensor) -> bool:
    """Return True if a copy of ``tensor`` may use :class:`HostMemory`: the tensor is plain and without gaps."""
    order = _FORMATS.get(tensor.dim(), torch.contiguous_format)
    return is_plain(tensor) and (tensor.is_contiguous() or tensor.is_contiguous(memory_format=order))


_TURNS = Lock()


@cache
def _pieces_for(device: torch.device) -> PageLocked:
    module = module_of(device)
    if not hasattr(module, "cudart"):
        return PageLocked(lambda address, nbytes: False, lambda address: False, lambda: None)
    runtime = module.cudart()

    def done(error: int) -> bool:
        if error != 0:
            # Clear CUDA's last error here, or the next kernel launch raises it.
            with suppress(RuntimeError):
                torch.ones(1, device=device).add_(1)
        return error == 0

    return PageLocked(
        lambda address, nbytes: done(runtime.cudaHostRegister(address, nbytes, _PORTABLE)),
        lambda address: done(runtime.cudaHostUnregister(address)),
        partial(synchronize, device),
    )
