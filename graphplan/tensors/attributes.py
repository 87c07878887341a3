"""What code hung on a tensor: attributes in its dictionary, a class of its own. A copy of the tensor has neither."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.nn.parameter import is_lazy

PLAIN_KINDS = frozenset({Tensor, Parameter})
"""Classes of tensors whose operators are torch's own."""
_is_transformed = torch._C._functorch.is_functorch_wrapped_tensor


def has_memory(tensor: Tensor) -> bool:
    """Return True if ``tensor`` has values: it is not meta, fake, lazy, nested, nor of a transform of torch.func."""
    if type(tensor) not in PLAIN_KINDS:
        fake = getattr(sys.modules.get("torch._subclasses.fake_tensor"), "FakeTensor", ())
        if is_lazy(tensor) or isinstance(tensor, fake):
            return False
    return not (tensor.is_meta or tensor.is_nested or _is_transformed(tensor))


def is_freed(tensor: Tensor) -> bool:
    """Return True if the memory of ``tensor`` was freed, as FSDP frees gathered parameters after their use."""
    return tensor.layout is torch.strided and tensor.numel() > 0 and tensor.untyped_storage().nbytes() == 0


attributes_on: Callable[[Tensor], dict[str, Any]] = vars
"""The attributes that code has set on a tensor. Asked of all tensors before each replay: without a frame of its own."""


def has_own_operators(tensor: Tensor) -> bool:
    """Return True if the class of ``tensor`` has its own ``__torch_dispatch__``."""
    own: Any = type(tensor).__torch_dispatch__
    return own is not torch._C._disabled_torch_dispatch_impl


def dressed(static: Tensor, leaf: Any) -> Tensor:
    """``static``, which stands for the fed ``leaf`` while a step is recorded, with the class and attributes of that."""
    if not issubclass(type(leaf), Tensor) or leaf.requires_grad:
        return static
    kind, marks = type(leaf), attributes_on(leaf)
    if kind is Tensor and not marks:
        return static
    worn = static.detach() if kind is Tensor else static.as_subclass(kind)
    vars(worn).update(marks)
    return worn
