"""Answer ``is_current_stream_capturing()`` with True while a step runs.

Libraries take another path in a graph capture, most likely with other kernels. A step must take the same path whenever
it is warmed up, traced, recorded or checked, so it always gets the answer of a capture, on the CPU too.

The C function is replaced in its module's globals, so code that imported the Python function by name is reached, too.
The real answer goes to optimizers, to torch's code outside its layers, and to code that asks only to raise an error.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from itertools import takewhile
from traceback import walk_stack
from types import FrameType
from typing import Any

import torch

from graphplan.environment.origin import LAYERS, TORCH, is_ours
from graphplan.observe.branches import Use, branches_of
from graphplan.observe.replacements import Replacements

_ASKERS = tuple(os.path.join(TORCH, kind, "graphs.py") for kind in ("cuda", "xpu"))
"""The modules whose Python functions call the C function."""
_QUESTIONS = ("_cuda_isCurrentStreamCapturing", "_xpu_isCurrentStreamCapturing")
_KEY = "graphplan_presents_capture"
"""Key of a thread-local value that torch passes on to the threads of the autograd engine."""


def presents_capture() -> bool:
    """Return True if this thread runs a step, or a part of its backward pass, that must take a capture's path."""
    return torch._C._is_key_in_tls(_KEY) and torch._C._get_obj_in_tls(_KEY) is True


@contextmanager
def presenting_capture() -> Iterator[None]:
    """Answer as in a capture, for this thread and for the backward passes that it runs."""
    token, before = object(), presents_capture()
    try:
        _ANSWERS.enter(token)
        torch._C._stash_obj_in_tls(_KEY, True)
        yield
    finally:
        torch._C._stash_obj_in_tls(_KEY, before)
        _ANSWERS.leave(token)


def _find_questions() -> list[tuple[Any, str, Any]]:
    modules = [torch._C, *(sys.modules.get(f"torch.{kind}.graphs") for kind in ("cuda", "xpu"))]
    places = [(module, name) for module in modules for name in _QUESTIONS if name in getattr(module, "__dict__", ())]
    return [(module, name, _answering(vars(module)[name])) for module, name in places]


_ANSWERS = Replacements(_find_questions)


def _answering(question: Callable[[], bool]) -> Callable[[], bool]:
    @wraps(question, updated=())
    def is_capturing() -> bool:
        return (presents_capture() and _is_of_step(sys._getframe(1))) or question()

    return is_capturing


def _is_of_step(frame: FrameType | None) -> bool:
    """Return True if the calling code in ``frame`` is part of a step's computation."""
    while frame is not None and frame.f_code.co_filename in _ASKERS:
        frame = frame.f_back
    if frame is None or _is_optimizers(frame):
        return False
    file = frame.f_code.co_filename
    if is_ours(file) or (file.startswith(TORCH) and not file.startswith(LAYERS)):
        return False
    use = branches_of(frame).use_at(frame.f_lasti)
    while use is Use.RETURNED and frame.f_back is not None:
        frame = frame.f_back
        use = branches_of(frame).use_at(frame.f_lasti)
    return use is not Use.ASSERTED


def _is_optimizers(frame: FrameType) -> bool:
    """Return True if ``frame`` runs in an optimizer's method, with only frames of one file in between."""
    around = (outer for outer, _ in walk_stack(frame))
    own = takewhile(lambda outer: outer.f_code.co_filename == frame.f_code.co_filename, around)
    return any(isinstance(outer.f_locals.get("self"), torch.optim.Optimizer) for outer in own)
