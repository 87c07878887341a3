"""Gradients of tensors that a step makes: a replay leaves a copy of the tensor, which has none."""

from __future__ import annotations

from collections.abc import Iterable

from graphplan.effects.allowed import is_allowed
from graphplan.errors import HostEffectError
from graphplan.trace.records import Trace


def check_gradients(first: Trace, second: Trace, allow: Iterable[str]) -> None:
    """Refuse a step that leaves a tensor with a ``.grad``, where that is no parameter and was not fed.

    Raises:
        HostEffectError: naming the tensor.
    """
    for path in [*first.gradients, *second.gradients]:
        if not is_allowed(path, allow):
            raise HostEffectError(
                f"the step leaves a gradient at {path}.grad, of a tensor that it makes anew in each call; a replay "
                "leaves a copy of the tensor, whose .grad is None. Expected gradients at parameters and at what is fed "
                f"alone. Keep or return the gradient itself ({path}.grad once backward is over, what a hook of the "
                "tensor gets, torch.autograd.grad), or, if it is not needed, leave retain_grad() out, and detached "
                "tensors behind"
            )
