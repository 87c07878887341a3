"""Refusals that are collected, for ``graphplan check``: the way to a plan goes on past each of them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from graphplan.errors import LearningRateError, RefusalError
from graphplan.trace.records import Trace

_MOST = 64
"""Refusals that are collected; a step that reads the device in a loop over rows has a text for each."""
_collected: list[dict[str, RefusalError]] = []


@contextmanager
def collecting() -> Iterator[dict[str, RefusalError]]:
    """Collect refusals, by their texts, from the steps that any thread traces in the block."""
    found: dict[str, RefusalError] = {}
    _collected.append(found)
    try:
        yield found
    finally:
        _collected.remove(found)


def collect(error: RefusalError) -> bool:
    """Whether ``error`` was collected, so that the way to a plan can go on."""
    if not _collected:
        return False
    found = _collected[-1]
    if len(found) < _MOST:
        found.setdefault(str(error), error)
    return True


def refuse(trace: Trace, error: RefusalError) -> None:
    """Note that a traced step cannot be replayed. What is noted first counts, but for a learning rate that the step's
    own code uses: an eager step would have seen a number there.
    """
    first = trace.violation
    if not collect(error) and (first is None or (type(error) is LearningRateError and type(first) is not type(error))):
        trace.violation = error
