"""Random numbers that a step draws on the host, and what is certain whatever is drawn.

Code that leaves out a layer by chance draws whether it is to: ``torch.rand([]) < share``. With a share of 0 no number
is below it, and reading that decides nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from ctypes import c_float
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from graphplan.trace.operands import Operand
from graphplan.trace.operator_schemas import OperatorCall

UNIFORM = ("aten.rand.default", "aten.rand.generator")
"""Operators that draw from 0 to 1, without 1."""
_OUTSIDE = {
    **dict.fromkeys(("aten.lt.Scalar", "aten.ge.Scalar"), lambda bound: bound <= 0 or bound >= 1),
    **dict.fromkeys(
        ("aten.gt.Scalar", "aten.le.Scalar", "aten.eq.Scalar", "aten.ne.Scalar"), lambda bound: bound < 0 or bound >= 1
    ),
}
"""Comparisons, and for which bounds their truth does not depend on a number from 0 to 1, without 1."""


def is_certain(comparison: str, bound: Any, dtype: torch.dtype) -> bool:
    """Return True if comparing any number of that type from 0 to 1, without 1, with ``bound`` has one result."""
    outside = _OUTSIDE.get(comparison)
    if outside is None or not isinstance(bound, int | float):
        return False
    # The device rounds a bound to the type of what it is compared with.
    rounded = c_float(bound).value if dtype is torch.float32 else float(bound)
    return outside(bound) and outside(rounded)


@dataclass(slots=True)
class _Drawn:
    dtype: torch.dtype
    repeat: Callable[[], Any]
    memory: StorageWeakRef
    is_void: bool = True


class UniformDraws:
    """The numbers that a step has ``drawn`` on the host, by operand, and that were not written to since."""

    def __init__(self) -> None:
        self.drawn: dict[Operand, _Drawn] = {}

    def add(self, operand: Operand, call: OperatorCall, out: Tensor) -> None:
        """Note a new draw, of one of :data:`UNIFORM`."""
        if out.device.type != "cpu" or out.dtype not in (torch.float32, torch.float64):
            return
        # What is left out stands for defaults, which may be others by the time of a replay.
        given = {**call.kwargs, "dtype": out.dtype, "device": out.device, "layout": out.layout, "pin_memory": False}
        memory = StorageWeakRef(out.untyped_storage())
        self.drawn[operand] = _Drawn(out.dtype, partial(call.schema.operator, *call.args, **given), memory)

    def decides(self, name: str, operands: Sequence[Operand]) -> bool:
        """Return True if an operator compares what was drawn."""
        return name in _OUTSIDE and operands[0] in self.drawn

    def take(self, name: str, args: Sequence[Any], operands: Sequence[Operand], *, views: bool) -> bool:
        """Note an operator, which may only make ``views``. True if it compares a draw with a certain result."""
        if self.decides(name, operands):
            drawn = self.drawn[operands[0]]
            # A view may see the same memory otherwise.
            is_seen = args[0].dtype is drawn.dtype and not args[0].is_neg()
            if is_seen and is_certain(name, args[1], drawn.dtype):
                return True
        for operand in operands if not views else ():
            if operand in self.drawn:
                self.drawn[operand].is_void = False
        return False

    def repeats(self) -> list[Callable[[], Any]]:
        """After the step: what draws again, in order, the numbers that only certain results came of."""
        return [drawn.repeat for drawn in self.drawn.values() if drawn.is_void and drawn.memory.expired()]
