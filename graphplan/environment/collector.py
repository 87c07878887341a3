"""Python's garbage collector, put off while a step is traced, captured or checked.

What these make, hundreds of thousands of small objects, is mostly gone when they end, without the collector's help. If
it runs meanwhile, it takes them for long-lived and soon goes through everything that the process has: a quarter of a
second with torch and Lightning loaded, while the device has nothing to do.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager

_NEVER = 20_000_003
"""More objects than a step makes."""


@contextmanager
def no_collections() -> Iterator[None]:
    """Put automatic collections off until the block ends. Whether the collector is enabled is left alone, and so are
    thresholds that are set meanwhile.
    """
    first, *others = before = gc.get_threshold()
    if not first:
        yield
        return
    try:
        gc.set_threshold(_NEVER, *others)
        yield
    finally:
        if gc.get_threshold()[0] == _NEVER:
            gc.set_threshold(*before)
