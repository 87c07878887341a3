"""Find the caller's modes, transforms and forward-mode AD that are active around a call and change its operators.

A recording has the plain tensors and operators below all of these, so a replay would skip them. Gradient modes,
autocast and the default device are part of a program's key instead.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.autograd import forward_ad
from torch.overrides import _get_current_function_mode_stack
from torch.utils._device import DeviceContext
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

from graphplan.errors import SurroundingsError

_C: Any = torch._C
COUNTS: list[tuple[Callable[[], Any], Any]] = [
    (_C._len_torch_dispatch_stack, 0),
    (_C._functorch.peek_interpreter_stack, None),
    (_C._get_tracing_state, None),
]
"""Fast functions that tell whether something of a kind is active, and their values if nothing is."""
LEVEL = (vars(forward_ad), "_current_level", -1)
"""The namespace and variable in which torch counts nested levels of forward-mode AD, and its value outside."""


def surroundings() -> str | None:
    """Describe the first thing around this call that a replay would skip; None if there is nothing."""
    space, name, outside = LEVEL
    if space.get(name, outside) != outside:
        return "forward-mode AD (torch.autograd.forward_ad.dual_level)"
    transform = _C._functorch.peek_interpreter_stack()
    if transform is not None:
        return f"a transform of torch.func ({transform.key().name})"
    if _C._get_tracing_state() is not None:
        return "torch.jit.trace"
    mode = changing_mode()
    return None if mode is None else f"a mode of the caller ({type(mode).__name__})"


def changing_mode() -> Any:
    """Return an active mode that may change operators: one whose class lacks ``changes_nothing = True``; else None."""
    if not _C._len_torch_dispatch_stack() and not _C._len_torch_function_stack():
        return None
    functions = [mode for mode in _get_current_function_mode_stack() if not isinstance(mode, DeviceContext)]
    modes = [*functions, *_get_current_dispatch_mode_stack()]
    return next((mode for mode in modes if not getattr(mode, "changes_nothing", False)), None)


def check_surroundings(doing: str) -> None:
    """Raise SurroundingsError if something is active that a replay would skip. ``doing`` names the action refused."""
    found = surroundings()
    if found is not None:
        raise SurroundingsError(
            f"{found} is active while {doing}; expected no mode or transform, because a replay runs the recorded work "
            "and would ignore it. Do this outside of it, or call the original function"
        )
