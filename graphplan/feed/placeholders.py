"""Placeholders, which a trace passes instead of fed Python values (file names, arrays) that the step may not read.

Code may pass a placeholder on, unpack its container and store it, and ``isinstance`` sees the value's class. Any other
use raises :class:`ReadSignal`; the call is then undone and run again with the values.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from graphplan.tensors.deferred import HostCopy, is_deferred


class ReadSignal(BaseException):
    """Raised when leaves at ``indices`` or ``symbolic`` numbers are read; ``except Exception`` does not catch it."""

    def __init__(self, indices: Iterable[int] = (), *, symbolic: Iterable[str] | None = None) -> None:
        super().__init__()
        self.indices = tuple(indices)
        self.symbolic = None if symbolic is None else frozenset(symbolic)


class Placeholder:
    """Stand-in for the leaf at ``index``, of class ``kind``. Any use calls ``on_read()``, which raises."""

    __slots__ = ("_index", "_kind", "_on_read")

    def __init__(self, index: int, kind: type, on_read: Callable[[], Any]) -> None:
        object.__setattr__(self, "_index", index)
        object.__setattr__(self, "_kind", kind)
        object.__setattr__(self, "_on_read", on_read)

    def __getattribute__(self, name: str) -> Any:
        return object.__getattribute__(self, "_kind") if name == "__class__" else _read(self)


def _read(placeholder: Placeholder, *_: Any, **__: Any) -> Any:
    return object.__getattribute__(placeholder, "_on_read")()


_BINARY = "add sub mul matmul truediv floordiv mod divmod pow lshift rshift and xor or"
_OTHERS = (
    "abs neg pos invert index int float complex round trunc floor ceil bool len length_hint iter next reversed "
    "contains getitem setitem delitem setattr delattr call hash eq ne lt le gt ge str repr format bytes fspath enter "
    "exit aenter aexit aiter anext await dir sizeof reduce reduce_ex copy deepcopy get set buffer torch_function"
)
_SPECIAL = [*_OTHERS.split(), *(prefix + name for name in _BINARY.split() for prefix in ("", "r", "i"))]
for _name in _SPECIAL:
    # The interpreter looks special methods up on the class and skips `__getattribute__`.
    setattr(Placeholder, f"__{_name}__", _read)


def index_of(placeholder: Placeholder) -> int:
    """Return the index of the placeholder's leaf. This does not count as a use."""
    index: int = object.__getattribute__(placeholder, "_index")
    return index


def is_placeholder(value: Any) -> bool:
    """Return True for a placeholder. This does not count as a use."""
    return type(value) is Placeholder


def is_stand_in(value: Any) -> bool:
    """Return True for a placeholder, a deferred number or a deferred host copy. This does not count as a use."""
    return is_placeholder(value) or is_deferred(value) or type(value) is HostCopy
