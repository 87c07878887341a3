"""The schedule of checks: which replays of a program are checked."""

from __future__ import annotations

import math
from collections.abc import Callable
from time import perf_counter, process_time
from typing import Any

import torch

from graphplan.environment.devices import synchronize
from graphplan.errors import OptionError
from graphplan.program.program import NO_CHECK

EVERY = 1000  # The geometric schedule doubles up to this number, then continues in steps of this size.
SHARE = 0.01  # Fraction of the time that checks of the geometric schedule may take, from replay ``EARLY`` on.
EARLY = 64  # Number of early replays; the last one of them is always checked.
FREE, STEPS = 0.2, 16.0
"""Checks of early replays may take ``FREE`` seconds, for all programs of a step together. On an accelerator, checks,
traces and captures together may also take no longer than ``STEPS`` eager steps, not counting the steps that they do:
with what is not timed, such as memory that is freed, a start then takes about 20.
As many checks as fit are spread over the early replays. The first replay of a program is always checked.
"""


def parse_verify(value: Any) -> int | None:
    """Return ``verify=`` as a number: n for every n-th replay, 0 for none, None for the geometric schedule (1, 2, 4,
    8, … and every 1000th), of which a :class:`Timetable` skips some if checks are slow. Raises OptionError.
    """
    if value == "geometric":
        return None
    if value in ("off", None, False):
        return 0
    if isinstance(value, int) and not isinstance(value, bool) and value >= 1:
        return value
    raise OptionError(f"verify is {value!r}; expected 'geometric', 'off', or n >= 1 for every n-th replay")


def next_check(every: int | None, number: int) -> int:
    """Return the next replay (counted from 1) that is checked after replay ``number``."""
    if every is not None:
        return (number // every + 1) * every if every else NO_CHECK
    if number == 0:
        return 1
    return 2 * number if 2 * number < EVERY else (number // EVERY + 1) * EVERY


class Timetable:
    """The times of checks for one or several programs: no more often than ``every`` says. The timetable waits for
    ``device`` before it reads the time. ``agree`` turns the number of the next check into one for all ranks. ``clock``
    returns seconds; the default is the process time if ``device`` is the CPU, else wall-clock time.
    """

    def __init__(
        self,
        every: int | None,
        device: torch.device,
        agree: Callable[[int], int] = int,
        clock: Callable[[], float] | None = None,
    ) -> None:
        self._every = every
        self._device = device
        self._agree = agree
        self._clock = clock or (process_time if device.type == "cpu" else perf_counter)
        self._begun = 0.0
        self._latest: tuple[int, float] | None = None  # Number of the check before, and when it ended.

    def begin(self, number: int) -> None:
        """Note that replay ``number`` is about to be checked."""
        if self._every is None:
            self._begun = self._now()

    def end(self, number: int, step: float = math.inf, taken: float = 0.0, spent: float = 0.0) -> int:
        """Note that replay ``number`` was checked; return the replay to check next. All arguments but this one are in
        seconds: ``step`` is the time of an eager step, if known; ``taken`` the time of all checks of the step's
        programs; ``spent`` that of checks, traces and captures, without the time of the steps that they do.
        """
        then = next_check(self._every, number)
        if self._every is not None:
            return then
        now, before = self._now(), self._latest
        seconds = now - self._begun
        self._latest = number, now
        if number < EARLY:
            count = _fitting(FREE - taken, seconds)
            if self._device.type != "cpu" and step < math.inf:
                count = min(count, _fitting(STEPS * step - spent, seconds - step))
            return self._agree(_soon(number, count))
        if before is not None and number - before[0] > 1:
            seconds_per_step = (self._begun - before[1]) / (number - before[0] - 1)
            if seconds_per_step > 0:
                then = max(then, number + math.ceil(seconds / (SHARE * seconds_per_step)))
        return self._agree(then)

    def _now(self) -> float:
        synchronize(self._device)
        return self._clock()


def _fitting(left: float, seconds: float) -> int:
    """Return how many checks of ``seconds`` each fit into the seconds ``left``, at most ``EARLY``."""
    return max(0, math.floor(min(EARLY, left / seconds))) if seconds > 0 else EARLY


def _soon(number: int, count: int) -> int:
    """Return the next early replay to check, so that ``count`` further checks follow at a constant ratio."""
    doublings = math.log2(EARLY / number) / (count + 1)
    return min(EARLY, number * 2 ** max(1, round(doublings)))
