"""What earlier checks of a program have shown of its noise.

Where kernels are not deterministic, a check replays once more to see how far replays lie apart. That takes as long as a
step, and copies of all that the step changes. How far it was in earlier checks, and what rounding did in these, as a
share of what the step changes, is enough to know noise by; what is larger is measured anew.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor

from graphplan.verify.compare import RESPONSES, SPREADS, Norms, apart, differing, fits, moved, numbers

_MEASURED = 2
"""Checks that have to measure the noise first."""


@dataclass(frozen=True, slots=True)
class Moves:
    """How far a replay has moved each tensor with numbers, by path."""

    paths: list[str]
    norms: Norms

    @classmethod
    def of(cls, old: Mapping[str, Tensor], one: Mapping[str, Tensor]) -> Moves:
        """Have the device measure how far ``one`` is from ``old``."""
        paths = [path for path in one if _has_numbers(one[path])]
        return cls(paths, moved(paths, old, one))


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
        moves = Moves.of(old, one)
        for other in again:
            self._widen(moves, one, other, 1.0)
        self._widen(moves, one, eager, 1 / SPREADS)
        if nudged is not None:
            self._widen(moves, one, nudged, RESPONSES / SPREADS)

    def _widen(self, moves: Moves, one: Mapping[str, Tensor], other: Mapping[str, Tensor], part: float) -> None:
        for path, (far, change) in _distances(moves, one, other).items():
            if change > 0 and math.isfinite(far) and math.isfinite(change):
                self._shares[path] = max(self._shares.get(path, 0.0), part * far / change)

    def beyond(self, moves: Moves, one: Mapping[str, Tensor], eager: Mapping[str, Tensor]) -> list[str]:
        """Paths at which ``one``, what a replay left after ``moves``, and what the eager step left differ by more than
        noise.
        """
        near = _distances(moves, one, eager)
        found = [
            path
            for path, (far, change) in near.items()
            if far > 0 and not far <= SPREADS * self._shares.get(path, 0.0) * change < math.inf
        ]
        return found + differing(*({path: t for path, t in side.items() if path not in near} for side in (one, eager)))


def _distances(moves: Moves, one: Mapping[str, Tensor], other: Mapping[str, Tensor]) -> dict[str, tuple[float, float]]:
    """How far ``one`` and ``other`` lie apart, and how far the replay has moved it, where they can nearly be the same:
    integers are, or they are not.
    """
    paths = [path for path in moves.paths if path in other and fits(one[path], other[path])]
    far, changes = numbers(apart(paths, one, other), moves.norms)
    by_path = dict(zip(moves.paths, changes, strict=True))
    return {path: (distance, by_path[path]) for path, distance in zip(paths, far, strict=True)}


def _has_numbers(tensor: Tensor) -> bool:
    return tensor.is_floating_point() or tensor.is_complex()
