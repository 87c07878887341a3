"""Which effects replays may leave out, and how changes are described."""

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
    """Whether ``path`` lies at or within what ``allow`` names, by patterns such as ``model.stats.*`` too."""
    return allowed_by(tuple(allow))(path)


@lru_cache(256)
def allowed_by(allow: tuple[str, ...]) -> Callable[[str], bool]:
    """:func:`is_allowed` for thousands of paths."""
    if not allow:
        return lambda path: False
    within = tuple(name + end for name in allow for end in ".[")
    is_named = re.compile("|".join(map(translate, allow))).match
    # A check asks for each path several times.
    return lru_cache(2**14)(lambda path: path in allow or path.startswith(within) or is_named(path) is not None)


def allowing(*paths: str) -> str:
    """How to have replays leave ``paths`` out of account, and when that is right."""
    return f"if nothing that the step does depends on it, values that it logs or appends included, pass allow={paths!r}"


def describe(pair: tuple[Any, Any] | None) -> str:
    """A change, from its first value to its second."""
    return "unchanged" if pair is None else f"{shorten(pair[0])} to {shorten(pair[1])}"


def shorten(value: Any) -> str:
    """``repr(value)``, no longer than a message can take."""
    return _SHORT.repr(value)
