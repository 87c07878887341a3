"""Watchers of the calls that one thread's Python makes.

A profile function (``sys.setprofile``) hears of every call and every return. Since Python 3.12 there is monitoring
(:pep:`669`), which need not tell of returns, nor again of a place in the code of which all is known.
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
"""Code that looks at steps, and torch's that leads to operators: what these call themselves is no part of a step."""
_RUN = "run"
"""But for what ``Aside.run`` is given to call."""


def is_silent(code: CodeType) -> bool:
    """Whether what ``code`` calls is no part of a step."""
    return code.co_filename.startswith(_SILENT) and code.co_name != _RUN


_monitoring: Any = getattr(sys, "monitoring", None)
"""Since Python 3.12."""
_NAME = "graphplan"
_PLACES = (4, 3, 5, 1, 0, 2)
"""Numbers that tools have; the last ones are those that debuggers, coverage and profilers agree upon."""
_BUILT_IN = frozenset(
    thing for thing in vars(builtins).values() if isinstance(thing, BuiltinFunctionType | type) and thing is not print
)
"""Python's own functions, and classes for their methods: what they do is in no tensor's memory."""
_IN_PYTHON = frozenset({FunctionType, MethodType, type})
"""What is no function in C: Python code is heard of as it starts."""
_LOCK = RLock()


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
    with one of ``names``, and for what code with an identity among ``codes``, which may grow, calls; Python's own
    functions but ``print``, and what torch calls around its operators, may be left out. Errors of both go to
    ``faults``. This one is a profile function; it puts the one before it back.
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


class Monitor(Watcher):
    """Watches by ``sys.monitoring``, beside other tools.

    Whatever an exception in the middle of :meth:`start` or :meth:`stop` leaves undone (Ctrl-C), the next one does.
    """

    _watching: ClassVar[weakref.WeakSet[Monitor]] = weakref.WeakSet()
    """The innermost of every thread."""

    def start(self) -> None:
        """See :meth:`Watcher.start`."""
        # Neither is this part of what is watched, nor the end.
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
        """The number by which the interpreter knows the monitors, or is going to; None if all are taken."""
        tools = {number: _monitoring.get_tool(number) for number in _PLACES}
        found = [number for name in (_NAME, None) for number in _PLACES if tools[number] == name]
        return found[0] if found else None

    @classmethod
    def _listen(cls) -> None:
        """Have the interpreter tell of calls for as long as there are monitors."""
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
        # What an earlier one did not want to hear of again, or another tool that is here next.
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
        # Another thread's may not know yet what this one's knows.
        return _monitoring.DISABLE if is_known and len(cls._watching) == 1 else None

    @classmethod
    def _is_thrown_into(cls, code: CodeType, offset: int, error: BaseException) -> None:
        watcher = _HERE.watcher
        if type(watcher) is Monitor and not watcher.is_paused:
            watcher._hears(watcher._on_call, sys._getframe(1), code)

    def _hears(self, on_event: Callable[[FrameType, Any], object], frame: FrameType, called: Any) -> object:
        """Tell of a call: of the code in ``frame``, or of a function by that."""
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
        # One place in the code may call one function now and another one later: all of them are looked at.
        watcher = _HERE.watcher
        if is_built_in or type(watcher) is not Monitor:
            return None
        if watcher.is_paused:
            # It is in one place that what is given to run is run unwatched.
            return _monitoring.DISABLE if code is Aside.run.__code__ else None
        if function.__name__ in watcher._names or id(code) in watcher._codes:
            if kind is MethodDescriptorType:
                try:
                    function = function.__get__(first, type(first))
                except TypeError:
                    # The call itself is about to fail with it.
                    return None
            watcher._hears(watcher._on_c_call, sys._getframe(1), function)
        return None


for _code in (Watcher._event, Monitor._starts, Monitor._calls, Monitor._is_thrown_into):
    # A watcher hears of calls in the middle of compiled code, too.
    is_kept_from_compiler(_code.__code__)


def new_watcher(
    on_call: OnCall, on_c_call: OnCCall, names: Container[str], codes: Container[int], faults: Faults
) -> Watcher:
    """The kind of watcher that takes the least time here; within another one, one of its kind."""
    is_there = _monitoring is not None and Monitor.place() is not None
    kind = type(_HERE.watcher) if _HERE.watcher is not None else Monitor if is_there else Watcher
    return kind(on_call, on_c_call, names, codes, faults)


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


PASSING.add(Aside.run.__code__)
