"""Operators of a tensor and a number that is not known yet: with a scalar tensor they may give the same bits."""

from __future__ import annotations

import math
import operator
from collections.abc import Mapping, Sequence
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
_WEIGHTS = {"add": "alpha", "sub": "alpha", "lerp": "weight"}
"""Functions of two tensors that take a number to weigh the second one with, and what they call it."""
_LISTS = "_foreach_"
_NEGATE: Any = torch._foreach_neg_
_GIVES_LIST = _NEGATE([torch.empty(0, device="cpu")]) is not None
"""Whether functions that write to the tensors of a list return that: some releases return nothing."""


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


def with_weight(function: Any, args: Sequence[Any], kwargs: Mapping[str, Any], number: Any) -> tuple[Any] | None:
    """What ``function`` of torch gives with the deferred ``number`` among its arguments, if that weighs tensors, as in
    an average of weights: ``addcmul`` and ``lerp`` with a scalar tensor round as ``add`` with ``alpha`` and ``lerp``
    with a number do. Their derivatives do not, so it is None where a gradient is asked for.
    """
    base = function.__name__.removeprefix(_LISTS).removesuffix("_")
    in_lists, in_place = function.__name__.startswith(_LISTS), function.__name__.endswith("_")
    is_named = len(args) == 2 and [*kwargs] == [_WEIGHTS.get(base)]
    if is_named or (base == "lerp" and len(args) == 3 and not kwargs):
        given = args[:2]
    elif in_lists and base == "mul" and len(args) == 2 and not kwargs:
        given = args[:1]
    else:
        return None
    if in_lists and not all(isinstance(tensors, list | tuple) and len(tensors) == len(args[0]) for tensors in given):
        return None
    pairs = list(zip(*given, strict=True)) if in_lists else [tuple(given)]
    tensors = [tensor for pair in pairs for tensor in pair]
    if not tensors or not all(map(_may_be_weighed, tensors)) or len({(t.dtype, t.device) for t in tensors}) > 1:
        return None
    # A factor that is the same for several elements is multiplied in another order.
    if any(other.shape != first.shape for first, *others in pairs for other in others):
        return None
    factor = number._computed(operator.neg, (number,), number._kind) if base == "sub" else number
    weight = number._reader.tensor_of(factor, tensors[0].dtype, tensors[0].device)
    if weight is None:
        return None
    name = {"add": "addcmul", "sub": "addcmul"}.get(base, base) + "_" * in_place
    made = [getattr(first, name)(*others, weight) for first, *others in pairs]
    if not in_lists:
        return (made[0],)
    return (tuple(made) if not in_place else args[0] if _GIVES_LIST else None,)


def _may_be_weighed(tensor: Any) -> bool:
    is_plain = isinstance(tensor, Tensor) and tensor.dtype in _EXACT and tensor.layout is torch.strided
    return is_plain and not (tensor.requires_grad and torch.is_grad_enabled())


def inverse(number: Any) -> float:
    """What torch multiplies with on CUDA devices where it divides by a number."""
    return 1.0 / number if number else math.copysign(math.inf, number)
