"""DTensors: tensors that are spread over processes.

A DTensor has no memory of its own: its shard is another tensor, and that is what operators work on.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn


def loaded(module: str, name: str) -> Any:
    """A class of torch.distributed's, or nothing: before it was imported, nothing can be of it."""
    return getattr(sys.modules.get(module), name, ())


def is_sharded(tensor: Any) -> bool:
    """Whether ``tensor`` is a DTensor."""
    # What most are is told without a look at what was imported.
    return type(tensor) not in (Tensor, nn.Parameter) and isinstance(
        tensor, loaded("torch.distributed.tensor", "DTensor")
    )


def local(tensor: Tensor) -> Tensor:
    """The tensor that has ``tensor``'s memory: a DTensor's shard in this process, any other tensor itself."""
    if not is_sharded(tensor):
        return tensor
    shard: Tensor = tensor._local_tensor  # type: ignore[attr-defined]
    return shard


def is_wrapped(types: Sequence[type]) -> bool:
    """Whether an operator gets tensors that stand for others (by their types): their own dispatch calls operators on
    those, and what watches operators is to see these.
    """
    if not types:
        return False
    wrappers = (
        loaded("torch.distributed.tensor", "DTensor"),
        loaded("torch.distributed._functional_collectives", "AsyncCollectiveTensor"),
    )
    return any(issubclass(kind, wrappers) for kind in types)


def is_imagined() -> bool:
    """Whether operators compute nothing at the moment: DTensors learn so what the shape of a result will be."""
    return torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.FAKE) is not None
