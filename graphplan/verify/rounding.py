"""Parameters that are off by what rounding does to them, and taking that out of what a step makes of them."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from graphplan.owners import is_freed
from graphplan.verify.compare import fits

_ROUNDED = (torch.float64, torch.float32, torch.float16, torch.bfloat16)


def can_be_nudged(tensor: Tensor) -> bool:
    """Whether its elements are numbers that can be changed in place."""
    is_dense = tensor.layout is torch.strided and 0 not in tensor.stride()
    return is_dense and tensor.dtype in _ROUNDED and not (is_freed(tensor) or tensor.is_inference())


@torch.no_grad()
def nudge_by(tensor: Tensor, rounding: float) -> None:
    """Change the elements of ``tensor`` by turns up and down: by ``rounding``, or what its own type can tell apart."""
    part = max(torch.finfo(tensor.dtype).eps, rounding)
    row = tensor.detach() if tensor.dim() else tensor.detach().view(1)
    row[..., ::2].mul_(1 + part)
    row[..., 1::2].mul_(1 - part)


@torch.no_grad()
def take_back(left: Tensor, old: Tensor, rounding: float) -> None:
    """Take out of what a replay made of ``old``, nudged, the nudge itself: it may be larger than the step's update, and
    noise is in the update only.
    """
    old = old.to(left.device)
    nudge = old.clone()
    nudge_by(nudge, rounding)
    left.sub_(nudge.sub_(old))


def nudged(
    replay: Callable[[], Mapping[str, Tensor]],
    params: Mapping[str, Tensor],
    old: Callable[[Tensor], Tensor | None],
    rounding: float,
) -> Mapping[str, Tensor]:
    """What ``replay`` leaves if ``params`` have other last bits, but for these: parameters among it are changed once
    more. ``old(param)`` is what a parameter held before.
    """
    fit = {path: param for path, param in params.items() if can_be_nudged(param)}
    for param in fit.values():
        nudge_by(param, rounding)
    left = replay()
    for path, param in fit.items():
        before = old(param)
        if before is not None and path in left and fits(before, left[path]):
            take_back(left[path], before, rounding)
    return left
