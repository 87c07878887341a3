"""What is active around a call and has a say in its operators: modes of the caller's, transforms, forward-mode AD.

A recording is of plain tensors and of operators as they were called below all of these: a replay would pass them by, as
without a mode that watches or changes it. Gradient modes, autocast and the default device are no part of this: they are
in a program's key.
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

_functorch: Any = getattr(torch._C, "_functorch", None)
_innermost_transform: Callable[[], Any] = getattr(_functorch, "peek_interpreter_stack", lambda: None)
_jit_trace: Callable[[], Any] = getattr(torch._C, "_get_tracing_state", lambda: None)
_count_of_dispatch_modes = torch._C._len_torch_dispatch_stack
_count_of_function_modes = torch._C._len_torch_function_stack
COUNTS: list[tuple[Callable[[], Any], Any]] = [
    (_count_of_dispatch_modes, 0),
    (_innermost_transform, None),
    (_jit_trace, None),
]
"""Functions that say, each in a moment, that there is nothing of a kind, and what they say then."""
LEVEL = (vars(forward_ad), "_current_level", -1)
"""Where torch keeps how deep forward-mode AD is nested, and what lies there outside of it."""


def surroundings() -> str | None:
    """The first thing around this call that a replay would not heed, described; None if there is nothing."""
    space, name, outside = LEVEL
    if space.get(name, outside) != outside:
        return "forward-mode AD (torch.autograd.forward_ad.dual_level)"
    transform = _innermost_transform()
    if transform is not None:
        return f"a transform of torch.func ({transform.key().name})"
    if _jit_trace() is not None:
        return "torch.jit.trace"
    mode = changing_mode()
    return None if mode is None else f"a mode of the caller's ({type(mode).__name__})"


def changing_mode() -> Any:
    """A mode that is active and may change what operators do; None if there is none.

    One that only watches says so by ``changes_nothing = True`` in its class.
    """
    if not _count_of_dispatch_modes() and not _count_of_function_modes():
        return None
    functions = [mode for mode in _get_current_function_mode_stack() if not isinstance(mode, DeviceContext)]
    modes = [*functions, *_get_current_dispatch_mode_stack()]
    return next((mode for mode in modes if not getattr(mode, "changes_nothing", False)), None)


def check_surroundings(doing: str) -> None:
    """Refuse to do what ``doing`` says where something is active that a replay would not heed.

    Raises:
        SurroundingsError: naming it.
    """
    found = surroundings()
    if found is not None:
        raise SurroundingsError(
            f"{found} is active while {doing}; expected nothing of the kind, since a replay runs what was recorded and "
            "would not heed it. Do this outside of it, or call the function itself"
        )
