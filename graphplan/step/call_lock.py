"""A lock that allows one call of a step at a time. A call that finds it taken fails instead of waiting."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from threading import Lock, local
from typing import NoReturn

from graphplan.errors import BusyError, CopyError

_RUNNING = local()


def runs_within_step() -> bool:
    """Return True if this thread runs a step's Python code: a call made there is a part of that step."""
    return getattr(_RUNNING, "depth", 0) > 0


@contextmanager
def running_step() -> Iterator[None]:
    """Mark calls in the block as parts of a step."""
    _RUNNING.depth = getattr(_RUNNING, "depth", 0) + 1
    try:
        yield
    finally:
        _RUNNING.depth -= 1


class CallLock:
    """Base class of objects that allow one call at a time, and can be neither copied nor pickled."""

    def __init__(self) -> None:
        self._turn = Lock()
        self._end_turn: Callable[[], None] = self._turn.release

    @contextmanager
    def _alone(self) -> Iterator[None]:
        """Hold the lock for the block. Raises BusyError if another call holds it."""
        self._take_turn()
        try:
            yield
        finally:
            self._end_turn()

    def _take_turn(self) -> None:
        """Take the lock. Raises BusyError if a call holds it."""
        if not self._turn.acquire(False):
            raise BusyError(
                "a graphed step was called, closed or invalidated during one of its calls, in another thread or from "
                "within its own call; expected one call at a time, because all calls use the same storages. Give each "
                "thread its own step and model, or put a lock around the calls. In the step's function, call the "
                "original functions instead of the step"
            )

    def __reduce__(self) -> NoReturn:
        raise CopyError(
            "a graphed step cannot be copied or pickled: its programs work on the storages of its owners, in this "
            "process. Copy or save the model and the optimizer instead, and make a step for them with graph_step or "
            "graphed"
        )
