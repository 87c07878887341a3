"""Where in the user's source an operator was called, and whether an optimizer called it."""

from __future__ import annotations

import dis
import linecache
import os
import sys
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from functools import cache, partial
from types import CodeType, FrameType, ModuleType
from typing import Any, TypeVar

import torch
from torch.amp.grad_scaler import GradScaler

_TORCH = os.path.dirname(torch.__file__) + os.sep
_HERE = os.path.dirname(os.path.dirname(__file__)) + os.sep
_NN = os.path.join(_TORCH, "nn") + os.sep
_OPTIM = os.path.join(_TORCH, "optim") + os.sep
_PARTS = (
    *(_NN, _OPTIM),
    *(os.path.join(_TORCH, name) + os.sep for name in ("amp", "autograd", "distributions")),
    *(os.path.join(_TORCH, name) for name in ("_tensor.py", "functional.py")),
    *(os.path.join(_TORCH, "utils", name) for name in ("_foreach_utils.py", "checkpoint.py")),
)
"""Not those that watch or compile: what they call changes without changing what a step computes."""
_CHECKPOINT = os.path.join(_TORCH, "utils", "checkpoint.py")
_FAMILIAR = ("lightning", "pytorch_lightning", "lightning_fabric", "lightning_utilities", "torchmetrics")
_HOMEPAGE = "https://github.com/Lightning-AI/"
"""What all of them say of themselves, wherever they are installed. A package of the user's own may have such a name."""
_STANDARD = (os.path.dirname(os.__file__) + os.sep, "<frozen ")
_INSTALLED = f"{os.sep}site-packages{os.sep}"


def _is_familiar(package: ModuleType | None) -> bool:
    return str(getattr(package, "__homepage__", "")).startswith(_HOMEPAGE)


def _homes_of_parsers() -> list[str]:
    """How the files begin of what OmegaConf reads interpolations with, whose scratch is nobody's state."""
    parts = (("omegaconf", "grammar"), ("antlr4", ""))
    files = [(getattr(sys.modules.get(package), "__file__", None), start) for package, start in parts]
    return [os.path.join(os.path.dirname(file), start) for file, start in files if file]


@cache
def _in_library(filename: str) -> bool:
    """Asked about files whose code runs: the packages that they belong to are loaded."""
    packages = filter(_is_familiar, map(sys.modules.get, _FAMILIAR))
    files = (getattr(package, "__file__", None) for package in packages)
    homes = [os.path.dirname(file) + os.sep for file in files if file]
    extensions = getattr(sys.modules.get("typing_extensions"), "__file__", None)
    return filename == extensions or filename.startswith((*homes, *_homes_of_parsers()))


# Not frozen: one is made for each operator of a trace, and that takes a frozen one five times as long.
@dataclass(slots=True, unsafe_hash=True)
class Source:
    """A line of the user's, and the part of the step (``"step"`` or ``"optimizer"``) that ran there.

    ``scaled`` says that it was not the optimizer's own code but a gradient scaler's, which decides about its step.
    ``by`` is the line of Lightning's or torchmetrics' that the user's line led to, if it did.
    """

    filename: str
    line: int
    function: str
    component: str
    optimizer: str = ""
    scaled: bool = False
    by: Source | None = field(default=None, compare=False)

    def __str__(self) -> str:
        text = linecache.getline(self.filename, self.line).strip()
        place = f"{os.path.basename(self.filename)}:{self.line} in {self.function}"
        place = f"{place}: `{text}`" if text else place
        return f"{place} (by {self.by})" if self.by else place


def file_of(code: CodeType, space: Mapping[str, Any]) -> str:
    """The file that ``code`` comes from; for generated code (a dataclass's ``__init__``) that of its module."""
    return space.get("__file__") or "" if code.co_filename == "<string>" else code.co_filename


@cache
def is_library(filename: str) -> bool:
    """Whether the file belongs to torch, Lightning, this package, or Python's standard library."""
    return filename.startswith((_TORCH, _HERE)) or is_standard(filename) or _in_library(filename)


@cache
def is_standard(filename: str) -> bool:
    """Whether the file belongs to Python's standard library."""
    return filename.startswith(_STANDARD) and not is_installed(filename)


def is_installed(filename: str) -> bool:
    """Whether the file belongs to a package that was installed beside the standard library."""
    return _INSTALLED in filename


@cache
def is_ours(filename: str) -> bool:
    """Whether the file belongs to this package."""
    return filename.startswith(_HERE)


@cache
def is_torchs(filename: str) -> bool:
    """Whether the file is one of those in which torch's own layers, optimizers, tensors and scalers are."""
    return filename.startswith(_PARTS)


def is_raised_by_user(error: BaseException) -> bool:
    """Whether a ``raise`` of the user's own code raised ``error``, rather than torch."""
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    if trace is None:
        return False
    code = trace.tb_frame.f_code
    return dis.opname[code.co_code[trace.tb_lasti]] == "RAISE_VARARGS" and not is_library(code.co_filename)


def find_raise(error: BaseException) -> Source | None:
    """The innermost line outside torch, Lightning and this package that ``error`` came through."""
    found, trace = None, error.__traceback__
    while trace is not None:
        code = trace.tb_frame.f_code
        if not is_library(code.co_filename):
            found = Source(code.co_filename, trace.tb_lineno, code.co_name, "step")
        trace = trace.tb_next
    return found


def is_recomputed() -> bool:
    """Whether activation checkpointing runs what calls this."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code.co_filename != _CHECKPOINT:
        frame = frame.f_back
    return frame is not None


_Run = TypeVar("_Run", bound=Callable[..., Any])
_RUNNERS: dict[int, CodeType] = {}
"""By identity: to hash a code object takes as long as it has instructions."""


def runs_step(run: _Run) -> _Run:
    """Mark ``run`` as what calls a step: the frames beyond it are the step's callers."""
    _RUNNERS[id(run.__code__)] = run.__code__
    return run


def runs_steps(code: CodeType) -> bool:
    """Whether ``code`` is what calls a step."""
    return id(code) in _RUNNERS


@dataclass(frozen=True, slots=True)
class _Place:
    """What a frame's code tells by where it comes from, and whether it is what calls a step. Asked for each operator of
    a trace, for each frame around it. Holds ``code``, whose identity is then nobody else's.
    """

    code: CodeType
    is_library: bool
    is_familiar: bool
    is_step: bool
    serves: bool
    """Whether an optimizer's step may be doing this."""
    runs_step: bool


_PLACES: dict[int, _Place] = {}
"""By identity, as the runners."""
_MANY = 2**16


def _note_place(code: CodeType) -> _Place:
    if len(_PLACES) >= _MANY:
        _PLACES.clear()
    name = code.co_filename
    place = _PLACES[id(code)] = _Place(
        code,
        is_library=is_library(name),
        is_familiar=is_library(name) and _in_library(name),
        is_step=code.co_name == "step",
        serves=is_ours(name) or _may_serve_optimizer(name),
        runs_step=runs_steps(code),
    )
    return place


def find_source() -> Source:
    """The innermost frame outside torch, Lightning and this package. Where the step has none, but frames of Lightning's
    or torchmetrics', the innermost of those; where it has torch's alone, whoever called it is named.
    """
    frame: FrameType | None = sys._getframe(1)
    component = _component(frame)
    last, familiar = frame, None
    while frame is not None:
        code = frame.f_code
        try:
            place = _PLACES[id(code)]
        except KeyError:
            place = _note_place(code)
        if not place.is_library:
            return _source(frame, component, familiar)
        if familiar is None and place.is_familiar:
            familiar = frame
        if familiar is not None and place.runs_step:
            return _source(familiar, component)
        last, frame = frame, frame.f_back
    assert last is not None
    return _source(last, component)


_Component = tuple[str, str, bool]
_STEP: _Component = ("step", "", False)


def _source(frame: FrameType, component: _Component, by: FrameType | None = None) -> Source:
    led_to = _source(by, component) if by is not None else None
    return Source(frame.f_code.co_filename, frame.f_lineno, frame.f_code.co_name, *component, led_to)


def _component(frame: FrameType | None) -> _Component:
    """``"optimizer"``, the optimizer's type and whether a scaler steps it, if the frames lead to the ``step`` of either
    without passing a closure of somebody else's.

    Lightning runs forward and backward as a closure inside ``Optimizer.step``; their frames lie in other files than
    the optimizer's own, which is what tells them apart.
    """
    others: dict[str, None] = {}
    within: list[CodeType] = []
    while frame is not None:
        code = frame.f_code
        try:
            place = _PLACES[id(code)]
        except KeyError:
            place = _note_place(code)
        if place.is_step:
            stepper = frame.f_locals.get("self")
            if isinstance(stepper, GradScaler):
                # A scaler's step takes no closure: whatever runs in it serves the optimizer.
                return ("optimizer", type(frame.f_locals.get("optimizer")).__name__, True)
            if isinstance(stepper, torch.optim.Optimizer):
                is_own = others.keys() <= {code.co_filename} or _is_beside_closure(frame.f_locals, within)
                return ("optimizer", type(stepper).__name__, False) if is_own else _STEP
        if place.runs_step:
            break
        if not place.serves:
            others[code.co_filename] = None
        within.append(code)
        frame = frame.f_back
    return _STEP


def _is_beside_closure(local: Mapping[str, Any], within: Collection[CodeType]) -> bool:
    """Whether an optimizer's step with those variables calls ``within`` by itself, and not through its closure."""
    closure = local.get("closure", _STEP)
    while isinstance(closure, partial):
        closure = closure.func
    if closure is None:
        return True
    code = getattr(getattr(closure, "__func__", closure), "__code__", None)
    return code is not None and all(inner is not code for inner in within)


def _may_serve_optimizer(filename: str) -> bool:
    if filename.startswith(_OPTIM):
        return True
    nested = (
        os.path.join(_TORCH, "nn"),
        os.path.join(_TORCH, "autograd", "__init__"),
        os.path.join(_TORCH, "_tensor."),
    )
    return filename.startswith(_TORCH) and not filename.startswith(nested)


def optimizer_fix(source: Source) -> str:
    """What to do about an operator that an optimizer's ``step``, or a scaler's for it, launched."""
    if source.scaled:
        return (
            f"It is the gradient scaler's question whether to step {source.optimizer}. Expected torch's own step with "
            "fused=True (AdamW, Adam, SGD, Adagrad; prepare_optimizers=True sets it), which skips by itself; state "
            "from a step that was not skipped; no step hooks on the optimizer; and the scaler among owners=. Else step "
            "the optimizer outside (in a Trainer that is done for you)"
        )
    return (
        f"It comes from the Python code of the optimizer {source.optimizer}: use capturable=True or fused=True where "
        "the optimizer has them (prepare_optimizers=True sets them), keep the value constant, or step the optimizer "
        "outside"
    )
