"""Static storage for the inputs of programs: one flat allocation per feed leaf, shared by all shapes of that leaf.

A program views it with the strides and alignment of the caller's tensor: kernels choose their order of summation by
these. A larger shape gets a new allocation of at least twice the size; older programs keep the old allocation.
"""

from __future__ import annotations

import weakref

import torch
from torch import Tensor

from graphplan.feed.signature import WIDEST_LOAD, alignment
from graphplan.tensors.storages import has_wide_gaps, span


class Buffers:
    """Allocations by feed position, dtype and device."""

    def __init__(self) -> None:
        self._flat: dict[tuple[object, ...], Tensor] = {}
        self._views: weakref.WeakValueDictionary[int, Tensor] = weakref.WeakValueDictionary()

    def view(self, position: object, like: Tensor, device: torch.device) -> Tensor:
        """Return an uninitialised tensor like ``like`` for the leaf at ``position``. Fill it by ``without_overlap``."""
        shape, stride = tuple(like.shape), tuple(like.stride())
        if has_wide_gaps(like):
            stride = tuple(torch.empty(shape, device="meta").stride())
        room = span(shape, stride) + WIDEST_LOAD // like.element_size()
        key = (position, like.dtype, device)
        flat = self._flat.get(key)
        if flat is None or flat.numel() < room:
            if flat is not None:
                # At least double: slowly growing inputs would otherwise need one allocation per shape.
                room = max(room, 2 * flat.numel())
            with torch.inference_mode(False):
                flat = torch.empty(room, dtype=like.dtype, device=device)
            self._flat[key] = flat
        with torch.inference_mode(False), torch.no_grad():
            static = flat.as_strided(shape, stride, alignment(like) // like.element_size())
            static = static.conj() if like.is_conj() else static
            static = torch._neg_view(static) if like.is_neg() else static
        self._views[id(static)] = static
        return static.requires_grad_(like.requires_grad)

    @property
    def nbytes(self) -> int:
        """Bytes allocated, including older allocations that programs still read."""
        held = [*self._flat.values(), *self._views.values()]
        return sum({storage.data_ptr(): storage.nbytes() for storage in map(Tensor.untyped_storage, held)}.values())

    def clear(self) -> None:
        """Release every allocation."""
        self._flat.clear()
