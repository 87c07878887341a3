"""What a replay moves in and out: in C++ where that was built, else by torch's operators, which come to the same."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from graphplan.compare.building import load

_BELOW_VIEWS: Any = getattr(torch._C, "_AutoDispatchBelowADInplaceOrView", None)
"""Where operators do not note of what their results are views."""


def apart(vector: Tensor) -> Sequence[Tensor]:
    """The elements of a new vector as tensors of their own: views refuse some writes that ask for gradients."""
    if _BELOW_VIEWS is None:
        return list(map(Tensor.detach, vector.unbind()))
    # Half the time that detaching takes.
    with _BELOW_VIEWS():
        return vector.unbind()


def _copy_in(targets: list[Tensor], sources: list[Tensor]) -> None:
    """Copy each source into its target, which autograd does not note, and wait for nothing."""
    for target, source in zip(targets, sources, strict=True):
        target.copy_(source.detach() if source.requires_grad else source, non_blocking=True)


def _hand_out(vector: Tensor) -> Sequence[Tensor]:
    """The elements of a copy of ``vector``, each a tensor of its own."""
    return apart(vector.clone())


_built: Any = load()
copy_in: Callable[[list[Tensor], list[Tensor]], None] = getattr(_built, "copy_in", _copy_in)
hand_out: Callable[[Tensor], Sequence[Tensor]] = getattr(_built, "hand_out", _hand_out)
fill: Callable[[Tensor, float], Any] = getattr(_built, "fill", Tensor.fill_)
"""Write a number to all of a tensor that asks for no gradients."""
