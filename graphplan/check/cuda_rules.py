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

_WAITING = ("cpu", "pin_memory")
"""Methods of tensors that copy to the host, or fail, where the tensor is on a CUDA device. What reads values is refused
on the CPU, too.
"""


@contextmanager
def cuda_rules() -> Iterator[None]:
    """Refuse steps that are traced in the block for copies to the host, though their tensors are there already."""
    names = (*_WAITING, "to")
    own = {name: vars(Tensor)[name] for name in names if name in vars(Tensor)}
    for name in names:
        setattr(Tensor, name, _refused(getattr(Tensor, name), name, _goes_to_host if name == "to" else _always))
    try:
        yield
    finally:
        for name in names:
            if name in own:
                setattr(Tensor, name, own[name])
            else:
                # What is left is inherited from the class in C.
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


def _always(*args: Any, **kwargs: Any) -> bool:
    return True


def _goes_to_host(*args: Any, **kwargs: Any) -> bool:
    """A device by name is the host's wherever the step runs; ``self.device`` is not."""
    return "cpu" in [value for value in (*args[1:], *kwargs.values()) if isinstance(value, str)]
