"""What earlier checks of a program have shown of its noise.

Where kernels are not deterministic, a check replays once more to see how far replays lie apart. That takes as long as a
step, and copies of all that the step changes. How far it was in earlier checks, and what rounding did in these, as a
share of what the step changes, is enough to know noise by; what is larger is measured anew.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from graphplan.verify.compare import RESPONSES, SPREADS, Differing, Norms, Run, apart, fits, moved, numbers


@dataclass(frozen=True, slots=True)
class Moves:
    """How far a replay has moved each tensor with numbers, by path."""

    paths: list[str]
    norms: Norms

    @classmethod
    def of(cls, old: Mapping[str, Tensor], one: Mapping[str, Tensor], device: torch.device | None = None) -> Moves:
        """Have ``device`` measure how far ``one`` is from ``old``, wherever both lie."""
        paths = [path for path in one if _has_numbers(one[path])]
        return cls(paths, moved(paths, old, one, device))


_LITTLE = 0.1
"""As a share of what the step changes. More than that may come of a first checked step that hardly changes anything."""


class Noise:
    """How far replays of one program from the same state lie apart."""

    def __init__(self) -> None:
        self._shares: dict[str, float] = {}
        self._measured = 0

    @property
    def is_known(self) -> bool:
        """Whether one check has measured it, or two where the first found it large."""
        return self._measured >= (1 if max(self._shares.values(), default=0.0) <= _LITTLE else 2)

    def learn(self, moves: Moves, again: Sequence[Run], eager: Run, nudged: Run | None = None) -> None:
        """Take in how far replays from one state lie from the first of them, which has made ``moves``: ``again``, at
        least one, and as ``nudged`` one from rounded parameters. What the eager step left was found to be as good by
        the check: as far away it may be again, and no further.
        """
        self._measured += 1
        (lengths,) = numbers(moves.norms)
        changes = dict(zip(moves.paths, lengths, strict=True))
        for other in again:
            self._widen(changes, other, 1.0)
        self._widen(changes, eager, 1 / SPREADS)
        if nudged is not None:
            self._widen(changes, nudged, RESPONSES / SPREADS)

    def _widen(self, changes: Mapping[str, float], other: Run, part: float) -> None:
        for path in changes.keys() & other.far.keys():
            change, distance = changes[path], other.far[path]
            if change > 0 and math.isfinite(distance) and math.isfinite(change):
                self._shares[path] = max(self._shares.get(path, 0.0), part * distance / change)

    def share(self, path: str) -> float:
        """How far the tensor at ``path`` may lie from what another replay makes of it, as a share of its move."""
        return self._shares.get(path, 0.0)


class Beyond:
    """Paths at which ``one``, what a replay left after ``moves``, and what the eager step left differ by more than
    ``noise``. A device may still compare them: :meth:`paths` waits for it.
    """

    def __init__(self, noise: Noise, moves: Moves, one: Mapping[str, Tensor], eager: Mapping[str, Tensor]) -> None:
        self._noise = noise
        self._moves = moves
        # Integers are the same, or they are not.
        self._alike = [path for path in moves.paths if path in eager and fits(one[path], eager[path])]
        self._far = apart(self._alike, one, eager)
        near = set(self._alike)
        self._others = Differing(*({path: t for path, t in side.items() if path not in near} for side in (one, eager)))

    def paths(self) -> list[str]:
        """What was found."""
        far, lengths = numbers(self._far, self._moves.norms)
        changes = dict(zip(self._moves.paths, lengths, strict=True))
        found = [
            path
            for path, distance in zip(self._alike, far, strict=True)
            if distance > 0 and not distance <= SPREADS * self._noise.share(path) * changes[path] < math.inf
        ]
        return found + self._others.paths()


def _has_numbers(tensor: Tensor) -> bool:
    return tensor.is_floating_point() or tensor.is_complex()
