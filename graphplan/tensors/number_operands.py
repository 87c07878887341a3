"""Operators of a tensor and a number that is not known yet: with a scalar tensor they may give the same bits."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

_ALIKE = frozenset({"mul", "mul_", "add", "add_", "sub", "sub_", "__rsub__"})
"""Functions of a tensor and a number that round as they do for a scalar tensor of the first one's dtype."""
_COMPARISONS = frozenset({"lt", "le", "gt", "ge", "eq", "ne"})
"""Functions that round a number to the tensor's dtype first."""
_QUOTIENTS = {"div": Tensor.mul, "div_": Tensor.mul_}
"""So do these on the host; on CUDA devices they are these products with a reciprocal (``div_true_kernel_cuda``)."""
_EXACT = (torch.float32, torch.float64)
_NARROW = (torch.float16, torch.bfloat16)
"""Operands of these are converted to single precision, and so is the number; the result is converted back."""
_WIDENING = {"cuda": frozenset({"mul", "add", "sub", "__rsub__"}), "cpu": frozenset({"mul", "div"})}
"""Functions that do so, by device: sums on the host round the number first."""


def with_operand(function: Any, tensor: Any, number: Any) -> Tensor | None:
    """What ``function`` of torch gives for ``tensor`` and a deferred ``number``, computed with a scalar tensor; None if
    that would not give the bits that the number itself gives.
    """
    if not (isinstance(tensor, Tensor) and tensor.dtype in (*_EXACT, *_NARROW) and tensor.layout is torch.strided):
        return None
    alike, device = function, tensor.device
    if function.__name__ in _QUOTIENTS and device.type == "cuda":
        alike, number = _QUOTIENTS[function.__name__], number._computed(inverse, (number,), float)
    name, dtype = alike.__name__, tensor.dtype
    wide = dtype if dtype in _EXACT else torch.float32
    known = _WIDENING.get(device.type, ()) if dtype is not wide else (*_ALIKE, *_QUOTIENTS, *_COMPARISONS)
    operand = number._reader.tensor_of(number, wide, device) if name in known else None
    if operand is None:
        return None
    return alike(tensor, operand) if dtype is wide else alike(tensor.to(wide), operand).to(dtype)


def inverse(number: Any) -> float:
    """What torch multiplies with on CUDA devices where it divides by a number."""
    return 1.0 / number if number else math.copysign(math.inf, number)
