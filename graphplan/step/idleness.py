"""How often a device has nothing to do, seen from a thread that looks again and again.

Events cannot tell: they say when a step began and ended on the device, and not whether it waited for the host between.
"""

from __future__ import annotations

from threading import Event, Thread
from typing import Protocol

_PAUSE = 0.0002
"""Seconds between two looks, of which one takes some microseconds."""
_FEWEST, _MOST = 10, 20_000
"""Looks that say something, and after which it is enough."""


class Queue(Protocol):
    """A stream."""

    def query(self) -> bool:
        """Whether all that was submitted to it is done."""


class Idleness:
    """Looks at ``stream`` from now on, until :meth:`end`."""

    def __init__(self, stream: Queue) -> None:
        self._stream = stream
        self._looks = self._idle = 0
        self._ended = Event()
        self._thread = Thread(target=self._look, name="graphplan-idleness", daemon=True)
        self._thread.start()

    def _look(self) -> None:
        while self._looks < _MOST and not self._ended.wait(_PAUSE):
            try:
                self._idle += self._stream.query()
            except RuntimeError:
                # A fault of the device, which whoever uses it is told of.
                return
            self._looks += 1

    def end(self) -> float | None:
        """Stop, and say at what part of the looks there was nothing to do; None after too few of them."""
        self._ended.set()
        self._thread.join()
        return self._idle / self._looks if self._looks >= _FEWEST else None
