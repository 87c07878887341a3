"""Random numbers that a step draws on the host, and what is certain whatever is drawn.

Code that leaves out a layer by chance draws whether it is to: ``torch.rand([]) < share``. With a share of 0 no number
is below it, and reading that decides nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from ctypes import c_float
from typing import Any

import torch
from torch import Tensor

from graphplan.trace.operands import Operand

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


class UniformDraws:
    """The numbers that a step has ``drawn`` on the host, by operand with their types, and not written to since."""

    def __init__(self) -> None:
        self.drawn: dict[Operand, torch.dtype] = {}

    def add(self, operand: Operand, out: Tensor) -> None:
        """Note a new draw, of one of :data:`UNIFORM`."""
        if out.device.type == "cpu" and out.dtype in (torch.float32, torch.float64):
            self.drawn[operand] = out.dtype

    def decides(self, name: str, operands: Sequence[Operand]) -> bool:
        """Return True if an operator compares what was drawn."""
        return name in _OUTSIDE and operands[0] in self.drawn

    def is_certain(self, name: str, args: Sequence[Any], operands: Sequence[Operand]) -> bool:
        """Return True if an operator compares a draw, with a certain result."""
        if not self.decides(name, operands):
            return False
        dtype = self.drawn[operands[0]]
        # A view may see the same memory otherwise.
        return args[0].dtype is dtype and not args[0].is_neg() and is_certain(name, args[1], dtype)
