"""Compare the states after a replay and after the eager step, and measure the effect of rounding on a step."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from torch import Tensor

from graphplan.environment.devices import synchronize
from graphplan.owners.flags import COMPUTED
from graphplan.owners.tensor_metadata import ABSENT
from graphplan.specs.roles import TensorSpec
from graphplan.tensors.attributes import is_freed
from graphplan.tensors.copying import bits, comparison_device, copy_all, unequal, values_of
from graphplan.trace.changes import same_value

SPREADS = 8.0
"""A difference may be this many times the distance between replays, since few runs are a small sample of the spread."""
RESPONSES = 1.5
"""A difference may be this many times the effect of rounded parameters. A few replays may not show rare noise, but its
effect is no larger: an addition in another order changes a last bit at one place and passes through only the rest of
the step. (A GPT of 124M parameters in bfloat16, on an H200: gradients of runs from one state lie up to 0.4 % apart, or
not at all; with the parameters off by a 512th, 1.1 %.)
"""
_ROUNDED = (torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.complex64, torch.complex128)
_ELEMENTS = 2**22  # Elements that are converted to double precision at once to compute a distance.
_SUBTRACTED = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
"""Types that are subtracted in their own precision: this is exact for numbers that are close to each other."""


def fits(first: Tensor, second: Tensor) -> bool:
    """Return True if two tensors can be compared element by element."""
    return first.shape == second.shape and first.dtype == second.dtype and first.layout == second.layout


def differing(first: Mapping[str, Tensor], second: Mapping[str, Tensor]) -> list[str]:
    """Return the paths, in the order of ``second``, whose bits differ or that only one of the two has."""
    fitting = [path for path in second if path in first and fits(first[path], second[path])]
    places = unequal([first[path] for path in fitting], [second[path] for path in fitting])
    equal = set(fitting) - {fitting[place] for place in places}
    return [path for path in [*second, *first.keys() - second.keys()] if path not in equal]


@torch.no_grad()
def _norms(rows: Sequence[tuple[Tensor, ...]]) -> list[float]:
    """Return the Euclidean distance of each row's two tensors, or the norm of its only one, in float64. NaN in the same
    places counts as equal, NaN in one of the two as infinitely far. Waits once for each device.
    """
    gathered = _gathered(rows)
    found = values_of([_norm(*row) for row in gathered])
    # Infinite and NaN norms are computed again, element by element.
    return [n if math.isfinite(n) else _careful_norm(*row).item() for n, row in zip(found, gathered, strict=True)]


def _norm(*row: Tensor) -> Tensor:
    if row[0].dtype not in _SUBTRACTED:
        return _careful_norm(*row)
    one, *others = row
    return torch._foreach_norm((one - others[0] if others else one,), 2, dtype=torch.float64)[0]


def _gathered(rows: Sequence[tuple[Tensor, ...]]) -> list[list[Tensor]]:
    """Return the rows, each on one device; all on the host, copied together, if that is faster."""
    if comparison_device(tensor for row in rows for tensor in row) is None:
        homes = [next((tensor.device for tensor in row if not tensor.is_cpu), row[0].device) for row in rows]
        pairs = zip(rows, homes, strict=True)
        return [[tensor.to(home, non_blocking=home.type != "cpu") for tensor in row] for row, home in pairs]
    away = {id(tensor): tensor for row in rows for tensor in row if not tensor.is_cpu}
    copies = dict(zip(away, copy_all(list(away.values()), torch.device("cpu")), strict=True))
    for device in {tensor.device for tensor in away.values()}:
        synchronize(device)
    return [[copies.get(id(tensor), tensor) for tensor in row] for row in rows]


def distances(
    paths: Iterable[str], one: Mapping[str, Tensor], other: Mapping[str, Tensor] = MappingProxyType({})
) -> dict[str, float]:
    """Return the distance of ``one`` from ``other`` at each path, or its norm without a counterpart: ``_norms``."""
    sides = {path: (one[path], other.get(path)) for path in paths}
    rows = [(_real(t),) if o is None or not fits(o, t) else (_real(t), _real(o)) for t, o in sides.values()]
    return dict(zip(sides, _norms(rows), strict=True))


def _careful_norm(*row: Tensor) -> Tensor:
    """Compute the norm of one row in double precision, ``_ELEMENTS`` at a time."""
    term = _finite if len(row) == 1 else _apart
    parts = zip(*(tensor.reshape(-1).split(_ELEMENTS) for tensor in row), strict=True)
    return torch.stack([term(*(part.double() for part in some)).sum() for some in parts]).sum().sqrt()


def _apart(one: Tensor, two: Tensor) -> Tensor:
    apart = torch.where((one == two) | (one.isnan() & two.isnan()), 0.0, one - two)
    return torch.where(apart.isnan(), math.inf, apart).square()


def _finite(one: Tensor) -> Tensor:
    return torch.nan_to_num(one, nan=0.0, posinf=0.0, neginf=0.0).square()


@dataclass(frozen=True, slots=True)
class Run:
    """Another run from the same state, compared with the first replay: ``far``, the distances by path where both left
    comparable tensors, and ``differs``, whether any bits differ.
    """

    far: Mapping[str, float]
    differs: bool

    @classmethod
    def of(cls, one: Mapping[str, Tensor], left: Mapping[str, Tensor], beyond: Sequence[str] | None = None) -> Run:
        """Compare ``one``, copies of the first replay's state, with the state ``left`` now; only at the paths
        ``beyond``, if these are known to differ or no others matter. Waits for the device.
        """
        alike = [path for path, t in left.items() if path in one and fits(one[path], t) and not t.is_quantized]
        changed = set(differing(one, left) if beyond is None else beyond)
        # Measure only tensors that differ: each dtype needs kernels that take long to load.
        far = distances((path for path in alike if path in changed), left, one)
        return cls(dict.fromkeys(alike, 0.0) | far, bool(changed))


def unexplained(
    paths: Iterable[str],
    one: Mapping[str, Tensor],
    again: Sequence[Run],
    eager: Run,
    nudged: Run | None = None,
    *,
    noisy: bool,
) -> dict[str, float]:
    """Return the ``paths`` where the eager step differs by more than replays differ, with the largest distance of two
    replays. ``one`` are copies of the first replay's state, ``again`` more replays from the same state.

    Unless the step is ``noisy``, the eager step must agree exactly. If it is noisy, rounding is allowed too, since a
    few replays may agree in one place by chance, and so is the effect of rounding on the step: ``nudged`` is a replay
    whose parameters were changed by a rounding error.
    """
    found = {path: max(run.far.get(path, 0.0) for run in again) for path in paths}
    alike = [path for path in found if all(path in run.far for run in (eager, *again))]
    if not alike or not noisy:
        return found
    for path, size in distances(alike, one).items():
        response = 0.0 if nudged is None else nudged.far.get(path, 0.0)
        distance, rounding = eager.far[path], last_places(one[path]) * size
        if math.isfinite(distance) and distance <= SPREADS * found[path] + RESPONSES * response + rounding:
            del found[path]
    return found


def _real(tensor: Tensor) -> Tensor:
    return torch.view_as_real(tensor.detach().resolve_conj()) if tensor.dtype.is_complex else tensor


def last_places(tensor: Tensor) -> float:
    """Return two units in the last place for floating-point numbers, which are rounded; 0 for other dtypes."""
    return 2 * torch.finfo(tensor.dtype).eps if tensor.is_floating_point() or tensor.is_complex() else 0.0


class Sides(NamedTuple):
    """Names for messages: of the two steps that are compared, and of the measure of their distance."""

    one: str = "the replay"
    other: str = "the eager step"
    spread: str = "two replays differ by"


_REPLAY = Sides()


def describe(
    spreads: Mapping[str, float],
    before: Mapping[str, Tensor],
    one: Mapping[str, Tensor],
    eager: Mapping[str, Tensor],
    sides: Sides = _REPLAY,
) -> dict[str, str]:
    """Describe the result of :func:`unexplained`, by path. ``before`` are the values before the step."""
    return {
        path: _words(before.get(path), one.get(path), eager.get(path), spread, sides)
        for path, spread in spreads.items()
    }


def _words(before: Tensor | None, one: Tensor | None, eager: Tensor | None, spread: float, sides: Sides) -> str:
    if one is None or eager is None:
        return "a tensor after one of the two and none after the other"
    if not fits(one, eager):
        return f"{TensorSpec.of(one)} after {sides.one}, {TensorSpec.of(eager)} after {sides.other}"
    if one.is_complex():
        one, eager, before = _real(one), _real(eager), None
    if one.numel() == 1:
        text = f"{one.item()!r} by {sides.one}, {eager.item()!r} by {sides.other}"
    else:
        (distance,) = _norms([(one, eager)])
        count = int((bits(one) != bits(eager.detach().to(one.device))).sum())
        text = f"{count} of {one.numel()} elements differ, by {distance:.3g} (Euclidean)"
    if before is not None and fits(before, one):
        own, other = _norms([(before, one), (before, eager)])
        text += f"; {sides.one}'s update is {own:.3g} long, {sides.other}'s {other:.3g}"
    return f"{text}; {sides.spread} {spread:.3g}"


def differing_values(first: Mapping[str, Any], second: Mapping[str, Any], sides: Sides = _REPLAY) -> dict[str, str]:
    """Describe, by path, Python values that differ after the replay (``first``) and after the eager step."""
    found = {}
    for path in [*second, *(first.keys() - second.keys())]:
        one, two = first.get(path, ABSENT), second.get(path, ABSENT)
        # `requires_grad` of an operator's result follows from its autograd graph, which a replay does not keep.
        if not (one is COMPUTED or two is COMPUTED or same_value(one, two)):
            found[path] = f"{one!r} after {sides.one}, {two!r} after {sides.other}"
    return found


def _can_be_nudged(tensor: Tensor) -> bool:
    """Return True if the elements are floating-point numbers that can be changed in place."""
    is_dense = tensor.layout is torch.strided and 0 not in tensor.stride()
    return is_dense and tensor.dtype in _ROUNDED and not (is_freed(tensor) or tensor.is_inference())


def _nudge(tensor: Tensor, rounding: float) -> None:
    """Scale the elements alternately up and down, by ``rounding`` or the epsilon of their type, whichever is larger."""
    row, part = tensor.view(1) if not tensor.dim() else tensor, max(torch.finfo(tensor.dtype).eps, rounding)
    row[..., ::2] *= 1 + part
    row[..., 1::2] *= 1 - part


def nudged(
    replay: Callable[[], Mapping[str, Tensor]],
    params: Mapping[str, Tensor],
    old: Callable[[Tensor], Tensor | None],
    rounding: float,
) -> Mapping[str, Tensor]:
    """Return the state after ``replay`` from ``params`` with other last bits. The change itself is subtracted from the
    parameters again, since it may exceed the step's update. ``old(param)`` returns a parameter's value from before.
    """
    fit = {path: param.detach() for path, param in params.items() if _can_be_nudged(param)}
    for param in fit.values():
        _nudge(param, rounding)
    left = replay()
    for path in fit.keys() & left.keys():
        before, after = old(params[path]), left[path].detach()
        if before is not None and fits(before, after):
            before = before.to(after.device)
            off = before.clone()
            _nudge(off, rounding)
            after.sub_(off.sub_(before))
    return left
