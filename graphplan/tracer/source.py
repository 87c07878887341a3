"""Where in the user's source an operator was called, and whether an optimizer called it."""

from __future__ import annotations

import dis
import linecache
import os
import sys
from dataclasses import dataclass
from types import FrameType

import torch

_TORCH = os.path.dirname(torch.__file__) + os.sep
_HERE = os.path.dirname(os.path.dirname(__file__)) + os.sep
_OPTIM = os.path.join(_TORCH, "optim") + os.sep
_LIBRARIES = tuple(f"{os.sep}{name}{os.sep}" for name in ("lightning", "pytorch_lightning", "torchmetrics"))
_PLUMBING = tuple(f"{os.sep}{name}.py" for name in ("contextlib", "functools", "typing", "abc", "enum", "inspect"))


def _in_library(filename: str) -> bool:
    return f"{os.sep}site-packages{os.sep}" in filename and any(part in filename for part in _LIBRARIES)


@dataclass(frozen=True, slots=True)
class Source:
    """A line of the user's, and the part of the step (``"step"`` or ``"optimizer"``) that ran there."""

    filename: str
    line: int
    function: str
    component: str
    optimizer: str = ""

    def __str__(self) -> str:
        text = linecache.getline(self.filename, self.line).strip()
        place = f"{os.path.basename(self.filename)}:{self.line} in {self.function}"
        return f"{place}: `{text}`" if text else place


def is_library(filename: str) -> bool:
    """Whether the file belongs to torch, Lightning, this package, or Python's own plumbing."""
    return filename.startswith((_TORCH, _HERE)) or filename.endswith(_PLUMBING) or _in_library(filename)


def is_raised_by_user(error: BaseException) -> bool:
    """Whether a ``raise`` of the user's own code raised ``error``, rather than torch."""
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    if trace is None:
        return False
    code = trace.tb_frame.f_code
    return dis.opname[code.co_code[trace.tb_lasti]] == "RAISE_VARARGS" and not is_library(code.co_filename)


def find_source() -> Source:
    """The innermost frame outside torch, Lightning and this package."""
    frame: FrameType | None = sys._getframe(1)
    component, optimizer = _component(frame)
    last = frame
    while frame is not None:
        if not is_library(frame.f_code.co_filename):
            return _source(frame, component, optimizer)
        last, frame = frame, frame.f_back
    assert last is not None
    return _source(last, component, optimizer)


def _source(frame: FrameType, component: str, optimizer: str) -> Source:
    return Source(frame.f_code.co_filename, frame.f_lineno, frame.f_code.co_name, component, optimizer)


def _component(frame: FrameType | None) -> tuple[str, str]:
    """``"optimizer"`` and the optimizer's type if the frames lead to an optimizer's ``step`` without passing a
    closure of somebody else's.

    Lightning runs forward and backward as a closure inside ``Optimizer.step``; their frames lie in other files than
    the optimizer's own, which is what tells them apart.
    """
    between: set[str] = set()
    while frame is not None:
        code = frame.f_code
        if code.co_name == "step" and isinstance(frame.f_locals.get("self"), torch.optim.Optimizer):
            own = between - {code.co_filename}
            serves = all(_may_serve_optimizer(name) for name in own)
            return ("optimizer", type(frame.f_locals["self"]).__name__) if serves else ("step", "")
        if not code.co_filename.startswith(_HERE):
            between.add(code.co_filename)
        frame = frame.f_back
    return "step", ""


def _may_serve_optimizer(filename: str) -> bool:
    if filename.startswith(_OPTIM):
        return True
    nested = (
        os.path.join(_TORCH, "nn"),
        os.path.join(_TORCH, "autograd", "__init__"),
        os.path.join(_TORCH, "_tensor."),
    )
    return filename.startswith(_TORCH) and not filename.startswith(nested)
