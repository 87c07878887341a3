"""CUDA's rules for a step that is traced on the CPU: copies to the host do nothing there, and no operator waits."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from typing import Any

from torch import Tensor

from graphplan.errors import HostSyncError
from graphplan.observe.conversions import Conversions
from graphplan.observe.replacements import Replacements
from graphplan.observe.source import find_source
from graphplan.trace.mode import refuse_trace
from graphplan.trace.operator_schemas import AS_ON_DEVICE

_COPIES = ("cpu", "to")  # Methods of tensors that copy to the host. What reads values is refused on the CPU, too.


@contextmanager
def cuda_rules() -> Iterator[None]:
    """Refuse steps that are traced in the block for copies to the host, and for operators that read on the host, though
    all their tensors are on the host.
    """
    rules = Replacements(lambda: [(Tensor, name, _copier(name)) for name in _COPIES])
    token = AS_ON_DEVICE.set(True)
    rules.enter(token)
    try:
        yield
    finally:
        rules.leave(token)
        AS_ON_DEVICE.reset(token)


def _copier(name: str) -> Callable[..., Any]:
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
        return original(self, *args, **kwargs)

    return method
