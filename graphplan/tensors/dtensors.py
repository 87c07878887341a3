"""DTensors, which are spread over processes and have no memory of their own: operators work on their shard."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from graphplan.tensors.attributes import PLAIN_KINDS


def loaded(module: str, name: str) -> Any:
    """A class of torch.distributed's; nothing before its module was imported."""
    return getattr(sys.modules.get(module), name, ())


def is_sharded(tensor: Any) -> bool:
    """Whether ``tensor`` is a DTensor."""
    # Most are decided by their type.
    return type(tensor) not in PLAIN_KINDS and isinstance(tensor, loaded("torch.distributed.tensor", "DTensor"))


def local(tensor: Tensor) -> Tensor:
    """The tensor that has ``tensor``'s memory: a DTensor's shard in this process, any other tensor itself."""
    if not is_sharded(tensor):
        return tensor
    shard: Tensor = tensor._local_tensor  # type: ignore[attr-defined]
    return shard


def is_wrapped(types: Sequence[type]) -> bool:
    """Whether an operator gets what stands for tensors, by types: their dispatch calls what watchers should see."""
    if not types:
        return False
    wrappers = (
        loaded("torch.distributed.tensor", "DTensor"),
        loaded("torch.distributed._functional_collectives", "AsyncCollectiveTensor"),
    )
    return any(issubclass(kind, wrappers) for kind in types)


def is_imagined() -> bool:
    """Return True under a ``FakeTensorMode``, by which DTensors learn the shape of a result."""
    return torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.FAKE) is not None
