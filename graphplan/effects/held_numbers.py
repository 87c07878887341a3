"""Attributes that a step sets to numbers which it reads from the device, or computes of owners' numbers, without any
need of their values.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from graphplan.effects.allowed import allowing, is_allowed
from graphplan.errors import HostEffectError, HostScalarError
from graphplan.owners.slots import Walk
from graphplan.tensors.deferred import NumberForm
from graphplan.trace.changes import same_value
from graphplan.trace.records import Trace


@dataclass(frozen=True, slots=True)
class HeldNumber:
    """A Python number that every step computes by ``form`` from what it reads or finds; replays compute it, too."""

    path: str
    form: NumberForm

    @classmethod
    def find(cls, first: Trace, second: Trace, walk: Walk, allow: Iterable[str]) -> tuple[HeldNumber, ...]:
        """Numbers that both traces computed alike, and that no code reads. Others are refused."""
        found = []
        for path in {**first.changes.scalars, **second.changes.scalars}:
            forms = [trace.changes.scalars.get(path, (None, None))[1] for trace in (first, second)]
            if is_allowed(path, allow) or not any(isinstance(form, NumberForm) for form in forms):
                continue
            scalar = walk.scalars.get(path)
            is_tracked = first.symbolic.tracks(path) and second.symbolic.tracks(path)
            if scalar is not None and not is_tracked and second.reads.uses(scalar):
                raise HostScalarError(
                    f"the step's code reads {path}, which it also sets to what it reads or computes; a replay "
                    f"would act on one value for ever. Keep it in a tensor, or read it outside the step; or, "
                    f"{allowing(path)}",
                    path=path,
                )
            if not same_value(*forms) or path not in second.entry_scalars:
                raise HostEffectError(
                    f"the step sets {path} to what it reads or computes in one call, and to something else, or from "
                    "other numbers, in the next, or it is not there before the step; a replay does the same each time. "
                    "Set it to a number before the first step, keep it in a tensor, or compute it after the step from "
                    f"what that returns; or, {allowing(path)}",
                    path=path,
                )
            found.append(cls(path, forms[1]))
        return tuple(found)


def is_read_number(change: tuple[Any, Any] | None) -> bool:
    """Return True if a change of a Python value ends with a number that was read from the device."""
    return change is not None and isinstance(change[1], NumberForm)
