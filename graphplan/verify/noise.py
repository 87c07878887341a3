"""What explains a difference between a replay and the eager step besides a fault: rounding, and the spread of replays.

To replay once more takes as long as a step, and copies. How far replays lay apart in earlier checks, as a share of what
the step changes, is enough to know noise by; what is larger is measured anew.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence

import torch
from torch import Tensor

from graphplan.tensors.attributes import is_freed
from graphplan.tensors.copying import beside, copy_all
from graphplan.verify.compare import RESPONSES, SPREADS, Run, differing, distances, fits

_LITTLE = 0.1
"""As a share of what the step changes. More than that may come of a first checked step that hardly changes anything."""


class Noise:
    """How far replays of one program from the same state lie apart."""

    def __init__(self) -> None:
        self._shares: dict[str, float] = {}
        self._measured = 0

    @property
    def is_known(self) -> bool:
        """Return True if one check has measured the noise, or two where the first found it large."""
        return self._measured >= (1 if max(self._shares.values(), default=0.0) <= _LITTLE else 2)

    def learn(self, changes: Mapping[str, float], again: Sequence[Run], eager: Run, nudged: Run | None = None) -> None:
        """Take in how far replays from one state lie from the first of them, which has made ``changes``: ``again``, at
        least one, and as ``nudged`` one from rounded parameters. What the eager step left was found to be as good by
        the check: as far away it may be again, and no further.
        """
        self._measured += 1
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

    def beyond(self, changes: Mapping[str, float], one: Mapping[str, Tensor], eager: Mapping[str, Tensor]) -> list[str]:
        """Paths at which ``one``, what a replay left after ``changes``, and what the eager step left differ by more
        than noise.
        """
        # Integers are the same, or they are not.
        far = distances([path for path in changes if path in eager and fits(one[path], eager[path])], one, eager)
        found = [
            path
            for path, distance in far.items()
            if distance > 0 and not distance <= SPREADS * self._shares.get(path, 0.0) * changes[path] < math.inf
        ]
        return found + differing(*({path: t for path, t in side.items() if path not in far} for side in (one, eager)))


_ROUNDED = (torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.complex64, torch.complex128)


def can_be_nudged(tensor: Tensor) -> bool:
    """Return True if the elements are floating-point numbers that can be changed in place."""
    is_dense = tensor.layout is torch.strided and 0 not in tensor.stride()
    return is_dense and tensor.dtype in _ROUNDED and not (is_freed(tensor) or tensor.is_inference())


@torch.no_grad()
def nudge(tensors: Iterable[Tensor], rounding: float) -> None:
    """Scale the elements alternately up and down, by ``rounding`` or the epsilon of their type, whichever is larger."""
    rows = [tensor.detach() if tensor.dim() else tensor.detach().view(1) for tensor in tensors]
    for kind in {row.dtype for row in rows}:
        part = max(torch.finfo(kind).eps, rounding)
        alike = [row for row in rows if row.dtype == kind]
        torch._foreach_mul_([row[..., ::2] for row in alike], 1 + part)
        torch._foreach_mul_([row[..., 1::2] for row in alike], 1 - part)


@torch.no_grad()
def take_back(left: Sequence[Tensor], old: Sequence[Tensor], rounding: float) -> None:
    """Take the nudge itself out of what a replay made of ``old``, nudged: it may be larger than the step's update."""
    for home in {tensor.device for tensor in left}:
        here = [index for index, tensor in enumerate(left) if tensor.device == home]
        before = beside([old[index] for index in here], home)
        nudges = copy_all(before)
        nudge(nudges, rounding)
        torch._foreach_sub_(nudges, before)
        torch._foreach_sub_([left[index] for index in here], nudges)


def nudged(
    replay: Callable[[], Mapping[str, Tensor]],
    params: Mapping[str, Tensor],
    old: Callable[[Tensor], Tensor | None],
    rounding: float,
) -> Mapping[str, Tensor]:
    """What ``replay`` leaves if ``params`` have other last bits, but for these: parameters among it are changed once
    more. ``old(param)`` is what a parameter held before.
    """
    fit = {path: param for path, param in params.items() if can_be_nudged(param)}
    nudge(fit.values(), rounding)
    left = replay()
    rows = [(left[path], before) for path, p in fit.items() if path in left and (before := old(p)) is not None]
    rows = [(tensor, before) for tensor, before in rows if fits(before, tensor)]
    take_back([tensor for tensor, _ in rows], [before for _, before in rows], rounding)
    return left
