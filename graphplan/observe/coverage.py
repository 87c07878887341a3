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

_NOP = bytes((dis.opmap["NOP"], 0))
_LEAVING = ("RETURN", "RAISE", "RERAISE")


class Coverage:
    """Notes what this thread runs, while it is entered, of the user's code and that of installed packages. Nothing
    where another trace function (of a debugger) is set, or comes to be.
    """

    def __init__(self) -> None:
        self._ran: dict[int, tuple[CodeType, set[int]]] = {}
        self._trace = self._enter if sys.gettrace() is None else None

    def __enter__(self) -> Coverage:
        if self._trace is not None:
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

    def _enter(self, frame: FrameType, event: str, arg: Any) -> Any:
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


is_kept_from_compiler(Coverage._enter.__code__)


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
