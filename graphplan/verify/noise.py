"""What earlier checks of a program have shown of its noise.

Where kernels are not deterministic, a check replays once more to see how far replays lie apart. That takes as long as a
step, and copies of all that the step changes. How far it was in earlier checks, as a share of what the step changes, is
enough to know noise by; what is larger is measured anew.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from torch import Tensor

from graphplan.verify.compare import SPREADS, differing, distances, lengths

_MEASURED = 2
"""Checks that have to measure the noise first."""


class Noise:
    """How far replays of one program from the same state lie apart."""

    def __init__(self) -> None:
        self._shares: dict[str, float] = {}
        self._measured = 0

    def learn(
        self,
        old: Mapping[str, Tensor],
        one: Mapping[str, Tensor],
        again: Sequence[Mapping[str, Tensor]],
        eager: Mapping[str, Tensor],
    ) -> None:
        """Take in what replays from one state, ``old``, left: ``one``, and others, at least one. What the eager step
        left was found to be as good by the check: as far away it may be again, and no further.
        """
        self._measured += 1
        for other in again:
            self._widen(old, one, other, 1.0)
        self._widen(old, one, eager, 1 / SPREADS)

    def _widen(
        self, old: Mapping[str, Tensor], one: Mapping[str, Tensor], other: Mapping[str, Tensor], part: float
    ) -> None:
        paths = [path for path in differing(one, other) if path in one and path in other]
        for path, far, change in zip(paths, distances(paths, one, other), _changes(paths, old, one), strict=True):
            if change > 0 and math.isfinite(far) and math.isfinite(change):
                self._shares[path] = max(self._shares.get(path, 0.0), part * far / change)

    def beyond(
        self, paths: Sequence[str], old: Mapping[str, Tensor], one: Mapping[str, Tensor], eager: Mapping[str, Tensor]
    ) -> list[str]:
        """Those of ``paths`` at which ``one``, what a replay left, and what the eager step left differ by more."""
        if self._measured < _MEASURED or any(path not in one or path not in eager for path in paths):
            return list(paths)
        apart, changes = distances(paths, one, eager), _changes(paths, old, eager)
        known = [SPREADS * self._shares.get(path, 0.0) * change for path, change in zip(paths, changes, strict=True)]
        rows = zip(paths, apart, known, strict=True)
        return [path for path, far, bound in rows if not (0 < far <= bound and math.isfinite(bound))]


def _changes(paths: Sequence[str], old: Mapping[str, Tensor], new: Mapping[str, Tensor]) -> list[float]:
    """How far a step has moved each of them; how large it is, if nothing was there before."""
    there = [path for path in paths if path in old]
    found = dict(zip(there, distances(there, old, new), strict=True))
    others = [path for path in paths if path not in old]
    found.update(zip(others, lengths([new[path] for path in others]), strict=True))
    return [found[path] for path in paths]
