"""Writes to a slice whose start is a deferred or symbolic number, as in queues with a pointer:
``queue[:, start : start + n] = keys``.
"""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import Tensor

from graphplan.tensors.attributes import PLAIN_KINDS
from graphplan.tensors.deferred import DeferredNumber, is_deferred
from graphplan.tensors.storages import storage_id

_ALL = (None, None, None)


def put_slice(target: Tensor, index: Any, value: Any) -> bool:
    """Assign ``target[index] = value`` for one such slice of a fixed length and a ``value`` of its shape. Return False
    for any other assignment, for a slice that ends beyond the tensor, and if the step's code may catch the error that a
    replay raises for such a slice.
    """
    parts = index if type(index) is tuple else (index,)
    if not all(type(part) is slice for part in parts) or len(parts) > target.dim():
        return False
    found = [dim for dim, part in enumerate(parts) if is_deferred(part.start)]
    if len(found) != 1 or not _may_be_put(target, value):
        return False
    dim = found[0]
    start, stop, size = parts[dim].start, parts[dim].stop, target.shape[dim]
    others = ((part.start, part.stop, part.step) for part in parts if part.start is not start)
    length = _length(start, stop)
    if length < 2 or parts[dim].step not in (None, 1) or any(other != _ALL for other in others):
        return False
    if value.shape != (*target.shape[:dim], length, *target.shape[dim + 1 :]):
        return False
    is_known = start.is_symbolic
    if is_known and not (start >= 0 and stop <= size):
        return False
    begin = start._reader.tensor_of(start, torch.int64, target.device)
    if begin is None or not (is_known or start._reader.fits(begin, length, size)):
        return False
    with torch.no_grad():
        places = begin + torch.arange(length, device=target.device)
        if not is_known:
            # If both ends are negative, they count from the end.
            places += (begin + length < 0) * size
            # If the slice of a replay ends beyond the tensor, gather raises the error before anything is written.
            target.gather(dim, places.view([-1 if at == dim else 1 for at in range(target.dim())]).expand_as(value))
        source = value.clone() if storage_id(value) == storage_id(target) else value
        target.index_copy_(dim, places, source.to(target.dtype))
    return True


def _length(start: DeferredNumber, stop: Any) -> int:
    """Return the length n of a slice that ends at ``start + n``; 0 for any other slice."""
    if start._kind is not int or not is_deferred(stop) or stop._function is not operator.add:
        return 0
    others = [operand for operand in stop._operands if operand is not start]
    return others[0] if len(others) == 1 and type(others[0]) is int else 0


def _may_be_put(target: Tensor, value: Any) -> bool:
    """Return True if the assignment copies elements between plain tensors of one device, outside autograd's graph."""
    if type(target) not in PLAIN_KINDS or type(value) not in PLAIN_KINDS or target.device != value.device:
        return False
    asks = torch.is_grad_enabled() and (target.requires_grad or value.requires_grad)
    return not asks and target.layout is value.layout is torch.strided
