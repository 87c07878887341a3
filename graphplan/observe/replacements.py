"""Attributes of torch's modules and classes that are others while some thread runs a step."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from threading import RLock
from typing import Any

from graphplan.observe.watching import Aside

_INHERITED = object()


class Replacements:
    """What ``find`` gives (holder, name, new value) is in place while anyone in any thread has ``entered``."""

    def __init__(self, find: Callable[[], Iterable[tuple[Any, str, Any]]]) -> None:
        self._find = find
        self.entered: list[Any] = []
        self._replaced: list[tuple[Any, str, Any, Any]] = []
        self._lock = RLock()

    def enter(self, who: Any) -> None:
        """Add one; the first puts the replacements in place."""
        with self._lock, Aside():
            self.entered.append(who)
            for holder, name, value in () if self._replaced else self._find():
                self._replaced.append((holder, name, vars(holder).get(name, _INHERITED), value))
                setattr(holder, name, value)

    def leave(self, who: Any) -> None:
        """Remove one; the last takes the replacements away."""
        with self._lock:
            if who in self.entered:
                self.entered.remove(who)
            while self._replaced and not self.entered:
                holder, name, before, value = self._replaced.pop()
                # What other code has put there since is that code's to take away.
                if vars(holder).get(name) is not value:
                    continue
                if before is _INHERITED:
                    delattr(holder, name)
                else:
                    setattr(holder, name, before)
