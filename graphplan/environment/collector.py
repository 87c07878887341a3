"""Python's garbage collector, put off while a step is traced, captured or checked: with the many objects of a trace it
would soon go through all of the process, which takes a quarter of a second with torch and Lightning loaded.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager

_NEVER = 20_000_003
"""More objects than a step makes."""


@contextmanager
def no_collections() -> Iterator[None]:
    """Put automatic collections off until the block ends. Thresholds that the block sets stay."""
    first, *others = before = gc.get_threshold()
    if first in (0, _NEVER):
        yield
        return
    try:
        gc.set_threshold(_NEVER, *others)
        yield
    finally:
        if gc.get_threshold()[0] == _NEVER:
            # Young objects alone, now. By their number, all that the process has would be looked at in this moment.
            gc.collect(0)
            gc.set_threshold(*before)
