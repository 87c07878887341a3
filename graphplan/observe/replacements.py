"""Replace attributes of modules and classes while any thread runs a step."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from threading import RLock
from typing import Any

from graphplan.observe.watching import Unwatched

_INHERITED = object()


class Replacements:
    """The attributes that ``find`` yields as (holder, name, new value), set while ``entered`` is not empty."""

    def __init__(self, find: Callable[[], Iterable[tuple[Any, str, Any]]]) -> None:
        self._find = find
        self.entered: list[Any] = []
        self._replaced: list[tuple[Any, str, Any, Any]] = []
        self._lock = RLock()

    def enter(self, who: Any) -> None:
        """Add ``who``. The first one sets the replacements."""
        with self._lock, Unwatched():
            self.entered.append(who)
            for holder, name, value in () if self._replaced else self._find():
                self._replaced.append((holder, name, vars(holder).get(name, _INHERITED), value))
                setattr(holder, name, value)

    def leave(self, who: Any) -> None:
        """Remove ``who``. The last one restores the attributes."""
        with self._lock:
            if who in self.entered:
                self.entered.remove(who)
            while self._replaced and not self.entered:
                holder, name, before, value = self._replaced.pop()
                # Other code has replaced the attribute since: only that code may restore it.
                if vars(holder).get(name) is not value:
                    continue
                if before is _INHERITED:
                    delattr(holder, name)
                else:
                    setattr(holder, name, before)
