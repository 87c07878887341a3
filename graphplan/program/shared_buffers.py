"""Memory that callers share: static outputs, and inputs that callers fill in place.

A replay with static outputs returns its own memory as tensors that store the version of that memory, as do their views:
using one after the next replay raises. Inputs in shared memory need no copy: a program that is captured on them uses
that memory as its static input.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from graphplan.errors import StaleError
from graphplan.specs.roles import TensorSpec
from graphplan.tensors.dtensors import is_sharded
from graphplan.tensors.storages import storage_id


class SharedBuffer:
    """One tensor that callers share. ``version`` counts the writes to it; ``writable``: programs may write to it."""

    __slots__ = ("__weakref__", "name", "tensor", "version", "writable")

    def __init__(self, tensor: Tensor, name: str, *, writable: bool = False) -> None:
        self.tensor = tensor
        self.name = name
        self.version = 0
        self.writable = writable
        _SHARED[_place(tensor)] = self


_SHARED: weakref.WeakValueDictionary[Any, SharedBuffer] = weakref.WeakValueDictionary()
"""Shared buffers by memory. While one exists, no other tensor can get its memory."""


def _place(tensor: Tensor) -> Any:
    return (storage_id(tensor), tensor.storage_offset(), tensor.shape, tensor.stride(), tensor.dtype)


def find_shared(tensor: Tensor) -> SharedBuffer | None:
    """Return the buffer of exactly this memory; None if there is none."""
    if not _SHARED or is_sharded(tensor) or tensor.requires_grad:
        return None
    return _SHARED.get(_place(tensor))


class StaticOutput(Tensor):
    """A result that the next replay overwrites. Using it after that raises; to keep it, copy it before."""

    _buffer: SharedBuffer
    _buffer_version: int

    @classmethod
    def of(cls, buffer: SharedBuffer) -> StaticOutput:
        """Return the buffer's tensor, valid until the next write."""
        return cls._marked(buffer.tensor, buffer, buffer.version)

    @classmethod
    def _marked(cls, tensor: Tensor, buffer: SharedBuffer, version: int) -> StaticOutput:
        marked = tensor.as_subclass(cls)
        marked._buffer = buffer
        marked._buffer_version = version
        return marked

    def plain(self) -> Tensor:
        """Return an ordinary tensor on the same memory, whose later uses are not checked."""
        with torch._C.DisableTorchFunctionSubclass():
            self._check()
            found = self.as_subclass(Tensor)
            if len(marks := vars(self)) > len(StaticOutput.__annotations__):
                # The caller has set attributes.
                vars(found).update({name: marks[name] for name in marks.keys() - StaticOutput.__annotations__.keys()})
            return found

    def _check(self) -> None:
        buffer = self._buffer
        if buffer.version != self._buffer_version:
            raise StaleError(
                f"{buffer.name} of an earlier replay is used after a later replay has overwritten it; expected its use "
                "before the function is called again. Keep a .clone() of it, or pass outputs='clone'"
            )

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Sequence[type], args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        with torch._C.DisableTorchFunctionSubclass():
            used = [leaf for leaf in pytree.tree_leaves((args, dict(kwargs))) if isinstance(leaf, StaticOutput)]
            if func not in _HARMLESS:
                for output in used:
                    output._check()
            result = func(*args, **kwargs)
            if isinstance(result, Tensor | tuple | list):
                by_storage = {storage_id(output): output for output in used}
                result = pytree.tree_map_only(Tensor, lambda tensor: _mark_view(tensor, by_storage), result)
            return result

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        with torch._C.DisableTorchFunctionSubclass():
            is_stale = self._buffer.version != self._buffer_version
        return f"StaticOutput(overwritten {TensorSpec.of(self.plain_memory())})" if is_stale else repr(self.plain())

    def plain_memory(self) -> Tensor:
        """Return the memory as an ordinary tensor, even if it was overwritten."""
        with torch._C.DisableTorchFunctionSubclass():
            return self.as_subclass(Tensor)

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.plain().clone().__reduce_ex__(protocol)

    def __deepcopy__(self, memo: Any) -> Tensor:
        return self.plain().clone()


def _mark_view(tensor: Tensor, by_storage: Mapping[int | None, StaticOutput]) -> Tensor:
    source = by_storage.get(storage_id(tensor)) if type(tensor) is Tensor else None
    return tensor if source is None else StaticOutput._marked(tensor, source._buffer, source._buffer_version)


_FACTS = ("shape", "dtype", "device", "layout", "ndim", "requires_grad", "is_cuda", "is_meta", "is_nested", "is_sparse")
_HARMLESS = {
    *(vars(torch._C.TensorBase)[name].__get__ for name in _FACTS if name in vars(torch._C.TensorBase)),
    Tensor.size, Tensor.dim, Tensor.stride, Tensor.numel, Tensor.is_floating_point, Tensor.element_size,
}  # fmt: skip
"""Functions that are allowed on an overwritten tensor: none reads its values."""


def plain(value: Any) -> Any:
    """Return ``value`` with ordinary tensors in place of static outputs."""
    if not _SHARED:
        return value
    if type(value) is StaticOutput:
        return value.plain()
    if isinstance(value, Tensor | int | float | str | None):
        return value
    if not any(isinstance(leaf, StaticOutput) for leaf in pytree.tree_leaves(value)):
        # Return the caller's own container, which a step may change.
        return value
    return pytree.tree_map_only(StaticOutput, StaticOutput.plain, value)
