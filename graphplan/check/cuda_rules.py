"""CUDA's rules for a step that is traced on the CPU: copies between a device and the host, which do nothing there, and
operators that wait for a device.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial, wraps
from typing import Any

import torch
from torch import Tensor
from torch.utils import _device
from torch.utils.weak import WeakIdKeyDictionary

from graphplan.errors import HostSyncError, TemporaryCopyError
from graphplan.observe.conversions import Conversions
from graphplan.observe.replacements import Replacements
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
    rules = Replacements(partial(_replacements, WeakIdKeyDictionary()))
    token = AS_ON_DEVICE.set(True)
    rules.enter(token)
    try:
        yield
    finally:
        rules.leave(token)
        AS_ON_DEVICE.reset(token)


def _replacements(on_host: WeakIdKeyDictionary) -> Iterator[tuple[Any, str, Any]]:
    """What stands in for functions of torch: the holder, the name and the value of each. ``on_host`` are tensors that
    were made there.
    """
    for make in _device._device_constructors():
        name = getattr(make, "__name__", "")
        held: Any = getattr(torch, name, None)
        if name.startswith(_NO_CONSTANTS) and held is make:
            yield torch, name, _noting(held, on_host)
    for name in _COPIES:
        yield Tensor, name, _copier(name, on_host)


def _copier(name: str, on_host: WeakIdKeyDictionary) -> Callable[..., Any]:
    original = getattr(Tensor, name)

    @wraps(original)
    def method(self: Tensor, *args: Any, **kwargs: Any) -> Any:
        targets = (*args, *kwargs.values())
        # To the host wherever the step runs, by name; ``self.device`` is not.
        if name == "cpu" or any(isinstance(target, str) and target == "cpu" for target in targets):
            # What only keeps the copy can wait for it.
            copy = Conversions.copy_of(self, args, kwargs)
            if copy is not None:
                return copy
            refuse_trace(
                HostSyncError,
                f"the step copies a tensor to the host (.cpu(), .to()), and needs its values at {find_source()}: on a "
                "CUDA device that waits for all work before it, and a replay runs no Python that could use the copy. "
                "Return the tensor and copy it after the step; a copy that the step only returns or appends is made "
                "then",
            )
        elif self in on_host and any(isinstance(target, Tensor | torch.device | str) for target in targets):
            refuse_trace(
                TemporaryCopyError,
                f"the step makes a tensor in host memory and copies it with .{name}() at {find_source()}: on a CUDA "
                "device a graph would copy from that address for ever. Make it on the device (device=...), or feed it "
                "to the step",
            )
        return original(self, *args, **kwargs)

    return method


def _noting(original: Callable[..., Any], on_host: WeakIdKeyDictionary) -> Callable[..., Any]:
    """A function that makes a tensor, which lies on the host unless a device is named or is the default."""

    @wraps(original)
    def make(*args: Any, **kwargs: Any) -> Any:
        made = original(*args, **kwargs)
        if kwargs.get("device") is None and type(made) is Tensor and made.device.type == "cpu":
            on_host[made] = True
        return made

    return make
