"""Fast comparisons of hooks and of torch's global switches, with the guards of torch's own compiler."""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any

import torch
from torch.utils.hooks import RemovableHandle

from graphplan.compare.comparing import Checks, Row, rows_of
from graphplan.environment.surroundings import COUNTS, LEVEL, surroundings
from graphplan.environment.switches import COMPARED, USED, count_of_modes, default_device, read_all

_guards: Any = torch._C._dynamo.guards


_own_hooks = 0


def hooks_registered() -> int:
    """Return how many hooks were registered through torch so far. While this is unchanged, no hook was added."""
    return RemovableHandle.next_id - _own_hooks


def register_own(register: Callable[[Any], Any], hook: Any) -> Any:
    """Register a hook of graphplan that is removed before the next step. :func:`hooks_registered` does not count it."""
    global _own_hooks
    before = RemovableHandle.next_id
    handle = register(hook)
    _own_hooks += RemovableHandle.next_id - before
    return handle


class Modes:
    """torch's global switches. They are read again only if a comparison finds that one may have changed."""

    def __init__(self) -> None:
        self._getters = COMPARED
        self._rows: list[Row] | None = None
        self._checks: Any = None
        self._known: tuple[Any, ...] = ()

    def watch(self, uses: Collection[str]) -> bool:
        """Also compare the switches that the functions in C called ``uses`` read or set. Return True if any is new."""
        used = dict.fromkeys(switch.get for name in uses for switch in USED.get(name, ()))
        new = [get for get in used if get not in self._getters]
        if new:
            self._getters, self._rows = [*self._getters, *new], None
        return bool(new)

    def rows(self) -> list[Row] | None:
        """Return comparisons that hold while the switches are what :meth:`now` last returned; None before that."""
        return self._rows

    def now(self) -> tuple[Any, ...]:
        """Return the values of the switches, which are part of a program's key."""
        if self._rows is None or not self._checks.hold():
            known = tuple([tuple(value) if type(value) is list else value for value in read_all()])
            self._known = known if known != self._known else self._known
            self._rows = _current_rows(self._getters)
            self._checks = Checks(self._rows)
        return self._known


def _current_rows(getters: list[Callable[[], Any]]) -> list[Row]:
    """Return comparisons that hold while torch's state guard, default device, modes and ``getters`` are unchanged."""
    device = default_device()
    # Otherwise modes that change no results may be active, which only the slower ``surroundings`` can tell.
    is_bare = device is None and all(function() == none for function, none in COUNTS)
    asked: list[tuple[Callable[[], Any], Any]] = [(_guards.GlobalStateGuard().check, True)]
    asked.append((default_device, device) if device is not None else (count_of_modes, 0))
    asked += [*(COUNTS if is_bare else [(surroundings, None)]), *((get, get()) for get in getters)]
    space, name, outside = LEVEL
    return rows_of([*(("same_results", *pair) for pair in asked), ("same_values", space, name, outside)])
