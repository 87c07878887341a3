"""For what part of the time CUDA streams have nothing to do, seen from a thread that looks again and again.

Events cannot tell: they say when a step began and ended on the device, and not whether it waited for the host between.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from threading import Event, Lock, Thread
from time import perf_counter
from typing import Any

UNDISTURBED = Lock()
"""No look is taken while it is held: CUDA gives up the capture of a stream that is asked how far it is."""
_PAUSE = 0.0002
"""Seconds between two looks, of which one takes some microseconds."""
_MOST = 20_000
"""Looks of a watch that is not ended, as that of a fit's last step: four seconds or more."""


class Idleness:
    """Looks at ``streams`` from now on, until :meth:`end`. What is seen holds for the time since the look before."""

    def __init__(self, streams: Sequence[Any]) -> None:
        self._streams = streams
        self._looks = 0
        self._idle = 0.0
        self._start = self._last = perf_counter()
        self._ended = Event()
        self._thread = Thread(target=self._look_again, name="graphplan-idleness", daemon=True)
        with suppress(RuntimeError):
            # A process that has all the threads it may have trains on.
            self._thread.start()

    def _look_again(self) -> None:
        """Only here, where no interrupt comes between taking the lock and giving it back."""
        while self._looks < _MOST and not self._ended.wait(_PAUSE):
            self._look()
        if self._looks < _MOST:
            self._look()

    def _look(self) -> None:
        if not UNDISTURBED.acquire(blocking=False):
            return
        try:
            is_idle = all(stream.query() for stream in self._streams)
        except RuntimeError:
            # A fault of the device, which its next user is told of.
            self._looks = _MOST
            return
        finally:
            UNDISTURBED.release()
        now = perf_counter()
        self._idle += is_idle * (now - self._last)
        self._last = now
        self._looks += 1

    def end(self) -> float:
        """Look a last time; the part of the time, from 0 to 1, without anything to do. 1 if no look was possible."""
        self._ended.set()
        if self._thread.ident is None:
            return 1.0
        self._thread.join()
        return self._idle / (self._last - self._start) if self._last > self._start else 0.0
