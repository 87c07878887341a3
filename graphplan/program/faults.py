"""Turn errors that are not the step's own into refusals, with their place. A run that succeeds without graphplan must
not fail because reading an object runs code of its class that raises, or because graphplan itself fails.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from traceback import walk_tb

from torch.utils._python_dispatch import _get_current_dispatch_mode

from graphplan.backends.backend import first_line, is_out_of_memory
from graphplan.environment.origin import OURS, is_users_file
from graphplan.errors import EffectError, FaultError, GraphPlanError
from graphplan.feed.call_arguments import is_callers
from graphplan.observe.source import raising_code
from graphplan.observe.type_calls import calls_type

_NAMES = ("path", "label", "place")
"""Names of local variables in this package's functions that hold the path of the value being read."""


def refusal_of(error: Exception) -> FaultError | None:
    """Return the refusal for ``error``, raised in a call of a step. Return None if the error passes unchanged: one of
    the step's own, one that graphplan raises on purpose, or out of memory.
    """
    if is_steps_own(error) or is_out_of_memory(error):
        return None
    if isinstance(error, GraphPlanError):
        return error if isinstance(error, FaultError) and not error.is_raised else None
    refusal = FaultError(
        f"{describe(error)}. graphplan has to read the step's owners and arguments before it can record the step: "
        "keep objects whose attributes, items or comparisons raise errors out of them"
    )
    refusal.__cause__ = error
    return refusal


@contextmanager
def refusing() -> Iterator[None]:
    """Raise errors of the block unchanged, or as the refusal from :func:`refusal_of`."""
    try:
        yield
    except Exception as error:
        refusal = refusal_of(error)
        if refusal is None or refusal is error:
            raise
        raise refusal from error


def lost(error: Exception, name: str) -> EffectError:
    """Return the error to raise for ``error`` once the step ``name`` has run."""
    return EffectError(
        f"{describe(error)}. {name} has run: its tensors are those of the next step, but its Python effects may be "
        "half done, and its result is lost. Continue from a checkpoint. Keep objects whose items raise errors out of "
        "the values that the step counts, appends to or returns, or run the step eagerly"
    )


def describe(error: Exception) -> str:
    """Describe ``error``: its type, graphplan's file, where it was raised, its text, and the path being read."""
    frames = list(walk_tb(error.__traceback__))
    ours = [frame for frame, _ in frames if frame.f_code.co_filename.startswith(OURS)]
    doing = f"in graphplan/{ours[-1].f_code.co_filename.removeprefix(OURS)}" if ours else "in graphplan"
    last, line = frames[-1]
    place = f"{os.path.basename(last.f_code.co_filename)}:{line} in {last.f_code.co_name}"
    paths = (frame.f_locals.get(name) for frame in reversed(ours) for name in _NAMES)
    path = next((path for path in paths if type(path) is str and path), None)
    return f"{type(error).__name__} {doing} at {place}: {_text_of(error)}{'' if path is None else f', of {path}'}"


def is_raised_by_user(error: BaseException) -> bool:
    """Return True if the user's code raises ``error`` and never asks for a class, by which stand-ins differ."""
    code = raising_code(error)
    return code is not None and is_users_file(code.co_filename) and not calls_type(code)


def is_steps_own(error: BaseException) -> bool:
    """Return True if ``error`` comes from the user's code, or may come from the caller's dispatch mode."""
    return _get_current_dispatch_mode() is not None or is_callers(error)


def _text_of(error: Exception) -> str:
    try:
        return first_line(error)
    except Exception:  # noqa: BLE001 - whatever the error's own text raises
        return "no text"
