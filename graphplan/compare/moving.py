"""Copy tensors into and out of a replay: in C++ if the extension was built, else by equivalent torch operators."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from graphplan.compare.building import load

_BELOW_VIEWS: Any = getattr(torch._C, "_AutoDispatchBelowADInplaceOrView", None)
"""A context in which operators do not record of which tensor their results are views."""


def apart(vector: Tensor) -> Sequence[Tensor]:
    """Return the elements of a new vector as tensors that are no views: views refuse some writes with gradients."""
    if _BELOW_VIEWS is None:
        return list(map(Tensor.detach, vector.unbind()))
    # This takes half as long as to detach each element.
    with _BELOW_VIEWS():
        return vector.unbind()


def _copy_in(targets: list[Tensor], sources: list[Tensor]) -> None:
    """Copy each source into its target, unseen by autograd and without host synchronization."""
    for target, source in zip(targets, sources, strict=True):
        target.copy_(source.detach() if source.requires_grad else source, non_blocking=True)


def _hand_out(vector: Tensor) -> Sequence[Tensor]:
    """Return the elements of a copy of ``vector`` as tensors that are no views."""
    return apart(vector.clone())


_built: Any = load()
copy_in: Callable[[list[Tensor], list[Tensor]], None] = getattr(_built, "copy_in", _copy_in)
hand_out: Callable[[Tensor], Sequence[Tensor]] = getattr(_built, "hand_out", _hand_out)
fill: Callable[[Tensor, float], Any] = getattr(_built, "fill", Tensor.fill_)
"""Write a number to all elements of a tensor that does not require gradients."""
