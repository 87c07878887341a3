"""Storages: how many tensors use one, where tensors begin, and copies with the same memory layout."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from graphplan.tensors.attributes import PLAIN_KINDS, is_plain
from graphplan.tensors.dtensors import local

_SPARSENESS = 4
_SPARE = 2**24  # A copy may span this many times its elements, or this many bytes, before it is packed densely instead.
_count_uses: Any = getattr(torch._C, "_storage_Use_Count", None)


def memory_uses(tensors: Iterable[Tensor]) -> dict[int, int]:
    """Return the number of tensors that use each storage of ``tensors``; empty if torch does not provide it."""
    storages = {storage for tensor in tensors if (storage := storage_id(tensor)) is not None}
    # Subtract one: storage_id created a Python object that also refers to the storage.
    return {storage: _count_uses(storage) - 1 for storage in storages} if _count_uses is not None else {}


def is_memory_shared(tensor: Tensor) -> bool:
    """Return True if another tensor may share ``tensor``'s memory."""
    return _count_uses is None or next(iter(memory_uses([tensor]).values()), 2) > 1


def places(tensors: Iterable[Tensor]) -> list[int]:
    """Return the addresses of ``tensors``."""
    return [local(tensor).data_ptr() for tensor in tensors]


def lay(tensors: Iterable[Tensor], memories: Iterable[Tensor]) -> None:
    """Give ``tensors`` the memory of ``memories``."""
    for tensor, memory in zip(tensors, memories, strict=True):
        tensor.data = memory


def with_leaves(value: Any, tensors: Sequence[Tensor]) -> Any:
    """Return ``value``, a tensor or a tuple, with ``tensors`` in place of its own, except for tensors inside lists."""
    following = iter(tensors)
    return pytree.tree_map_only(
        Tensor, lambda _: next(following), value, is_leaf=lambda part: not isinstance(part, tuple)
    )


def storage_id(tensor: Tensor) -> int | None:
    """Return the identity of ``tensor``'s storage; None if it has none (sparse, opaque)."""
    try:
        return (tensor if type(tensor) in PLAIN_KINDS else local(tensor)).untyped_storage()._cdata
    except (NotImplementedError, RuntimeError):
        return None


MemoryView = tuple[int | None, int, tuple[int, ...], tuple[int, ...], torch.dtype, bool, bool]
"""Storage, offset, shape, strides, dtype, conjugate bit, negative bit: equal places are equal views of one memory."""


def place_of(tensor: Tensor) -> MemoryView:
    """Return the place of ``tensor``."""
    if type(tensor) not in PLAIN_KINDS:
        tensor = local(tensor)
    if tensor.layout is not torch.strided:
        return (None, id(tensor), tuple(tensor.shape), (), tensor.dtype, False, False)
    offset, shape, stride = tensor.storage_offset(), tensor.shape, tensor.stride()
    return (storage_id(tensor), int(offset), shape, stride, tensor.dtype, tensor.is_conj(), tensor.is_neg())


def put_back(tensor: Tensor, before: Tensor) -> None:
    """Give ``tensor`` the memory of ``before``, its alias from before a step, if it has another one now."""
    if place_of(tensor) != place_of(before):
        tensor.data = before


def whole_storage(tensor: Tensor) -> Tensor:
    """Return a 1-D tensor of the bytes of ``tensor``'s whole storage, of which it may be a view."""
    tensor = local(tensor)
    return torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(tensor.untyped_storage())


def span(shape: Sequence[int], stride: Sequence[int]) -> int:
    """Return the number of elements from the first to the last one, both included."""
    if 0 in shape:
        return 0
    return 1 + sum((size - 1) * step for size, step in zip(shape, stride, strict=True))


def overlaps(shape: Sequence[int], stride: Sequence[int]) -> bool:
    """Return True if two indices may share memory (expanded or overlapping tensors)."""
    reach = 1
    for step, size in sorted((st, sz) for sz, st in zip(shape, stride, strict=True) if sz > 1):
        if step < reach:
            return True
        reach = step * (size - 1) + reach
    return False


def has_wide_gaps(tensor: Tensor) -> bool:
    """Return True if the gaps between the elements of ``tensor`` are so wide that a copy should be dense."""
    reach = span(tensor.shape, tensor.stride())
    return reach > _SPARSENESS * max(tensor.numel(), 1) and reach * tensor.element_size() > _SPARE


def without_overlap(tensor: Tensor) -> Tensor:
    """Return ``tensor``, or a view with each element once if several share memory (an expanded tensor)."""
    shape, stride = tensor.shape, tensor.stride()
    if not overlaps(shape, stride):
        return tensor
    once = tensor.as_strided([size if step else 1 for size, step in zip(shape, stride, strict=True)], stride)
    return once.as_strided((span(shape, stride),), (1,)) if overlaps(once.shape, stride) else once


def copier(tensor: Tensor) -> Callable[[], Tensor]:
    """Return a function that copies ``tensor`` with its strides, gaps included: kernels choose their order of summation
    by strides. If the gaps are wide, the copies are dense.
    """
    # Kernels work on a dense copy of a conjugated or negated tensor.
    if tensor.is_nested or not is_plain(tensor):
        return tensor.clone
    shape, stride, dtype, device = tensor.shape, tensor.stride(), tensor.dtype, tensor.device
    is_alike = torch.empty_like(tensor, device="meta").stride() == stride
    if is_alike or has_wide_gaps(tensor):
        return tensor.clone
    source = without_overlap(tensor)

    def copy() -> Tensor:
        made = torch.empty_strided(shape, stride, dtype=dtype, device=device)
        (made if source is tensor else without_overlap(made)).copy_(source)
        return made

    return copy
