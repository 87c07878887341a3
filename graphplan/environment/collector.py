"""Python's garbage collector, put off while a step is traced, captured or checked.

What these make, hundreds of thousands of small objects, is mostly gone when they end, without the collector's help. If
it runs meanwhile, it takes them for long-lived and soon goes through everything that the process has: a quarter of a
second with torch and Lightning loaded, while the device has nothing to do.
"""

from __future__ import annotations

import gc
import os
from collections.abc import Iterator
from contextlib import contextmanager

_NEVER = 20_000_003
"""More objects than a step makes. The product is still a C int if code multiplies the threshold."""
_HELD: list[tuple[int, int, int]] = []
"""Thresholds to be put back, one for each block that has put the collector off."""


@contextmanager
def no_collections() -> Iterator[None]:
    """Put automatic collections off until the block ends. Whether the collector is enabled is left alone, and so are
    thresholds that are set meanwhile: multiples of what they found are multiples of what was there before.
    """
    first, *others = before = gc.get_threshold()
    if not first or first >= _NEVER:
        yield
        return
    _HELD.append(before)
    try:
        gc.set_threshold(_NEVER, *others)
        yield
    finally:
        _put_back()


def _put_back() -> None:
    if _HELD:
        (first, *_), (now, *others) = _HELD.pop(), gc.get_threshold()
        times, rest = divmod(now, _NEVER)
        if times and not rest:
            gc.set_threshold(first * times, *others)


if hasattr(os, "register_at_fork"):
    # A child may never come to the end of the block.
    os.register_at_fork(after_in_child=_put_back)
