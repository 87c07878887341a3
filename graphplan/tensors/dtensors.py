"""DTensors, which are distributed over processes and have no storage: operators work on the local shard."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from graphplan.tensors.attributes import PLAIN_KINDS


def loaded(module: str, name: str) -> Any:
    """Return a class of torch.distributed, or ``()`` if its module is not imported."""
    return getattr(sys.modules.get(module), name, ())


def is_sharded(tensor: Any) -> bool:
    """Return True if ``tensor`` is a DTensor."""
    # The comparison of types is fast and decides most cases.
    return type(tensor) not in PLAIN_KINDS and isinstance(tensor, loaded("torch.distributed.tensor", "DTensor"))


def local(tensor: Tensor) -> Tensor:
    """Return the tensor that owns the memory: a DTensor's shard in this process, any other tensor itself."""
    if not is_sharded(tensor):
        return tensor
    shard: Tensor = tensor._local_tensor  # type: ignore[attr-defined]
    return shard


def is_wrapped(types: Sequence[type]) -> bool:
    """Return True if ``types`` has tensor wrappers, whose dispatch calls the operators that a mode should see."""
    wrappers = (
        loaded("torch.distributed.tensor", "DTensor"),
        loaded("torch.distributed._functional_collectives", "AsyncCollectiveTensor"),
    )
    return any(issubclass(kind, wrappers) for kind in types)


def is_imagined() -> bool:
    """Return True under a ``FakeTensorMode``, which DTensors use to compute the shape of a result."""
    return torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.FAKE) is not None
