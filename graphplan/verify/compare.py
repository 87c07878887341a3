"""Comparing what a replay left with what the eager step left."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from graphplan.owners import bits, unequal
from graphplan.roles import TensorSpec
from graphplan.tracer.changes import same_value

_SPREADS = 8.0
"""A difference may be this many times the distance between two replays: three runs are a small sample of a spread."""


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
    one, two = first.detach().to("cpu", torch.float64), second.detach().to("cpu", torch.float64)
    apart = torch.where((one == two) | (one.isnan() & two.isnan()), 0.0, one - two)
    return float(torch.where(apart.isnan(), math.inf, apart).norm())


def _rounding(tensor: Tensor) -> float:
    """Two units in the last place of every finite element, as a distance."""
    if not tensor.is_floating_point():
        return 0.0
    finite = torch.nan_to_num(tensor.detach().double(), nan=0.0, posinf=0.0, neginf=0.0)
    return 2 * torch.finfo(tensor.dtype).eps * float(finite.norm())


def beyond_spread(
    paths: Iterable[str],
    before: Mapping[str, Tensor],
    one: Mapping[str, Tensor],
    two: Mapping[str, Tensor],
    eager: Mapping[str, Tensor],
) -> list[Difference]:
    """Of the tensors at ``paths``, those that differ from eager's by more than two replays differ from each other.

    Where the two replays agree in everything, so must eager. Where they do not (atomic additions), rounding is let pass
    too, since two replays may agree in one place by chance.
    """
    noisy = bool(differing(one, two))
    return [
        found
        for path in paths
        if (found := _beyond(path, before.get(path), one.get(path), two.get(path), eager.get(path), noisy)) is not None
    ]


def _beyond(
    path: str, before: Tensor | None, one: Tensor | None, two: Tensor | None, eager: Tensor | None, noisy: bool
) -> Difference | None:
    if one is None or two is None or eager is None:
        return Difference(path, "a tensor after one of the two and none after the other")
    if not _fits(one, eager):
        return Difference(path, f"{TensorSpec.of(one)} after the replay, {TensorSpec.of(eager)} after the eager step")
    if one.is_complex():
        one, two, eager = (torch.view_as_real(t.detach().resolve_conj()) for t in (one, two, eager))
        before = None
    distance, spread = _distance(one, eager), _distance(one, two)
    if noisy and distance <= _SPREADS * spread + _rounding(one):
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
