"""Measure the fraction of time in which CUDA streams are idle, by a thread that polls them.

Events cannot measure it: they tell when a step began and ended on the device, not whether it waited for the host.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from threading import Event, Lock, Thread
from time import perf_counter
from typing import Any

CAPTURE_LOCK = Lock()
"""Held during a capture to stop polling: querying a capturing stream invalidates the capture."""
_PAUSE = 0.0002
"""Seconds between two polls. One poll takes some microseconds."""
_MOST = 20_000
"""Maximum polls, at least four seconds, for a measurement that is not ended, such as that of a fit's last step."""


class Idleness:
    """Polls ``streams`` from now until :meth:`end`. The result of a poll counts for the time since the previous one."""

    def __init__(self, streams: Sequence[Any]) -> None:
        self._streams = streams
        self._looks = 0
        self._idle = 0.0
        self._start = self._last = perf_counter()
        self._ended = Event()
        self._thread = Thread(target=self._look_again, name="graphplan-idleness", daemon=True)
        with suppress(RuntimeError):
            # If the process cannot start another thread, training continues without the measurement.
            self._thread.start()

    def _look_again(self) -> None:
        """Poll in this thread only: a KeyboardInterrupt cannot come between acquiring and releasing the lock here."""
        while self._looks < _MOST and not self._ended.wait(_PAUSE):
            self._look()
        if self._looks < _MOST:
            self._look()

    def _look(self) -> None:
        if not CAPTURE_LOCK.acquire(blocking=False):
            return
        try:
            is_idle = all(stream.query() for stream in self._streams)
        except RuntimeError:
            # A device error, which the next CUDA call of the training code raises too.
            self._looks = _MOST
            return
        finally:
            CAPTURE_LOCK.release()
        now = perf_counter()
        self._idle += is_idle * (now - self._last)
        self._last = now
        self._looks += 1

    def end(self) -> float:
        """Poll a last time; return the idle fraction of the time, from 0 to 1. Return 1 if the thread did not start."""
        self._ended.set()
        if self._thread.ident is None:
            return 1.0
        self._thread.join()
        return self._idle / (self._last - self._start) if self._last > self._start else 0.0
