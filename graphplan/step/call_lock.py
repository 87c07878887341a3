"""One call of a step at a time. The lock is tried, never waited for. If it is taken, the stacks of all threads are
searched for the call that holds it, since an interrupt may have left it locked.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from threading import Lock, get_ident, local
from traceback import walk_stack
from typing import NoReturn

from graphplan.errors import BusyError, CopyError

_RUNNING = local()


def runs_within_step() -> bool:
    """Whether this thread is in the Python of a step: what is called there is part of that step."""
    return getattr(_RUNNING, "depth", 0) > 0


@contextmanager
def running_step() -> Iterator[None]:
    """Make what the block calls a part of a step."""
    _RUNNING.depth = getattr(_RUNNING, "depth", 0) + 1
    try:
        yield
    finally:
        _RUNNING.depth -= 1


class CallLock:
    """What may run once at a time, and can be neither copied nor pickled. ``takers`` are methods that take a turn."""

    takers: tuple[str, ...] = ("__call__", "invalidate", "close")

    def __init__(self) -> None:
        self._turn = Lock()

    @contextmanager
    def _alone(self) -> Iterator[None]:
        """Hold the lock for the block. Raises BusyError if another call holds it."""
        if not self._turn.acquire(False):
            self._check_turn()
        try:
            yield
        finally:
            self._turn.release()

    def _check_turn(self) -> None:
        """Raise BusyError in the method that calls this, unless no call is left that could hold the lock."""
        codes = {getattr(type(self), name).__code__ for name in self.takers}
        within = -1  # The method that asks is in one of its own frames.
        for thread, innermost in sys._current_frames().items():
            for frame, _ in walk_stack(innermost):
                if frame.f_code in codes and frame.f_locals.get("self") is self:
                    if thread != get_ident():
                        raise BusyError(
                            "a graphed step was called, closed or invalidated while another thread is in one of its "
                            "calls; expected one call at a time, since all work on the same storages. Give each thread "
                            "a step and a model of its own, or put a lock around the calls"
                        )
                    within += 1
        if within:
            raise BusyError(
                "a graphed step was called, closed or invalidated from within its own call; expected one call at a "
                "time. Let the step's function call the functions that it is made of instead of the step"
            )

    def __reduce__(self) -> NoReturn:
        raise CopyError(
            "a graphed step cannot be copied or pickled: its programs work on the storages of its owners, in this "
            "process. Copy or save the model and the optimizer instead, and make a step for them with graph_step"
        )
