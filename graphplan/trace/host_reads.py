"""Host reads of tensors that do not refuse a step, and the values that a capture gets for them.

A value that code only asserts decides only whether the step goes on (:mod:`graphplan.observe.branches`). Eager steps
read it, also those of checks; a replay does not, and a capture on a device cannot. A truth value on which code branches
is expected to equal that of the traces: a replay reads it where the step does, and ends there if it differs. Values
that are computed from Python numbers alone are the same in each step. For a mask of that kind, torch would read on the
host how many rows it selects: a capture gets the positions that it selects instead.
"""

from __future__ import annotations

import dis
import linecache
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice
from types import FrameType
from typing import Any, NamedTuple

from torch import Tensor

from graphplan.environment.origin import TORCH, is_ours
from graphplan.errors import HostSyncError, OutcomeError
from graphplan.observe.branches import Use, branches_of
from graphplan.observe.source import runs_steps
from graphplan.observe.subscripts import result_begins_slices

_MACHINERY = tuple(
    os.path.join(TORCH, name) for name in ("_compile.py", "_ops.py", "_dynamo", "utils/_python_dispatch.py")
)
"""Code that calls a dispatch mode."""
_SUMS_DIFFER = sys.version_info >= (3, 12)
"""Since Python 3.12, ``sum()`` compensates for the rounding errors of additions."""


class CodePosition(NamedTuple):
    """An expression in a file, not an instruction: which of its instructions makes a call differs under a profile
    function. Many calls reach an expression in torch's own code: ``caller`` is the expression that calls torch.
    """

    filename: str
    line: int
    function: str
    where: tuple[int | None, ...]
    caller: CodePosition | None = None

    def __str__(self) -> str:
        if not self.filename:
            return self.function
        text = linecache.getline(self.filename, self.line).strip()
        return f"{os.path.basename(self.filename)}:{self.line} in {self.function}" + (f": `{text}`" if text else "")


@dataclass(frozen=True, slots=True)
class HostRead:
    """A read that does not refuse a step, and the value that a capture gets for it: the value read, the tensors whose
    shape depends on values, or the positions that ``nonzero`` has found.

    It is ``asserted`` by the step's code, ``constant`` (the same in each step), or torch itself checks its range. Or it
    is ``expected`` to be the same in most steps: replays compare it, and ``error`` refuses a step in which it differs.
    ``waits``: a capture would have to wait for it. ``of_all``: the value has the positions of all elements of a mask,
    and replays compare whether it selects all.
    """

    place: CodePosition
    value: Any
    asserted: bool = False
    constant: bool = False
    waits: bool = False
    error: HostSyncError | None = None
    of_all: bool = False

    @property
    def outcome(self) -> Any:
        """What :meth:`outcome_of` gives in a step like the traced ones."""
        return self.of_all or self.value

    def outcome_of(self, tensor: Tensor) -> Tensor:
        """Return, on its device, what replays compare if the step reads ``tensor``: its value, or whether the mask
        selects all elements.
        """
        return tensor.all() if self.of_all else tensor

    @property
    def expected(self) -> bool:
        """Whether replays compare the value."""
        return self.error is not None

    def compare(self, outcome: Any) -> None:
        """Raise OutcomeError if another step has read a value with a different ``outcome``."""
        if outcome == self.outcome:
            return
        assert self.error is not None
        what = f"the value that is read on the host at {self.place} is {outcome}, expected {self.outcome} as"
        if self.of_all:
            what = f"the mask at {self.place} does not select all elements, as it did"
        raise OutcomeError(f"{what} in the traced steps", refusal=self.error)


def _asking(frame: FrameType | None) -> FrameType | None:
    """Return the frame that reads: the innermost one, from ``frame`` on, outside graphplan and dispatch modes."""
    while frame is not None and ((file := frame.f_code.co_filename).startswith(_MACHINERY) or is_ours(file)):
        frame = frame.f_back
    return frame


def begins_slice() -> bool:
    """Return True if the integer being read begins slices, and the code only writes to these."""
    frame = _asking(sys._getframe(1))
    return frame is not None and result_begins_slices(frame.f_code, frame.f_lasti)


def is_torchs() -> bool:
    """Return True if torch's own code makes the current read."""
    frame = _asking(sys._getframe(1))
    return frame is not None and frame.f_code.co_filename.startswith(TORCH)


ENGINE = CodePosition("", 0, "autograd's engine", ())
"""The place of reads in the autograd engine's own thread, which has no Python frames but this package's."""


def find_place() -> CodePosition:
    """Return the place of the current read."""
    frame = _asking(sys._getframe(1))
    if frame is None:
        return ENGINE
    outer: FrameType | None = frame
    while outer is not None and outer.f_code.co_filename.startswith(TORCH):
        outer = outer.f_back
    caller = None if outer is frame or outer is None or is_ours(outer.f_code.co_filename) else _place_of(outer)
    return _place_of(frame, caller)


def _place_of(frame: FrameType, caller: CodePosition | None = None) -> CodePosition:
    code = frame.f_code
    positions: Any = getattr(code, "co_positions", None)
    where = next(islice(positions(), frame.f_lasti // 2, None)) if positions is not None else (frame.f_lasti,)
    return CodePosition(code.co_filename, frame.f_lineno, code.co_name, where, caller)


def is_asserted() -> bool:
    """Return True if the value being read is only asserted, and a failed assertion ends the step."""
    frame = _asking(sys._getframe(1))
    while frame is not None and not is_ours(frame.f_code.co_filename):
        use = branches_of(frame).use_at(frame.f_lasti)
        frame = frame.f_back
        if use is not Use.RETURNED:
            return use is Use.ASSERTED and _ends_step(frame)
        # A function that returns the value may assert it, too: its caller must not catch the exception.
        if frame is None or not branches_of(frame).lets_out(frame.f_lasti):
            return False
    return False


def sums_otherwise() -> bool:
    """Return True if ``sum()`` is adding the numbers, and rounds differently from ``+``."""
    frame = _asking(sys._getframe(1)) if _SUMS_DIFFER else None
    return frame is not None and not dis.opname[frame.f_code.co_code[frame.f_lasti]].startswith(("BINARY_", "INPLACE_"))


def ends_step(*kinds: type[BaseException]) -> bool:
    """Return True if no code of the step would catch an exception of ``kinds`` that is raised now."""
    frame = _asking(sys._getframe(1))
    return frame is not None and _ends_step(frame, kinds)


def _ends_step(frame: FrameType | None, kinds: tuple[type[BaseException], ...] = (BaseException,)) -> bool:
    """Return True if no code of the step would catch an exception of ``kinds`` that reaches ``frame``."""
    while frame is not None and not runs_steps(frame.f_code):
        if not is_ours(frame.f_code.co_filename):
            kinds = branches_of(frame).lets_out(frame.f_lasti, kinds)
            if not kinds:
                return False
        frame = frame.f_back
    return True


class KnownReads:
    """The reads of the traced steps, for a capture of the same step."""

    def __init__(self, reads: Sequence[HostRead] = ()) -> None:
        self._reads: dict[CodePosition, list[HostRead]] = {}
        for read in reads:
            self._reads.setdefault(read.place, []).append(read)

    def __contains__(self, place: CodePosition) -> bool:
        return place in self._reads

    def take(self, place: CodePosition) -> HostRead:
        """Return the next recorded read at ``place``; after the last one, that one again."""
        reads = self._reads[place]
        return reads.pop(0) if len(reads) > 1 else reads[0]
