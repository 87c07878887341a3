"""Comparing what a replay left with what the eager step left."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from graphplan.owners import bits, unequal
from graphplan.roles import TensorSpec
from graphplan.tracer.changes import same_value

_SPREADS = 8.0
"""A difference may be this many times the distance between replays: a few runs are a small sample of a spread."""
_RESPONSES = 1.5
"""The same for what a step makes of rounded parameters. Noise may be so seldom that a few replays show next to none,
but it is no larger: an addition out of order changes a last bit somewhere, and from there on goes through less of the
step. (A GPT of 124M parameters in bfloat16, on an H200: gradients of runs from one state lie up to 0.4 % apart, or not
at all; with the parameters off by a 512th, 1.1 %.)
"""
_TOGETHER = 2**22
"""Elements that a distance takes into double precision at a time."""


@dataclass(frozen=True, slots=True)
class Difference:
    """One thing that the eager step left otherwise than the replay: ``path``, and how they differ in words."""

    path: str
    text: str

    def __str__(self) -> str:
        return f"{self.path}: {self.text}"


def _fits(first: Tensor, second: Tensor) -> bool:
    return first.shape == second.shape and first.dtype == second.dtype and first.layout == second.layout


def differing(first: Mapping[str, Tensor], second: Mapping[str, Tensor]) -> list[str]:
    """Paths, in ``second``'s order, whose tensors are not the same bits; also those that only one of them has."""
    shared = [path for path in second if path in first]
    fitting = [path for path in shared if _fits(first[path], second[path])]
    places = unequal([first[path] for path in fitting], [second[path] for path in fitting])
    found = {fitting[place] for place in places} | (set(shared) - set(fitting)) | (first.keys() ^ second.keys())
    return [path for path in [*second, *first.keys() - second.keys()] if path in found]


def _distance(first: Tensor, second: Tensor) -> float:
    """Euclidean distance in float64; NaN in the same places counts as equal, NaN in one of the two as far."""
    pairs = zip(_parts(first), _parts(second.to(first.device)), strict=True)
    return math.sqrt(float(torch.stack([_square(one.double(), two.double()) for one, two in pairs]).sum()))


def _parts(tensor: Tensor) -> Sequence[Tensor]:
    return tensor.detach().reshape(-1).split(_TOGETHER)


def _square(one: Tensor, two: Tensor) -> Tensor:
    apart = torch.where((one == two) | (one.isnan() & two.isnan()), 0.0, one - two)
    return torch.where(apart.isnan(), math.inf, apart).square().sum()


def _rounding(tensor: Tensor) -> float:
    """Two units in the last place of every finite element, as a distance."""
    if not tensor.is_floating_point():
        return 0.0
    squares = [
        torch.nan_to_num(part.double(), nan=0.0, posinf=0.0, neginf=0.0).square().sum() for part in _parts(tensor)
    ]
    return 2 * torch.finfo(tensor.dtype).eps * math.sqrt(float(torch.stack(squares).sum()))


def are_noisy(one: Mapping[str, Tensor], again: Iterable[Mapping[str, Tensor]]) -> bool:
    """Whether replays of one program from one state differ in anything."""
    return any(differing(one, other) for other in again)


def beyond_spread(
    paths: Iterable[str],
    before: Mapping[str, Tensor],
    one: Mapping[str, Tensor],
    again: Sequence[Mapping[str, Tensor]],
    eager: Mapping[str, Tensor],
    nudged: Mapping[str, Tensor] | None = None,
) -> list[Difference]:
    """Of the tensors at ``paths``, those that differ from eager's by more than replays differ from each other.

    Where replays agree in everything, so must eager. Where they do not (atomic additions), rounding is let pass too,
    since a few replays may agree in one place by chance, and what rounding does to the step.

    Args:
        paths: where ``one`` and ``eager`` differ.
        before: what was there before the step.
        one: what a replay left.
        again: what more replays from the same state left, at least one.
        eager: what the eager step left.
        nudged: what a replay left whose parameters had been off by what rounding does to them.
    """
    noisy = are_noisy(one, again)
    found = []
    for path in paths:
        others = [other.get(path) for other in again]
        response = None if nudged is None else nudged.get(path)
        difference = _beyond(path, before.get(path), one.get(path), others, eager.get(path), response, noisy)
        if difference is not None:
            found.append(difference)
    return found


def _beyond(
    path: str,
    before: Tensor | None,
    one: Tensor | None,
    again: Sequence[Tensor | None],
    eager: Tensor | None,
    nudged: Tensor | None,
    noisy: bool,
) -> Difference | None:
    others = [other for other in again if other is not None]
    if one is None or eager is None or len(others) < len(again):
        return Difference(path, "a tensor after one of the two and none after the other")
    if not _fits(one, eager):
        return Difference(path, f"{TensorSpec.of(one)} after the replay, {TensorSpec.of(eager)} after the eager step")
    if one.is_complex():
        one, eager, *others = (torch.view_as_real(t.detach().resolve_conj()) for t in (one, eager, *others))
        before = nudged = None
    distance, spread = _distance(one, eager), max(_distance(one, other) for other in others)
    if noisy:
        response = 0.0 if nudged is None or not _fits(one, nudged) else _distance(one, nudged)
        if distance <= _SPREADS * spread + _RESPONSES * response + _rounding(one):
            return None
    return Difference(path, _figures(before, one, eager, distance, spread))


def _figures(before: Tensor | None, one: Tensor, eager: Tensor, distance: float, spread: float) -> str:
    if one.numel() == 1:
        text = f"{one.item()!r} by the replay, {eager.item()!r} by the eager step"
    else:
        host = eager.detach().to(one.device)
        count = int((bits(one) != bits(host)).sum())
        text = f"{count} of {one.numel()} elements differ, by {distance:.3g} (Euclidean)"
    if before is not None and _fits(before, one):
        text += (
            f"; the replay's update is {_distance(before, one):.3g} long, the eager step's "
            f"{_distance(before, eager):.3g}"
        )
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
