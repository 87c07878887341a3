"""Properties of a tensor that code can read without an operator: its existence, class and geometry."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.parameter import is_lazy

from graphplan.owners.kinds import PLAIN


class Sentinel:
    """A marker in the place of a value; messages show its ``text``."""

    def __init__(self, text: str) -> None:
        self.text = text

    def __repr__(self) -> str:
        return self.text


ABSENT = Sentinel("nothing")
"""The value of a place that holds nothing, or nothing that can be compared."""
EXISTS = Sentinel("a tensor")
"""The metadata of a tensor, or of a tuple with tensors, if only its existence matters."""


class TensorMetadata(NamedTuple):
    """Properties of one tensor, except its values and its address."""

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
    """Return the metadata of a tensor, or a tuple with the metadata of each item; any other value unchanged."""
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
    # Of other items only the type: they are compared elsewhere, and must not be kept alive here.
    return metadata_of(item) if isinstance(item, (tuple, Tensor)) or type(item) in PLAIN else type(item)


def is_there(metadata: Any) -> bool:
    """Return True if these are the metadata of a tensor or of a tuple."""
    return isinstance(metadata, tuple)


def difference(path: str, old: Any, new: Any) -> tuple[str, str, str]:
    """Return the first difference between two unequal metadata at ``path``: its name, the old and the new value."""
    if isinstance(old, TensorMetadata) and isinstance(new, TensorMetadata):
        if old.kind is not new.kind:
            return f"the type of {path}", old.kind.__name__, new.kind.__name__
        facts = zip(TensorMetadata._fields, old, new, strict=True)
        name, was, now = next((name, was, now) for name, was, now in facts if was != now)
        return f"{path}.{name}", repr(was), repr(now)
    return path, repr(old), repr(new)
