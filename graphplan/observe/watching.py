"""Watchers of the calls that Python code makes in one thread.

The interpreter calls a profile function (``sys.setprofile``) for every call and every return. ``sys.monitoring``
(:pep:`669`, Python 3.12) can leave out returns, and can be disabled at single places of the code.
"""

from __future__ import annotations

import builtins
import cProfile
import os
import sys
import threading
import weakref
from collections.abc import Callable, Container, Mapping, Sequence
from threading import RLock
from types import BuiltinFunctionType, CodeType, FrameType, FunctionType, MethodDescriptorType, MethodType
from typing import Any, ClassVar

import torch

from graphplan.environment.origin import OURS, PASSING, TORCH
from graphplan.errors import Faults

OnCall = Callable[[FrameType, CodeType], bool]
OnCCall = Callable[[FrameType, Any], None]
_SILENT = (OURS, os.path.join(TORCH, "_ops.py"), os.path.join(TORCH, "_library") + os.sep)
"""Files of graphplan and of torch's operator dispatch. Calls that their code makes itself are no part of a step."""
_RUN = "run"
"""Exception: :meth:`Unwatched.run` calls functions of the step."""


def is_silent(code: CodeType) -> bool:
    """Return True if the calls that ``code`` makes are no part of a step."""
    return code.co_filename.startswith(_SILENT) and code.co_name != _RUN


_monitoring: Any = getattr(sys, "monitoring", None)
"""Since Python 3.12."""
_NAME = "graphplan"
_PLACES = (4, 3, 5, 1, 0, 2)
"""Tool ids to try. The last ones are reserved by convention for debuggers, coverage and profilers."""
_BUILT_IN = frozenset(
    thing for thing in vars(builtins).values() if isinstance(thing, BuiltinFunctionType | type) and thing is not print
)
"""Builtin functions, and builtin classes for their methods: they do not access a tensor's memory."""
_IN_PYTHON = frozenset({FunctionType, MethodType, type})
"""Callables that are not C functions: their Python code is reported as it starts."""
_LOCK = RLock()


def is_kept_from_compiler(code: CodeType) -> bool:
    """Make torch's compiler skip ``code`` and its callees: their guards take a sixth of a trace. False on failure."""
    compiler: Any = getattr(getattr(torch._C, "_dynamo", None), "eval_frame", None)
    try:
        skip = compiler._FrameAction.SKIP
        compiler.set_code_exec_strategy(code, compiler._FrameExecStrategy(skip, skip))
    except (AttributeError, TypeError):
        return False
    return True


class _Here(threading.local):
    """The innermost watcher of each thread."""

    watcher: Watcher | None = None


_HERE = _Here()


class Watcher:
    """A watcher that calls ``on_call(frame, code)`` when Python code starts or resumes, and ``on_c_call(frame,
    function)`` when it calls a C function, in the thread that called :meth:`start`. Each ``id(code)`` and
    ``frame.f_code`` raises an audit event for other packages' hooks, so callbacks do not compute values that they get.

    ``on_call`` returns True if it need not be called again for the frame's code. ``on_c_call`` is called for functions
    named in ``names``, and for all calls of code whose id is in ``codes``, which may grow. Builtins except ``print``,
    and calls that torch makes around its operators, may be left out. Errors of both callbacks go to ``faults``. This
    class installs a profile function and restores the previous one.
    """

    _previous: Any = None
    _done: dict[int, CodeType]
    """Code that need not be reported again, by id: hashing a code object takes time in proportion to its length."""

    def __init__(
        self, on_call: OnCall, on_c_call: OnCCall, names: Container[str], codes: Container[int], faults: Faults
    ) -> None:
        self._on_call, self._on_c_call = on_call, on_c_call
        self._names, self._codes = names, codes
        self._outer: Watcher | None = None
        self.is_paused = False
        self.faults = faults

    def start(self) -> None:
        """Start watching this thread."""
        self._done = {}
        self._previous, self._outer = sys.getprofile(), _HERE.watcher
        _HERE.watcher = self
        sys.setprofile(self._event)

    def stop(self) -> None:
        """Stop watching."""
        sys.setprofile(None)
        _HERE.watcher = self._outer
        if isinstance(self._previous, cProfile.Profile):
            # sys.getprofile returns cProfile's object, which is not callable as a profile function.
            self._previous.enable()
        elif self._previous is not None:
            sys.setprofile(self._previous)

    def pause(self) -> bool:
        """Ignore all calls until :meth:`resume`. Return False if another profile function has replaced this one."""
        # `_event` pauses when it is called for this method.
        return self.is_paused

    def resume(self) -> None:
        """Continue watching."""
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


class Monitor(Watcher):
    """A watcher that uses ``sys.monitoring``, which other tools may use at the same time.

    If an exception (Ctrl-C) interrupts :meth:`start` or :meth:`stop`, the next call of either completes the work.
    """

    _watching: ClassVar[weakref.WeakSet[Monitor]] = weakref.WeakSet()
    """The innermost monitor of every thread."""

    def start(self) -> None:
        """See :meth:`Watcher.start`."""
        # The code of `start` and `stop` is no part of the step.
        self.pause()
        self._outer = _HERE.watcher
        self._take_turns(self._outer, self)
        self.resume()

    def stop(self) -> None:
        """See :meth:`Watcher.stop`."""
        self.pause()
        self._take_turns(self, self._outer)

    def pause(self) -> bool:
        """See :meth:`Watcher.pause`."""
        self.is_paused = True
        return True

    def resume(self) -> None:
        """See :meth:`Watcher.resume`."""
        self.is_paused = False

    def _take_turns(self, last: Watcher | None, following: Watcher | None) -> None:
        with _LOCK:
            if isinstance(last, Monitor):
                self._watching.discard(last)
            if isinstance(following, Monitor):
                self._watching.add(following)
            _HERE.watcher = following
            self._listen()

    @staticmethod
    def place() -> int | None:
        """Return the tool id that the monitors have or can take; None if other tools have all ids."""
        tools = {number: _monitoring.get_tool(number) for number in _PLACES}
        found = [number for name in (_NAME, None) for number in _PLACES if tools[number] == name]
        return found[0] if found else None

    @classmethod
    def _listen(cls) -> None:
        """Register the callbacks if there are monitors, else unregister them."""
        events, place, are_there = _monitoring.events, cls.place(), bool(cls._watching)
        is_known = place is not None and _monitoring.get_tool(place) == _NAME
        if not (is_known or are_there):
            return
        if not is_known:
            _monitoring.use_tool_id(place, _NAME)
        callbacks = {
            events.PY_START: cls._starts,
            events.PY_RESUME: cls._starts,
            events.PY_THROW: cls._is_thrown_into,
            events.CALL: cls._calls,
        }
        for event, callback in callbacks.items():
            _monitoring.register_callback(place, event, callback if are_there else None)
        _monitoring.set_events(place, sum(callbacks) if are_there else 0)
        # Re-enable the places that earlier monitors disabled, also for the next tool with this id.
        _monitoring.restart_events()
        if not are_there:
            _monitoring.free_tool_id(place)

    @classmethod
    def _starts(cls, code: CodeType, offset: int) -> object:
        if code.co_filename.startswith(_SILENT):
            return _monitoring.DISABLE
        watcher = _HERE.watcher
        if type(watcher) is not Monitor or watcher.is_paused:
            return None
        is_known = watcher._hears(watcher._on_call, sys._getframe(1), code)
        # Disabling holds for all threads: another thread's monitor may not have noted this code yet.
        return _monitoring.DISABLE if is_known and len(cls._watching) == 1 else None

    @classmethod
    def _is_thrown_into(cls, code: CodeType, offset: int, error: BaseException) -> None:
        watcher = _HERE.watcher
        if type(watcher) is Monitor and not watcher.is_paused:
            watcher._hears(watcher._on_call, sys._getframe(1), code)

    def _hears(self, on_event: Callable[[FrameType, Any], object], frame: FrameType, called: Any) -> object:
        """Report a call to ``on_event``: of the code that runs in ``frame``, or of a function that it calls."""
        try:
            return on_event(frame, called)
        except Exception as error:  # noqa: BLE001 - Python would raise it in the step
            self.faults.note(error)
            return None

    @classmethod
    def _calls(cls, code: CodeType, offset: int, function: Any, first: Any) -> object:
        # Python calls this some ten times for each operator of a traced step.
        if code.co_filename.startswith(_SILENT) and code.co_name != _RUN:
            return _monitoring.DISABLE
        kind = type(function)
        if kind is MethodDescriptorType:
            is_built_in = function.__objclass__ in _BUILT_IN
        else:
            is_built_in = kind in _IN_PYTHON or not issubclass(kind, BuiltinFunctionType) or function in _BUILT_IN
        # Do not disable the place for a function that is left out: it may call another function later.
        watcher = _HERE.watcher
        if is_built_in or type(watcher) is not Monitor:
            return None
        if watcher.is_paused:
            # One of the calls in `Unwatched.run` always runs unwatched.
            return _monitoring.DISABLE if code is Unwatched.run.__code__ else None
        if function.__name__ in watcher._names or id(code) in watcher._codes:
            if kind is MethodDescriptorType:
                try:
                    function = function.__get__(first, type(first))
                except TypeError:
                    # The call itself is about to raise the same error.
                    return None
            watcher._hears(watcher._on_c_call, sys._getframe(1), function)
        return None


for _code in (Watcher._event, Monitor._starts, Monitor._calls, Monitor._is_thrown_into):
    # These callbacks also run within compiled code.
    is_kept_from_compiler(_code.__code__)


def new_watcher(
    on_call: OnCall, on_c_call: OnCCall, names: Container[str], codes: Container[int], faults: Faults
) -> Watcher:
    """Make the fastest kind of watcher that is available; within another watcher, one of the same kind."""
    is_there = _monitoring is not None and Monitor.place() is not None
    kind = type(_HERE.watcher) if _HERE.watcher is not None else Monitor if is_there else Watcher
    return kind(on_call, on_c_call, names, codes, faults)


class Unwatched:
    """A context that hides graphplan's own work from the watcher, to save time. :meth:`run` runs the step's calls."""

    __slots__ = ("_is_running", "_outcome", "_watcher")
    _outcome: tuple[Any] | None

    def __enter__(self) -> Unwatched:
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
        """Return ``func(*args, **kwargs)``. It runs watched, unless it ``is_native``, that is, runs no Python."""
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

    def result_despite(
        self, error: Exception, func: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> Any:
        """Return the result of ``func`` after graphplan's own work raised ``error``; re-raise an error of ``func``."""
        if self._is_running:
            raise error
        return self.run(func, args, kwargs) if self._outcome is None else self._outcome[0]


PASSING.add(Unwatched.run.__code__)
