"""A watcher of the calls that one thread's Python makes: a profile function (``sys.setprofile``)."""

from __future__ import annotations

import cProfile
import os
import sys
import threading
from collections.abc import Callable, Container, Mapping, Sequence
from types import CodeType, FrameType
from typing import Any

import torch

from graphplan.environment.origin import OURS, TORCH, pass_errors_on
from graphplan.errors import Faults

OnCall = Callable[[FrameType, CodeType], bool]
OnCCall = Callable[[FrameType, Any], None]
_SILENT = (OURS, os.path.join(TORCH, "_ops.py"), os.path.join(TORCH, "_library") + os.sep)
"""Code that looks at steps, and torch's that leads to operators: what these call themselves is no part of a step."""
_RUN = "run"
"""But for what ``Aside.run`` is given to call."""


def is_silent(code: CodeType) -> bool:
    """Whether what ``code`` calls is no part of a step."""
    return code.co_filename.startswith(_SILENT) and code.co_name != _RUN


def is_kept_from_compiler(code: CodeType) -> bool:
    """Have torch's compiler look neither at ``code`` nor at what it calls: to guard each takes a sixth of a trace."""
    compiler: Any = getattr(getattr(torch._C, "_dynamo", None), "eval_frame", None)
    try:
        skip = compiler._FrameAction.SKIP
        compiler.set_code_exec_strategy(code, compiler._FrameExecStrategy(skip, skip))
    except (AttributeError, TypeError):
        return False
    return True


class _Here(threading.local):
    """The innermost watcher of each thread, which goes with the thread."""

    watcher: Watcher | None = None


_HERE = _Here()


class Watcher:
    """Calls ``on_call(frame, code)`` as Python code begins to run or goes on, and ``on_c_call(frame, function)`` as it
    calls a function in C, in the thread that started this. Audit hooks of other packages hear of each ``id(code)`` and
    each ``frame.f_code``, so what is called asks for neither where it is given.

    ``on_call`` returns True if it need not be called again for the frame's code. ``on_c_call`` is called for functions
    with one of ``names``, and for what code with an identity among ``codes``, which may grow, calls. Errors of both go
    to ``faults``. The profile function that was there before is put back.
    """

    _previous: Any = None
    _done: dict[int, CodeType]
    """Code of which all is known, by identity: to hash a code object takes as long as it has instructions."""

    def __init__(
        self, on_call: OnCall, on_c_call: OnCCall, names: Container[str], codes: Container[int], faults: Faults
    ) -> None:
        self._on_call, self._on_c_call = on_call, on_c_call
        self._names, self._codes = names, codes
        self._outer: Watcher | None = None
        self.is_paused = False
        self.faults = faults

    def start(self) -> None:
        """Watch what this thread runs."""
        self._done = {}
        self._previous, self._outer = sys.getprofile(), _HERE.watcher
        _HERE.watcher = self
        sys.setprofile(self._event)

    def stop(self) -> None:
        """No longer watch."""
        sys.setprofile(None)
        _HERE.watcher = self._outer
        if isinstance(self._previous, cProfile.Profile):
            # cProfile shows as its object, which is no profile function.
            self._previous.enable()
        elif self._previous is not None:
            sys.setprofile(self._previous)

    def pause(self) -> bool:
        """Take no notice, until :meth:`resume`; False where another watcher has taken this one's place."""
        # It is enough that the profile function hears of this call.
        return self.is_paused

    def resume(self) -> None:
        """Watch again."""
        self.is_paused = False
        sys.setprofile(self._event)

    def _event(self, frame: FrameType, event: str, arg: Any) -> None:
        # Python calls this some twenty times for each operator of a traced step.
        try:
            if event == "c_call":
                if arg.__name__ in self._names or id(frame.f_code) in self._codes:
                    self._on_c_call(frame, arg)
            elif event == "call" and (number := id(code := frame.f_code)) not in self._done:
                if code is _PAUSE:
                    sys.setprofile(None)
                    self.is_paused = True
                elif code.co_filename.startswith(_SILENT) or self._on_call(frame, code):
                    self._done[number] = code
        except Exception as error:  # noqa: BLE001 - Python would raise it in the step
            self.faults.note(error)


_PAUSE = Watcher.pause.__code__


# A watcher hears of calls in the middle of compiled code, too.
is_kept_from_compiler(Watcher._event.__code__)


class Aside:
    """Hides graphplan's own work in a step from who watches: that takes long. :meth:`run` runs what is the step's."""

    __slots__ = ("_is_running", "_outcome", "_watcher")
    _outcome: tuple[Any] | None

    def __enter__(self) -> Aside:
        self._is_running, self._outcome = False, None
        watcher = _HERE.watcher
        self._watcher = None if watcher is None or watcher.is_paused or not watcher.pause() else watcher
        return self

    def __exit__(self, *exc: object) -> None:
        if self._watcher is not None:
            self._watcher.resume()

    def run(
        self, func: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any], *, is_native: bool = False
    ) -> Any:
        """``func(*args, **kwargs)``, watched unless it ``is_native``: then there is no Python in it."""
        self._is_running = True
        if is_native or self._watcher is None:
            out = func(*args, **kwargs)
        else:
            self._watcher.resume()
            try:
                out = func(*args, **kwargs)
            finally:
                self._watcher.pause()
        self._is_running, self._outcome = False, (out,)
        return out

    def carry_on(
        self, error: Exception, func: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> Any:
        """What the step gets of ``func`` though graphplan's own work has failed; what ``func`` has raised comes out."""
        if self._is_running:
            raise error
        return self.run(func, args, kwargs) if self._outcome is None else self._outcome[0]


pass_errors_on(Aside.run.__code__)
