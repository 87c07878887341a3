"""Postpone Python's garbage collector while a step is traced, captured or checked. The many objects of a trace would
soon start a full collection, which takes a quarter of a second with torch and Lightning loaded.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager

_NEVER = 20_000_003
"""More objects than a step makes."""


@contextmanager
def no_collections() -> Iterator[None]:
    """Postpone automatic collections until the block ends. Thresholds that the block sets are kept."""
    first, *others = before = gc.get_threshold()
    if first in (0, _NEVER):
        yield
        return
    try:
        gc.set_threshold(_NEVER, *others)
        yield
    finally:
        if gc.get_threshold()[0] == _NEVER:
            # Collect the young generation alone: the number of new objects would otherwise start a full collection.
            gc.collect(0)
            gc.set_threshold(*before)
