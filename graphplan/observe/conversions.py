"""Reads of tensors that no dispatch mode hears of: torch turns its modes off while it makes a tensor of a list, and
asks each tensor in the list for a number as Python does, by ``t.__float__()`` and the like; and where
``torch.tensor_split`` takes indices from a tensor it looks straight at their memory.

A profile function does not hear of the first either, and in the second not of the arguments. So these methods are
others while a watcher is there. So is ``torch.nn.functional.one_hot``, which on the host reads classes only to see
whether they are in range, where it is told how many there are. And so are ``Tensor.tolist`` and the like: a recording
of a step whose traces had a profile function is spared that. Calls of scripted code are watched as well
(:mod:`graphplan.observe.scripts`).
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import wraps
from threading import Lock, get_ident, local
from typing import Any, ClassVar

import torch
from torch import Tensor

from graphplan.observe.scripts import leave_scripts, watch_scripts
from graphplan.observe.watching import is_silent

_IN_PYTHON = ("tolist", "numpy", "apply_", "map_", "map2_")
"""Methods that give Python what a tensor holds, the last ones element by element to a function."""
READERS = {name: f"Tensor.{name}" for name in _IN_PYTHON}
READERS |= dict.fromkeys(("_to_dlpack", "_to_dlpack_versioned"), "Tensor.__dlpack__")
"""Functions in C that look at a tensor's memory, which a profile function does hear of, and what leads to them."""
_NUMBERS = ("__float__", "__index__", "__int__", "__bool__", "__complex__")
_OF_LIST = "torch.tensor, as_tensor, new_tensor or the like of a list with tensors in it (torch.stack does without)"
_OF_INDICES = "torch.tensor_split with indices in a tensor (a list of numbers does without)"
_PATIENCE = 1.0
"""Seconds: Ctrl-C may come before the lock is given back, so waits are short."""


class Conversions:
    """While it is entered, ``on_read(what, tensor)`` is called for each such read by the thread that entered it, with
    None where the tensor is not known. ``on_item(tensor)`` gives what ``tensor.item()`` gives. Of several, the
    innermost that has such a function is asked.
    """

    _entered: ClassVar[list[Conversions]] = []
    """Of all threads, inner ones last."""
    _lock: ClassVar[Any] = Lock()

    def __init__(
        self,
        on_read: Callable[[str, Tensor | None], None] | None = None,
        on_item: Callable[[Tensor], Any] | None = None,
    ) -> None:
        self._on_read, self._on_item = on_read, on_item
        self._thread = 0

    def __enter__(self) -> Conversions:
        self._thread = get_ident()
        self._change(self._entered.append)
        return self

    def __exit__(self, *exc: object) -> None:
        self._change(self._entered.remove)

    def _change(self, change: Callable[[Conversions], None]) -> None:
        is_held = self._lock.acquire(timeout=_PATIENCE)
        try:
            change(self)
            if not self._entered:
                _put_back()
            elif "__float__" not in vars(Tensor):
                _replace()
        finally:
            if is_held:
                self._lock.release()

    @classmethod
    def tell(cls, what: str, tensor: Tensor | None = None) -> None:
        """Tell who watches this thread."""
        for watch in reversed(cls._entered):
            if watch._thread == get_ident() and watch._on_read is not None:
                watch._on_read(what, tensor)
                return

    @classmethod
    def item_of(cls, tensor: Tensor) -> Any:
        """What ``tensor.item()`` gives in this thread."""
        for watch in reversed(cls._entered):
            if watch._thread == get_ident() and watch._on_item is not None:
                return watch._on_item(tensor)
        return torch._C.TensorBase.item(tensor)


def _number(name: str) -> Callable[..., Any]:
    convert = getattr(torch._C.TensorBase, name)

    @wraps(convert)
    def converting(self: Tensor) -> Any:
        # Where modes are on, they hear of the operator.
        if torch._C._dispatch_tls_is_dispatch_key_excluded(torch._C.DispatchKey.Python):
            Conversions.tell(_OF_LIST)
        return convert(self)

    return converting


def _reader(name: str, home: Any) -> Callable[..., Any]:
    read = getattr(home, name)

    @wraps(read)
    def reading(tensor: Tensor, /, *args: Any, **kwargs: Any) -> Any:
        if not is_silent(sys._getframe(1).f_code):
            Conversions.tell(READERS[name], tensor)
        return read(tensor, *args, **kwargs)

    return reading


@wraps(torch._C.TensorBase.item)
def _item(self: Tensor) -> Any:
    return Conversions.item_of(self)


def _split(split: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(split)
    def splitting(*args: Any, **kwargs: Any) -> Any:
        given = [*args[1:], *(value for name, value in kwargs.items() if name != "input")]
        # One index is read by an operator.
        if any(isinstance(value, Tensor) and value.dim() for value in given):
            Conversions.tell(_OF_INDICES)
        return split(*args, **kwargs)

    return splitting


class _Validating(local):
    depth = 0


_VALIDATING = _Validating()


def validates() -> bool:
    """Return True while this thread is within a function that reads values only to see whether they are in range."""
    return _VALIDATING.depth > 0


def _one_hot(*args: Any, **kwargs: Any) -> Any:
    is_told = (args[1] if len(args) > 1 else kwargs.get("num_classes", -1)) != -1
    _VALIDATING.depth += is_told
    try:
        return _ONE_HOT(*args, **kwargs)
    finally:
        _VALIDATING.depth -= is_told


_SPLIT = torch.tensor_split
_ONE_HOT: Callable[..., Any] = torch.nn.functional.one_hot
_METHODS = {name: _number(name) for name in _NUMBERS} | {"tensor_split": _split(torch._C.TensorBase.tensor_split)}
_METHODS |= {name: _reader(name, torch._C.TensorBase) for name in _IN_PYTHON} | {"item": _item}
_EXPORTS = {name: getattr(torch._C, name) for name in READERS if hasattr(torch._C, name)}


def _replace() -> None:
    for name, method in _METHODS.items():
        if name not in vars(Tensor):
            # Where a user has a method, that stays: it reads at once.
            setattr(Tensor, name, method)
    for name in _EXPORTS:
        setattr(torch._C, name, _reader(name, torch._C))
    torch.tensor_split = _split(_SPLIT)
    torch.nn.functional.one_hot = wraps(_ONE_HOT)(_one_hot)
    watch_scripts(Conversions.tell)


def _put_back() -> None:
    for name, method in _METHODS.items():
        if vars(Tensor).get(name) is method:
            # What torch's class inherits shows again.
            delattr(Tensor, name)
    for name, export in _EXPORTS.items():
        setattr(torch._C, name, export)
    torch.tensor_split = _SPLIT
    torch.nn.functional.one_hot = _ONE_HOT
    leave_scripts()
