"""Constants that a capture should not copy from the host.

``torch.tensor(number, device="cuda")`` copies from a temporary, which a graph cannot hold. Under this mode it becomes a
fill with the same value. The mode is entered only for steps whose trace has such constants, since torch's modules leave
their fast paths where a ``TorchFunctionMode`` is active.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode


class DeviceConstants(TorchFunctionMode):
    """Makes zero-dimensional tensors of Python numbers on the device."""

    def __torch_function__(
        self, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func in (torch.tensor, torch.as_tensor) and len(args) == 1:
            filled = _fill(args[0], kwargs)
            if filled is not None:
                return filled
        return func(*args, **kwargs)


def _fill(data: Any, kwargs: dict[str, Any]) -> Tensor | None:
    """``torch.tensor(data, ...)`` as a fill, if ``data`` is a number that goes to another device than the host."""
    device = kwargs.get("device")
    if device is None or torch.device(device).type == "cpu" or not isinstance(data, bool | int | float):
        return None
    filled = torch.full((), data, dtype=kwargs.get("dtype"), device=device)
    return filled.requires_grad_() if kwargs.get("requires_grad") else filled
