"""What rounding does to a step: a replay, or a rehearsal, from parameters whose last bits are others."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from graphplan.tensors.attributes import is_freed
from graphplan.verify.compare import fits

_ROUNDED = (torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.complex64, torch.complex128)


def _can_be_nudged(tensor: Tensor) -> bool:
    """Return True if the elements are floating-point numbers that can be changed in place."""
    is_dense = tensor.layout is torch.strided and 0 not in tensor.stride()
    return is_dense and tensor.dtype in _ROUNDED and not (is_freed(tensor) or tensor.is_inference())


def _nudge(tensor: Tensor, rounding: float) -> None:
    """Scale the elements alternately up and down, by ``rounding`` or the epsilon of their type, whichever is larger."""
    row, part = tensor.view(1) if not tensor.dim() else tensor, max(torch.finfo(tensor.dtype).eps, rounding)
    row[..., ::2] *= 1 + part
    row[..., 1::2] *= 1 - part


def nudged(
    replay: Callable[[], Mapping[str, Tensor]],
    params: Mapping[str, Tensor],
    old: Callable[[Tensor], Tensor | None],
    rounding: float,
) -> Mapping[str, Tensor]:
    """What ``replay`` leaves if ``params`` have other last bits, but for these: parameters among it are changed once
    more, since the nudge may be larger than the step's update. ``old(param)`` is what a parameter held before.
    """
    fit = {path: param.detach() for path, param in params.items() if _can_be_nudged(param)}
    for param in fit.values():
        _nudge(param, rounding)
    left = replay()
    for path in fit.keys() & left.keys():
        before, after = old(params[path]), left[path].detach()
        if before is not None and fits(before, after):
            before = before.to(after.device)
            off = before.clone()
            _nudge(off, rounding)
            after.sub_(off.sub_(before))
    return left
