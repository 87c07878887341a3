"""For what part of the time a device has nothing to do, seen from a thread that looks again and again.

Events cannot tell: they say when a step began and ended on the device, and not whether it waited for the host between.
"""

from __future__ import annotations

from threading import Event, Thread
from time import perf_counter
from typing import Protocol

_PAUSE = 0.0002
"""Seconds between two looks, of which one takes some microseconds."""
_MOST = 20_000
"""Looks after which it is enough."""


class Queue(Protocol):
    """A stream."""

    def query(self) -> bool:
        """Whether all that was submitted to it is done."""


class Idleness:
    """Looks at ``stream`` from now on, until :meth:`end`. What is seen holds for the time since the look before."""

    def __init__(self, stream: Queue) -> None:
        self._stream = stream
        self._looks = 0
        self._idle = 0.0
        self._start = self._last = perf_counter()
        self._ended = Event()
        self._thread = Thread(target=self._look_again, name="graphplan-idleness", daemon=True)
        self._thread.start()

    def _look_again(self) -> None:
        while not self._ended.wait(_PAUSE) and self._look():
            pass

    def _look(self) -> bool:
        """Whether there is anything more to see."""
        try:
            is_idle = self._stream.query()
        except RuntimeError:
            # A fault of the device, which whoever uses it is told of.
            self._looks = _MOST
            return False
        now = perf_counter()
        self._idle += is_idle * (now - self._last)
        self._last = now
        self._looks += 1
        return self._looks < _MOST

    def end(self) -> float:
        """Look a last time, and say for what part of the time there was nothing to do, from 0 to 1."""
        self._ended.set()
        self._thread.join()
        if self._looks < _MOST:
            self._look()
        return self._idle / (self._last - self._start) if self._last > self._start else 0.0
