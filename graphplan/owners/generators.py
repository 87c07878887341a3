"""Random generators that only Python code draws from: Python's own, and NumPy's if NumPy is loaded."""

from __future__ import annotations

import random
import sys
from collections.abc import Callable, Collection, Sequence
from typing import Any

PYTHONS, NUMPYS = "Python's random generator", "NumPy's random generator"


class HostGenerators:
    """The current states of the generators called ``names``: for each, ``states`` has a setter and the state."""

    def __init__(self, names: Collection[str] = (PYTHONS, NUMPYS)) -> None:
        self.states: list[tuple[Callable[[Any], object], Any]] = []
        self._names: list[str] = []
        numpy = _numpy_random() if NUMPYS in names else None
        if PYTHONS in names:
            self.states.append((random.setstate, random.getstate()))
            self._names.append(PYTHONS)
        if numpy is not None:
            self.states.append((numpy.set_state, numpy.get_state(legacy=False)))
            self._names.append(NUMPYS)

    def moved(self, by: Sequence[Callable[[], Any]] = ()) -> list[str]:
        """Return the names of generators whose states now differ from the saved states after the draws ``by``."""
        now = HostGenerators()
        states = self
        if by:
            self.restore()
            for draw in by:
                draw()
            states = HostGenerators()
            now.restore()
        return now.other_than(states)

    def other_than(self, others: HostGenerators) -> list[str]:
        """Return the names of generators whose states here differ from those in ``others``."""
        pairs = zip(self._names, self.states, others.states, strict=False)
        return [name for name, (_, own), (_, other) in pairs if not _is_same(own, other)]

    def restore(self) -> None:
        """Restore the saved states."""
        for put, state in self.states:
            put(state)


def _is_same(one: Any, other: Any) -> bool:
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(_is_same(value, other[key]) for key, value in one.items())
    return bool(one.tobytes() == other.tobytes()) if hasattr(one, "tobytes") else bool(one == other)


def _numpy_random() -> Any:
    """Return NumPy's module of random generators; None if it is not loaded or another thread is loading it."""
    module = sys.modules.get("numpy.random")
    return module if hasattr(module, "set_state") and hasattr(module, "get_state") else None
