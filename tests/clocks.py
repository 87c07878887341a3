"""A clock that tests set, in the place of the speed gate's."""

from __future__ import annotations

from collections.abc import Callable

import pytest


class Clock:
    """Stands still but for what is added to ``time``.

    Attributes:
        rests: how often the device was waited for.
        idle: the share of time in which the device has nothing to do, whenever it is watched.
        passes: what time passes whenever the device is waited for.
    """

    def __init__(self, idle: float = 1.0, passes: Callable[[], float] = lambda: 0.0) -> None:
        self.time = 0.0
        self.passes = passes
        self.rests = 0
        self.watched = self.watching = 0
        self.idle = idle

    def now(self) -> float:
        return self.time

    def rest(self) -> float:
        self.rests += 1
        self.time += self.passes()
        return self.time

    def watch(self) -> Callable[[], float]:
        self.watched += 1
        self.watching += 1

        def end() -> float:
            self.watching -= 1
            return self.idle

        return end


def set_clock(monkeypatch: pytest.MonkeyPatch, clock: Clock) -> Clock:
    """Have all gates read ``clock``."""
    monkeypatch.setattr("graphplan.step.gate.Clock", lambda device: clock)
    return clock
