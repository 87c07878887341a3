"""Find the line of user code that called an operator, and whether an optimizer called it."""

from __future__ import annotations

import dis
import inspect
import linecache
import os
import sys
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from functools import partial
from traceback import walk_stack, walk_tb
from types import CodeType, FrameType
from typing import Any

import torch
from torch.amp.grad_scaler import GradScaler

from graphplan.environment.origin import OPTIM, TORCH, Codes, is_library, is_ours, is_users_file
from graphplan.environment.origin import is_familiar as is_familiar_file

SCHEDULERS = os.path.join(OPTIM, "lr_scheduler.py")
_OF_STEPS = tuple(os.path.join(TORCH, *path) for path in (("nn",), ("autograd", "__init__"), ("_tensor.",)))
"""torch's code that the step itself calls, and that is no part of an optimizer's ``step``."""
CHECKPOINT = os.path.join(TORCH, "utils", "checkpoint.py")
PAUSED = inspect.CO_GENERATOR | inspect.CO_COROUTINE | inspect.CO_ASYNC_GENERATOR
"""Flags of generators and coroutines: another caller may resume their frames."""


@dataclass(frozen=True, slots=True)
class Source:
    """A line of user code, and the part of the step (``"step"`` or ``"optimizer"``) that ran there. ``scaled``: it
    ran in a gradient scaler's ``step``. ``by``: the line of Lightning or torchmetrics that the line led to, if any.
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


def find_load(codes: Iterable[CodeType], name: str) -> Source | None:
    """Return the first line of ``codes`` that loads an attribute or a variable ``name``."""
    for code in codes:
        if name in code.co_names or name in code.co_freevars:
            line, starts = code.co_firstlineno, dict(dis.findlinestarts(code))
            for step in dis.get_instructions(code):
                line = starts.get(step.offset) or line
                if step.argval == name and step.opname.startswith("LOAD"):
                    return Source(code.co_filename, line, code.co_name, "step")
    return None


def with_users_line(source: Source) -> Source:
    """Return ``source``; if it lies in an installed package, the line of the user's own code that led to it."""
    if source.by is not None or is_users_file(source.filename):
        return source
    for frame, line in walk_stack(sys._getframe(1)):
        code = frame.f_code
        if runs_steps(code):
            break
        if is_users_file(code.co_filename):
            return replace(source, filename=code.co_filename, line=line, function=code.co_name, by=source)
    return source


def raising_code(error: BaseException) -> CodeType | None:
    """Return the code whose ``raise`` statement raised ``error``; None if C code raised it."""
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    code = None if trace is None else trace.tb_frame.f_code
    return code if code and trace and dis.opname[code.co_code[trace.tb_lasti]] == "RAISE_VARARGS" else None


def find_raise(error: BaseException) -> Source | None:
    """Return the innermost line outside torch, Lightning and this package in the traceback of ``error``."""
    lines = [(frame.f_code, line) for frame, line in walk_tb(error.__traceback__)]
    found = [(code, line) for code, line in lines if not is_library(code.co_filename)]
    return Source(found[-1][0].co_filename, found[-1][1], found[-1][0].co_name, "step") if found else None


def is_run_by(file: str) -> bool:
    """Return True if code of ``file`` is on the call stack: activation checkpointing, or a learning-rate scheduler."""
    return any(frame.f_code.co_filename == file for frame, _ in walk_stack(sys._getframe(1)))


_RUNNERS = Codes()
runs_step = _RUNNERS.mark
"""Mark a function that calls a step: the frames outside it are the step's callers."""


def runs_steps(code: CodeType) -> bool:
    """Return True if ``code`` is marked as calling a step."""
    return id(code) in _RUNNERS


@dataclass(frozen=True, slots=True)
class _Place:
    """Facts about a frame's code, cached: each operator of a trace looks at every frame around it."""

    code: CodeType
    is_library: bool
    is_familiar: bool
    is_step: bool
    """Whether it may be the ``step`` of an optimizer or a scaler."""
    runs_step: bool
    serves_optimizer: bool
    """Whether an optimizer's step may be running it."""
    is_dull: bool
    """Whether searches skip it: library code that neither is a ``step`` nor calls one, nor is Lightning's."""
    sources: dict[Any, Source] = field(default_factory=dict)
    """By instruction offset, component, and source that it led to."""


_PLACES: dict[int, _Place] = {}
"""By the id of the code, like ``_RUNNERS``."""
_MANY = 2**16


def _place_of(code: CodeType) -> _Place:
    place = _PLACES.get(id(code))
    if place is None:
        if len(_PLACES) >= _MANY:
            _PLACES.clear()
        name = code.co_filename
        is_own = is_ours(name)
        is_familiar = is_library(name) and not (is_own or name.startswith(TORCH)) and is_familiar_file(name)
        is_step = code.co_name == "step" and "self" in (*code.co_varnames, *code.co_freevars)
        runs = runs_steps(code)
        serves = is_own or (name.startswith(TORCH) and not name.startswith(_OF_STEPS))
        is_dull = is_library(name) and not (is_familiar or is_step or runs)
        place = _PLACES[id(code)] = _Place(code, is_library(name), is_familiar, is_step, runs, serves, is_dull)
    return place


def find_source(innermost: FrameType | None = None) -> Source:
    """Return the innermost line outside torch, Lightning and this package, from ``innermost`` or the caller outwards;
    else the innermost line of Lightning or torchmetrics; else the line of the step's caller.
    """
    return _search(innermost or sys._getframe(1), None)[0]


def _search(innermost: FrameType, known: FrameType | None) -> tuple[Source, FrameType | None]:
    """See :func:`find_source`. Also return the outermost user frame seen that is no ``step``. The search for the
    component ends at the frame ``known`` to lie outside any optimizer's ``step``.
    """
    frame = innermost
    found: FrameType | None = None
    outermost: FrameType | None = None
    familiar: FrameType | None = None
    component: _Component | None = None
    around: FrameType | None = innermost
    while around is not None:
        frame, around = around, around.f_back
        place = _PLACES.get(id(frame.f_code)) or _place_of(frame.f_code)
        if place.is_dull:
            continue
        if not place.is_library:
            found, outermost = found or frame, outermost if place.is_step else frame
        if found is None and familiar is None and place.is_familiar:
            familiar = frame
        if component is None and (place.is_step or frame is known):
            component = _STEP if frame is known else _component(frame, innermost)
        if place.runs_step:
            component = component or _STEP
            if found is None:
                found, familiar = familiar, None
        if found is not None and component is not None:
            break
    return _source(found or frame, component or _STEP, familiar if found is not None else None), outermost


_ENGINE = "torch.autograd.graph"
"""The module in which Python waits for the autograd engine."""
_Component = tuple[str, str, bool]
_STEP: _Component = ("step", "", False)


class Sources:
    """The sources of one thread's operators. A search is made only if the calling instruction has changed: one
    instruction runs all operators of a backward pass or of a composite function. A frame is kept until the next search.
    """

    def __init__(self) -> None:
        self._latest: tuple[FrameType | None, int, Source | None] = (None, 0, None)
        """The latest caller, its instruction, and the source found from there."""
        self._known: FrameType | None = None
        """A user frame that leads only to operators outside optimizers."""

    def find(self, caller: FrameType) -> Source:
        """Return the source of the operator that the frame ``caller`` calls."""
        frame, at, source = self._latest
        if source is None or frame is not caller or at != caller.f_lasti:
            source, outermost = _search(caller, self._known)
            is_in_backward = torch._C._current_graph_task_id() >= 0
            if outermost is not self._known:
                is_lasting = outermost is not None and not (is_in_backward or _is_paused(outermost))
                self._known = outermost if is_lasting and find_source(outermost).component == "step" else None
            # Do not keep a frame that the autograd engine calls: it holds gradients, and autograd copies held ones.
            is_held = not (_is_paused(caller) or (is_in_backward and _is_called_back(caller)))
            self._latest = caller if is_held else None, caller.f_lasti, source
        return source

    def forget(self) -> None:
        """Release all frames."""
        self._latest, self._known = (None, 0, None), None


def _is_paused(frame: FrameType) -> bool:
    """Return True if another caller may resume the frame (a generator or coroutine)."""
    return bool(frame.f_code.co_flags & PAUSED)


def _is_called_back(frame: FrameType) -> bool:
    """Return True if the autograd engine called the frame, directly or not."""
    return any(around.f_globals.get("__name__") == _ENGINE for around, _ in walk_stack(frame.f_back))


def _source(frame: FrameType, component: _Component, by: FrameType | None = None) -> Source:
    led_to = _source(by, component) if by is not None else None
    return _source_at(_place_of(frame.f_code), frame, component, led_to)


def _source_at(place: _Place, frame: FrameType, component: _Component, led_to: Source | None = None) -> Source:
    """Return one shared :class:`Source` for each place: most operators of a trace share theirs."""
    key = (frame.f_lasti, component, led_to)
    source = place.sources.get(key)
    if source is None:
        code = place.code
        source = place.sources[key] = Source(code.co_filename, frame.f_lineno, code.co_name, *component, led_to)
    return source


def _component(frame: FrameType, innermost: FrameType) -> _Component | None:
    """Return ``"optimizer"``, its type and whether a scaler steps it, if ``frame`` runs the ``step`` of an optimizer or
    scaler; ``_STEP`` if it leads to ``innermost`` by a closure such as Lightning's. Return None for other frames.
    """
    local = frame.f_locals
    stepper, closure = local.get("self"), local.get("closure", _STEP)
    if isinstance(stepper, GradScaler):
        # A scaler's step takes no closure: all code in it serves the optimizer.
        return ("optimizer", type(local.get("optimizer")).__name__, True)
    if not isinstance(stepper, torch.optim.Optimizer):
        return None
    while isinstance(closure, partial):
        closure = closure.func
    own, inner = frame.f_code.co_filename, getattr(getattr(closure, "__func__", closure), "__code__", None)
    leaves, passes = False, inner is None
    around = innermost if closure is not None else frame
    # This runs for each operator of a trace, so it uses cached facts about the frames' code.
    while around is not frame and around.f_back is not None:
        code = around.f_code
        passes = passes or code is inner
        leaves = leaves or not (_place_of(code).serves_optimizer or code.co_filename == own)
        if leaves and passes:
            return _STEP
        around = around.f_back
    return ("optimizer", type(stepper).__name__, False)


def optimizer_fix(source: Source) -> str:
    """Return advice about an operator that the ``step`` of an optimizer, or of a scaler for it, has launched."""
    if source.scaled:
        return (
            f"The gradient scaler reads whether to skip the step of {source.optimizer}. Expected torch's own step "
            "with fused=True (AdamW, Adam, SGD, Adagrad; prepare_optimizers=True sets it), which skips on the device; "
            "state from a step that was not skipped; no step hooks on the optimizer; and the scaler among owners=. "
            "Otherwise, move optimizer.step() out of the step (in a Trainer, graphplan does this)"
        )
    return (
        f"The Python code of the optimizer {source.optimizer} does this. If the optimizer has fused=True or, on CUDA, "
        "capturable=True, use it (prepare_optimizers=True sets it; fused kernels take no complex parameters, and none "
        "whose memory layout differs from that of their gradients). Or keep the value constant, move optimizer.step() "
        "out of the step, or use an optimizer that has one of them (AdamW, Adam, SGD, Adagrad)"
    )
