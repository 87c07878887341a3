"""Random generators that only Python code draws from: Python's own, and NumPy's if NumPy is loaded."""

from __future__ import annotations

import random
import sys
from collections.abc import Callable, Collection, Sequence
from typing import Any

from graphplan.owners.contents import kept, spelt

PYTHONS, NUMPYS = "Python's random generator", "NumPy's random generator"


class HostGenerators:
    """The current states of the generators called ``names``, each with a function that restores it."""

    def __init__(self, names: Collection[str] = (PYTHONS, NUMPYS)) -> None:
        # NumPy may not be loaded, or another thread may be loading it.
        getters = {PYTHONS: random.getstate, NUMPYS: getattr(sys.modules.get("numpy.random"), "get_state", None)}
        found = {name: getattr(getters[name], "__self__", None) for name in getters if name in names}
        self._states = {name: kept(generator) for name, generator in found.items() if generator is not None}

    @property
    def states(self) -> list[tuple[Callable[[Any], object], Any]]:
        """For each generator, a setter and the state."""
        return list(self._states.values())

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
        own, other = ({name: spelt(state) for name, (_, state) in each._states.items()} for each in (self, others))
        return [name for name in own if name in other and own[name] != other[name]]

    def restore(self) -> None:
        """Restore the saved states."""
        for put, state in self.states:
            put(state)
