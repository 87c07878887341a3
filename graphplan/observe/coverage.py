"""Which instructions of the step's code ran.

What code names in a branch that no traced step takes is nothing that the step has read: ``self.global_step`` in
``if batch_idx % 100 == 0: self.show(self.global_step)``. To hear of each instruction takes long, so it is asked only
where such a value would refuse the step.
"""

from __future__ import annotations

import dis
import sys
from types import CodeType, FrameType
from typing import Any

from graphplan.environment.origin import is_library
from graphplan.observe.names import jumps_to
from graphplan.observe.watching import is_kept_from_compiler

_monitoring: Any = getattr(sys, "monitoring", None)
"""Since Python 3.12, in which a trace function does not hear of all instructions of the first call that it sees."""
_NAME = "graphplan coverage"
_NOP = bytes((dis.opmap["NOP"], 0))
_LEAVING = ("RETURN", "RAISE", "RERAISE")


class Coverage:
    """Notes what runs, while it is entered, of the user's code and that of installed packages: of this thread, by a
    trace function, unless another one (of a debugger) is set or comes to be.
    """

    def __init__(self) -> None:
        self._ran: dict[int, tuple[CodeType, set[int]]] = {}
        self._trace: Any = None

    def __enter__(self) -> Coverage:
        if sys.gettrace() is None:
            self._trace = self._call
            sys.settrace(self._trace)
        return self

    def __exit__(self, *exc: object) -> None:
        if self._trace is None:
            return
        if sys.gettrace() is self._trace:
            sys.settrace(None)
        else:
            # What ran after that is not known.
            self._ran.clear()

    def _call(self, frame: FrameType, event: str, arg: Any) -> Any:
        code = frame.f_code
        if is_library(code.co_filename):
            return None
        frame.f_trace_lines, frame.f_trace_opcodes = False, True
        ran = self._ran.setdefault(id(code), (code, set()))[1]

        def note(frame: FrameType, event: str, arg: Any) -> Any:
            ran.add(frame.f_lasti)
            return note

        return note

    def of(self, code: CodeType) -> CodeType:
        """``code`` without the instructions that did not run; itself if it was not seen to run."""
        _, ran = self._ran.get(id(code), (code, set()))
        return _without_unused(code, ran) if ran else code


class MonitoredCoverage(Coverage):
    """The same by ``sys.monitoring`` (:pep:`669`), of all threads, if a number for another tool is left."""

    def __enter__(self) -> Coverage:
        self._tool = next((number for number in range(6) if _monitoring.get_tool(number) is None), None)
        if self._tool is not None:
            _monitoring.use_tool_id(self._tool, _NAME)
            for event, callback in self._callbacks().items():
                _monitoring.register_callback(self._tool, event, callback)
            _monitoring.set_events(self._tool, _monitoring.events.PY_START | _monitoring.events.PY_RESUME)
            # What an earlier one need not be told of again.
            _monitoring.restart_events()
        return self

    def __exit__(self, *exc: object) -> None:
        if self._tool is None:
            return
        _monitoring.set_events(self._tool, 0)
        # Other threads may be about to add theirs.
        for code, _ in list(self._ran.values()):
            _monitoring.set_local_events(self._tool, code, 0)
        for event in self._callbacks():
            _monitoring.register_callback(self._tool, event, None)
        _monitoring.restart_events()
        _monitoring.free_tool_id(self._tool)

    def _callbacks(self) -> dict[int, Any]:
        events = _monitoring.events
        return {events.PY_START: self._starts, events.PY_RESUME: self._starts, events.INSTRUCTION: self._runs}

    def _starts(self, code: CodeType, offset: int) -> Any:
        if not is_library(code.co_filename) and id(code) not in self._ran:
            self._ran[id(code)] = code, {offset}
            _monitoring.set_local_events(self._tool, code, _monitoring.events.INSTRUCTION)
        return _monitoring.DISABLE

    def _runs(self, code: CodeType, offset: int) -> Any:
        self._ran[id(code)][1].add(offset)
        return _monitoring.DISABLE


for _code in (Coverage._call, MonitoredCoverage._starts, MonitoredCoverage._runs):
    is_kept_from_compiler(_code.__code__)


def new_coverage() -> Coverage:
    """The kind that hears of all instructions here."""
    return Coverage() if _monitoring is None else MonitoredCoverage()


def _without_unused(code: CodeType, ran: set[int]) -> CodeType:
    """``code``, which is only looked at, with nothing in the place of blocks of which no instruction ran."""
    left = bytearray(code.co_code)
    steps = list(dis.get_instructions(code))
    first, is_used = 0, False
    for step, following in zip(steps, [*steps[1:], None], strict=True):
        is_used |= step.offset in ran
        ends = jumps_to(step.opname) or step.opname.startswith(_LEAVING)
        if following is None or ends or following.is_jump_target:
            end = len(left) if following is None else following.offset
            if not is_used:
                left[first:end] = _NOP * ((end - first) // 2)
            first, is_used = end, False
    return code.replace(co_code=bytes(left))
