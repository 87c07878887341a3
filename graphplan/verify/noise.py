"""What earlier checks of a program have shown of its noise.

Where kernels are not deterministic, a check replays once more to see how far replays lie apart. That takes as long as a
step, and copies of all that the step changes. How far it was in earlier checks, and what rounding did in these, as a
share of what the step changes, is enough to know noise by; what is larger is measured anew.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence

from torch import Tensor

from graphplan.verify.compare import RESPONSES, SPREADS, differing, fits, moves

_MEASURED = 2
"""Checks that have to measure the noise first."""


class Noise:
    """How far replays of one program from the same state lie apart."""

    def __init__(self) -> None:
        self._shares: dict[str, float] = {}
        self._measured = 0

    @property
    def is_known(self) -> bool:
        """Whether enough checks have measured it."""
        return self._measured >= _MEASURED

    def learn(
        self,
        old: Mapping[str, Tensor],
        one: Mapping[str, Tensor],
        again: Sequence[Mapping[str, Tensor]],
        eager: Mapping[str, Tensor],
        nudged: Mapping[str, Tensor] | None = None,
    ) -> None:
        """Take in what replays from one state, ``old``, left: ``one``, and others, at least one; and as ``nudged`` one
        from rounded parameters. What the eager step left was found to be as good by the check: as far away it may be
        again, and no further.
        """
        self._measured += 1
        for other in again:
            self._widen(old, one, other, 1.0)
        self._widen(old, one, eager, 1 / SPREADS)
        if nudged is not None:
            self._widen(old, one, nudged, RESPONSES / SPREADS)

    def _widen(
        self, old: Mapping[str, Tensor], one: Mapping[str, Tensor], other: Mapping[str, Tensor], part: float
    ) -> None:
        for path, far, change in self._moves(old, one, other):
            if change > 0 and math.isfinite(far) and math.isfinite(change):
                self._shares[path] = max(self._shares.get(path, 0.0), part * far / change)

    def _moves(
        self, old: Mapping[str, Tensor], one: Mapping[str, Tensor], other: Mapping[str, Tensor]
    ) -> Iterator[tuple[str, float, float]]:
        """For each path with numbers, how far ``one`` and ``other`` lie apart, and how far the step has moved it."""
        paths = [path for path in one if _is_near(path, one, other)]
        return zip(paths, *moves(paths, old, one, other), strict=True)

    def beyond(self, old: Mapping[str, Tensor], one: Mapping[str, Tensor], eager: Mapping[str, Tensor]) -> list[str]:
        """Paths at which ``one``, what a replay left, and what the eager step left differ by more than noise."""
        found = [
            path
            for path, far, change in self._moves(old, one, eager)
            if far > 0 and not far <= SPREADS * self._shares.get(path, 0.0) * change < math.inf
        ]
        exact = [{path: t for path, t in side.items() if not _is_near(path, one, eager)} for side in (one, eager)]
        return found + differing(*exact)


def _is_near(path: str, one: Mapping[str, Tensor], other: Mapping[str, Tensor]) -> bool:
    """Whether two tensors can be nearly the same: integers are, or they are not."""
    if path not in one or path not in other or not fits(one[path], other[path]):
        return False
    dtype = one[path].dtype
    return dtype.is_floating_point or dtype.is_complex
