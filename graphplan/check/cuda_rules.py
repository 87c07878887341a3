"""CUDA's rules for a step that is traced on the CPU: calls that do nothing there wait for a CUDA device."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from typing import Any

from torch import Tensor

from graphplan.errors import HostSyncError
from graphplan.observe.source import find_source
from graphplan.trace.mode import refuse_trace

_CONDITIONS: dict[str, Callable[..., bool]] = {
    "cpu": lambda *args, **kwargs: True,
    # A device by name is the host's wherever the step runs; ``self.device`` is not.
    "to": lambda *args, **kwargs: any(isinstance(one, str) and one == "cpu" for one in (*args[1:], *kwargs.values())),
}
"""Methods of tensors that copy to the host, and when. What reads values is refused on the CPU, too."""


@contextmanager
def cuda_rules() -> Iterator[None]:
    """Refuse steps that are traced in the block for copies to the host, though their tensors are there already."""
    # Tensor inherits both from its class in C.
    for name, waits in _CONDITIONS.items():
        setattr(Tensor, name, _refused(getattr(Tensor, name), name, waits))
    try:
        yield
    finally:
        for name in _CONDITIONS:
            delattr(Tensor, name)


def _refused(original: Callable[..., Any], name: str, waits: Callable[..., bool]) -> Callable[..., Any]:
    @wraps(original)
    def method(*args: Any, **kwargs: Any) -> Any:
        if waits(*args, **kwargs):
            refuse_trace(
                HostSyncError,
                f"the step copies a tensor to the host with .{name}() at {find_source()}: on a CUDA device that waits "
                "for all work before it, and a replay runs no Python that could use the copy. Return the tensor and "
                "copy it after the step",
            )
        return original(*args, **kwargs)

    return method
