"""Static storage for what a program copies in.

One flat allocation serves a feed leaf at every shape: it is as large as the largest shape seen, and each program views
it with the strides that the caller's tensor has, so that kernels see the memory format that eager sees. Growing
reallocates, which invalidates the programs that point into the old allocation.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

_SPARSENESS = 4
"""A view's span may exceed its elements by this factor before it is packed densely instead."""


def _span(shape: Sequence[int], stride: Sequence[int]) -> int:
    """Elements between the first and the last one, both included."""
    if 0 in shape:
        return 0
    return 1 + sum((size - 1) * step for size, step in zip(shape, stride, strict=True))


def _overlaps(shape: Sequence[int], stride: Sequence[int]) -> bool:
    """Whether two indices may share memory (expanded or overlapping tensors)."""
    reach = 1
    for step, size in sorted((st, sz) for sz, st in zip(shape, stride, strict=True) if sz > 1):
        if step < reach:
            return True
        reach = step * (size - 1) + reach
    return False


def static_stride(tensor: Tensor) -> tuple[int, ...]:
    """Strides of ``tensor``'s static view: its own, or dense ones where its own overlap or waste memory."""
    shape, stride = tuple(tensor.shape), tuple(tensor.stride())
    wasteful = _span(shape, stride) > _SPARSENESS * max(tensor.numel(), 1)
    if _overlaps(shape, stride) or wasteful:
        return tuple(torch.empty(shape, device="meta").stride())
    return stride


class Buffers:
    """Allocations by feed position. ``on_growth(position)`` is called before an allocation is replaced."""

    def __init__(self, on_growth: Callable[[int], None] | None = None) -> None:
        self._flat: dict[tuple[object, ...], Tensor] = {}
        self._on_growth = on_growth

    def view(self, position: object, like: Tensor, device: torch.device) -> Tensor:
        """A static tensor on ``device`` with the geometry of ``like``, for the leaf at ``position``.

        Its contents are undefined. It asks for gradients if ``like`` does.
        """
        stride = static_stride(like)
        span = _span(like.shape, stride)
        key = (position, like.dtype, device)
        flat = self._flat.get(key)
        if flat is None or flat.numel() < span:
            if flat is not None and self._on_growth is not None:
                assert isinstance(position, int)
                self._on_growth(position)
            with torch.inference_mode(False):
                flat = torch.empty(span, dtype=like.dtype, device=device)
            self._flat[key] = flat
        with torch.inference_mode(False), torch.no_grad():
            static = flat.as_strided(tuple(like.shape), stride)
        return static.requires_grad_(like.requires_grad)

    @property
    def nbytes(self) -> int:
        """Bytes allocated."""
        return sum(flat.numel() * flat.element_size() for flat in self._flat.values())

    def clear(self) -> None:
        """Let every allocation go."""
        self._flat.clear()
