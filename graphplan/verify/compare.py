"""Comparing what a replay left with what the eager step left."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

import torch
from torch import Tensor

from graphplan.owners import Unequal, bits, values_of
from graphplan.roles import TensorSpec
from graphplan.tracer.changes import same_value

SPREADS = 8.0
"""A difference may be this many times the distance between replays: a few runs are a small sample of a spread."""
RESPONSES = 1.5
"""The same for what a step makes of rounded parameters. Noise may be so seldom that a few replays show next to none,
but it is no larger: an addition out of order changes a last bit somewhere, and from there on goes through less of the
step. (A GPT of 124M parameters in bfloat16, on an H200: gradients of runs from one state lie up to 0.4 % apart, or not
at all; with the parameters off by a 512th, 1.1 %.)
"""
_TOGETHER = 2**22
"""Elements that a distance takes into double precision at a time."""
_SIDE = 2**28
"""Bytes of differences that are there at a time."""
_SUBTRACTED = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
"""What is subtracted many tensors at once, in its own precision: numbers that lie near each other lose nothing."""
_FEW = 8
"""Tensors of which one is other in each replay, most likely, if any is."""


@dataclass(frozen=True, slots=True)
class Difference:
    """One thing that the eager step left otherwise than the replay: ``path``, and how they differ in words."""

    path: str
    text: str

    def __str__(self) -> str:
        return f"{self.path}: {self.text}"


def fits(first: Tensor, second: Tensor) -> bool:
    """Whether two tensors can be compared element by element."""
    return first.shape == second.shape and first.dtype == second.dtype and first.layout == second.layout


class Differing:
    """Paths, in ``second``'s order, whose tensors are not the same bits; also those that only one of them has. A device
    may still compare them: :meth:`paths` waits for it.
    """

    def __init__(self, first: Mapping[str, Tensor], second: Mapping[str, Tensor]) -> None:
        self._paths = [*second, *first.keys() - second.keys()]
        self._fitting = [path for path in second if path in first and fits(first[path], second[path])]
        self._unequal = Unequal([first[path] for path in self._fitting], [second[path] for path in self._fitting])

    def paths(self) -> list[str]:
        """What was found."""
        equal = set(self._fitting) - {self._fitting[place] for place in self._unequal.places()}
        return [path for path in self._paths if path not in equal]


def differing(first: Mapping[str, Tensor], second: Mapping[str, Tensor]) -> list[str]:
    """The paths of :class:`Differing`."""
    return Differing(first, second).paths()


def lengths(tensors: Sequence[Tensor]) -> list[float]:
    """Euclidean norms of the finite elements in float64."""
    (found,) = numbers(Norms([(_real(tensor),) for tensor in tensors]))
    return found


class Norms:
    """The Euclidean distance between each row's two tensors, or its only one's length, in float64. NaN in the same
    places counts as equal, NaN in one of the two as far. A device may still compute them: see :func:`numbers`.
    """

    @torch.no_grad()
    def __init__(self, rows: Sequence[tuple[Tensor, ...]]) -> None:
        self.rows = rows
        self.vectors: list[Tensor] = []
        self.order: list[int] = []
        """To which rows the elements of the vectors belong."""
        for members in _alike(rows):
            one, *others = (list(column) for column in zip(*(rows[index] for index in members), strict=True))
            home = one[0].device
            others = [[t if t.device == home else t.to(home) for t in column] for column in others]
            self.order += members
            self.vectors.append(torch.stack(_norms_of(one, *others)))


def _norms_of(one: list[Tensor], *others: list[Tensor]) -> list[Tensor]:
    if one[0].dtype in _SUBTRACTED:
        terms = torch._foreach_sub(one, *others) if others else one
        return list(torch._foreach_norm(terms, 2, dtype=torch.float64))
    term = _plain if others else _finite
    return [_sum(term, *row).sqrt() for row in zip(one, *others, strict=True)]


def numbers(*several: Norms) -> list[list[float]]:
    """The norms of each, in the order of its rows. Each device is waited for once."""
    values = chain.from_iterable(values_of([vector for norms in several for vector in norms.vectors]))
    numbered = [dict(zip(norms.order, values, strict=False)) for norms in several]
    # An infinite norm, or one that is no number, says nothing of where.
    return [
        [n if math.isfinite(n := found[index]) else _careful_norm(*row) for index, row in enumerate(norms.rows)]
        for norms, found in zip(several, numbered, strict=True)
    ]


def apart(paths: Iterable[str], one: Mapping[str, Tensor], other: Mapping[str, Tensor]) -> Norms:
    """How far ``one`` and ``other`` lie apart at ``paths``, where they are alike."""
    return Norms([(_real(one[path]), _real(other[path])) for path in paths])


def moved(paths: Iterable[str], old: Mapping[str, Tensor], one: Mapping[str, Tensor]) -> Norms:
    """How far ``one`` is from ``old`` at ``paths``, or how large, if nothing was there before."""
    rows: list[tuple[Tensor, ...]] = []
    for path in paths:
        before, tensor = old.get(path), one[path]
        fit = before is not None and fits(before, tensor)
        rows.append((_real(tensor), _real(before)) if fit and before is not None else (_real(tensor),))
    return Norms(rows)


def _careful_norm(one: Tensor, *others: Tensor) -> float:
    return math.sqrt(_sum(_careful if others else _finite, one, *(other.to(one.device) for other in others)).item())


def _alike(rows: Sequence[tuple[Tensor, ...]]) -> Iterator[list[int]]:
    """Positions of rows of one length, device and dtype, of a few bytes at a time: a difference takes as many."""
    groups: dict[tuple[int, torch.device, torch.dtype], list[int]] = {}
    sizes: Counter[tuple[int, torch.device, torch.dtype]] = Counter()
    for index, (tensor, *others) in enumerate(rows):
        key = len(others), tensor.device, tensor.dtype
        if key in groups and sizes[key] + tensor.nbytes > _SIDE:
            yield groups.pop(key)
            sizes[key] = 0
        groups.setdefault(key, []).append(index)
        sizes[key] += tensor.nbytes
    yield from groups.values()


def _sum(term: Callable[..., Tensor], *tensors: Tensor) -> Tensor:
    """The sum of a function of corresponding elements, a few at a time in double precision."""
    parts = zip(*(tensor.reshape(-1).split(_TOGETHER) for tensor in tensors), strict=True)
    sums = [term(*(part.double() for part in some)).sum() for some in parts]
    return sums[0] if len(sums) == 1 else torch.stack(sums).sum()


def _plain(one: Tensor, two: Tensor) -> Tensor:
    return (one - two).square()


def _careful(one: Tensor, two: Tensor) -> Tensor:
    apart = torch.where((one == two) | (one.isnan() & two.isnan()), 0.0, one - two)
    return torch.where(apart.isnan(), math.inf, apart).square()


def _finite(one: Tensor) -> Tensor:
    return torch.nan_to_num(one, nan=0.0, posinf=0.0, neginf=0.0).square()


def are_noisy(one: Mapping[str, Tensor], again: Iterable[Mapping[str, Tensor]], likely: Iterable[str] = ()) -> bool:
    """Whether replays of one program from one state differ in anything; at ``likely`` paths is looked first."""
    few = {path: one[path] for path in list(likely)[:_FEW] if path in one}
    return any(
        differing(few, {path: other[path] for path in few if path in other}) or differing(one, other) for other in again
    )


class Far:
    """How far ``one``, what a replay left, lies from what others left. Each distance is measured once."""

    def __init__(self, one: Mapping[str, Tensor]) -> None:
        self.one = one
        self._known: dict[int, tuple[Mapping[str, Tensor], dict[str, float]]] = {}

    def to(self, other: Mapping[str, Tensor], paths: Sequence[str]) -> list[float]:
        """Euclidean distances at ``paths``; 0 where ``other`` has nothing alike."""
        _, known = self._known.setdefault(id(other), (other, {}))
        new = [path for path in paths if path not in known]
        known.update(zip(new, distances(new, self.one, other), strict=True))
        return [known[path] for path in paths]


def unexplained(
    paths: Iterable[str],
    far: Far,
    again: Sequence[Mapping[str, Tensor]],
    eager: Mapping[str, Tensor],
    nudged: Mapping[str, Tensor] | None = None,
    *,
    noisy: bool,
) -> dict[str, float]:
    """Of the tensors at ``paths``, those that differ from eager's by more than replays differ from each other.

    Unless the step is ``noisy``, eager must agree. Where it is, rounding is let pass too, since a few replays may agree
    in one place by chance, and what rounding does to the step.

    Args:
        paths: where ``far.one`` and ``eager`` differ.
        far: distances from what a replay left.
        again: what more replays from the same state left, at least one.
        eager: what the eager step left.
        nudged: what a replay left whose parameters had been off by what rounding does to them.
        noisy: whether replays differ in anything (atomic additions), or eager steps in the order of their additions.

    Returns:
        How far replays lie apart, by path; 0 where there is nothing to compare.
    """
    paths, one = list(paths), far.one
    sides = [one, eager, *again]
    alike = [path for path in paths if all(path in side and fits(one[path], side[path]) for side in sides)]
    spreads = [far.to(other, alike) for other in again]
    spread = dict(zip(alike, map(max, zip(*spreads, strict=True)), strict=True))
    found = {path: spread.get(path, 0.0) for path in paths}
    if not alike or not noisy:
        return found
    differences = far.to(eager, alike)
    roundings = [2 * _last_place(one[path]) for path in alike]
    responses = [0.0] * len(alike) if nudged is None else far.to(nudged, alike)
    sizes = lengths([one[path] for path in alike])
    for path, distance, response, rounding, size in zip(alike, differences, responses, roundings, sizes, strict=True):
        if math.isfinite(distance) and distance <= SPREADS * spread[path] + RESPONSES * response + rounding * size:
            del found[path]
    return found


def distances(paths: Sequence[str], one: Mapping[str, Tensor], other: Mapping[str, Tensor]) -> list[float]:
    """Euclidean distances at ``paths``; 0 where ``other`` has nothing alike."""
    alike = [path for path in paths if path in other and fits(one[path], other[path])]
    (far,) = numbers(apart(alike, one, other))
    found = dict(zip(alike, far, strict=True))
    return [found.get(path, 0.0) for path in paths]


def _real(tensor: Tensor) -> Tensor:
    return torch.view_as_real(tensor.detach().resolve_conj()) if tensor.dtype.is_complex else tensor


def _last_place(tensor: Tensor) -> float:
    return torch.finfo(tensor.dtype).eps if tensor.is_floating_point() else 0.0


def describe(
    spreads: Mapping[str, float], before: Mapping[str, Tensor], one: Mapping[str, Tensor], eager: Mapping[str, Tensor]
) -> list[Difference]:
    """What :func:`unexplained` found, in words. ``before`` is what was there before the step."""
    return [
        Difference(path, _words(before.get(path), one.get(path), eager.get(path), spreads[path])) for path in spreads
    ]


def _words(before: Tensor | None, one: Tensor | None, eager: Tensor | None, spread: float) -> str:
    if one is None or eager is None:
        return "a tensor after one of the two and none after the other"
    if not fits(one, eager):
        return f"{TensorSpec.of(one)} after the replay, {TensorSpec.of(eager)} after the eager step"
    if one.is_complex():
        one, eager, before = _real(one), _real(eager), None
    if one.numel() == 1:
        text = f"{one.item()!r} by the replay, {eager.item()!r} by the eager step"
    else:
        ((distance,),) = numbers(Norms([(one, eager)]))
        count = int((bits(one) != bits(eager.detach().to(one.device))).sum())
        text = f"{count} of {one.numel()} elements differ, by {distance:.3g} (Euclidean)"
    if before is not None and fits(before, one):
        ((own, other),) = numbers(Norms([(before, one), (before, eager)]))
        text += f"; the replay's update is {own:.3g} long, the eager step's {other:.3g}"
    return f"{text}; two replays differ by {spread:.3g}"


def differing_values(first: Mapping[str, Any], second: Mapping[str, Any]) -> list[Difference]:
    """Python values that are not the same after the replay (``first``) and after the eager step."""
    found = []
    for path in [*second, *(first.keys() - second.keys())]:
        one, two = first.get(path, _NOTHING), second.get(path, _NOTHING)
        if not same_value(one, two):
            found.append(Difference(path, f"{one!r} after the replay, {two!r} after the eager step"))
    return found


class _Nothing:
    def __repr__(self) -> str:
        return "nothing"


_NOTHING = _Nothing()
