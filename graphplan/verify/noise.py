"""What rounding does to a step: a replay, or a rehearsal, from parameters whose last bits are others."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence

import torch
from torch import Tensor

from graphplan.tensors.attributes import is_freed
from graphplan.tensors.copying import beside, copy_all
from graphplan.verify.compare import fits

_ROUNDED = (torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.complex64, torch.complex128)


def can_be_nudged(tensor: Tensor) -> bool:
    """Return True if the elements are floating-point numbers that can be changed in place."""
    is_dense = tensor.layout is torch.strided and 0 not in tensor.stride()
    return is_dense and tensor.dtype in _ROUNDED and not (is_freed(tensor) or tensor.is_inference())


@torch.no_grad()
def nudge(tensors: Iterable[Tensor], rounding: float) -> None:
    """Scale the elements alternately up and down, by ``rounding`` or the epsilon of their type, whichever is larger."""
    rows = [tensor.detach() if tensor.dim() else tensor.detach().view(1) for tensor in tensors]
    for kind in {row.dtype for row in rows}:
        part = max(torch.finfo(kind).eps, rounding)
        alike = [row for row in rows if row.dtype == kind]
        torch._foreach_mul_([row[..., ::2] for row in alike], 1 + part)
        torch._foreach_mul_([row[..., 1::2] for row in alike], 1 - part)


@torch.no_grad()
def take_back(left: Sequence[Tensor], old: Sequence[Tensor], rounding: float) -> None:
    """Take the nudge itself out of what a replay made of ``old``, nudged: it may be larger than the step's update."""
    for home in {tensor.device for tensor in left}:
        here = [index for index, tensor in enumerate(left) if tensor.device == home]
        before = beside([old[index] for index in here], home)
        nudges = copy_all(before)
        nudge(nudges, rounding)
        torch._foreach_sub_(nudges, before)
        torch._foreach_sub_([left[index] for index in here], nudges)


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
    nudge(fit.values(), rounding)
    left = replay()
    rows = [(left[path], before) for path, p in fit.items() if path in left and (before := old(p)) is not None]
    rows = [(tensor, before) for tensor, before in rows if fits(before, tensor)]
    take_back([tensor for tensor, _ in rows], [before for _, before in rows], rounding)
    return left
