"""Properties and addresses of tensors, compared by torch's own guards; ``tensors.h`` does the same in C++."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor
from torch.nn.parameter import is_lazy

from graphplan.tensors.attributes import attributes_on, has_memory

_guards: Any = torch._C._dynamo.guards
_addresses_are: Any = getattr(torch._C, "_tensors_data_ptrs_at_indices_equal", None)
"""A function of torch's CUDA builds that compares many addresses in one call."""
_wants_grad = attrgetter("requires_grad")
GEOMETRY = ("shape", "stride()", "dtype", "requires_grad")
"""Properties of a tensor that can change in place."""


def geometry(tensor: Tensor) -> tuple[Any, ...]:
    """Return the facts that :data:`GEOMETRY` names; for a lazy parameter, None in place of shape and strides."""
    if is_lazy(tensor):
        return (None, None, tensor.dtype, tensor.requires_grad)
    return (tensor.shape, tensor.stride(), tensor.dtype, tensor.requires_grad)


def _facts(tensor: Tensor) -> tuple[Any, ...]:
    return (type(tensor), tensor.device, torch._C._dispatch_keys(tensor).raw_repr(), *geometry(tensor))


class Addresses:
    """The memory addresses of some tensors, as ``pointers``."""

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        self.pointers = list(map(Tensor.data_ptr, tensors))
        self._indices = list(range(len(tensors)))

    def are_of(self, tensors: list[Tensor]) -> bool:
        """Return True if the same number of tensors has these addresses."""
        if _addresses_are is not None:
            return bool(_addresses_are(tensors, self.pointers, self._indices))
        return list(map(Tensor.data_ptr, tensors)) == self.pointers


class TorchTensors:
    """Properties of tensors, which are not kept alive; addresses if ``placed``, else whether all lack attributes."""

    def __init__(self, tensors: Sequence[Tensor], placed: bool) -> None:
        self._count = len(tensors)
        self._addresses = Addresses(tensors) if placed else None
        self._is_bare = not placed and not any(map(attributes_on, tensors))
        self._note(tensors)

    def _note(self, tensors: Sequence[Tensor]) -> None:
        self._known = list(map(_facts, tensors)) if self._addresses is not None else []
        # With gradient mode disabled, torch's guard ignores requires_grad.
        self._grad = torch.is_grad_enabled()
        self._wants_grad = list(map(_wants_grad, tensors))
        self._guard: Any = None
        # torch's guard reads the strides of all tensors, and does not turn an error from that into a Python exception.
        strided = all(tensor.layout is torch.strided and has_memory(tensor) for tensor in tensors)
        if tensors and strided:
            with suppress(RuntimeError, TypeError):
                self._guard = _guards.TensorGuards(*tensors, dynamic_dims_sizes=None, dynamic_dims_strides=None)

    def fit(self, tensors: list[Tensor]) -> bool:
        """Return True if these tensors have the same facts. Without ``placed``, False may also mean that torch's guard
        cannot tell: in other modes, or if one tensor occurs twice.
        """
        if len(tensors) != self._count or (self._is_bare and any(map(attributes_on, tensors))):
            return False
        if self._guard is None or torch.is_grad_enabled() is not self._grad or not self._guard.check(*tensors):
            return self._fit_closely(tensors)
        if self._addresses is not None and not self._addresses.are_of(tensors):
            return False
        return self._grad or list(map(_wants_grad, tensors)) == self._wants_grad

    def _fit_closely(self, tensors: list[Tensor]) -> bool:
        """Do :meth:`fit` without torch's guard, and make a new guard for the modes that are active now."""
        if self._addresses is None or not tensors:
            return not tensors
        # A tensor that has become sparse has no strides and no address.
        with suppress(RuntimeError):
            if list(map(_facts, tensors)) == self._known and self._addresses.are_of(tensors):
                self._note(tensors)
                return True
        return False
