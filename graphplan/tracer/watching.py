"""How somebody hears of the calls that one thread's Python makes.

A profile function (``sys.setprofile``) hears of every call and every return. Since Python 3.12 there is monitoring
(:pep:`669`), which need not tell of returns, nor again of a place in the code of which all is known.
"""

from __future__ import annotations

import cProfile
import sys
from collections.abc import Callable
from pathlib import Path
from threading import Lock, get_ident
from types import BuiltinFunctionType, CodeType, FrameType, MethodDescriptorType
from typing import Any, ClassVar

OnCall = Callable[[FrameType], bool]
OnCCall = Callable[[FrameType, Any], bool]
_HOME = str(Path(__file__).parent)
"""Code here looks at steps, and is no part of them."""
_monitoring: Any = getattr(sys, "monitoring", None)
"""Since Python 3.12."""


class Watcher:
    """Has ``on_call(frame)`` called when Python code begins to run or goes on, and ``on_c_call(frame, function)`` when
    Python calls a function in C, from :meth:`start` to :meth:`stop`, in the thread that calls these. What they return
    says whether all is known now of this code, or of this place in the code: they may still be called for it.
    """

    def __init__(self, on_call: OnCall, on_c_call: OnCCall) -> None:
        self._on_call = on_call
        self._on_c_call = on_c_call
        self.is_paused = False

    def start(self) -> None:
        """Watch what this thread runs."""
        raise NotImplementedError

    def stop(self) -> None:
        """No longer watch."""
        raise NotImplementedError

    def pause(self) -> None:
        """Take no notice, until :meth:`resume`."""
        self.is_paused = True

    def resume(self) -> None:
        """Watch again."""
        self.is_paused = False


class ProfileFunction(Watcher):
    """Watches by a profile function, in place of another one, which it puts back."""

    def start(self) -> None:
        """See :meth:`Watcher.start`."""
        self._previous: Any = sys.getprofile()
        sys.setprofile(self._event)

    def stop(self) -> None:
        """See :meth:`Watcher.stop`."""
        sys.setprofile(None)
        if isinstance(self._previous, cProfile.Profile):
            # cProfile shows as its object, which is no profile function.
            self._previous.enable()
        elif self._previous is not None:
            sys.setprofile(self._previous)

    def pause(self) -> None:
        """See :meth:`Watcher.pause`."""
        super().pause()
        sys.setprofile(None)

    def resume(self) -> None:
        """See :meth:`Watcher.resume`."""
        super().resume()
        sys.setprofile(self._event)

    def _event(self, frame: FrameType, event: str, arg: Any) -> None:
        if event == "call":
            self._on_call(frame)
        elif event == "c_call":
            self._on_c_call(frame, arg)


class Monitor(Watcher):
    """Watches by ``sys.monitoring``, beside whoever else does."""

    watching: ClassVar[dict[int, Monitor]] = {}
    """The innermost of each thread, by the thread's identifier."""
    _lock: ClassVar[Lock] = Lock()
    _tool: ClassVar[int | None] = None

    def start(self) -> None:
        """See :meth:`Watcher.start`."""
        with self._lock:
            if not self.watching:
                self._install()
            self._outer = self.watching.get(get_ident())
            self.watching[get_ident()] = self
        # What an earlier one did not want to hear of again.
        _monitoring.restart_events()

    def stop(self) -> None:
        """See :meth:`Watcher.stop`."""
        with self._lock:
            del self.watching[get_ident()]
            if self._outer is not None:
                self.watching[get_ident()] = self._outer
                _monitoring.restart_events()
            elif not self.watching:
                self._uninstall()

    @classmethod
    def free_tool(cls) -> int | None:
        """The number by which the interpreter knows the watchers, or is going to; None if all are taken."""
        if cls._tool is not None:
            return cls._tool
        # The last ones are those that debuggers, coverage and profilers agree upon.
        return next((number for number in (4, 3, 5, 1, 0, 2) if _monitoring.get_tool(number) is None), None)

    @classmethod
    def _callbacks(cls) -> dict[int, Callable[..., object]]:
        events = _monitoring.events
        return {
            events.PY_START: cls._starts,
            events.PY_RESUME: cls._starts,
            events.PY_THROW: cls._is_thrown_into,
            events.CALL: cls._calls,
        }

    @classmethod
    def _install(cls) -> None:
        cls._tool = tool = cls.free_tool()
        assert tool is not None
        _monitoring.use_tool_id(tool, "graphplan")
        for event, callback in cls._callbacks().items():
            _monitoring.register_callback(tool, event, callback)
        _monitoring.set_events(tool, sum(cls._callbacks()))

    @classmethod
    def _uninstall(cls) -> None:
        tool, cls._tool = cls._tool, None
        assert tool is not None
        _monitoring.set_events(tool, 0)
        for event in cls._callbacks():
            _monitoring.register_callback(tool, event, None)
        _monitoring.free_tool_id(tool)

    @classmethod
    def _starts(cls, code: CodeType, offset: int) -> object:
        if code.co_filename.startswith(_HOME):
            return _monitoring.DISABLE
        watcher = cls.watching.get(get_ident())
        is_known = watcher is not None and not watcher.is_paused and watcher._on_call(sys._getframe(1))
        return _monitoring.DISABLE if is_known and cls._is_alone() else None

    @classmethod
    def _is_thrown_into(cls, code: CodeType, offset: int, error: BaseException) -> None:
        watcher = cls.watching.get(get_ident())
        if watcher is not None and not watcher.is_paused:
            watcher._on_call(sys._getframe(1))

    @classmethod
    def _calls(cls, code: CodeType, offset: int, function: Any, first: Any) -> object:
        if code.co_filename.startswith(_HOME):
            return _monitoring.DISABLE
        watcher = cls.watching.get(get_ident())
        if watcher is None or watcher.is_paused:
            return None
        if type(function) is MethodDescriptorType:
            try:
                function = function.__get__(first, type(first))
            except TypeError:
                # The call itself is about to fail with it.
                return None
        elif not issubclass(type(function), BuiltinFunctionType):
            return None
        is_known = watcher._on_c_call(sys._getframe(1), function)
        return _monitoring.DISABLE if is_known and cls._is_alone() else None

    @classmethod
    def _is_alone(cls) -> bool:
        """Whether no other thread's may not know yet what this one's knows."""
        return len(cls.watching) == 1


def new_watcher(on_call: OnCall, on_c_call: OnCCall) -> Watcher:
    """The kind of watcher that takes the least time here."""
    kind = Monitor if _monitoring is not None and Monitor.free_tool() is not None else ProfileFunction
    return kind(on_call, on_c_call)


def watcher_of_thread() -> Watcher | None:
    """The one that watches this thread now, if any."""
    monitor = Monitor.watching.get(get_ident())
    if monitor is not None:
        return monitor
    function = sys.getprofile()
    if getattr(function, "__func__", None) is not ProfileFunction._event:
        return None
    watcher: Watcher = function.__self__  # type: ignore[union-attr]
    return watcher
