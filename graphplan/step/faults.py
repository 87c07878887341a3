"""Failures that are not the step's own: on the device (``debug=True``), and while its owners are read."""

from __future__ import annotations

import os
import traceback
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch.utils._python_dispatch import _get_current_dispatch_mode

from graphplan.backend import first_line
from graphplan.errors import CaptureError, DeviceFault
from graphplan.program import Program


def wait_for_device(program: Program, when: str) -> None:
    """Wait for the device, so that what failed there by ``when`` is told now.

    Raises:
        DeviceFault: if anything did.
    """
    plan = program.plan
    try:
        if plan.device.type == "cuda":
            torch.cuda.synchronize(plan.device)
    except RuntimeError as error:
        raise DeviceFault(
            f"the device failed in the program of {plan.name} (fed {plan.feed}) by {when}: "
            f"{first_line(error)}. Its last operators: {', '.join(plan.last_operators)}. Run with "
            "debug_eager=True, which takes every way but the recording, to see whether the step itself fails"
        ) from error


def refusal_of(error: Exception, when: str) -> CaptureError:
    """The refusal for an error that graphplan met ``when`` it looked at the step, which did not raise it."""
    frames = traceback.extract_tb(error.__traceback__)[-1:]
    place = "".join(f" at {os.path.basename(frame.filename)}:{frame.lineno} in {frame.name}" for frame in frames)
    refusal = CaptureError(
        f"{type(error).__name__} {when}{place}: {_text_of(error)}. What the step works with has to be read before it "
        "can be recorded: an object whose attributes, items or comparisons raise should not be among its owners, or "
        "pass on_failure='eager'"
    )
    refusal.__cause__ = error
    return refusal


def is_steps_own(error: BaseException, fn: Callable[..., Any]) -> bool:
    """Whether ``error`` came out of the step ``fn``, or may have come out of a dispatch mode of the caller's."""
    if _get_current_dispatch_mode() is not None:
        return True
    while isinstance(fn, partial):
        fn = fn.func
    code = getattr(fn, "__code__", None) or getattr(type(fn).__call__, "__code__", None)
    trace = error.__traceback__
    while code is not None and trace is not None and trace.tb_frame.f_code is not code:
        trace = trace.tb_next
    return code is None or trace is not None


def _text_of(error: Exception) -> str:
    try:
        return first_line(error)
    except Exception:  # noqa: BLE001 - whatever the error's own text raises
        return "no text"
