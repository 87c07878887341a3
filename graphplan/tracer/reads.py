"""Reads of tensor values that never reach the dispatcher, and constants that should not be copied from the host.

``Tensor.tolist``, ``.numpy`` and ``np.asarray`` look straight at memory, so only a ``TorchFunctionMode`` sees them. The
same mode turns ``torch.tensor(number, device="cuda")``, which would copy from a temporary, into a fill with the same
value, which a graph can hold.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

_READS: dict[Any, str] = {
    Tensor.tolist: "Tensor.tolist",
    Tensor.numpy: "Tensor.numpy",
    Tensor.__array__: "Tensor.__array__ (np.asarray)",
    Tensor.__dlpack__: "Tensor.__dlpack__",
}


class HostReads(TorchFunctionMode):
    """Calls ``on_read(name)`` for each read behind the dispatcher; ``device`` is where the step computes."""

    def __init__(self, on_read: Callable[[str], None], device: torch.device | None) -> None:
        super().__init__()
        self._on_read = on_read
        self._off_host = device is not None and device.type != "cpu"

    def __torch_function__(
        self, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        name = _READS.get(func)
        if name is not None:
            self._on_read(name)
        elif self._off_host and func in (torch.tensor, torch.as_tensor) and args:
            filled = _fill(args[0], args[1:], kwargs)
            if filled is not None:
                return filled
        return func(*args, **kwargs)


def _fill(data: Any, rest: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor | None:
    """``torch.tensor(data, ...)`` as a fill, if ``data`` is a number that goes to another device than the host."""
    device = kwargs.get("device")
    if rest or device is None or torch.device(device).type == "cpu" or not isinstance(data, bool | int | float):
        return None
    dtype = kwargs.get("dtype")
    filled = torch.full((), data, dtype=dtype, device=device)
    return filled.requires_grad_() if kwargs.get("requires_grad") else filled
