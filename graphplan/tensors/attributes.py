"""Attributes and subclasses of tensors. A copy of a tensor has neither the attributes nor the subclass."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.nn.parameter import is_lazy

PLAIN_KINDS = frozenset({Tensor, Parameter})
"""Tensor classes without operators of their own."""
_STOCK_FUNCTIONS: Any = Tensor.__torch_function__
_is_transformed = torch._C._functorch.is_functorch_wrapped_tensor


def is_plain(tensor: Tensor) -> bool:
    """Return True if the memory of ``tensor`` holds its values: it is no wrapper, sparse, quantized or conjugated."""
    is_strided = type(tensor) in PLAIN_KINDS and tensor.layout is torch.strided
    # The host resolves a conjugated or negated copy, for which it would have to wait.
    return is_strided and not (tensor.is_quantized or tensor.is_conj() or tensor.is_neg())


def has_memory(tensor: Tensor) -> bool:
    """Return True if ``tensor`` has values: it is not meta, fake, lazy, nested or wrapped by a torch.func transform."""
    if type(tensor) not in PLAIN_KINDS:
        fake = getattr(sys.modules.get("torch._subclasses.fake_tensor"), "FakeTensor", ())
        if is_lazy(tensor) or isinstance(tensor, fake):
            return False
    return not (tensor.is_meta or tensor.is_nested or _is_transformed(tensor))


def is_freed(tensor: Tensor) -> bool:
    """Return True if the storage of ``tensor`` was freed, as FSDP frees gathered parameters after use."""
    return tensor.layout is torch.strided and tensor.numel() > 0 and tensor.untyped_storage().nbytes() == 0


attributes_on: Callable[[Tensor], dict[str, Any]] = vars
"""Attributes that code has set on a tensor. It runs for every tensor before each replay; ``vars`` adds no frame."""


def has_own_operators(tensor: Tensor) -> bool:
    """Return True if the class of ``tensor`` has its own ``__torch_dispatch__``."""
    own: Any = type(tensor).__torch_dispatch__
    return own is not torch._C._disabled_torch_dispatch_impl


def has_own_functions(tensor: Tensor) -> bool:
    """Return True if the class of ``tensor`` has its own ``__torch_function__``."""
    own: Any = type(tensor).__torch_function__
    return getattr(own, "__func__", None) is not _STOCK_FUNCTIONS.__func__


def with_class_and_attributes(static: Tensor, leaf: Any) -> Tensor:
    """Return ``static``, which replaces the fed ``leaf`` in a recording, with the class and attributes of ``leaf``."""
    if not issubclass(type(leaf), Tensor) or leaf.requires_grad:
        return static
    kind, marks = type(leaf), attributes_on(leaf)
    if kind is Tensor and not marks:
        return static
    worn = static.detach() if kind is Tensor else static.as_subclass(kind)
    vars(worn).update(marks)
    return worn
