"""What code can tell of a tensor without an operator: that it is there, its class, its geometry."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.parameter import is_lazy

from graphplan.owners.kinds import PLAIN


class StandIn:
    """Stands for what is no value; ``text`` is what messages have of it."""

    def __init__(self, text: str) -> None:
        self.text = text

    def __repr__(self) -> str:
        return self.text


ABSENT = StandIn("nothing")
"""For what a place holds in which there is nothing, or nothing that could be compared."""
THERE = StandIn("a tensor")
"""For the metadata of a tensor, or a tuple with tensors, of which it only matters that it is there."""


class TensorMetadata(NamedTuple):
    """What one tensor is like, apart from its values and from where it lies."""

    kind: type
    shape: tuple[int, ...] | None
    dtype: torch.dtype
    device: torch.device
    layout: torch.layout
    stride: tuple[int, ...] | None
    requires_grad: bool

    def __repr__(self) -> str:
        return f"a {self.kind.__name__}"


def metadata_of(value: Any) -> Any:
    """The metadata of a tensor, of the tensors and plain values in a tuple, or of anything else, which is itself."""
    if isinstance(value, tuple):
        return tuple(map(_metadata_of_item, value))
    if not isinstance(value, Tensor):
        return value
    has_shape = not value.is_nested and not is_lazy(value)
    is_strided = value.layout is torch.strided and has_shape
    return TensorMetadata(
        type(value),
        tuple(value.shape) if has_shape else None,
        value.dtype,
        value.device,
        value.layout,
        tuple(value.stride()) if is_strided else None,
        value.requires_grad,
    )


def _metadata_of_item(item: Any) -> Any:
    # What else lies in a tuple is looked at where it lies: here it may not be kept alive.
    return metadata_of(item) if isinstance(item, (tuple, Tensor)) or type(item) in PLAIN else type(item)


def is_there(metadata: Any) -> bool:
    """Whether these are metadata of a tensor, or of what is in a tuple."""
    return isinstance(metadata, tuple)


def difference(path: str, old: Any, new: Any) -> tuple[str, str, str]:
    """What differs between two unequal metadata of what lies at ``path``: its name, what it was, and what it is."""
    if isinstance(old, TensorMetadata) and isinstance(new, TensorMetadata):
        if old.kind is not new.kind:
            return f"the type of {path}", old.kind.__name__, new.kind.__name__
        facts = zip(TensorMetadata._fields, old, new, strict=True)
        name, was, now = next((name, was, now) for name, was, now in facts if was != now)
        return f"{path}.{name}", repr(was), repr(now)
    return path, repr(old), repr(new)
