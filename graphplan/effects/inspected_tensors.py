"""Tensors of which the step's code may tell what they are like, though no operator works with them."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from typing import Any

from graphplan.effects.allowed import allowing, is_allowed
from graphplan.effects.appended_lists import AppendedLists
from graphplan.errors import HostScalarError
from graphplan.owners.slots import Scalar, Walk
from graphplan.owners.tensor_metadata import GONE, THERE, difference, is_there
from graphplan.specs.paths import Of, names
from graphplan.trace.changes import same_value
from graphplan.trace.records import Trace


def find_inspected(
    first: Trace,
    second: Trace,
    walk: Walk,
    reads: Iterable[str],
    allow: Iterable[str],
    appended: AppendedLists,
    *,
    loose: bool,
) -> dict[str, Any]:
    """What tensors are like of which the step's code may have read no more than that, by path. ``reads`` are the paths
    of Python values that are compared anyway. ``loose``: of a tensor that was another kind of one before each of the
    steps, it only matters that it is there. Code also names what a branch uses that no step takes; if results depend on
    it, the first check says so.

    Raises:
        HostScalarError: for what was another kind of thing before each of the steps.
    """
    lists = _loose_lists(walk, reads)
    found = {}
    for path, scalar in _untouched(first, second, walk):
        if id(scalar.container) in lists or is_allowed(path, allow) or appended.hides(path, scalar):
            continue
        sure = any(trace.reads.covers(scalar) for trace in (first, second))
        is_owned = scalar.container is not None
        if not sure and not (is_owned and any(trace.reads.may_cover(scalar) for trace in (first, second))):
            continue
        old, new = (_at_entry(trace, path) for trace in (first, second))
        passes = _passes_through(scalar)
        if is_there(old) and is_there(new) and (loose or passes or same_value(old, new)):
            found[path] = THERE if passes or not same_value(old, new) else new
        elif not same_value(old, new) and sure and old is not GONE and new is not GONE:
            what, was, now = difference(path, old, new)
            raise HostScalarError(
                f"the step's code reads {what}, which is {was} before one step and {now} before the next; a replay "
                "would keep one. Leave it what it is, look at it outside the step, or, "
                f"{allowing(path)}",
                path=path,
            )
    return found


def changed_metadata(first: Trace, second: Trace, walk: Walk, allow: Iterable[str]) -> str | None:
    """The first tensor that became another kind of thing between two traces, and the code may tell, described;
    or None.
    """
    for path, scalar in _untouched(first, second, walk):
        old, new = (_at_entry(trace, path) for trace in (first, second))
        differ = not same_value(old, new) and (is_there(old) != is_there(new) or not _passes_through(scalar))
        if not differ or old is GONE or new is GONE or is_allowed(path, allow):
            continue
        if any(trace.reads.covers(scalar) for trace in (first, second)):
            what, was, now = difference(path, old, new)
            return f"{what} was {was} one step before and is {now}"
    return None


def _untouched(first: Trace, second: Trace, walk: Walk) -> Iterator[tuple[str, Scalar]]:
    """Places that hold tensors, or held some when the first trace began, with which neither step does anything."""
    touched = {*first.changes.rebindings, *second.changes.rebindings}
    for trace in (first, second):
        touched.update(slot.path for storage in trace.externals for slot in trace.entry_slots.get(storage, ()))
    for path, slot in walk.slots.items():
        if path not in touched and slot.get() is not None:
            yield path, slot
    for path in (first.entry_metadata.keys() & walk.scalars.keys()) - touched:
        yield path, walk.scalars[path]


def _passes_through(scalar: Scalar) -> bool:
    """Whether it does not matter what a tensor is like: what lies in deques is of another size one day."""
    return isinstance(scalar.container, deque)


def _at_entry(trace: Trace, path: str) -> Any:
    """What lay at ``path`` when the trace began: metadata, or a Python value."""
    return trace.entry_metadata.get(path, trace.entry_scalars.get(path, GONE))


def _loose_lists(walk: Walk, reads: Iterable[str]) -> set[int]:
    """Lists and dictionaries whose items come and go: those whose lengths are not compared."""
    lengths = walk.objects.keys() - set(reads)
    return {id(walk.objects[path].container.items) for path in lengths if names(path, Of.LENGTH)}
