"""Python values that a step changes: counters, repeated assignments, computed numbers, and settings left changed."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from types import CodeType
from typing import Any

from torch.amp.grad_scaler import OptState
from torch.optim import Optimizer

from graphplan.effects.allowed import allowing, describe
from graphplan.effects.container_names import ContainerNames
from graphplan.effects.trace_pair import TracePair
from graphplan.errors import HostEffectError, HostScalarError
from graphplan.observe.bytecode import plain_instructions
from graphplan.owners.flags import is_assignable
from graphplan.owners.slots import Scalar
from graphplan.owners.tensor_metadata import ABSENT
from graphplan.owners.views import ComputedItem, GroupCounts
from graphplan.tensors.deferred import NumberForm
from graphplan.trace.changes import same_value
from graphplan.trace.records import Trace

_STORES = ("STORE_SUBSCR", "COPY", "DUP_TOP_TWO")
"""Instructions that follow the key in ``x[key] = 0`` and ``x[key] += 1``."""


def find_counters(pair: TracePair) -> dict[str, int | float]:
    """Return the amounts by which every step raises numbers that no code reads, by path. Refuse other changes."""
    counters: dict[str, int | float] = {}
    for path, old, new in pair.changed("scalars"):
        if is_read_number(old) or is_read_number(new) or pair.remakes(path) or pair.replaces(path):
            continue
        if any(isinstance(value, OptState) for value in (*(old or ()), *(new or ()))):
            raise HostEffectError(
                f"the step changes {path} ({describe(new)}): a part of the gradient scaler's work is outside the "
                "step, and a replay does not update the scaler's progress. Expected unscale_, step and update all "
                "inside the step, or all outside it: move them together"
            )
        delta = _constant_delta(old, new)
        scalar = pair.walk.scalars.get(path)
        component = scalar.component if scalar else "step"
        is_item = scalar is not None and _is_item_of_optimizer(scalar)
        is_read = scalar is not None and not pair.tracks(path) and _is_read(scalar, pair.second)
        if delta is not None and is_read:
            whose, fix = "the step's", "Count in a tensor, or move the counter and its use out of the step"
            if component == "optimizer":
                whose = "the optimizer's"
                fix = "Move optimizer.step() out of the step (in a Trainer, graphplan does this)"
            raise HostScalarError(
                f"{whose} code reads {path}, which it also increases ({describe(old)}, then {describe(new)}); a "
                f"replay would always use one value. {fix}, or, {allowing(path)}",
                component=component,
                path=path,
            )
        # Names in code do not tell whether an item is raised or set, but two traces do.
        is_item_set = pair.first is not pair.second and same_value(old, new)
        is_set = is_item_set if is_item else scalar is not None and scalar.key in pair.second.reads.assigned
        is_set &= not all(path in trace.symbolic.counted for trace in pair.both)
        if delta is None or is_set:
            raise HostEffectError(
                f"the step changes {path} in Python ({describe(old)}, then {describe(new)}), but a replay runs no "
                "Python. Expected a number that `+=` increases by the same amount each time, or a list that grows. "
                "Keep it in a tensor, update it outside the step, or, if replays may leave it unchanged, pass "
                f"allow=({path!r},)",
                component=component,
                path=path,
            )
        counters[path] = delta
    return counters


def _constant_delta(old: tuple[Any, Any] | None, new: tuple[Any, Any] | None) -> int | float | None:
    if old is None or new is None:
        return None
    values = (*old, *new)
    if not all(isinstance(value, int | float) and not isinstance(value, bool) for value in values):
        return None
    delta: int | float = old[1] - old[0]
    repeats = old[0] + delta == old[1] and new[0] + delta == new[1]
    return delta if repeats else None


def _is_item_of_optimizer(scalar: Scalar) -> bool:
    """Return True if ``scalar`` is an item of an optimizer's state or parameter group, which code reads by its key."""
    if isinstance(scalar.owner, GroupCounts):
        return True
    if not isinstance(scalar.owner, Optimizer) or scalar.container is vars(scalar.owner):
        return False
    return isinstance(scalar.container, Mapping) and isinstance(scalar.key, str)


def _is_read(scalar: Scalar, trace: Trace) -> bool:
    if not _is_item_of_optimizer(scalar):
        return trace.reads.uses(scalar)
    return any(_uses_item(code, scalar.key) for code, _ in trace.reads.codes)


def _uses_item(code: CodeType, key: str) -> bool:
    """Return True if ``code`` uses ``key``, spelt out, for more than ``x[key] += 1``, ``x[key] = 0``, ``key in x``."""
    steps = plain_instructions(code) if key in code.co_consts else []
    loads = [index for index, step in enumerate(steps) if step.opname == "LOAD_CONST" and step.argval == key]
    following = [[after.opname for after in steps[index + 1 : index + 3]] for index in loads]
    return any(after[0] not in _STORES and after[1:] != ["CONTAINS_OP"] for after in following)


def find_assignments(pair: TracePair, changed: Collection[str]) -> dict[str, Any]:
    """Return unchanged values, by path, that methods of an object may have assigned (a metric's ``_computed = None``)
    or that are in objects that each step makes anew, and constants in the place of numbers that no code needs.

    The next eager step resets such a value if it was changed between two steps, so a replay resets it too.
    """
    found: dict[str, Any] = {}
    for path, scalar in pair.walk.scalars.items():
        is_read_only = not scalar.is_stored_here or isinstance(scalar.container, (ComputedItem, tuple))
        if path in changed or pair.allows(path) or is_read_only:
            continue
        if pair.remakes(path) or pair.replaces(path) or all(trace.reads.may_store(scalar) for trace in pair.both):
            found[path] = scalar.get()
    return found


def find_left_flags(pair: TracePair) -> dict[str, Any]:
    """Return modes, flags, parameter-group values and torch's switches that both traces change alike. Refuse others.

    The calls that a program serves begin with the same settings, so they end with the same ones: replays set these.
    """
    left: dict[str, Any] = {}
    for path, one, two in pair.changed("flags"):
        if one is None or two is None or not same_value(one[1], two[1]):
            rates = " (each replay reads the current learning rate)" if path.endswith(".lr") else ""
            raise HostEffectError(
                f"the step changes {path} in one way on one call ({describe(one)}) and in another way on the next "
                f"({describe(two)}), but a replay always sets the same value. Set it outside the step{rates}, restore "
                f"it within the step, or, if replays may leave it unchanged, pass allow=({path!r},)",
                path=path,
            )
        if two[1] is ABSENT or not is_assignable(path, two[1]):
            raise HostEffectError(
                f"the step changes {path} ({describe(two)}) and does not restore it, but graphplan cannot set it "
                "after a replay. Restore it within the step, for example by a with statement, or, if replays may "
                f"leave it unchanged, pass allow=({path!r},)",
                path=path,
            )
        left[path] = two[1]
    return left


def find_numbers(pair: TracePair) -> dict[str, NumberForm]:
    """Return numbers, by path, that all steps compute alike and no code reads: replays compute them. Refuse others."""
    found: dict[str, NumberForm] = {}
    containers = ContainerNames(pair)
    for path, old, new in pair.changed("scalars"):
        if not (is_read_number(old) or is_read_number(new)):
            continue
        scalar = pair.walk.scalars.get(path)
        is_used = scalar is not None and not pair.tracks(path) and pair.second.reads.uses(scalar)
        if scalar is not None and is_used and not containers.only_writes(scalar):
            raise HostScalarError(
                f"the step's code reads {path}, which it also sets to a number that it reads from a tensor or "
                "computes; a replay would always use one value. Keep it in a buffer: if the step reads the buffer "
                "before it changes it (int(self.pointer)), each of a few values gets a program. Or read it outside "
                f"the step; or, {allowing(path)}",
                path=path,
            )
        is_there = path in pair.second.entry_scalars and new is not None and new[0] is not ABSENT
        if old is None or new is None or not same_value(old[1], new[1]) or not is_there:
            raise HostEffectError(
                f"the step sets {path} to a number that it reads from a tensor or computes, but to something else, or "
                f"from other numbers, in the next call, or {path} does not exist before the step; a replay does the "
                "same each time. Set it to a number before the first step, keep it in a tensor, or compute it after "
                f"the step from the step's result; or, {allowing(path)}",
                path=path,
            )
        found[path] = new[1]
    return found


def is_read_number(change: tuple[Any, Any] | None) -> bool:
    """Return True if a Python value was changed to a number that was read from the device."""
    return change is not None and isinstance(change[1], NumberForm)
