"""CUDA's rules for a step that is traced on the CPU: copies between a device and the host, which do nothing there, and
operators that wait for a device.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial, wraps
from typing import Any

import torch
from torch import Tensor
from torch.utils import _device
from torch.utils.weak import WeakIdKeyDictionary

from graphplan.errors import HostSyncError, TemporaryCopyError
from graphplan.observe.conversions import Conversions
from graphplan.observe.source import find_source
from graphplan.trace.mode import refuse_trace
from graphplan.trace.operator_schemas import AS_ON_DEVICE

_COPIES = ("cpu", "to", "type_as")
"""Methods of tensors that copy between devices. What reads values is refused on the CPU, too."""
_NO_CONSTANTS = ("rand", "empty", "normal")
"""How the names of those functions begin that make other tensors than constants."""


@contextmanager
def cuda_rules() -> Iterator[None]:
    """Refuse steps that are traced in the block for copies to the host, for copies of host memory to the device, and
    for operators that read on the host, though all their tensors are on the host.
    """
    on_host = WeakIdKeyDictionary()
    named = {getattr(function, "__name__", ""): function for function in _device._device_constructors()}
    makers: dict[str, Any] = {
        name: make
        for name, make in named.items()
        if name.startswith(_NO_CONSTANTS) and getattr(torch, name, None) is make
    }
    for name, function in makers.items():
        setattr(torch, name, _noting(function, on_host))
    for name in _COPIES:
        # Tensor inherits these from its class in C.
        setattr(Tensor, name, _copier(name, partial(_check_copy, name, on_host)))
    token = AS_ON_DEVICE.set(True)
    try:
        yield
    finally:
        AS_ON_DEVICE.reset(token)
        for name in _COPIES:
            delattr(Tensor, name)
        for name, function in makers.items():
            setattr(torch, name, function)


def _copier(name: str, check: Callable[..., None]) -> Callable[..., Any]:
    original = getattr(Tensor, name)

    @wraps(original)
    def method(self: Tensor, *args: Any, **kwargs: Any) -> Any:
        if _names_host(name, (*args, *kwargs.values())):
            # What only keeps the copy can wait for it.
            copy = Conversions.copy_of(self, args, kwargs)
            if copy is not None:
                return copy
        check((self, *args), kwargs)
        return original(self, *args, **kwargs)

    return method


def _names_host(name: str, targets: Sequence[Any]) -> bool:
    """Whether a copy is one to the host wherever the step runs: a device by name; ``self.device`` is not."""
    return name == "cpu" or any(isinstance(target, str) and target == "cpu" for target in targets)


def _noting(original: Callable[..., Any], on_host: WeakIdKeyDictionary) -> Callable[..., Any]:
    """A function that makes a tensor, which lies on the host unless a device is named or is the default."""

    @wraps(original)
    def make(*args: Any, **kwargs: Any) -> Any:
        made = original(*args, **kwargs)
        if kwargs.get("device") is None and type(made) is Tensor and made.device.type == "cpu":
            on_host[made] = True
        return made

    return make


def _check_copy(name: str, on_host: WeakIdKeyDictionary, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
    targets = (*args[1:], *kwargs.values())
    if _names_host(name, targets):
        refuse_trace(
            HostSyncError,
            f"the step copies a tensor to the host (.cpu(), .to()), and needs its values at {find_source()}: on a CUDA "
            "device that waits for all work before it, and a replay runs no Python that could use the copy. Return "
            "the tensor and copy it after the step; a copy that the step only returns or appends is made then",
        )
    elif args[0] in on_host and any(isinstance(target, Tensor | torch.device | str) for target in targets):
        refuse_trace(
            TemporaryCopyError,
            f"the step makes a tensor in host memory and copies it with .{name}() at {find_source()}: on a CUDA device "
            "a graph would copy from that address for ever. Make it on the device (device=...), or feed it to the step",
        )
