"""Operators of a tensor and a deferred number: many give the same bits with a scalar tensor in place of the number."""

from __future__ import annotations

import math
import operator
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

_GIVEN = frozenset({"mul", "mul_", "add", "add_", "sub", "sub_"})
"""Functions that run the same single operator, whether the last argument is a number or a scalar tensor."""
_ALIKE = _GIVEN | {"__rsub__"}
"""Functions that round alike for a number and for a scalar tensor of the other tensor's dtype."""
_COMPARISONS = frozenset({"lt", "le", "gt", "ge", "eq", "ne"})
"""Functions that first round a number to the tensor's dtype."""
_QUOTIENTS = {"div": Tensor.mul, "div_": Tensor.mul_}
"""On the host these also round the number first; on CUDA they multiply by its reciprocal (``div_true_kernel_cuda``)."""
_EXACT = (torch.float32, torch.float64)
_NARROW = (torch.float16, torch.bfloat16)
"""Tensors of these dtypes and the number are converted to single precision, and the result is converted back."""
_WIDENING = {"cuda": frozenset({"mul", "add", "sub", "__rsub__"}), "cpu": frozenset({"mul", "div"})}
"""Functions that convert so, by device. Sums on the host round the number to the narrow dtype first."""
_WEIGHTS = {"add": "alpha", "sub": "alpha", "lerp": "weight"}
"""Functions of two tensors with a weight for the second one, and the weight's keyword."""
_PUT = {"fill_": (1,), "masked_fill": (2,), "__setitem__": (2,), "where": (1, 2)}
"""Functions that write a number into a tensor, rounded to its dtype, and the number's possible positions."""
_MADE = frozenset({"full", "full_like", "new_full"})
"""Functions that make a tensor filled with their last argument."""
_BOUNDS = {"clamp": ("min", "max"), "clip": ("min", "max"), "clamp_min": ("min",), "clamp_max": ("max",)}
"""Functions that clamp the values of a tensor, and the keywords of their bounds."""
_LISTS = "_foreach_"
_NEGATE: Any = torch._foreach_neg_
_GIVES_LIST = _NEGATE([torch.empty(0, device="cpu")]) is not None
"""Whether in-place ``_foreach_`` functions return the list: some releases of torch return None."""


def with_operand(function: Any, tensor: Any, number: Any) -> Tensor | None:
    """Return ``function`` of ``tensor`` and a scalar tensor for the deferred ``number``; None if bits may differ."""
    if not (isinstance(tensor, Tensor) and tensor.dtype in (*_EXACT, *_NARROW) and tensor.layout is torch.strided):
        return None
    if function.__name__ == "__rdiv__":
        # This is how torch divides a number by a tensor.
        return with_operand(Tensor.mul, tensor.reciprocal(), number)
    alike, device = function, tensor.device
    if function.__name__ in _QUOTIENTS and device.type == "cuda":
        alike, number = _QUOTIENTS[function.__name__], number._computed(inverse, (number,), float)
    name, dtype = alike.__name__, tensor.dtype
    wide = dtype if dtype in _EXACT else torch.float32
    known = _WIDENING.get(device.type, ()) if dtype is not wide else (*_ALIKE, *_QUOTIENTS, *_COMPARISONS)
    is_operand = alike is function and dtype is wide and name in _GIVEN
    operand = number._reader.tensor_of(number, wide, device, is_operand=is_operand) if name in known else None
    if operand is None:
        return None
    return alike(tensor, operand) if dtype is wide else alike(tensor.to(wide), operand).to(dtype)


def with_value(function: Any, args: Sequence[Any], kwargs: Mapping[str, Any], number: Any) -> tuple[Any] | None:
    """Return the result of a ``function`` that only writes the deferred ``number`` into a tensor; None for others."""
    name = function.__name__
    place = next((at for at, each in enumerate(args) if each is number), 0)
    if name in _MADE and place == len(args) - 1:
        made = function(*args[:-1], number._kind(), **kwargs)
        operand = number._reader.tensor_of(number, made.dtype, made.device)
        with torch.no_grad():
            return (made.fill_(number if operand is None else operand),)
    if place not in _PUT.get(name, ()) or kwargs or (name == "__setitem__" and _selects(args[1])):
        return None
    target = args[3 - place] if name == "where" else args[0]
    if not (isinstance(target, Tensor) and target.layout is torch.strided):
        return None
    if name == "where" and not target.is_floating_point():
        return None
    if name == "masked_fill" and not target.is_contiguous():
        return None
    operand = number._reader.tensor_of(number, target.dtype, target.device)
    if operand is not None and name == "masked_fill":
        # masked_fill reads a scalar tensor on the host.
        return (torch.where(args[1], operand, target),)
    return None if operand is None else (function(*args[:place], operand, *args[place + 1 :]),)


def _selects(index: Any) -> bool:
    """Return True if an index has tensors or lists: then torch treats a number differently from a tensor."""
    return any(isinstance(each, Tensor | list) for each in (index if isinstance(index, tuple) else (index,)))


def with_bounds(
    function: Any, args: Sequence[Any], kwargs: Mapping[str, Any], numbers: Sequence[Any]
) -> tuple[Any] | None:
    """Return the result of a ``function`` that clamps a tensor with deferred ``numbers``; None for others."""
    base, end = function.__name__.removesuffix("_"), "_" * function.__name__.endswith("_")
    names = _BOUNDS.get(base, ())
    bounds = {**dict(zip(names, args[1:], strict=False)), **kwargs}
    if not bounds or bounds.keys() - names or len(args) > len(names) + 1 or not _is_exact(args[0]):
        return None
    deferred = set(map(id, numbers))
    for name, bound in bounds.items():
        if id(bound) in deferred:
            bounds[name] = bound._reader.tensor_of(bound, args[0].dtype, args[0].device)
            if bounds[name] is None:
                return None
    out = args[0]
    # One clamp call takes two tensors or two numbers, not one of each.
    for name in ("min", "max"):
        if bounds.get(name) is not None:
            out = getattr(out, f"clamp_{name}{end}")(bounds[name])
    return (out,)


def with_weight(function: Any, args: Sequence[Any], kwargs: Mapping[str, Any], number: Any) -> tuple[Any] | None:
    """Return the result of a ``function`` that weighs tensors with the deferred ``number``, as an average of weights
    does; None for others. ``addcmul`` and ``lerp`` with a scalar tensor round as ``add`` with ``alpha`` and ``lerp``
    with a number. Their derivatives do not, so the result is also None if a gradient is needed.
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
    # With broadcasting, the kernel multiplies in another order.
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
    return _is_exact(tensor) and not (tensor.requires_grad and torch.is_grad_enabled())


def _is_exact(tensor: Any) -> bool:
    return isinstance(tensor, Tensor) and tensor.dtype in _EXACT and tensor.layout is torch.strided


def inverse(number: Any) -> float:
    """Return the factor by which torch multiplies on CUDA devices instead of dividing by ``number``."""
    return 1.0 / number if number else math.copysign(math.inf, number)
