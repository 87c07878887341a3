"""Reads of tensors on the host that a replay can do without, and what a capture gives for them.

A value that code only asserts decides nothing but whether the step goes on (:mod:`graphplan.observe.branches`). Eager
steps read it, and those that replays are checked with; a replay does not, and a capture on a device cannot. A truth
value on which code branches is expected to be the one that the traces have read: a replay reads it where the step does,
and ends there if it is another one. What is computed from Python's numbers alone is the same in each step: a mask of
that kind, which selects a number of rows that torch would have to read, is given to the capture as the positions that
it selects.
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

from graphplan.environment.origin import TORCH, is_ours
from graphplan.errors import HostSyncError, OutcomeError
from graphplan.observe.branches import Use, branches_of
from graphplan.observe.source import runs_steps
from graphplan.observe.subscripts import begins_slices

_MACHINERY = tuple(
    os.path.join(TORCH, name) for name in ("_compile.py", "_ops.py", "_dynamo", "utils/_python_dispatch.py")
)
"""What calls a dispatch mode."""
_SUMS_DIFFER = sys.version_info >= (3, 12)
"""From then on ``sum()`` makes up for what additions round off."""


class Place(NamedTuple):
    """An expression in a file. One is several instructions: which of them calls differs while a profile is on. For one
    in torch's own code, which many calls come to, ``caller`` is the expression that calls torch.
    """

    filename: str
    line: int
    function: str
    where: tuple[int | None, ...]
    caller: Place | None = None

    def __str__(self) -> str:
        if not self.filename:
            return self.function
        text = linecache.getline(self.filename, self.line).strip()
        return f"{os.path.basename(self.filename)}:{self.line} in {self.function}" + (f": `{text}`" if text else "")


@dataclass(frozen=True, slots=True)
class HostRead:
    """A read that does not refuse a step, and what a capture is given for it: the value that was read, the tensors of
    a shape that depends on values, or the positions that ``nonzero`` has found.

    It is ``asserted`` by the step's code, ``constant`` (the same in each step), or torch itself looks whether it is in
    range. Or it is ``expected`` to be the same in most steps, and replays compare it; ``error`` refuses a step in which
    it is not. ``waits``: a capture would have to wait for it.
    """

    place: Place
    value: Any
    asserted: bool = False
    constant: bool = False
    waits: bool = False
    error: HostSyncError | None = None

    @property
    def expected(self) -> bool:
        """Return True if replays compare the value."""
        return self.error is not None

    def compare(self, value: Any) -> None:
        """Raise OutcomeError if another step has read another ``value``."""
        if value != self.value:
            assert self.error is not None
            raise OutcomeError(
                f"the value that is read on the host at {self.place} is {value}, expected {self.value} as in the "
                "traced steps",
                refusal=self.error,
            )


def _asking(frame: FrameType | None) -> FrameType | None:
    """The innermost frame around ``frame`` that is neither graphplan's nor a dispatch mode's: the one that reads."""
    while frame is not None and ((file := frame.f_code.co_filename).startswith(_MACHINERY) or is_ours(file)):
        frame = frame.f_back
    return frame


def begins_slice() -> bool:
    """Return True if the code that reads a tensor only writes to slices with what it reads."""
    frame = _asking(sys._getframe(1))
    return frame is not None and begins_slices(frame.f_code, frame.f_lasti)


def is_torchs() -> bool:
    """Return True if it is torch's own code that reads a tensor."""
    frame = _asking(sys._getframe(1))
    return frame is not None and frame.f_code.co_filename.startswith(TORCH)


ENGINE = Place("", 0, "autograd's engine", ())
"""Where autograd's own thread reads a tensor: no frame there is anyone's but this package's."""


def find_place() -> Place:
    """Where the tensor is read that is being read."""
    frame = _asking(sys._getframe(1))
    if frame is None:
        return ENGINE
    outer: FrameType | None = frame
    while outer is not None and outer.f_code.co_filename.startswith(TORCH):
        outer = outer.f_back
    caller = None if outer is frame or outer is None or is_ours(outer.f_code.co_filename) else _place_of(outer)
    return _place_of(frame, caller)


def _place_of(frame: FrameType, caller: Place | None = None) -> Place:
    code = frame.f_code
    positions: Any = getattr(code, "co_positions", None)
    where = next(islice(positions(), frame.f_lasti // 2, None)) if positions is not None else (frame.f_lasti,)
    return Place(code.co_filename, frame.f_lineno, code.co_name, where, caller)


def is_asserted() -> bool:
    """Return True if the value that is being read is only asserted, and the step ends where that fails."""
    frame = _asking(sys._getframe(1))
    while frame is not None and not is_ours(frame.f_code.co_filename):
        use = branches_of(frame).use_at(frame.f_lasti)
        frame = frame.f_back
        if use is not Use.RETURNED:
            return use is Use.ASSERTED and _ends_step(frame)
        # Code that returns the value may have asserted it, too.
        if frame is None or not branches_of(frame).lets_out(frame.f_lasti):
            return False
    return False


def sums_otherwise() -> bool:
    """Return True if ``sum()`` adds the numbers that are being added, and does not round as ``+`` does."""
    frame = _asking(sys._getframe(1)) if _SUMS_DIFFER else None
    return frame is not None and not dis.opname[frame.f_code.co_code[frame.f_lasti]].startswith(("BINARY_", "INPLACE_"))


def ends_step(*kinds: type[BaseException]) -> bool:
    """Return True if an exception of ``kinds`` that what runs now raises goes through all of the step's code."""
    frame = _asking(sys._getframe(1))
    return frame is not None and _ends_step(frame, kinds)


def _ends_step(frame: FrameType | None, kinds: tuple[type[BaseException], ...] = (BaseException,)) -> bool:
    """Whether an exception of ``kinds`` that comes to ``frame`` goes through all of the step's code."""
    while frame is not None and not runs_steps(frame.f_code):
        if not is_ours(frame.f_code.co_filename):
            kinds = branches_of(frame).lets_out(frame.f_lasti, kinds)
            if not kinds:
                return False
        frame = frame.f_back
    return True


class KnownReads:
    """What the traced steps were seen to read, for a capture of the same step."""

    def __init__(self, reads: Sequence[HostRead] = ()) -> None:
        self._reads: dict[Place, list[HostRead]] = {}
        for read in reads:
            self._reads.setdefault(read.place, []).append(read)

    def __contains__(self, place: Place) -> bool:
        return place in self._reads

    def take(self, place: Place) -> HostRead:
        """Return the next recorded read at ``place``; where all were returned, the last one again."""
        reads = self._reads[place]
        return reads.pop(0) if len(reads) > 1 else reads[0]
