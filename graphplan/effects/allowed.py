"""Decide which effects replays may leave out, and describe changes for messages."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from fnmatch import translate
from functools import lru_cache
from reprlib import Repr
from typing import Any

_SHORT = Repr()
_SHORT.maxstring = _SHORT.maxother = 80


def is_allowed(path: str, allow: Iterable[str]) -> bool:
    """Return True if ``path`` is at or within a place that ``allow`` names; patterns may be ``model.stats.*``."""
    return allowed_by(tuple(allow))(path)


@lru_cache(256)
def allowed_by(allow: tuple[str, ...]) -> Callable[[str], bool]:
    """Return a function that does the same as :func:`is_allowed`, faster, for thousands of paths."""
    if not allow:
        return lambda path: False
    within = tuple(name + end for name in allow for end in ".[")
    is_named = re.compile("|".join(map(translate, allow))).match
    # The cache helps because a check asks for each path several times.
    return lru_cache(2**14)(lambda path: path in allow or path.startswith(within) or is_named(path) is not None)


def allowing(*paths: str) -> str:
    """Return the advice to name ``paths`` in ``allow=``, and the condition under which that is correct."""
    return f"if nothing in the step depends on it, logged and appended values included, pass allow={paths!r}"


def describe(pair: tuple[Any, Any] | None) -> str:
    """Describe a change by its old and its new value."""
    return "unchanged" if pair is None else f"{shorten(pair[0])} to {shorten(pair[1])}"


def shorten(value: Any) -> str:
    """Return ``repr(value)``, shortened for a message."""
    return _SHORT.repr(value)
