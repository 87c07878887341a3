"""Which replays of a program are checked."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from graphplan.errors import OptionError
from graphplan.program import NO_CHECK

EVERY = 1000
"""The geometric schedule doubles up to here, and then goes on in steps of this size."""


@dataclass(frozen=True, slots=True)
class Schedule:
    """``every`` is None for the geometric schedule (replays 1, 2, 4, 8, … and every 1000th), 0 for no checks."""

    every: int | None

    @classmethod
    def parse(cls, value: Any) -> Schedule:
        """From ``verify=``: ``"geometric"``, n for every n-th replay, or ``"off"``, False, None or 0 for none.

        Raises:
            OptionError: for anything else.
        """
        if value == "geometric":
            return cls(None)
        if value in ("off", None, False):
            return cls(0)
        if isinstance(value, int) and not isinstance(value, bool) and value >= 1:
            return cls(value)
        raise OptionError(f"verify is {value!r}; expected 'geometric', 'off', or n >= 1 for every n-th replay")

    def after(self, number: int) -> int:
        """The next replay (counted from 1) that is checked after replay ``number``."""
        if self.every is not None:
            return (number // self.every + 1) * self.every if self.every else NO_CHECK
        if number == 0:
            return 1
        return 2 * number if 2 * number < EVERY else (number // EVERY + 1) * EVERY
